"""What a pipeline run shows in Prefect: the privacy card as a page, the metrics as a table."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from tasks.closing import closing


def publish(root: Path) -> str:
    """Make the Prefect artifacts `privacy-card` and `metrics` from the results in `root`; returns them in a line."""
    card = json.loads((root / "artifacts" / "privacy_card.json").read_text(encoding="utf-8"))
    create_markdown_artifact(markdown_of(card), key="privacy-card", description="what the guarantee is")
    rows = closing(root).rows()
    create_table_artifact(
        [{"what": name, "value": text} for name, text in rows], key="metrics", description="result and budget"
    )
    return ", ".join(f"{name}: {text}" for name, text in rows)


def markdown_of(card: Mapping[str, Any]) -> str:
    """A privacy card as Markdown: a heading for each part, a list of its fields."""
    parts = ["# Privacy card"]
    for part, content in card.items():
        if isinstance(content, Mapping):
            parts += ["", f"## {_title(part)}", "", *(_line(name, value) for name, value in content.items())]
    single = [_line(name, value) for name, value in card.items() if not isinstance(value, Mapping)]
    return "\n".join([*parts, "", "## Fields", "", *single, ""])


def _line(name: str, value: object) -> str:
    text = value if isinstance(value, str) else f"`{json.dumps(value)}`"
    return f"- {_title(name)}: {text}"


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()

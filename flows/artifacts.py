"""What a pipeline run shows in Prefect: the privacy card as a page, the metrics as a table."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from tasks.closing import Closing, closing


def publish(root: Path) -> Closing:
    """Make the Prefect artifacts `privacy-card` and `metrics` from the results in `root`, log and return them."""
    card = json.loads((root / "artifacts" / "privacy_card.json").read_text(encoding="utf-8"))
    result = closing(root)
    create_markdown_artifact(markdown_of(card), key="privacy-card", description="what the guarantee is")
    table = [{"what": name, "value": text} for name, text in result.rows()]
    create_table_artifact(table, key="metrics", description="result and budget")
    for name, text in result.rows():
        get_run_logger().info("%s: %s", name, text)
    return result


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

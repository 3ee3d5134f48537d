"""The winner of a search at Weights & Biases: what its card states, and nothing of the other trials."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.config.params import Tracking
from tasks.tracking.session import Mode, safely, session


def log_winner(receipt: Mapping[str, Any], folder: Path, settings: Tracking, *, root: Path) -> None:
    """Logs the winner in `folder`; a failure costs a line of the log."""
    card = json.loads((folder / "privacy_card.json").read_text(encoding="utf-8"))
    config = {name: card["mechanism"][name] for name in ("algorithm", "settings", "steps")}
    summary = {"epsilon": card["setting"]["epsilon"], "delta": card["setting"]["delta"]}

    def log(mode: Mode) -> None:
        with session(
            settings,
            mode,
            job_type="search",
            group=f"{receipt['dataset']} searches",
            name=receipt["run_id"],
            config=config,
            run_id=receipt["run_id"],
        ) as logged:
            logged.summary.update(summary)

    safely(log, settings, "the winner", root)

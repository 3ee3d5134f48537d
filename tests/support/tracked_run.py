"""Tracks a synthetic run whole, in a process of its own: live curve, steps, report, promotion."""

import json
import logging
import sys
from pathlib import Path

import pandas as pd

from algorithms.privacy.card import load
from algorithms.privacy.documents import PlanDocument
from data import DatasetInfo
from tasks.config.params import Tracking
from tasks.reporting import History
from tasks.reporting.figures import CostsByStep
from tasks.tracking.live import live_curve
from tasks.tracking.runs import FinishedRun, log_promotion, log_report, log_run

MODEL = "visits"
HISTORY = History(
    blocks=pd.DataFrame(
        {
            "block": ["2026-W01", "2026-W02"],
            "spent_epsilon": [0.75, 2.0],
            "spent_delta": [1e-6, 2e-6],
            "cap_epsilon": [2.0, 2.0],
            "cap_delta": [1e-5, 1e-5],
            "retired": [False, True],
        }
    ),
    retrainings=pd.DataFrame(
        {
            "period": ["2026-W01", "2026-W02"],
            "outcome": ["promoted", "failed | twice"],
            "run_id": ["20260101T030000-11111111", None],
            "epsilon": [0.75, None],
            "quality": [0.625, None],
            "blocks": ["2026-W01", "2026-W01, 2026-W02"],
        }
    ),
)


def finished(root: Path) -> FinishedRun:
    """The finished run below `root`, as the report stage has it."""
    artifacts = root / "artifacts"
    card = load(artifacts / "privacy_card.json")
    return FinishedRun(
        card,
        json.loads((artifacts / "metrics.json").read_bytes()),
        pd.read_parquet(artifacts / "trace.parquet"),
        DatasetInfo.from_json((root / "datasets/prepared/public.json").read_text(encoding="utf-8")),
        CostsByStep([10, card.mechanism.steps], [0.5, card.setting.epsilon or 0.0]),
    )


def main() -> None:
    """`python -m tests.support.tracked_run ROOT MODE`; writes what each part returned as JSON."""
    root, settings = Path(sys.argv[1]), Tracking.model_validate({"mode": sys.argv[2]})
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    run, plan = (
        finished(root),
        PlanDocument.from_json((root / "artifacts/plan.json").read_bytes(), "plan.json"),
    )
    run_id = run.card.evidence.run_id
    with live_curve(run_id, plan, settings, group=run_id, root=root) as tell:
        for step in range(plan.steps):
            tell(step + 1, 0.05 * (step + 1), 0.75)
    found = [
        log_run(run, settings, artifacts=root / "artifacts", root=root),
        log_report(run, HISTORY, settings, root=root),
        log_promotion(MODEL, root / "models" / run_id, settings, root=root),
        log_run(run, settings, artifacts=root / "artifacts", root=root)
        if settings.mode == "online"
        else None,
    ]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()

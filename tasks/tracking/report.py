"""The report of a run at Weights & Biases: saved there online, a file of the same content offline.

The page that the report stage writes stays the first; this has its numbers as tables, and curves over the runs there.
"""

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.groups import Tracking
from tasks.history import History
from tasks.tracking.lineage import TRAIN
from tasks.tracking.runs import HISTORY, STEP, SUMMARY, Finished
from tasks.tracking.session import Mode, safely, valid
from tasks.tracking.tables import sections

if TYPE_CHECKING:
    import wandb_workspaces.reports.v2.interface as wr

_LONGEST_TITLE = 128
_log = logging.getLogger(__name__)


def log_report(run: Finished, history: History, settings: Tracking, *, root: Path) -> str | None:
    """Saves the report and returns its URL, or writes report-RUN_ID.json among W&B's own files and returns its path.

    The file is no output of the report stage, since it is not there where tracking is disabled. It keeps the report's
    id, so that a report that is made again takes the place of the old one. None where nothing was saved; a failure
    costs one line of the log.
    """
    saved: list[str] = []
    safely(lambda mode: saved.append(_save(run, history, settings, mode)), settings, "the report", root)
    return saved[0] if saved else None


def _save(run: Finished, history: History, settings: Tracking, mode: Mode) -> str:
    path = Path(os.environ["WANDB_DIR"]) / f"report-{valid(run.card.evidence.run_id)}.json"
    built = report(run, history, settings, mode)
    if mode == "online":
        built.id = json.loads(path.read_bytes())["id"] if path.is_file() else ""
        built.save()
    # There is no public way to the document that `save` sends.
    model = built._to_model()  # type: ignore[no-untyped-call]
    path.write_text(model.model_dump_json(by_alias=True, exclude_none=True, indent=1), encoding="utf-8")
    place = built.url if mode == "online" else str(path)
    _log.info("W&B report: %s", place)
    return place


def report(run: Finished, history: History, settings: Tracking, mode: Mode) -> "wr.Report":
    """The report, not saved. Online, W&B is asked whose it is, unless the settings say."""
    import wandb  # here, since they take most of a second and may not be wanted
    import wandb_workspaces.reports.v2.interface as wr

    entity = settings.entity or (wandb.Api().default_entity if mode == "online" else None) or ""
    blocks: list[wr.BlockTypes] = []
    grids = _grids(run, entity if mode == "online" else "", settings.project)
    for key, section in sections(run, history).items():
        blocks += [wr.H2(section.heading), wr.MarkdownBlock(section.text)]
        blocks += [grids[key]] if key in grids else []
    setting = run.card.setting
    title = f"Privacy of {run.card.mechanism.algorithm} on {setting.dataset}, run {run.card.evidence.run_id}"
    return wr.Report(
        project=settings.project,
        entity=entity,
        title=title[:_LONGEST_TITLE],
        description=setting.statement,
        blocks=blocks,
        width="fluid",
    )


def _grids(run: Finished, entity: str, project: str) -> dict[str, "wr.PanelGrid"]:
    """The panels of some sections. entity: empty for runs of wherever the report is."""
    import wandb_workspaces.reports.v2.interface as wr
    from wandb_workspaces import expr

    def runs(name: str, *filters: "expr.FilterExpr") -> "wr.Runset":
        trained = expr.Metric("JobType") == TRAIN
        return wr.Runset(entity, project if entity else "", name, filters=expr.And(trained, *filters))

    this = runs("this run", expr.Metric("Group") == run.card.evidence.run_id)
    _, epsilon, bound, *noise = HISTORY
    accuracy, total = SUMMARY[0], SUMMARY[2]
    against = wr.ScatterPlot(
        title="Accuracy against epsilon", x=wr.SummaryMetric(total), y=wr.SummaryMetric(accuracy)
    )
    return {
        "epsilon": wr.PanelGrid(
            [this], panels=[wr.LinePlot(title="Epsilon so far", x=STEP, y=[epsilon, bound])]
        ),
        "noise": wr.PanelGrid([this], panels=[wr.LinePlot(title=name, x=STEP, y=[name]) for name in noise]),
        "accuracy": wr.PanelGrid([runs("all runs")], panels=[against]),
    }

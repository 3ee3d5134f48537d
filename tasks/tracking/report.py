"""The report of a run at Weights & Biases: saved there online, or as a file with the same content offline.

The main report is the page of the report stage. This one has the same numbers as Markdown tables, complete without a
server, and curves over the runs at W&B.
"""

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from algorithms.privacy.card import PrivacyCard, text
from algorithms.privacy.card.text import SO_FAR, statement
from tasks.config.params import Tracking
from tasks.reporting.history import History
from tasks.runs.quality import measure, quality, tracked
from tasks.tracking.runs import HISTORY, STEP, SUMMARY, TRAIN, Finished
from tasks.tracking.session import safely, valid

if TYPE_CHECKING:
    import wandb_workspaces.reports.v2.interface as wr

_MOST_ROWS, _LONGEST_TITLE = 24, 128
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Section:
    """A heading and the markdown below it."""

    heading: str
    text: str


def sections(run: Finished, history: History) -> Mapping[str, Section]:
    """The report's sections, in order: card, epsilon, blocks, noise, accuracy, retrainings."""
    return {
        "card": Section("Privacy card", _card(run.card)),
        "epsilon": Section("Epsilon over time", _epsilon(run)),
        "blocks": Section("Epsilon by block", _blocks(history.blocks)),
        "noise": Section("Noise trace", _noise(run.trace)),
        "accuracy": Section(
            f"{measure(run.metrics).capitalize()} against epsilon", _accuracy(run, history.retrainings)
        ),
        "retrainings": Section("Retraining history", _retrainings(history)),
    }


def _card(card: PrivacyCard) -> str:
    setting, accounting, mechanism = card.setting, card.accounting, card.mechanism
    rows = [
        ("epsilon, delta", f"{_cell(setting.epsilon)}, {_cell(setting.delta)}"),
        ("protects", f"{text.one(card).removesuffix(',')}, {setting.adjacency.replace('_', ' ').lower()}"),
        ("not protected", " ".join(text.not_protected(card))),
        ("population", setting.population),
        ("its cap and what is left", f"{_amount(card, 'cap')}; {_amount(card, 'remaining')}"),
        ("algorithm", f"{mechanism.algorithm}, {mechanism.steps} steps"),
        ("accountant", f"{accounting.accountant}, {accounting.library} {accounting.library_version}"),
        ("noise", text.noise(card)),
        ("run", card.evidence.run_id),
        ("signed by", "nobody" if card.signature is None else card.signature.public_key),
    ]
    return f"{text.statement(card)}\n\n{_table(('', ''), rows)}"


def _amount(card: PrivacyCard, name: str) -> str:
    amount = getattr(card.accounting.population, name)
    return f"epsilon {_cell(amount.epsilon)}, delta {_cell(amount.delta)}"


def _epsilon(run: Finished) -> str:
    if not run.curve.steps:
        return "There is no noise, so epsilon is infinite."
    rows = zip(run.curve.steps, run.curve.epsilon, strict=True)
    found = _table(("steps", "epsilon so far"), rows)
    return found if run.card.accounting.composition.kind == "schedule" else f"{found}\n\n{SO_FAR}"


def _noise(trace: pd.DataFrame) -> str:
    """A table of consecutive equal releases; if there are many, evenly spaced ones are shown."""
    columns = ["kind", "sampling_rate", "clip_norm", "noise_multiplier", "noise_std"]
    begins = np.flatnonzero((trace[columns] != trace[columns].shift()).any(axis=1))
    counts = np.diff(np.append(begins, len(trace)))
    shown = _spread(len(begins))
    first = trace.iloc[begins[shown]]
    rows = zip(first["step"] + 1, counts[shown], *(first[name] for name in columns), strict=True)
    return _table(("from step", "releases", *(name.replace("_", " ") for name in columns)), rows)


def _blocks(blocks: pd.DataFrame) -> str:
    if blocks.empty:
        return "The ledger told of no blocks."
    columns = ["block", "spent_epsilon", "cap_epsilon", "spent_delta", "cap_delta", "retired"]
    return _frame(blocks[columns])


def _accuracy(run: Finished, retrainings: pd.DataFrame) -> str:
    own, known = run.card.evidence.run_id, retrainings.dropna(subset=["quality"])
    rows = known.loc[known["run_id"] != own, ["run_id", "epsilon", "quality"]].to_numpy().tolist()
    rows.append([own, run.card.setting.epsilon, quality(run.metrics)])
    return _table(("run", "epsilon", f"{measure(run.metrics)} on held-out records"), rows)


def _retrainings(history: History) -> str:
    if history.retrainings.empty:
        return "There was no scheduled retraining yet."
    return _frame(history.retrainings.rename(columns={"quality": history.measure}))


def _frame(frame: pd.DataFrame) -> str:
    """The last rows of a table, which are the newest, with a note about rows that are not shown."""
    shown = frame.tail(_MOST_ROWS)
    left_out = len(frame) - len(shown)
    note = f"\n\n{left_out} earlier rows are not shown." if left_out else ""
    return _table([str(name).replace("_", " ") for name in shown], shown.to_numpy()) + note


def _spread(count: int) -> NDArray[np.int64]:
    """Evenly spaced indices of `count` items, including the first and the last."""
    places: NDArray[np.int64] = np.linspace(0, count - 1, min(count, _MOST_ROWS)).round().astype(np.int64)
    return places


def _table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [_line(columns), _line("---" for _ in columns), *(_line(map(_cell, row)) for row in rows)]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    """A table cell: numbers have six digits, and an unknown value is a dash."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def log_report(run: Finished, history: History, settings: Tracking, *, root: Path) -> str | None:
    """Save the report and return its URL, or write report-RUN_ID.json among W&B's own files and return its path.

    The file is not an output of the report stage, since it does not exist if tracking is disabled. It keeps the
    report's id, so that a new version replaces the old one. Returns None if nothing was saved; a failure costs one line
    of the log.
    """
    saved: list[str] = []
    safely(lambda: saved.append(_save(run, history, settings)), settings, "the report", root)
    return saved[0] if saved else None


def _save(run: Finished, history: History, settings: Tracking) -> str:
    path = Path(os.environ["WANDB_DIR"]) / f"report-{valid(run.card.evidence.run_id)}.json"
    built = report(run, history, settings)
    if settings.mode == "online":
        built.id = json.loads(path.read_bytes())["id"] if path.is_file() else ""
        built.save()
    # There is no public API for the document that `save` sends.
    model = built._to_model()  # type: ignore[no-untyped-call]
    path.write_text(model.model_dump_json(by_alias=True, exclude_none=True, indent=1), encoding="utf-8")
    place = built.url if settings.mode == "online" else str(path)
    _log.info("W&B report: %s", place)
    return place


def report(run: Finished, history: History, settings: Tracking) -> "wr.Report":
    """Build the report without saving it. Online, W&B is asked for the entity unless the settings name it."""
    import wandb  # here, since the imports take most of a second and may not be needed
    import wandb_workspaces.reports.v2.interface as wr

    entity = settings.entity or (wandb.Api().default_entity if settings.mode == "online" else None) or ""
    blocks: list[wr.BlockTypes] = []
    grids = _grids(run, entity if settings.mode == "online" else "", settings.project)
    for key, section in sections(run, history).items():
        blocks += [wr.H2(section.heading), wr.MarkdownBlock(section.text)]
        blocks += [grids[key]] if key in grids else []
    setting = run.card.setting
    title = f"Privacy of {run.card.mechanism.algorithm} on {setting.dataset}, run {run.card.evidence.run_id}"
    return wr.Report(
        project=settings.project,
        entity=entity,
        title=title[:_LONGEST_TITLE],
        description=statement(run.card),
        blocks=blocks,
        width="fluid",
    )


def _grids(run: Finished, entity: str, project: str) -> dict[str, "wr.PanelGrid"]:
    """The panels of some sections. entity: if empty, the runs are those next to the report."""
    import wandb_workspaces.reports.v2.interface as wr
    from wandb_workspaces import expr

    def runs(name: str, *filters: "expr.FilterExpr") -> "wr.Runset":
        trained = expr.Metric("JobType") == TRAIN
        return wr.Runset(entity, project if entity else "", name, filters=expr.And(trained, *filters))

    this = runs("this run", expr.Metric("Group") == run.card.evidence.run_id)
    _, epsilon, bound, *noise = HISTORY
    against = wr.ScatterPlot(
        title=f"{measure(run.metrics).capitalize()} against epsilon",
        x=wr.SummaryMetric(SUMMARY[2]),
        y=wr.SummaryMetric(tracked(run.metrics)),
    )
    return {
        "epsilon": wr.PanelGrid(
            [this], panels=[wr.LinePlot(title="Epsilon so far", x=STEP, y=[epsilon, bound])]
        ),
        "noise": wr.PanelGrid([this], panels=[wr.LinePlot(title=name, x=STEP, y=[name]) for name in noise]),
        "accuracy": wr.PanelGrid([runs("all runs")], panels=[against]),
    }

"""Log finished runs to Weights & Biases, with their inputs, outputs and a report; offline by default.

What is sent about a run is selected by name from the privacy card, the held-out metrics and the noise trace. Nothing
else can be included: no source code, no facts about the machine, no console output, and nothing about training records
without noise. A promoted model is sent again with its card. For a search only the winner is sent. Runs on public
records, as in a comparison, are sent as a group with complete tables and figures.

The report of a run has the numbers of the report stage's page as Markdown tables, complete without a server, and curves
over the runs at W&B. It is saved there online, or as a file with the same content offline.
"""

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from algorithms.plain_text import for_markdown
from algorithms.privacy.card import PrivacyCard, load, text
from algorithms.privacy.card.text import SO_FAR, statement
from data import DatasetInfo
from tasks.config.params import Tracking
from tasks.reporting import History
from tasks.reporting.figures import CostsByStep
from tasks.runs.metrics import headline_metric, metric_name, private_estimates, rare_classes, tracker_key
from tasks.runs.metrics_document import Metrics, is_private
from tasks.runs.store import EVALUATION
from tasks.tracking import artifact_name, group_of, reason, safely, session

if TYPE_CHECKING:
    import wandb
    import wandb_workspaces.reports.v2.interface as wr

TRAIN = "train"
_FILES = {
    "plan": "plan.json",
    "model": "model.safetensors",
    "trace": "trace.parquet",
    "card": "privacy_card.json",
    "evaluation": EVALUATION,
}
STEP = "privacy/step"
EPSILON = ("privacy/epsilon", "privacy/epsilon_so_far")
NOISE = ("privacy/noise_std", "privacy/noise_multiplier")
"""The beginnings of keys, each followed by the kind of a release, such as privacy/noise_std/gradient."""
EPSILON_TOTAL = "privacy/epsilon_total"
ALIAS = "serving"
REGISTRY = "wandb-registry-model"
_PROMOTED_FILES = ("model.safetensors", "privacy_card.json")
_MAX_ROWS, _MAX_SHOWN, _MAX_TITLE, _MAX_TAG, _SECONDS_TO_SEND = 2000, 24, 128, 64, 60
_log = logging.getLogger(__name__)


def use(logged: "wandb.Run", artifact: "wandb.Artifact") -> None:
    """Declare an input of the run; the same content under the same name is the artifact of another run.

    `use_artifact` does the same, but does not work offline.
    """
    logged._log_artifact(artifact, is_user_created=True, use_after_commit=True)


def file_artifact(kind: str, card: PrivacyCard, folder: Path) -> "wandb.Artifact":
    """The plan, model, trace, card or evaluation of a run, from the folder of its files."""
    import wandb

    name = artifact_name(f"{kind}-{card.mechanism.algorithm}-{card.setting.dataset}")
    artifact = wandb.Artifact(name, kind, metadata={"run_id": card.evidence.run_id})
    artifact.add_file(str(folder / _FILES[kind]), skip_cache=True)
    return artifact


def _dataset(info: DatasetInfo) -> "wandb.Artifact":
    """The data set by name, with its public description; its records are not sent."""
    import wandb

    described = json.loads(info.to_json())
    artifact = wandb.Artifact(artifact_name(f"dataset-{info.dataset}"), "dataset", metadata=described)
    artifact.add_reference(f"dataset://{info.dataset}", name="description", checksum=False)
    return artifact


@dataclass(frozen=True)
class FinishedRun:
    """A finished pipeline run: its card, held-out metrics, noise trace, data description and epsilon over steps."""

    card: PrivacyCard
    metrics: Metrics
    trace: pd.DataFrame
    info: DatasetInfo
    curve: CostsByStep


def log_run(run: FinishedRun, settings: Tracking, *, artifacts: Path, root: Path) -> bool:
    """Log a finished run; returns whether it was logged. A failure costs only one line of the log.

    artifacts: folder of the run's files. root: the checkout, below which W&B's own files are written.
    """
    folder = artifacts.absolute()
    return safely(lambda: _log_run(run, settings, folder), settings, "this run", root)


def _log_run(run: FinishedRun, settings: Tracking, artifacts: Path) -> None:
    """Continue the run that training showed live, if there is one.

    A W&B run for each stage would have only artifacts to show, and make five lines of one run in every list.
    """
    run_id = run.card.evidence.run_id
    with session(
        settings,
        run_id=run_id,
        group=_group(run.card),
        job_type=TRAIN,
        name=_name(run.card),
        config=config(run.card),
        tags=_tags(run.card),
    ) as logged:
        use(logged, _dataset(run.info))
        for kind in _FILES:
            if kind == "evaluation" and EVALUATION not in run.card.evidence.files:
                continue
            logged.log_artifact(file_artifact(kind, run.card, artifacts))
        _log_curves(logged, run)
        for name, frame in curve_tables(run.metrics).items():
            logged.log({f"test/{name}": _table(frame)})
        logged.summary.update(dict(summary(run.metrics, run.card)))


def _log_curves(logged: "wandb.Run", run: FinishedRun) -> None:
    logged.define_metric(STEP, hidden=True)
    logged.define_metric("privacy/*", step_metric=STEP)
    # Rows that an earlier report of the same run has logged exist already.
    last = logged.summary.get(STEP, 0)  # type: ignore[no-untyped-call]
    for row in history(run):
        if row[STEP] > last:
            logged.log(row)


def _name(card: PrivacyCard) -> str:
    epsilon = card.setting.epsilon
    promise = "not private" if epsilon is None else f"epsilon {epsilon:.3g}"
    return f"{card.mechanism.algorithm} on {card.setting.dataset}, {promise}"


def _group(card: PrivacyCard) -> str:
    is_on_blocks = card.accounting.blocks is not None
    return group_of(card.evidence.run_id, card.setting.population, is_on_blocks=is_on_blocks)


def _tags(card: PrivacyCard) -> tuple[str, ...]:
    """The data set, the method and whether the run is private, cut to the length that W&B allows."""
    setting = card.setting
    names = (setting.dataset, card.mechanism.algorithm, "private" if setting.private else "not private")
    return tuple(name[:_MAX_TAG] for name in names)


def config(card: PrivacyCard) -> dict[str, object]:
    """The run's settings."""
    of_setting = ("dataset", "population", "public_records", "unit", "adjacency", "delta", "private")
    of_mechanism = ("algorithm", "settings", "steps", "noise_multiplier", "sampling_rate", "divisor")
    return {
        "run_id": card.evidence.run_id,
        **{name: getattr(card.setting, name) for name in of_setting},
        **{name: getattr(card.mechanism, name) for name in of_mechanism},
        "model": card.mechanism.model.model_dump(),
        "target_epsilon": card.accounting.target.epsilon,
        "accountant": card.accounting.accountant,
        "composition": card.accounting.composition.kind,
        "noise_is_secret": card.implementation.noise == "secure",
    }


def history(run: FinishedRun) -> Iterator[dict[str, float]]:
    """Cost and noise by step: STEP, EPSILON and, for each kind of release of the step, NOISE.

    At most about 2000 rows, since the whole trace is an artifact. A number that is infinite or unknown at a step is
    left out. No cost is above the run's own, of which its first releases are a part.
    """
    total = math.inf if run.card.setting.epsilon is None else run.card.setting.epsilon
    cost = run.trace.groupby("step")["epsilon"].last()
    cost = cost.where(np.isinf(cost), cost.clip(upper=total))
    noise = run.trace.groupby(["step", "kind"])[["noise_std", "noise_multiplier"]].last()
    of_step: dict[int, list[tuple[str, list[float]]]] = {}
    for (step, kind), *values in noise.itertuples():
        of_step.setdefault(step, []).append((kind, values))
    accounted = dict(zip(run.curve.steps, run.curve.epsilon, strict=True))
    evenly = np.linspace(0, len(cost) - 1, min(len(cost), _MAX_ROWS)).round().astype(int)
    for step in sorted({*cost.index[evenly], *(step - 1 for step in accounted)}):
        numbers = dict(zip(EPSILON, (accounted.get(step + 1, math.inf), cost[step]), strict=True))
        for kind, values in of_step[step]:
            numbers |= {f"{name}/{kind}": value for name, value in zip(NOISE, values, strict=True)}
        finite = {key: float(value) for key, value in numbers.items() if np.isfinite(value)}
        yield {STEP: float(step + 1)} | finite


def curve_tables(metrics: Metrics) -> dict[str, pd.DataFrame]:
    """The calibration curve and the metrics at thresholds of private held-out records, each with its interval."""
    if not is_private(metrics):
        return {}
    curves = {"calibration": metrics.get("calibration"), "thresholds": metrics.get("thresholds")}
    return {
        name: pd.json_normalize(map(dict, rows), sep="_") for name, rows in curves.items() if rows is not None
    }


def summary(metrics: Metrics, card: PrivacyCard) -> Mapping[str, object]:
    """The results: every metric of the target on the held-out records, and the guarantee.

    Of private held-out records each has the ends of its interval beside it, and their epsilon. Where classes are
    uneven, share, recall and precision of the rarest one are among them.
    """
    setting = card.setting
    rarest = next(iter(rare_classes(metrics).values()), None)
    estimates_of_rarest = (
        {}
        if rarest is None
        else {"share": rarest["share"], "recall": rarest["recall"], "precision": rarest["precision"]}
    )
    rare = {
        f"test/rare_{name}": estimate["value"]
        for name, estimate in estimates_of_rarest.items()
        if estimate is not None
    }
    guarantee = {
        EPSILON_TOTAL: setting.epsilon,
        "privacy/delta": setting.delta,
        "privacy/private": setting.private,
        "test/held_out": "private" if is_private(metrics) else "declared public",
    }
    if is_private(metrics):
        estimates = {
            f"test/{name.removeprefix('test_')}{end}": value
            for name, estimate in private_estimates(metrics).items()
            if estimate is not None
            for end, value in (
                ("", estimate["value"]),
                ("_low", estimate["low"]),
                ("_high", estimate["high"]),
            )
        }
        return estimates | rare | guarantee | {"test/epsilon": metrics["evaluation_epsilon"]}
    held_out = {
        f"test/{name.removeprefix('test_')}": score
        for name, score in metrics.items()
        if (name.startswith("test_") or name == "calibration_error") and isinstance(score, float)
    }
    gain = {f"test/gain_{end}": value for end, value in metrics.get("gain", {}).items()}
    return {tracker_key(metrics): headline_metric(metrics)} | held_out | gain | rare | guarantee


@dataclass(frozen=True)
class GroupMember:
    """A finished run of a group. images: PNG files. files: the files of an artifact."""

    job_type: str
    config: Mapping[str, object]
    summary: Mapping[str, object]
    tables: Mapping[str, pd.DataFrame]
    images: Mapping[str, Path] = field(default_factory=dict)
    files: Sequence[Path] = ()


def log_group(group: str, members: Sequence[GroupMember], settings: Tracking, *, root: Path) -> bool:
    """Log finished runs as one group; returns whether it was logged. A failure costs one line of the log."""

    def log() -> None:
        for member in members:
            _log_member(group, member, settings)

    return safely(log, settings, "this group", root)


def _log_member(group: str, member: GroupMember, settings: Tracking) -> None:
    import wandb

    with session(
        settings,
        group=group,
        job_type=member.job_type,
        name=f"{group}: {member.job_type}",
        config=member.config,
    ) as logged:
        images = {name: wandb.Image(str(path)) for name, path in member.images.items()}
        logged.log({name: _table(frame) for name, frame in member.tables.items()} | images)
        logged.summary.update(dict(member.summary))
        if member.files:
            artifact = wandb.Artifact(artifact_name(f"comparison-{group}"), "comparison")
            for path in member.files:
                artifact.add_file(str(path), skip_cache=True)
            logged.log_artifact(artifact)


def _table(frame: pd.DataFrame) -> "wandb.Table":
    """A table for W&B; unknown values are empty."""
    import wandb

    rows = frame.astype(object).where(frame.notna(), None)
    return wandb.Table(columns=[str(name) for name in rows.columns], data=rows.to_numpy())


def log_promotion(name: str, entry: Path, settings: Tracking, *, root: Path) -> bool:
    """Log the promotion of a model; returns whether it was logged. A failure costs one line of the log.

    name: name of the models. entry: the model's folder. root: the checkout. Online, the model is also linked in the
    registry of models under its name and with the same alias; if there is no registry or it refuses, that costs only
    one line.
    """
    folder = entry.absolute()
    return safely(lambda: _log_to(name, folder, settings), settings, "this promotion", root)


def _log_to(name: str, entry: Path, settings: Tracking) -> None:
    import wandb

    promoted = load(entry / "privacy_card.json")
    with session(
        settings,
        group=_group(promoted),
        job_type="promotion",
        name=f"{name}: {entry.name}",
        config={"name": name, "run_id": entry.name},
        tags=_tags(promoted),
    ) as logged:
        use(logged, file_artifact("model", promoted, entry))
        artifact = wandb.Artifact(artifact_name(name), "model", metadata={"run_id": entry.name})
        for file in _PROMOTED_FILES:
            artifact.add_file(str(entry / file), skip_cache=True)
        logged.log_artifact(artifact, aliases=["latest", ALIAS])
        if settings.mode == "online":
            _register(logged, artifact, artifact_name(name))


def _register(logged: "wandb.Run", artifact: "wandb.Artifact", name: str) -> None:
    try:
        artifact.wait(timeout=_SECONDS_TO_SEND)
        logged.link_artifact(artifact, f"{REGISTRY}/{name}", aliases=[ALIAS])
    except Exception as error:
        _log.warning("W&B's registry did not take %s, which serves without it: %s", name, reason(error))


def log_winner(folder: Path, settings: Tracking, *, root: Path) -> bool:
    """Log the winner of a search, which is in `folder`, like any other run; returns whether it was logged.

    A failure costs one line of the log. There are no metrics: what held-out records say of a winner is not part of it.
    """
    folder = folder.absolute()
    return safely(lambda: _log_winner(folder, settings), settings, "the winner", root)


def _log_winner(folder: Path, settings: Tracking) -> None:
    card = load(folder / _FILES["card"])
    with session(
        settings,
        run_id=card.evidence.run_id,
        group=f"{card.setting.dataset} searches",
        job_type="search",
        name=_name(card),
        config=config(card),
        tags=_tags(card),
    ) as logged:
        for kind in ("trace", "card"):
            logged.log_artifact(file_artifact(kind, card, folder))
        guarantee = {EPSILON_TOTAL: card.setting.epsilon, "privacy/delta": card.setting.delta}
        logged.summary.update(guarantee | {"privacy/private": card.setting.private})


def sections(run: FinishedRun, history: History) -> Mapping[str, tuple[str, str]]:
    """The report's sections, in order, each a heading and the Markdown below it."""
    against = f"{_metric_title(run.metrics)} against epsilon"
    return {
        "card": ("Privacy card", _card(run.card)),
        "epsilon": ("Epsilon over time", _epsilon(run)),
        "blocks": ("Epsilon by block", _blocks(history.blocks)),
        "noise": ("Noise trace", _noise(run.trace)),
        "accuracy": (against, _accuracy(run, history.retrainings)),
        "retrainings": ("Retraining history", _retrainings(history)),
    }


def _metric_title(metrics: Metrics) -> str:
    name = metric_name(metrics)
    return name[0].upper() + name[1:]


def _card(card: PrivacyCard) -> str:
    setting, accounting, mechanism = card.setting, card.accounting, card.mechanism
    rows = [
        ("epsilon, delta", f"{_cell(setting.epsilon)}, {_cell(setting.delta)}"),
        (
            "protects",
            f"{text.unit_in_words(card).removesuffix(',')}, {setting.adjacency.replace('_', ' ').lower()}",
        ),
        ("not protected", " ".join(text.not_protected(card))),
        ("population", setting.population),
        ("its cap and what is left", f"{_amount(card, 'cap')}; {_amount(card, 'remaining')}"),
        ("algorithm", f"{mechanism.algorithm}, {mechanism.steps} steps"),
        ("accountant", f"{accounting.accountant}, {accounting.library} {accounting.library_version}"),
        ("noise", text.noise(card)),
        ("run", card.evidence.run_id),
        ("signed by", "nobody" if card.signature is None else card.signature.public_key),
    ]
    return f"{for_markdown(text.statement(card))}\n\n{_markdown(('', ''), rows)}"


def _amount(card: PrivacyCard, name: str) -> str:
    amount = getattr(card.accounting.population, name)
    return f"epsilon {_cell(amount.epsilon)}, delta {_cell(amount.delta)}"


def _epsilon(run: FinishedRun) -> str:
    if not run.curve.steps:
        return "There is no noise, so epsilon is infinite."
    rows = zip(run.curve.steps, run.curve.epsilon, strict=True)
    table = _markdown(("steps", "epsilon so far"), rows)
    return table if run.card.accounting.composition.kind == "schedule" else f"{table}\n\n{SO_FAR}"


def _noise(trace: pd.DataFrame) -> str:
    """A table of consecutive equal releases; if there are many, evenly spaced ones are shown."""
    columns = ["kind", "sampling_rate", "clip_norm", "noise_multiplier", "noise_std"]
    begins = np.flatnonzero((trace[columns] != trace[columns].shift()).any(axis=1))
    counts = np.diff(np.append(begins, len(trace)))
    shown = _spread(len(begins))
    first = trace.iloc[begins[shown]]
    rows = zip(first["step"] + 1, counts[shown], *(first[name] for name in columns), strict=True)
    return _markdown(("from step", "releases", *(name.replace("_", " ") for name in columns)), rows)


def _blocks(blocks: pd.DataFrame) -> str:
    if blocks.empty:
        return "The ledger told of no blocks."
    columns = ["block", "spent_epsilon", "cap_epsilon", "spent_delta", "cap_delta", "retired"]
    return _frame(blocks[columns])


def _accuracy(run: FinishedRun, retrainings: pd.DataFrame) -> str:
    run_id, scored = run.card.evidence.run_id, retrainings.dropna(subset=["quality"])
    rows = scored.loc[scored["run_id"] != run_id, ["run_id", "epsilon", "quality"]].to_numpy().tolist()
    rows.append([run_id, run.card.setting.epsilon, headline_metric(run.metrics)])
    return _markdown(("run", "epsilon", f"{metric_name(run.metrics)} on held-out records"), rows)


def _retrainings(history: History) -> str:
    if history.retrainings.empty:
        return "There was no scheduled retraining yet."
    return _frame(history.retrainings.rename(columns={"quality": history.metric}))


def _frame(frame: pd.DataFrame) -> str:
    """The last rows of a table, which are the newest, with a note about rows that are not shown."""
    shown = frame.tail(_MAX_SHOWN)
    left_out = len(frame) - len(shown)
    note = f"\n\n{left_out} earlier rows are not shown." if left_out else ""
    return _markdown([str(name).replace("_", " ") for name in shown], shown.to_numpy()) + note


def _spread(count: int) -> NDArray[np.int64]:
    """Evenly spaced indices of `count` items, including the first and the last."""
    indices: NDArray[np.int64] = np.linspace(0, count - 1, min(count, _MAX_SHOWN)).round().astype(np.int64)
    return indices


def _markdown(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
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
    return for_markdown(" ".join(text.split()))


def log_report(run: FinishedRun, history: History, settings: Tracking, *, root: Path) -> str | None:
    """Save the report and return its URL, or write report-RUN_ID.json among W&B's own files and return its path.

    The file is not an output of the report stage, since it does not exist if tracking is disabled. It keeps the
    report's id, so that a new version replaces the old one. Returns None if nothing was saved; a failure costs one line
    of the log.
    """
    saved: list[str] = []
    safely(lambda: saved.append(_save(run, history, settings)), settings, "the report", root)
    return saved[0] if saved else None


def _save(run: FinishedRun, history: History, settings: Tracking) -> str:
    path = Path(os.environ["WANDB_DIR"]) / f"report-{artifact_name(run.card.evidence.run_id)}.json"
    built = report(run, history, settings)
    if settings.mode == "online":
        built.id = json.loads(path.read_bytes())["id"] if path.is_file() else ""
        built.save()
    # There is no public API for the document that `save` sends.
    model = built._to_model()  # type: ignore[no-untyped-call]
    path.write_text(model.model_dump_json(by_alias=True, exclude_none=True, indent=1), encoding="utf-8")
    address = built.url if settings.mode == "online" else str(path)
    _log.info("W&B report: %s", address)
    return address


def report(run: FinishedRun, history: History, settings: Tracking) -> "wr.Report":
    """Build the report without saving it. Online, W&B is asked for the entity unless the settings name it."""
    import wandb  # here, since the imports take most of a second and may not be needed
    import wandb_workspaces.reports.v2.interface as wr

    entity = settings.entity or (wandb.Api().default_entity if settings.mode == "online" else None) or ""
    blocks: list[wr.BlockTypes] = []
    grids = _grids(run, entity if settings.mode == "online" else "", settings.project)
    for key, (heading, below) in sections(run, history).items():
        blocks += [wr.H2(heading), wr.MarkdownBlock(below)]
        blocks += [grids[key]] if key in grids else []
    setting = run.card.setting
    title = f"Privacy of {run.card.mechanism.algorithm} on {setting.dataset}, run {run.card.evidence.run_id}"
    return wr.Report(
        project=settings.project,
        entity=entity,
        title=title[:_MAX_TITLE],
        description=statement(run.card),
        blocks=blocks,
        width="fluid",
    )


def _grids(run: FinishedRun, entity: str, project: str) -> dict[str, "wr.PanelGrid"]:
    """The panels of some sections. entity: if empty, the runs are those next to the report."""
    import wandb_workspaces.reports.v2.interface as wr
    from wandb_workspaces import expr

    def runs(name: str, *filters: "expr.FilterExpr") -> "wr.Runset":
        trained = expr.Metric("JobType") == TRAIN
        return wr.Runset(entity, project if entity else "", name, filters=expr.And(trained, *filters))

    this = runs("this run", expr.Config("run_id") == run.card.evidence.run_id)
    kinds = list(dict.fromkeys(run.trace["kind"]))
    against = wr.ScatterPlot(
        title=f"{_metric_title(run.metrics)} against epsilon",
        x=wr.SummaryMetric(EPSILON_TOTAL),
        y=wr.SummaryMetric(tracker_key(run.metrics)),
    )
    return {
        "epsilon": wr.PanelGrid(
            [this], panels=[wr.LinePlot(title="Epsilon so far", x=STEP, y=list(EPSILON))]
        ),
        "noise": wr.PanelGrid(
            [this],
            panels=[
                wr.LinePlot(title=name, x=STEP, y=[f"{name}/{kind}" for kind in kinds]) for name in NOISE
            ],
        ),
        "accuracy": wr.PanelGrid([runs("all runs")], panels=[against]),
    }

"""The report stage: make the privacy card, its verification, the figures and the page from the stages' results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import TypeAdapter

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.filters import FIXED
from algorithms.privacy.accounting.risk import Profile, risk_profile
from algorithms.privacy.card import (
    PrivacyCard,
    RunRecord,
    build,
    load,
    public_key_of,
    verify,
)
from algorithms.privacy.documents import DataFacts, PlanDocument, Receipt
from data import DatasetInfo
from tasks.config import home, params
from tasks.csv_files import read_csv, write_csv
from tasks.reporting import (
    AuditSummary,
    BesideTheCard,
    History,
    drawings,
    history,
    history_variables,
    is_on_blocks,
    newest_audit,
    nothing,
    page,
    risk_of,
    score,
    shape_drawings,
)
from tasks.reporting.column_summaries import summaries_of
from tasks.reporting.figures import (
    CostsByStep,
    Drawing,
    Picture,
    calibration_figure,
    class_figure,
    confusion_figure,
    correlated_figure,
    epsilon_figure,
    noise_figure,
    picture,
    risk_figure,
)
from tasks.reporting.shapes import explanation_of, optimizer_in
from tasks.runs.checkout import require_pulled
from tasks.runs.metrics_document import Metrics, is_private, read_metrics
from tasks.runs.signing import signing_key
from tasks.runs.software import reuse_note
from tasks.runs.stage_main import main_of
from tasks.runs.store import check_data_facts, check_run_facts
from tasks.tracking import is_logged, note_logged, safely
from tasks.tracking import runs as tracking
from tasks.tracking.runs import log_report

READS = ("tracking",)
CARD, PAGE = "privacy_card.json", "report.html"
_REQUIRED_FILES = (
    "plan.json",
    "receipt.json",
    "metrics.json",
    "trace.parquet",
    "model.safetensors",
    "plots/confusion.csv",
    "plots/per_class.csv",
)
_POINTS = 24
_COURSE = TypeAdapter(list[tuple[int, float, float]])
"""Of correlated noise: after how many steps, the noise in the parameters, and that of independent steps."""


_BY_CLASS = ("confusion", "per_class")
"""The figures of single classes; each is a file, but not on a page that has none to show."""


@dataclass(frozen=True)
class RunResults:
    """Results of the earlier stages. pairs, classes: confusion.csv and per_class.csv. trace: one row per release."""

    plan: PlanDocument
    receipt: Receipt
    metrics: Metrics
    info: DatasetInfo
    trace: pd.DataFrame
    pairs: pd.DataFrame
    classes: pd.DataFrame


@dataclass(frozen=True)
class Report:
    """A card and its page.

    curve: epsilon after selected steps; empty for a run without noise. history: earlier runs on the same blocks; empty
    for a run on a whole population. pictures: the figures of the run itself, by name.
    """

    run: RunResults
    card: PrivacyCard
    curve: CostsByStep
    history: History
    pictures: Mapping[str, Picture]
    page: str


def report(*, artifacts: Path, prepared: Path, root: Path) -> Report:
    """Write privacy_card.json, report.html, plots/*.png and plots/epsilon.csv into `artifacts`.

    Figures of the history are only on the page, since DVC cannot track files that exist only sometimes. prepared:
    folder with public.json. root: the checkout. Raises RefusedError if the card would be incomplete or does not match
    the files, if the description of the data has changed since training, if the metrics are of another run, or if the
    ledger of a run on blocks cannot be read; then there is no card and no page.
    """
    # Files of an earlier run must not be mistaken for this one's, whatever fails below.
    for name in (CARD, PAGE):
        (artifacts / name).unlink(missing_ok=True)
    run = _read(artifacts, prepared)
    check_data_facts(run.receipt, run.info)
    check_run_facts(run.metrics, run.receipt)
    audit = newest_audit(run.plan.algorithm, root)
    documents = compose(
        run, _past(run, root), folder=artifacts, draw=picture, key=signing_key(home()), audit=audit
    )
    (artifacts / CARD).write_bytes(documents.card.to_bytes())
    frame = pd.DataFrame({"step": documents.curve.steps, "epsilon": documents.curve.epsilon})
    write_csv(frame, artifacts / "plots" / "epsilon.csv")
    for name, drawn in documents.pictures.items():
        (artifacts / "plots" / f"{name}.png").write_bytes(drawn.wide)
    (artifacts / PAGE).write_text(documents.page, encoding="utf-8")
    return documents


def _past(run: RunResults, root: Path) -> History:
    """Earlier runs on the same blocks."""
    if not is_on_blocks(run.receipt):
        return nothing()
    from tasks.runs.ledger import open_ledger  # imports SQLAlchemy, which other runs do without

    return history(run.receipt, run.metrics, ledger=open_ledger(root), home=home(), root=root)


def compose(
    run: RunResults,
    past: History,
    *,
    folder: Path | None,
    draw: Callable[[Drawing, str], Picture],
    key: Ed25519PrivateKey | None,
    audit: AuditSummary | None = None,
) -> Report:
    """Make the card and the page of a run, without writing them.

    folder: the run's files, against which the card is checked; None skips that. key: the owner's key, or None for a
    card that is not published. audit: the newest audit of the method. Raises RefusedError if the card would be
    incomplete or does not verify.
    """
    card = build(RunRecord(run.plan, run.receipt, data_facts_of(run.info), run.trace), key)
    verification = verify(card, folder, key=None if key is None else public_key_of(key), unsigned=key is None)
    for check in verification.failures:
        raise RefusedError(
            "the files in artifacts are not those of one run ({check}: {detail});"
            " `dvc checkout` brings back those that belong together.",
            code="files_of_two_runs",
            check=check.name,
            detail=check.detail,
        )
    curve = epsilon_curve(run)
    promised = None
    if card.setting.epsilon is not None:
        promised = risk_profile(run.plan.filter, run.receipt.schedule, run.plan.adjacency)
    pictures = {name: draw(*drawing) for name, drawing in _drawings(run, curve, promised).items()}
    only_on_page = drawings(past) | _calibration(run.metrics)
    explanation = (
        None
        if folder is None
        else explanation_of(folder / "model.safetensors", optimizer_in(run.plan.settings), run.trace)
    )
    columns = () if folder is None else summaries_of(folder / "model.safetensors", run.trace)
    only_on_page |= shape_drawings(explanation)
    every = pictures | {name: draw(*drawing) for name, drawing in only_on_page.items()}
    if run.classes.empty:  # a private evaluation of a number, say, releases nothing by class
        every = {name: drawn for name, drawn in every.items() if name not in _BY_CLASS}
    result = score(run.metrics, run.classes)
    history_text = history_variables(past, read=len(run.receipt.blocks))
    ten_more = run.receipt.ledger.ten_more
    text = page(
        card,
        verification,
        result,
        every,
        history_text,
        BesideTheCard(
            risk=None if promised is None else risk_of(promised),
            attack=run.plan.attack,
            ten_more=None if ten_more is None else ten_more.epsilon,
            audit=audit,
            other_software=reuse_note(run.receipt, is_public=run.info.is_public),
            explanation=explanation,
            columns=columns,
        ),
    )
    return Report(run, card, curve, past, pictures, text)


def _calibration(metrics: Metrics) -> dict[str, tuple[Drawing, str]]:
    """The calibration curve, where private held-out records have one."""
    if not is_private(metrics) or "calibration" not in metrics:
        return {}
    points = metrics["calibration"]
    words = "The observed share by predicted probability, with 95% intervals."
    return {"calibration": (lambda theme: calibration_figure(points, theme=theme), words)}


def data_facts_of(info: DatasetInfo) -> DataFacts:
    """What a card states of the prepared data."""
    return DataFacts.model_validate_json(info.to_json())


def _noise(run: RunResults) -> Drawing:
    """The noise on each release; for correlated steps the noise in the parameters, which matters for them."""
    correlated = run.trace[run.trace["noise"] == "correlated"]
    course = _COURSE.validate_python(run.plan.method_params.get("course") or [])
    if correlated.empty or not course:
        return lambda theme: noise_figure(run.trace, theme=theme)
    share = correlated["clip_norm"].iloc[0] / correlated["divisor"].iloc[0]
    scaled = [(after, share * correlated_noise, share * other) for after, correlated_noise, other in course]
    return lambda theme: correlated_figure(scaled, theme=theme)


def _read(artifacts: Path, prepared: Path) -> RunResults:
    for path in (*(artifacts / name for name in _REQUIRED_FILES), prepared / "public.json"):
        if not path.is_file():
            raise RefusedError(
                "the report needs {path}, which is not there; run the stages before it.",
                code="missing_file",
                path=path,
            )
    classes = read_csv(artifacts / "plots" / "per_class.csv")
    return RunResults(
        plan=PlanDocument.read(artifacts / "plan.json"),
        receipt=Receipt.read(artifacts / "receipt.json"),
        metrics=read_metrics(artifacts / "metrics.json"),
        info=DatasetInfo.read(prepared),
        trace=pd.read_parquet(artifacts / "trace.parquet"),
        pairs=read_csv(artifacts / "plots" / "confusion.csv"),
        classes=classes.assign(
            accuracy=pd.to_numeric(classes["accuracy"]), records=classes["records"].astype(int)
        ),
    )


def epsilon_curve(run: RunResults) -> CostsByStep:
    """Epsilon of the releases so far, after at most 24 steps including the last one; empty without noise.

    It is the run's own account, which has the epsilon of some numbers of releases and is flat up to each of them, see
    `filters.CostCurve`: so it is taken after the last step of each value.
    """
    so_far, total = _trace_curve(run.trace), run.receipt.cost
    if total is None or not so_far.steps:
        return CostsByStep([], [])
    last_of_value = np.flatnonzero(np.append(np.diff(so_far.epsilon) > 0, True))
    evenly = np.linspace(0, len(so_far.steps) - 1, _POINTS)
    chosen = np.unique(last_of_value[np.searchsorted(last_of_value, evenly)])
    costs = [so_far.epsilon[index] for index in chosen]
    if _is_fixed(run):
        costs = [*(min(cost, total) for cost in costs[:-1]), total]
    return CostsByStep([so_far.steps[index] for index in chosen], costs)


def _is_fixed(run: RunResults) -> bool:
    """Whether the releases were fixed in advance, rather than chosen adaptively under a filter."""
    return run.plan.filter == FIXED


def _trace_curve(trace: pd.DataFrame) -> CostsByStep:
    """The cost after each step according to the trace, which counts steps from 0; empty if it is infinite."""
    costs = trace[np.isfinite(trace["epsilon"])].groupby("step")["epsilon"].last()
    return CostsByStep([int(step) + 1 for step in costs.index], [float(cost) for cost in costs])


def overall_accuracy(metrics: Metrics, classes: pd.DataFrame) -> float:
    """The share of right answers: for private records an estimate, which noisy counts by class do not add up to."""
    # Counts are all 0 if no held-out text has a word.
    counts = classes["records"]
    if is_private(metrics) and (estimate := metrics.get("test_accuracy")) is not None:
        return estimate["value"]
    return float((classes["accuracy"].fillna(0.0) * counts).sum() / max(1, counts.sum()))


def _drawings(
    run: RunResults, curve: CostsByStep, promised: Profile | None
) -> dict[str, tuple[Drawing, str]]:
    """The figures by name, each with its alternative text."""
    target = run.plan.target.epsilon
    names, is_fixed = list(run.classes["class"]), _is_fixed(run)
    overall = overall_accuracy(run.metrics, run.classes)
    spent = (
        f"The privacy spent rises to {curve.epsilon[-1]:.3g}."
        if curve.epsilon
        else "There is no privacy to spend."
    )
    return {
        "epsilon": (
            lambda theme: epsilon_figure(curve, target=target, theme=theme, is_fixed=is_fixed),
            spent,
        ),
        "risk": (
            lambda theme: risk_figure(promised, theme=theme),
            "What the best attacker recognises, by false alarms.",
        ),
        "noise": (_noise(run), "The noise on each release, by step."),
        "confusion": (
            lambda theme: confusion_figure(run.pairs, names, theme=theme),
            "Real classes against the model's answers.",
        ),
        "per_class": (
            lambda theme: class_figure(run.classes, overall=overall, theme=theme),
            "Right answers for each class.",
        ),
    }


def track(root: Path) -> str:
    """Log the run in the checkout at `root` at W&B, unless that was done before; returns what was done, as a clause.

    The run's report must be there. A failure costs one line of the log; the next call logs the run.
    Raises RefusedError without a report, and ParamsRefusedError for settings that cannot be used.
    """
    artifacts = root / "artifacts"
    require_pulled(artifacts / CARD)
    settings = params.load(root / "params.yaml", reads=READS).tracking
    if not (artifacts / CARD).is_file():
        raise RefusedError(
            "there is no finished run in {folder}; `epsilonflow run` makes one.",
            code="no_run",
            folder=root.absolute(),
        )
    card, prepared = load(artifacts / CARD), root / "datasets" / "prepared"
    name = f"run {card.evidence.run_id}"
    if not (prepared / "public.json").is_file():
        raise RefusedError(
            "{name} was brought here without its data set, whose description is logged with it; run `epsilonflow"
            " track` in the checkout that trained it.",
            code="no_run",
            name=name,
        )
    run = _read(artifacts, prepared)
    if settings.mode == "disabled":
        return f"{name} is not logged at W&B, as tracking is disabled"
    if is_logged(card.evidence.run_id, settings, root):
        return f"{name} is logged at W&B already, {settings.mode}"
    drawn = read_csv(artifacts / "plots" / "epsilon.csv")
    curve = CostsByStep(drawn["step"].astype(int).tolist(), drawn["epsilon"].astype(float).tolist())
    finished = tracking.FinishedRun(card, run.metrics, run.trace, run.info, curve)
    if not tracking.log_run(finished, settings, artifacts=artifacts, root=root):
        return f"{name} is not logged at W&B; `epsilonflow track` tries again"
    checkout = root.absolute()
    safely(
        lambda: note_logged(card.evidence.run_id, settings, checkout), settings, "a note of this run", root
    )
    log_report(finished, _past(run, root), settings, root=root)
    return f"{name} is logged at W&B, {settings.mode}"


def main() -> None:
    """`python -P -m tasks.report`, in a checkout."""
    report(artifacts=Path("artifacts"), prepared=Path("datasets/prepared"), root=Path())
    track(Path())


if __name__ == "__main__":
    main_of(main)

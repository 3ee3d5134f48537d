"""The calibrate stage: compute from public values alone how much noise the run needs and what it will cost."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tasks.runs.plan_ahead import read_offer
from tasks.runs.stage_main import main_of

PREPARED, PLAN_FILE = Path("datasets/prepared"), Path("artifacts/plan.json")


def _write(content: bytes) -> None:
    PLAN_FILE.parent.mkdir(exist_ok=True)
    PLAN_FILE.write_bytes(content)


# As a stage, use the plan that the command made ahead, if it did, before the imports below, which take two seconds.
if __name__ == "__main__" and (made := read_offer(PREPARED)) is not None:
    main_of(partial(_write, made))
    raise SystemExit

from dp_accounting.dp_event import DpEvent
from pydantic import JsonValue

from algorithms import models
from algorithms.core.calibration import check_delta, plan_composed_evaluation, plan_evaluation
from algorithms.core.method import Algorithm
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.errors import RefusedError
from algorithms.evaluation import HistogramSpec, histogram_for
from algorithms.evaluation.histogram import BINARY, MULTICLASS, Groups, HistogramKind
from algorithms.extension import is_own, source_digest
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE
from algorithms.privacy.accounting.events import Schedule, count_same, on_disjoint_parts, schedule_to_json
from algorithms.privacy.accounting.filters import FIXED
from algorithms.privacy.accounting.risk import max_true_positive_rate, risk_profile
from algorithms.privacy.documents import PlanDocument, PlannedModel
from algorithms.privacy.ledger import ORDERS, WHOLE_POPULATION, Composition, Terms
from data import DatasetInfo
from data.targets import LabelType
from tasks.config import home, params
from tasks.config.params import Params
from tasks.planned_model import facts_and_notes
from tasks.runs.earlier_plans import earlier_plan, request_in, stated_model

READS = ("privacy", "features", "algorithm", "model")
_MIN_EPSILON, _MAX_EPSILON = 1e-4, 64.0
_SHARES_OF_OTHERS = {
    "nothing_to_shrink_to": ("shrink_share", "error_share"),
    "no_errors_to_follow": ("error_share",),
}
"""Settings that buy nothing of a model that is refused with them so."""
_SLACK = 1e-9
"""By so much, relatively, rounding may raise a price that is the same."""


def plan_for(settings: Params, info: DatasetInfo) -> Plan:
    """Plan the run that the parameters describe; spends nothing and reads no record.

    Raises:
        RefusedError: if delta is above 1/n; if the records are private and noise is seeded or diagnostics are
            requested; if noise is secret although the plan says that the run is not private; or if the algorithm's
            settings do not fit.
        ModelRefusedError: if the model does not fit.
    """
    privacy = settings.privacy
    check_delta(privacy.delta, info.records)
    _check_secret(privacy, info)
    facts, _ = facts_and_notes(settings, info)
    before = _releases_for_features(settings, info)

    def for_target(target: Target) -> Plan:
        return _plan_of(settings.algorithm, target, facts)

    def at(epsilon: float) -> Plan:
        return for_target(
            Target(Budget(epsilon, privacy.delta), privacy.accountant, privacy.count_noise, before)
        )

    if privacy.epsilon is not None:
        plan = at(privacy.epsilon)
    else:
        assert privacy.target is not None  # params.yaml has one of the two
        plan = _plan_for_attack(privacy.target, at)
    plan = _add_evaluation(plan, settings, info, for_target)
    if plan.not_private is not None and privacy.noise != "seeded":
        raise RefusedError(
            "secret noise would promise what does not hold: {problem} To reproduce it all the same,"
            " on public records, set privacy.noise to seeded.",
            code="bad_keys",
            problem=plan.not_private,
            keys=("privacy.noise",),
        )
    return plan


def _releases_for_features(settings: Params, info: DatasetInfo) -> tuple[tuple[DpEvent, int], ...]:
    """The releases before training from which features are learned, and how often each occurs."""
    if settings.features is None:
        return ()
    from algorithms.core.learned_features import schedule_of
    from tasks.model_building import features_for  # both import torch

    features = features_for(settings, info)
    assert features is not None
    return tuple(schedule_of(features, info.input_shape, info.records, settings.privacy.count_noise))


def _plan_of(algorithm: Algorithm[Any], target: Target, facts: PlanningFacts) -> Plan:
    """The algorithm's plan, without the releases that are of another model: of a shrinkage, or of errors.

    Their shares may stand in params.yaml since its features or its model were others, for which they were advised.
    """
    try:
        return algorithm.plan(target, facts)
    except RefusedError as refusal:
        if refusal.code not in _SHARES_OF_OTHERS:
            raise
        without = {name: None for name in _SHARES_OF_OTHERS[refusal.code] if hasattr(algorithm, name)}
        return replace(algorithm, **without).plan(target, facts)  # type: ignore[type-var]


def _add_evaluation(
    plan: Plan, settings: Params, info: DatasetInfo, for_target: Callable[[Target], Plan]
) -> Plan:
    """The plan with the evaluation of private held-out records; as it is where the data card declares them public."""
    wanted = settings.privacy.evaluation
    if info.holdout == "public":
        if wanted != params.EvaluationParams():
            raise RefusedError(
                "privacy.evaluation was given, and the held-out records of {dataset!r} are declared public, so"
                " that their exact metrics leave; leave it out, or say holdout: private in the data card.",
                code="bad_keys",
                dataset=info.dataset,
                keys=("privacy.evaluation", "holdout"),
            )
        return plan
    spec = _histogram(wanted, info)
    attack, adjacency = settings.privacy.target, plan.adjacency
    true_positive_ratio: list[Callable[[Schedule], float]] = []
    if attack is not None:
        true_positive_ratio = [
            lambda schedule: _true_positive_rate(attack, schedule, adjacency) / attack.caught
        ]
    if adjacency != ADD_OR_REMOVE_ONE.name:
        return plan_composed_evaluation(
            for_target, plan.target, spec, wanted=wanted.epsilon, ratios=true_positive_ratio
        )
    ratios: list[Callable[[Schedule], float]] = [*price_ratios(plan, info), *true_positive_ratio]
    return plan_evaluation(plan, spec, wanted=wanted.epsilon, ratios=ratios)


def _histogram(wanted: params.EvaluationParams, info: DatasetInfo) -> HistogramSpec:
    if wanted.recalibrate and info.per_person not in (None, 1) and info.rows_per_user is None:
        raise RefusedError(
            "privacy.evaluation.recalibrate was given, and each row of a person is a record of its own here, so that"
            " one person could both fit and judge a temperature; leave it out, or group_privacy in the data card.",
            code="bad_keys",
            keys=("privacy.evaluation.recalibrate", "person.group_privacy"),
        )
    return histogram_of(
        info.label_type,
        _groups(wanted.by, info),
        cross=wanted.cross,
        halves=wanted.recalibrate,
        compared=wanted.compare_with is not None,
    )


def histogram_of(
    label_type: LabelType,
    groups: Groups = (),
    *,
    cross: bool = False,
    halves: bool = False,
    compared: bool = False,
) -> HistogramSpec:
    """The histogram to release for a target; raises RefusedError if it would have too many cells, or no such halves."""
    kinds: dict[str, HistogramKind] = {"class": MULTICLASS, "number": "number", "count": "number"}
    kind = kinds.get(label_type.kind, "score")
    classes = len(label_type.names) if kind == MULTICLASS else 1
    try:
        return histogram_for(
            BINARY if classes == 2 else kind, classes, groups, cross, halves=halves, compared=compared
        )
    except ValueError as error:
        setting = (
            "privacy.evaluation.recalibrate" if halves and kind != MULTICLASS else "privacy.evaluation.by"
        )
        raise RefusedError(
            "the held-out records are private, and {problem}; change {setting}, or the target.",
            code="bad_keys",
            problem=str(error).removesuffix("."),
            setting=setting,
            keys=(setting,),
        ) from None


def _groups(columns: Sequence[str], info: DatasetInfo) -> Groups:
    """The declared values of columns by which metrics are given."""
    declared = {group.name: group.values for group in info.groups}
    for name in columns:
        if name not in declared or columns.count(name) > 1:
            raise RefusedError(
                "privacy.evaluation.by names {name!r}, {problem};"
                " the columns of declared categories are {columns}.",
                code="bad_keys",
                name=name,
                problem="twice" if name in declared else "which is no such column",
                columns=", ".join(declared) or "none, as of images and texts",
                keys=("privacy.evaluation.by",),
            )
    return tuple((name, declared[name]) for name in columns)


def _true_positive_rate(attack: params.AttackTarget, schedule: Schedule, adjacency: str) -> float:
    """The largest true positive rate of an attack at the false positive rate of the target."""
    return float(max_true_positive_rate(risk_profile(FIXED, schedule, adjacency), attack.false_alarms))


@dataclass(frozen=True)
class PriceRatio:
    """The price of a run with an evaluation over that without, in a ledger that adds up events' costs.

    Attributes:
        composition: Of the ledger: at one Rényi order, or zCDP.
        adjacency: Of the events.
        group_size: The number of records that a person may have in the run.
        trained: The events without an evaluation.
    """

    composition: Composition
    adjacency: str
    group_size: int
    trained: Schedule

    def __call__(self, schedule: Schedule) -> float:
        """The ratio where the evaluation has this schedule; raises RefusedError for events without a price."""
        is_of_one_record = self.group_size == 1
        with_evaluation = schedule if is_of_one_record else on_disjoint_parts(self.trained, schedule)
        return self._price(with_evaluation) / (self._price_without * (1 + _SLACK))

    @cached_property
    def _price_without(self) -> float:
        return self._price(self.trained)

    def _price(self, schedule: Schedule) -> float:
        return self.composition.events_price(schedule_to_json(schedule), self.adjacency, self.group_size)

    @property
    def has_price(self) -> bool:
        """Whether the composition has a price for the training; else it will not be chosen."""
        with suppress(RefusedError):
            return math.isfinite(self._price_without)
        return False


def price_ratios(plan: Plan, info: DatasetInfo) -> list[PriceRatio]:
    """What the run costs with an evaluation, over without one, by each composition that the population may have."""
    terms = Terms(info.is_public, Composition(), info.blocks_per_person)
    group_size = terms.group_size(info.blocks or (WHOLE_POPULATION,))
    compositions = [Composition("renyi", float(order)) for order in ORDERS]
    if info.composition_runs is None:
        compositions = [Composition(info.composition, info.composition_order)]
    trained = count_same(plan.reserved_schedule)
    ratios = [
        PriceRatio(composition, plan.adjacency, group_size, trained)
        for composition in compositions
        if composition.kind != "basic"
    ]
    return [ratio for ratio in ratios if ratio.has_price]


def _plan_for_attack(attack: params.AttackTarget, at: Callable[[float], Plan]) -> Plan:
    """Plan with the largest epsilon, to within half a percent, that keeps the attack to what is allowed."""
    low = high = 1.0
    plan = at(low)
    unreachable = RefusedError(
        "no noise keeps what an attacker recognises at {false_alarms:g}% false alarms below"
        " {caught:g}% here; set privacy.target.caught to more, or algorithm.steps to less.",
        code="target_unreachable",
        false_alarms=100 * attack.false_alarms,
        caught=100 * attack.caught,
    )
    while not meets_attack_target(plan, attack):
        low, high = low / 2, low
        if low < _MIN_EPSILON:
            raise unreachable
        try:
            plan = at(low)
        except RefusedError as error:
            raise (unreachable if error.code == "epsilon_below_orders" else error) from None
    while low == high < _MAX_EPSILON:
        if meets_attack_target(more := at(2 * high), attack):
            low, high, plan = 2 * high, 2 * high, more
        else:
            high = 2 * high
    while high > low * 1.005:
        middle = math.sqrt(low * high)
        if meets_attack_target(more := at(middle), attack):
            low, plan = middle, more
        else:
            high = middle
    return plan


def meets_attack_target(plan: Plan, attack: params.AttackTarget) -> bool:
    """Whether no attacker's true positive rate exceeds `caught` at a false positive rate of `false_alarms`."""
    return bool(
        max_true_positive_rate(risk_profile(plan.filter, plan.schedule, plan.adjacency), attack.false_alarms)
        <= attack.caught
    )


def calibrate(settings: Params, info: DatasetInfo) -> PlanDocument:
    """The plan as the document for artifacts/plan.json."""
    return document_of(plan_for(settings, info), settings, info)


def document_of(plan: Plan, settings: Params, info: DatasetInfo) -> PlanDocument:
    """The document of a plan: what it was made for, and the plan."""
    return _document(plan, settings, info, notes=facts_and_notes(settings, info)[1])


def check_plan(document: PlanDocument, settings: Params, info: DatasetInfo) -> None:
    """Check a plan's document against the parameters and the data.

    Raises RefusedError if it was made for other parameters, if its cost is less than that of its events, or if noise is
    seeded or diagnostics are requested for private records. The shipped code may be another than the plan was made by.
    """
    privacy, plan = settings.privacy, Plan.from_document(document)
    _check_secret(privacy, info)
    info.check_reader()
    budget = Budget(privacy.epsilon or plan.target.budget.epsilon, privacy.delta)
    target = replace(
        plan.target, budget=budget, accountant=privacy.accountant, count_noise=privacy.count_noise
    )
    expected = request_in(_document(replace(plan, target=target), settings, info))
    actual = request_in(document)
    differing = [key for key in expected.keys() | actual.keys() if expected.get(key) != actual.get(key)]
    if differing:
        raise RefusedError(
            "artifacts/plan.json was made for another {differing} than params.yaml and the data now have;"
            " run the calibrate stage again.",
            code="stale_plan",
            differing=min(differing),
        )
    if plan.facts != facts_and_notes(settings, info)[0]:
        raise RefusedError(
            "artifacts/plan.json was made for other public facts; run the calibrate stage again.",
            code="stale_plan",
            differing="public facts",
        )
    planned = None if plan.evaluation is None else plan.evaluation.spec
    is_private, wanted = info.holdout == "private", settings.privacy.evaluation
    if planned != (_histogram(wanted, info) if is_private else None):
        raise RefusedError(
            "artifacts/plan.json was made for other held-out records; run the calibrate stage again.",
            code="stale_plan",
            differing="held-out records",
        )
    if settings.privacy.target is not None and not meets_attack_target(plan, settings.privacy.target):
        raise RefusedError(
            "artifacts/plan.json does not withstand the attack in privacy.target; run the calibrate stage again.",
            code="stale_plan",
            differing="privacy.target",
        )
    plan.check()


def plan_of_earlier_run(
    document: PlanDocument, settings: Params, info: DatasetInfo, prepared: Path
) -> bytes | None:
    """The plan of an earlier run that asked for what `document` asks for, and that training takes today; or None."""
    return earlier_plan(
        document,
        settings.model,
        info,
        check=partial(check_plan, settings=settings, info=info),
        home=home(),
        prepared=prepared,
    )


def plan_in(artifacts: Path) -> bytes:
    """The bytes of the plan's document; raises RefusedError if there is none."""
    path = artifacts / "plan.json"
    if not path.is_file():
        raise RefusedError("{path} is not there; run the calibrate stage first.", code="no_plan", path=path)
    return path.read_bytes()


def model_files(chosen: params.ModelParams) -> dict[str, str]:
    """The SHA-256 of each file that a model is built from, by its key; raises ModelRefusedError if one is missing."""
    named = {key: value for key, value in chosen.all_settings.items() if key.endswith("_file")}
    named |= {"start": chosen.start}
    digests = {key: models.digest(Path(value)) for key, value in named.items() if isinstance(value, str)}
    checkpoint = chosen.all_settings.get("checkpoint")
    if not isinstance(checkpoint, str) or chosen.name not in ("huggingface", "timm"):
        return digests
    with models.public_folder(checkpoint) as folder:
        return digests | {f"checkpoint/{name}": models.digest(folder / name) for name in models.CHECKPOINT}


def _document(plan: Plan, settings: Params, info: DatasetInfo, *, notes: Sequence[str] = ()) -> PlanDocument:
    privacy = settings.privacy
    return PlanDocument(
        **dict(plan.to_document()),
        attack=None if privacy.target is None else privacy.target.model_dump(),
        algorithm=settings.algorithm_name,
        settings={key: value for key, value in settings.algorithm_settings.items() if key != "name"},
        features=dict(settings.features_settings) or {"name": "none"},
        code=_code(settings),
        model=PlannedModel(
            **stated_model(settings.model.model_dump()),
            files=model_files(settings.model),
            parameters=plan.facts.parameters,
            notes=tuple(notes),
        ),
        dataset=info.dataset,
        noise=privacy.noise,
        diagnostics=privacy.diagnostics,
        held_out=_evaluation_entries(privacy.evaluation) if info.holdout == "private" else None,
    )


def _evaluation_entries(wanted: params.EvaluationParams) -> dict[str, JsonValue]:
    """The evaluation that is asked for; the model compared with by its content, for no other gets the same noise."""
    entries: dict[str, JsonValue] = wanted.model_dump()
    if wanted.compare_with is not None:
        entries["compare_with"] = models.digest(Path(wanted.compare_with))
    return entries


def _code(settings: Params) -> dict[str, str]:
    """Digests of the source code that params.yaml names: the method, and features and model if they are the user's."""
    method = settings.algorithm_name
    named = {
        "algorithm": method if is_own(method) else type(settings.algorithm).__module__,
        "features": str(settings.features_settings.get("name", "none")),
        "model": settings.model.name,
    }
    return {what: source_digest(name) for what, name in named.items() if what == "algorithm" or is_own(name)}


def _check_secret(privacy: params.PrivacyParams, info: DatasetInfo) -> None:
    if privacy.noise == "seeded" and not info.is_public:
        raise RefusedError(
            "seeded noise protects nobody, and the records of {dataset!r} are private;"
            " set privacy.noise to secure.",
            code="bad_keys",
            dataset=info.dataset,
            keys=("privacy.noise",),
        )
    if privacy.diagnostics and not info.is_public:
        raise RefusedError(
            "diagnostics are computed from the records and shown without noise, and those of {dataset!r} are"
            " private; set privacy.diagnostics to false.",
            code="bad_keys",
            dataset=info.dataset,
            keys=("privacy.diagnostics",),
        )


def main() -> None:
    """`python -P -m tasks.calibrate`, in a checkout."""
    settings, info = params.load(Path("params.yaml"), reads=READS), DatasetInfo.read(PREPARED)
    document = calibrate(settings, info)
    _write(
        plan_of_earlier_run(document, settings, info, PREPARED) or document.to_text(sort_keys=True).encode()
    )


if __name__ == "__main__":
    main_of(main)

"""From what a run left to its card, and whether the noise trace beside a card agrees with it.

A cost is computed from events. Each row of the trace has the event of its release, and is compared with it: less noise,
or another sample, would be another release. An event has no clip norm, so noise is compared as a multiple of it.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

import dp_accounting.dp_event as dp
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from pydantic import JsonValue, ValidationError

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import epsilon
from algorithms.privacy.accounting.epsilon import ORDERS, adjacency_named
from algorithms.privacy.accounting.event_rules import rule_of
from algorithms.privacy.accounting.events import (
    Schedule,
    event_from_json,
    event_to_json,
    merge_neighbours,
    schedule_to_json,
)
from algorithms.privacy.accounting.filters import filter_to_json
from algorithms.privacy.card.schema import (
    ROUNDING,
    SCHEMA_VERSION,
    Accounting,
    Blocks,
    CompositionSection,
    Costs,
    Discretisation,
    Event,
    Evidence,
    FeaturesSection,
    Guarantee,
    Implementation,
    MechanismSection,
    ModelSection,
    PaperProtocolSection,
    PrivacyCard,
    QuerySection,
    SelectionSection,
    Setting,
    Span,
)
from algorithms.privacy.documents import Account, AdjacencyName, DataFacts, PlanDocument, Receipt, Section

_LIBRARY: Final = "dp-accounting"
_KINDS = ["kind", "sampling", "clipping", "noise"]
_RANGE_FIELDS = ["sampling_rate", "clip_norm", "noise_multiplier", "noise_std", "divisor"]
_CHECKED_FIELDS = ["event", *_KINDS, "sampling_rate", "noise_multiplier"]
_COUNT_TOLERANCE = 1e-3
"""Relative; how closely a trace's last epsilon so far agrees with the card's cost. The run counted it as its version
did, perhaps by another grid; it informs readers of the trace, and no cost is computed from it."""
_ROUNDING = 1e-9


_S = TypeVar("_S", bound=Section)


class Columns(Protocol):
    """A table by its columns: a mapping of arrays, or a DataFrame, which `card verify` does without for its time."""

    def __getitem__(self, name: str, /) -> Any:
        """The values of a column, in order."""


@dataclass(frozen=True)
class RunRecord:
    """What a finished run left.

    Attributes:
        plan: Its plan's document.
        receipt: What it cost, and where it ran.
        data: The public facts of its records.
        trace: The noise trace, by column.
    """

    plan: PlanDocument
    receipt: Receipt
    data: DataFacts
    trace: Columns


def build(run: RunRecord, key: Ed25519PrivateKey | None = None) -> PrivacyCard:
    """The card of a run, signed with the owner's key where there is one.

    Args:
        run: What the run left.
        key: The owner's; without it the card shows nobody who made it.

    Returns:
        The card, which `PrivacyCard.to_bytes` writes.

    Raises:
        RefusedError: Where something that the card must state is empty.
    """
    try:
        return _card(run).sign(key)
    except ValidationError as error:
        raise _incomplete(error) from None


def load(path: Path) -> PrivacyCard:
    """The card in a file, if it is one and complete; `verify` checks whether it holds.

    Args:
        path: Of a privacy_card.json.

    Returns:
        The card, whose form is right.

    Raises:
        RefusedError: If there is no such file, if it is no complete card, and if its bytes are not those that
            `PrivacyCard.to_bytes` writes.
    """
    try:
        content = path.read_bytes()
    except OSError:
        raise RefusedError(f"there is no file {path}; give the path of a privacy_card.json.") from None
    card = _validate(content, where=f" {path}")
    try:
        is_as_written = card.to_bytes() == content
    except ValueError:  # a number like 1e999 among the settings or events
        is_as_written = False
    if not is_as_written:
        raise RefusedError(
            f"the privacy card {path} was edited: its bytes are not those that its facts are written as; ask for"
            " the file that the run wrote."
        )
    return card


def load_beside(model: Path) -> PrivacyCard | None:
    """The card beside a model's file, or in a folder with one; None without a card. Raises RefusedError as `load`."""
    card = (model if model.is_dir() else model.parent) / "privacy_card.json"
    return load(card) if card.is_file() else None


def guarantee(*, cost: float | None, private_noise: bool, is_covered: bool) -> Guarantee:
    """What a run can promise; see `Guarantee` for the levels.

    cost: its epsilon, or None without a bound. is_covered: whether noise covers all that was shown.
    """
    if cost is None:
        return "none"
    if not private_noise:
        return "seeded"
    return "private" if is_covered else "diagnosed"


def mechanism_of(plan: PlanDocument) -> dict[str, object]:
    """The fields of a card's mechanism that a plan has decided."""
    method, model, files = plan.method_params, plan.model, dict(plan.model.files)
    features = dict(plan.features)
    return {
        "algorithm": plan.algorithm,
        "settings": plan.settings,
        "steps": plan.steps,
        "noise_multiplier": plan.noise_multiplier,
        "sampling_rate": plan.sampling_rate,
        "divisor": plan.divisor,
        "features": FeaturesSection(name=str(features.pop("name")), settings=features),
        "model": ModelSection(
            name=model.name,
            seed=model.seed,
            parameters=model.parameters,
            precision=model.precision,
            settings=model.settings,
            start=files.pop("start", None),
            files=files,
            reinitialize=model.reinitialize,
            frozen=model.freeze,
            augmentations=model.augmentations,
        ),
        "settings_from_records": plan.not_private is not None,
        "paper_protocol": _part(PaperProtocolSection, method.get("paper_protocol")),
        "selection_law": _part(SelectionSection, method.get("selection_law")),
    }


def _part(kind: type[_S], stated: JsonValue) -> _S | None:
    return None if stated is None else kind.model_validate_json(json.dumps(stated))


def composition_of(plan: PlanDocument) -> CompositionSection:
    """How a plan's releases add up."""
    return CompositionSection.model_validate(
        {"rho": None, "order": None, "limit": None, **filter_to_json(plan.filter)}
    )


def _validate(content: str | bytes, where: str = "") -> PrivacyCard:
    try:
        return PrivacyCard.model_validate_json(content)
    except ValidationError as error:
        raise _incomplete(error, where) from None


def _incomplete(error: ValidationError, where: str = "") -> RefusedError:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return RefusedError(f"{where.strip()} is no privacy card; give the path of a privacy_card.json.")
    field = ".".join(map(str, first["loc"])) or "the whole"
    problem = "is missing" if first["type"] == "missing" else f"does not hold: {first['msg']}"
    return RefusedError(
        "the privacy card{where} is not complete and correct: {field} {problem}; {run.remedy}.",
        code="card_incomplete",
        where=where,
        field=field,
        problem=problem,
    )


def _card(run: RunRecord) -> PrivacyCard:
    plan, receipt, data = run.plan, run.receipt, run.data
    planned = mechanism_of(plan)
    # No epsilon covers diagnostics, which show more than the releases, nor settings that follow from the records.
    is_covered = not receipt.diagnostics and not planned["settings_from_records"]
    promised = guarantee(cost=receipt.cost, private_noise=receipt.private_noise, is_covered=is_covered)
    return PrivacyCard(
        schema_version=SCHEMA_VERSION,
        signature=None,
        setting=Setting(
            guarantee=promised,
            epsilon=receipt.cost if promised == "private" else None,
            delta=receipt.delta,
            adjacency=cast(AdjacencyName, plan.adjacency),
            unit=data.unit,
            dataset=data.dataset,
            title=data.title,
            source=data.source,
            licence=data.licence,
            population=receipt.population,
            public_records=data.public_records,
            records=data.records,
            holdout=data.holdout,
            per_person=data.per_person,
            pooled=data.rows_per_user,
            unit_is_stated=data.unit_is_stated,
            each_record_alone=data.each_record_alone,
            holdout_why=data.holdout_why,
            evaluation_epsilon=receipt.evaluation_epsilon,
        ),
        mechanism=MechanismSection.model_validate(
            planned
            | {
                "transform": data.transform,
                "encoder": data.encoder,
                "diagnostics": receipt.diagnostics,
                "releases": receipt.releases,
                "queries": tuple(queries(run.trace)),
            }
        ),
        accounting=_accounting(run),
        events=tuple(Event(event=row["event"], count=row["count"]) for row in receipt.events),
        implementation=Implementation(
            **dict(receipt.software),
            device=receipt.device,
            noise="secure" if receipt.private_noise else "seeded",
            cipher="AES-256-CTR",
            rounding=None if promised == "none" else ROUNDING,
        ),
        evidence=Evidence.model_validate(
            {"run_id": receipt.run_id, "ledger_head": receipt.ledger.head, "files": receipt.sha256}
        ),
    )


def _accounting(run: RunRecord) -> Accounting:
    receipt, ledger, delta = run.receipt, run.receipt.ledger, run.receipt.delta
    interval = None
    if delta > 0:
        interval = epsilon.discretisation_of(receipt.schedule, delta, adjacency_named(run.plan.adjacency))
    blocks = None
    if ledger.blocks:
        blocks = Blocks.model_validate(
            {"charged": ledger.blocks, "blocks_per_person": ledger.blocks_per_person}
        )
    return Accounting(
        accountant=receipt.accountant,
        epsilon=Costs(**{name: receipt.epsilon.get(name) for name in epsilon.ACCOUNTANTS}),
        delta=delta,
        target=run.plan.target,
        library=_LIBRARY,
        library_version=version(_LIBRARY),
        discretisation=Discretisation(
            pld_interval=interval,
            rdp_lowest_order=min(ORDERS),
            rdp_highest_order=max(ORDERS),
            rdp_orders=len(ORDERS),
        ),
        composition=composition_of(run.plan),
        across_runs=ledger.composition,
        population=Account(cap=ledger.cap, spent=ledger.spent, remaining=ledger.remaining),
        blocks=blocks,
    )


def row_fits(row: Mapping[str, Any], event: dp.DpEvent) -> bool:
    """Whether a row of the trace has the sampling and the noise multiplier of its event.

    A release without noise costs the same on any sample, so its rate is not compared. Of pure noise in an objective the
    event's epsilon bounds the multiplier from below only, since the curvature costs part of it.
    """
    terms, noise = rule_of(event).trace_fields(event), row["noise"]
    if noise not in terms.multipliers or row["sampling"] not in terms.sampling:
        return False
    expected, stated = terms.multipliers[noise], row["noise_multiplier"]
    has_noise = math.isclose(stated, expected, rel_tol=_ROUNDING)
    has_rate = math.isclose(row["sampling_rate"], terms.rate, rel_tol=_ROUNDING)
    is_enough = noise == "pureobjectivenoise" and stated >= expected
    return (has_noise or is_enough) and (has_rate or noise == "nonoise")


def queries(trace: Columns) -> Iterator[QuerySection]:
    """The releases of a trace by kind, with the least and the most that each of their numbers was."""
    groups: dict[tuple[Any, ...], int] = {}
    group_of_row = np.array([groups.setdefault(names, len(groups)) for names in _rows(trace, _KINDS)])
    for names, number in groups.items():
        rows = {name: np.asarray(trace[name], float)[group_of_row == number] for name in _RANGE_FIELDS}
        # `fmin` leaves out NaN, which a release has in place of a number that it lacks.
        spans = {name: _span(np.fmin.reduce(values), np.fmax.reduce(values)) for name, values in rows.items()}
        count = int((group_of_row == number).sum())
        yield QuerySection.model_validate({**dict(zip(_KINDS, names, strict=True)), "count": count, **spans})


def trace_schedule(trace: Columns) -> list[tuple[dp.DpEvent, int]]:
    """The events of a noise trace in their order, equal neighbours counted together.

    Example:
        >>> trace_schedule(placeholder_trace([(dp.GaussianDpEvent(2.0), 3)]))
        [(GaussianDpEvent(noise_multiplier=2.0), 3)]
    """
    return merge_neighbours([(_event(str(text)), len([*run])) for text, run in groupby(trace["event"])])


def _rows(trace: Columns, names: list[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(np.asarray(trace[name]).tolist() for name in names), strict=True)


def placeholder_trace(schedule: Schedule) -> dict[str, list[Any]]:
    """A trace that the releases of a schedule could have left, with bounds of 1 and no other facts than their events.

    Args:
        schedule: Events and how often each occurs in a row.

    Returns:
        The columns, each with a value for every release.

    Raises:
        RefusedError: Where an event is of no release that a trace can name.

    Example:
        >>> placeholder_trace([(dp.GaussianDpEvent(2.0), 2)])["noise_multiplier"]
        [2.0, 2.0]
    """
    rows = []
    for event, count in schedule:
        terms = rule_of(event).trace_fields(event)
        if not terms.multipliers:
            raise RefusedError(
                f"{event} is the event of no release that a card can state; use another method."
            )
        noise, multiplier = next(iter(terms.multipliers.items()))
        columns_of_noise = {"noise": noise, "noise_multiplier": multiplier, "noise_std": multiplier}
        columns_of_noise |= {
            "sampling": terms.sampling[0],
            "sampling_rate": terms.rate,
            "event": json.dumps(event_to_json(event)),
        }
        same = {"kind": "release", "clipping": "bound", "clip_norm": 1.0, "divisor": 1.0}
        rows += [same | columns_of_noise | {"step": 0, "epsilon": 0.0}] * count
    return {name: [row[name] for row in rows] for name in rows[0]}


def same_events(first: Schedule, other: Schedule) -> bool:
    """Whether two schedules are the same releases in the same order."""
    return schedule_to_json(merge_neighbours(first)) == schedule_to_json(merge_neighbours(other))


def column_problem(trace: Columns, card: PrivacyCard, *, is_whole: bool = True) -> str | None:
    """How a trace differs from its own events or the card's sums, in words; None if it does not.

    is_whole: whether it is of all that was charged, and not of the winner of a search.
    """
    # Each different row once: a trace of 10,000 steps has a few.
    for values in dict.fromkeys(_rows(trace, _CHECKED_FIELDS)):
        row = dict(zip(_CHECKED_FIELDS, values, strict=True))
        if not row_fits(row, _event(row["event"])):
            return f"a {row['kind']} has other sampling or noise than its event"
    if tuple(queries(trace)) != card.mechanism.queries:
        return "mechanism.queries sums up other columns"
    return (
        None
        if _counts_cost(np.asarray(trace["epsilon"], float), card, is_whole=is_whole)
        else "it counts another epsilon"
    )


def _counts_cost(spent: NDArray[np.float64], card: PrivacyCard, *, is_whole: bool) -> bool:
    """Whether the epsilon so far never falls and ends at the run's, or under a filter at no more than it allowed.

    Both up to `_COUNT_TOLERANCE`. Earlier versions counted by Rényi divergences, whose epsilon may be below PLD's.
    """
    cost, rdp = card.cost, card.accounting.epsilon.rdp
    if cost is None:
        return True
    within = bool((spent[1:] >= spent[:-1]).all()) and spent[-1] <= cost * (1 + _COUNT_TOLERANCE)
    is_fixed = is_whole and card.accounting.composition.kind == "schedule"
    lower = cost if rdp is None else min(cost, rdp)
    return bool(within and (not is_fixed or spent[-1] >= lower * (1 - _COUNT_TOLERANCE)))


@lru_cache(maxsize=4096)
def _event(text: str) -> dp.DpEvent:
    return event_from_json(json.loads(text))


def _span(lower: float, upper: float) -> Span:
    minimum, maximum = (float(end) if math.isfinite(end) else None for end in (lower, upper))
    return Span(least=minimum, most=maximum)

"""Whether a privacy card holds: against its signature, its own events, the files beside it, and a ledger.

Numbers are computed again and compared; nothing is taken from words. What no computation can show, such as the name of
the population, is covered by the owner's signature and, where a ledger is at hand, by the run's rows there.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting import epsilon as accounting
from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE, adjacency_named, rdp
from algorithms.privacy.accounting.events import (
    DisjointPartsDpEvent,
    Schedule,
    disjoint_parts_of,
    merge_neighbours,
    releases_in_order,
    schedule_from_json,
    schedule_to_json,
    trials_of,
)
from algorithms.privacy.accounting.filters import (
    FIXED,
    conversion,
    epsilon_of_zcdp,
    rho_of,
)
from algorithms.privacy.card.build import (
    column_problem,
    composition_of,
    guarantee,
    mechanism_of,
    row_fits,
    same_events,
    trace_schedule,
)
from algorithms.privacy.card.schema import (
    ACCOUNTANT_PHRASES,
    EVALUATION,
    RELEASED,
    ROUNDING,
    CompositionSection,
    PrivacyCard,
    QuerySection,
)
from algorithms.privacy.documents import Account, Amount, PlanDocument
from algorithms.privacy.ledger import UNIT, WHOLE_POPULATION, Balance

if TYPE_CHECKING:
    from algorithms.privacy.ledger import Ledger, Settlement

SIGNER = "card_key"
"""Under this name a reservation in the ledger has the public half of the key that signs the run's card."""
BELOW, ABOVE, ABSOLUTE = 1e-6, 1e-2, 1e-9
"""How far a stated epsilon may lie below and above the one recomputed, relatively, and either way absolutely.

By PLD it may lie above by any amount: an older version was less tight, and who promises too little misleads nobody.
Other accountants have formulas, and a card that says much more than these was not computed from its events.
"""
_PLAN = ("releases of the plan", "terms of the plan")
_TRACE = ("events of the trace", "columns of the trace")


@dataclass(frozen=True)
class CardCheck:
    """One thing that was checked. passed: None where there was nothing to check it against."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class CardVerification:
    """The result of checking a card.

    Attributes:
        recomputed: Epsilon by accountant, None where it has no finite bound.
        checks: In the order in which they were made.
    """

    recomputed: Mapping[str, float | None]
    checks: tuple[CardCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing that could be checked failed."""
        return all(check.passed is not False for check in self.checks)

    @property
    def failures(self) -> tuple[CardCheck, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.passed is False)


def verify(
    card: PrivacyCard, folder: Path | None = None, *, key: str | None = None, unsigned: bool = False
) -> CardVerification:
    """Check a card by its signature and its events alone, and against the files beside it.

    Args:
        card: As `load` read it.
        folder: Where the run's files lie; what is not there is not checked, and the verification says so.
        key: The owner's public key in hex, from elsewhere than the card; without it all that is known is that one and
            the same key signed all of it.
        unsigned: Whether a card without a signature may hold.

    Returns:
        Every check with its result, and the recomputed epsilons.

    Raises:
        RefusedError: Where the card's events are unknown, and where no accountant can compute with them.
    """
    schedule = card.schedule
    adjacency, stated = adjacency_named(card.setting.adjacency), card.accounting
    with _pricing():
        recomputed = recompute(
            schedule, stated.delta, stated.composition, adjacency, stated=stated.epsilon.model_dump()
        )
        held_out = [*_held_out(card, schedule)]
    checks = [*_signature(card, key, unsigned=unsigned), *_epsilons(card, recomputed)]
    checks += [*_promise(card, recomputed), *held_out]
    if folder is not None:
        checks += [
            _file(folder / name, card) for name in (*RELEASED, *({EVALUATION} & card.evidence.files.keys()))
        ]
        checks += [*_trace(folder / "trace.parquet", card, schedule)]
        checks += [*_plan(folder / "plan.json", card, schedule)]
        checks += [*_evaluation(folder, card)]
    return CardVerification(recomputed, tuple(checks))


@contextmanager
def _pricing() -> Iterator[None]:
    """Turns what accountants raise at numbers that no run has into a refusal."""
    try:
        with np.errstate(all="ignore"):
            yield
    except (ArithmeticError, ValueError, TypeError, IndexError) as error:
        raise RefusedError(
            f"this card's events cannot be priced: {error}; ask for the card that the run wrote."
        ) from None


def recompute(
    schedule: Schedule,
    delta: float,
    composition: CompositionSection,
    adjacency: NeighboringRelation = ADD_OR_REMOVE_ONE,
    *,
    stated: Mapping[str, float | None] | None = None,
) -> dict[str, float | None]:
    """Epsilon of recorded events by accountant, None where it has no finite bound or does not apply.

    PLD and the choice of the best order afterwards are proved only for releases fixed in advance. Releases chosen
    adaptively are added up as their filter did, and cost what the filter allowed even where they came to less: when
    they ended was chosen adaptively too. Filters count under add-or-remove-one alone, and above delta 0.

    Args:
        schedule: The recorded events and how often each occurs in a row.
        delta: Of the stated epsilons.
        composition: How the run was held to its budget.
        adjacency: What the events are accounted under.
        stated: The epsilons of a card, next to which a finer grid is used.

    Raises:
        RefusedError: For an event that no accountant takes.
    """

    def by(accountant: accounting.Accountant) -> float | None:
        before = (stated or {}).get(accountant) or math.inf
        cost = accounting.epsilon_near(before, schedule, delta, accountant=accountant, adjacency=adjacency)
        return _finite(cost)

    def by_or_none(accountant: accounting.Accountant) -> float | None:
        try:
            return by(accountant)
        except RefusedError:
            return None

    epsilons: dict[str, float | None] = {"pld": None, "rdp": None, "pure": None}
    if composition.kind == "schedule" and delta == 0:
        return epsilons | {"pure": by("pure")}
    if composition.kind == "schedule":
        return {name: by_or_none(name) for name in accounting.ACCOUNTANTS}
    if adjacency is not ADD_OR_REMOVE_ONE or delta == 0:
        return epsilons
    if composition.order is not None and composition.limit is not None:
        total = float(rdp(schedule, orders=(composition.order,), adjacency=adjacency)[0])
        held = max(total, composition.limit)
        return epsilons | {"rdp": _finite(max(0.0, held + conversion(composition.order, delta)))}
    rho = math.fsum(count * rho_of(event) for event, count in schedule)
    return epsilons | {"rdp": _finite(epsilon_of_zcdp(max(rho, composition.rho or 0.0), delta))}


def check_charged(card: PrivacyCard, ledger: "Ledger") -> None:
    """Compare a card with its run's settlement: events, cost, model, adjacency, and the balances right after it.

    Also with the population's declaration, with the run's reservation, which names the key that was to sign, and the
    card's head with the chain. A search is reserved for every method that may win, with commas between them.

    Args:
        card: As `load` read it.
        ledger: The one that the run was charged in.

    Raises:
        RefusedError: Where the ledger has no settlement of the run on the card's population, and where they differ.
    """
    run_id = card.evidence.run_id
    from algorithms.privacy.ledger import settlement  # here, since it brings a database

    past = settlement(ledger, card.setting.population, run_id)
    rows = [row for row in ledger.history(past.population) if row.run_id == run_id]
    settled = [row for row in rows if row.kind == "settle"][-1]
    reserved = json.loads(next(row.about for row in rows if row.kind == "reserve"))
    accounts, declared = card.accounting, past.balance
    blocks, notes = accounts.blocks, json.loads(settled.about)
    signer = None if card.signature is None else card.signature.public_key
    charged = schedule_from_json(json.loads(settled.events))
    stated = card.schedule
    agreed = {
        "signature": (signer is None or card.signature_holds()) and reserved.get(SIGNER) == signer,
        "algorithm": card.mechanism.algorithm in reserved.get("algorithm", "").split(", "),
        "dataset": reserved.get("dataset") == card.setting.dataset,
        "noise": reserved.get("noise") == card.implementation.noise,
        "events": same_events(charged, stated),
        "cost": _same(Amount(epsilon=card.cost, delta=accounts.delta), settled.budget),
        "model": notes.get("model") in (None, card.evidence.files["model.safetensors"]),
        "adjacency": past.run.adjacency == card.setting.adjacency,
        "unit": past.state.term(past.population).bound.get(UNIT) == card.setting.unit,
        "per_person": (card.setting.per_person or 1) == declared.blocks_per_person
        or (blocks is not None and card.setting.per_person in (None, 1)),
        "composition": accounts.across_runs == declared.composition,
        "blocks_per_person": blocks is None or blocks.blocks_per_person == declared.blocks_per_person,
        "public_records": card.setting.public_records == declared.public,
        "population": _is_same_account(accounts.population, declared),
        "blocks": _has_blocks(card, past),
        "ledger_head": (ledger.seq_of(card.evidence.ledger_head or "") or 0) >= settled.seq,
    }
    differing = [name for name, is_same in agreed.items() if not is_same]
    if differing:
        raise RefusedError(
            f"the card of run {run_id!r} and its settlement in the ledger differ in {', '.join(differing)}; ask for the"
            " card that the run wrote."
        )


def _signature(card: PrivacyCard, key: str | None, *, unsigned: bool) -> Iterator[CardCheck]:
    if card.signature is None:
        yield CardCheck("signature", None if unsigned else False, "the card is not signed")
        return
    holds, signer = card.signature_holds(), card.signature.public_key
    words = f"all facts are as the holder of {signer} signed them"
    yield CardCheck(
        "signature", holds, words if holds else "the facts are others than those that were signed"
    )
    if key is None:
        yield CardCheck("owner", None, f"ask the owner whether {signer} is theirs, and give their public key")
    else:
        yield CardCheck(
            "owner",
            signer == key,
            "the expected key" if signer == key else f"{signer} is not the expected key {key}",
        )


def _epsilons(card: PrivacyCard, recomputed: Mapping[str, float | None]) -> Iterator[CardCheck]:
    for name, value in recomputed.items():
        stated: float | None = getattr(card.accounting.epsilon, name)
        detail = f"stated {_format_number(stated)}, recomputed {_format_number(value)}"
        # An older version had none.
        is_unstated = stated is None and name == "pld" != card.accounting.accountant
        if stated is None and value is None:
            detail = "there is no finite one, as stated"
        yield CardCheck(
            f"epsilon {ACCOUNTANT_PHRASES[name]}", is_unstated or _covers(name, stated, value), detail
        )


def _promise(card: PrivacyCard, recomputed: Mapping[str, float | None]) -> Iterator[CardCheck]:
    """Whether the guarantee is the one that events, noise and diagnostics allow, within its target."""
    setting, stated, mechanism = card.setting, card.accounting, card.mechanism
    allowed = guarantee(
        cost=recomputed[stated.accountant],
        private_noise=card.implementation.noise == "secure",
        is_covered=not (mechanism.diagnostics or mechanism.settings_from_records),
    )
    same = setting.guarantee == allowed and setting.epsilon == (card.cost if setting.private else None)
    same = same and setting.delta == stated.delta
    words = f"{setting.guarantee}, epsilon {_format_number(setting.epsilon)}, delta {setting.delta:g}"
    yield CardCheck(
        "guarantee", same, words if same else f"{words}; the events and the noise allow {allowed!r}"
    )
    if allowed == "private":
        limit, cost = stated.target.epsilon, card.cost
        within = limit is None or (cost is not None and cost <= limit * (1 + BELOW))
        within = within and stated.delta <= stated.target.delta
        yield CardCheck(
            "target",
            within,
            f"epsilon {_format_number(cost)} of {_format_number(limit)} at delta {stated.delta:g}",
        )
    expected = None if allowed == "none" else ROUNDING
    same = card.implementation.rounding == expected
    yield CardCheck(
        "rounding", same, "as this version rounds" if same else "otherwise than this version rounds"
    )
    query_count = sum(query.count for query in mechanism.queries)
    schedule = card.schedule
    counts = {
        sum(count for _, count in trial) for trial in trials_of(schedule) or [releases_in_order(schedule)]
    }
    same = mechanism.releases == query_count and query_count in counts
    yield CardCheck("releases", same, f"{query_count} in the trace, {mechanism.releases} stated")


def _held_out(card: PrivacyCard, schedule: Schedule) -> Iterator[CardCheck]:
    """Whether of the people held out one histogram alone was released, and what they may lose, as stated, covers it.

    Where a record is replaced there are no parts, and it is the last release. Releases on disjoint people are of no
    others, since a training whose steps were listed in two parts would cost what the dearer one does.
    """
    stated, disjoint = card.setting.evaluation_epsilon, disjoint_parts_of(schedule)
    queries = [query for query in card.mechanism.queries if query.kind == "evaluation"]
    is_named, parts_count = (
        EVALUATION in card.evidence.files,
        repr(schedule).count(DisjointPartsDpEvent.__name__),
    )
    if not (is_named or queries or parts_count) and stated is None:
        return
    evaluated = (disjoint or [[(schedule[-1][0], 1)]])[-1]
    delta, adjacency = card.accounting.delta, adjacency_named(card.setting.adjacency)
    # How many events of disjoint parts there are, at any depth, and how many parts: trained on, and held out.
    expected = (1, 2) if adjacency is ADD_OR_REMOVE_ONE else (0, 0)
    fits = is_named and card.setting.holdout == "private" and (parts_count, len(disjoint or ())) == expected
    fits = fits and [query.count for query in queries] == [1] and _are_of(evaluated, queries[0])
    yield CardCheck(
        "releases of the people held out",
        fits,
        "one histogram"
        if fits
        else "others than one histogram, or one that the card has in some places alone",
    )
    by: accounting.Accountant = "pld" if delta else "pure"
    minimum = math.inf
    with suppress(RefusedError):
        minimum = accounting.epsilon(evaluated, delta, accountant=by, adjacency=adjacency)
    covers = stated is not None and stated >= minimum * (1 - BELOW) - ABSOLUTE
    detail = f"stated {_format_number(stated)}, at least {_format_number(_finite(minimum))}"
    yield CardCheck("epsilon of the people held out", covers, detail)


def _are_of(evaluated: Schedule, query: QuerySection) -> bool:
    """Whether the releases are one histogram with the noise of this query, or one of each trial of a search."""
    rows = trials_of(evaluated) or [[*evaluated]]
    row = query.model_dump() | {
        name: getattr(query, name).least for name in ("sampling_rate", "noise_multiplier")
    }
    return all(
        sum(count for _, count in trial) == 1 and all(row_fits(row, event) for event, _ in trial)
        for trial in rows
    )


def _file(path: Path, card: PrivacyCard) -> CardCheck:
    if not path.is_file():
        return CardCheck(path.name, None, "does not lie beside the card")
    with path.open("rb") as file:
        same = hashlib.file_digest(file, "sha256").hexdigest() == card.evidence.files[path.name]  # type: ignore[index]
    return CardCheck(
        path.name, same, "has the checksum of the card" if same else "is not the file of this card"
    )


def _trace(path: Path, card: PrivacyCard, schedule: Schedule) -> Iterator[CardCheck]:
    """Whether the trace has the card's events, and nothing beside them that they or the card contradict.

    Of a search the trace is the winner's, which must be one of the trials that the event allows.
    """
    if not path.is_file():
        yield from (CardCheck(name, None, "no trace lies beside the card") for name in _TRACE)
        return
    try:
        # pandas and pyarrow's data sets would take longer to import than all the rest.
        from pyarrow import parquet  # also slow, so only where there is a trace

        with parquet.ParquetFile(path) as file:
            trace = file.read().to_pydict()
        left = trace_schedule(trace)
        released = trials_of(schedule) or [releases_in_order(schedule)]
        same = any(same_events(left, trial) for trial in released)
        problem = column_problem(trace, card, is_whole=trials_of(schedule) is None)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        yield from (CardCheck(name, False, "the trace cannot be read") for name in _TRACE)
        return
    events, columns = _TRACE
    yield CardCheck(events, same, "the card's events" if same else "other events than the card's")
    yield CardCheck(columns, problem is None, problem or "those of its events, summed up on the card")


def _plan(path: Path, card: PrivacyCard, schedule: Schedule) -> Iterator[CardCheck]:
    """Whether the card is one of a run of the plan beside it."""
    if not path.is_file():
        yield from (CardCheck(name, None, "no plan lies beside the card") for name in _PLAN)
        return
    try:
        plan = PlanDocument.read(path)
        is_evaluated = EVALUATION in card.evidence.files
        differences = [_difference_to_plan(plan, schedule, is_evaluated=is_evaluated), _differing(plan, card)]
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        differences = ["the plan cannot be read"] * len(_PLAN)
    for name, problem in zip(_PLAN, differences, strict=True):
        yield CardCheck(name, problem is None, problem or "as the plan has it")


def _evaluation(folder: Path, card: PrivacyCard) -> Iterator[CardCheck]:
    """Whether the released histogram is the planned one, with the noise that the trace has of it."""
    if EVALUATION not in card.evidence.files or not all(
        (folder / name).is_file() for name in (EVALUATION, "plan.json")
    ):
        return
    try:
        released = json.loads((folder / EVALUATION).read_bytes())
        planned = PlanDocument.read(folder / "plan.json").evaluation
        (noised,) = [query for query in card.mechanism.queries if query.kind == "evaluation"]
        stated = released["spec"], released["noise_std"]
        same = planned is not None and stated == (planned.spec, noised.noise_std.least)
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        same = False
    yield CardCheck(
        "evaluation", same, "the planned histogram" if same else "another histogram, or other noise"
    )


def _difference_to_plan(plan: PlanDocument, schedule: Schedule, *, is_evaluated: bool) -> str | None:
    """A fixed schedule is released to its end, or the run has failed; under a filter its beginning alone is fixed.

    An evaluation that was planned may be missing: where it failed, the run ended without it.
    """
    evaluated: list[Schedule] | None = None
    if disjoint := disjoint_parts_of(schedule):
        schedule, evaluated = disjoint[0], [*disjoint[1:]]
    elif is_evaluated:  # under replace-one, where it is composed with the training
        schedule, evaluated = schedule[:-1], [schedule[-1:]]
    if evaluated is not None:
        planned = () if plan.evaluation is None else plan.evaluation.schedule
        if [*map(schedule_to_json, evaluated)] != [[*planned]]:
            return "another evaluation than the card's"
    if plan.filter == FIXED:
        same = same_events(schedule_from_json(plan.schedule), schedule)
        return None if same else "other events than the card's"
    before = merge_neighbours(schedule_from_json(plan.prior_events))
    first, left = [], sum(count for _, count in before)
    for event, count in schedule:
        first += [(event, min(count, left))] if left > 0 else []
        left -= count
    begins = not before or same_events(before, merge_neighbours(first))
    return None if begins else "the events before those that are chosen adaptively are others than the card's"


def _differing(plan: PlanDocument, card: PrivacyCard) -> str | None:
    mechanism, setting, accounts = card.mechanism, card.setting, card.accounting
    planned = mechanism_of(plan)
    pairs: dict[str, tuple[object, object]] = {
        **{name: (value, getattr(mechanism, name)) for name, value in planned.items()},
        "composition": (composition_of(plan), accounts.composition),
        "adjacency": (plan.adjacency, setting.adjacency),
        "noise": (plan.noise, card.implementation.noise),
        "diagnostics": (plan.diagnostics in (None, mechanism.diagnostics), True),
        "dataset": (plan.dataset, setting.dataset),
        "records": (plan.public["records"], setting.records),
        "target": (plan.target, accounts.target),
        "delta": (plan.delta, accounts.delta),
        "accountant": (plan.accountant if plan.filter == FIXED else "rdp", accounts.accountant),
    }
    differing = [name for name, (value, stated) in pairs.items() if value != stated]
    return f"the plan has another {', '.join(differing)}" if differing else None


def _has_blocks(card: PrivacyCard, past: "Settlement") -> bool:
    blocks = card.accounting.blocks
    charged = {balance.block: balance for balance in past.charged_balances}
    stated = {} if blocks is None else {block.name: block for block in blocks.charged}
    names = [WHOLE_POPULATION] if blocks is None else [*stated]
    return names == [*past.run.amounts] and all(
        _is_same_account(block, charged[name]) for name, block in stated.items()
    )


def _is_same_account(stated: Account, balance: Balance) -> bool:
    """Whether an account is the same on the card and in the ledger."""
    return all(_same(getattr(stated, name), getattr(balance, name)) for name in ("cap", "spent", "remaining"))


def _same(stated: Amount, budget: Budget) -> bool:
    epsilon = math.inf if stated.epsilon is None else stated.epsilon
    pairs = ((epsilon, budget.epsilon), (stated.delta, budget.delta))
    return all(math.isclose(first, other, rel_tol=BELOW, abs_tol=1e-300) for first, other in pairs)


def _covers(name: str, stated: float | None, recomputed: float | None) -> bool:
    """Whether an epsilon that is stated for an accountant is at least that of the events, and theirs."""
    if stated is None or recomputed is None:
        return stated is recomputed
    high = math.inf if name == "pld" else recomputed * (1 + ABOVE) + ABSOLUTE
    return recomputed * (1 - BELOW) - ABSOLUTE <= stated <= high


def _finite(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None


def _format_number(number: float | None) -> str:
    return "none" if number is None else f"{number:.10g}"

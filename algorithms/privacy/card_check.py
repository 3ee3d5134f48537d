"""Checking a privacy card: epsilon again from the recorded events alone, and the files against their checksums."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pandas as pd

from algorithms.privacy import accounting
from algorithms.privacy.adjacency import ADD_OR_REMOVE_ONE, Adjacency, named
from algorithms.privacy.budget import Budget
from algorithms.privacy.card_model import RELEASED, Composition, PrivacyCard
from algorithms.privacy.errors import Refused
from algorithms.privacy.events import Schedule, event_from_json, schedule_from_json, schedule_to_json
from algorithms.privacy.filters import conversion, epsilon_of_zcdp, rho_of
from algorithms.privacy.renyi import rdp

BELOW, ABOVE, ABSOLUTE = 1e-6, 1e-2, 1e-9
"""How far a stated epsilon may lie below and above the one recomputed, relatively, and either way absolutely.

Below: the same events give the same epsilon up to the rounding of the accountants' Fourier transforms, about 1e-9.
Above: an accountant of another version may be tighter by its discretisation or its orders, well under one percent;
a card that says more than that was not computed from these events, although it promises too little.
"""


@dataclass(frozen=True)
class Check:
    """One thing that was checked. passed: None where there was nothing to check it against."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class Verification:
    """What became of a card's claims. recomputed: epsilon by accountant, None where it has no finite bound."""

    recomputed: Mapping[str, float | None]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing that could be checked failed."""
        return all(check.passed is not False for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.passed is False)


def canonical(document: Mapping[str, Any]) -> bytes:
    """A card as the bytes that card_sha256 covers: sorted keys, no spaces, UTF-8, without that field."""
    evidence = {key: value for key, value in document["evidence"].items() if key != "card_sha256"}
    content = {**document, "evidence": evidence}
    return json.dumps(
        content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest(document: Mapping[str, Any]) -> str:
    """The card_sha256 of a card. It shows a change by accident; whoever changes a card can compute it again."""
    return hashlib.sha256(canonical(document)).hexdigest()


def recompute(
    schedule: Schedule, delta: float, composition: Composition, adjacency: Adjacency = ADD_OR_REMOVE_ONE
) -> dict[str, float | None]:
    """Epsilon of recorded events by accountant, None where it has no finite bound or does not apply.

    PLD and the choice of the best order afterwards are proved only for releases fixed in advance. Releases chosen on
    the way are added up as their filter did, and cost what the filter allowed even where they came to less: when they
    ended was chosen on the way too; filters count under add-or-remove-one alone. Raises Refused for an event that no
    accountant takes.
    """

    def by(accountant: accounting.Accountant) -> float:
        return accounting.epsilon(schedule, delta, accountant=accountant, adjacency=adjacency)

    if composition.kind != "schedule" and adjacency is not ADD_OR_REMOVE_ONE:
        return {"pld": None, "rdp": None, "pure": None}
    if composition.kind == "schedule" and delta == 0:
        return {"pld": None, "rdp": None, "pure": _finite(by("pure"))}
    if composition.kind == "schedule":
        return {name: _or_none(partial(by, name)) for name in accounting.ACCOUNTANTS}
    if composition.order is not None and composition.limit is not None:
        order = composition.order
        total = float(rdp(schedule, orders=(order,), adjacency=adjacency)[0])
        held = max(total, composition.limit)
        return {"pld": None, "rdp": _finite(max(0.0, held + conversion(order, delta))), "pure": None}
    rho = math.fsum(count * rho_of(event) for event, count in schedule)
    return {
        "pld": None,
        "rdp": _finite(epsilon_of_zcdp(max(rho, composition.rho or 0.0), delta)),
        "pure": None,
    }


def check_all(document: Mapping[str, Any], card: PrivacyCard, folder: Path | None) -> Verification:
    """Every check of a card; `document` is the card as it was read, and `folder` where its files lie."""
    schedule = schedule_from_json([row.model_dump() for row in card.events])
    composition, adjacency = card.accounting.composition, named(card.setting.adjacency)
    recomputed = recompute(schedule, card.accounting.delta, composition, adjacency)
    checks = [*_epsilons(card, recomputed), *_consistency(card, recomputed), _own_hash(document, card)]
    if folder is not None:
        checks += [_file(folder / name, card) for name in RELEASED]
        checks += [_trace(folder / "trace.parquet", schedule), _filter(folder / "plan.json", card)]
    return Verification(recomputed, tuple(checks))


def _epsilons(card: PrivacyCard, recomputed: Mapping[str, float | None]) -> Iterator[Check]:
    for name, value in recomputed.items():
        stated: float | None = getattr(card.accounting.epsilon, name)
        detail = f"stated {_words(stated)}, recomputed {_words(value)}"
        yield Check(f"epsilon by {name.upper()}", _agrees(stated, value), detail)


def _agrees(stated: float | None, recomputed: float | None) -> bool:
    if stated is None or recomputed is None:
        return stated is recomputed
    low, high = recomputed * (1 - BELOW) - ABSOLUTE, recomputed * (1 + ABOVE) + ABSOLUTE
    return low <= stated <= high


def _consistency(card: PrivacyCard, recomputed: Mapping[str, float | None]) -> Iterator[Check]:
    setting, stated = card.setting, card.accounting
    cost: float | None = getattr(stated.epsilon, stated.accountant)
    private = recomputed[stated.accountant] is not None and card.implementation.noise.private
    private = private and not card.mechanism.diagnostics
    same = setting.private == private and setting.epsilon == (cost if private else None)
    same = same and setting.delta == stated.delta
    yield Check(
        "promise",
        same,
        f"private: {setting.private}, epsilon {_words(setting.epsilon)}, delta {setting.delta:g}",
    )
    if private:
        limit = stated.target.epsilon
        within = limit is None or (cost is not None and cost <= limit * (1 + BELOW))
        within = within and stated.delta <= stated.target.delta
        yield Check("target", within, f"epsilon {_words(cost)} of {_words(limit)} at delta {stated.delta:g}")
    releases = sum(row.count for row in card.events)
    queries = sum(query.count for query in card.mechanism.queries)
    counted = card.mechanism.releases == releases == queries
    yield Check("releases", counted, f"{releases} events, {card.mechanism.releases} releases stated")
    yield from _blocks(card, recomputed[stated.accountant])


def _blocks(card: PrivacyCard, cost: float | None) -> Iterator[Check]:
    """Whether each block had at least this run's cost charged to it; cost: of the events, None without noise."""
    blocks = card.accounting.blocks
    if blocks is None:
        return
    budget = Budget(math.inf if cost is None else cost, card.accounting.delta)
    events = [row.model_dump() for row in card.events]
    least = blocks.least_spent(budget, events, card.setting.adjacency)
    too_little = [
        f"{block.name}: spent {_words(block.spent.epsilon)}, this run alone {_words(least[block.name])}"
        for block in blocks.charged
        if block.spent.epsilon is not None
        and block.spent.epsilon < least[block.name] * (1 - BELOW) - ABSOLUTE
    ]
    detail = "; ".join(too_little[:3]) or f"the cost of this run is in each of {len(blocks.charged)}"
    yield Check("blocks", not too_little, detail)


def _own_hash(document: Mapping[str, Any], card: PrivacyCard) -> Check:
    return Check("card_sha256", digest(document) == card.evidence.card_sha256, "of the card's other fields")


def _file(path: Path, card: PrivacyCard) -> Check:
    if not path.is_file():
        return Check(path.name, None, "does not lie beside the card")
    with path.open("rb") as file:
        same = hashlib.file_digest(file, "sha256").hexdigest() == card.evidence.files[path.name]  # type: ignore[index]
    return Check(path.name, same, "has the checksum of the card" if same else "is not the file of this card")


def _trace(path: Path, schedule: Schedule) -> Check:
    if not path.is_file():
        return Check("events of the trace", None, "no trace lies beside the card")
    try:
        recorded = trace_schedule(pd.read_parquet(path, columns=["event"]))
    except (OSError, ValueError, KeyError):
        return Check("events of the trace", False, "the trace cannot be read")
    same = schedule_to_json(recorded) == schedule_to_json(_merged(schedule))
    return Check("events of the trace", same, "the card's events" if same else "other events than the card's")


def trace_schedule(trace: pd.DataFrame) -> list[tuple[dp.DpEvent, int]]:
    """The events of a noise trace in their order, equal neighbours counted together."""
    return _merged(
        [(event_from_json(json.loads(text)), count) for text, count in _run_lengths(trace["event"])]
    )


def _run_lengths(texts: "pd.Series[str]") -> Iterator[tuple[str, int]]:
    groups = texts.ne(texts.shift()).cumsum()
    for _, group in texts.groupby(groups, sort=True):
        yield str(group.iloc[0]), len(group)


def _merged(schedule: Schedule) -> list[tuple[dp.DpEvent, int]]:
    merged: list[tuple[dp.DpEvent, int]] = []
    for event, count in schedule:
        if merged and merged[-1][0] == event:
            merged[-1] = (event, merged[-1][1] + count)
        else:
            merged.append((event, count))
    return merged


def _filter(path: Path, card: PrivacyCard) -> Check:
    if not path.is_file():
        return Check("composition", None, "no plan lies beside the card")
    try:
        plan = json.loads(path.read_bytes())
        planned = plan.get("filter", {"kind": "schedule"}), plan.get("adjacency")
    except (ValueError, AttributeError):
        return Check("composition", False, "the plan cannot be read")
    chosen = card.accounting.composition.model_dump(
        include={"kind", "rho", "order", "limit"}, exclude_none=True
    )
    stated = chosen, card.setting.adjacency
    same = planned == stated
    return Check("composition", same, "as the plan has it" if same else f"the plan has {json.dumps(planned)}")


def _or_none(compute: Callable[[], float]) -> float | None:
    try:
        return _finite(compute())
    except Refused:
        return None


def _finite(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None


def _words(number: float | None) -> str:
    return "none" if number is None else f"{number:.10g}"

"""The privacy loss of an event: what a rule says of it, and the register of all rules.

A new mechanism registers its event's rule with `register`, and needs nothing else to be priced. Rules of single
releases are in `release_rules`, `correlated` and `random_allocation`, those of events that consist of others in
`compound_rules`. Code elsewhere matches on event classes only for the order of a filter and for what spans several
events: Gaussians that are merged, searches, releases on disjoint people, and steps that an earlier event has paid for.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import dp_accounting.dp_event as dp
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.event_classes import PureDpEvent
from algorithms.privacy.accounting.mechanism_plds import AtomsPLD
from algorithms.privacy.accounting.pairs import pair_of_pld, pld_by_library
from algorithms.privacy.accounting.pld import PLDPair, PrivacyLoss
from algorithms.privacy.accounting.pld_epsilon import ComposedPLD
from algorithms.privacy.accounting.rdp import rdp_by_library

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Orders: TypeAlias = tuple[float, ...]
ADD_OR_REMOVE_ONE, REPLACE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
CUSTOMARY_GRID = 1e-4
"""The width of a cell for losses that are known on a grid only."""


@dataclass(frozen=True)
class TraceFields:
    """The values that a release with this event can have in a noise trace.

    Attributes:
        multipliers: The noise multiplier, by the name of each noise with this event; empty for an event that no release
            has.
        sampling: Names of the possible kinds of sampling.
        rate: The probability that a record takes part.
    """

    multipliers: Mapping[str, float]
    sampling: tuple[str, ...] = ("full batch",)
    rate: float = 1.0


class EventRule:
    """The privacy loss of a class of events. By default, methods refuse or use dp_accounting.

    `pld`, `losses` and `rdp` take events that `event_for_accountants` returned, and the adjacency they were made for.
    Under replace-one such an event is `under_replace_one`'s, whose losses under add-or-remove-one bound those of
    replacing a record. So by default the library is asked for add-or-remove-one under both. A rule whose events stay as
    they are under replace-one, as samples do, has losses of its own for it, and reads the adjacency.
    """

    def is_possible(self, event: Any) -> bool:
        """Whether the event's own numbers, without those of its parts, are in the range of its theorems."""
        return True

    def is_proven(self, event: Any, adjacency: NeighboringRelation) -> bool:
        """Whether a theorem covers the event itself, without its parts, under an adjacency."""
        return True

    def pure_epsilon(self, event: Any) -> float:
        """The pure epsilon; raises RefusedError if the event has none."""
        raise RefusedError(
            "delta is 0, and the noise of a release ({mechanism}) is not purely private; set {target.delta}"
            " above 0 with {target.accountant} pld or rdp, or {method.kind} to one with Laplace noise, such as"
            " 'heavy_ball'.",
            code="not_purely_private",
            mechanism=in_words(event),
        )

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        """The event that stands for it under replace-one.

        Raises RefusedError if no theorem gives one.
        """
        raise RefusedError(
            "{mechanism} has no bound under REPLACE_ONE; set {method.adjacency} to ADD_OR_REMOVE_ONE.",
            code="no_bound_replace_one",
            mechanism=in_words(event),
        )

    def trace_fields(self, event: Any) -> TraceFields:
        """The values in the trace of a release with this event."""
        return TraceFields({})

    def releases(self, event: Any) -> Iterator[tuple[dp.DpEvent, int]]:
        """The events that accountants use instead, and how often each occurs."""
        yield event, 1

    def poisson_under_replace_one(self, event: Any, rate: float) -> dp.DpEvent:
        """The event that stands for its Poisson sample under replace-one.

        Raises RefusedError if no theorem gives one.
        """
        raise RefusedError(
            "a Poisson sample of {mechanism} has no bound under REPLACE_ONE; set {method.adjacency} to"
            " ADD_OR_REMOVE_ONE.",
            code="poisson_no_bound_replace_one",
            mechanism=in_words(event),
        )

    def poisson_with_amplification(self, event: Any, rate: float) -> dp.DpEvent:
        """A Poisson sample of the event, in a form that accountants support."""
        return dp.PoissonSampledDpEvent(rate, event)

    def sample_under_replace_one(self, event: Any, records: int, size: int) -> dp.DpEvent:
        """The event that stands for a sample of `size` of `records` without replacement, under replace-one."""
        inner = self.under_replace_one(event)
        return PureDpEvent(pure_epsilon_of_sample(size / records, rule_of(inner).pure_epsilon(inner)))

    def with_amplification(self, event: Any) -> dp.DpEvent:
        """The event with amplification by sampling computed, where accountants do not support the sample."""
        return event

    def pld(self, event: Any, grid: float, adjacency: NeighboringRelation) -> "PrivacyLossDistribution":
        """dp_accounting's privacy loss distribution of one such event, for rules without `losses`."""
        return pld_by_library(event, grid, ADD_OR_REMOVE_ONE, in_words(event))

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        """The privacy losses of one such event. grid: the width of a cell, for losses that are known on a grid only."""
        return pair_of_pld(self.pld(event, grid, adjacency))

    def rdp(self, event: Any, orders: Orders, adjacency: NeighboringRelation) -> np.ndarray:
        """The Rényi bounds, shape [orders]."""
        return rdp_by_library(event, orders, ADD_OR_REMOVE_ONE, in_words(event))

    def rho(self, event: Any) -> float:
        """The rho of the event under zCDP.

        Raises RefusedError if none is proven.
        """
        raise RefusedError(
            "{mechanism} has no proven zCDP bound; set {population.composition} to renyi or basic.",
            code="no_bound_by_zcdp",
            mechanism=in_words(event),
        )

    def without_subsampling(self, event: Any, adjacency: NeighboringRelation) -> dp.DpEvent:
        """The event on all records, of which zCDP has a bound; the event itself if it has no sample.

        Also the event itself where zCDP has none, as of a search, whose trials keep their samples.
        """
        return event

    def sampling_chance(self, event: Any) -> float:
        """A bound on the chance that the event reads a record that neighbours differ in."""
        return 1.0

    def poisson_group_privacy(self, event: Any, rate: float, count: int) -> dp.DpEvent:
        """An event that bounds its Poisson sample if `count` records are added or removed together."""
        return EventRule.group_privacy(self, dp.PoissonSampledDpEvent(rate, event), count)

    def group_privacy(self, event: Any, count: int) -> dp.DpEvent:
        """An event whose loss bounds that of `event` if `count` records are added or removed together.

        Raises RefusedError if no theorem gives one.
        """
        raise RefusedError(
            "{mechanism} has no bound for {count} records of one person; set {records.blocks} to one block, or"
            " {method.kind} to another.",
            code="no_bound_of_group",
            mechanism=in_words(event),
            count=count,
        )


_RULES: dict[type[dp.DpEvent], EventRule] = {}
_WORDS: dict[type[dp.DpEvent], str] = {}


def register(kind: type[dp.DpEvent], rule: EventRule, words: str | None = None) -> None:
    """Register the rule of an event class, for all accountants, filters and documents.

    Modules of this package call it when they are imported, as `events` does.

    Args:
        kind: The class, which documents name.
        rule: Its costs.
        words: What messages call it; by default the class's name.

    Raises:
        RefusedError: For a registered name.
    """
    if kind.__name__ in classes_by_name():
        raise RefusedError(f"the event {kind.__name__} has a rule already; give the new event another name.")
    _RULES[kind] = rule
    if words is not None:
        _WORDS[kind] = words


def classes_by_name() -> dict[str, type[dp.DpEvent]]:
    """The event classes that have a rule."""
    return {kind.__name__: kind for kind in _RULES}


def rule_of(event: dp.DpEvent) -> EventRule:
    """The rule of an event's class; for unknown classes a rule that uses dp_accounting."""
    return _RULES.get(type(event)) or EventRule()


def check_possible(event: dp.DpEvent) -> None:
    """Raises RefusedError for an event whose own numbers are outside the range of its theorems."""
    if not rule_of(event).is_possible(event):
        numbers = ", ".join(
            f"{name} {value!r}"
            for name, value in attrs.asdict(event, recurse=False).items()
            if isinstance(value, int | float)
        )
        raise RefusedError(
            f"{in_words(event)} is no mechanism with these numbers ({numbers or 'none'}); check the document that it"
            " comes from."
        )


def in_words(event: dp.DpEvent) -> str:
    """An event as a person would name it, with its parts."""
    if isinstance(event, dp.PoissonSampledDpEvent):
        return f"a Poisson sample of {in_words(event.event)}"
    if isinstance(event, dp.SampledWithoutReplacementDpEvent):
        return f"a sample of fixed size of {in_words(event.event)}"
    if isinstance(event, dp.SelfComposedDpEvent):
        return f"{event.count} times {in_words(event.event)}"
    if isinstance(event, dp.ComposedDpEvent):
        return " with ".join(sorted({in_words(inner) for inner in event.events}))
    return _WORDS.get(type(event)) or type(event).__name__.removesuffix("DpEvent")


def compose_pld(
    schedule: Iterable[tuple[dp.DpEvent, int]],
    adjacency: NeighboringRelation,
    delta: float,
    grid: float | None = None,
    coarser: float = 1.0,
) -> ComposedPLD:
    """The privacy loss of events that `event_for_accountants` returned, for deltas from `delta` on."""
    return ComposedPLD(pairs_of(schedule, adjacency, grid or CUSTOMARY_GRID), delta, grid, coarser)


def pairs_of(
    schedule: Iterable[tuple[dp.DpEvent, int]], adjacency: NeighboringRelation, grid: float = CUSTOMARY_GRID
) -> list[tuple[PLDPair, int]]:
    """The privacy losses of single releases, and how often each occurs; of what `event_for_accountants` returned."""
    single = [
        (inner, times * count) for event, count in schedule for inner, times in rule_of(event).releases(event)
    ]
    pairs = [(rule_of(event).losses(event, grid, adjacency), count) for event, count in single]
    return pairs or [(NO_LOSS, 1)]


def same_both_ways(pld: PrivacyLoss) -> PLDPair:
    return PLDPair(pld, pld)


NO_LOSS = same_both_ways(AtomsPLD(np.zeros(1), np.ones(1)))


def pure_epsilon_of_sample(rate: float, epsilon: float) -> float:
    """ln(1 + rate (e^epsilon - 1)), without overflow (Balle, Barthe and Gaboardi 2018, Theorems 8 and 9)."""
    if rate == 0:
        return 0.0  # also of an infinite epsilon
    if epsilon < 1.0:
        return math.log1p(rate * math.expm1(epsilon))
    with np.errstate(divide="ignore"):  # of a rate of 1
        return float(np.logaddexp(np.log1p(-rate), np.log(rate) + epsilon))

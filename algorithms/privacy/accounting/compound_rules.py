"""The theorems for events that consist of others: compositions, choices, disjoint people, searches."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import Any

import attrs
import dp_accounting.dp_event as dp
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

from algorithms.privacy.accounting.event_classes import (
    DisjointPartsDpEvent,
    EitherDpEvent,
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    parts,
    with_parts,
)
from algorithms.privacy.accounting.event_rules import (
    EventRule,
    Orders,
    TraceFields,
    pairs_of,
    register,
    rule_of,
)
from algorithms.privacy.accounting.pairs import TAIL_DELTA, pair_of_curves
from algorithms.privacy.accounting.pld import PLDPair
from algorithms.privacy.accounting.pld_epsilon import ComposedPLD
from algorithms.privacy.accounting.rdp import rdp_of_selection
from algorithms.privacy.accounting.selection import shift_of_selection


class _Compound(EventRule):
    """An event that consists of others, to each of which the rule is applied."""

    def combine(self, event: Any, values: list[Any]) -> Any:
        """A cost of the event from those of its parts: numbers, or Rényi bounds of shape [orders]."""
        raise NotImplementedError

    def pure_epsilon(self, event: Any) -> float:
        return float(self.combine(event, [rule_of(inner).pure_epsilon(inner) for inner in parts(event)]))

    def rdp(self, event: Any, orders: Orders, adjacency: NeighboringRelation) -> np.ndarray:
        bounds = [rule_of(inner).rdp(inner, orders, adjacency) for inner in parts(event)]
        return np.asarray(self.combine(event, bounds))

    def rho(self, event: Any) -> float:
        return float(self.combine(event, [rule_of(inner).rho(inner) for inner in parts(event)]))

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        return with_parts(event, lambda inner: rule_of(inner).under_replace_one(inner))

    def with_amplification(self, event: Any) -> dp.DpEvent:
        return with_parts(event, lambda inner: rule_of(inner).with_amplification(inner))

    def without_subsampling(self, event: Any, adjacency: NeighboringRelation) -> dp.DpEvent:
        return with_parts(event, lambda inner: rule_of(inner).without_subsampling(inner, adjacency))

    def sampling_chance(self, event: Any) -> float:
        every = [rule_of(inner).sampling_chance(inner) for inner in parts(event)]
        return min(1.0, float(self.combine(event, every)))

    def group_privacy(self, event: Any, count: int) -> dp.DpEvent:
        return with_parts(event, lambda inner: rule_of(inner).group_privacy(inner, count))


class _SelfComposed(_Compound):
    def combine(self, event: Any, values: list[Any]) -> Any:
        return event.count * values[0]

    def is_possible(self, event: Any) -> bool:
        return bool(event.count >= 0 and event.count % 1 == 0)

    def releases(self, event: Any) -> Iterator[tuple[dp.DpEvent, int]]:
        if event.count:
            for inner, count in rule_of(event.event).releases(event.event):
                yield inner, count * int(event.count)


class _Composed(_Compound):
    def combine(self, event: Any, values: list[Any]) -> Any:
        return np.sum(values, axis=0)

    def trace_fields(self, event: Any) -> TraceFields:
        match event.events:
            case [ObjectivePerturbationDpEvent(noise_multiplier=z), dp.GaussianDpEvent()]:
                return TraceFields({"objectivenoise": z})
            case [PureDpEvent(epsilon=epsilon), PureDpEvent()] if epsilon > 0:
                return TraceFields({"pureobjectivenoise": 1 / epsilon})
        return TraceFields({})

    def releases(self, event: Any) -> Iterator[tuple[dp.DpEvent, int]]:
        for inner in event.events:
            yield from rule_of(inner).releases(inner)


class _Either(_Composed):
    def combine(self, event: Any, values: list[Any]) -> Any:
        return np.max(values, axis=0)

    def trace_fields(self, event: Any) -> TraceFields:
        return EventRule.trace_fields(
            self, event
        )  # no release is one of several: a trace has the trial's own

    def is_possible(self, event: Any) -> bool:
        return bool(event.events)

    def releases(self, event: Any) -> Iterator[tuple[dp.DpEvent, int]]:
        if len({repr(inner) for inner in event.events}) == 1:
            yield from rule_of(event.events[0]).releases(event.events[0])
        else:
            yield event, 1

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        """The largest delta of the events at each epsilon, which bounds that of a mixture."""
        every = [
            ComposedPLD(pairs_of([(inner, 1)], adjacency), TAIL_DELTA, by_delta=True)
            for inner in {repr(e): e for e in event.events}.values()
        ]

        def deltas_of_sides(epsilons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            remove, add = np.max([pld.deltas_of_sides(epsilons) for pld in every], axis=0)
            return remove, add

        return pair_of_curves(deltas_of_sides, max(pld.epsilon(TAIL_DELTA) for pld in every))


class _DisjointParts(_Either):
    """The worst part, as of a choice: the deltas of a record's own part bound those of all that is released."""

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        return EventRule.under_replace_one(self, event)

    def group_privacy(self, event: Any, count: int) -> dp.DpEvent:
        """The worst way in which `count` records can be in several parts; these are then paid for together.

        Raises RefusedError where there are more than `_MAX_WAYS` ways.
        """
        if math.comb(count + len(event.events) - 1, count) > _MAX_WAYS:
            return EventRule.group_privacy(self, event, count)  # which refuses
        of_number = [
            [part, *(rule_of(part).group_privacy(part, n) for n in range(2, count + 1))]
            for part in event.events
        ]
        ways = [
            dp.ComposedDpEvent([of_number[index][n - 1] for index, n in sorted(Counter(places).items())])
            for places in combinations_with_replacement(reversed(range(len(event.events))), count)
        ]
        return DisjointPartsDpEvent(list({repr(way): way for way in ways}.values()))


_MAX_WAYS = 10_000
"""The most ways in which the records of a group can be in disjoint parts: a training and an evaluation have one more
than there are records."""


class _Selection(EventRule):
    """The best of a random number of repetitions, by Rényi divergences and by privacy profiles.

    The number is truncated negative binomial, or Poisson if the shape is infinite.

    Source: Papernot and Steinke 2022, arXiv:2110.03620, Theorems 2 and 6; Koskela, Redberg and Wang 2024,
    arXiv:2402.06701.
    """

    def is_possible(self, event: Any) -> bool:
        return bool(1 <= event.mean < math.inf and event.shape >= 0)

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        return attrs.evolve(event, event=rule_of(event.event).under_replace_one(event.event))

    def with_amplification(self, event: Any) -> dp.DpEvent:
        return attrs.evolve(event, event=rule_of(event.event).with_amplification(event.event))

    def sampling_chance(self, event: Any) -> float:
        return min(1.0, float(event.mean * rule_of(event.event).sampling_chance(event.event)))

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        """The losses by profiles: at epsilon + shift the best has at most the mean number times a trial's delta."""
        # Of this delta a choice of trials takes a part.
        once = ComposedPLD(pairs_of([(event.event, 1)], adjacency), 4 * TAIL_DELTA, by_delta=True)
        shift = shift_of_selection(event, once.deltas)

        def deltas_of_sides(epsilons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            remove, add = once.deltas_of_sides(epsilons - shift)
            return event.mean * remove, event.mean * add

        return pair_of_curves(deltas_of_sides, shift + once.epsilon(4 * TAIL_DELTA))

    def rdp(self, event: Any, orders: Orders, adjacency: NeighboringRelation) -> np.ndarray:
        # The theorem takes one order of the trial to bound another of the best, so many are on offer.
        every = tuple(sorted({*orders, *map(float, DEFAULT_RDP_ORDERS)}))
        once = rule_of(event.event).rdp(event.event, every, adjacency)
        bounds = rdp_of_selection(event.mean, event.shape, once, np.array(every))
        return np.array([bounds[every.index(order)] for order in orders])


register(dp.SelfComposedDpEvent, _SelfComposed())
register(dp.ComposedDpEvent, _Composed())
register(dp.RepeatAndSelectDpEvent, _Selection(), "a search")
register(EitherDpEvent, _Either(), "one of several trials")
register(DisjointPartsDpEvent, _DisjointParts(), "releases on disjoint people")

"""The privacy loss of each event: one rule per event class, used by accountants and filters.

A new mechanism registers its event's rule with `register`, and needs nothing else to be priced. Code elsewhere matches
on event classes only for the order of a filter and for what spans several events: Gaussians that are merged, searches,
releases on disjoint people, and steps that an earlier event has paid for.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import dp_accounting.dp_event as dp
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS
from scipy.special import expit

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import EventJson
from algorithms.privacy.accounting.mechanism_plds import (
    AtomsPLD,
    FoldedPLD,
    GaussianPLD,
    GroupPLD,
    LaplacePLD,
    ObjectivePLD,
    PoissonReplacedPLD,
    ReversedPLD,
    SampledPLD,
)
from algorithms.privacy.accounting.pairs import (
    TAIL_DELTA,
    pair_of_curves,
    pair_of_pld,
    pld_by_library,
)
from algorithms.privacy.accounting.pld import PLDPair, PrivacyLoss
from algorithms.privacy.accounting.pld_epsilon import ComposedPLD
from algorithms.privacy.accounting.rdp import (
    rdp_by_library,
    rdp_of_fixed_size_sample,
    rdp_of_group,
    rdp_of_objective,
    rdp_of_pure,
    rdp_of_sampled_gaussian,
    rdp_of_selection,
    round_up_rdp,
)
from algorithms.privacy.accounting.selection import shift_of_selection

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Orders: TypeAlias = tuple[float, ...]
_ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
CUSTOMARY_GRID = 1e-4
"""The width of a cell for losses that are known on a grid only."""


@attrs.frozen
class PureDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A mechanism of pure differential privacy, known only by its epsilon under add-or-remove-one."""

    epsilon: float


@attrs.frozen
class ObjectivePerturbationDpEvent(dp.DpEvent):  # type: ignore[misc]
    """The exact minimum of a convex objective with a random linear term, for a linear model with one output.

    Attributes:
        noise_multiplier: Standard deviation of the term over the bound on a record's gradient.
        curvature_ratio: Bound on a record's curvature over the strong convexity of the objective. See Redberg, Koskela
            and Wang 2023.
    """

    noise_multiplier: float
    curvature_ratio: float


@attrs.frozen
class RenyiDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A mechanism known only by its Rényi divergence at one order, under add-or-remove-one.

    Attributes:
        order: Above 1.
        bound: The divergence there. The releases of a run under a Rényi filter are one such event.
    """

    order: float
    bound: float


@attrs.frozen
class SampledGroupDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A Poisson sample of a Gaussian sum, for `count` records that are all added or all removed together.

    Attributes:
        noise_multiplier: Of one record's bound.
        sampling_probability: Of each record by itself.
        count: The number of records.
    """

    noise_multiplier: float
    sampling_probability: float
    count: int


@attrs.frozen
class EitherDpEvent(dp.DpEvent):  # type: ignore[misc]
    """One of several mechanisms, chosen independently of the records, like the settings of a trial in a search.

    Attributes:
        events: The mechanisms. At each Rényi order the one with the largest divergence is charged, as a mixture
            diverges no more than its worst part.
    """

    events: list[dp.DpEvent]


@attrs.frozen
class DisjointPartsDpEvent(dp.DpEvent):  # type: ignore[misc]
    """Several mechanisms on disjoint people, each of whom is in one part alone, whoever else is there.

    One record more or less changes one part. The other parts have the same records, and at most see what was released
    of that part, so that the whole costs as much as the worst of the events (parallel composition: McSherry 2009,
    Theorem 4). A record that is replaced may change parts, so nothing is claimed under replace-one.

    Attributes:
        events: One for each part, in the order of the releases; a later one may depend on what earlier ones released.
    """

    events: list[dp.DpEvent]


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
    """The privacy loss of a class of events. By default, methods refuse or use dp_accounting."""

    def is_possible(self, event: Any) -> bool:
        """Whether the event's own numbers, without those of its parts, are in the range of its theorems."""
        return True

    def is_proven(self, event: Any, adjacency: NeighboringRelation) -> bool:
        """Whether a theorem covers the event itself, without its parts, under an adjacency."""
        return True

    def to_json(self, event: Any) -> EventJson:
        """The event's fields under their own names."""
        fields: tuple[Any, ...] = attrs.fields(type(event))
        return {field.name: _value_to_json(getattr(event, field.name)) for field in fields}

    def from_json(self, kind: type[dp.DpEvent], document: EventJson) -> dp.DpEvent:
        """The inverse of `to_json`; raises RefusedError for fields that the class does not have."""
        fields: tuple[Any, ...] = attrs.fields(kind)
        expected = {field.name: field for field in fields}
        if set(document) != set(expected):
            raise RefusedError(
                f"a {kind.__name__} has the fields {sorted(expected)}, not {sorted(document)}; check the document."
            )
        values = {name: _value_from_json(document[name]) for name in expected}
        if wrong := [name for name, field in expected.items() if not _fits(field, values[name])]:
            raise RefusedError(
                f"the field {wrong[0]} of a {kind.__name__} is {values[wrong[0]]!r:.60}, which is of another kind;"
                " check the document."
            )
        try:
            return kind(**values)
        except TypeError:  # a number where numbers belong
            raise RefusedError(f"a field of the {kind.__name__} is no list; check the document.") from None

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
        """The event that stands for it under replace-one."""
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
        """The event that stands for its Poisson sample under replace-one."""
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
        return PureDpEvent(_pure_epsilon_of_sample(size / records, rule_of(inner).pure_epsilon(inner)))

    def with_amplification(self, event: Any) -> dp.DpEvent:
        """The event with amplification by sampling computed, where accountants do not support the sample."""
        return event

    def pld(
        self, event: Any, count: int, grid: float, adjacency: NeighboringRelation
    ) -> "PrivacyLossDistribution":
        """dp_accounting's privacy loss distribution of `count` such events, for rules without `losses`."""
        return pld_by_library(event, count, grid, _ADD_OR_REMOVE_ONE, in_words(event))

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        """The privacy losses of one such event. grid: the width of a cell, for losses that are known on a grid only."""
        return pair_of_pld(self.pld(event, 1, grid, adjacency))

    def rdp(self, event: Any, orders: Orders, adjacency: NeighboringRelation) -> np.ndarray:
        """The Rényi bounds, shape [orders]."""
        return rdp_by_library(event, orders, _ADD_OR_REMOVE_ONE, in_words(event))

    def rho(self, event: Any) -> float:
        """The rho of the event under zCDP."""
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
        """An event whose loss bounds that of `event` if `count` records are added or removed together."""
        raise RefusedError(
            "{mechanism} has no bound for {count} records of one person; set {records.blocks} to one block, or"
            " {method.kind} to another.",
            code="no_bound_of_group",
            mechanism=in_words(event),
            count=count,
        )


class _Nothing(EventRule):
    def pure_epsilon(self, event: Any) -> float:
        return 0.0

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        return event

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        return _NO_LOSS

    def rho(self, event: Any) -> float:
        return 0.0


class _NotPrivate(EventRule):
    def trace_fields(self, event: Any) -> TraceFields:
        return TraceFields({"nonoise": 0.0}, ("full batch", "poisson", "importance", "without replacement"))

    def pure_epsilon(self, event: Any) -> float:
        return math.inf

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        return event


class _Scaled(EventRule):
    """Noise whose scale is a multiple of the bound on a record; a shift by k bounds divides the multiplier by k.

    Gaussian noise of multiplier z has rho 1 / (2 z^2), and so has Laplace noise, of pure epsilon 1/z (Bun and Steinke
    2016, Propositions 1.6 and 1.4).
    """

    def is_possible(self, event: Any) -> bool:
        return bool(0 < event.noise_multiplier < math.inf)

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        return self.group_privacy(event, 2)

    def rho(self, event: Any) -> float:
        square = event.noise_multiplier**2
        return float(0.5 / square) if square else math.inf

    def group_privacy(self, event: Any, count: int) -> dp.DpEvent:
        return type(event)(event.noise_multiplier / count)

    def poisson_group_privacy(self, event: Any, rate: float, count: int) -> dp.DpEvent:
        # Without any of the records in the sample nothing differs; with some of them the sum moves by at most all.
        return dp.PoissonSampledDpEvent(_any_of(count, rate), self.group_privacy(event, count))


class _Gaussian(_Scaled):
    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        return _alike(GaussianPLD(1.0 / event.noise_multiplier))

    def trace_fields(self, event: Any) -> TraceFields:
        return TraceFields({"gaussian": event.noise_multiplier})

    def poisson_under_replace_one(self, event: Any, rate: float) -> dp.DpEvent:
        # As it is: `_Poisson` has losses and Rényi bounds of its own for this relation.
        return dp.PoissonSampledDpEvent(rate, event)

    def sample_under_replace_one(self, event: Any, records: int, size: int) -> dp.DpEvent:
        return dp.SampledWithoutReplacementDpEvent(records, size, self.under_replace_one(event))

    def poisson_group_privacy(self, event: Any, rate: float, count: int) -> dp.DpEvent:
        return SampledGroupDpEvent(event.noise_multiplier, rate, count)


class _Laplace(_Scaled):
    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        return _alike(LaplacePLD(1.0 / event.noise_multiplier))

    def trace_fields(self, event: Any) -> TraceFields:
        return TraceFields({"laplace": event.noise_multiplier})

    def pure_epsilon(self, event: Any) -> float:
        return float(1.0 / event.noise_multiplier)


class _Pure(EventRule):
    def is_possible(self, event: Any) -> bool:
        return bool(event.epsilon >= 0)

    def pure_epsilon(self, event: Any) -> float:
        return float(event.epsilon)

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        return PureDpEvent(2 * event.epsilon)

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        """Those of randomised response, which dominates every mechanism with this epsilon (Kairouz et al. 2015)."""
        losses = np.array([-event.epsilon, event.epsilon])
        # P says the truth with e^epsilon / (1 + e^epsilon)
        return _alike(AtomsPLD(losses, expit(losses))) if event.epsilon > 0 else _NO_LOSS

    def rdp(self, event: Any, orders: Orders, adjacency: NeighboringRelation) -> np.ndarray:
        return rdp_of_pure(event.epsilon, np.array(orders))

    def rho(self, event: Any) -> float:
        return float(0.5 * event.epsilon**2)

    def group_privacy(self, event: Any, count: int) -> dp.DpEvent:
        return PureDpEvent(count * event.epsilon)

    def poisson_group_privacy(self, event: Any, rate: float, count: int) -> dp.DpEvent:
        return dp.PoissonSampledDpEvent(_any_of(count, rate), self.group_privacy(event, count))

    def poisson_with_amplification(self, event: Any, rate: float) -> dp.DpEvent:
        return PureDpEvent(_pure_epsilon_of_sample(rate, event.epsilon))

    def trace_fields(self, event: Any) -> TraceFields:
        if not event.epsilon:  # nothing was released, by no noise that could be named
            return TraceFields({})
        # The multiplier of each is 1 / epsilon.
        return TraceFields(dict.fromkeys(("laplace", "gumbel", "knorm"), 1 / event.epsilon))


class _Objective(EventRule):
    def is_possible(self, event: Any) -> bool:
        return bool(0 < event.noise_multiplier < math.inf and 0 <= event.curvature_ratio < math.inf)

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        return _alike(ObjectivePLD(event.noise_multiplier, event.curvature_ratio))

    def rdp(self, event: Any, orders: Orders, adjacency: NeighboringRelation) -> np.ndarray:
        return rdp_of_objective(event.noise_multiplier, event.curvature_ratio, np.array(orders))


class _Renyi(EventRule):
    def is_possible(self, event: Any) -> bool:
        return bool(1 < event.order < math.inf and event.bound >= 0)

    def rdp(self, event: Any, orders: Orders, adjacency: NeighboringRelation) -> np.ndarray:
        # The divergence never falls as the order grows.
        return np.where(np.array(orders) <= event.order, event.bound, math.inf)


class _ZCDP(EventRule):
    """Group privacy under zCDP (Bun and Steinke 2016, Proposition 1.9); replacing a record changes two."""

    def is_possible(self, event: Any) -> bool:
        return bool(event.rho >= 0 and event.xi >= 0)

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        return super().under_replace_one(event) if event.xi else dp.ZCDpEvent(4 * event.rho)

    def rho(self, event: Any) -> float:
        return super().rho(event) if event.xi else float(event.rho)

    def group_privacy(self, event: Any, count: int) -> dp.DpEvent:
        return super().group_privacy(event, count) if event.xi else dp.ZCDpEvent(count**2 * event.rho)

    def trace_fields(self, event: Any) -> TraceFields:
        if event.xi or not event.rho:
            return TraceFields({})
        # Noise of multiplier 1 / epsilon: rho is epsilon^2 / 8 for Gumbel noise, whose privacy loss has a range of
        # epsilon, and epsilon^2 / 2 for Laplace noise.
        return TraceFields(
            {"gumbel": math.sqrt(1 / (8 * event.rho)), "laplace": math.sqrt(1 / (2 * event.rho))}
        )


class _Poisson(EventRule):
    def is_possible(self, event: Any) -> bool:
        return bool(0 <= event.sampling_probability <= 1)

    def pure_epsilon(self, event: Any) -> float:
        return _pure_epsilon_of_sample(
            event.sampling_probability, rule_of(event.event).pure_epsilon(event.event)
        )

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        return rule_of(event.event).poisson_under_replace_one(event.event, event.sampling_probability)

    def with_amplification(self, event: Any) -> dp.DpEvent:
        return rule_of(event.event).poisson_with_amplification(event.event, event.sampling_probability)

    def trace_fields(self, event: Any) -> TraceFields:
        inner = rule_of(event.event).trace_fields(event.event)
        return TraceFields(inner.multipliers, ("poisson", "importance"), event.sampling_probability)

    def pld(
        self, event: Any, count: int, grid: float, adjacency: NeighboringRelation
    ) -> "PrivacyLossDistribution":
        return pld_by_library(event, count, grid, adjacency, in_words(event))

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        inner, rate = event.event, event.sampling_probability
        if not isinstance(inner, dp.GaussianDpEvent | dp.LaplaceDpEvent):
            return super().losses(event, grid, adjacency)
        if rate == 0:
            return _NO_LOSS
        if adjacency is _REPLACE_ONE and isinstance(inner, dp.GaussianDpEvent):
            return _alike(PoissonReplacedPLD(inner.noise_multiplier, rate))
        whole = rule_of(inner).losses(inner, grid, adjacency)
        if rate == 1:
            return whole
        sampled = SampledPLD(whole.remove, rate)
        return PLDPair(sampled, ReversedPLD(sampled))

    def rdp(self, event: Any, orders: Orders, adjacency: NeighboringRelation) -> np.ndarray:
        if isinstance(event.event, dp.LaplaceDpEvent):
            return rdp_of_pure(self.pure_epsilon(event), np.array(orders))
        if _is_sampled_gaussian(event, adjacency):
            rate = event.sampling_probability
            bounds = rdp_of_sampled_gaussian(event.event.noise_multiplier, rate, orders)
        else:
            bounds = rdp_by_library(event, orders, adjacency, in_words(event))
        return round_up_rdp(bounds, np.array(orders))

    def without_subsampling(self, event: Any, adjacency: NeighboringRelation) -> dp.DpEvent:
        return rule_of(event.event).without_subsampling(event.event, adjacency)

    def sampling_chance(self, event: Any) -> float:
        return float(event.sampling_probability)

    def group_privacy(self, event: Any, count: int) -> dp.DpEvent:
        return rule_of(event.event).poisson_group_privacy(event.event, event.sampling_probability, count)


def _is_sampled_gaussian(event: Any, adjacency: NeighboringRelation) -> bool:
    """Whether a Poisson sample has a Gaussian event, whose loss and bounds have fast vectorised code."""
    is_gaussian = isinstance(event.event, dp.GaussianDpEvent) and event.event.noise_multiplier > 0
    return is_gaussian and 0 < event.sampling_probability < 1 and adjacency is _ADD_OR_REMOVE_ONE


class _WithoutReplacement(EventRule):
    """Samples of a fixed size, under replace-one.

    `losses`, for normal noise: Given the other records of the sample, outputs before and after are (1 - q) A + q B and
    (1 - q) A + q B', where A, B and B' are normal with centres no further apart than two bounds, and q is the share of
    the sample. So for e >= 0 delta is at most q times that of two bounds without sampling at log(1 + (exp(e) - 1) / q)
    (Balle, Barthe and Gaboardi 2018, Theorems 2 and 11), the same the other way round, and the pair with these deltas
    dominates (Zhu, Dong and Wang 2022, arXiv:2106.08567, Theorem 11 and Proposition 12).
    """

    def is_possible(self, event: Any) -> bool:
        return bool(0 <= event.sample_size <= event.source_dataset_size and event.source_dataset_size > 0)

    def is_proven(self, event: Any, adjacency: NeighboringRelation) -> bool:
        return bool(adjacency is _REPLACE_ONE)

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        return rule_of(event.event).sample_under_replace_one(
            event.event, event.source_dataset_size, event.sample_size
        )

    def trace_fields(self, event: Any) -> TraceFields:
        inner, rate = (
            rule_of(event.event).trace_fields(event.event),
            event.sample_size / event.source_dataset_size,
        )
        return TraceFields(inner.multipliers, ("without replacement",), rate)

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        if not isinstance(event.event, dp.GaussianDpEvent) or adjacency is not _REPLACE_ONE:
            return super().losses(event, grid, adjacency)
        whole, rate = (
            GaussianPLD(1.0 / event.event.noise_multiplier),
            event.sample_size / event.source_dataset_size,
        )
        if rate == 0:
            return _NO_LOSS
        return _alike(whole if rate == 1 else FoldedPLD(SampledPLD(whole, rate)))

    def rdp(self, event: Any, orders: Orders, adjacency: NeighboringRelation) -> np.ndarray:
        inner, rate = event.event, event.sample_size / event.source_dataset_size
        if isinstance(inner, dp.GaussianDpEvent) and 0 < rate < 1 and adjacency is _REPLACE_ONE:
            bounds = rdp_of_fixed_size_sample(inner.noise_multiplier, rate, orders)
        else:
            bounds = rdp_by_library(event, orders, adjacency, in_words(event))
        return round_up_rdp(bounds, np.array(orders))

    def without_subsampling(self, event: Any, adjacency: NeighboringRelation) -> dp.DpEvent:
        return (
            rule_of(event.event).without_subsampling(event.event, adjacency)
            if adjacency is _REPLACE_ONE
            else event
        )


class _SampledGroup(EventRule):
    """The mixture of `mechanism_plds.GroupPLD`, a pair for add-or-remove-one alone."""

    def is_possible(self, event: Any) -> bool:
        in_range = 0 < event.noise_multiplier < math.inf and 0 <= event.sampling_probability <= 1
        return bool(in_range and event.count >= 1 and event.count == int(event.count))

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        if event.sampling_probability == 0:
            return _NO_LOSS
        group = GroupPLD(event.noise_multiplier, event.sampling_probability, event.count)
        return PLDPair(group, ReversedPLD(group))

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        """The bound by convexity: with this chance any of the records are sampled, and move the sum by at most all."""
        rate = _any_of(event.count, event.sampling_probability)
        return dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(event.noise_multiplier / event.count))

    def rdp(self, event: Any, orders: Orders, adjacency: NeighboringRelation) -> np.ndarray:
        if event.sampling_probability in (0, 1):
            shift = event.count * event.sampling_probability  # all records of the group, or none
            return np.asarray(np.array(orders) / 2 * (shift / event.noise_multiplier) ** 2)
        return rdp_of_group(event.noise_multiplier, event.sampling_probability, event.count, orders)

    def sampling_chance(self, event: Any) -> float:
        return min(1.0, float(event.count * event.sampling_probability))

    def without_subsampling(self, event: Any, adjacency: NeighboringRelation) -> dp.DpEvent:
        return dp.GaussianDpEvent(event.noise_multiplier / event.count)


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
            case [PureDpEvent(epsilon=epsilon), PureDpEvent()]:
                return TraceFields({"pureobjectivenoise": 1 / epsilon})
        return TraceFields({})

    def releases(self, event: Any) -> Iterator[tuple[dp.DpEvent, int]]:
        for inner in event.events:
            yield from rule_of(inner).releases(inner)


class _Either(_Composed):
    def combine(self, event: Any, values: list[Any]) -> Any:
        return np.max(values, axis=0)

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
        """The worst way in which `count` records can be in several parts; these are then paid for together."""
        numbers = product(range(count + 1), repeat=len(event.events))
        return DisjointPartsDpEvent(
            [
                dp.ComposedDpEvent(
                    [
                        rule_of(part).group_privacy(part, number) if number > 1 else part
                        for part, number in zip(event.events, in_parts, strict=True)
                        if number
                    ]
                )
                for in_parts in numbers
                if sum(in_parts) == count
            ]
        )


class _Selection(EventRule):
    """The best of a random number of repetitions, by Rényi divergences and by privacy profiles.

    The number is truncated negative binomial, or Poisson if the shape is infinite (null in a document).

    Source: Papernot and Steinke 2022, arXiv:2110.03620, Theorems 2 and 6; Koskela, Redberg and Wang 2024,
    arXiv:2402.06701.
    """

    def is_possible(self, event: Any) -> bool:
        return bool(1 <= event.mean < math.inf and event.shape >= 0)

    def to_json(self, event: Any) -> EventJson:
        shape = event.shape if math.isfinite(event.shape) else None
        return {"event": event_to_json(event.event), "mean": event.mean, "shape": shape}

    def from_json(self, kind: type[dp.DpEvent], document: EventJson) -> dp.DpEvent:
        is_poisson = document.get("shape", 0.0) is None
        known = super().from_json(kind, {**document, "shape": 1.0} if is_poisson else document)
        return attrs.evolve(known, shape=math.inf) if is_poisson else known

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


_RULES: dict[type[dp.DpEvent], EventRule] = {
    dp.NoOpDpEvent: _Nothing(),
    dp.NonPrivateDpEvent: _NotPrivate(),
    dp.GaussianDpEvent: _Gaussian(),
    dp.LaplaceDpEvent: _Laplace(),
    dp.PoissonSampledDpEvent: _Poisson(),
    dp.SampledWithoutReplacementDpEvent: _WithoutReplacement(),
    dp.SelfComposedDpEvent: _SelfComposed(),
    dp.ComposedDpEvent: _Composed(),
    dp.ZCDpEvent: _ZCDP(),
    dp.RepeatAndSelectDpEvent: _Selection(),
    EitherDpEvent: _Either(),
    DisjointPartsDpEvent: _DisjointParts(),
    PureDpEvent: _Pure(),
    ObjectivePerturbationDpEvent: _Objective(),
    RenyiDpEvent: _Renyi(),
    SampledGroupDpEvent: _SampledGroup(),
}


def register(kind: type[dp.DpEvent], rule: EventRule, words: str | None = None) -> None:
    """Register the rule of an event class, for all accountants, filters and documents.

    Args:
        kind: The class, which documents name.
        rule: Its costs.
        words: What messages call it; by default the class's name.

    Raises:
        RefusedError: For a registered name.
    """
    if kind.__name__ in {known.__name__ for known in _RULES}:
        raise RefusedError(f"the event {kind.__name__} has a rule already; give the new event another name.")
    _RULES[kind] = rule
    if words is not None:
        _WORDS[kind] = words


def rule_of(event: dp.DpEvent) -> EventRule:
    """The rule of an event's class; for unknown classes a rule that uses dp_accounting."""
    return _RULES.get(type(event)) or EventRule()


def parts(event: dp.DpEvent) -> list[dp.DpEvent]:
    """The events that an event consists of."""
    inner = getattr(event, "event", None)
    return [*([] if inner is None else [inner]), *getattr(event, "events", ())]


def alternatives_of(event: dp.DpEvent) -> list[dp.DpEvent]:
    """The events one of which is the release; one that is no choice is its only alternative."""
    return list(event.events) if isinstance(event, EitherDpEvent) else [event]


def with_parts(event: Any, change: Callable[[dp.DpEvent], dp.DpEvent]) -> dp.DpEvent:
    """The event with a function applied to each of its parts."""
    if hasattr(event, "events"):
        return attrs.evolve(event, events=[change(inner) for inner in event.events])
    return attrs.evolve(event, event=change(event.event))


def event_to_json(event: dp.DpEvent) -> EventJson:
    """An event as a nested object: its class name under "type", its fields under their own names.

    Raises RefusedError for an event type that the project does not use.
    """
    if type(event) not in _RULES:
        raise RefusedError(f"the event {type(event).__name__} is not one of {_names()}; use one of these.")
    return {"type": type(event).__name__} | rule_of(event).to_json(event)


def event_from_json(document: EventJson) -> dp.DpEvent:
    """The inverse of `event_to_json`.

    Raises RefusedError for an unknown type, missing or unknown fields, and numbers that no mechanism has or that
    take for ever to account for.
    """
    name = document.get("type")
    for kind, rule in _RULES.items():
        if kind.__name__ == name:
            event = rule.from_json(kind, {key: value for key, value in document.items() if key != "type"})
            check_possible(event)
            _check_ranges(event)
            return event
    raise RefusedError(f"the event type {name!r} is not one of {_names()}; check the document.")


def check_possible(event: dp.DpEvent) -> None:
    """Raises RefusedError for an event whose own numbers are outside the range of its theorems."""
    if not rule_of(event).is_possible(event):
        numbers = ", ".join(
            f"{name} {value!r}" for name, value in _fields_of(event) if isinstance(value, int | float)
        )
        raise RefusedError(
            f"{in_words(event)} is no mechanism with these numbers ({numbers or 'none'}); check the document that it"
            " comes from."
        )


def _check_ranges(event: dp.DpEvent) -> None:
    for name, value in _fields_of(event):
        low, high = (
            _RANGES.get(f"{type(event).__name__}.{name}") or _RANGES.get(name) or (-math.inf, math.inf)
        )
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float) and math.isfinite(number) and not low <= number <= high:
                raise RefusedError(
                    f"{name} {number!r:.60} of {in_words(event)} is outside {low:g} to {high:g}; check the document."
                )
    if isinstance(event, SampledGroupDpEvent) and event.count**2 > _MAX_GROUP_WORK * event.noise_multiplier:
        raise RefusedError(
            f"{event.count} records under noise {event.noise_multiplier:g} take too long to account for; check the"
            " document."
        )


def _fields_of(event: Any) -> Iterable[tuple[str, Any]]:
    return attrs.asdict(event, recurse=False).items()


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


_WORDS: dict[type[dp.DpEvent], str] = {
    dp.GaussianDpEvent: "Gaussian noise",
    dp.LaplaceDpEvent: "Laplace noise",
    dp.ZCDpEvent: "a selection by zCDP",
    dp.RepeatAndSelectDpEvent: "a search",
    PureDpEvent: "a release of pure epsilon",
    ObjectivePerturbationDpEvent: "objective perturbation",
    RenyiDpEvent: "a run under a Rényi filter",
    SampledGroupDpEvent: "a Poisson sample of several records of one person",
    EitherDpEvent: "one of several trials",
    DisjointPartsDpEvent: "releases on disjoint people",
}


def _names() -> str:
    return ", ".join(kind.__name__ for kind in _RULES)


def _value_to_json(value: Any) -> Any:
    if isinstance(value, dp.DpEvent):
        return event_to_json(value)
    if isinstance(value, list | tuple):
        return [_value_to_json(item) for item in value]
    return value


def _value_from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return event_from_json(value)
    if isinstance(value, list):
        return [_value_from_json(item) for item in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -_MAX_NUMBER <= value <= _MAX_NUMBER:
        raise RefusedError(
            f"an event's field must be a number, an event or a list of these, not {value!r:.60}."
        )
    return value


def _fits(field: Any, value: Any) -> bool:
    """Whether a field that is an event, events or a number in its class is that here."""
    if field.name == "event":
        return isinstance(value, dp.DpEvent)
    if field.name == "events":
        return isinstance(value, list) and all(isinstance(part, dp.DpEvent) for part in value)
    if field.type in (int, "int"):
        return isinstance(value, int)
    return field.type not in (float, "float") or isinstance(value, int | float)


_MAX_NUMBER = 1e100
"""The largest number in a document: products and squares of larger ones are beyond a float."""
_RANGES = {
    "noise_multiplier": (1e-6, 1e12),
    "mean": (1.0, 1e6),
    "parts": (1.0, 1e9),
    "steps": (1.0, 1e6),
    "leaves": (0.0, 1e6),
    "count": (0.0, 1e9),
    "SampledGroupDpEvent.count": (1.0, 1000.0),
    **dict.fromkeys(("coefficients", "weights"), (-1e6, 1e6)),
}
"""The ranges of fields in a document, by name or by event and name: accountants take bounded time and memory within."""
_MAX_GROUP_WORK = 1e4
"""The largest squared size of a group over its noise: its moment at order a is an integral of a times as many terms."""


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
    return pairs or [(_NO_LOSS, 1)]


def _alike(pld: PrivacyLoss) -> PLDPair:
    return PLDPair(pld, pld)


_NO_LOSS = _alike(AtomsPLD(np.zeros(1), np.ones(1)))


def _pure_epsilon_of_sample(rate: float, epsilon: float) -> float:
    """ln(1 + rate (e^epsilon - 1)), without overflow (Balle, Barthe and Gaboardi 2018, Theorems 8 and 9)."""
    if epsilon < 1.0:
        return math.log1p(rate * math.expm1(epsilon))
    with np.errstate(divide="ignore"):  # of a rate of 0 or 1
        return float(np.logaddexp(np.log1p(-rate), np.log(rate) + epsilon))


def _any_of(count: int, rate: float) -> float:
    """The chance that a sample has any of so many records."""
    return 1.0 if rate == 1 else -math.expm1(count * math.log1p(-rate))

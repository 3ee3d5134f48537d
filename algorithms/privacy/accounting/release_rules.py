"""The theorems for events of single releases: noise, samples of it, and what a single bound is known of."""

import math
from typing import TYPE_CHECKING, Any

import dp_accounting.dp_event as dp
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy.special import expit

from algorithms.privacy.accounting.event_classes import (
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    RenyiDpEvent,
    SampledGroupDpEvent,
)
from algorithms.privacy.accounting.event_rules import (
    ADD_OR_REMOVE_ONE,
    NO_LOSS,
    REPLACE_ONE,
    EventRule,
    Orders,
    TraceFields,
    in_words,
    pure_epsilon_of_sample,
    register,
    rule_of,
    same_both_ways,
)
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
from algorithms.privacy.accounting.pairs import pld_by_library
from algorithms.privacy.accounting.pld import PLDPair
from algorithms.privacy.accounting.rdp import (
    rdp_by_library,
    rdp_of_fixed_size_sample,
    rdp_of_group,
    rdp_of_objective,
    rdp_of_pure,
    rdp_of_sampled_gaussian,
    round_up_rdp,
)

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


class _Nothing(EventRule):
    def pure_epsilon(self, event: Any) -> float:
        return 0.0

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        return event

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        return NO_LOSS

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
        return same_both_ways(GaussianPLD(1.0 / event.noise_multiplier))

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
        return same_both_ways(LaplacePLD(1.0 / event.noise_multiplier))

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
        return same_both_ways(AtomsPLD(losses, expit(losses))) if event.epsilon > 0 else NO_LOSS

    def rdp(self, event: Any, orders: Orders, adjacency: NeighboringRelation) -> np.ndarray:
        return rdp_of_pure(event.epsilon, np.array(orders))

    def rho(self, event: Any) -> float:
        return float(0.5 * event.epsilon**2)

    def group_privacy(self, event: Any, count: int) -> dp.DpEvent:
        return PureDpEvent(count * event.epsilon)

    def poisson_group_privacy(self, event: Any, rate: float, count: int) -> dp.DpEvent:
        return dp.PoissonSampledDpEvent(_any_of(count, rate), self.group_privacy(event, count))

    def poisson_with_amplification(self, event: Any, rate: float) -> dp.DpEvent:
        return PureDpEvent(pure_epsilon_of_sample(rate, event.epsilon))

    def trace_fields(self, event: Any) -> TraceFields:
        if not event.epsilon:  # nothing was released, by no noise that could be named
            return TraceFields({})
        # The multiplier of each is 1 / epsilon.
        return TraceFields(dict.fromkeys(("laplace", "gumbel", "knorm"), 1 / event.epsilon))


class _Objective(EventRule):
    def is_possible(self, event: Any) -> bool:
        return bool(0 < event.noise_multiplier < math.inf and 0 <= event.curvature_ratio < math.inf)

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        return same_both_ways(ObjectivePLD(event.noise_multiplier, event.curvature_ratio))

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
        return pure_epsilon_of_sample(
            event.sampling_probability, rule_of(event.event).pure_epsilon(event.event)
        )

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        return rule_of(event.event).poisson_under_replace_one(event.event, event.sampling_probability)

    def with_amplification(self, event: Any) -> dp.DpEvent:
        return rule_of(event.event).poisson_with_amplification(event.event, event.sampling_probability)

    def trace_fields(self, event: Any) -> TraceFields:
        inner = rule_of(event.event).trace_fields(event.event)
        return TraceFields(inner.multipliers, ("poisson", "importance"), event.sampling_probability)

    def pld(self, event: Any, grid: float, adjacency: NeighboringRelation) -> "PrivacyLossDistribution":
        return pld_by_library(event, grid, adjacency, in_words(event))

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        inner, rate = event.event, event.sampling_probability
        if not isinstance(inner, dp.GaussianDpEvent | dp.LaplaceDpEvent):
            return super().losses(event, grid, adjacency)
        if rate == 0:
            return NO_LOSS
        if adjacency is REPLACE_ONE and isinstance(inner, dp.GaussianDpEvent):
            return same_both_ways(PoissonReplacedPLD(inner.noise_multiplier, rate))
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
    return is_gaussian and 0 < event.sampling_probability < 1 and adjacency is ADD_OR_REMOVE_ONE


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
        return bool(adjacency is REPLACE_ONE)

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
        if not isinstance(event.event, dp.GaussianDpEvent) or adjacency is not REPLACE_ONE:
            return super().losses(event, grid, adjacency)
        whole, rate = (
            GaussianPLD(1.0 / event.event.noise_multiplier),
            event.sample_size / event.source_dataset_size,
        )
        if rate == 0:
            return NO_LOSS
        return same_both_ways(whole if rate == 1 else FoldedPLD(SampledPLD(whole, rate)))

    def rdp(self, event: Any, orders: Orders, adjacency: NeighboringRelation) -> np.ndarray:
        inner, rate = event.event, event.sample_size / event.source_dataset_size
        if isinstance(inner, dp.GaussianDpEvent) and 0 < rate < 1 and adjacency is REPLACE_ONE:
            bounds = rdp_of_fixed_size_sample(inner.noise_multiplier, rate, orders)
        else:
            bounds = rdp_by_library(event, orders, adjacency, in_words(event))
        return round_up_rdp(bounds, np.array(orders))

    def without_subsampling(self, event: Any, adjacency: NeighboringRelation) -> dp.DpEvent:
        return (
            rule_of(event.event).without_subsampling(event.event, adjacency)
            if adjacency is REPLACE_ONE
            else event
        )


class _SampledGroup(EventRule):
    """The mixture of `mechanism_plds.GroupPLD`, a pair for add-or-remove-one alone."""

    def is_possible(self, event: Any) -> bool:
        in_range = 0 < event.noise_multiplier < math.inf and 0 <= event.sampling_probability <= 1
        return bool(in_range and event.count >= 1 and event.count == int(event.count))

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        if event.sampling_probability == 0:
            return NO_LOSS
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


def _any_of(count: int, rate: float) -> float:
    """The chance that a sample has any of so many records."""
    return 1.0 if rate == 1 else -math.expm1(count * math.log1p(-rate))


register(dp.NoOpDpEvent, _Nothing())
register(dp.NonPrivateDpEvent, _NotPrivate())
register(dp.GaussianDpEvent, _Gaussian(), "Gaussian noise")
register(dp.LaplaceDpEvent, _Laplace(), "Laplace noise")
register(dp.PoissonSampledDpEvent, _Poisson())
register(dp.SampledWithoutReplacementDpEvent, _WithoutReplacement())
register(dp.ZCDpEvent, _ZCDP(), "a selection by zCDP")
register(PureDpEvent, _Pure(), "a release of pure epsilon")
register(ObjectivePerturbationDpEvent, _Objective(), "objective perturbation")
register(RenyiDpEvent, _Renyi(), "a run under a Rényi filter")
register(SampledGroupDpEvent, _SampledGroup(), "a Poisson sample of several records of one person")

"""DPIS: records with larger gradients are sampled more often (Wei, Bao, Xiao and Yang 2022, Algorithm 1, equation 7).

With N records, expected batch b, clip norm C and K the sum of all clipped norms, a step takes a record with probability
q |g| / C for q = b C / K, adds C g / |g| of each taken one and noise of sigma_G N C^2 / K, and divides by q N: equation
7, multiplied out. Its event is PoissonSampled(q, Gaussian(sigma_G N C / K)): event, noise and divisor are those of a
step of DP-SGD with batches of q N = b N C / K records. That step's variance from sampling is q (1 - q) |g|^2 a record,
and here it is q C |g| (1 - q |g| / C), which is never less. So what DPIS can save is computation: about k b gradients
a step, and a pass over all records an epoch, for what DP-SGD does with b N C / K gradients a step.

K is released at the start of each epoch and sigma_G chosen for what is left, under a Rényi filter at one order. In the
first epochs all later ones are reserved for at K = N C; after that, at the K of the epoch. With `public_norms` K is a
schedule of the settings instead: nothing is released for it, and accounting by PLD holds.

Differences from the paper: equation 7, not line 26 of Algorithm 1, which divides by b twice; K and K* are sums over
all records, charged as Gaussian(sigma_K) without the amplification of equation 19; K is at least k b C, else a
probability would be cut off at 1 and its contribution exceed K / N; last norms are never raised beyond C; the order is
fixed in advance, at the best for K = N C; noise and number of steps are not computed from a private number of records;
the next clip norm lies between public bounds, and K* is taken at the parameters at which it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import dp_accounting.dp_event as dp
from pydantic import Field

from algorithms.core.calibration import (
    MAX_NOISE,
    SLACK,
    Batches,
    Repeated,
    check_adaptive,
    events_before,
    find_min_noise,
    plan_fixed,
    plan_renyi,
)
from algorithms.core.method import STORED_AS
from algorithms.core.minibatch import batches, check_no_noise_limit, expected_batch
from algorithms.core.optimizers import (
    MAX_STEPS,
    Bound,
    Count,
    OptimizerConfig,
    OptimizerState,
    Positive,
    Share,
)
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.settings import Strict
from algorithms.errors import RefusedError, Slot
from algorithms.gradients import L2, Normalised
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting.epsilon import rdp
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.accounting.filters import RenyiBudget, conversion
from algorithms.privacy.mechanisms.release import Gaussian, Release, gradient_release, norm_total_release
from algorithms.privacy.mechanisms.sampling import Importance

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from algorithms.privacy.barrier.barrier import Barrier
else:
    torch = lazy_module("torch")

_NO_PROBABILITY_ABOVE_1 = 1 + 1e-6
"""A factor of the least fraction, so that rounding puts no probability above 1."""

_ORDERS = (*map(float, range(2, 33)), *map(float, range(36, 65, 4)), 80.0, 96.0, 128.0, 192.0, 256.0, 512.0)

RepeatedEvent = tuple[float, int]
"""A fraction K / (N C), and how many steps are taken at it."""


@dataclass(frozen=True)
class EpochParams:
    """What the plan keeps: steps of an epoch; expected batch b, 0 where it is released first.

    Where norms are released also: the multiplier of their noise; at the plan's order the cost of one of their releases
    and what is spent before the first epoch; sigma_G if K = N C throughout.
    """

    steps_per_epoch: int
    expected_batch: float
    norm_multiplier: float = 0.0
    norm_cost: float = 0.0
    spent: float = 0.0
    most_noise: float | None = None


@dataclass(frozen=True)
class AdaptiveClipping(Strict):
    """The clip norm of later epochs, from the mean of norms clipped to the largest.

    min_clip_norm, max_clip_norm: its bounds; norms are clipped to the largest. factor: of the mean.
    """

    min_clip_norm: Bound
    max_clip_norm: Bound
    factor: Positive = 1.0


@dataclass(frozen=True)
class Epoch:
    """What is public of an epoch, all []: expected batch b, 0 until it is released; clip norm C; fraction K / (N C);
    noise sigma_G; spent: Rényi cost at the plan's order, that of all of the epoch's steps included.
    """

    expected_batch: Tensor
    clip_norm: Tensor
    fraction: Tensor
    noise: Tensor
    spent: Tensor

    @classmethod
    def of(cls, *numbers: float) -> Epoch:
        """The epoch of these numbers, in the order above."""
        return cls(*(torch.tensor(number, dtype=torch.float64) for number in numbers))

    def with_numbers(self, **numbers: float) -> Epoch:
        """The same with other numbers."""
        return replace(self, **{name: torch.full_like(getattr(self, name), n) for name, n in numbers.items()})


def plan_fixed_noise(
    event: Callable[[float], dp.DpEvent],
    steps: int,
    others: Schedule,
    target: Target,
    *,
    noise_setting: str = "norm_noise",
) -> tuple[float, float]:
    """The order at which `steps` steps at K = N C need the least noise beside other releases, and that noise.

    It follows from public values and is fixed with the plan, as a filter needs it. event: of a step at a noise sigma_G.
    noise_setting: which decides the noise of the norms among the other releases. Raises RefusedError, with the one to
    blame, if the filter or what is released beside the steps leaves nothing, and if no noise fits in what is left.
    """
    budget, delta = target.budget, target.budget.delta
    check_adaptive(target)
    target_words = f"epsilon {budget.epsilon:g} at delta {delta:g}"

    def remaining_budget(spent: Schedule) -> dict[float, float]:
        """What releases leave of the budget at each order, where they leave something."""
        costs = zip(_ORDERS, map(float, rdp(spent, orders=_ORDERS)), strict=True)
        limits = {order: budget.epsilon - conversion(order, delta) - cost for order, cost in costs}
        return {order: limit for order, limit in limits.items() if limit > 0}

    if not remaining_budget([]):
        min_epsilon = min(conversion(order, delta) for order in _ORDERS)
        raise RefusedError(
            "{asked} is not above {smallest:.4g}, what a Rényi filter costs at any noise; set"
            " {target.epsilon} to more, or give {method.public_norms}.",
            code="below_filter",
            asked=target_words,
            smallest=min_epsilon,
        )
    if not remaining_budget(target.prior_events):
        raise RefusedError(
            "{asked} leaves nothing beside the learned features; raise their noise or {target.epsilon}.",
            code="features_take_budget",
            asked=target_words,
        )
    limits = remaining_budget(others)
    if not limits:
        raise RefusedError(
            "{asked} leaves nothing beside the releases of norms; raise {noise} or {target.epsilon}, or give"
            " {method.public_norms}.",
            code="norms_take_budget",
            asked=target_words,
            noise=Slot(f"method.{noise_setting}"),
        )
    noise_multiplier = find_min_noise(lambda noise: [(event(noise), steps)], limits)
    if noise_multiplier is None:
        raise RefusedError(
            "no noise multiplier up to {largest:.0e} fits in what {asked} leaves for the steps; set"
            " {target.epsilon} to more, or take more noise in what is released beside them.",
            code="no_noise_fits_rest",
            largest=MAX_NOISE,
            asked=target_words,
        )
    noise, order = noise_multiplier
    return order, noise


@dataclass(frozen=True)
class ImportanceState:
    """epoch: what the epoch of the next step began with."""

    optimizer_state: OptimizerState = field(metadata={STORED_AS: "moving"})
    epoch: Epoch

    @property
    def parameters(self) -> Tensor:
        """Where the next gradient is taken, shape [d]."""
        return self.optimizer_state.parameters


@dataclass(frozen=True)
class DPIS(Strict):
    """Settings of DPIS.

    epochs: each of records / b steps, rounded up. expected_batch_size: b, where the number of records is
    public. sampling_rate: instead, where it is not. clip_norm: the L2 bound C of a record's gradient, in the
    first epoch. oversampling: how many times more candidates are drawn than are needed; floor: the least last norm,
    as part of C. norm_noise: sigma_K as part of the number of records, 0.02 if nothing is given;
    norm_noise_multiplier: instead, sigma_K itself, where that number is private. cautious_share: of the epochs, the
    first, whose successors are reserved for at K = N C.
    adaptive_clipping: None keeps C. public_norms: K / (N C) in the first epoch and in the last, linear between them.
    update: the optimizer.

    Example:
        >>> from algorithms import DPIS
        >>> DPIS(epochs=10, expected_batch_size=256).oversampling
        5.0
    """

    epochs: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    expected_batch_size: Count | None = None
    sampling_rate: Share | None = None
    clip_norm: Bound = 1.0
    oversampling: Annotated[float, Field(ge=1, le=1e6)] = 5.0
    floor: Share = 0.01
    norm_noise: Positive | None = None
    norm_noise_multiplier: Positive | None = None
    cautious_share: Annotated[float, Field(ge=0, le=1)] = 0.8
    adaptive_clipping: AdaptiveClipping | None = None
    public_norms: tuple[Share, Share] | None = None
    update: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        if self.norm_noise is None and self.norm_noise_multiplier is None:
            object.__setattr__(self, "norm_noise", 0.02)

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The budget and order that the run is held to, or with public norms its noise.

        Raises RefusedError where the settings do not fit each other, the data or the budget.
        """
        check_no_noise_limit(self.update, "dpis")
        sampled = batches(
            facts, expected_batch_size=self.expected_batch_size, sampling_rate=self.sampling_rate
        )
        self._check(sampled.rate, facts)
        steps = math.ceil(1 / sampled.rate - SLACK)
        if steps * self.epochs > MAX_STEPS:
            raise RefusedError(
                "{epochs:,} epochs of {steps:,} steps are more than {largest:,} steps, which take too long"
                " to plan; take fewer epochs or larger batches.",
                code="too_many_steps",
                epochs=self.epochs,
                steps=steps,
                largest=MAX_STEPS,
            )
        epoch = EpochParams(steps, sampled.divisor or 0.0)
        make = self._plan_released if self.public_norms is None else self._plan_public
        return make(sampled, epoch, target, facts)

    def init(self, parameters: Tensor, plan: Plan) -> ImportanceState:
        """The state at the model's start."""
        epoch = plan.params(EpochParams)
        numbers = (epoch.expected_batch, self.clip_norm, 1.0, 0.0, epoch.spent)
        return ImportanceState(self.update.start(parameters), Epoch.of(*numbers))

    def step(self, state: ImportanceState, plan: Plan, barrier: Barrier) -> ImportanceState | None:
        """One noisy gradient over an importance sample, one update; before an epoch's first, what the epoch needs.

        None where nothing is left for the next epoch.
        """
        epoch = self._epoch_of_next_step(state, plan, barrier)
        if epoch is None:
            return None
        fraction, clip_norm = float(epoch.fraction), float(epoch.clip_norm)
        release = self._release(plan.sampling_rate, fraction, float(epoch.noise), clip_norm)  # q = b C / K
        gradient = barrier.gradient(
            state.parameters,
            sampling=release.sampling,
            clipping=Normalised(clip_norm),
            noise=release.noise,
            divisor=float(epoch.expected_batch) / fraction,  # q N = b / (K / (N C))
        )
        return ImportanceState(self.update.apply(state.optimizer_state, gradient, steps=plan.steps), epoch)

    def released(self, state: ImportanceState) -> Tensor:
        """The last iterate, or the average the settings ask for, shape [d]."""
        return self.update.published_parameters(state.optimizer_state)

    def _epoch_of_next_step(self, state: ImportanceState, plan: Plan, barrier: Barrier) -> Epoch | None:
        """The epoch of the next step: at its start with a new clip norm, K and noise, or None where none is left."""
        epoch = state.epoch
        index, step = divmod(int(state.optimizer_state.count), plan.params(EpochParams).steps_per_epoch)
        if step:
            return epoch
        if not epoch.expected_batch:
            epoch = epoch.with_numbers(expected_batch=expected_batch(barrier, plan))
        if self.public_norms is not None:
            return epoch.with_numbers(fraction=self._fraction_at(index), noise=plan.noise_multiplier)
        return self._with_affordable_noise(
            self._with_released_norms(state.parameters, epoch, index, plan, barrier), index, plan
        )

    def _with_released_norms(
        self, at: Tensor, epoch: Epoch, index: int, plan: Plan, barrier: Barrier
    ) -> Epoch:
        """The epoch with released norms: its clip norm, where it follows them, and K."""
        noise = Gaussian(plan.params(EpochParams).norm_multiplier)
        records = float(epoch.expected_batch) / plan.sampling_rate  # N, as b is the rate times it
        clip_norm, adaptive = float(epoch.clip_norm), self.adaptive_clipping
        if adaptive is not None and index > 0:
            largest = barrier.norm_total(at, bound=L2(adaptive.max_clip_norm), noise=noise)
            clip_norm = min(
                max(adaptive.factor * largest / records, adaptive.min_clip_norm), adaptive.max_clip_norm
            )
        total = barrier.norm_total(at, bound=L2(clip_norm), noise=noise)
        # K >= k b C, over N C
        min_fraction = self.oversampling * plan.sampling_rate * _NO_PROBABILITY_ABOVE_1
        fraction = min(max(total / (records * clip_norm), min_fraction), 1.0)
        return epoch.with_numbers(clip_norm=clip_norm, fraction=fraction)

    def _with_affordable_noise(self, epoch: Epoch, index: int, plan: Plan) -> Epoch | None:
        """The epoch with the least noise that its steps and later ones can afford, or None where they afford none."""
        assert isinstance(plan.filter, RenyiBudget)
        order, limit, settings = plan.filter.order, plan.filter.limit * (1 - SLACK), plan.params(EpochParams)
        per_epoch, fraction = settings.steps_per_epoch, float(epoch.fraction)
        # With the norms released before this epoch.
        spent = float(epoch.spent) + settings.norm_cost * self._norm_releases(index)
        # Norms of later epochs.
        reserved = settings.norm_cost * sum(map(self._norm_releases, range(index + 1, self.epochs)))
        if limit <= spent + reserved:
            return None
        # K may rise to N C in any later epoch, so a cautious one leaves them as much as that would cost.
        is_cautious = index < round(self.cautious_share * self.epochs)
        this_epoch = (fraction, per_epoch)
        later_epochs = (1.0 if is_cautious else fraction, per_epoch * (self.epochs - 1 - index))

        def events(noise: float, *steps: RepeatedEvent) -> Schedule:
            return [
                (self._release(plan.sampling_rate, at, noise).event(), count) for at, count in steps if count
            ]

        noise_multiplier = find_min_noise(
            lambda noise: events(noise, this_epoch, later_epochs), {order: limit - spent - reserved}
        )
        if noise_multiplier is None:
            return None
        noise, _ = noise_multiplier
        return epoch.with_numbers(
            noise=noise, spent=spent + float(rdp(events(noise, this_epoch), orders=(order,))[0])
        )

    def _plan_released(
        self, sampled: Batches, epoch: EpochParams, target: Target, facts: PlanningFacts
    ) -> Plan:
        """The plan at the order that leaves the steps the least noise if K = N C throughout."""
        multiplier = self.norm_noise_multiplier or (self.norm_noise or 0.0) * (facts.records or 0)
        norm = norm_total_release(L2(self.clip_norm), Gaussian(multiplier)).event()
        before, norms = (
            events_before(target, facts, sampled),
            sum(map(self._norm_releases, range(self.epochs))),
        )
        rate, steps = sampled.rate, epoch.steps_per_epoch * self.epochs
        setting = "norm_noise" if self.norm_noise_multiplier is None else "norm_noise_multiplier"
        others = [*before, (norm, norms)]
        order, noise = plan_fixed_noise(
            lambda noise: self._release(rate, 1.0, noise).event(),
            steps,
            others,
            target,
            noise_setting=setting,
        )
        # At the plan's order.
        spent, norm_cost = (float(rdp(schedule, orders=(order,))[0]) for schedule in (before, [(norm, 1)]))
        epoch = replace(epoch, norm_multiplier=multiplier, norm_cost=norm_cost, spent=spent, most_noise=noise)
        return plan_renyi(
            order, target=target, facts=facts, steps=steps, sampling_rate=rate, method_params=epoch
        )

    def _plan_public(
        self, sampled: Batches, settings: EpochParams, target: Target, facts: PlanningFacts
    ) -> Plan:
        """The plan of a schedule of K that is public, with the same sigma_G in all steps."""
        per_epoch = settings.steps_per_epoch
        fractions = [self._fraction_at(epoch) for epoch in range(self.epochs)]

        def releases(noise: float) -> Repeated:
            return [(self._release(sampled.rate, fraction, noise), per_epoch) for fraction in fractions]

        return plan_fixed(
            releases,
            target=target,
            facts=facts,
            sampled=replace(sampled, divisor=None),
            steps=per_epoch * self.epochs,
            method_params=settings,
        )

    def _fraction_at(self, epoch: int) -> float:
        """K / (N C) of an epoch by the settings."""
        first, last = self.public_norms or (1.0, 1.0)
        return first + (last - first) * epoch / max(1, self.epochs - 1)

    def _release(self, rate: float, fraction: float, noise: float, clip_norm: float | None = None) -> Release:
        """The release of a step at K / (N C) and sigma_G."""
        sampling = Importance(min(rate / fraction, 1 / self.oversampling), self.oversampling, self.floor)
        clipping = Normalised(clip_norm or self.clip_norm)
        # `step` divides the sum by b / fraction, so the mean has the noise sigma_G C / b at any K.
        return gradient_release(sampling, clipping, Gaussian(noise / fraction), 1.0)

    def _norm_releases(self, epoch: int) -> int:
        return 2 if self.adaptive_clipping is not None and epoch > 0 else 1

    def _check(self, rate: float, facts: PlanningFacts) -> None:
        """Raises RefusedError where the settings do not fit each other or the data."""
        facts.check_norms()
        adaptive, norms = self.adaptive_clipping, self.public_norms
        min_fraction = min(norms or (1.0,))
        if self.oversampling * rate >= min_fraction:
            raise RefusedError(
                "at K = {fraction:g} N C a sampling rate of {rate:g}, oversampled {oversampling:g} times,"
                " makes every record a candidate; set {method.oversampling} or the batch lower, or"
                " public_norms higher.",
                code="all_records_candidates",
                fraction=min_fraction,
                rate=rate,
                oversampling=self.oversampling,
            )
        if norms is not None and adaptive is not None:
            raise RefusedError(
                "adaptive_clipping follows released norms; leave {method.public_norms} empty.",
                code="norms_public_and_released",
            )
        if adaptive is not None and adaptive.min_clip_norm > adaptive.max_clip_norm:
            raise RefusedError(
                "{method.adaptive_clipping} has min_clip_norm above max_clip_norm; exchange them.",
                code="clip_norms_crossed",
            )
        if self.norm_noise is not None and self.norm_noise_multiplier is not None:
            raise RefusedError(
                "norm_noise and norm_noise_multiplier were both given; leave {method.norm_noise} or the"
                " other empty.",
                code="norm_noise_given_twice",
            )
        if facts.records is None and norms is None and self.norm_noise_multiplier is None:
            raise RefusedError(
                "the number of records is private, so norm_noise gives no noise; set"
                " {method.norm_noise_multiplier}.",
                code="norm_noise_missing",
            )

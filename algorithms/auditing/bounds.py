"""Lower bounds on privacy loss from successful attacks, each with a stated confidence.

An attacker who distinguishes two neighbouring data sets has a rate of false alarms and a rate of misses. A claim bounds
these for every test, so a test that does significantly better refutes the claim. All intervals are exact (Clopper and
Pearson 1934), none is asymptotic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import attrs
import dp_accounting as dp
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom, chi2

from algorithms.core.plan import Plan
from algorithms.core.receipt import reserved_events
from algorithms.errors import RefusedError
from algorithms.privacy.accounting.correlated import CorrelatedDpEvent, CorrelatedStepDpEvent
from algorithms.privacy.accounting.epsilon import (
    ADD_OR_REMOVE_ONE,
    Accountant,
    ReprKey,
    adjacency_named,
    compose_loss,
    epsilon,
    merge_events,
)
from algorithms.privacy.accounting.event_classes import (
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    RenyiDpEvent,
    parts,
)
from algorithms.privacy.accounting.events import Schedule, schedule_from_json
from algorithms.privacy.accounting.gaussian import gaussian_delta
from algorithms.privacy.accounting.risk import Profile, min_false_negative_rate, profile, risk_profile

Array = NDArray[np.float64]
CONFIDENCE, ALARM = 0.95, 1e-6
_GRID = 1e-3
_THRESHOLDS = np.linspace(0.02, 0.98, 49)
InverseTradeOff = Callable[[float], float]
"""The smallest rate of false alarms at which a test can recognise a share in [0, 1]."""
_LARGEST_EPSILON, _LARGEST_MU = 60.0, 40.0


def upper_rate(successes: int, trials: int, *, confidence: float) -> float:
    """The one-sided upper confidence bound on a rate, exact for every number of trials.

    Args:
        successes: From 0 to `trials`.
        trials: Independent ones with the same rate.
        confidence: With which the bound holds.

    Source:
        Clopper and Pearson 1934.

    Example:
        >>> round(upper_rate(0, 100, confidence=0.95), 4)  # 1 - 0.05^(1/100)
        0.0295
    """
    return 1.0 if successes >= trials else float(beta.ppf(confidence, successes + 1, trials - successes))


@dataclass(frozen=True)
class Rates:
    """Upper bounds on an attack's error rates.

    Attributes:
        alarms: The rate at which it says that the record was there when it was not.
        misses: The rate at which it says the opposite of a record that was there.
    """

    alarms: float
    misses: float


def rates(without: Array, with_record: Array, threshold: float, *, confidence: float) -> Rates:
    """The errors of the test `score >= threshold`, both bounds together at `confidence`.

    Args:
        without, with_record: Scores of runs on either of the neighbours, shapes [n0] and [n1].
        threshold: Chosen without looking at these scores.
        confidence: That both bounds hold.
    """
    each = 1 - (1 - confidence) / 2
    return Rates(
        upper_rate(int((without >= threshold).sum()), len(without), confidence=each),
        upper_rate(int((with_record < threshold).sum()), len(with_record), confidence=each),
    )


def epsilon_of(rates: Rates, delta: float) -> float:
    """The smallest epsilon at `delta` of any mechanism that is consistent with these errors.

    Args:
        rates: Upper bounds on both errors of one test.
        delta: Of the claim.

    Source:
        Kairouz et al. 2015: e^epsilon alarms + misses >= 1 - delta, and the same with the errors swapped.

    Example:
        >>> round(epsilon_of(Rates(0.1, 0.2), 0.0), 4)  # ln(0.8 / 0.1)
        2.0794
    """
    pairs = ((rates.alarms, rates.misses), (rates.misses, rates.alarms))
    return max([0.0, *(math.log((1 - delta - b) / a) for a, b in pairs if a > 0 and 1 - delta - b > a)])


def mu_of(rates: Rates) -> float:
    """The smallest mu of a Gaussian mechanism that is consistent with these errors (Nasr et al. 2023, section 4)."""
    if rates.alarms + rates.misses >= 1:
        return 0.0
    return float(ndtri(1 - rates.alarms) - ndtri(rates.misses))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon at `delta` of a Gaussian mechanism; see `gaussian_delta`.

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 3)
        4.377
    """

    def excess(epsilon: float) -> float:
        return gaussian_delta(mu, epsilon) - delta

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    # There delta is at most Phi(mu / 2 - high / mu) = Phi(-mu / 2 - 10), below 1e-23.
    high = mu * mu + 10 * mu
    return float(brentq(excess, 0.0, high)) if excess(high) < 0 else high


def gaussian_inverse(mu: float) -> InverseTradeOff:
    """The trade-off of a Gaussian mechanism, as `Inverse`."""
    return lambda share: float(ndtr(ndtri(share) - mu))


def inverse_of(claimed: Profile) -> InverseTradeOff:
    """The trade-off of a profile, as `Inverse`."""
    growth, delta = np.exp(claimed.epsilon), claimed.delta

    def inverse(share: float) -> float:
        lines = np.maximum((share - delta) / growth, 1 - delta - (1 - share) * growth)
        return float(max(0.0, lines.max()))

    return inverse


@dataclass(frozen=True)
class Guesses:
    """The guesses on one run in which each canary was included by a fair coin.

    Attributes:
        canaries: Their number m.
        count: Of guesses; of the other canaries the attacker says nothing.
        right: The number of correct guesses.
    """

    canaries: int
    count: int
    right: int


def one_run_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """A bound on the probability of this many correct guesses against an (epsilon, delta) mechanism.

    Args:
        guesses: The guesses.
        epsilon, delta: Of the mechanism.

    Source:
        Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), Theorem 5.2.

    Example:
        >>> round(one_run_p_value(Guesses(100, 100, 75), math.log(3), 0.0), 3)
        0.553
    """
    m, r, v = guesses.canaries, guesses.count, guesses.right
    # Under pure epsilon-DP each guess is right with probability at most q, whatever the others were. With delta,
    # canaries may be given away: i of them move the tail from v to v - i, and the theorem takes the worst i.
    q = 1 / (1 + math.exp(-epsilon))
    chance = float(binom.sf(v - 1, r, q))
    if delta > 0 and v > 0:
        gains = np.arange(1, v + 1)
        below = binom.cdf(v - 1, r, q) - binom.cdf(v - 1 - gains, r, q)
        chance += 2 * m * delta * float((below / gains).max())
    return min(1.0, chance)


def one_run_epsilon(guesses: Guesses, delta: float, *, confidence: float) -> float:
    """The smallest epsilon at `delta` that is consistent with the guesses at `confidence` (Steinke et al. 2023)."""
    return _search_threshold(lambda e: one_run_p_value(guesses, e, delta) > 1 - confidence, _LARGEST_EPSILON)


def is_refuted(guesses: Guesses, inverse: InverseTradeOff, *, confidence: float) -> bool:
    """Whether the guesses refute a trade-off curve at `confidence`.

    If p_i is the probability of i correct guesses of c, then for each i the sum over j >= i of j/m p_j is at most what
    the curve allows to recognise at a rate of false alarms equal to the sum over j >= i of (c - j + 1)/m p_(j-1).
    Starting with the mass 1 - confidence on the observed number, this forces mass on every smaller number. The curve is
    refuted if the total exceeds 1.

    Source: Mahloujifar, Melis and Chaudhuri 2024 (arXiv:2410.22235), Theorem 9 and its recursion.
    """
    m, c, v = guesses.canaries, guesses.count, guesses.right
    recognised, alarms = (1 - confidence) * v / m, (1 - confidence) * (c - v) / m
    for i in range(v - 1, -1, -1):
        grown = max(alarms, inverse(min(1.0, recognised)))  # what the curve asks for at least
        recognised += i / (c - i) * (grown - alarms)
        alarms = grown
        if recognised + alarms > c / m:
            return True
    return False


def one_run_gaussian_epsilon(guesses: Guesses, delta: float, *, confidence: float) -> float:
    """The epsilon at `delta` of the least leaky Gaussian mechanism that is consistent with the guesses.

    It bounds mechanisms with a Gaussian trade-off curve, which many noisy steps have approximately.
    """
    mu = _search_threshold(
        lambda mu: not is_refuted(guesses, gaussian_inverse(mu), confidence=confidence), _LARGEST_MU
    )
    return gaussian_epsilon(mu, delta)


def _search_threshold(agrees: Callable[[float], bool], largest: float) -> float:
    """The smallest number from 0 on for which a monotone condition holds, rounded down."""
    if agrees(0.0):
        return 0.0
    low, high = 0.0, largest
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if agrees(middle) else (middle, high)
    return low


@dataclass(frozen=True)
class Attack:
    """An attack and what it shows.

    Attributes:
        name: In words.
        epsilon_lower_bound: At a confidence of 95 %.
        is_violated: Whether the claim is refuted at a confidence of 1 - 1e-6.
        detail: The counts behind both, in words.
    """

    name: str
    epsilon_lower_bound: float
    is_violated: bool
    detail: str


@dataclass(frozen=True)
class TradeOffCurve:
    """The trade-off curve of the claim, and the attack's rates at thresholds that were not chosen from its scores."""

    alarms: tuple[float, ...]
    claimed: tuple[float, ...]
    seen: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Power:
    """What this audit would find with half of the claimed noise: how probably it sees that, and which epsilon."""

    caught: float
    epsilon_lower_bound: float


def many_runs(
    scores: Array, claimed: Callable[[float], Profile], cost: Callable[[float], float], delta: float
) -> Attack:
    """Evaluate pairs of scores, shape [pairs, 2], at two thresholds that were fixed in advance (0, half of epsilon).

    Args:
        scores: Scores without and with the record.
        claimed: The profile as a function of a divisor of the noise; at 1 the claim.
        cost: Epsilon at `delta`, as a function of the same divisor.
        delta: Of the claim.

    The bound is that of the least leaky mechanism of the claim's own form, with its noise divided by some number, that
    is consistent with the errors (as in Nasr et al. 2023 for Gaussians); or that of any mechanism if it is larger.
    """

    def at(threshold: float, confidence: float) -> Rates:
        return rates(scores[:, 0], scores[:, 1], threshold, confidence=confidence)

    thresholds = (0.0, cost(1.0) / 2)
    seen, sure = (
        max((at(t, 1 - alarm / len(thresholds)) for t in thresholds), key=mu_of)
        for alarm in (1 - CONFIDENCE, ALARM)
    )
    leak = _min_leak(seen, claimed)
    min_epsilon = max(epsilon_of(seen, delta), cost(leak) if leak > 0 else 0.0)
    is_violated = sure.misses < float(min_false_negative_rate(claimed(1.0), sure.alarms))
    shares = f"false alarms at most {100 * seen.alarms:.3g}%, misses at most {100 * seen.misses:.3g}%"
    detail = f"{len(scores)} pairs of runs: {shares}"
    return Attack("worst record, many runs", min_epsilon, is_violated, detail)


def by_guesses(name: str, scored: Array, coins: NDArray[np.bool_], claimed: Profile, delta: float) -> Attack:
    """Guess heads for the highest quarter of scores and tails for the lowest; abstain on the rest.

    Args:
        name: Of the attack, in words.
        scored: [canaries], higher for canaries that seem to have taken part.
        coins: [canaries], whether they did.
        claimed: The profile of the claim.
        delta: Of the claim.
    """
    quarter = max(1, len(scored) // 4)
    order = np.argsort(scored)
    right = int(coins[order[-quarter:]].sum() + (~coins[order[:quarter]]).sum())
    seen = Guesses(len(scored), 2 * quarter, right)
    plain = one_run_epsilon(seen, delta, confidence=CONFIDENCE)
    curved = one_run_gaussian_epsilon(seen, max(delta, 1e-12), confidence=CONFIDENCE)
    refuted = is_refuted(seen, inverse_of(claimed), confidence=1 - ALARM)
    detail = (
        f"{right} of {seen.count} guesses about {seen.canaries} canaries were right; epsilon {plain:.3g} for any"
        f" mechanism, {curved:.3g} for a trade-off like a Gaussian's"
    )
    return Attack(name, max(plain, curved), refuted, detail)


def claim_of(plan: Plan) -> Profile:
    """The privacy profile that a plan claims."""
    return risk_profile(plan.filter, plan.schedule, plan.adjacency)


def leaking(schedule: Schedule, leak: float) -> list[tuple[dp.DpEvent, int]]:
    """The events with their noise divided by `leak`."""
    return [(_leaking(event, leak), count) for event, count in schedule]


def _leaking(event: dp.DpEvent, leak: float) -> dp.DpEvent:
    match event:
        case dp.GaussianDpEvent() | dp.LaplaceDpEvent():
            return type(event)(event.noise_multiplier / leak)
        case ObjectivePerturbationDpEvent() | CorrelatedDpEvent() | CorrelatedStepDpEvent():
            return attrs.evolve(event, noise_multiplier=event.noise_multiplier / leak)
        case PureDpEvent():
            return PureDpEvent(event.epsilon * leak)
        case dp.dp_event.ZCDpEvent():
            return dp.dp_event.ZCDpEvent(event.rho * leak**2, event.xi)
        case RenyiDpEvent():
            return RenyiDpEvent(event.order, event.bound * leak**2)
        case dp.ComposedDpEvent():
            return dp.ComposedDpEvent([_leaking(inner, leak) for inner in event.events])
    if parts(event):
        return attrs.evolve(event, event=_leaking(event.event, leak))
    raise RefusedError(f"the noise of {event} cannot be divided; audit another method.")


Family = tuple[Callable[[float], Profile], Callable[[float], float]]
"""The profile and the epsilon of a claim, as functions of a divisor of its noise."""


def family(plan: Plan) -> Family:
    """The family of a plan; at 1 it is the plan's claim."""
    schedule, relation = schedule_from_json(reserved_events(plan)), adjacency_named(plan.adjacency)
    delta = plan.target.budget.delta
    return family_of(schedule, delta, accountant=plan.accountant, relation=relation, claimed=claim_of(plan))


def family_of(
    schedule: Schedule,
    delta: float,
    *,
    accountant: Accountant,
    relation: NeighboringRelation = ADD_OR_REMOVE_ONE,
    claimed: Profile | None = None,
) -> Family:
    """The family of a schedule. claimed: its profile, if it is known."""
    undivided, released = claimed or profile(schedule, adjacency=relation), ReprKey.of(schedule, relation)

    def at(leak: float) -> Profile:
        return undivided if leak == 1 else _profile_of_leak(released, leak)

    def cost(leak: float) -> float:
        coarse = _GRID if accountant == "pld" else None
        of = merge_events(leaking(schedule, leak))
        return epsilon(of, delta, accountant=accountant, adjacency=relation, discretisation=coarse)

    return at, cost


@lru_cache(maxsize=512)
def _profile_of_leak(released: ReprKey, leak: float) -> Profile:
    """A schedule's profile with the noise divided by `leak`, with a cache, since each attack searches anew.

    On a coarser grid: faster, and still an upper bound on delta, which lowers the attack's bound.
    """
    schedule, relation = released.arguments
    divided = leaking(schedule, leak)
    try:
        loss = compose_loss(merge_events(divided), relation, delta=1e-9, grid=_GRID)
    except RefusedError:
        return profile(divided, adjacency=relation)
    epsilons = np.linspace(0.0, min(max(loss.epsilon(1e-9), 1e-6), 100.0), 300)
    return Profile(epsilons, loss.deltas(epsilons))


def power_of(
    draws: int, pairs: int, claimed: Callable[[float], Profile], cost: Callable[[float], float]
) -> Power:
    """What the audit would find with half of the noise, by its trade-off curve.

    draws: number of observed noise values. pairs: number of counted pairs of runs.
    """
    # With half of the noise, sums of squares are a quarter: they fall below the alarm's quantile of the claimed noise
    # with this probability.
    caught = float(chi2(draws).cdf(4 * chi2(draws).ppf(ALARM))) if draws else 0.0
    best = Rates(1.0, 1.0)
    for alarms in np.geomspace(1e-3, 0.5, 25):
        missed = float(min_false_negative_rate(claimed(2.0), alarms))
        best = max(best, _median_rates(alarms, missed, pairs, CONFIDENCE), key=mu_of)
        sure = _median_rates(alarms, missed, pairs, 1 - ALARM)
        if sure.misses < float(min_false_negative_rate(claimed(1.0), sure.alarms)):
            caught = max(caught, 0.5)  # of what is usual: as often more is seen as less
    leak = _min_leak(best, claimed)
    return Power(caught, cost(leak) if leak > 0 else 0.0)


def _median_rates(alarms: float, missed: float, pairs: int, confidence: float) -> Rates:
    each = 1 - (1 - confidence) / 2
    high = [upper_rate(int(binom.median(pairs, rate)), pairs, confidence=each) for rate in (alarms, missed)]
    return Rates(*high)


def _min_leak(seen: Rates, claimed: Callable[[float], Profile]) -> float:
    """The smallest divisor of the noise with which a claim is consistent with the errors."""
    low, high = 0.0, 4.0
    while high - low > 0.01 and seen.alarms + seen.misses < 1:
        middle = (low + high) / 2
        agrees = seen.misses >= float(min_false_negative_rate(claimed(middle), seen.alarms))
        low, high = (low, middle) if agrees else (middle, high)
    return low


def curve_of(scores: Array, claimed: Profile) -> TradeOffCurve:
    """The claimed trade-off curve, and the observed rates at all thresholds."""
    alarms = np.linspace(0.0, 1.0, 101)
    thresholds = np.quantile(scores, _THRESHOLDS)
    seen = tuple((float((scores[:, 0] >= t).mean()), float((scores[:, 1] < t).mean())) for t in thresholds)
    return TradeOffCurve(
        tuple(alarms.tolist()), tuple(min_false_negative_rate(claimed, alarms).tolist()), seen
    )

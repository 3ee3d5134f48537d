"""The price of a search and the number of its trials, against dp_accounting and the distributions themselves."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import (
    _compute_rdp_repeat_and_select,
    _gamma_truncated_negative_binomial,
)
from scipy import optimize, stats

from algorithms.privacy.accounting.epsilon import (
    ADD_OR_REMOVE_ONE,
    ORDERS,
    REPLACE_ONE,
    compose_loss,
    epsilon,
)
from algorithms.privacy.accounting.event_classes import EitherDpEvent
from algorithms.privacy.accounting.event_rules import pairs_of
from algorithms.privacy.accounting.events import (
    Schedule,
    Trials,
    all_shown,
    event_from_json,
    event_to_json,
    trials_of,
)
from algorithms.privacy.accounting.pld_composition import GridComposition
from algorithms.privacy.accounting.rdp import rdp_of_selection
from algorithms.privacy.accounting.selection import shift_of_selection
from tests.support.soak import soak_but

QUIET, LOUD, ONE = [(GaussianDpEvent(8.0), 4)], [(GaussianDpEvent(5.0), 2)], [(GaussianDpEvent(2.0), 1)]
DELTA = 1e-4


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, math.inf])
def test_a_search_costs_what_the_theorems_say(shape: float) -> None:
    accountant = RdpAccountant(ORDERS)
    accountant.compose(RepeatAndSelectDpEvent(SelfComposedDpEvent(GaussianDpEvent(8.0), 4), 10.0, shape))
    event = Trials(10.0, shape).event([QUIET])
    assert epsilon([(event, 1)], 1e-5, accountant="rdp") == pytest.approx(accountant.get_epsilon(1e-5))
    assert event_from_json(event_to_json(event)) == event


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, math.inf])
def test_the_divergences_of_a_search_are_those_of_the_library(shape: float) -> None:
    orders = np.array(sorted({1.0, 1.005, *ORDERS}))
    once = np.where(orders > 200, math.inf, 1e-3 * orders)
    once[0] = 0.0
    known = np.asarray(_compute_rdp_repeat_and_select(orders.tolist(), once.tolist(), 6.0, shape))
    assert rdp_of_selection(6.0, shape, once, orders) == pytest.approx(known, rel=1e-12)


def deltas_of(event: object) -> Callable[[float, str], float]:
    """Bounds of delta at an epsilon for the record's removal or addition, by profiles."""
    loss = compose_loss([(event, 1)], ADD_OR_REMOVE_ONE)  # type: ignore[list-item]
    sides = ("remove", "add")
    return lambda at, side: float(loss.deltas_of_sides(np.array([at]))[sides.index(side)][0])


def test_a_choice_computes_the_deltas_of_each_side_of_a_trial_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, deltas = [], GridComposition.deltas

    def spy(side: GridComposition, epsilons: np.ndarray, min_delta: float) -> np.ndarray:
        computed.append(side)
        return deltas(side, epsilons, min_delta)

    monkeypatch.setattr(GridComposition, "deltas", spy)
    trials = [PoissonSampledDpEvent(0.1, GaussianDpEvent(noise)) for noise in (2.0, 3.0, 4.0)]
    pairs_of([(EitherDpEvent(trials), 1)], ADD_OR_REMOVE_ONE)
    assert len(computed) == 2 * len(trials)


Y = np.linspace(-16, 16, 2_001)


def released(centre: float, std: float) -> np.ndarray:
    """The chances of each of Y for a number with normal noise."""
    found: np.ndarray = stats.norm(centre, std).pdf(Y) * (Y[1] - Y[0])
    return found


def numbers_of(mean: float, shape: float) -> tuple[np.ndarray, np.ndarray]:
    """The possible numbers of trials, from 1 on, and their chances."""
    numbers = np.arange(1, 800)
    if math.isinf(shape):
        return numbers, stats.poisson(mean).pmf(numbers)
    if mean == 1:
        return numbers, 1.0 * (numbers == 1)
    gamma = _gamma_truncated_negative_binomial(shape, mean)
    if shape == 0:
        return numbers, stats.logser(1 - gamma).pmf(numbers)
    return numbers, stats.nbinom(shape, gamma).pmf(numbers) / (1 - gamma**shape)


def best(centre: float, mean: float, shape: float, score: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The chances of each of Y to be the best of trials that each release one number with noise of 2."""
    order, (numbers, chances) = np.argsort(score(Y), kind="stable"), numbers_of(mean, shape)
    one = released(centre, 2.0)
    reached = np.empty_like(one)
    reached[order] = np.cumsum(one[order])
    middle = np.clip(reached - one / 2, 0.0, 1.0)
    found: np.ndarray = one * np.polynomial.polynomial.polyval(middle, numbers * chances)
    return found


def hockey_stick(some: np.ndarray, other: np.ndarray, at: float) -> float:
    """Delta at an epsilon."""
    return float(np.maximum(some - math.exp(at) * other, 0.0).sum())


def _least(numbers: np.ndarray) -> np.ndarray:
    return -numbers


LAWS = [(6.0, 0.0), (6.0, 1.0), (20.0, 0.5), (6.0, math.inf), (1.0, 1.0)]
SCORED = [(*law, score) for law in LAWS for score in (np.positive, _least, np.abs)]


@pytest.mark.parametrize(
    ("mean", "shape", "score"),
    soak_but(
        [*SCORED[::4], (6.0, 0.0, np.abs), (6.0, math.inf, np.abs)],
        SCORED,
    ),
)
def test_the_best_never_tells_more_than_its_profile(
    mean: float, shape: float, score: Callable[[np.ndarray], np.ndarray]
) -> None:
    """The best of trials that each release one number with normal noise: its density is integrated."""
    bound = deltas_of(Trials(mean, shape).event([ONE]))
    with_it, without = (best(centre, mean, shape, score) for centre in (1.0, 0.0))
    for side, (some, other) in {"remove": (with_it, without), "add": (without, with_it)}.items():
        for at in (0.0, 0.3, 1.0, 2.0, 4.0):
            exact = hockey_stick(some, other, at)
            assert exact <= bound(at, side) * (1 + 1e-4) + 1e-9
            assert mean > 1 or exact == pytest.approx(bound(at, side), rel=1e-2, abs=1e-9)


@pytest.mark.parametrize(("mean", "shape"), [law for law in LAWS if law[0] > 1])
def test_the_best_exceeds_one_trial_by_as_much_as_the_worst_score_makes_it(mean: float, shape: float) -> None:
    """Over all sets of the better results of a trial: by how much the number of trials favours one neighbour."""
    reached = np.linspace(-9, 9, 4_001)
    numbers, chances = numbers_of(mean, shape)
    favours = [
        np.log(np.polynomial.polynomial.polyval(stats.norm.cdf(reached + moved), numbers * chances))
        for moved in (0.0, 1.0)
    ]

    def deltas(at: np.ndarray) -> np.ndarray:
        found: np.ndarray = stats.norm.cdf(0.5 - at) - np.exp(at) * stats.norm.cdf(-0.5 - at)
        return found

    shift = shift_of_selection(Trials(mean, shape).event([ONE]), deltas)
    assert shift == pytest.approx(float(np.max(favours[1] - favours[0])), rel=1e-3)


SHARED = [(6.0, 1.0, ADD_OR_REMOVE_ONE, 1.0), (6.0, math.inf, REPLACE_ONE, 2.0), (1.0, 1.0, REPLACE_ONE, 2.0)]


@pytest.mark.parametrize(
    ("mean", "shape", "adjacency", "moved"),
    soak_but(
        SHARED,
        [
            (*trials, *neighbours)
            for trials in ((6.0, 1.0), (6.0, math.inf), (1.0, 1.0))
            for neighbours in ((ADD_OR_REMOVE_ONE, 1.0), (REPLACE_ONE, 2.0))
        ],
    ),
)
def test_what_is_shared_and_the_best_never_tell_more_than_is_charged(
    mean: float, shape: float, adjacency: NeighboringRelation, moved: float
) -> None:
    """A number is released once, with noise of 3, then the best of trials: the joint density is integrated."""
    whole = [(GaussianDpEvent(3.0), 1), (Trials(mean, shape).event([QUIET, ONE]), 1)]
    charged, first = epsilon(whole, DELTA, adjacency=adjacency), [released(x, 3.0) for x in (moved, 0.0)]
    for score in (lambda y: y, lambda y: -y):
        then = [best(x, mean, shape, score) for x in (moved, 0.0)]
        some, other = (np.outer(2 * a[::2], b) for a, b in zip(first, then, strict=True))
        for exact in (hockey_stick(some, other, charged), hockey_stick(other, some, charged)):
            assert exact <= DELTA
            assert mean > 1 or exact == pytest.approx(DELTA, rel=0.02)


@pytest.mark.parametrize(
    ("trials", "kinds", "delta", "low", "high"),
    [
        (Trials(12.0), [(2e-6, 0.4, 1000)], 1e-7, 1.0221, 1.02214),
        (Trials(12.0), [(2e-6, 0.42, 1000), (2e-6, 0.45, 4000)], 1e-7, 0.5841, 0.5842),
        (Trials(8.0), [(1e-5, 0.2, 100)], 1e-6, 18.5967, 18.5977),
        (Trials(8.0, 0.5), [(1e-4, 1.0, 2000), (1e-3, 1.0, 50)], 1e-5, 0.08088, 0.08091),
    ],
)
def test_a_search_over_trials_that_hardly_have_a_record_costs_what_their_profiles_say(
    trials: Trials, kinds: list[tuple[float, float, int]], delta: float, low: float, high: float
) -> None:
    """By dp_accounting's distributions on grids of 2e-4, 5e-5 and 2e-5: their limit, and next to the finest."""
    candidates: list[Schedule] = [
        [(PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier)), steps)]
        for rate, multiplier, steps in kinds
    ]
    assert low < epsilon([(trials.event(candidates), 1)], delta) < high


def test_a_search_over_trials_that_tell_all_or_nothing_costs_a_closed_form() -> None:
    """A record is seen with a chance of p, and then known: a trial's delta is p at any epsilon, and 12 p nearly delta.

    What the number of trials tells is left: twice the least e with (1 - gamma) p <= gamma (exp(e) - 1), less the loss
    of a run that has not seen the record. Alone it costs nothing: trials see the record with a chance of at most delta.
    """
    chance = -math.expm1(10 * math.log1p(-1e-7))
    trial: Schedule = [(PoissonSampledDpEvent(1e-7, GaussianDpEvent(0.01)), 10)]
    event, delta = Trials(12.0).event([trial]), 12 * chance * (1 + 1e-4)
    profile = compose_loss([(event, 1)], ADD_OR_REMOVE_ONE).epsilon(delta)
    assert profile == pytest.approx(2 * math.log1p(11 * chance) + 10 * math.log1p(-1e-7), rel=5e-3)
    assert epsilon([(event, 1)], delta) == 0.0


def gaussian_delta(mu: float, at: float) -> float:
    """Of a Gaussian mechanism, by its closed form."""
    return float(stats.norm.cdf(mu / 2 - at / mu) - math.exp(at) * stats.norm.cdf(-mu / 2 - at / mu))


@pytest.mark.parametrize("shape", [0.5, 1.0, math.inf])
@pytest.mark.parametrize("mu", [0.02, 0.5, 3.0])
def test_a_search_over_gaussian_trials_costs_a_closed_form(mu: float, shape: float) -> None:
    """A trial's epsilon at a twelfth of delta, and what the number of trials tells, from normal distributions alone."""
    one = optimize.brentq(lambda at: gaussian_delta(mu, at) - 1e-5 / 12, 0.0, 100.0, xtol=1e-14)
    if math.isinf(shape):
        least = optimize.minimize_scalar(
            lambda at: math.expm1(at) + gaussian_delta(mu, at), bounds=(0.0, 10.0), options={"xatol": 1e-10}
        )
        exact = one + 12 * least.fun
    else:
        gamma = float(_gamma_truncated_negative_binomial(shape, 12.0))
        exact = one + (shape + 1) * optimize.brentq(
            lambda at: (1 - gamma) * gaussian_delta(mu, at) - gamma * math.expm1(at), 0.0, 10.0, xtol=1e-14
        )
    found = epsilon([(Trials(12.0, shape).event([[(GaussianDpEvent(1 / mu), 1)]]), 1)], 1e-5)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 5e-4)


SEARCHES = [
    (2.0, 0.0, [(1e-4, 0.6, 3_000)], 1e-6),
    (40.0, 0.5, [(1e-3, 1.0, 500), (0.05, 4.0, 100)], 1e-5),
    (8.0, math.inf, [(2e-6, 0.4, 10_000), (2e-6, 0.42, 40_000)], 1e-7),
    (300.0, 1.0, [(0.3, 8.0, 200)], 1e-4),
    (12.0, 1.0, [(1e-5, 0.15, 100), (2e-5, 0.14, 5)], 1e-6),
    (12.0, 5.0, [(2e-6, 0.24, 12), (1e-6, 0.26, 156)], 2e-6),
]


@pytest.mark.parametrize(("mean", "shape", "kinds", "delta"), soak_but(SEARCHES[:-2], SEARCHES))
def test_a_search_alone_costs_what_its_whole_profile_says(
    mean: float, shape: float, kinds: list[tuple[float, float, int]], delta: float
) -> None:
    candidates: list[Schedule] = [
        [(PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier)), steps)]
        for rate, multiplier, steps in kinds
    ]
    event = Trials(mean, shape).event(candidates)
    profile = compose_loss([(event, 1)], ADD_OR_REMOVE_ONE).epsilon(delta)
    assert epsilon([(event, 1)], delta) == pytest.approx(profile, rel=2e-3)
    assert epsilon([(event, 1)], delta) <= profile * (1 + 5e-5)


def test_the_price_of_a_search_takes_the_tails_that_decide_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, tail = [], GridComposition._tilted_tail

    def spy(side: GridComposition, tilt: float, delta: float, widening: int = 0) -> Any:
        taken.append(delta)
        return tail(side, tilt, delta, widening)

    monkeypatch.setattr(GridComposition, "_tilted_tail", spy)
    kinds: list[Schedule] = [
        [(PoissonSampledDpEvent(3e-4, GaussianDpEvent(z)), steps)] for z, steps in ((0.71, 777), (0.72, 999))
    ]
    epsilon([(Trials(12.0).event(kinds), 1)], 1e-5)
    assert len(taken) <= 8 * len(kinds)


def test_a_profile_is_tighter_than_renyi_divergences_and_worse_than_one_trial() -> None:
    for shape in (0.0, 1.0, math.inf):
        event, one = Trials(8.0, shape).event([LOUD, QUIET]), epsilon(LOUD, 1e-5)
        assert one < epsilon([(event, 1)], 1e-5) < epsilon([(event, 1)], 1e-5, accountant="rdp")
    assert epsilon([(Trials(1.0).event([LOUD]), 1)], 1e-5) == pytest.approx(epsilon(LOUD, 1e-5), rel=1e-4)


def test_the_worst_of_the_candidates_counts_at_each_order() -> None:
    both, each = Trials(10.0).event([QUIET, LOUD]), [Trials(10.0).event([one]) for one in (QUIET, LOUD)]
    cost = epsilon([(both, 1)], 1e-5, accountant="rdp")
    assert cost == pytest.approx(max(epsilon([(one, 1)], 1e-5, accountant="rdp") for one in each))
    assert epsilon([(EitherDpEvent([GaussianDpEvent(2.0)]), 1)], 1e-5, accountant="rdp") == pytest.approx(
        epsilon([(GaussianDpEvent(2.0), 1)], 1e-5, accountant="rdp")
    )


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, math.inf])
def test_the_number_of_trials_has_the_mean_that_is_priced(shape: float) -> None:
    numbers = np.array([Trials(6.0, shape).number((u + 0.5) / 500) for u in range(500)])
    assert numbers.mean() == pytest.approx(6.0, rel=0.02)
    assert numbers.min() == (0 if math.isinf(shape) else 1)


def test_a_geometric_number_has_its_chances() -> None:
    numbers = np.array([Trials(4.0).number((u + 0.5) / 2_000) for u in range(2_000)])
    assert [(numbers == k).mean() for k in (1, 2, 3)] == pytest.approx([0.25, 0.1875, 0.140625], abs=1e-3)


def test_the_trials_of_a_search_are_read_off_its_event() -> None:
    assert trials_of([(Trials(3.0).event([QUIET, LOUD]), 1)]) == [QUIET, LOUD]
    assert trials_of([(all_shown([QUIET, LOUD]), 1)]) == [QUIET, LOUD]
    assert trials_of(QUIET) is None

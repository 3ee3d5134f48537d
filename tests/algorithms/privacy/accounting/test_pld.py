"""Epsilons against exact ones that are computed apart from the product: never below, and less than a thousandth above.

Literals are by mpmath at 40 digits (closed forms, and one step, whose losses rise with the output), and by the inverse
Laplace transform of `tests.support.exact_losses`, which agrees with dp_accounting at ever finer grids to ten digits.
"""

import math
import warnings
from itertools import product
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import scipy.fft
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import Phase, assume, event, given, reject, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binom, norm

from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    compose_loss,
    discretisation_of,
    epsilon,
    epsilon_near,
    group_privacy,
    rare_reading_chance,
    rdp,
)
from algorithms.privacy.accounting.event_classes import EitherDpEvent
from algorithms.privacy.accounting.event_rules import pairs_of
from algorithms.privacy.accounting.events import (
    CorrelatedDpEvent,
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    Schedule,
)
from algorithms.privacy.accounting.mechanism_plds import (
    AtomsPLD,
    FoldedPLD,
    GaussianPLD,
    GroupPLD,
    LaplacePLD,
    PoissonReplacedPLD,
    ProfilePLD,
    ReversedPLD,
    SampledPLD,
)
from algorithms.privacy.accounting.noise_search import calibrate
from algorithms.privacy.accounting.pairs import pair_of_curves
from algorithms.privacy.accounting.pld import CellMasses, DiscretePLD, PLDSum, PrivacyLoss, sketch
from algorithms.privacy.accounting.pld_composition import GridComposition
from algorithms.privacy.accounting.pld_epsilon import epsilon_of, sides_of
from algorithms.privacy.accounting.pld_search import extrapolated_epsilon
from epsilonflow.sklearn_refusals import ESTIMATORS
from tasks.refusals import PIPELINE
from tests.support.exact_losses import exact_epsilon
from tests.support.rare_losses import rare_lower_bound
from tests.support.refusals import refused_as
from tests.support.soak import soak_but


def sampled(rate: float, multiplier: float) -> dp.DpEvent:
    return dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier))


def is_close(found: float, exact: float) -> bool:
    """exact: rounded to ten digits."""
    return exact * (1 - 1e-9) <= found <= max(exact * 1.001, exact + 1e-4)


@pytest.mark.parametrize(
    ("multiplier", "steps", "delta", "exact"),
    [
        (1.0, 1, 1e-5, 4.377178096),
        (1.0, 1, 1e-15, 8.165579696),
        (2.0, 1, 1e-5, 1.993091404),
        (1500.0, 1, 1e-9, 0.002893643032),
        (9164.0, 9999, 1e-5, 0.02999406249),
        (3731.0, 10**6, 1e-5, 0.9998915804),
        (0.05, 1, 1e-5, 284.3918495),
        (1e4, 10**6, 1e-15, 0.743298397),
    ],
)
def test_normal_noise_without_sampling_is_exact(
    multiplier: float, steps: int, delta: float, exact: float
) -> None:
    alike: Schedule = [(dp.GaussianDpEvent(multiplier), steps)]
    halves = [(dp.GaussianDpEvent(multiplier * math.sqrt(2.0)), 1)] * 2  # each of half the precision
    mixed: Schedule = (
        [*alike[:0], (dp.GaussianDpEvent(multiplier), steps - 1), *halves] if steps > 1 else halves
    )
    banded = CorrelatedDpEvent(multiplier / math.sqrt(steps), (1.0,), (), (), 0, 1, 1.0, 1)
    nested: Schedule = [
        (dp.SelfComposedDpEvent(dp.ComposedDpEvent([dp.GaussianDpEvent(multiplier)]), steps), 1)
    ]
    for schedule in (alike, mixed, nested, [(banded, 1)]):
        assert exact * (1 - 1e-9) <= epsilon(schedule, delta) <= exact * (1 + 1e-6)
        assert discretisation_of(schedule, delta, ADD_OR_REMOVE_ONE) is None


@pytest.mark.parametrize(
    ("rate", "multiplier", "delta", "exact"),
    [
        (0.01, 1.0, 1e-5, 0.1994504478),
        (0.001, 0.3, 1e-5, 5.653792536),
        (0.5, 2.0, 1e-8, 2.019464409),
        (1e-4, 0.5, 1e-11, 2.762720188),
        (0.1, 1.0, 1e-7, 2.649687911),
    ],
)
def test_one_sampled_step(rate: float, multiplier: float, delta: float, exact: float) -> None:
    assert is_close(epsilon([(sampled(rate, multiplier), 1)], delta), exact)


@pytest.mark.parametrize(
    ("rate", "multiplier", "steps", "delta", "exact"),
    [
        (0.01, 1.0, 1000, 1e-5, 1.828236667),
        (0.01, 1.0, 1000, 1e-15, 4.854537751),
        (0.001, 20.0, 1000, 1e-7, 0.0055238605),
        (0.001, 21.8, 5000, 1e-6, 0.009947515789),
        (0.01, 545.3, 1000, 1e-5, 0.0009999682955),
        (0.5, 20.0, 100, 1e-8, 1.301524045),
        (256 / 60000, 1.1, 14062, 1e-5, 2.381596921),
        (0.01, 0.1085, 1000, 1e-5, 999.5200037),
        (0.1, 549.55, 10**6, 1e-9, 0.9999607721),
        (1e-4, 0.8, 10**6, 1e-8, 1.0017694403),  # whose tail is that of a few large losses
        (2.3752745e-4, 41.2235127, 98379, 5.0303686e-10, 0.0084687),
        (1.0380878745e-3, 1.00379786, 34160, 1e-11, 1.64500195),
        (3.32275366e-3, 2.75785936, 40287, 4.18833946e-11, 1.535944404),
        (0.0186316617, 74.53000126, 10**6, 2.1624206405e-7, 1.142493257),
    ],
)
def test_many_sampled_steps(rate: float, multiplier: float, steps: int, delta: float, exact: float) -> None:
    assert is_close(epsilon([(sampled(rate, multiplier), steps)], delta), exact)


@pytest.mark.parametrize(
    ("count", "rate", "multiplier", "steps", "delta", "exact"),
    [
        (2, 0.001, 0.3, 1, 1e-5, 7.291673673),
        (3, 0.01, 1.0, 1, 1e-6, 1.242694994),
        (8, 0.05, 2.0, 1, 1e-5, 1.945433882),
        (2, 0.01, 1.0, 1000, 1e-5, 3.979085763),
        (3, 0.01, 1.0, 1000, 1e-5, 6.342932974),
        (4, 0.05, 2.0, 200, 1e-5, 7.671392337),
    ],
)
def test_a_group_costs_what_the_mixture_of_its_samples_costs(
    count: int, rate: float, multiplier: float, steps: int, delta: float, exact: float
) -> None:
    assert is_close(epsilon([(group_privacy(sampled(rate, multiplier), count), steps)], delta), exact)


@pytest.mark.parametrize(
    ("count", "rate", "multiplier"),
    [(2, 0.01, 1.0), (2, 0.005, 2.5), (3, 0.2, 2.0), (64, 0.01, 4.0), (2, 0.999, 3.0), (5, 0.9999, 8.0)],
)
def test_a_group_has_the_renyi_divergence_of_its_mixture(count: int, rate: float, multiplier: float) -> None:
    """Whichever way round, by summation over a fine grid; between whole orders it is bounded by the chord."""
    outputs = np.linspace(-12 * multiplier, 8 * count + 12 * multiplier, 200_001)
    numbers = np.arange(count + 1)
    chances = np.array([math.comb(count, j) * rate**j * (1 - rate) ** (count - j) for j in numbers])
    width = math.log(outputs[1] - outputs[0])
    without = norm.logpdf(outputs, 0.0, multiplier) + width
    inside = np.full(len(outputs), -math.inf)
    for number, chance in zip(numbers, chances, strict=True):
        inside = np.logaddexp(inside, math.log(chance) + norm.logpdf(outputs, number, multiplier) + width)
    orders = (1.5, 2.0, 6.0, 8.0)
    found = rdp([(group_privacy(sampled(rate, multiplier), count), 1)], orders=orders)
    for order, divergence in zip(orders, found, strict=True):
        exact = max(
            float(np.logaddexp.reduce(order * p + (1 - order) * q)) / (order - 1)
            for p, q in ((inside, without), (without, inside))
        )
        assert exact <= divergence * (1 + 1e-9)
        assert order != int(order) or divergence <= exact * 1.001


@pytest.mark.parametrize(
    ("count", "rate", "multiplier", "order", "exact"),
    [
        (64, 1e-3, 12.0, 8.0, 0.0001145312434531119),
        (64, 1e-3, 12.0, 40.0, 115.45869319696125),
        (64, 0.01, 70.0, 63.0, 0.002654749670723576),
        (64, 1.2e-5, 1.68, 256.0, 185031.63477867292),
    ],
)
def test_cells_that_are_left_out_of_a_groups_moment_add_nothing(
    count: int, rate: float, multiplier: float, order: float, exact: float
) -> None:
    """The trapezoid rule with all points, a twentieth of a deviation apart."""
    found = rdp([(group_privacy(sampled(rate, multiplier), count), 1)], orders=(order,))[0]
    assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-10)


@pytest.mark.parametrize(("count", "rate"), [(2, 0.99), (3, 0.95), (64, 0.999)])
def test_a_group_that_moves_the_sum_beyond_all_noise_costs_no_less_than_its_mixture(
    count: int, rate: float
) -> None:
    """At order 2 the moment is the sum of P(j) P(k) exp(j k / z^2) over the numbers of records in two samples."""
    multiplier = count / 1_100
    chances = [math.comb(count, j) * rate**j * (1 - rate) ** (count - j) for j in range(count + 1)]
    terms = [
        math.log(chances[j]) + math.log(chances[k]) + j * k / multiplier**2
        for j in range(count + 1)
        for k in range(count + 1)
        if chances[j] > 0 < chances[k]
    ]
    exact = float(np.logaddexp.reduce(terms))
    found = rdp([(group_privacy(sampled(rate, multiplier), count), 1)], orders=(2.0,))[0]
    assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-5)


def test_a_group_with_hardly_any_noise_costs_no_more_than_one_that_is_always_sampled() -> None:
    shift = 64 / 0.001
    found = rdp([(group_privacy(sampled(0.01, 0.001), 64), 1)], orders=(2.0, 8.0))
    every = np.array([2.0, 8.0]) / 2 * shift**2
    assert (every * (1 - 1e-3) <= found).all()
    assert (found <= every).all()


def test_records_that_point_different_ways_tell_no_more_than_those_of_the_theorem() -> None:
    """Two records in two dimensions, at right angles or opposed: delta by a sum over the plane."""
    rate, multiplier, at = 0.3, 1.5, 0.4
    axis = np.linspace(-11.0, 12.0, 700)
    step = (axis[1] - axis[0]) ** 2

    def density(x: float, y: float) -> np.ndarray:
        rows: np.ndarray = np.outer(norm.pdf(axis, x, multiplier), norm.pdf(axis, y, multiplier)) * step
        return rows

    stated = compose_loss([(group_privacy(sampled(rate, multiplier), 2), 1)], ADD_OR_REMOVE_ONE)
    for second in ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.6, 0.8)):
        both = (1.0 + second[0], second[1])
        mixture = (1 - rate) ** 2 * density(0, 0) + rate**2 * density(*both)
        mixture += rate * (1 - rate) * (density(1, 0) + density(*second))
        for side, (p, q) in enumerate(((mixture, density(0, 0)), (density(0, 0), mixture))):
            exact = float(np.maximum(p - math.exp(at) * q, 0.0).sum())
            assert exact <= stated.deltas_of_sides(np.array([at]))[side][0] + 1e-9


@pytest.mark.parametrize(("count", "rate", "multiplier"), [(2, 0.1, 1.0), (4, 0.02, 2.0), (8, 0.3, 6.0)])
def test_several_records_that_are_replaced_cost_no_less_than_the_worst_neighbours_tell(
    count: int, rate: float, multiplier: float
) -> None:
    """All of them move from one end of the bound to the other: delta by summation over a fine grid of outputs."""
    delta, group = 1e-6, group_privacy(sampled(rate, multiplier), count)
    outputs = np.linspace(-count - 12 * multiplier, count + 12 * multiplier, 400_001)
    numbers = np.arange(count + 1)
    ways = [
        binom.pmf(numbers, count, rate) @ norm.pdf(outputs, sign * numbers[:, None], multiplier)
        for sign in (1, -1)
    ]
    stated = epsilon([(group, 1)], delta, adjacency=REPLACE_ONE)
    gains = np.maximum(ways[0] - math.exp(stated) * ways[1], 0.0)
    assert gains.sum() * (outputs[1] - outputs[0]) <= delta
    assert stated > epsilon([(group, 1)], delta)  # what adding or removing them costs would not do


@pytest.mark.parametrize(("single", "count"), [(1.5, 24), (2.65, 10)])
def test_purely_private_releases_cost_no_more_than_their_sum(single: float, count: int) -> None:
    """At a delta far below the chance that all tell their most, randomised responses cost next to all of it."""
    total = single * count
    for schedule in ([(PureDpEvent(single), count)], [(PureDpEvent(single), 1)] * count):
        assert total - 1e-8 <= epsilon(schedule, 1e-12) <= total
        assert total - 1e-8 <= epsilon(schedule, 1e-12, discretisation=1e-3) <= total


def test_noise_for_many_kinds_of_samples_costs_what_the_library_finds_too() -> None:
    """The library's bound from below is no more than what is stated, and its bound from above hardly less."""
    target, shares = 1.0, np.linspace(0.9, 0.3, 6).tolist()

    def steps(noise: float) -> Schedule:
        return [(sampled(0.01 / share, noise / share), 60) for share in shares]

    multiplier = calibrate(steps, Budget(target, 1e-5))
    stated = epsilon(steps(multiplier), 1e-5)
    assert 0.9989 * target <= stated <= target
    bounds = []
    for is_pessimistic in (False, True):
        sum_of_losses = None
        for share in shares:
            one = privacy_loss_distribution.from_gaussian_mechanism(
                multiplier / share,
                sampling_prob=0.01 / share,
                value_discretization_interval=5e-4,
                pessimistic_estimate=is_pessimistic,
                use_connect_dots=is_pessimistic,
            ).self_compose(60)
            sum_of_losses = one if sum_of_losses is None else sum_of_losses.compose(one)
        bounds.append(sum_of_losses.get_epsilon_for_delta(1e-5))
    assert bounds[0] <= stated <= bounds[1] * 1.001


WIDE_RANGES = given(
    log_rate=st.floats(-4.0, -0.3),
    log_steps=st.floats(2.0, 6.0),
    log_epsilon=st.floats(-3.0, 2.0),
    log_delta=st.floats(-11.0, -5.0),
)


def check_beside_the_exact_one(
    log_rate: float, log_steps: float, log_epsilon: float, log_delta: float
) -> None:
    rate, steps, delta = 10**log_rate, round(10**log_steps), 10**log_delta
    # The multiplier that the central limit asks for, so that epsilons are spread over their range.
    target = 10**log_epsilon
    mu = min(target / 4, math.sqrt(2 * target))
    multiplier = 1 / math.sqrt(math.log1p((mu / rate) ** 2 / steps))
    # Else the tail is that of a few large losses, which takes the transform long.
    assume(multiplier > 1 and rate * steps > 10)
    try:
        exact = exact_epsilon(rate, multiplier, steps, delta)
    except ValueError:  # the transform cancels
        reject()
    assert is_close(epsilon([(sampled(rate, multiplier), steps)], delta), exact)


@pytest.mark.soak  # with what asks for it
def test_what_is_called_exact_is_refused_where_it_is_wrong() -> None:
    """Rare large losses decide here: one line gives 0.96, another 2.7."""
    with pytest.raises(ValueError, match="two lines"):
        exact_epsilon(1e-6, 0.5, 240_000, 1e-8)


@pytest.mark.soak
@WIDE_RANGES
@settings(max_examples=60, deadline=None, derandomize=True, phases=(Phase.generate,))
def test_over_wide_ranges_it_is_never_below_and_hardly_above_the_exact_one(**logarithms: float) -> None:
    check_beside_the_exact_one(**logarithms)


@given(
    log_rate=st.floats(-7.0, -4.0),
    multiplier=st.floats(0.3, 0.7),
    log_delta=st.floats(-11.0, -6.0),
)
@settings(max_examples=10, deadline=None, derandomize=True, phases=(Phase.generate,))
def test_two_steps_of_rare_samples_cost_what_quadrature_says(
    log_rate: float, multiplier: float, log_delta: float
) -> None:
    rate, z, delta = 10**log_rate, multiplier, 10**log_delta
    outputs = np.linspace(-12 * z, 1 + 12 * z, 200_001)
    losses = np.log1p(rate * np.expm1(outputs / z**2 - 0.5 / z**2))
    first = (1 - rate) * norm.pdf(outputs, 0.0, z) + rate * norm.pdf(outputs, 1.0, z)

    def exact_delta(epsilon: float) -> float:
        """Over the first step's output, of what the second step's loss has above the rest of epsilon."""
        left = np.expm1(epsilon - losses) + rate
        at = z * z * np.log(np.maximum(left / rate, 1e-300)) + 0.5
        return float(
            first @ (rate * norm.sf(at, 1.0, z) - left * norm.sf(at, 0.0, z)) * (outputs[1] - outputs[0])
        )

    assume(exact_delta(1e-5) > delta)
    stated = epsilon([(sampled(rate, z), 2)], delta)
    assert exact_delta(stated) <= delta < exact_delta(min(stated / 1.001, stated - 1e-4))


RARE_KINDS = st.lists(
    st.tuples(st.floats(-7.0, -3.0), st.floats(-0.6, 0.5), st.floats(0.0, 4.0)), min_size=2, max_size=24
)


@given(logarithms=RARE_KINDS, log_share=st.floats(-5.0, -1.0))
@settings(max_examples=16, deadline=None, derandomize=True, phases=(Phase.generate,))
def test_rare_samples_of_mixed_noise_cost_no_less_than_the_steps_that_stand_out_tell(
    logarithms: list[tuple[float, float, float]], log_share: float
) -> None:
    kinds = [(10**rate, 10**multiplier, round(10**count)) for rate, multiplier, count in logarithms]
    delta = min(1e-3, max(1e-11, 10**log_share * sum(rate * count for rate, _, count in kinds)))
    stated = epsilon([(sampled(rate, multiplier), count) for rate, multiplier, count in kinds], delta)
    bound = rare_lower_bound(kinds, delta, stated or 1.0)
    assert bound <= stated
    event(f"within {10 ** math.ceil(math.log10(max(1 - bound / stated, 1e-3))):g}" if bound else "no bound")


@pytest.mark.parametrize(
    ("rate", "steps", "multiplier", "delta"),
    [
        (1.65e-7, 250_560, 0.4501, 1.8e-10),
        (1.29e-7, 165_982, 0.4183, 1.58e-10),
        (1.3e-7, 100, 0.35, 2.61e-11),
    ],
)
def test_where_one_rare_step_decides_all_cost_what_it_costs(
    rate: float, steps: int, multiplier: float, delta: float
) -> None:
    """The other steps' losses are tiny, so delta is that of one step, in closed form, as often as there are steps."""

    def one_step(epsilon: float) -> float:
        odds = 1 + math.expm1(epsilon) / rate
        at = multiplier * math.log(odds) + 0.5 / multiplier
        return steps * rate * float(norm.cdf(1 / multiplier - at) - odds * norm.cdf(-at))

    exact = float(brentq(lambda e: math.log(one_step(e) / delta), 1e-6, 10.0, xtol=1e-14))
    assert (1 - 1e-5) * exact <= epsilon([(sampled(rate, multiplier), steps)], delta) <= 1.0005 * exact


def test_few_large_losses_are_accounted_for_on_a_grid_that_has_room_for_them() -> None:
    """Between dp_accounting's optimistic and pessimistic epsilons on a grid of 3e-5; by Rényi divergences it is 2.7."""
    assert 0.26785 <= epsilon([(sampled(1.6e-5, 0.6137), 222)], 6.2e-11) <= 0.271562 * 1.001


@pytest.mark.parametrize(
    ("rate", "steps", "target", "delta"),
    [(8.29e-6, 7487, 3.977, 1.1e-11), (1.81e-7, 64216, 0.8143, 4.5e-10), (2.14e-7, 10**5, 0.1696, 2.5e-11)],
)
def test_a_target_is_spent_where_a_rare_sample_decides(
    rate: float, steps: int, target: float, delta: float
) -> None:
    found = calibrate(lambda z: [(sampled(rate, z), steps)], Budget(target, delta))
    assert 0.999 * target <= epsilon([(sampled(rate, found), steps)], delta) <= target


def test_a_sample_rarer_than_delta_costs_next_to_nothing_whatever_its_noise() -> None:
    """In three steps a record is sampled with a chance of 3.4e-7, below delta."""
    for multiplier in (1e-3, 0.1, 10.0):
        assert epsilon([(sampled(1.15e-7, multiplier), 3)], 6.8e-6) <= 1e-4
    assert calibrate(lambda z: [(sampled(1.15e-7, z), 3)], Budget(0.18, 6.8e-6)) < 1e-3


@pytest.mark.parametrize(
    ("records", "size", "multiplier", "delta"), [(100, 10, 1.0, 1e-5), (1000, 20, 2.0, 1e-6)]
)
def test_a_sample_of_fixed_size_costs_what_its_worst_neighbours_tell(
    records: int, size: int, multiplier: float, delta: float
) -> None:
    """All other records like the one that is put in: the output is a mixture of centres two bounds apart."""
    event = dp.SampledWithoutReplacementDpEvent(records, size, dp.GaussianDpEvent(multiplier))
    rate, mu = size / records, 2 / multiplier
    found = epsilon([(event, 1)], delta, adjacency=REPLACE_ONE)
    inner = math.log1p(math.expm1(found) / rate)
    exact = rate * (norm.cdf(mu / 2 - inner / mu) - math.exp(inner + norm.logcdf(-mu / 2 - inner / mu)))
    assert delta * 0.999 < exact <= delta
    assert found < epsilon([(event, 1)], delta, adjacency=REPLACE_ONE, accountant="rdp")


@pytest.mark.parametrize(
    ("records", "size", "multiplier", "steps", "delta", "exact"),
    [
        (100_000, 2, 1.17973652, 7781, 4.044e-8, 0.23406),
        (10**6, 131, 0.889329483, 287_429, 7.44e-8, 9.0194),
    ],
)
def test_rounding_of_common_losses_is_not_added_to_rare_ones_of_a_fixed_size_sample(
    records: int, size: int, multiplier: float, steps: int, delta: float, exact: float
) -> None:
    """By dp_accounting's composition of the same deltas on two grids, whose error falls with the square of a cell."""
    event = dp.SampledWithoutReplacementDpEvent(records, size, dp.GaussianDpEvent(multiplier))
    found = epsilon([(event, steps)], delta, adjacency=REPLACE_ONE)
    assert exact * (1 - 2e-5) <= found <= exact * 1.001


@pytest.mark.parametrize(
    ("rate", "steps", "target", "delta", "least"),
    [
        (1.0, 9999, 0.03, 1e-5, 9162.195),
        (1.0, 10**6, 1.0, 1e-5, 3730.632),
        (1.0, 1, 0.003, 1e-9, 1449.240),
        (0.001, 5000, 0.01, 1e-6, 21.695),
        (0.01, 1000, 0.001, 1e-5, 545.28),
        (0.01, 1000, 1000.0, 1e-5, 0.10847),
        (0.1, 10**6, 1.0, 1e-9, 549.52),
    ],
)
def test_calibration_finds_hardly_more_noise_than_is_needed(
    rate: float, steps: int, target: float, delta: float, least: float
) -> None:
    tried = set()

    def schedule_at(multiplier: float) -> Schedule:
        tried.add(multiplier)
        one = dp.GaussianDpEvent(multiplier)
        return [(one if rate == 1 else dp.PoissonSampledDpEvent(rate, one), steps)]

    found = calibrate(schedule_at, Budget(target, delta))
    assert least <= found <= 1.0005 * least
    near = [multiplier for multiplier in tried if abs(multiplier / found - 1) < 0.005]
    assert len(near) <= 5 and len(tried) <= 30  # the fine grid is needed next to the result alone
    assert epsilon(schedule_at(found), delta) <= target


@pytest.mark.parametrize(("each", "count", "delta"), [(0.0327, 4, 7.67e-5), (1.3, 2, 1e-7), (0.01, 9, 1e-5)])
def test_near_the_largest_loss_epsilon_is_that_of_all_releases_at_once(
    each: float, count: int, delta: float
) -> None:
    """Randomised response: only if all releases tell the truth is the loss its largest, count times each."""
    truth = 1 / (1 + math.exp(-each))
    exact = count * each + math.log1p(-delta / truth**count)
    assert exact > (count - 2) * each  # else the next largest counts, too
    assert is_close(epsilon([(PureDpEvent(each), count)], delta), exact * (1 - 1e-9))


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of points of all transforms from which a test gets an epsilon."""
    seen, compute = list[int](), GridComposition.epsilon

    def noting(self: GridComposition, delta: float) -> float:
        found = compute(self, delta)
        seen.append(self.points)
        return found

    monkeypatch.setattr(GridComposition, "epsilon", noting)
    return seen


@pytest.mark.parametrize(
    ("rate", "multiplier", "steps", "delta"),
    [
        (256 / 45222, 0.0921, 1000, 1e-5),
        (1.28e-7, 0.418, 165_000, 1.5e-10),
        (1.1e-4, 0.8, 10**6, 1e-8),
        (2.27e-7, 0.5217, 29_110, 1.9e-4),  # delta is met at 0, which a window that reaches below it shows
    ],
)
def test_no_transform_is_longer_than_a_few_million_points(
    rate: float, multiplier: float, steps: int, delta: float, points: list[int]
) -> None:
    """Else a calibration takes seconds: losses of a record more are tiny where those of a record less are large."""
    epsilon([(sampled(rate, multiplier), steps)], delta)
    assert 0 < max(points) <= 2**21


def test_a_rare_jump_in_a_sum_needs_no_window_of_millions() -> None:
    """With bounds at the scale of a normal law alone it has 4 million, and a billion for 140,000 steps."""
    composed = GridComposition([(SampledPLD(GaussianPLD(2.1321), 2.84e-7), 20_000)], 6.5e-5, 5e-5)
    assert 0 < composed.epsilon(5e-5) < 0.08
    assert composed.points < 2**17


def test_rare_losses_far_below_the_others_need_no_window_of_millions_of_points() -> None:
    """With bounds at the scale of a normal law alone, the whole profile of a record more takes 15 million."""
    added = ReversedPLD(SampledPLD(GaussianPLD(0.454), 2e-6))
    composed = GridComposition([(added, 1000)], 1.4e-6, 1e-13)
    (delta,) = composed.deltas(np.array([0.001]), 1e-13)
    assert composed.points < 2**18
    assert 0 < delta < 1e-4


@pytest.mark.parametrize(("mu", "exact"), [(1.0, 4.377178096), (0.5, 1.993091404)])
def test_a_profile_alone_has_its_own_deltas_on_no_grid(mu: float, exact: float) -> None:
    """That of normal noise, whose epsilon at 1e-5 is a closed form."""

    def sides(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        deltas = norm.cdf(mu / 2 - at / mu) - np.exp(at) * norm.cdf(-mu / 2 - at / mu)
        return deltas, deltas

    profile = pair_of_curves(sides, 30.0).remove
    assert isinstance(profile, ProfilePLD)
    assert exact * (1 - 1e-9) <= profile.epsilon(1e-5) <= exact * (1 + 1e-4)
    (stated,) = profile.deltas(np.array([exact]))
    assert 1e-5 * (1 - 1e-7) <= stated <= 1e-5 * (1 + 1e-3)


@pytest.mark.parametrize(
    ("mu", "delta", "exact"), [(1e-9, 1e-12, 2.717805516e-9), (1e-6, 1e-8, 1.938356676e-6), (0.0, 1e-9, 0.0)]
)
def test_a_profile_of_losses_near_nothing_is_made_of_numbers(mu: float, delta: float, exact: float) -> None:
    """Points in proportion to such losses are closer than the rounding of their exponentials, or all 0."""

    def sides(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ratios = at / mu if mu else np.full(len(at), np.inf)
        deltas = mu * norm.pdf(ratios) - at * norm.sf(ratios)  # of normal noise, to the first order of mu
        return deltas, deltas

    profile = pair_of_curves(sides, 8 * mu).remove
    assert isinstance(profile, ProfilePLD)
    assert np.isfinite(profile.masses).all()
    assert exact * (1 - 1e-6) <= profile.epsilon(delta) <= exact + 1e-9


SCALES, RATES = [1.0, 0.03, 0.02, 0.01, 0.001, 1e-5], [1e-6, 0.01, 0.5]


@pytest.mark.parametrize(
    ("scale", "rate"),
    soak_but(
        [
            *((scale, 0.01) for scale in SCALES),
            *((scale, rate) for scale in (1.0, 1e-5) for rate in (1e-6, 0.5)),
        ],
        product(SCALES, RATES),
    ),
)
def test_one_sample_with_laplace_noise_has_its_closed_form(rate: float, scale: float) -> None:
    """delta is the rate times 1 - exp((e - 1 / scale) / 2), for the loss e without sampling."""
    for share in (0.01, 0.1, 0.5, 0.9):
        whole = 1 / scale + 2 * math.log1p(-share)
        exact = math.log1p(rate * math.expm1(whole)) if whole < 500 else math.log(rate) + whole
        found = epsilon([(dp.PoissonSampledDpEvent(rate, dp.LaplaceDpEvent(scale)), 1)], share * rate)
        assert is_close(found, max(exact, 0.0)), share


@pytest.mark.parametrize("scale", [0.05, 0.01, 0.001])
def test_samples_with_next_to_no_laplace_noise_cost_what_a_test_of_the_outputs_tells(scale: float) -> None:
    rate, steps, delta = 1e-6, 27, 1e-8
    # Whether any output lies beyond the middle of the two means.
    near, far = 1 - math.exp(-0.5 / scale) / 2, math.exp(-0.5 / scale) / 2
    found, missed = (-math.expm1(steps * math.log1p(-p)) for p in (rate * near + (1 - rate) * far, far))
    schedule = [(dp.PoissonSampledDpEvent(rate, dp.LaplaceDpEvent(scale)), steps)]
    assert epsilon(schedule, delta) >= math.log((found - delta) / missed)


@pytest.mark.parametrize(
    "pld",
    [
        GaussianPLD(2.0),
        *(LaplacePLD(size) for size in (0.5, 40.0, 800.0)),
        SampledPLD(LaplacePLD(800.0), 1e-6),
        FoldedPLD(SampledPLD(GaussianPLD(0.5), 0.3)),
        PoissonReplacedPLD(0.5, 0.1),
        GroupPLD(0.5, 0.2, 3),
    ],
    ids=repr,
)
def test_cells_leave_out_no_mass_wherever_their_edges_are(pld: PrivacyLoss) -> None:
    low, high = pld.edges(1e-9, 1e-9)[[0, -1]]
    rows = [[-0.01, 0.02], [0.1, 0.2, 0.3], [-0.3, -0.1], [low / 2, 0.0, high / 2], [low, high], [-1e3, 1e3]]
    for some in (pld, ReversedPLD(pld)):
        for row in rows:
            edges = np.array(row) * (1 if some is pld else -1)
            cells = some.cells(np.sort(edges))
            for masses, end in ((cells.p, 0), (cells.q, 1)):
                total = math.fsum([*masses, cells.below[end], cells.above[end]])
                assert total == pytest.approx(1.0, abs=1e-13), row


def test_a_very_low_loss_without_mass_spoils_no_other() -> None:
    atoms = AtomsPLD(np.array([-800.0, 0.0]), np.array([0.0, 1.0]))
    assert atoms.cells(np.array([-900.0, -1.0, 1.0])).q.tolist() == [0.0, 1.0]


class CountingPLD:
    """A loss that counts the cells that were asked of it."""

    def __init__(self, loss: PrivacyLoss) -> None:
        self.loss, self.count = loss, 0

    def edges(self, p_tail: float, q_tail: float) -> np.ndarray:
        return self.loss.edges(p_tail, q_tail)

    def cells(self, edges: np.ndarray) -> CellMasses:
        self.count += len(edges)
        return self.loss.cells(edges)


def test_rare_large_losses_are_cut_into_few_cells() -> None:
    """They lie far above epsilon, where cells of any width cost the same: here 10 beside 0.013."""
    loss = CountingPLD(GroupPLD(0.7541978, 5.2e-6, 16))
    fine, _ = epsilon_of([(loss, 2771)], 8.4e-4)
    everywhere = GridComposition([(GroupPLD(0.7541978, 5.2e-6, 16), 2771)], 3e-5, 8.4e-4).epsilon(8.4e-4)
    assert loss.count < 100_000
    assert 0.99 * everywhere <= fine <= everywhere


def test_losses_of_a_group_beyond_all_mass_are_taken_without_a_warning() -> None:
    lowest = 2 * math.log1p(-1e-3)  # of neither record being sampled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cells = GroupPLD(0.05, 1e-3, 2).cells(np.array([lowest - 1e-3, lowest, 0.5, 300.0]))
    assert np.isfinite(cells.slip)
    assert cells.p[0] == 0.0 == cells.q[0]
    assert cells.p.sum() + cells.above[0] + cells.below[0] == pytest.approx(1.0, rel=1e-12)


def test_a_sample_that_hardly_has_a_record_costs_nothing() -> None:
    """Outputs of neighbours are the same unless the record is sampled, at most with a chance of 5e-7 here."""
    schedule = [(sampled(1e-7, 1e-6), 5)]
    assert epsilon(schedule, 5.1e-7) == 0.0
    assert epsilon(schedule, 4.9e-7) > 1.0
    assert calibrate(lambda z: [(group_privacy(sampled(1e-7, z), 4), 5)], Budget(0.03, 2.1e-6)) == 1e-6
    assert calibrate(lambda z: [(group_privacy(sampled(1e-7, z), 4), 5)], Budget(0.03, 1.9e-6)) > 0.01


@pytest.mark.parametrize(
    ("rate", "steps", "mu", "delta", "adjacency", "exact"),
    [
        (1.24e-6, 2, 0.01, 5.6e-6, ADD_OR_REMOVE_ONE, 0.0306127928),
        (1e-7, 20, 0.5, 1e-5, ADD_OR_REMOVE_ONE, 2.019685944),
        (1.24e-6, 2, 0.01, 5.6e-6, REPLACE_ONE, 0.06509454611),  # the count then moves by twice the bound
    ],
)
def test_samples_rarer_than_delta_beside_a_count_may_publish_what_they_read(
    rate: float, steps: int, mu: float, delta: float, adjacency: Any, exact: float
) -> None:
    """The exact delta of such a run is c + (1 - c) times that of the count, c = 1 - (1 - rate)^steps."""

    def schedule(noise: float) -> Schedule:
        return [(dp.GaussianDpEvent(1 / mu), 1), (sampled(rate, noise), steps)]

    assert is_close(epsilon(schedule(1e-6), delta, adjacency=adjacency), exact)
    assert calibrate(schedule, Budget(1.2 * exact, delta), adjacency=adjacency) == 1e-6
    found = calibrate(schedule, Budget(0.99 * exact, delta), adjacency=adjacency)
    assert found > 0.01
    assert epsilon(schedule(found), delta, adjacency=adjacency) <= 0.99 * exact
    chance = rare_reading_chance(schedule(found), delta, adjacency)
    assert chance == pytest.approx(steps * rate, rel=1e-9)


@pytest.mark.parametrize("trials", [1, 2])
def test_the_chance_of_samples_counts_those_within_other_events(trials: int) -> None:
    """A count and samples as one event, as of a trial, and a search of trials."""
    count, samples = dp.GaussianDpEvent(3.0), dp.SelfComposedDpEvent(sampled(1e-7, 1e-6), 10)
    run = dp.ComposedDpEvent([count, samples])
    search = dp.dp_event.RepeatAndSelectDpEvent(EitherDpEvent([count, run]), 5.0, 1.0)
    assert epsilon([(run, trials)], 1e-5) < 3.0
    assert rare_reading_chance([(run, trials)], 1e-5, ADD_OR_REMOVE_ONE) == pytest.approx(trials * 1e-6)
    assert rare_reading_chance([(search, trials)], 1e-5, ADD_OR_REMOVE_ONE) == pytest.approx(trials * 5e-6)
    assert rare_reading_chance([(run, trials)], 1e-8, ADD_OR_REMOVE_ONE) is None
    assert rare_reading_chance([(count, trials)], 1e-5, ADD_OR_REMOVE_ONE) is None


def many_kinds(
    number: int, rates: tuple[float, float], multipliers: tuple[float, float], count: int
) -> Schedule:
    """Samples whose rates and multipliers run between two in equal ratios."""
    every = zip(np.geomspace(*rates, number), np.geomspace(*multipliers, number), strict=True)
    return [(sampled(float(rate), float(multiplier)), count) for rate, multiplier in every]


@pytest.mark.parametrize(
    ("schedule", "delta", "exact"),
    [
        (many_kinds(60, (0.01, 0.1), (3.0, 2.0), 5), 1e-6, 1.933921457),
        (many_kinds(100, (0.01, 0.01), (1.2, 6.0), 3), 1e-5, 0.3423986561),
    ],
)
def test_hundreds_of_kinds_of_samples_cost_what_the_integral_says(
    schedule: Schedule, delta: float, exact: float
) -> None:
    assert exact * (1 - 1e-8) <= epsilon(schedule, delta) <= exact * (1 + 3e-4)


@pytest.mark.parametrize("adjacency", [ADD_OR_REMOVE_ONE, REPLACE_ONE])
def test_hundreds_of_kinds_of_samples_are_put_on_grids_in_few_families(adjacency: Any) -> None:
    pairs = pairs_of(many_kinds(1000, (1e-3, 1e-2), (0.8, 2.4), 7), adjacency)
    for side in sides_of(pairs):
        assert len(side) <= 40
        assert sum(count for _, count in side) == 7000


@given(
    log_rate=st.floats(-5.0, -0.5),
    log_multiplier=st.floats(-0.7, 1.0),
    log_count=st.floats(0.0, 2.0),
    log_delta=st.floats(-10.0, -4.0),
    adjacency=st.sampled_from([ADD_OR_REMOVE_ONE, REPLACE_ONE]),
)
@settings(max_examples=12, deadline=None, derandomize=True, phases=(Phase.generate,))
def test_cost_of_similar_kinds_lies_between_that_of_first_and_last(
    log_rate: float, log_multiplier: float, log_count: float, log_delta: float, adjacency: Any
) -> None:
    """A rate less and noise more never cost more; a single kind is of no family."""
    rate, multiplier, count = 10**log_rate, 10**log_multiplier, round(10**log_count)
    apart = 1.002
    schedule = many_kinds(30, (rate, rate * apart), (multiplier, multiplier / apart), count)
    cheapest, dearest = (
        epsilon([(sampled(rate * ratio, multiplier / ratio), 30 * count)], 10**log_delta, adjacency=adjacency)
        for ratio in (1.0, apart)
    )
    stated = epsilon(schedule, 10**log_delta, adjacency=adjacency)
    assert cheapest * (1 - 1e-4) - 1e-7 <= stated <= dearest * (1 + 3e-4) + 1e-6


@pytest.mark.parametrize(
    ("rate", "multiplier", "count", "delta", "exact"),
    [
        (0.011, 1.3, 5, 1e-7, 1.428166333),
        (0.3, 4.0, 16, 1e-10, 13.34210332),
        (1e-3, 0.9, 64, 1e-6, 4.022498216),
        (2e-7, 0.25, 2, 1e-11, 8.80534891),
        (0.004, 0.5, 33, 1e-5, 21.99167002),  # losses reach to 870, beside an epsilon of 22
    ],
)
def test_one_step_of_a_group(rate: float, multiplier: float, count: int, delta: float, exact: float) -> None:
    """The loss rises with the output, so that delta is a sum of normal tails, of either side."""
    assert is_close(epsilon([(group_privacy(sampled(rate, multiplier), count), 1)], delta), exact)


MIXTURES = [
    ([(1e-6, 0.3, 300), (1e-6, 2.5, 10**6)], 1e-5, 0.0517513),
    ([(3.6e-4, 3.5, 7000), (1.7e-6, 0.21, 16), (1e-5, 1.3, 20_000)], 5e-5, 0.02037807514),
    ([(1.3e-4, 2.5, 3000), (1.2e-7, 0.26, 3), (5e-7, 0.7, 2)], 1.2e-7, 0.01110140596),
    ([(4.5e-6, 1.4, 25_000), (1.2e-6, 0.21, 5), (1e-4, 1.4, 100)], 4.6e-5, 0.00141068484),
    ([(1.4e-5, 0.268, 543), (8.5e-7, 2.2, 206), (1.1e-4, 2.04, 9730)], 1e-3, 0.33934),
]
"""Rates, multipliers and counts of rare samples, and their exact epsilons.

These are by long double transforms of up to four million points, or by dp_accounting on four grids (the last row),
extrapolated to a width of 0.
"""


@pytest.mark.parametrize(("kinds", "delta", "exact"), soak_but([MIXTURES[2], MIXTURES[-1]], MIXTURES))
def test_losses_about_as_rare_as_delta_do_not_spoil_what_decides(
    kinds: list[tuple[float, float, int]], delta: float, exact: float
) -> None:
    """They reach to 50 beside an epsilon of a hundredth."""
    schedule = [(sampled(rate, multiplier), count) for rate, multiplier, count in kinds]
    stated = epsilon(schedule, delta)
    assert exact <= stated <= exact + 1e-5
    finer = epsilon_near(stated * (1 - 5e-4), schedule, delta, accountant="pld", adjacency=ADD_OR_REMOVE_ONE)
    assert exact <= finer <= stated


def perturbed_objective(multiplier: float) -> Schedule:
    """A minimum with a random linear term, and a little noise on it."""
    events = [
        ObjectivePerturbationDpEvent(multiplier, 1 / (2 * multiplier)),
        dp.GaussianDpEvent(30 * multiplier),
    ]
    return [(dp.ComposedDpEvent(events), 1)]


@pytest.mark.parametrize("multiplier", [0.5, 5.0])
def test_a_loss_that_is_never_small_costs_what_quadrature_says(multiplier: float) -> None:
    """log(1 + r) + s^2 / 2 + |X| beside a normal loss: the first lies above what the sum is mostly above."""
    s, mu = 1 / multiplier, 1 / (30 * multiplier)
    lowest = math.log1p(1 / (2 * multiplier)) + s**2 / 2
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)

    def delta(epsilon: float) -> float:
        gap = epsilon - lowest - (mu**2 / 2 + mu * nodes)  # what |X| has to be above
        from_zero = np.maximum(gap, 0.0) / s
        above = 2 * norm.sf(from_zero)
        below = 2 * np.exp(np.minimum(gap, 50.0) + s**2 / 2) * norm.sf(from_zero + s)
        return float(weights @ (above - below)) / math.sqrt(2 * math.pi)

    exact = brentq(lambda epsilon: delta(epsilon) - 1e-6, 1e-3, 50.0, xtol=1e-12)
    found = epsilon(perturbed_objective(multiplier), 1e-6)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 5e-5)


def test_noise_for_a_loss_that_is_never_small_is_found_at_once() -> None:
    tried: list[float] = []

    def schedule_at(multiplier: float) -> Schedule:
        tried.append(multiplier)
        return perturbed_objective(multiplier)

    multiplier = calibrate(schedule_at, Budget(1.0, 1e-6))
    assert 0.999 < epsilon(perturbed_objective(multiplier), 1e-6) <= 1.0
    assert len(tried) < 50


def test_a_cap_dominates_and_keeps_the_mean() -> None:
    """Of exp(-L), and no delta is less, also next to the cap; a loss as large as the cap stays."""
    loss = DiscretePLD(np.array([-0.2, 0.1, 0.3, 2.0, 30.0]), np.array([0.4, 0.3, 0.2, 0.05, 0.04]), 0.01)
    assert loss.with_cap(30.0) is loss
    capped = loss.with_cap(0.3)
    assert capped.losses[-1] == 0.3
    for one in (loss, capped):
        assert one.masses.sum() + one.infinity_mass == pytest.approx(1.0, abs=1e-15)
        assert one.masses @ np.exp(-one.losses) == pytest.approx(
            loss.masses @ np.exp(-loss.losses), rel=1e-14
        )
    for at in np.linspace(-1.0, 31.0, 321):
        before, after = (
            one.infinity_mass + one.masses @ np.maximum(-np.expm1(at - one.losses), 0.0)
            for one in (loss, capped)
        )
        assert after >= before - 1e-15
        assert at > 0.3 or after == pytest.approx(before, rel=1e-13)


def test_two_infinite_losses_are_no_worse_than_one() -> None:
    """The chance that any is infinite is less than what the chances add up to."""
    rare = PLDSum([(DiscretePLD(np.array([0.0]), np.array([0.9]), 0.1), 5)])
    assert rare.infinity_mass == pytest.approx(1 - 0.9**5, rel=1e-11)
    certain = PLDSum([(DiscretePLD(np.array([0.0]), np.array([0.0]), 1.0), 1), *rare.parts])
    assert certain.infinity_mass == 1.0


@pytest.mark.parametrize(
    ("rate", "multiplier", "steps", "kinds", "delta", "exact"),
    [
        (1e-5, 0.9, 41_667, 24, 1e-8, 0.0710966),
        pytest.param(3e-5, 0.8, 333, 100, 1e-6, 0.03807942, marks=pytest.mark.soak),
        (1e-3, 1.0, 500, 24, 1e-6, 0.609430356),
    ],
)
def test_many_kinds_of_rare_samples_are_cut_into_few_cells(
    rate: float, multiplier: float, steps: int, kinds: int, delta: float, exact: float
) -> None:
    """Only where a loss mostly lies are the finest cells needed; of equal ones, a price took up to 450,000 a kind."""
    loss = CountingPLD(SampledPLD(GaussianPLD(1 / multiplier), rate))
    stated, _ = epsilon_of([(loss, steps)] * kinds, delta)
    assert exact <= stated <= exact * 1.0001
    assert loss.count <= 25_000 * kinds


def test_a_cap_leaves_room_above_epsilon() -> None:
    """Else the finite losses next to it have hardly any delta left, and a grid ends without an epsilon."""
    kinds = [(4.7008e-7, 2.536, 10), (3.7227e-4, 0.38433, 1), (3.4289e-6, 2.2819, 21)]  # the second decides
    plds = [(SampledPLD(GaussianPLD(1 / z), rate), count) for rate, z, count in kinds]
    stated, _ = epsilon_of(plds, 7.5873e-7)
    searched, _ = extrapolated_epsilon(plds, 7.5873e-7, 1.5755)
    assert 0.999 * stated <= searched <= stated


@pytest.mark.parametrize(
    ("kinds", "delta", "target"),
    [
        ([(1.9e-5, 2.8, 4), (2e-4, 4.9, 3380), (4.2e-6, 0.36, 8)], 1e-3, 0.00527),
        ([(1.1e-4, 0.87, 128), (1.6e-7, 3.8, 1), (6.7e-6, 3.0, 4)], 7.5e-4, 4.31),
    ],
)
def test_noise_of_rare_mixtures_takes_few_short_sums(
    kinds: list[tuple[float, float, int]], delta: float, target: float, points: list[int]
) -> None:
    """Losses about as rare as delta would mislead what is estimated first, by a factor of up to a thousand."""
    found = calibrate(
        lambda z: [(sampled(rate, z * share), count) for rate, share, count in kinds], Budget(target, delta)
    )
    assert sum(points) <= 10**6
    schedule = [(sampled(rate, found * share), count) for rate, share, count in kinds]
    assert 0.9998 * target <= epsilon(schedule, delta) <= target


def test_losses_on_too_fine_a_grid_are_refused_by_the_settings_to_change() -> None:
    with refused_as("losses_spread_too_far") as refusal:
        epsilon([(sampled(0.01, 1.0), 1000)], 1e-5, discretisation=1e-9)
    assert "privacy.epsilon to less" in PIPELINE.sentence(refusal.value)
    assert "accountant" not in ESTIMATORS.sentence(refusal.value)


@pytest.mark.parametrize("mu", [0.01, 0.5, 3.0])
def test_the_tail_bound_of_normal_noise_is_chernoff_s(mu: float) -> None:
    """log E exp(t L) is mu^2 (t + t^2) / 2, so the best tilt gives mu^2 / 2 + mu sqrt(2 log(1 / delta))."""
    points = sketch([(GaussianPLD(mu / 2.0), 4)], 1e-12)
    best = math.sqrt(2 * math.log(1e5)) / mu
    bound = points.tail_bound(1e-5, np.geomspace(best / 2, best * 2, 101))
    chernoff = mu * mu / 2 + mu * math.sqrt(2 * math.log(1e5))
    assert chernoff * (1 - 1e-9) <= bound <= chernoff * 1.01
    assert points.tail_bound(1e-13, np.array([best])) == math.inf


def test_a_window_that_holds_every_loss_is_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epsilon lies next to the largest loss, below which nothing is kept at so large a tilt."""
    sizes, transform = [], scipy.fft.irfft

    def counting(values: np.ndarray, size: int) -> np.ndarray:
        sizes.append(size)
        return np.asarray(transform(values, size))

    monkeypatch.setattr(scipy.fft, "irfft", counting)
    schedule: Schedule = [(PureDpEvent(float(one)), 1) for one in np.geomspace(0.4, 5.0, 24)]
    largest = sum(event.epsilon for event, _ in schedule)
    assert largest * 0.99 <= epsilon(schedule, 1e-5) <= largest * 1.001
    assert len(sizes) == len(set(sizes))

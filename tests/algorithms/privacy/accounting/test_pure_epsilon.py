"""Pure epsilon: its sums, its Rényi divergence against direct summation, samples of it, and values from elsewhere."""

import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

from algorithms.core.calibration import plan_renyi, plan_zcdp
from algorithms.core.plan import Target, by_accountants
from algorithms.core.planning_facts import PlanningFacts
from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    compose_loss,
    epsilon,
    pure_epsilon,
    rdp,
)
from algorithms.privacy.accounting.events import (
    CorrelatedStepDpEvent,
    PureDpEvent,
    RandomAllocationStepDpEvent,
    Schedule,
)
from algorithms.privacy.accounting.filters import ScheduleFilter
from algorithms.privacy.accounting.noise_search import calibrate
from tests.support.refusals import refused_as

LAPLACE = dp.LaplaceDpEvent(4.0)
ORDERS = (1.001, 1.5, 2.0, 8.0, 64.0, 1024.0)
RECORDS, SIZE = 100_000, 1000


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (dp.NoOpDpEvent(), 0.0),
        (dp.NonPrivateDpEvent(), math.inf),
        (LAPLACE, 0.25),
        (PureDpEvent(0.3), 0.3),
        (dp.PoissonSampledDpEvent(0.2, LAPLACE), math.log(1 + 0.2 * (math.exp(0.25) - 1))),
        (dp.PoissonSampledDpEvent(0.2, PureDpEvent(3.0)), math.log(1 + 0.2 * (math.exp(3.0) - 1))),
        (dp.PoissonSampledDpEvent(1.0, PureDpEvent(3.0)), 3.0),
        (dp.PoissonSampledDpEvent(0.0, PureDpEvent(3.0)), 0.0),
        (dp.PoissonSampledDpEvent(0.2, dp.NonPrivateDpEvent()), math.inf),
        (dp.PoissonSampledDpEvent(0.2, PureDpEvent(2000.0)), 2000.0 + math.log(0.2)),
        (dp.SelfComposedDpEvent(LAPLACE, 6), 1.5),
        (dp.ComposedDpEvent([LAPLACE, PureDpEvent(0.3), dp.SelfComposedDpEvent(LAPLACE, 2)]), 1.05),
    ],
)
def test_pure_epsilons_add_up(event: dp.DpEvent, expected: float) -> None:
    assert pure_epsilon(event) == pytest.approx(expected, rel=1e-12)
    assert epsilon([(event, 3)], 0.0, accountant="pure") == pytest.approx(3 * expected, rel=1e-12)


@pytest.mark.parametrize("event", [dp.GaussianDpEvent(1.0), dp.dp_event.ZCDpEvent(0.1)])
def test_what_is_not_pure_is_refused(event: dp.DpEvent) -> None:
    for one in (event, dp.PoissonSampledDpEvent(0.1, event), dp.ComposedDpEvent([LAPLACE, event])):
        with refused_as("not_purely_private"):
            pure_epsilon(one)


@given(cost=st.floats(1e-4, 30.0))
@settings(max_examples=50, deadline=None)
def test_the_divergence_of_a_pure_event_is_that_of_randomised_response(cost: float) -> None:
    truth, lie = -math.log1p(math.exp(-cost)), -math.log1p(math.exp(cost))
    p, q = np.array([truth, lie]), np.array([lie, truth])
    found = rdp([(PureDpEvent(cost), 1)], orders=ORDERS)
    for order, divergence in zip(ORDERS, found, strict=True):
        log_moment = float(np.logaddexp.reduce(order * p + (1 - order) * q))
        assert divergence == pytest.approx(log_moment / (order - 1), rel=1e-6, abs=1e-9)
        assert divergence <= min(cost, order * cost**2 / 2) * (1 + 1e-9)


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_no_mechanism_of_that_epsilon_diverges_further(scale: float) -> None:
    """Laplace noise and the exponential mechanism, by direct sums, in both directions."""
    points = np.linspace(-60 * scale, 60 * scale + 1, 200_001)
    laplace = [
        stats.laplace.logpdf(points, centre, scale) + math.log(points[1] - points[0]) for centre in (0, 1)
    ]
    scores = np.array([0.0, 0.2, 0.5, 1.0]) / scale
    chosen = [-np.logaddexp.reduce(-scores) - scores, np.full(4, -math.log(4.0))]
    found = rdp([(PureDpEvent(1 / scale), 1)], orders=ORDERS)
    for p, q in (laplace, laplace[::-1], chosen, chosen[::-1]):
        for order, divergence in zip(ORDERS, found, strict=True):
            exact = float(np.logaddexp.reduce(order * p + (1 - order) * q)) / (order - 1)
            assert exact <= divergence * (1 + 1e-4) + 1e-4


@pytest.mark.parametrize(("rate", "scale"), [(0.01, 0.5), (0.1, 1.0), (0.5, 3.0), (1.0, 1.0)])
def test_laplace_noise_on_a_sample_diverges_no_further_than_stated(rate: float, scale: float) -> None:
    points = np.linspace(-60 * scale, 60 * scale + 1, 200_001)
    width = math.log(points[1] - points[0])
    without, inside = (stats.laplace.logpdf(points, centre, scale) + width for centre in (0.0, 1.0))
    with np.errstate(divide="ignore"):
        mixed = np.logaddexp(np.log1p(-rate) + without, np.log(rate) + inside)
    found = rdp([(dp.PoissonSampledDpEvent(rate, dp.LaplaceDpEvent(scale)), 1)], orders=ORDERS)
    for p, q in ((mixed, without), (without, mixed)):
        for order, divergence in zip(ORDERS, found, strict=True):
            exact = float(np.logaddexp.reduce(order * p + (1 - order) * q)) / (order - 1)
            assert exact <= divergence * (1 + 1e-4) + 1e-4


@pytest.mark.parametrize("cost", [0.01, 0.5, 3.0])
def test_the_loss_of_a_pure_event_is_that_of_randomised_response(cost: float) -> None:
    stated = compose_loss([(PureDpEvent(cost), 1)], ADD_OR_REMOVE_ONE, grid=1e-4)
    truth = 1 / (1 + math.exp(-cost))
    for loss in (0.0, cost / 2, cost):
        exact = max(0.0, truth - math.exp(loss) * (1 - truth))
        assert exact <= stated.deltas(np.array([loss]))[0] <= exact + 2e-4


def fixed(multiplier: float) -> dp.DpEvent:
    return dp.SampledWithoutReplacementDpEvent(RECORDS, SIZE, dp.LaplaceDpEvent(multiplier))


@pytest.mark.parametrize(
    ("scale", "size", "expected"),
    [
        (0.0575, SIZE, 0.009999995629167367),
        (0.04, RECORDS, 0.009999999999999893),
        (0.05749998180027885, SIZE, 0.01),
        (0.040000000000000424, RECORDS, 0.01),
    ],
)
def test_an_iteration_costs_what_the_paper_says(scale: float, size: int, expected: float) -> None:
    """ln(1 + (m/n)(e^{S/(b m)} - 1)), equation (11) of arXiv:2008.01989; S = 40 is twice a record's bound of 20."""
    multiplier = scale * size / 20.0
    event = fixed(multiplier) if size < RECORDS else dp.LaplaceDpEvent(multiplier)
    found = epsilon([(event, 1)], 0.0, accountant="pure", adjacency=REPLACE_ONE)
    assert found == pytest.approx(expected, rel=1e-12)


DIVIDED = {
    RECORDS: (0.00209002802992, 0.00204500338737, 0.00200094869278, 0.00195784305096, 0.00191566601683),
    SIZE: (0.0129230659622, 0.0128282360310, 0.0127344976854, 0.0126418306199, 0.0125502149126),
}
EPSILONS = (0.191384993059, 0.195598698012, 0.199905175701, 0.204306468695, 0.208804664532)


@pytest.mark.parametrize("size", [RECORDS, SIZE])
def test_noise_that_is_divided_over_iterations_costs_its_whole_epsilon(size: int) -> None:
    """The scales of equation (31) of arXiv:2008.01989, and of samples with the same epsilons."""
    release = fixed if size < RECORDS else dp.LaplaceDpEvent
    events = [release(b * size / 20) for b in DIVIDED[size]]
    found = [epsilon([(event, 1)], 0.0, accountant="pure", adjacency=REPLACE_ONE) for event in events]
    assert found == pytest.approx(EPSILONS, rel=1e-9)
    whole = epsilon([(event, 1) for event in events], 0.0, accountant="pure", adjacency=REPLACE_ONE)
    assert whole == pytest.approx(1.0, rel=1e-10)


def test_a_selection_on_a_sample_costs_its_amplified_epsilon() -> None:
    event = dp.PoissonSampledDpEvent(0.008165880054245941, PureDpEvent(0.008333333333333333))
    assert pure_epsilon(event) == pytest.approx(6.833099258623638e-05, rel=1e-12)


ANSWERS = [
    *((100, delta, cost) for delta, cost in ((1e-5, 0.337), (1e-6, 0.391), (1e-7, 0.438), (1e-8, 0.481))),
    *((1000, delta, cost) for delta, cost in ((1e-5, 0.097), (1e-6, 0.116), (1e-7, 0.132), (1e-8, 0.148))),
]


@pytest.mark.parametrize(("steps", "delta", "cost"), ANSWERS)
def test_noise_for_a_pure_epsilon_of_one_costs_less_at_a_delta(steps: int, delta: float, cost: float) -> None:
    spent = epsilon([(dp.LaplaceDpEvent(2.0 * steps), steps)], delta, adjacency=REPLACE_ONE)
    assert spent == pytest.approx(cost, abs=6e-4)
    pairs = epsilon([(PureDpEvent(0.5 / steps), steps)], delta, adjacency=REPLACE_ONE)
    assert spent * 0.999 <= pairs <= 1.07 * spent  # what any mechanism of this epsilon may cost


@pytest.mark.parametrize(
    ("steps", "delta", "laplace", "gaussian"),
    [(100, 1e-5, 2.72, 3.8), (100, 1e-8, 2.01, 2.8), (1000, 1e-5, 8.5, 12.0), (1000, 1e-8, 6.2, 8.8)],
)
def test_noise_is_saved_by_a_delta(steps: int, delta: float, laplace: float, gaussian: float) -> None:
    def least(noise: Any) -> float:
        return calibrate(lambda z: [(noise(z), steps)], Budget(1.0, delta), adjacency=REPLACE_ONE)

    assert 2 * steps / least(dp.LaplaceDpEvent) == pytest.approx(laplace, rel=5e-3)
    assert 2 * steps * math.sqrt(2.0) / least(dp.GaussianDpEvent) == pytest.approx(gaussian, rel=1e-2)


def test_a_sample_of_fixed_size_by_pairs_of_pure_epsilon() -> None:
    event = fixed(2 * 0.05749998180027885 * SIZE / 40)
    spent = epsilon([(event, 100)], 1e-5, adjacency=REPLACE_ONE)
    assert spent == pytest.approx(0.33717392073141544, rel=5e-3)
    assert spent > 0.33669 * 0.999


def test_every_accountant_at_its_delta() -> None:
    assert by_accountants([(LAPLACE, 2)], 0.0) == {"pure": 0.5}
    assert by_accountants([(LAPLACE, 2)], 1e-5).keys() == {"pld", "rdp", "pure"}
    assert by_accountants([(dp.GaussianDpEvent(1.0), 1)], 0.0) == {}
    for delta, accountant in ((0.0, "pld"), (0.0, "rdp"), (1e-5, "pure")):
        with refused_as("delta_of_accountant", delta=delta, accountant=accountant):
            Target(Budget(1.0, delta), accountant)  # type: ignore[arg-type]


def test_calibration_meets_a_pure_target_closely() -> None:
    target = Budget(1.0, 0.0)
    found = calibrate(lambda z: [(fixed(z), 50)], target, accountant="pure", adjacency=REPLACE_ONE)
    spent = epsilon([(fixed(found), 50)], 0.0, accountant="pure", adjacency=REPLACE_ONE)
    assert 0.999 < spent <= 1.0


def test_releases_chosen_on_the_way_need_a_delta() -> None:
    facts, target = PlanningFacts(10, 3, 1, 2), Target(Budget(1.0, 0.0), "pure")
    with refused_as("filter_needs_delta"):
        plan_zcdp(0.1, target=target, facts=facts, steps=1)
    with refused_as("filter_needs_delta"):
        plan_renyi(8.0, target=target, facts=facts, steps=1, sampling_rate=1.0)


def test_a_part_of_a_pure_schedule_is_stated_at_the_whole_s_cost() -> None:
    privacy_filter = ScheduleFilter([(LAPLACE, 2)], Budget(0.5, 0.0))
    assert privacy_filter.epsilon_spent(0.0) == 0.0
    privacy_filter.charge(LAPLACE)
    assert privacy_filter.epsilon_spent(0.0) == 0.5
    assert privacy_filter.epsilon_spent(1e-5) <= 0.5


def _exact(cost: float, count: int, delta: float) -> float:
    """The epsilon at `delta` of randomised response, `count` times: by its binomial tail."""
    truths = np.arange(count + 1)
    masses, losses = stats.binom.logpmf(truths, count, special.expit(cost)), (2 * truths - count) * cost

    def above(epsilon: float) -> float:
        is_more = losses > epsilon
        return float(np.sum(np.exp(masses[is_more]) * -np.expm1(epsilon - losses[is_more]))) - delta

    return float(optimize.brentq(above, 0.0, count * cost))


@pytest.mark.parametrize("delta", [1e-5, 1e-8, 3e-11])
@pytest.mark.parametrize(
    ("cost", "count"),
    [
        (0.001, 1000),
        (0.001 * (1 + 1e-12), 1000),
        (0.00123, 3000),
        (0.0137, 500),
        (0.1, 1000),
        (0.5, 20),
        (1.5e-5, 100_000),
    ],
)
def test_pure_releases_by_pld_are_close_to_their_binomial_tail_and_never_below(
    cost: float, count: int, delta: float
) -> None:
    exact = _exact(cost, count, delta)
    assert exact <= epsilon([(PureDpEvent(cost), count)], delta) <= exact * 1.001
    if delta > 1e-10:  # Laplace noise costs no more than any mechanism of its pure epsilon
        assert epsilon([(dp.LaplaceDpEvent(1 / cost), count)], delta) <= exact * 1.001


@pytest.mark.parametrize(
    ("cost", "count", "delta"),
    [(0.1, 1000, 1e-13), (0.01, 10_000, 1e-13), (0.01, 1000, 1e-15), (0.01, 1000, 9e-12)],
)
def test_pld_is_as_close_at_a_delta_below_what_transforms_lose(cost: float, count: int, delta: float) -> None:
    exact = _exact(cost, count, delta)
    assert exact <= epsilon([(PureDpEvent(cost), count)], delta) <= 1.001 * exact


@pytest.mark.parametrize("cost", [1e-4, 1e-7, 1e-8, 1e-9, 1e-12])
def test_a_tiny_pure_epsilon_has_a_renyi_divergence_that_rounding_does_not_take(cost: float) -> None:
    # cosh expanded: the moments are those of randomised response to a relative 1e-9
    orders = (1.5, 2.0, 8.0, 64.0)
    found = rdp([(PureDpEvent(cost), 1)], orders=orders)
    np.testing.assert_allclose(found, [order * cost**2 / 2 for order in orders], rtol=1e-4)


@pytest.mark.parametrize("nested", [False, True])
def test_a_hundred_million_releases_are_still_close(nested: bool) -> None:
    """0.59979 is the normal approximation, whose error is far below the tolerance: their losses are all but normal."""
    cost, count, delta = 1e-5, 10**8, 2e-11
    one = PureDpEvent(cost)
    schedule: Schedule = [(dp.SelfComposedDpEvent(one, count), 1)] if nested else [(one, count)]
    normal = epsilon([(dp.GaussianDpEvent(10.0), 1)], delta)
    assert normal * (1 - 1e-5) <= epsilon(schedule, delta) <= 1.001 * normal


@pytest.mark.parametrize("step", [CorrelatedStepDpEvent(1.0, 10, 1.0), RandomAllocationStepDpEvent(1.0, 10)])
@pytest.mark.parametrize("nested", [False, True])
def test_a_step_that_nothing_has_paid_for_has_no_pure_epsilon_either(step: dp.DpEvent, nested: bool) -> None:
    with pytest.raises(RefusedError, match="none before them has paid"):
        epsilon([(dp.SelfComposedDpEvent(step, 5) if nested else step, 5)], 0.0, accountant="pure")


def test_a_search_has_no_pure_epsilon_so_its_intervals_never_count_laplace_noise() -> None:
    search = dp.dp_event.RepeatAndSelectDpEvent(dp.LaplaceDpEvent(2.0), 3.0, 1.0)
    with refused_as("not_purely_private", mechanism="a search"):
        epsilon([(search, 1)], 0.0, accountant="pure")

"""Random allocation: each record takes part in exactly one step of each pass. Its price against exact values and draws.

No expected value is computed by the product: closed forms for one step, sums over two steps by quadrature, moments by
the multinomial theorem, and Monte Carlo draws of the dominating pair with a stated false-alarm rate.
"""

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from scipy.stats import binomtest, chi2, norm

from algorithms.core import calibration
from algorithms.core.minibatch import DPSGDState
from algorithms.core.plan import Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.methods.dp_sgd import DPSGD
from algorithms.privacy.accounting import Budget, allocation_losses, noise_search
from algorithms.privacy.accounting.allocation_losses import divergences_of_pass, pair_of_pass, ratio_of_pass
from algorithms.privacy.accounting.epsilon import (
    ADD_OR_REMOVE_ONE,
    ORDERS,
    REPLACE_ONE,
    Accountant,
    epsilon,
    group_privacy,
    rdp,
)
from algorithms.privacy.accounting.event_rules import pairs_of
from algorithms.privacy.accounting.events import (
    RandomAllocationDpEvent,
    RandomAllocationStepDpEvent,
    Schedule,
    count_same,
    on_disjoint_parts,
    schedule_from_json,
    schedule_to_json,
    unroll,
)
from algorithms.privacy.accounting.filters import RenyiFilter
from algorithms.privacy.accounting.pld_epsilon import ComposedPLD, coarse_grid, sides_of
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian
from algorithms.privacy.mechanisms.sampling import RandomAllocation, draw_sample
from tests.support.barriers import Free, barrier
from tests.support.bench import made_up, small_model
from tests.support.refusals import refused_as
from tests.support.soak import soak_but


def passes(noise: float, parts: int, count: int) -> Schedule:
    one = [(RandomAllocationDpEvent(noise, parts, parts), 1)]
    return (one + ([(RandomAllocationStepDpEvent(noise, parts), parts - 1)] if parts > 1 else [])) * count


def deltas(noise: float, parts: int, steps: int, epsilons: list[float]) -> list[float]:
    pair = pair_of_pass(RandomAllocationDpEvent(noise, parts, steps))
    return ComposedPLD([(pair, 1)], 1e-9).deltas(np.array(epsilons)).tolist()


def two_steps(noise: float, eps: float) -> float:
    """The larger hockey-stick divergence of a pass of two steps, by quadrature over the first one's ratio.

    The second ratio is log-normal with mean 1, whose means above and below a number have closed forms.
    """
    normal = np.linspace(-14.0, 14.0 + 1 / noise, 100_001)
    chances = norm.pdf(normal) * (normal[1] - normal[0])
    first = np.exp(normal / noise - 0.5 / noise**2)

    def tails(limit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = noise * np.log(np.maximum(limit, 1e-300)) + 0.5 / noise
        above = np.where(limit > 0, norm.sf(at - 1 / noise) - limit * norm.sf(at), 1 - limit)
        return above, np.where(limit > 0, limit * norm.cdf(at) - norm.cdf(at - 1 / noise), 0.0)

    removed = chances @ tails(2 * math.exp(eps) - first)[0] / 2
    added = chances @ tails(2 * math.exp(-eps) - first)[1] / 2 * math.exp(eps)
    return float(max(removed, added))


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_a_pass_of_one_step_is_a_gaussian_release(noise: float) -> None:
    assert epsilon(passes(noise, 1, 4), 1e-6) == pytest.approx(
        epsilon([(dp.GaussianDpEvent(noise), 4)], 1e-6), rel=1e-3
    )


@pytest.mark.parametrize(
    ("noise", "eps"),
    [(1.0, 0.3), (1.0, 1.0), (2.0, 0.1), (0.8, 2.0), (0.5, 9.0), (0.3, 12.0), (0.15, 40.0), (30.0, 0.02)],
)
def test_a_pass_of_two_steps_costs_what_quadrature_says(noise: float, eps: float) -> None:
    exact = two_steps(noise, eps)
    (found,) = deltas(noise, 2, 2, [eps])
    assert exact * (1 - 1e-6) <= found <= exact * 1.003 + 1e-9


@pytest.mark.parametrize(
    ("noise", "parts", "delta", "exact"),
    [
        (3.0, 4, 1e-5, 0.6161185588),
        (1.0, 10, 1e-4, 1.704442705),
        (1.5, 30, 1e-5, 0.5139891741),
        (0.8, 100, 1e-6, 1.874763133),
        (2.0, 1000, 1e-4, 0.03609421589),
    ],
)
def test_a_pass_costs_what_an_inverse_laplace_transform_says(
    noise: float, parts: int, delta: float, exact: float
) -> None:
    """Made apart from the product: the ratio's distribution functions are integrals of E exp(-s S), by quadrature."""
    found = epsilon(passes(noise, parts, 1), delta)
    assert exact * (1 - 1e-8) <= found <= max(exact * 1.001, exact + 1e-4)


@pytest.mark.parametrize(
    ("noise", "parts", "count", "lower", "upper"),
    [
        (1.0, 100, 10, 1.701487, 1.701755),
        (2.0, 20, 40, 3.161091, 3.161493),
        (0.9, 100, 40, 4.427380, 4.427990),
    ],
)
def test_cost_of_passes_lies_between_cells_and_ends_of_their_ratio(
    noise: float, parts: int, count: int, lower: float, upper: float
) -> None:
    """At delta 1e-5, made like the exact values: of what is left when a cell's outputs are one, and of its two ends."""
    assert lower * (1 - 1e-6) <= epsilon(passes(noise, parts, count), 1e-5) <= upper * 1.001


@pytest.mark.parametrize(
    ("noise", "parts", "steps", "eps"),
    [
        (0.6, 100, 100, 1.5),
        (1.0, 20, 7, 0.3),
        (0.3, 5, 5, 4.0),
        (0.45, 37, 37, 2.0),
    ],
)
def test_the_price_is_not_below_draws_of_the_pair_and_close_to_them(
    noise: float, parts: int, steps: int, eps: float
) -> None:
    draws = 400_000 // steps * 4
    rng = np.random.default_rng(7)
    logs = rng.standard_normal((draws, steps)) / noise - 0.5 / noise**2  # log Y under Q
    idle = (parts - steps) / parts
    under_q = np.exp(logs).sum(axis=1) / parts + idle
    takes_part = rng.random(draws) < steps / parts
    logs[takes_part, 0] += noise**-2
    under_p = np.exp(logs).sum(axis=1) / parts + idle
    removed = np.maximum(0.0, 1 - math.exp(eps) / under_p)
    added = np.maximum(0.0, 1 - math.exp(eps) * under_q)
    lowest, widest = max((side.mean(), side.std() / math.sqrt(draws)) for side in (removed, added))
    (found,) = deltas(noise, parts, steps, [eps])
    assert found > lowest - 5 * widest  # wrong for a right price once in three million
    assert found < lowest + 5 * widest + 0.01 * lowest


@pytest.mark.parametrize(("noise", "parts", "steps"), [(1.0, 4, 4), (0.8, 6, 6), (1.5, 5, 3)])
def test_moments_are_those_of_the_multinomial_theorem(noise: float, parts: int, steps: int) -> None:
    """E[S^a] over all ways to distribute a factors over the steps, and the constant of a shorter pass."""

    def moment(order: int) -> float:
        def ways(left: int, bins: int) -> float:
            if bins == 0:
                idle = Fraction(parts - steps, parts)
                return float(idle) ** left / math.factorial(left)
            return sum(
                math.exp(n * (n - 1) / (2 * noise**2))
                / math.factorial(n)
                / parts**n
                * ways(left - n, bins - 1)
                for n in range(left + 1)
            )

        return math.factorial(order) * ways(order, steps)

    event = RandomAllocationDpEvent(noise, parts, steps)
    for order in (2, 3, 5):
        assert rdp([(event, 1)], orders=(float(order),))[0] >= math.log(moment(order)) / (order - 1) - 1e-12
    assert rdp([(event, 1)], orders=(3.0,))[0] == pytest.approx(math.log(moment(3)) / 2, rel=1e-6)


def test_renyi_bounds_hold_for_a_record_more() -> None:
    """E[S^-b] by draws, where it is the larger side: many steps, much noise, a low order."""
    noise, parts, order = 0.6, 3, 8.0
    rng = np.random.default_rng(3)
    ratios = np.exp(rng.standard_normal((2_000_000, parts)) / noise - 0.5 / noise**2).mean(axis=1)
    drawn = np.log(np.mean(ratios ** (1 - order))) / (order - 1)
    assert rdp([(RandomAllocationDpEvent(noise, parts, parts), 1)], orders=(order,))[0] > drawn - 0.01


@pytest.mark.parametrize(
    ("noise", "parts", "count"), [(1.0, 100, 10), (0.8, 30, 5), (2.0, 20, 20), (0.7, 10, 1)]
)
def test_passes_cost_less_than_as_many_poisson_steps(noise: float, parts: int, count: int) -> None:
    poisson = dp.PoissonSampledDpEvent(1 / parts, dp.GaussianDpEvent(noise))
    assert epsilon(passes(noise, parts, count), 1e-5) < epsilon([(poisson, parts * count)], 1e-5)


@pytest.mark.parametrize("noise", [1e-3, 0.3, 0.45, 1e3, 1e7])
def test_extreme_noise_is_priced_and_never_above_a_sum_over_all_records(noise: float) -> None:
    found = epsilon(passes(noise, 20, 1), 1e-6)
    assert 0 <= found <= epsilon([(dp.GaussianDpEvent(noise), 1)], 1e-6) * 1.001 + 1e-9


def test_less_noise_never_costs_less() -> None:
    costs = [epsilon(passes(noise, 20, 3), 1e-5) for noise in np.geomspace(0.08, 50, 8)]
    assert costs == sorted(costs, reverse=True)


def test_later_steps_are_free_only_after_the_first_of_their_pass() -> None:
    assert unroll(passes(1.0, 5, 2)) == [(RandomAllocationDpEvent(1.0, 5, 5), 1)] * 2
    first, later = RandomAllocationDpEvent(1.0, 5, 3), RandomAllocationStepDpEvent(1.0, 5)
    for schedule in (
        [(later, 1)],
        [(first, 1), (later, 3)],
        [(first, 0), (later, 2)],
        [(dp.ComposedDpEvent([dp.SelfComposedDpEvent(first, 0), dp.SelfComposedDpEvent(later, 2)]), 1)],
        [(first, 1), (RandomAllocationStepDpEvent(2.0, 5), 2)],
        [(first, 1), (RandomAllocationStepDpEvent(1.0, 6), 2)],
    ):
        with pytest.raises(RefusedError, match="later steps of a pass"):
            unroll(schedule)


@pytest.mark.parametrize("is_read", [False, True], ids=["planned", "read from a document"])
def test_passes_of_a_long_run_are_priced_as_rows_of_each_kind(is_read: bool) -> None:
    """Thousands of equal passes are one row, also inside other events; what nothing has paid for stays."""
    last = [(RandomAllocationDpEvent(1.5, 4, 3), 1), (RandomAllocationStepDpEvent(1.5, 4), 2)]
    long, evaluation = [*passes(1.5, 4, 5000), *last], [(dp.GaussianDpEvent(3.0), 1)]
    nested = on_disjoint_parts(long, evaluation)
    unpaid = [*long, (RandomAllocationStepDpEvent(1.5, 4), 1)]
    if is_read:
        long, nested, unpaid = (schedule_from_json(schedule_to_json(some)) for some in (long, nested, unpaid))
    few = [(RandomAllocationDpEvent(1.5, 4, 4), 5000), (RandomAllocationDpEvent(1.5, 4, 3), 1)]
    assert count_same(long) == few
    assert count_same(nested) == on_disjoint_parts(few, evaluation)
    assert count_same(unpaid) == unpaid
    for accountant in ("pld", "rdp"):
        assert epsilon(long, 1e-5, accountant=accountant) == epsilon(few, 1e-5, accountant=accountant)


def test_a_long_run_is_calibrated_by_the_kinds_of_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan has the rows of each pass, in their order."""
    lengths = []

    def calibrate(schedule_at: Callable[[float], Schedule], *arguments: Any, **others: Any) -> float:
        lengths.append(len(schedule_at(1.0)))
        return noise_search.calibrate(schedule_at, *arguments, **others)

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    facts = PlanningFacts(records=1000, parameters=10, layers=1, classes=2)
    method = DPSGD(steps=2999, expected_batch_size=250, sampling="random_allocation")
    plan = method.plan(Target(Budget(1.0, 1e-5)), facts)
    noise = plan.noise_multiplier
    last = [(RandomAllocationDpEvent(noise, 4, 3), 1), (RandomAllocationStepDpEvent(noise, 4), 2)]
    assert plan.schedule == [*passes(noise, 4, 749), *last]
    assert lengths == [2]


@pytest.mark.parametrize("noise", [0.5, 5.0, 100.0])
def test_masses_of_a_long_pass_are_exact_but_for_a_few_last_places_a_step(noise: float) -> None:
    """What is added for rounding is 16 times 2^-48 a step."""
    parts = 1024
    _, masses, _ = ratio_of_pass(noise, parts, parts)
    assert masses.sum() / (1 + 2.0**-34) == pytest.approx(1.0, abs=parts * 2.0**-50)


def test_orders_that_are_asked_for_one_by_one_share_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, on_points = [], allocation_losses._on_points

    def spy(points: np.ndarray, noise: float) -> np.ndarray:
        computed.append(noise)
        return on_points(points, noise)

    monkeypatch.setattr(allocation_losses, "_on_points", spy)
    event, orders = RandomAllocationDpEvent(2.345, 50, 50), (1.5, 4.0, 17.25)
    singly = [divergences_of_pass(event, (order,))[0] for order in orders]
    assert computed == [2.345]
    assert singly == pytest.approx(list(divergences_of_pass(event, orders)), rel=1e-12)


def test_passes_of_another_number_of_steps_draw_anew() -> None:
    """As where a method lets its batches grow: of those in the fourth pass, of two steps, half are in each half of
    the next one, whose steps are four to a pass. False-alarm rate of 1e-6.
    """
    stream, records = seeded_generator(1).stream(0), 4000
    before, after = RandomAllocation(2, 12, step=6), RandomAllocation(4, 24, step=12)
    assert before.passes == after.passes == 3
    first, second = (draw_sample(sampling, records, stream, step=0) for sampling in (before, after))
    both = len(np.intersect1d(first, second))
    assert binomtest(both, len(second), 0.5).pvalue > 1e-6


def test_an_adaptive_run_pays_for_a_step_with_other_noise_than_its_pass() -> None:
    """Later steps are free under a Rényi filter, so a step with a hundredth of the noise would be."""
    privacy_filter = RenyiFilter(8.0, Budget(50.0, 1e-5))
    asked = barrier(made_up(20), privacy_filter=privacy_filter)

    def ask(noise: float, step: int) -> None:
        sampling = RandomAllocation(5, 3, step)
        point = small_model().initial_parameters()
        asked.gradient(point, sampling=sampling, clipping=L2(1.0), noise=Gaussian(noise), divisor=4.0)

    ask(1.0, 0)
    cost = privacy_filter.epsilon_spent(1e-5)
    with pytest.raises(RefusedError, match="later steps of a pass"):
        ask(0.01, 1)
    for step in (1, 2):
        ask(1.0, step)
    assert privacy_filter.epsilon_spent(1e-5) == cost > 0.0


def test_events_are_written_and_read_and_have_no_bound_where_nothing_is_proven() -> None:
    schedule = passes(1.25, 8, 1)
    assert schedule_from_json(schedule_to_json(schedule)) == schedule
    with refused_as("no_bound_replace_one", mechanism="random allocation"):
        epsilon(schedule, 1e-5, adjacency=REPLACE_ONE)
    for event in (RandomAllocationDpEvent(0.0, 5, 5), RandomAllocationDpEvent(1.0, 5, 6)):
        with pytest.raises(RefusedError, match="no mechanism"):
            epsilon([(event, 1)], 1e-5)


def test_each_record_is_in_exactly_one_step_of_each_pass() -> None:
    generator, parts, steps, records = seeded_generator(5), 7, 17, 1000
    samples = [
        draw_sample(RandomAllocation(parts, steps, step), records, generator.stream(step), step=step)
        for step in range(steps)
    ]
    for first in (0, 7):
        assert sorted(np.concatenate(samples[first : first + parts])) == list(range(records))
    last = Counter(np.concatenate(samples[14:]).tolist())
    assert set(last.values()) == {1} and 300 < len(last) < 560  # 3 of 7 steps: 429 expected, 8 deviations
    counts = np.array([len(sample) for sample in samples[:7]])
    assert chi2.sf(float(np.square(counts - records / parts).sum() / (records / parts)), parts - 1) > 1e-6


def test_passes_are_drawn_independently() -> None:
    generator, parts, records = seeded_generator(1), 4, 40_000
    pairs = [generator.stream(0).allocation(records, parts, number) for number in (0, 1)]
    table = np.zeros((parts, parts))
    np.add.at(table, tuple(pairs), 1)
    expected = records / parts**2
    assert chi2.sf(float(np.square(table - expected).sum() / expected), parts**2 - 1) > 1e-6


def test_the_barrier_answers_each_step_of_a_pass_once_and_in_order() -> None:
    privacy_filter, trace = Free(), Trace()
    asked = barrier(made_up(40), privacy_filter=privacy_filter, trace=trace)
    point = small_model().initial_parameters()

    def ask(step: int) -> None:
        turn = RandomAllocation(4, 6, step)
        asked.gradient(point, sampling=turn, clipping=L2(1.0), noise=Gaussian(1.0), divisor=10.0)

    with pytest.raises(RefusedError, match="asked for after 0 others"):
        ask(1)
    ask(0)
    for out_of_turn in (0, 2):
        with pytest.raises(RefusedError, match="asked for after 1 others"):
            ask(out_of_turn)
    for step in range(1, 6):
        ask(step)
    first, later = RandomAllocationDpEvent(1.0, 4, 4), RandomAllocationStepDpEvent(1.0, 4)
    assert privacy_filter.events == [first, later, later, later, RandomAllocationDpEvent(1.0, 4, 2), later]
    resumed = barrier(made_up(40), trace=trace)
    with pytest.raises(RefusedError, match="asked for after 6 others"):
        resumed.gradient(
            point, sampling=RandomAllocation(4, 8, 0), clipping=L2(1.0), noise=Gaussian(1.0), divisor=10.0
        )


def test_dp_sgd_plans_and_takes_the_steps_of_its_passes() -> None:
    records = made_up(50)
    method = DPSGD(steps=7, expected_batch_size=16, sampling="random_allocation")
    model = small_model()
    facts = PlanningFacts(records=50, parameters=model.parameter_count, layers=1, classes=3)
    plan = method.plan(Target(Budget(2.0, 1e-5)), facts)
    assert (round(1 / plan.sampling_rate), plan.divisor) == (3, pytest.approx(50 / 3))
    assert [count for _, count in plan.schedule] == [1, 2, 1, 2, 1]
    assert plan.schedule[-1][0] == RandomAllocationDpEvent(plan.noise_multiplier, 3, 1)
    privacy_filter = Free()
    asked, state = (
        barrier(records, privacy_filter=privacy_filter),
        method.init(model.initial_parameters(), plan),
    )
    for _ in range(7):
        state = method.step(state, plan, asked)
        assert isinstance(state, DPSGDState)
    assert privacy_filter.events == [event for event, count in plan.schedule for _ in range(count)]
    private = DPSGD(steps=4, sampling_rate=0.25, sampling="random_allocation").plan(
        Target(Budget(2.0, 1e-5)), PlanningFacts(records=None, parameters=3, layers=1, classes=2)
    )
    assert private.divisor is None and [count for _, count in private.schedule] == [1, 1, 3]


def test_several_records_of_a_person_are_refused_with_what_to_choose_instead() -> None:
    with refused_as("no_bound_of_allocated_group", count=2):
        group_privacy(RandomAllocationDpEvent(1.0, 10, 10), 2)
    with refused_as("no_bound_of_allocated_group", count=3):
        group_privacy(RandomAllocationStepDpEvent(1.0, 10), 3)


def test_a_value_of_next_to_no_mass_does_not_decide_where_a_search_begins() -> None:
    """A record that no step of a short pass has loses log(100 / 36), with a chance below 1e-18; epsilon is 0.001."""
    runs = [(RandomAllocationDpEvent(1000.0, 100, steps), count) for steps, count in ((100, 22), (64, 1))]
    sides = sides_of(pairs_of(runs, ADD_OR_REMOVE_ONE, 1e-3))
    remove, add = (coarse_grid(plds, 1e-5, 3e-4)[1] for plds in sides)
    assert add == pytest.approx(remove, rel=0.01)
    assert remove < 0.002


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("multiplier", [6.87e-7, 1e-3, 0.02, 0.12])
def test_next_to_no_noise_never_costs_less_than_one_test_tells(
    multiplier: float, accountant: Accountant
) -> None:
    """Whether any of the sums is above half of a record's bound: of any event, P <= exp(epsilon) Q + delta."""
    parts, steps, delta = 1000, 10, 1e-9
    log_q = math.log(steps) + float(norm.logsf(0.5 / multiplier))
    stated = epsilon([(RandomAllocationDpEvent(multiplier, parts, steps), 1)], delta, accountant=accountant)
    assert stated >= math.log(0.5 * steps / parts) - log_q


@pytest.mark.parametrize("multiplier", [1e-8, 1e-4, 0.3, 1e4, 7.4e8, 1e12])
def test_renyi_bounds_are_numbers_at_any_noise(multiplier: float) -> None:
    bounds = np.array(divergences_of_pass(RandomAllocationDpEvent(multiplier, 1000, 10), ORDERS))
    assert (bounds > 0).all()
    assert (bounds <= np.array(ORDERS) / (2 * multiplier**2)).all()


@pytest.mark.parametrize("steps", [100, 10**6])
def test_noise_without_end_costs_at_most_one_sum_over_all_records(steps: int) -> None:
    event = RandomAllocationDpEvent(7e8, 10**6, steps)
    # delta at epsilon 0 of one sum is 2 Phi(1 / (2 z)) - 1, about 1 / (z sqrt(2 pi)): less than this one.
    assert epsilon([(event, 1)], 1e-9) == 0.0


@pytest.mark.parametrize("noise", [0.1, 0.12, 0.3, 1.0])
@pytest.mark.parametrize("finer", [0.1, 1.0])
def test_a_pass_loses_no_mass_on_a_grid_of_any_width(noise: float, finer: float) -> None:
    ratios, masses, lost = ratio_of_pass(noise, 13, 13, finer)
    assert masses.sum() == pytest.approx(1.0, abs=1e-8)
    assert masses @ ratios + lost == pytest.approx(1.0, abs=1e-8)


ROUNDED = [(3, 0.3), (3, 300.0), (1024, 4.0), (2**15, 0.3), (10**6, 300.0)]
"""The fewest and the most steps, and each noise."""


@pytest.mark.parametrize(
    ("steps", "noise"), soak_but(ROUNDED, product((3, 1024, 2**15, 10**6), (0.3, 4.0, 300.0)))
)
def test_rounding_takes_nothing_of_the_chances_and_the_mean_of_a_long_pass(noise: float, steps: int) -> None:
    """A distribution that dominates has the whole mass, and the mean 1 but for what counts as lost."""
    ratios, masses, lost = ratio_of_pass(noise, steps, steps)
    for whole in (math.fsum(masses), math.fsum(masses * ratios) + lost):
        assert 1.0 <= whole <= 1.0 + 2e-7

"""Events as JSON, filters, and the sampled Gaussian against dp_accounting."""

import math
from fractions import Fraction
from itertools import product
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.privacy.accounting import Budget, filters
from algorithms.privacy.accounting import epsilon as accounting
from algorithms.privacy.accounting import rdp as renyi
from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE, ORDERS, REPLACE_ONE, epsilon, rdp
from algorithms.privacy.accounting.event_classes import RandomAllocationDpEvent, RenyiDpEvent
from algorithms.privacy.accounting.events import (
    event_from_json,
    event_to_json,
    run_lengths,
    schedule_from_json,
    schedule_to_json,
)
from algorithms.privacy.accounting.filters import (
    CostCurve,
    RenyiFilter,
    ScheduleFilter,
    ZCDPFilter,
    rho_of,
    rho_of_budget,
)
from algorithms.privacy.accounting.noise_search import calibrate
from algorithms.privacy.accounting.pld_epsilon import epsilon_of
from algorithms.privacy.accounting.rdp import (
    rdp_by_library,
    rdp_of_fixed_size_sample,
    rdp_of_sampled_gaussian,
)
from tests.support.refusals import refused, refused_as
from tests.support.soak import soak_but

GAUSSIAN = dp.GaussianDpEvent(2.0)
EVENTS = [
    GAUSSIAN,
    dp.LaplaceDpEvent(3.0),
    dp.NoOpDpEvent(),
    dp.NonPrivateDpEvent(),
    dp.PoissonSampledDpEvent(0.01, GAUSSIAN),
    dp.SampledWithoutReplacementDpEvent(100, 10, GAUSSIAN),
    dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, GAUSSIAN), 7),
    dp.ComposedDpEvent([GAUSSIAN, dp.LaplaceDpEvent(1.0)]),
    dp.dp_event.ZCDpEvent(0.5),
    dp.dp_event.RepeatAndSelectDpEvent(GAUSSIAN, 6, 1.0),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_survives_json(event: dp.DpEvent) -> None:
    assert event_from_json(event_to_json(event)) == event


def test_the_json_has_the_library_s_own_names() -> None:
    event = dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.1))
    assert event_to_json(event) == {
        "type": "PoissonSampledDpEvent",
        "sampling_probability": 0.01,
        "event": {"type": "GaussianDpEvent", "noise_multiplier": 1.1},
    }


@pytest.mark.parametrize(
    "document",
    [
        {"type": "OtherDpEvent"},
        {},
        {"type": "GaussianDpEvent"},
        {"type": "GaussianDpEvent", "noise_multiplier": 1.0, "more": 2},
        {"type": "GaussianDpEvent", "noise_multiplier": "1.0"},
        {"type": "GaussianDpEvent", "noise_multiplier": True},
        {"type": "GaussianDpEvent", "noise_multiplier": [1.0]},
        {"type": "GaussianDpEvent", "noise_multiplier": {"type": "NoOpDpEvent"}},
        {"type": "GaussianDpEvent", "noise_multiplier": math.nan},
        {"type": "GaussianDpEvent", "noise_multiplier": 1e308},
        {"type": "GaussianDpEvent", "noise_multiplier": 10**400},
        {"type": "PoissonSampledDpEvent", "sampling_probability": 0.1, "event": 1.0},
        {"type": "PoissonSampledDpEvent", "sampling_probability": 0.1, "event": []},
        {"type": "ComposedDpEvent", "events": 1},
        {"type": "ComposedDpEvent", "events": [1]},
        {"type": "GaussianDpEvent", "noise_multiplier": 0.0},
        {"type": "GaussianDpEvent", "noise_multiplier": 1e-7},
        {"type": "PoissonSampledDpEvent", "sampling_probability": 1.1, "event": {"type": "NoOpDpEvent"}},
        {"type": "SelfComposedDpEvent", "count": 2.0, "event": {"type": "NoOpDpEvent"}},
        {"type": "SelfComposedDpEvent", "count": 10**10, "event": {"type": "NoOpDpEvent"}},
        {"type": "EitherDpEvent", "events": []},
        {"type": "DisjointPartsDpEvent", "events": []},
        {"type": "RandomAllocationDpEvent", "noise_multiplier": 1.0, "parts": 4.0, "steps": 4},
        {"type": "RandomAllocationDpEvent", "noise_multiplier": 1.0, "parts": 10**10, "steps": 4},
        {"type": "RandomAllocationDpEvent", "noise_multiplier": 1.0, "parts": 4, "steps": 5},
        {"type": "RandomAllocationStepDpEvent", "noise_multiplier": 1.0, "parts": 1.5},
        {"type": "SampledGroupDpEvent", "noise_multiplier": 1.0, "sampling_probability": 0.1, "count": 1000},
        {"type": "SampledGroupDpEvent", "noise_multiplier": 1e9, "sampling_probability": 0.1, "count": 1001},
        {
            "type": "SampledWithoutReplacementDpEvent",
            "source_dataset_size": 100,
            "sample_size": 101,
            "event": {"type": "GaussianDpEvent", "noise_multiplier": 1.0},
        },
    ],
)
def test_a_document_that_is_no_event_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(RefusedError):
        event_from_json(document)


def test_passes_of_ten_million_records_in_eights_are_events() -> None:
    event = RandomAllocationDpEvent(1.0, parts=1_250_000, steps=1_000_000)
    assert event_from_json(event_to_json(event)) == event


def test_a_schedule_survives_json_and_counts_runs() -> None:
    schedule = run_lengths([GAUSSIAN, GAUSSIAN, dp.NoOpDpEvent(), GAUSSIAN])
    assert [count for _, count in schedule] == [2, 1, 1]
    assert schedule_from_json(schedule_to_json(schedule)) == schedule


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_one_event_without_privacy_makes_all_of_it_so(accountant: str) -> None:
    nested = dp.ComposedDpEvent([GAUSSIAN, dp.NonPrivateDpEvent()])
    assert epsilon([(nested, 1)], 1e-5, accountant=accountant) == math.inf  # type: ignore[arg-type]


def test_what_has_no_cost_is_refused_in_one_sentence() -> None:
    """A count that is not whole, too: a filter would wait for ever for the end of its row."""
    no_op, small = {"event": {"type": "NoOpDpEvent"}}, Budget(1.0, 1e-5)
    for row in (no_op, no_op | {"count": 0}, no_op | {"count": 10**400}):
        with refused("an event and a count"):
            schedule_from_json([row])
    sample = dp.PoissonSampledDpEvent(0.01, GAUSSIAN)
    for delta in (0.0, 1.0, -0.1, 2.0, 1e-320):
        for accountant, event in product(("pld", "rdp"), (GAUSSIAN, sample)):
            with refused_as("delta_outside", delta=delta):
                epsilon([(event, 1)], delta, accountant=accountant)  # type: ignore[arg-type]
    for count in (0, -1, 2.5):
        with refused("give a whole number from 1"):
            ScheduleFilter([(GAUSSIAN, count)], small)  # type: ignore[list-item]
    with refused("an order above 1"):
        RenyiFilter(1.0, small)
    with refused_as("no_bound_by_pld"):
        epsilon([(dp.dp_event.ZCDpEvent(0.1), 1)], 1e-5)
    with refused_as("no_noise_meets_epsilon", epsilon=0.1):
        calibrate(lambda z: [(dp.GaussianDpEvent(1.0), 1)], Budget(0.1, 1e-5), accountant="rdp")
    with refused_as("order_leaves_nothing", order=1.5):
        RenyiFilter(1.5, small)
    with refused_as("no_bound_by_zcdp"):
        rho_of(dp.PoissonSampledDpEvent(0.1, GAUSSIAN))


@given(z=st.floats(0.5, 20), rate=st.floats(0.001, 1.0), steps=st.integers(1, 200))
@settings(max_examples=15, deadline=None)
def test_the_tight_accountant_is_never_above_the_other(z: float, rate: float, steps: int) -> None:
    schedule = [(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), steps)]
    assert epsilon(schedule, 1e-5) <= epsilon(schedule, 1e-5, accountant="rdp") + 1e-3


def spend_all(privacy_filter: ZCDPFilter | RenyiFilter, event: dp.DpEvent) -> int:
    count = 0
    while privacy_filter.affords(event):
        privacy_filter.charge(event)
        count += 1
    return count


@given(z=st.floats(5, 100), target=st.floats(0.1, 8))
@settings(max_examples=12, deadline=None)
def test_a_zcdp_filter_stops_before_its_budget_is_passed(z: float, target: float) -> None:
    privacy_filter = ZCDPFilter(rho_of_budget(Budget(target, 1e-6)))
    count = spend_all(privacy_filter, dp.GaussianDpEvent(z))
    assert privacy_filter.epsilon_spent(1e-6) <= target
    assert count == 0 or epsilon([(dp.GaussianDpEvent(z), count)], 1e-6) <= target
    with refused_as("filter_exhausted", BudgetRefusedError):
        privacy_filter.charge(dp.GaussianDpEvent(z))


@pytest.mark.parametrize("order", [5.0, 8.0])
def test_a_renyi_filter_stops_before_its_budget_is_passed(order: float) -> None:
    target, event = Budget(4.0, 1e-5), dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(1.5))
    privacy_filter = RenyiFilter(order, target)
    count = spend_all(privacy_filter, event)
    assert count > 5
    assert privacy_filter.epsilon_spent(1e-5) <= 4.0
    one_more = privacy_filter.epsilon_spent(1e-5) + rdp([(event, 1)], orders=(order,))[0]
    assert one_more > 4.0
    assert epsilon([(event, count)], 1e-5) < 4.0


@pytest.mark.parametrize("number", range(3, 60))
def test_a_filter_adds_up_exactly(number: int) -> None:
    privacy_filter = RenyiFilter(8.0, Budget(4.0, 1e-5))
    event = RenyiDpEvent(8.0, privacy_filter.limit / number)
    exact = Fraction(privacy_filter.limit) // Fraction(event.bound)
    assert spend_all(privacy_filter, event) == exact
    gaussian = dp.GaussianDpEvent(math.sqrt(0.5 * number / 0.1))
    assert spend_all(ZCDPFilter(0.1), gaussian) == Fraction(0.1) // Fraction(rho_of(gaussian))


def test_a_renyi_filter_cannot_pay_an_infinite_divergence() -> None:
    assert not RenyiFilter(8.0, Budget(4.0, 1e-5)).affords(RenyiDpEvent(8.0, math.inf))


def test_a_schedule_filter_states_the_part_and_in_the_end_the_whole() -> None:
    total = Budget(epsilon([(GAUSSIAN, 3)], 1e-5), 1e-5)
    privacy_filter = ScheduleFilter([(GAUSSIAN, 3)], total)
    stated = [privacy_filter.epsilon_spent(1e-5)]
    for _ in range(3):
        privacy_filter.charge(GAUSSIAN)
        stated.append(privacy_filter.epsilon_spent(1e-5))
    assert stated == sorted(stated)
    assert stated[0] == 0.0
    assert stated[1] >= epsilon([(GAUSSIAN, 1)], 1e-5)
    assert stated[3] == total.epsilon


def test_what_is_spent_so_far_is_the_accountants_own_curve() -> None:
    """By PLDAccountant() of dp_accounting 0.6; Rényi bounds are at the total of such a schedule long before its end."""
    event = dp.PoissonSampledDpEvent(64 / 1436, dp.GaussianDpEvent(0.849))
    curve = {1: 1.4972686093911594, 8: 2.1912562139420326, 24: 2.824259914494224}
    total = Budget(epsilon([(event, 30)], 1e-5), 1e-5)
    privacy_filter = ScheduleFilter([(event, 30)], total, accountant="pld")
    assert privacy_filter.epsilon_spent(1e-5) == 0.0
    for number in range(1, 31):
        privacy_filter.charge(event)
        if number not in (*curve, 20, 29, 30):
            continue
        stated = privacy_filter.epsilon_spent(1e-5)
        assert stated <= total.epsilon
        if number in curve:
            assert curve[number] <= stated * (1 + 1e-6) and stated == pytest.approx(curve[number], rel=2e-3)
    assert stated == total.epsilon


@pytest.mark.parametrize(
    ("rate", "multiplier", "delta", "curve"),
    [
        (0.01, 1.1, 1e-6, {1: 0.25405, 10: 0.41539, 100: 0.70803, 500: 1.27518}),
        (0.2, 3.0, 1e-5, {1: 0.35172, 5: 0.67223, 20: 1.29267, 64: 2.34583}),
        (1.0, 4.0, 1e-5, {1: 0.92634, 3: 1.69804, 10: 3.34141}),
        (0.001, 0.6, 1e-7, {1: 0.77457, 50: 1.86086, 1000: 2.79966}),
    ],
)
def test_the_curve_is_that_of_another_program(
    rate: float, multiplier: float, delta: float, curve: dict[int, float]
) -> None:
    """By PLDAccountant(value_discretization_interval=2e-4) of dp_accounting 0.6. Long runs state few places."""
    event: Any = dp.GaussianDpEvent(multiplier)
    event = event if rate == 1.0 else dp.PoissonSampledDpEvent(rate, event)
    count = max(curve)
    total = Budget(epsilon([(event, count)], delta), delta)
    privacy_filter = ScheduleFilter([(event, count)], total, accountant="pld")
    for number in range(1, count + 1):
        privacy_filter.charge(event)
        if number in curve:
            above = 0.002 if number <= 20 or number == count else 0.065
            assert (
                curve[number] * (1 - 1e-4)
                <= privacy_filter.epsilon_spent(delta)
                <= curve[number] * (1 + above)
            )


def test_a_pure_epsilon_is_spent_release_by_release() -> None:
    privacy_filter = ScheduleFilter([(dp.LaplaceDpEvent(10.0), 4)], Budget(0.4, 0.0), accountant="pure")
    stated = []
    for _ in range(4):
        privacy_filter.charge(dp.LaplaceDpEvent(10.0))
        stated.append(privacy_filter.epsilon_spent(0.0))
    assert stated == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_long_schedule_is_accounted_at_few_places_and_bounded_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def square_root(schedule: Any, *_: object, **__: object) -> float:
        asked.append(sum(count for _, count in schedule))
        return math.sqrt(asked[-1])

    monkeypatch.setattr(filters, "epsilon", square_root)
    total = math.sqrt(10**6 + 10)
    curve = CostCurve(
        [(GAUSSIAN, 10), (dp.LaplaceDpEvent(9.0), 10**6)], Budget(total, 1e-5), "pld", ADD_OR_REMOVE_ONE
    )
    for number in (*range(1, 70), *range(70, 10**6, 17)):
        assert 0 <= curve.after(number) / math.sqrt(number) - 1 <= 0.061  # the root of 9 / 8
    assert len(asked) == len(set(asked)) <= 300
    assert curve.after(10**6 + 10) == total


@pytest.mark.parametrize("multiplier", [5.0, 500.0])
def test_the_cost_so_far_is_close_for_small_costs_too(multiplier: float) -> None:
    step = dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(multiplier))
    total = Budget(epsilon([(step, 100)], 1e-5), 1e-5)
    curve = CostCurve([(step, 100)], total, "pld", ADD_OR_REMOVE_ONE)
    assert curve.after(10) == pytest.approx(epsilon([(step, 10)], 1e-5), rel=0.005)


@pytest.mark.parametrize(
    ("rate", "multiplier", "count"), [(0.5, 1e-155, 1), (0.01, 1e7, 10**17), (0.3, 1e9, 10**19)]
)
def test_no_event_makes_others_cheaper(rate: float, multiplier: float, count: int) -> None:
    """Neither one whose bound is too large for a number, nor many whose bounds are lost in rounding."""
    more = (dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)), count)
    alone, both = rdp([(GAUSSIAN, 1)]), rdp([(GAUSSIAN, 1), more])
    as_many = rdp([(dp.GaussianDpEvent(multiplier / rate / math.sqrt(count)), 1)])
    few = np.array(ORDERS) < 20  # where a sample costs about what noise of multiplier / rate does
    assert not np.isnan(both).any()
    assert (both >= alone).all()
    assert ((both - alone)[few] >= 0.99 * as_many[few]).all()
    assert epsilon([(GAUSSIAN, 1), more], 1e-5, accountant="rdp") >= epsilon(
        [(GAUSSIAN, 1)], 1e-5, accountant="rdp"
    )


@pytest.mark.parametrize(
    ("event", "rho"),
    [
        (GAUSSIAN, 0.125),
        (dp.LaplaceDpEvent(2.0), 0.125),
        (dp.SelfComposedDpEvent(GAUSSIAN, 4), 0.5),
        (dp.ComposedDpEvent([GAUSSIAN, dp.dp_event.ZCDpEvent(0.25)]), 0.375),
        (dp.NoOpDpEvent(), 0.0),
    ],
)
def test_rho_of_events(event: dp.DpEvent, rho: float) -> None:
    assert rho_of(event) == rho


@pytest.mark.parametrize(("eps", "delta"), [(-1.0, 0.1), (math.nan, 0.1), (1.0, -0.1), (1.0, 1.1)])
def test_an_impossible_budget_is_refused(eps: float, delta: float) -> None:
    with pytest.raises(RefusedError):
        Budget(eps, delta)


@pytest.mark.parametrize("multiplier", [0.3, 0.07, 0.01, 0.002])
def test_hardly_any_noise_costs_what_the_closed_form_says(multiplier: float) -> None:
    """Balle and Wang 2018, Theorem 8; at an epsilon of up to 125,000, whose losses a fine grid could not hold."""
    shift, delta = 1 / multiplier, 1e-5

    def excess(epsilon: float) -> float:
        high, low = shift / 2 - epsilon / shift, -shift / 2 - epsilon / shift
        return float(norm.cdf(high) - np.exp(epsilon + norm.logcdf(low))) - delta

    exact = brentq(excess, 0.0, shift**2 + 20 * shift)
    found = epsilon([(dp.GaussianDpEvent(multiplier), 1)], delta)
    assert exact <= found < 1.001 * exact
    sampled = epsilon([(dp.PoissonSampledDpEvent(0.999999, dp.GaussianDpEvent(multiplier)), 1)], delta)
    assert sampled == pytest.approx(found, rel=1e-3)


def test_what_an_event_costs_that_is_made_of_a_list_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search asks for the price of its winner, whose card is verified, and again when it is reported."""
    computed = list[float]()

    def noting(plds: Any, *given: Any, **named: Any) -> Any:
        computed.append(plds[0][1])
        return epsilon_of(plds, *given, **named)

    monkeypatch.setattr(accounting, "epsilon_of", noting)
    for noise in (7.25, 7.5):
        nested = dp.SelfComposedDpEvent(dp.ComposedDpEvent([dp.LaplaceDpEvent(noise)] * 2), 3)
        made = dp.ComposedDpEvent([dp.LaplaceDpEvent(noise), nested])
        assert epsilon([(made, 2)], 1e-5) == epsilon([(made, 2)], 1e-5)
    assert computed == [14, 14]


@pytest.mark.parametrize(
    ("rate", "multiplier"), [(1e-6, 1.0), (0.01, 0.3), (0.01, 1.0), (0.2, 100.0), (0.5, 20.0), (0.97, 0.01)]
)
def test_its_renyi_bounds_are_those_of_dp_accounting(rate: float, multiplier: float) -> None:
    """Infinite at the same orders, too: at a rate of a half the series of some is slow."""
    event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier))
    expected, found = (
        rdp_by_library(event, ORDERS, ADD_OR_REMOVE_ONE),
        rdp_of_sampled_gaussian(multiplier, rate, ORDERS),
    )
    assert np.isinf(found).any() == (rate == 0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=2e-15)
    few = ORDERS[3:12:2]
    np.testing.assert_array_equal(rdp_of_sampled_gaussian(multiplier, rate, few), found[3:12:2])


@pytest.mark.parametrize(
    ("share", "multiplier"),
    soak_but([(0.01, 0.3), (0.5, 2.0)], [(1e-6, 2.0), (0.01, 0.3), (0.05, 1.0), (0.5, 2.0)]),
)
def test_the_renyi_bounds_of_samples_of_fixed_size_are_those_of_dp_accounting(
    share: float, multiplier: float
) -> None:
    event = dp.SampledWithoutReplacementDpEvent(10**6, int(10**6 * share), dp.GaussianDpEvent(multiplier))
    of_all = np.array(ORDERS) / (2 * multiplier**2)  # which dp_accounting exceeds
    expected = np.minimum(rdp_by_library(event, ORDERS, REPLACE_ONE), of_all)
    found = rdp_of_fixed_size_sample(multiplier, share, ORDERS)
    np.testing.assert_allclose(found, expected, rtol=3e-12)
    np.testing.assert_array_equal(rdp_of_fixed_size_sample(multiplier, share, ORDERS[3:12:2]), found[3:12:2])


def test_samples_of_fixed_size_share_what_does_not_depend_on_their_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search for the noise of two dozen kinds asks for hundreds of them."""
    rdp_of_fixed_size_sample(1.1, 0.01, ORDERS)

    def again(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(renyi, "gammaln", again)
    assert rdp_of_fixed_size_sample(1.2, 0.01, ORDERS).shape == (len(ORDERS),)


@pytest.mark.parametrize(
    ("share", "multiplier", "order", "exact"),
    [
        (0.2, 100.0, 3.5, 2.8855766188727e-5),
        (0.2, 1000.0, 63.0, 5.0748897240734e-6),
        (0.9, 13.0, 63.0, 0.178707597574486),
        (0.3, 40.0, 256.0, 0.0144577214387352),
        (0.02, 5.0, 17.0, 0.000574484186246889),
        (0.05, 0.5, 8.0, 12.6753269988912),
    ],
)
def test_rounding_adds_nothing_to_samples_of_fixed_size_under_much_noise(
    share: float, multiplier: float, order: float, exact: float
) -> None:
    """The theorem's sum by mpmath with 900 digits, of which differences in double precision lose all."""
    event = dp.SampledWithoutReplacementDpEvent(100, int(100 * share), dp.GaussianDpEvent(2 * multiplier))
    found = rdp([(event, 1)], orders=(order,), adjacency=REPLACE_ONE)[0]
    assert exact * (1 - 1e-14) <= found <= exact * (1 + 3e-12)


def test_a_renyi_bound_that_overflows_is_infinite() -> None:
    assert np.isinf(rdp_of_sampled_gaussian(1e-155, 0.5, ORDERS)).all()
    event = dp.SampledWithoutReplacementDpEvent(2, 1, dp.GaussianDpEvent(1e-160))
    assert np.isinf(rdp([(event, 1)], adjacency=REPLACE_ONE)).all()

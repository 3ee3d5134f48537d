"""The search for the least noise: it meets its target from below, closely, and with few evaluations."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import dp_accounting as dp
import pytest

from algorithms.privacy.accounting import Budget, noise_search
from algorithms.privacy.accounting import epsilon as accounting
from algorithms.privacy.accounting.epsilon import REPLACE_ONE, epsilon
from algorithms.privacy.accounting.event_classes import RandomAllocationDpEvent
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.accounting.noise_search import calibrate, find_smallest
from algorithms.privacy.accounting.pld_epsilon import epsilon_of
from tests.support.refusals import refused_as
from tests.support.soak import soak_but


@pytest.mark.parametrize(
    "event_at",
    [dp.GaussianDpEvent, lambda z: RandomAllocationDpEvent(z, 100, 100)],
    ids=["gaussian", "random_allocation"],
)
def test_a_target_below_what_the_orders_state_is_refused_at_once(
    event_at: Callable[[float], dp.DpEvent],
) -> None:
    """At delta 1e-8, order 1024 states log(1 - 1/1024) - log(1024 delta) / 1023 = 0.010254 of what tells nothing."""
    priced = []

    def schedule_at(z: float) -> Schedule:
        priced.append(z)
        return [(event_at(z), 1)]

    with refused_as("epsilon_below_orders", epsilon=0.01, least=pytest.approx(0.010254, rel=1e-4)):
        calibrate(schedule_at, Budget(0.01, 1e-8), accountant="rdp")
    assert len(priced) <= 2
    noise = calibrate(schedule_at, Budget(0.0104, 1e-8), accountant="rdp")
    assert 1 < noise < 1e4
    assert 0 < epsilon([(event_at(noise), 1)], 1e-8, accountant="rdp") <= 0.0104


def test_a_sample_of_hardly_anyone_meets_a_target_below_what_the_orders_state() -> None:
    """Its total variation is at most the rate, so that it is private at any noise."""
    noise = calibrate(
        lambda z: [(dp.PoissonSampledDpEvent(1e-7, dp.GaussianDpEvent(z)), 1)],
        Budget(0.003, 1e-5),
        accountant="rdp",
    )
    assert noise < 10


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("rate", "steps", "target"),
    [
        (0.01, 10_000, 3.0),
        (0.01, 10_000, 0.2),
        (0.2, 100, 8.0),
        (1.0, 40, 1.0),
        (0.001, 2000, 0.5),
        (0.01, 1, 0.01),
    ],
)
def test_calibration_meets_its_target_from_below_and_closely(
    rate: float, steps: int, target: float, accountant: str
) -> None:
    def schedule_at(multiplier: float) -> Schedule:
        return [(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)), steps)]

    found = calibrate(schedule_at, Budget(target, 1e-5), accountant=accountant)  # type: ignore[arg-type]
    spent = epsilon(schedule_at(found), 1e-5, accountant=accountant)  # type: ignore[arg-type]
    assert 0.985 * target < spent <= target


def test_what_calibration_has_verified_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule_at(z: float) -> list[tuple[dp.DpEvent, int]]:
        return [(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(z)), 7)]

    found = calibrate(schedule_at, Budget(1.0, 1e-5))

    def again(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(accounting, "epsilon_of", again)
    assert epsilon(schedule_at(found), 1e-5) <= 1.0


@pytest.mark.parametrize(
    ("size", "epsilon_target", "delta"),
    soak_but([(12, 0.02, 9.7e-6)], [(2, 0.0055, 2.6e-6), (12, 0.02, 9.7e-6)]),
)
def test_noise_of_rare_samples_is_found_with_few_costs_on_fine_grids(
    size: int, epsilon_target: float, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first grids of the search state several times what such releases cost, which must not lead it astray."""
    computed = list[float]()

    def noting(*given: Any, **named: Any) -> Any:
        found = epsilon_of(*given, **named)
        computed.append(found[0])
        return found

    def schedule(noise: float) -> Schedule:
        return [
            (dp.SampledWithoutReplacementDpEvent(10**6, size, dp.GaussianDpEvent(noise * 1.1**kind)), 28)
            for kind in range(8)
        ]

    monkeypatch.setattr(accounting, "epsilon_of", noting)
    calibrate(schedule, Budget(epsilon_target, delta), adjacency=REPLACE_ONE)
    assert len(computed) <= 3


def test_trials_that_release_the_same_are_calibrated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule_at(z: float) -> list[tuple[dp.DpEvent, int]]:
        return [(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(z)), 11)]

    found = calibrate(schedule_at, Budget(1.0, 1e-5))

    def again(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(accounting, "epsilon_of", again)
    for name in ("extrapolated_epsilon", "estimated_epsilon"):
        monkeypatch.setattr(noise_search, name, again)
    assert calibrate(lambda z: schedule_at(z), Budget(1.0, 1e-5)) == found


@pytest.mark.parametrize(("rate", "steps", "target"), [(0.01, 1000, 1.0), (1e-4, 100, 10.0)])
def test_a_search_looks_at_a_multiplier_once_by_each_grid(rate: float, steps: int, target: float) -> None:
    asked = Counter[float]()

    def schedule_at(multiplier: float) -> Schedule:
        asked[multiplier] += 1
        return [(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)), steps)]

    calibrate(schedule_at, Budget(target, 1e-5))
    assert asked.most_common(1)[0][1] <= 2  # a rough estimate, and the search near it


def test_calibration_finds_noise_beside_a_release_that_renyi_bounds_alone_put_above_the_target() -> None:
    beside = [(dp.GaussianDpEvent(20.0), 1)]
    target = 1.05 * epsilon(beside, 1e-5)
    assert target < epsilon(beside, 1e-5, accountant="rdp")

    def schedule_at(z: float) -> Schedule:
        return [*beside, (dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(z)), 4)]

    found = calibrate(schedule_at, Budget(target, 1e-5))
    assert 0.985 * target < epsilon(schedule_at(found), 1e-5) <= target


@pytest.mark.parametrize("times", [1.002, 1.01, 1.3])
def test_a_target_just_above_what_is_released_beside_the_noise_is_reached(times: float) -> None:
    """A bound or an estimate that is a few percent off must not call it unreachable."""
    beside = [(dp.GaussianDpEvent(20.0), 1)]
    target = times * 0.16004203  # the closed form at delta 1e-5

    def schedule_at(z: float) -> Schedule:
        return [*beside, (dp.PoissonSampledDpEvent(0.14, dp.GaussianDpEvent(z)), 4)]

    found = calibrate(schedule_at, Budget(target, 1e-5))
    assert 0.999 * target < epsilon(schedule_at(found), 1e-5) <= target


def test_the_smallest_number_is_found_where_the_cost_jumps_at_the_end_of_the_range() -> None:
    high = next(x for x in (2.0 + i / 7 for i in range(100)) if math.exp(math.log(x)) < x)
    found = find_smallest(lambda z: 0.1 if z >= high else 1.0, 0.5, low=1.0, high=high, tolerance=1e-9)
    assert found == pytest.approx(high, rel=1e-6)

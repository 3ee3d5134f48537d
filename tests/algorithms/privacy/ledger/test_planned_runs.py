"""The composition for a planned number of runs: Rényi at the order where they cost least, or basic sums."""

import math

import dp_accounting as dp
import pytest

from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.events import PureDpEvent, RenyiDpEvent, schedule_to_json
from algorithms.privacy.accounting.noise_search import calibrate
from algorithms.privacy.ledger import ChosenComposition, Composition, choose_composition, explain
from algorithms.privacy.ledger.composition import BASIC
from data.card import data_card
from tasks.config.new_project import Declared
from tasks.config.overrides import recipe

DELTA = 1e-5


def chosen(
    runs: int, event: dp.DpEvent, steps: int = 1, *, epsilon: float, cap: Budget, blocks_per_person: int = 1
) -> ChosenComposition:
    return choose_composition(
        runs,
        cost=Budget(epsilon, DELTA),
        events=schedule_to_json([(event, steps)]),
        adjacency="ADD_OR_REMOVE_ONE",
        cap=cap,
        blocks_per_person=blocks_per_person,
    )


def renyi_epsilon(order: float, rho: float, delta: float = DELTA) -> float:
    """The epsilon of a Gaussian with this rho, from one order: Mironov 2017 and Canonne et al. 2020, by hand."""
    conversion = math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
    return order * rho + conversion


@pytest.mark.parametrize("runs", [2, 5, 10, 50, 400])
def test_no_other_order_makes_the_planned_gaussians_cheaper(runs: int) -> None:
    rho = 0.5 / 12.0**2  # epsilon 0.3 to two digits at delta 1e-5
    choice = chosen(runs, dp.GaussianDpEvent(12.0), epsilon=0.3, cap=Budget(10.0, DELTA))
    order = choice.composition.order
    assert order is not None and choice.reason == "costs-less"
    assert choice.per_run == pytest.approx(renyi_epsilon(order, rho))
    assert choice.all == pytest.approx(renyi_epsilon(order, runs * rho))
    others = [tenths / 10 for tenths in range(15, 640) if renyi_epsilon(tenths / 10, rho) <= 0.45]
    assert choice.all <= 1.0005 * min(renyi_epsilon(other, runs * rho) for other in others)
    assert choice.all < choice.sums == pytest.approx(0.3 * runs)


@pytest.mark.parametrize("cap", [1.0, 3.0, 10.0])
@pytest.mark.parametrize(
    ("sampling_rate", "steps"), [(0.001, 5000), (0.002, 2000), (0.01, 1000), (0.1, 300), (1.0, 80)]
)
def test_one_run_never_takes_more_than_the_limits_and_ten_never_more_than_their_sum(
    sampling_rate: float, steps: int, cap: float
) -> None:
    def event(noise: float) -> dp.DpEvent:
        gaussian = dp.GaussianDpEvent(noise)
        return gaussian if sampling_rate == 1 else dp.PoissonSampledDpEvent(sampling_rate, gaussian)

    noise = calibrate(lambda noise: [(event(noise), steps)], Budget(1.0, DELTA))
    choice = chosen(10, event(noise), steps, epsilon=1.0, cap=Budget(cap, DELTA))
    if choice.composition == BASIC:
        assert (choice.per_run, choice.all) == (1.0, 10.0) and choice.reason != "costs-less"
    else:
        assert choice.per_run <= min(1.5, cap / 2) and choice.all < 10.0
    # as measured by hand: rare sampling costs at least 1.89 times its epsilon at any order, the others 1.5
    expected = (
        "one-run-too-dear" if sampling_rate < 0.01 else "half-of-the-cap" if cap == 1.0 else "costs-less"
    )
    assert choice.reason == expected


@pytest.mark.parametrize(
    ("by_numbers", "at_most"),
    [(False, 32_561), (True, 32_561), (False, 48_842), (False, 1000)],
    ids=["recipe", "by-numbers", "of all", "a thousand"],
)
def test_ten_runs_of_adult_at_epsilon_1_take_at_most_4_of_a_cap(by_numbers: bool, at_most: int) -> None:
    """At the delta of a run and the cap that `init` declares for so many records."""
    adult, declared = data_card("adult"), Declared("adult", {"kind": "csv"}, {}, at_most)
    settings = recipe(adult, "dp_sgd", 1.0, by_numbers=by_numbers).settings
    rate, steps = settings["expected_batch_size"] / adult.records.train, settings["steps"]

    def event(noise: float) -> dp.DpEvent:
        return dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))

    noise = calibrate(lambda noise: [(event(noise), steps)], Budget(1.0, declared.delta))
    choice = choose_composition(
        10,
        cost=Budget(1.0, declared.delta),
        events=schedule_to_json([(event(noise), steps)]),
        adjacency="ADD_OR_REMOVE_ONE",
        cap=Budget(declared.cap, declared.delta_cap),
    )
    assert choice.reason == "costs-less" and choice.per_run <= 1.5 and choice.all <= 4.0


@pytest.mark.parametrize(
    ("event", "cap", "reason"),
    [
        (dp.GaussianDpEvent(4.22), Budget(10.0, 0.0), "no-bound"),
        (dp.GaussianDpEvent(4.22), Budget(10.0, 1.0), "no-bound"),
        (dp.PoissonSampledDpEvent(0.1, dp.ZCDpEvent(0.0281)), Budget(10.0, DELTA), "no-bound"),
        (PureDpEvent(1.0), Budget(10.0, DELTA), "sums-cost-less"),
        (dp.ZCDpEvent(0.0281), Budget(10.0, DELTA), "costs-less"),
        (dp.GaussianDpEvent(0.2), Budget(10.0, DELTA), "one-run-too-dear"),
    ],
)
def test_every_kind_of_event_has_a_composition(event: dp.DpEvent, cap: Budget, reason: str) -> None:
    choice = chosen(10, event, epsilon=1.0, cap=cap)
    assert choice.reason == reason and (choice.composition == BASIC) == (reason != "costs-less")
    assert str(10) in explain(choice, 10) or reason in ("no-bound", "one-run-too-dear")


def test_a_run_held_by_a_renyi_filter_is_priced_at_orders_up_to_its_own() -> None:
    choice = chosen(10, RenyiDpEvent(16.0, 0.45), epsilon=1.0, cap=Budget(10.0, DELTA))
    assert choice.composition.kind == "basic" or (choice.composition.order or 0) <= 16


def test_a_person_in_two_blocks_pays_for_both() -> None:
    single, double = (
        chosen(10, dp.GaussianDpEvent(12.0), epsilon=0.3, cap=Budget(10.0, DELTA), blocks_per_person=count)
        for count in (1, 2)
    )
    assert double.sums == 2 * single.sums
    assert double.composition.order is not None
    assert double.all == pytest.approx(renyi_epsilon(double.composition.order, 2 * 10 * 0.5 / 144))


def test_a_run_without_noise_has_no_price() -> None:
    assert chosen(3, dp.NonPrivateDpEvent(), epsilon=math.inf, cap=Budget(10.0, DELTA)).composition == BASIC


def test_the_reasons_say_their_numbers() -> None:
    costs_less = ChosenComposition(Composition("renyi", 8.0), 1.5, 3.73, 10.0, "costs-less")
    assert explain(costs_less, 10) == (
        "10 such runs take epsilon 3.73, where their epsilons add up to 10; one alone takes 1.5"
    )
    too_dear = ChosenComposition(BASIC, 1.0, 10.0, 10.0, "one-run-too-dear")
    assert "1.5 times its epsilon" in explain(too_dear, 10)
    assert "50% of the cap" in explain(ChosenComposition(BASIC, 1.0, 10.0, 10.0, "half-of-the-cap"), 10)

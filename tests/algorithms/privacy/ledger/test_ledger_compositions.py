"""Populations under zCDP and Rényi: priced by their events, for one record or for all of a person."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import dp_accounting as dp
import numpy as np
import pytest
from scipy.stats import binom, norm

from algorithms.errors import BudgetRefusedError, LedgerBrokenError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting import epsilon as accounting
from algorithms.privacy.accounting.epsilon import REPLACE_ONE, epsilon, group_privacy, rdp
from algorithms.privacy.accounting.event_rules import EventRule, register
from algorithms.privacy.accounting.events import (
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    RenyiDpEvent,
    event_from_json,
    event_to_json,
    schedule_to_json,
)
from algorithms.privacy.accounting.filters import conversion, epsilon_of_zcdp, rho_under
from algorithms.privacy.accounting.pld_epsilon import ComposedPLD
from algorithms.privacy.ledger import Composition, Ledger
from tests.algorithms.privacy.ledger.conftest import declared
from tests.support.refusals import check_refusals, refused_as

CAP, ONE = Budget(8.0, 1e-5), Budget(1.0, 1e-6)
RENYI, ZCDP = Composition("renyi", 8.0), Composition("zcdp")
GAUSSIAN = dp.GaussianDpEvent(4.0)
SGD = dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.0))


def _reserve(ledger: Ledger, run_id: str, event: dp.DpEvent, count: int = 1, **more: Any) -> None:
    notes = {"adjacency": more.pop("adjacency", "ADD_OR_REMOVE_ONE"), "price": "0"}
    events = schedule_to_json([(event, count)])
    ledger.reserve(run_id, "patients", more.pop("cost", ONE), events=events, notes=notes, **more)


def test_the_price_is_that_of_the_events_whatever_the_caller_says_it_costs(tmp_path: Path) -> None:
    ledger = declared(tmp_path, cap=CAP, composition=RENYI)
    _reserve(ledger, "a", SGD, 1000, cost=Budget(1e-9, 0.0))
    price = rdp([(SGD, 1000)], orders=(8.0,))[0]
    assert ledger.history()[-1].to_json()["about"]["price"] == price
    assert ledger.balance("patients").reserved == Budget(price + conversion(8.0, 1e-5), 1e-5)
    assert ledger.blocks("patients")[0].left[0] == pytest.approx(8.0 - conversion(8.0, 1e-5) - price)
    assert ledger.verify(prices=True).priced == 1


def test_under_zcdp_many_small_runs_cost_less_than_their_sum(tmp_path: Path) -> None:
    ledger = declared(tmp_path, cap=CAP, composition=ZCDP)
    events = schedule_to_json([(GAUSSIAN, 1)])
    count = ledger.affordable_runs("patients", ONE, events=events)
    assert count is not None
    for i in range(count):
        _reserve(ledger, f"run-{i}", GAUSSIAN)
    with refused_as("price_above_rest", BudgetRefusedError, population="patients", price="rho=0.03125"):
        _reserve(ledger, "one more", GAUSSIAN)
    assert ledger.balance("patients").reserved == Budget(epsilon_of_zcdp(count / 32, 1e-5), 1e-5)
    exactly = epsilon([(GAUSSIAN, count)], 1e-5)
    assert exactly <= CAP.epsilon < epsilon_of_zcdp((count + 1) / 32, 1e-5)
    assert count > CAP.epsilon / epsilon([(GAUSSIAN, 1)], 1e-5 / count)


def test_a_sample_gains_nothing_under_zcdp_and_replacing_costs_four_times() -> None:
    assert rho_under(REPLACE_ONE, SGD) == 4 * rho_under(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, SGD) == 2.0
    fixed_size = dp.SampledWithoutReplacementDpEvent(1000, 10, dp.GaussianDpEvent(1.0))
    assert rho_under(REPLACE_ONE, fixed_size) == 2.0
    with refused_as("sample_without_bound"):
        rho_under(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, fixed_size)
    orders = (2.0, 8.0, 64.0)
    for relation, event in (
        (REPLACE_ONE, dp.SampledWithoutReplacementDpEvent(4, 2, GAUSSIAN)),
        (dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.PoissonSampledDpEvent(0.5, GAUSSIAN)),
    ):
        bounds, rho = rdp([(event, 1)], orders=orders, adjacency=relation), rho_under(relation, event)
        assert all(bound <= order * rho for bound, order in zip(bounds, orders, strict=True))


def test_a_renyi_bound_holds_up_to_its_order_and_nowhere_else() -> None:
    event = RenyiDpEvent(8.0, 0.5)
    assert event_from_json(event_to_json(event)) == event
    assert list(rdp([(event, 2)], orders=(1.5, 8.0, 9.0))) == [1.0, 1.0, math.inf]
    assert list(rdp([(dp.SelfComposedDpEvent(event, 3), 1)], orders=(4.0,))) == [1.5]
    assert epsilon([(event, 1)], 1e-5, accountant="rdp") <= 0.5 + conversion(8.0, 1e-5)
    refused: list[Callable[[], object]] = [
        lambda: epsilon([(event, 1)], 1e-5, accountant="pld"),
        lambda: epsilon([(event, 1)], 0.0, accountant="pure"),
        lambda: rdp([(event, 1)], adjacency=REPLACE_ONE),
        lambda: rdp([(dp.PoissonSampledDpEvent(0.1, event), 1)]),
        lambda: rdp([(RenyiDpEvent(1.0, 0.5), 1)]),
        lambda: rdp([(RenyiDpEvent(8.0, -0.5), 1)]),
        lambda: rho_under(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, event),
    ]
    for step in refused:
        with pytest.raises(RefusedError):
            step()


def test_a_run_under_a_filter_of_its_own_charges_what_that_filter_lets_through(tmp_path: Path) -> None:
    ledger = declared(tmp_path, cap=CAP, composition=RENYI)
    _reserve(ledger, "a", RenyiDpEvent(12.0, 1.25))
    assert ledger.history()[-1].to_json()["about"]["price"] == 1.25
    ledger.settle("a", ONE, events=schedule_to_json([(SGD, 10)]))
    assert ledger.blocks("patients")[0].left[0] == pytest.approx(8.0 - conversion(8.0, 1e-5) - 1.25)
    with refused_as("price_not_finite", unit="Rényi divergence of order 8"):
        _reserve(ledger, "b", RenyiDpEvent(7.0, 0.1))


def test_a_run_is_settled_at_the_price_of_what_happened_and_never_above_its_reservation(
    tmp_path: Path,
) -> None:
    ledger = declared(tmp_path, "january", "february", cap=CAP, composition=ZCDP)
    _reserve(ledger, "a", GAUSSIAN, 4, blocks=("january", "february"))
    with pytest.raises(
        BudgetRefusedError, match=r"in block 'january' cost 0\.15625, more than the 0\.125 it reserved"
    ):
        ledger.settle("a", ONE, events=schedule_to_json([(GAUSSIAN, 5)]))
    with pytest.raises(RefusedError, match="this one names none"):
        ledger.settle("a", Budget(0.5, 0.0), events=[])
    ledger.settle("a", Budget(0.5, 0.0), events=schedule_to_json([(GAUSSIAN, 2)]))
    for block in ("january", "february"):
        assert ledger.balance("patients", block).spent == Budget(epsilon_of_zcdp(2 / 32, 1e-5), 1e-5)
    assert ledger.verify(prices=True).priced == 4


def test_a_person_in_all_blocks_of_a_run_is_priced_for_each(tmp_path: Path) -> None:
    """Two of three records move a sum by twice the bound: four times the rho, which two blocks share."""
    ledger = declared(tmp_path, *"xyz", blocks_per_person=3, cap=CAP, composition=ZCDP)
    _reserve(ledger, "a", GAUSSIAN, blocks=tuple("xy"))
    _reserve(ledger, "b", GAUSSIAN, blocks=tuple("z"))
    charged = [block.limit[0] - block.left[0] for block in ledger.blocks("patients")]
    assert charged == pytest.approx([3 * 2 / 32, 3 * 2 / 32, 3 / 32])
    assert ledger.verify(prices=True).priced == 3


@pytest.mark.parametrize("event", [SGD, dp.GaussianDpEvent(3.0), PureDpEvent(0.2), dp.LaplaceDpEvent(9.0)])
def test_what_the_blocks_of_a_person_pay_covers_every_number_of_records(event: dp.DpEvent) -> None:
    events = schedule_to_json([(event, 10)])
    price = RENYI.events_price(events, "ADD_OR_REMOVE_ONE", group_size=3)
    for count in (1, 2, 3):
        assert rdp([(group_privacy(event, count), 10)], orders=(8.0,))[0] <= count * price * (1 + 1e-12)


def test_a_sample_of_a_group_bounds_the_exact_mixture_of_its_members() -> None:
    """Three records, each sampled with rate 0.1, move a sum by 0 to 3 bounds: integrated without any accountant."""
    rate, sigma, order, count = 0.1, 2.0, 4.0, 3
    x = np.linspace(-60.0, 60.0, 200_001)
    weights = [math.comb(count, i) * rate**i * (1 - rate) ** (count - i) for i in range(count + 1)]
    with_group = sum(w * norm.pdf(x, i, sigma) for i, w in enumerate(weights))
    without = norm.pdf(x, 0.0, sigma)
    event = group_privacy(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma)), count)
    bound = rdp([(event, 1)], orders=(order,))[0]
    for p, q in ((with_group, without), (without, with_group)):
        log_terms = order * np.log(np.maximum(p, 1e-300)) - (order - 1) * np.log(np.maximum(q, 1e-300))
        exactly = math.log(np.trapezoid(np.exp(log_terms), x)) / (order - 1)
        assert 0.0 < exactly <= bound


def _exact_delta(rate: float, sigma: float, count: int, epsilon: float) -> float:
    """Of `count` records in one step, removed or added, by the trapezoid rule."""
    numbers, x = np.arange(count + 1), np.linspace(-12 * sigma, count + 12 * sigma, 20_001)
    with_group = binom.pmf(numbers, count, rate) @ norm.pdf(x, numbers[:, None], sigma)
    without = norm.pdf(x, 0.0, sigma)
    pairs = ((with_group, without), (without, with_group))
    return max(float(np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0.0), x)) for p, q in pairs)


@pytest.mark.parametrize(
    ("rate", "sigma", "epsilon", "worst"), [(1.0, 2.0, 2.0, 22), (0.001, 0.3, 5.6, 1), (0.1, 2.0, 0.3, 24)]
)
def test_under_basic_sums_a_share_is_the_largest_of_any_number_of_records(
    rate: float, sigma: float, epsilon: float, worst: int
) -> None:
    """Each of up to 24 records pays epsilon in its block, so j of them delta_j(j epsilon) / j in each."""
    shares = [_exact_delta(rate, sigma, count, count * epsilon) / count for count in range(1, 25)]
    assert int(np.argmax(shares)) + 1 == worst
    noise = dp.GaussianDpEvent(sigma)
    events = schedule_to_json([(noise if rate == 1 else dp.PoissonSampledDpEvent(rate, noise), 1)])
    price = Composition().price(Budget(epsilon, shares[0]), events, "ADD_OR_REMOVE_ONE", group_size=24)
    assert price is not None
    assert max(shares) * (1 - 1e-7) <= price <= max(shares) * 1.001


def test_the_worst_number_of_records_is_found_with_few_of_them_computed_closely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All 64 records have a delta near 1, so that fewer have a larger share."""
    closely, compose = [], accounting.compose_loss

    def spy(*of_group: Any, coarser: float = 1.0, **settings: Any) -> ComposedPLD:
        closely.append(coarser == 1.0)
        return compose(*of_group, coarser=coarser, **settings)

    monkeypatch.setattr(accounting, "compose_loss", spy)
    noise = dp.GaussianDpEvent(8.2)
    events = schedule_to_json([(dp.PoissonSampledDpEvent(0.00772, noise), 98_496)])
    Composition().price(Budget(1.68, 1e-9), events, "ADD_OR_REMOVE_ONE", group_size=64)
    assert 0 < sum(closely) <= 6


def test_a_group_of_which_nothing_is_known_may_be_read_in_one_block_only(tmp_path: Path) -> None:
    ledger = declared(tmp_path, *"xy", blocks_per_person=2, cap=CAP, composition=RENYI)
    _reserve(ledger, "a", RenyiDpEvent(8.0, 0.1), blocks=("x",))
    with refused_as("no_bound_of_group", count=2):
        _reserve(ledger, "b", RenyiDpEvent(8.0, 0.1), blocks=("x", "y"))


def test_under_basic_sums_a_groups_delta_grows_faster_than_its_size(tmp_path: Path) -> None:
    ledger = declared(tmp_path, *"xy", cap=Budget(9.0, 1e-4), blocks_per_person=2)
    ledger.reserve("a", "patients", Budget(1.0, 1e-5), events=[], notes={"together": "1"}, blocks=("x", "y"))
    reserved = ledger.balance("patients", "x").reserved
    assert (reserved.epsilon, reserved.delta) == (2.0, pytest.approx((1 + math.e) * 1e-5))
    with pytest.raises(BudgetRefusedError) as refused:
        ledger.reserve("b", "patients", Budget(2.0, 5e-5), events=[], notes={}, blocks=("x", "y"))
    offer = re.search(r"at most epsilon=(\S+), delta=(\S+) would fit", str(refused.value))
    assert offer
    fits = Budget(float(offer[1]), float(offer[2]))
    ledger.reserve("b", "patients", fits, events=[], notes={}, blocks=("x", "y"))


def test_what_has_no_price_is_refused_in_one_sentence(tmp_path: Path) -> None:
    ledger = declared(tmp_path, cap=CAP, composition=ZCDP)
    before = ledger.history()
    check_refusals(
        {
            "this one names none": lambda: ledger.reserve("a", "patients", ONE, events=[], notes={}),
            "no proven zCDP bound": lambda: _reserve(ledger, "a", ObjectivePerturbationDpEvent(1.0, 0.1)),
            "adds no noise": lambda: _reserve(ledger, "a", GAUSSIAN, cost=Budget(math.inf, 1.0)),
            "at a delta above 0": lambda: ledger.set_cap("patients", Budget(1.0, 0.0)),
            "leaves nothing to Rényi at order 2": lambda: ledger.declare(
                "x", ONE, public=True, composition=Composition("renyi", 2)
            ),
        }
    )
    assert ledger.history() == before
    for kind, order in (("renyi", None), ("renyi", 1.0), ("zcdp", 2.0), ("advanced", None)):
        with pytest.raises(RefusedError):
            Composition(kind, order)  # type: ignore[arg-type]


def test_the_composition_of_a_population_never_changes(tmp_path: Path) -> None:
    ledger = declared(tmp_path, blocks_per_person=2, cap=CAP, composition=RENYI)
    ledger.declare("patients", CAP, public=False, composition=ZCDP)
    balance = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite").balance("patients")
    assert (balance.composition, balance.blocks_per_person) == (RENYI, 2)


def test_a_price_below_that_of_its_events_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = declared(tmp_path, cap=CAP, composition=ZCDP)
    with monkeypatch.context() as patched:
        patched.setattr(Composition, "events_price", lambda *_: 0.001)
        _reserve(ledger, "a", GAUSSIAN)
    with pytest.raises(LedgerBrokenError, match=r"row 2 charges run 'a' 0\.001, its events cost 0\.03125"):
        ledger.verify(prices=True)


@pytest.mark.parametrize("kind", ["reserve", "settle"])
def test_a_run_that_is_charged_less_than_its_events_cost_is_found_under_basic_sums(
    kind: str, tmp_path: Path
) -> None:
    """One Gaussian release with multiplier 4 costs epsilon 0.926 at delta 1e-5, two cost 1.356, by mpmath."""
    ledger = declared(tmp_path, cap=CAP)
    one, two = (schedule_to_json([(GAUSSIAN, count)]) for count in (1, 2))
    cost = Budget(1.0, 1e-5)
    ledger.reserve("a", "patients", cost, events=two if kind == "reserve" else one, notes={})
    if kind == "settle":
        assert ledger.verify(prices=True).priced == 1
        ledger.settle("a", cost, events=two)
    with pytest.raises(
        LedgerBrokenError, match=r"charges run 'a' epsilon=1, delta=1e-05, its events cost more"
    ):
        ledger.verify(prices=True)


@pytest.mark.parametrize("others", [[], [(dp.LaplaceDpEvent(10.0), 1)]])
def test_a_delta_of_0_covers_no_gaussian_noise(others: list[tuple[dp.DpEvent, int]], tmp_path: Path) -> None:
    """Which no epsilon bounds at that delta."""
    ledger = declared(tmp_path, cap=CAP)
    events = schedule_to_json([(GAUSSIAN, 1), *others])
    ledger.reserve("a", "patients", Budget(1.0, 0.0), events=events, notes={})
    with pytest.raises(LedgerBrokenError, match="charges run 'a' epsilon=1, delta=0, its events cost more"):
        ledger.verify(prices=True)


def test_budget_of_a_filter_covers_its_reservation_and_what_it_let_through(
    tmp_path: Path,
) -> None:
    """At orders and rhos between those of the accountants, whose conversion states more."""
    ledger = declared(tmp_path, cap=Budget(100.0, 1e-3))
    reserved = {
        "renyi": (Budget(1.25 + conversion(11.37, 1e-5), 1e-5), RenyiDpEvent(11.37, 1.25)),
        "zcdp": (Budget(epsilon_of_zcdp(0.313, 1e-5), 1e-5), dp.dp_event.ZCDpEvent(0.313)),
    }
    for name, (cost, event) in reserved.items():
        ledger.reserve(name, "patients", cost, events=schedule_to_json([(event, 1)]), notes={})
        ledger.settle(name, cost, events=schedule_to_json([(dp.GaussianDpEvent(2.2), 1)]))
    assert ledger.verify(prices=True).priced == 4


def test_events_without_a_bound_are_not_counted_among_the_prices(tmp_path: Path) -> None:
    ledger = declared(tmp_path, cap=CAP)
    fixed_size = dp.SampledWithoutReplacementDpEvent(1000, 10, dp.GaussianDpEvent(1.0))
    ledger.reserve("a", "patients", ONE, events=schedule_to_json([(fixed_size, 1)]), notes={})
    assert ledger.verify(prices=True).priced == 0


@attrs.frozen
class PairedDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A mechanism that costs a pair of records less than twice what it costs one of them."""

    count: int = 1


class PairedRule(EventRule):
    def rdp(self, event: Any, orders: tuple[float, ...], adjacency: dp.NeighboringRelation) -> np.ndarray:
        return np.full(len(orders), {1: 5.653792536, 2: 7.291673673}[event.count])

    def group_privacy(self, event: Any, count: int) -> dp.DpEvent:
        return PairedDpEvent(count)


register(PairedDpEvent, PairedRule())


def test_a_block_pays_for_runs_that_each_meet_one_of_a_person_s_records() -> None:
    """Where a record costs 5.65 and a pair 7.29, two runs that meet one record each cost 11.3: half of 7.29 is too
    little."""
    events = schedule_to_json([(PairedDpEvent(), 1)])
    assert RENYI.events_price(events, "ADD_OR_REMOVE_ONE", group_size=2) == 5.653792536

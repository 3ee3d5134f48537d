"""Populations under zCDP and Rényi: priced by events, never above the cap, whatever is done in between."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dp_accounting as dp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.privacy.accounting import epsilon, rdp
from algorithms.privacy.adjacency import REPLACE_ONE
from algorithms.privacy.budget import Budget
from algorithms.privacy.errors import BudgetRefused, LedgerBroken, Refused
from algorithms.privacy.events import (
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    RenyiDpEvent,
    event_from_json,
    event_to_json,
    schedule_from_json,
    schedule_to_json,
)
from algorithms.privacy.filters import conversion, epsilon_of_zcdp, rho_under
from algorithms.privacy.ledger import Composition, Ledger
from algorithms.privacy.ledger_copy import check_prices

CAP, ONE = Budget(8.0, 1e-5), Budget(1.0, 1e-6)
RENYI, ZCDP = Composition("renyi", 8.0), Composition("zcdp")
GAUSSIAN = dp.GaussianDpEvent(4.0)
SGD = dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.0))


def _ledger(folder: Path | str, composition: Composition, *blocks: str, **terms: Any) -> Ledger:
    ledger = Ledger.open(f"sqlite:///{folder}/ledger.sqlite")
    ledger.declare("patients", CAP, public=False, composition=composition, **terms)
    for block in blocks:
        ledger.declare_block("patients", block)
    return ledger


def _reserve(ledger: Ledger, run_id: str, event: dp.DpEvent, count: int = 1, **more: Any) -> None:
    about = {"adjacency": more.pop("adjacency", "ADD_OR_REMOVE_ONE"), "price": "0"}
    events = schedule_to_json([(event, count)])
    ledger.reserve(run_id, "patients", more.pop("cost", ONE), events=events, about=about, **more)


def test_the_price_is_that_of_the_events_whatever_the_caller_says_it_costs(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path, RENYI)
    _reserve(ledger, "a", SGD, 1000, cost=Budget(1e-9, 0.0))
    price = rdp([(SGD, 1000)], orders=(8.0,))[0]
    assert ledger.history()[-1].to_json()["about"]["price"] == price
    assert ledger.balance("patients").reserved == Budget(price + conversion(8.0, 1e-5), 1e-5)
    assert ledger.blocks("patients")[0].left[0] == pytest.approx(8.0 - conversion(8.0, 1e-5) - price)
    assert check_prices(ledger) == 1


def test_under_zcdp_many_small_runs_cost_less_than_their_sum(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path, ZCDP)
    events = schedule_to_json([(GAUSSIAN, 1)])
    count = ledger.affordable("patients", ONE, events=events)
    assert count is not None
    for i in range(count):
        _reserve(ledger, f"run-{i}", GAUSSIAN)
    with pytest.raises(
        BudgetRefused, match=r"asks for rho=0\.03125, but population 'patients' has rho=\S+ left of the"
    ):
        _reserve(ledger, "one more", GAUSSIAN)
    assert ledger.balance("patients").reserved == Budget(epsilon_of_zcdp(count / 32, 1e-5), 1e-5)
    exactly = epsilon([(GAUSSIAN, count)], 1e-5)
    assert exactly <= CAP.epsilon < epsilon_of_zcdp((count + 1) / 32, 1e-5)
    assert count > CAP.epsilon / epsilon([(GAUSSIAN, 1)], 1e-5 / count)


def test_a_sample_gains_nothing_under_zcdp_and_replacing_costs_four_times() -> None:
    assert rho_under(REPLACE_ONE, SGD) == 4 * rho_under(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, SGD) == 2.0
    fixed_size = dp.SampledWithoutReplacementDpEvent(1000, 10, dp.GaussianDpEvent(1.0))
    assert rho_under(REPLACE_ONE, fixed_size) == 2.0
    with pytest.raises(Refused, match="without replacement"):
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
        with pytest.raises(Refused):
            step()


def test_a_run_under_a_filter_of_its_own_charges_what_that_filter_lets_through(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path, RENYI)
    _reserve(ledger, "a", RenyiDpEvent(12.0, 1.25))
    assert ledger.history()[-1].to_json()["about"]["price"] == 1.25
    ledger.settle("a", ONE, events=schedule_to_json([(SGD, 10)]))
    assert ledger.blocks("patients")[0].left[0] == pytest.approx(8.0 - conversion(8.0, 1e-5) - 1.25)
    with pytest.raises(Refused, match="no finite Rényi divergence of order 8; take a method"):
        _reserve(ledger, "b", RenyiDpEvent(7.0, 0.1))


def test_a_run_is_settled_at_the_price_of_what_happened_and_never_above_its_reservation(
    tmp_path: Path,
) -> None:
    ledger = _ledger(tmp_path, ZCDP, "january", "february")
    _reserve(ledger, "a", GAUSSIAN, 4, blocks=("january", "february"))
    with pytest.raises(
        BudgetRefused, match=r"in block 'january' cost 0\.15625, more than the 0\.125 it reserved"
    ):
        ledger.settle("a", ONE, events=schedule_to_json([(GAUSSIAN, 5)]))
    with pytest.raises(Refused, match="this one names none"):
        ledger.settle("a", Budget(0.5, 0.0), events=[])
    ledger.settle("a", Budget(0.5, 0.0), events=schedule_to_json([(GAUSSIAN, 2)]))
    for block in ("january", "february"):
        assert ledger.balance("patients", block).spent == Budget(epsilon_of_zcdp(2 / 32, 1e-5), 1e-5)
    assert check_prices(ledger) == 4


def test_what_has_no_price_is_refused_in_one_sentence(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path, ZCDP)
    before = ledger.history()
    refusals: dict[str, Callable[[], None]] = {
        "this one names none": lambda: ledger.reserve("a", "patients", ONE, events=[], about={}),
        "no proven zCDP bound": lambda: _reserve(ledger, "a", ObjectivePerturbationDpEvent(1.0, 0.1)),
        "adds no noise": lambda: _reserve(ledger, "a", GAUSSIAN, cost=Budget(math.inf, 1.0)),
        "at a delta above 0": lambda: ledger.set_cap("patients", Budget(1.0, 0.0)),
        "leaves nothing to Rényi at order 2": lambda: ledger.declare(
            "x", ONE, public=True, composition=Composition("renyi", 2)
        ),
    }
    for words, step in refusals.items():
        with pytest.raises(Refused, match=re.escape(words)) as refused:
            step()
        assert re.fullmatch(r"[^\n]+\.", str(refused.value))
    assert ledger.history() == before
    for kind, order in (("renyi", None), ("renyi", 1.0), ("zcdp", 2.0), ("advanced", None)):
        with pytest.raises(Refused):
            Composition(kind, order)  # type: ignore[arg-type]


def test_the_composition_of_a_population_never_changes(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path, RENYI, blocks_per_person=2)
    ledger.declare("patients", CAP, public=False, composition=ZCDP)
    balance = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite").balance("patients")
    assert (balance.composition, balance.blocks_per_person) == (RENYI, 2)


def test_a_price_below_that_of_its_events_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = _ledger(tmp_path, ZCDP)
    with monkeypatch.context() as patched:
        patched.setattr("algorithms.privacy.ledger_price.price_of", lambda *_: 0.001)
        _reserve(ledger, "a", GAUSSIAN)
    with pytest.raises(LedgerBroken, match=r"row 2 charges run 'a' 0\.001, its events cost 0\.03125"):
        check_prices(ledger)


_KINDS = st.sampled_from(["reserve", "settle", "settle less", "forfeit", "cap", "retire"])
_STEPS = st.lists(
    st.tuples(_KINDS, st.integers(0, 3), st.sets(st.sampled_from("xyz"), min_size=1), st.integers(1, 12)),
    max_size=14,
)
_EVENTS = [dp.GaussianDpEvent(1.5), SGD, PureDpEvent(0.5), dp.LaplaceDpEvent(2.0)]


def _recomputed(ledger: Ledger, composition: Composition, block: str, count: int) -> float:
    """The epsilon of a block's whole history from the event lists in its rows alone, with nothing of the ledger's."""
    last: dict[str, tuple[bool, Mapping[str, Any]]] = {}
    for row in (row.to_json() for row in ledger.history()):
        if row["run_id"] and row["block"] == block and row["kind"] != "forfeit":
            last[row["run_id"]] = (row["kind"] == "settle", row)
    total = 0.0
    for _, row in last.values():
        schedule = schedule_from_json(row["events"])
        if composition.order is not None:
            total += count * float(rdp(schedule, orders=(composition.order,))[0])
        else:
            total += count * sum(
                times * rho_under(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, event)
                for event, times in schedule
            )
    if total == 0 or composition.order is None:
        return epsilon_of_zcdp(total, CAP.delta)
    return total + conversion(composition.order, CAP.delta)


def _do(ledger: Ledger, step: tuple[str, int, set[str], int], number: int) -> None:
    kind, run, blocks, size = step
    event, run_id = _EVENTS[run % len(_EVENTS)], f"run-{run}-{number // 5}"
    match kind:
        case "reserve":
            _reserve(ledger, run_id, event, size, blocks=tuple(sorted(blocks)))
        case "settle":
            ledger.settle(run_id, ONE, events=schedule_to_json([(event, 1)]))
        case "settle less":
            ledger.settle(run_id, Budget(0.5, 0.0), events=schedule_to_json([(event, size)]))
        case "forfeit":
            ledger.forfeit(run_id)
        case "retire":
            ledger.retire_block("patients", min(blocks))
        case "cap":
            ledger.set_cap("patients", Budget(CAP.epsilon * size / 12, CAP.delta), block=min(blocks))


@settings(max_examples=25, deadline=None)
@given(_STEPS, st.sampled_from([RENYI, ZCDP]), st.sampled_from([1, 2]))
def test_no_history_takes_a_block_above_its_cap(
    steps: list[tuple[str, int, set[str], int]], composition: Composition, count: int
) -> None:
    with TemporaryDirectory() as folder:
        ledger = _ledger(folder, composition, *"xyz", blocks_per_person=count)
        for number, step in enumerate(steps):
            before = {block: ledger.balance("patients", block) for block in "xyz"}
            rows = len(ledger.history())
            try:
                _do(ledger, step, number)
            except Refused:
                assert len(ledger.history()) == rows
            touched = {row.block for row in ledger.history()[rows:]}
            for block in "xyz":
                assert _recomputed(ledger, composition, block, count) <= CAP.epsilon * (1 + 1e-9)
                assert block in touched or ledger.balance("patients", block) == before[block]

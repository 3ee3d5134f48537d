"""Blocks of a population: what each is charged, in any history, and what of them is refused."""

import math
import re
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dp_accounting as dp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import Connection

from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE, group_privacy, rdp
from algorithms.privacy.accounting.events import PureDpEvent, schedule_from_json, schedule_to_json
from algorithms.privacy.accounting.filters import conversion, epsilon_of_zcdp, rho_under
from algorithms.privacy.ledger import Composition, Ledger
from algorithms.privacy.ledger.state import LedgerState
from algorithms.privacy.ledger.state_tables import StatePart
from tests.algorithms.privacy.ledger import conftest
from tests.algorithms.privacy.ledger.conftest import CAP, ONE, declared
from tests.support.refusals import check_refusals, refused_as

EVENTS = [{"event": {"type": "GaussianDpEvent", "noise_multiplier": 1.1}, "count": 3}]
PURE = [{"event": {"type": "LaplaceDpEvent", "noise_multiplier": 10.0}, "count": 1}]
"""Of epsilon 0.1 at a delta of 0."""
reserve = partial(conftest.reserve, events=EVENTS)


def test_disjoint_blocks_compose_in_parallel_and_a_blocks_runs_in_sequence(tmp_path: Path) -> None:
    ledger = declared(tmp_path, "january", "february")
    for run_id in ("a", "b", "c"):
        reserve(ledger, run_id, "january")
    assert ledger.balance("patients", "january").remaining == Budget(0.0, 7e-5)
    assert ledger.balance("patients", "february").remaining == CAP
    left = Budget(0.0, 7e-5)
    with refused_as("budget_exceeded", BudgetRefusedError, block="january", population="patients", left=left):
        reserve(ledger, "d", "january")
    reserve(ledger, "d", "february")


def test_a_run_charges_all_of_its_blocks_or_none(tmp_path: Path) -> None:
    ledger = declared(tmp_path, "january", "february")
    reserve(ledger, "a", "january", cost=Budget(2.5, 0.0))
    rows = ledger.history()
    with refused_as("budget_exceeded", BudgetRefusedError, block="january"):
        reserve(ledger, "b", "february", "january")
    assert ledger.history() == rows
    ledger.set_cap("patients", Budget(4.0, 1e-4), block="january")
    reserve(ledger, "b", "february", "january")
    ledger.settle("b", Budget(0.5, 1e-6), events=EVENTS)
    assert [(row.kind, row.block, row.run_id) for row in ledger.history()[-4:]] == [
        ("reserve", "february", "b"),
        ("reserve", "january", "b"),
        ("settle", "february", "b"),
        ("settle", "january", "b"),
    ]
    assert ledger.balance("patients", "january").spent == Budget(0.5, 1e-6)
    assert ledger.balance("patients", "january").reserved == Budget(2.5, 0.0)
    assert ledger.balance("patients", "february").remaining == Budget(2.5, 9.9e-5)
    assert ledger.balance("patients") == ledger.balance("patients", "january")  # the one that is charged most
    ledger.forfeit("a")
    assert ledger.balance("patients", "january").spent == Budget(3.0, 1e-6)


def test_the_same_run_twice_is_one_reservation_and_other_blocks_are_refused(tmp_path: Path) -> None:
    ledger = declared(tmp_path, "january", "february")
    for _ in range(2):
        reserve(ledger, "a", "january", "february")
        ledger.declare_block("patients", "january", Budget(99.0, 1.0))
    assert len(ledger.history()) == 5
    with pytest.raises(
        RefusedError, match="has reserved the blocks 'january', 'february', not 'january'; resume it so"
    ):
        reserve(ledger, "a", "january")
    for _ in range(2):
        ledger.settle("a", ONE, events=EVENTS)
    assert len(ledger.history()) == 7


def test_a_block_that_is_named_twice_is_charged_once(tmp_path: Path) -> None:
    ledger = declared(tmp_path, "january", "february")
    reserve(ledger, "a", "january", "january")
    assert [(row.kind, row.block) for row in ledger.history()][-1] == ("reserve", "january")
    assert ledger.balance("patients", "january").reserved == ONE


def test_a_retired_block_is_used_by_no_run_again_and_its_open_run_ends(tmp_path: Path) -> None:
    ledger = declared(tmp_path, "january", "february")
    reserve(ledger, "a", "january")
    for _ in range(2):
        ledger.retire_block("patients", "january")
    with refused_as("block_retired", BudgetRefusedError, population="patients", block="january"):
        reserve(ledger, "b", "january", "february")
    assert ledger.affordable_runs("patients", ONE) == 3  # of the blocks that live
    assert ledger.affordable_runs("patients", ONE, blocks=["january"]) == 0
    ledger.settle("a", ONE, events=[])
    assert ledger.balance("patients", "january").retired
    ledger.declare_block("patients", "january")
    assert [block.retired for block in ledger.blocks("patients")] == [True, False]


def test_a_person_in_three_blocks_is_charged_three_times(tmp_path: Path) -> None:
    ledger = declared(tmp_path, "january", "february", blocks_per_person=3)
    reserve(ledger, "a", "january", cost=Budget(0.9, 1e-5))
    balance = ledger.balance("patients", "january")
    assert (balance.blocks_per_person, balance.reserved) == (3, Budget(2.7, 3e-5))
    with pytest.raises(BudgetRefusedError) as refused:
        reserve(ledger, "b", "january")
    assert "delta=1e-05, counted 3 times since a person may be in 3 blocks, but block 'january'" in str(
        refused.value
    )
    offer = re.search(r"at most epsilon=(\S+), delta=(\S+) would fit", str(refused.value))
    assert offer
    reserve(ledger, "b", "january", cost=Budget(float(offer[1]), float(offer[2])))


def test_what_was_charged_before_there_were_blocks_counts_in_each(tmp_path: Path) -> None:
    ledger = declared(tmp_path)
    reserve(ledger, "a")
    for block in ("january", "february"):
        ledger.declare_block("patients", block)
        assert ledger.balance("patients", block).reserved == ONE
    with pytest.raises(
        RefusedError, match=r"charged by blocks \('january', 'february'\); name those that the run reads"
    ):
        reserve(ledger, "b")
    ledger.settle("a", Budget(0.5, 0.0), events=[])
    assert ledger.balance("patients", "february").spent == Budget(0.5, 0.0)


def test_what_blocks_cannot_be_is_refused_in_one_sentence(tmp_path: Path) -> None:
    ledger = declared(tmp_path, "january")
    before = ledger.history()
    check_refusals(
        {
            "has no block 'june' (it has 'january')": lambda: reserve(ledger, "a", "january", "june"),
            "no block 'may'": lambda: ledger.retire_block("patients", "may"),
            "no block 'july'": lambda: ledger.set_cap("patients", ONE, block="july"),
            "no block 'april'": lambda: ledger.balance("patients", "april"),
            "'all' stands for a whole population": lambda: ledger.declare_block("patients", "all"),
            "a block must be printable": lambda: ledger.declare_block("patients", "\n"),
            "no population 'nobody'": lambda: ledger.declare_block("nobody", "june"),
            "cap of a population must be finite": lambda: ledger.declare_block(
                "patients", "x", Budget(math.inf, 0.1)
            ),
            "in at least 1 block, not in 0": lambda: ledger.declare(
                "x", CAP, public=True, blocks_per_person=0
            ),
            "name those that the run": lambda: ledger.reserve(
                "a", "patients", ONE, events=[], notes={}, blocks=()
            ),
        }
    )
    assert ledger.history() == before


@pytest.mark.parametrize("name", ["January", "JANUARY", "\uff4aanuary"])
def test_the_name_of_a_block_in_another_case_is_no_new_block(tmp_path: Path, name: str) -> None:
    ledger = declared(tmp_path, "january", "february")
    with pytest.raises(RefusedError, match="has a block 'january'"):
        ledger.declare_block("patients", name)
    ledger.declare_block("patients", "january")
    assert [block.name for block in ledger.blocks("patients")] == ["january", "february"]


def _hold(ledger: Ledger, run_id: str, **held: str) -> None:
    """Reserves a run on blocks that hold what these digests are of."""
    _hold_all(ledger, run_id, {block: [digest] for block, digest in held.items()})


def _hold_all(ledger: Ledger, run_id: str, held: dict[str, list[str]]) -> None:
    """Reserves a run on blocks with these digests."""
    ledger.reserve(
        run_id, "patients", Budget(0.1, 0.0), events=PURE, notes={}, blocks=[*held], content_digests=held
    )


@pytest.mark.parametrize(
    ("held", "newer"),
    [
        ({"february": "A"}, "february"),
        ({"february": "B", "march": "A"}, "february"),
        ({"march": "C", "june": "C"}, "june"),
    ],
)
def test_a_block_that_holds_exactly_what_another_holds_or_held_is_refused(
    tmp_path: Path, held: dict[str, str], newer: str
) -> None:
    """The newer one is to be left out. Under its own name a block may hold again what it ever held."""
    ledger = declared(tmp_path, "january", "february", "march", "june")
    _hold(ledger, "a", january="A")
    _hold(ledger, "b", january="B")
    rows = ledger.history()
    with refused_as("block_repeated", BudgetRefusedError, block=newer, allowed="one block alone"):
        _hold(ledger, "c", **held)
    assert ledger.history() == rows
    for number, digest in enumerate("AB"):
        _hold(ledger, f"again-{number}", january=digest)
    assert ledger.reserved_digests("patients") == {"january": {"A", "B"}}
    with refused_as("block_repeated", BudgetRefusedError, other="january", block="february"):
        Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite").check_contents("patients", {"february": ["A"]})
    with refused_as(
        "block_repeated", BudgetRefusedError, other="new-1", block="new-2"
    ):  # neither is declared yet
        ledger.check_contents("patients", {"new-1": ["D"], "new-2": ["D"]})


def test_the_owner_lets_two_blocks_and_no_third_hold_the_same(tmp_path: Path) -> None:
    ledger = declared(tmp_path, "january", "february", "march")
    _hold(ledger, "a", january="A")
    for _ in range(2):
        ledger.overrule("patients", "february", "january", by="the owner")
    said = [row.to_json() for row in ledger.history() if row.kind == "cap"][3:]
    assert [row["about"] for row in said] == [{"overruled": ["february", "january"], "by": "the owner"}]
    assert ledger.balance("patients", "all").cap == CAP
    _hold(ledger, "b", february="A", january="A")
    with refused_as("block_repeated", BudgetRefusedError, block="march", population="patients"):
        _hold(ledger, "c", march="A")
    check_refusals(
        {
            "no population 'nobody'": lambda: ledger.overrule("nobody", "x", "y", by="me"),
            "name another block": lambda: ledger.overrule("patients", "x", "x", by="me"),
            "a name of who overrules must": lambda: ledger.overrule("patients", "x", "y", by=" "),
        }
    )


def test_records_that_recur_are_in_as_many_blocks_as_a_person_may_be(tmp_path: Path) -> None:
    ledger = declared(tmp_path, "january", "february", "march", blocks_per_person=2)
    _hold(ledger, "a", january="A")
    _hold(ledger, "b", february="A", january="A")
    with refused_as("block_repeated", BudgetRefusedError, allowed="2 blocks at most"):
        _hold(ledger, "c", march="A")


def test_a_write_reads_the_accounts_of_its_blocks_alone(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a refusal says all that it would say if it had read the others."""
    ledger = Ledger.open(ledger_url)
    ledger.declare("patients", CAP, public=False)
    for number in range(20):
        ledger.declare_block("patients", f"block {number}")
    reserve(ledger, "open", "block 3")
    read, state = set[int](), StatePart.state

    def spy(part: StatePart, connection: Connection, answers: Sequence[Sequence[Any]]) -> LedgerState:
        read.add(len(answers[0]))
        return state(part, connection, answers)

    monkeypatch.setattr(StatePart, "state", spy)
    _hold(ledger, "a", **{"block 3": "A"})
    ledger.settle("a", Budget(0.1, 0.0), events=PURE)
    ledger.forfeit("open")
    assert read == {1, 2}  # the whole population's, and the block's
    reserve(ledger, "still open", "block 3")
    check_refusals(
        {
            "('block 0', 'block 1', 'block 2' and 17 more)": lambda: reserve(ledger, "b"),
            ", 'block 18', 'block 19');": lambda: reserve(ledger, "b", "block 20"),
            "reserved by open runs ('still open')": lambda: reserve(ledger, "b", "block 3"),
            "hold exactly the same records": lambda: _hold(ledger, "b", **{"block 4": "A"}),
        }
    )


LARGE, SMALL = Budget(8.0, 1e-5), Budget(1.0, 1e-6)
BLOCKS = "xyz"
PRICED = [
    dp.GaussianDpEvent(3.0),
    dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.0)),
    PureDpEvent(0.25),
    dp.LaplaceDpEvent(4.0),
]
_KINDS = st.sampled_from(["reserve", "reserve", "settle", "settle less", "forfeit", "cap", "retire"])
_STEPS = st.lists(
    st.tuples(_KINDS, st.integers(0, 3), st.sets(st.sampled_from(BLOCKS), min_size=1), st.integers(1, 12)),
    max_size=14,
)


def _lost(ledger: Ledger, composition: Composition, person: tuple[str, ...]) -> float:
    """The epsilon of a person with a record in each of some blocks, from the rows' event lists alone."""
    runs: dict[str, tuple[Any, set[str]]] = {}
    for row in (row.to_json() for row in ledger.history()):
        if row["kind"] in ("reserve", "settle") and row["block"] in person:
            _, blocks = runs.get(row["run_id"], ((), set()))
            runs[row["run_id"]] = (row["events"], blocks | {row["block"]})
    total = 0.0
    for events, blocks in runs.values():
        schedule = [(group_privacy(event, len(blocks)), times) for event, times in schedule_from_json(events)]
        if composition.order is None:
            total += sum(times * rho_under(ADD_OR_REMOVE_ONE, event) for event, times in schedule)
        else:
            total += float(rdp(schedule, orders=(composition.order,))[0])
    if total == 0 or composition.order is None:
        return epsilon_of_zcdp(total, LARGE.delta)
    return total + conversion(composition.order, LARGE.delta)


def _do(ledger: Ledger, step: tuple[str, int, set[str], int], number: int) -> None:
    kind, run, blocks, size = step
    event, run_id = PRICED[run], f"run-{run}-{number // 5}"
    many, one = (schedule_to_json([(event, count)]) for count in (size, 1))
    match kind:
        case "reserve":
            ledger.reserve(run_id, "patients", SMALL, events=many, notes={}, blocks=sorted(blocks))
        case "settle":
            ledger.settle(run_id, SMALL, events=one)
        case "settle less":
            ledger.settle(run_id, Budget(0.5, 0.0), events=many)
        case "forfeit":
            ledger.forfeit(run_id)
        case "retire":
            ledger.retire_block("patients", min(blocks))
        case "cap":
            ledger.set_cap("patients", Budget(LARGE.epsilon * size / 12, LARGE.delta), block=min(blocks))


@settings(max_examples=15, deadline=None)
@given(_STEPS, st.sampled_from([Composition("renyi", 8.0), Composition("zcdp")]), st.sampled_from([1, 2]))
def test_no_history_takes_a_person_above_the_cap_and_no_block_pays_for_another(
    steps: list[tuple[str, int, set[str], int]], composition: Composition, count: int
) -> None:
    with TemporaryDirectory() as folder:
        ledger = declared(folder, *BLOCKS, cap=LARGE, composition=composition, blocks_per_person=count)
        for number, step in enumerate(steps):
            before = {block: ledger.balance("patients", block) for block in BLOCKS}
            rows = len(ledger.history())
            try:
                _do(ledger, step, number)
            except RefusedError:
                assert len(ledger.history()) == rows
            touched = {row.block for row in ledger.history()[rows:]}
            assert all(ledger.balance("patients", block) == before[block] for block in set(BLOCKS) - touched)
            for person in combinations(BLOCKS, count):
                assert _lost(ledger, composition, person) <= LARGE.epsilon * (1 + 1e-9)


def test_a_charged_block_keeps_its_content_unless_the_owner_lets_it_change(tmp_path: Path) -> None:
    """Contents are compared where they were digested alike, which "way:" tells: by the same key and columns."""
    ledger = declared(tmp_path, "january", "february")
    _hold_all(ledger, "a", {"january": ["A", "way:1"]})
    _hold_all(ledger, "b", {"january": ["B"]})  # by a version that noted no way
    for known in "AB":
        ledger.check_contents("patients", {"january": [known, "other", "way:1"], "february": ["C", "way:2"]})
    ledger.check_contents("patients", {"january": ["D", "way:3"]})
    with refused_as("block_changed", BudgetRefusedError, population="patients", block="january"):
        ledger.check_contents("patients", {"january": ["D", "way:1"]})
    for _ in range(2):
        ledger.overrule("patients", "january", by="the owner")
    assert [row.about for row in ledger.history()].count('{"by":"the owner","overruled":["january"]}') == 1
    again = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    again.check_contents("patients", {"january": ["D", "way:1"]})
    assert again.verify(prices=True).read == len(again.history())
    _hold_all(again, "c", {"february": ["C", "way:2"]})
    with refused_as("block_changed", BudgetRefusedError, block="february"):
        again.check_contents("patients", {"february": ["D", "way:2"]})


def test_contents_are_compared_again_when_a_run_is_reserved(
    ledger_url: str,
) -> None:
    """Two copies of a checkout begin at once, and a person is in January here and in February there."""
    here, there = Ledger.open(ledger_url), Ledger.open(ledger_url)
    here.declare("patients", CAP, public=False)
    for block in ("january", "february", "march"):
        here.declare_block("patients", block)
    held = {"january": ["A", "way:1"], "february": ["B", "way:1"], "march": ["C", "way:1"]}
    moved = held | {"january": ["A without one", "way:1"], "february": ["B and one", "way:1"]}
    for ledger, contents in ((here, held), (there, moved)):
        ledger.check_contents("patients", contents)
    terms: dict[str, Any] = {"events": EVENTS, "notes": {}}
    here.reserve("a", "patients", Budget(0.1, 0.0), blocks=["january"], content_digests=held, **terms)
    rows = here.history()
    for blocks in (["january"], ["february", "march"]):
        with refused_as("block_changed", BudgetRefusedError, block="january"):
            there.reserve("b", "patients", Budget(0.1, 0.0), blocks=blocks, content_digests=moved, **terms)
    assert here.history() == rows
    there.overrule("patients", "january", by="the owner")
    there.reserve(
        "c", "patients", Budget(0.1, 0.0), blocks=["february", "march"], content_digests=moved, **terms
    )
    there.verify()


def test_under_sums_blocks_pay_for_runs_that_each_meet_one_of_a_person_s_records(tmp_path: Path) -> None:
    """One step of rate 0.001 and multiplier 0.3: a record costs 5.65 and a pair in one run 7.29, less than two singles.

    So a share of 7.29 / 2, which pays for the pair, would not pay for two runs that meet one record each.
    """
    single, pair = 5.653792536, 7.291673673
    ledger = declared(tmp_path, "x", "y", cap=Budget(100.0, 0.1), blocks_per_person=2)
    reserve(ledger, "a", "x", cost=Budget(single, 1e-5))
    reserve(ledger, "b", "y", cost=Budget(single, 1e-5))
    for block in "xy":
        assert ledger.balance("patients", block).reserved.epsilon >= 2 * single
    noise = {"type": "GaussianDpEvent", "noise_multiplier": 0.3}
    sampled = {"type": "PoissonSampledDpEvent", "sampling_probability": 0.001, "event": noise}
    conftest.reserve(
        ledger, "c", "x", "y", cost=Budget(single, 1e-5), events=[{"event": sampled, "count": 1}]
    )
    for block in "xy":
        assert ledger.balance("patients", block).reserved.epsilon >= 2 * single + pair
    # k alone would be cheaper than one record is: what a pair loses at 2 * 5.65 is far below 2e-5.
    assert ledger.balance("patients", "x").reserved.delta == pytest.approx(4e-5)


def test_under_sums_several_records_take_the_delta_of_their_events(tmp_path: Path) -> None:
    """By mpmath: j records of Gaussian noise of multiplier 1 have, at j * 4.377178096, the delta of a shift by j.

    That is 1e-5, 2 * 6.319e-5 and 3 * 3.178e-4. A bound for any run of this cost has 2 * 4.03e-4 and 3 * 2.14e-2.
    """
    epsilon, share = 4.377178097, 3.17778472e-4
    events = [{"event": {"type": "GaussianDpEvent", "noise_multiplier": 1.0}, "count": 1}]
    ledger = declared(tmp_path, "x", "y", "z", cap=Budget(100.0, 0.1), blocks_per_person=3)
    for run_id, blocks, expected in (("a", "x", 1e-5), ("b", "xy", 6.31925764e-5), ("c", "xyz", share)):
        before = ledger.balance("patients", "x").reserved.delta
        conftest.reserve(ledger, run_id, *blocks, cost=Budget(epsilon, 1e-5), events=events, price="1e-9")
        taken = ledger.balance("patients", "x").reserved.delta - before
        assert 3 * expected * (1 - 1e-6) <= taken <= 3 * expected * 1.01
    reserved = ledger.balance("patients", "x").reserved
    ledger.settle("c", Budget(epsilon, 1e-5), events=events)
    balance = ledger.balance("patients", "x")
    assert balance.spent.delta + balance.reserved.delta == pytest.approx(reserved.delta)
    assert ledger.verify(prices=True).priced == 9
    # What has no bound by PLD keeps the bound for any run.
    zcdp = [{"event": {"type": "ZCDpEvent", "rho": 0.001, "xi": 0.0}, "count": 1}]
    conftest.reserve(ledger, "d", "x", "y", cost=Budget(1.0, 1e-5), events=zcdp)
    taken = ledger.balance("patients", "y").reserved.delta
    assert taken == pytest.approx(3 * (6.31925764e-5 + 1e-5 * (1 + math.e) / 2), rel=0.01)

"""The rules of the ledger: what is charged, what is refused, and in which words."""

import hashlib
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.errors import BudgetRefusedError, LedgerBrokenError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Ledger
from algorithms.privacy.ledger.books import replay
from algorithms.privacy.ledger.chain import NOTHING, Draft, Entry, Head, follow, seal
from algorithms.privacy.ledger.composition import BASIC, Terms
from tests.algorithms.privacy.ledger.conftest import ONE, declared, reserve
from tests.support.refusals import check_refusals

NO_NOISE = Budget(math.inf, 1.0)
OLD_HASH = "2282c9616f6986f47b561cf61b0b4f7fb4c9808631db77498c0df926c599339a"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return declared(tmp_path)


def test_the_refusal_says_what_was_asked_what_is_left_and_what_would_fit(ledger: Ledger) -> None:
    reserve(ledger, "a", cost=Budget(1.0, 1e-5))
    ledger.settle("a", Budget(0.987654321987, 1e-5), events=[])
    reserve(ledger, "b", cost=Budget(1.5, 1e-5))
    with pytest.raises(BudgetRefusedError) as refused:
        reserve(ledger, "c", cost=Budget(1.0, 2e-5))
    assert str(refused.value) == (
        "run 'c' asks for epsilon=1, delta=2e-05, but population 'patients' has epsilon=0.512345, delta=8e-05"
        " left of its cap epsilon=3, delta=0.0001, with epsilon=0.987654321987, delta=1e-05 spent and"
        " epsilon=1.5, delta=1e-05 reserved by open runs ('b'); at most epsilon=0.512345, delta=2e-05 would"
        " fit, unless the owner of the data raises the cap by `epsilonflow ledger cap`."
    )
    assert ledger.status("c") is None
    assert [entry.run_id for entry in ledger.history()] == [None, "a", "a", "b"]


def test_delta_alone_can_refuse_a_run(ledger: Ledger) -> None:
    with pytest.raises(BudgetRefusedError, match=r"at most epsilon=0\.1, delta=0\.0001 would fit"):
        reserve(ledger, "a", cost=Budget(0.1, 2e-4))


def test_a_cap_below_what_is_charged_lets_nothing_more_in(ledger: Ledger) -> None:
    reserve(ledger, "a", cost=Budget(1.0, 1e-5))
    ledger.set_cap("patients", Budget(0.5, 1e-4))
    balance = ledger.balance("patients")
    assert (balance.cap, balance.remaining) == (Budget(0.5, 1e-4), Budget(0.0, 9e-5))
    with pytest.raises(
        BudgetRefusedError, match="nothing more fits, unless the owner of the data raises the cap"
    ):
        reserve(ledger, "b", cost=Budget(1e-9, 0.0))
    ledger.set_cap("patients", Budget(1.5, 1e-4))
    reserve(ledger, "b", cost=Budget(0.5, 1e-5))


def test_a_data_card_never_changes_an_existing_cap(ledger: Ledger) -> None:
    ledger.declare("patients", Budget(100.0, 1.0), public=True)
    balance = ledger.balance("patients")
    assert (balance.cap, balance.public) == (Budget(3.0, 1e-4), False)
    assert len(ledger.history()) == 1


def test_populations_do_not_touch_each_other(ledger: Ledger) -> None:
    ledger.declare("customers", Budget(1.0, 1e-5), public=False)
    reserve(ledger, "a", cost=Budget(3.0, 1e-4))
    reserve(ledger, "b", cost=Budget(1.0, 1e-5), population="customers")
    assert ledger.populations() == ["patients", "customers"]
    assert ledger.balance("customers").reserved == Budget(1.0, 1e-5)
    assert [entry.run_id for entry in ledger.history("customers")] == [None, "b"]


def test_repeating_a_step_changes_nothing(ledger: Ledger) -> None:
    spent = Budget(0.5, 1e-5)
    for _ in range(2):
        reserve(ledger, "a")
        reserve(ledger, "b")
    for _ in range(2):
        ledger.settle("a", spent, events=[])
        ledger.forfeit("b")
    assert [e.kind for e in ledger.history()] == ["population", "reserve", "reserve", "settle", "forfeit"]
    assert ledger.balance("patients").spent == Budget(1.5, 2e-5)


def test_an_open_run_resumes_even_when_nothing_more_fits(ledger: Ledger) -> None:
    reserve(ledger, "a", cost=Budget(3.0, 1e-4))
    ledger.set_cap("patients", Budget(1.0, 1e-5))
    reserve(ledger, "a", cost=Budget(3.0, 1e-4))


def test_steps_out_of_order_are_refused_in_one_sentence(ledger: Ledger) -> None:
    cost = ONE
    for run_id in ("open", "settled", "forfeited"):
        reserve(ledger, run_id)
    ledger.settle("settled", Budget(0.5, 0.0), events=[])
    ledger.forfeit("forfeited")
    before = ledger.history()
    check_refusals(
        {
            "no reservation of run 'new'": lambda: ledger.settle("new", cost, events=[]),
            "no reservation of run 'newer'": lambda: ledger.forfeit("newer"),
            "cannot settle at epsilon=1.1": lambda: ledger.settle("open", Budget(1.1, 0.0), events=[]),
            "cannot settle at epsilon=0.1, delta=0.1": lambda: ledger.settle(
                "open", Budget(0.1, 0.1), events=[]
            ),
            "'forfeited' is forfeited, so": lambda: ledger.settle("forfeited", cost, events=[]),
            "settled at epsilon=0.5, delta=0 already": lambda: ledger.settle("settled", cost, events=[]),
            "'settled' is settled at epsilon=0.5, delta=0; leave": lambda: ledger.forfeit("settled"),
            "'settled' is settled already": lambda: reserve(ledger, "settled"),
            "'forfeited' is forfeited already": lambda: reserve(ledger, "forfeited"),
            "has reserved epsilon=1, delta=1e-05": lambda: reserve(ledger, "open", cost=Budget(1.0, 2e-5)),
            "no population 'x' (it has 'patients')": lambda: reserve(ledger, "n", cost=cost, population="x"),
            "no population 'y' ": lambda: ledger.set_cap("y", cost),
            "cap of a population must be finite": lambda: ledger.set_cap("patients", NO_NOISE),
            "a population must be printable text": lambda: ledger.declare(" ", cost, public=False),
            "a run_id must be printable text": lambda: reserve(ledger, "a\0b"),
            "must be JSON with finite numbers": lambda: ledger.settle("open", cost, events=[{"x": math.nan}]),
        }
    )
    assert ledger.history() == before


def test_questions_about_an_unknown_population_are_refused(ledger: Ledger) -> None:
    questions: list[Callable[[str], object]] = [
        ledger.balance,
        ledger.history,
        lambda name: ledger.affordable(name, NO_NOISE),
    ]
    for ask in questions:
        with pytest.raises(RefusedError, match=r"no population 'nobody' \(it has 'patients'\)"):
            ask("nobody")


def test_a_run_without_noise_is_refused_on_private_records(ledger: Ledger) -> None:
    with pytest.raises(BudgetRefusedError, match="'patients' never allows; choose a private algorithm"):
        reserve(ledger, "a", cost=NO_NOISE)
    assert ledger.affordable("patients", NO_NOISE) == 0


def test_a_run_without_noise_on_public_records_is_recorded_and_not_added_up(ledger: Ledger) -> None:
    ledger.declare("digits", Budget(10.0, 1e-3), public=True)
    reserve(ledger, "free", cost=NO_NOISE, population="digits")
    with pytest.raises(RefusedError, match="was reserved without noise; settle it at an infinite epsilon"):
        ledger.settle("free", Budget(5.0, 0.0), events=[])
    ledger.settle("free", NO_NOISE, events=[])
    reserve(ledger, "given up", cost=NO_NOISE, population="digits")
    ledger.forfeit("given up")
    reserve(ledger, "paid", cost=Budget(10.0, 1e-3), population="digits")
    balance = ledger.balance("digits")
    assert (balance.spent, balance.reserved) == (Budget(0.0, 0.0), Budget(10.0, 1e-3))
    assert ledger.status("free") == "settled"
    assert ledger.affordable("digits", NO_NOISE) is None
    assert [entry.epsilon for entry in ledger.history("digits")] == [10.0, None, None, None, None, 10.0]


def _sealed(epsilon: float, after: Head) -> Entry:
    draft = Draft("cap", "patients", Budget(epsilon, 0.0))
    return seal(draft, after=after, written_at="now", written_by="somebody")


def _chain(length: int) -> list[Entry]:
    entries: list[Entry] = []
    for i in range(length):
        entries.append(_sealed(i, entries[-1].head if entries else NOTHING))
    return entries


def test_a_forged_row_with_a_hash_of_its_own_or_a_number_that_skips_some_breaks_the_chain() -> None:
    chain = _chain(3)
    assert list(follow(chain, name="x")) == chain
    chain[1] = _sealed(99.0, chain[0].head)
    with pytest.raises(LedgerBrokenError, match="breaks at row 3:"):
        list(follow(chain, name="x"))
    with pytest.raises(LedgerBrokenError, match="breaks at row 2:"):
        list(follow([chain[0], _sealed(1.0, Head(3, chain[0].hash))], name="x"))


def test_who_wrote_a_row_is_bound_by_its_hash_and_rows_without_a_name_keep_theirs() -> None:
    (row,) = _chain(1)
    with pytest.raises(LedgerBrokenError):
        list(follow([row._replace(written_by="another")], name="x"))
    # The hash that version 0.2 gave to a row, which had no name.
    old = Entry(1, "cap", "p", "all", None, 1.0, 0.0, "[]", "{}", "now", "0" * 64, OLD_HASH)
    assert list(follow([old], name="x")) == [old]


_NUMBERS = st.floats(0, 1e308, allow_nan=False)
_TEXTS = st.text(max_size=20)


@given(_TEXTS, st.none() | _TEXTS, st.none() | _NUMBERS, st.floats(0, 1), st.dictionaries(_TEXTS, _TEXTS))
def test_a_hash_is_of_the_rows_sorted_json(
    name: str, run_id: str | None, epsilon: float | None, delta: float, about: dict[str, str]
) -> None:
    budget = Budget(math.inf if epsilon is None else epsilon, delta)
    row = seal(
        Draft("reserve", name, budget, run_id, about=about, block=name[::-1]),
        after=Head(7, "0" * 64),
        written_at=name,
        written_by=name,
    )
    content = {key: value for key, value in row._asdict().items() if key != "hash"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert row.hash == hashlib.sha256(text.encode()).hexdigest()


def test_runs_of_many_different_costs_add_up_exactly() -> None:
    """More of them than are kept apart before they are added up."""
    costs = [Budget(number / 1000, float(f"{number}e-9")) for number in range(1, 200)]
    drafts = [Draft("population", "p", Budget(100, 1), about=Terms(False, BASIC, 1).to_json())]
    drafts += [Draft("reserve", "p", cost, f"run {cost.epsilon}") for cost in costs]
    drafts += [Draft("settle", "p", Budget(0.0005, 0), f"run {cost.epsilon}") for cost in costs[100:]]
    rows, head = [], NOTHING
    for draft in drafts:
        rows.append(seal(draft, after=head, written_at="now", written_by="somebody"))
        head = rows[-1].head
    books = replay(rows)
    copied = books.copy()
    for found in (books, copied):
        assert found.charged("p", "all", "open") == (Fraction(5050, 1000), Fraction(5050, 10**9))
        assert found.charged("p", "all", "settled") == (Fraction(99 * 5, 10000), Fraction(0))

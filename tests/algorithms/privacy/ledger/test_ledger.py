"""The ledger's rows: what is let in, added up without rounding, bound to a population, and refused in a sentence."""

import hashlib
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from algorithms.errors import BudgetRefusedError, LedgerBrokenError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Composition, Entry, Head, Ledger, Terms, rules
from algorithms.privacy.ledger.composition import BASIC
from algorithms.privacy.ledger.rows import EMPTY_HEAD, Draft, follow, seal
from algorithms.privacy.ledger.state import replay
from tests.algorithms.privacy.ledger.conftest import CAP, ONE, declared, opened, reserve
from tests.support.refusals import check_refusals, refused, refused_as

NO_NOISE = Budget(math.inf, 1.0)


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
        " fit, unless the owner of the data raises the cap."
    )
    assert ledger.status("c") is None
    assert [entry.run_id for entry in ledger.history()] == [None, "a", "a", "b"]


def test_delta_alone_can_refuse_a_run(ledger: Ledger) -> None:
    with refused_as("budget_exceeded", BudgetRefusedError, fitting=Budget(0.1, 1e-4)):
        reserve(ledger, "a", cost=Budget(0.1, 2e-4))


def test_a_cap_below_what_is_charged_lets_nothing_more_in(ledger: Ledger) -> None:
    reserve(ledger, "a", cost=Budget(1.0, 1e-5))
    ledger.set_cap("patients", Budget(0.5, 1e-4))
    balance = ledger.balance("patients")
    assert (balance.cap, balance.remaining) == (Budget(0.5, 1e-4), Budget(0.0, 9e-5))
    with refused_as("budget_exceeded", BudgetRefusedError, fitting=None):
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


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"adjacency": "REPLACE_ONE"}),
        ({"adjacency": "REPLACE_ONE"}, {}),
        ({"adjacency": "REPLACE_ONE"}, {"adjacency": "ADD_OR_REMOVE_ONE"}),
    ],
)
def test_a_population_that_was_charged_under_one_adjacency_takes_no_other(
    tmp_path: Path, first: dict[str, str], second: dict[str, str]
) -> None:
    """Not even once the run is given up, nor in another block, nor when the ledger is opened again."""
    cost = Budget(0.25, 0.0)
    ledger = declared(tmp_path, "january", "february")
    reserve(ledger, "a", "january", cost=cost, **first)
    ledger.forfeit("a")
    again = opened(tmp_path)
    for block in ("january", "february"):
        with refused_as("adjacency_differs", population="patients"):
            reserve(again, "b", block, cost=cost, **second)
        reserve(again, f"same in {block}", block, cost=cost, **first)
    assert [entry.run_id for entry in again.history() if entry.kind == "reserve"] == [
        "a",
        "same in january",
        "same in february",
    ]


@pytest.mark.parametrize("name", ["Patients", "PATIENTS", "ｐatients", "patients ", " patients"])
def test_another_spelling_of_a_population_is_no_second_budget(ledger: Ledger, name: str) -> None:
    for number in range(12):  # however many others there are
        ledger.declare(f"before {number}", CAP, public=False)
    with pytest.raises(RefusedError, match=r"has a population 'patients'.* differs in case or spaces alone"):
        ledger.declare(name, CAP, public=False)
    assert name not in ledger.populations()


def test_populations_that_differed_in_case_before_stay(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rules, "_fold_name", lambda name: name)  # as it was
        ledger.declare("Patients", CAP, public=False)
    for population in ("patients", "Patients"):
        ledger.declare(population, CAP, public=False)
        reserve(ledger, f"run on {population}", population=population)
        assert ledger.balance(population).reserved == ONE
    assert ledger.populations() == ["patients", "Patients"]


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
        lambda name: ledger.affordable_runs(name, NO_NOISE),
    ]
    for ask in questions:
        with pytest.raises(RefusedError, match=r"no population 'nobody' \(it has 'patients'\)"):
            ask("nobody")


def test_a_run_without_noise_is_refused_on_private_records(ledger: Ledger) -> None:
    with refused_as("no_noise_on_private", BudgetRefusedError, population="patients"):
        reserve(ledger, "a", cost=NO_NOISE)
    assert ledger.affordable_runs("patients", NO_NOISE) == 0


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
    assert ledger.affordable_runs("digits", NO_NOISE) is None
    assert [entry.epsilon for entry in ledger.history("digits")] == [10.0, None, None, None, None, 10.0]


def _sealed(epsilon: float, after: Head) -> Entry:
    draft = Draft("cap", "patients", Budget(epsilon, 0.0))
    return seal(draft, after=after, written_at="now", written_by="somebody")


def _chain(length: int) -> list[Entry]:
    entries: list[Entry] = []
    for i in range(length):
        entries.append(_sealed(i, entries[-1].head if entries else EMPTY_HEAD))
    return entries


def test_a_forged_row_breaks_the_chain_by_its_hash_or_its_number() -> None:
    chain = _chain(3)
    assert list(follow(chain, name="x")) == chain
    chain[1] = _sealed(99.0, chain[0].head)
    with pytest.raises(LedgerBrokenError, match="breaks at row 3:"):
        list(follow(chain, name="x"))
    with pytest.raises(LedgerBrokenError, match="breaks at row 2:"):
        list(follow([chain[0], _sealed(1.0, Head(3, chain[0].hash))], name="x"))


def test_who_wrote_a_row_is_bound_by_its_hash() -> None:
    (row,) = _chain(1)
    with pytest.raises(LedgerBrokenError):
        list(follow([row._replace(written_by="another")], name="x"))


_NUMBERS = st.floats(0, 1e308, allow_nan=False)
_TEXTS = st.text(max_size=20)


@settings(max_examples=15)
@given(_TEXTS, st.none() | _TEXTS, st.none() | _NUMBERS, st.floats(0, 1), st.dictionaries(_TEXTS, _TEXTS))
def test_a_hash_is_of_the_rows_sorted_json(
    name: str, run_id: str | None, epsilon: float | None, delta: float, notes: dict[str, str]
) -> None:
    budget = Budget(math.inf if epsilon is None else epsilon, delta)
    row = seal(
        Draft("reserve", name, budget, run_id, notes=notes, block=name[::-1]),
        after=Head(7, "0" * 64),
        written_at=name,
        written_by=name,
    )
    content = {key: value for key, value in row._asdict().items() if key != "hash"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert row.hash == hashlib.sha256(text.encode()).hexdigest()


def test_runs_of_many_different_costs_add_up_exactly() -> None:
    costs = [Budget(number / 1000, float(f"{number}e-9")) for number in range(1, 200)]
    drafts = [Draft("population", "p", Budget(100, 1), notes=Terms(False, BASIC, 1).to_notes())]
    drafts += [Draft("reserve", "p", cost, f"run {cost.epsilon}") for cost in costs]
    drafts += [Draft("settle", "p", Budget(0.0005, 0), f"run {cost.epsilon}") for cost in costs[100:]]
    rows, head = [], EMPTY_HEAD
    for draft in drafts:
        rows.append(seal(draft, after=head, written_at="now", written_by="somebody"))
        head = rows[-1].head
    found = replay(rows)
    assert found.charged_amount("p", "all", "open") == (Fraction(5050, 1000), Fraction(5050, 10**9))
    assert found.charged_amount("p", "all", "settled") == (Fraction(99 * 5, 10000), Fraction(0))


ROUNDING = Fraction(1, 10**12)


@pytest.mark.parametrize("parts", [3, 7, 10, 11, 49])
def test_equal_parts_of_a_cap_fit_exactly(tmp_path: Path, parts: int) -> None:
    ledger = declared(tmp_path, cap=Budget(0.3, 1.0))
    part = Budget(0.3 / parts, 1.0 / parts)
    assert ledger.affordable_runs("patients", part) == parts
    for i in range(parts):
        reserve(ledger, f"run-{i}", cost=part)
    assert ledger.affordable_runs("patients", part) == 0
    with refused_as("budget_exceeded", BudgetRefusedError, left=Budget(0.0, 0.0)):
        reserve(ledger, "one more", cost=Budget(1e-9, 0.0))


@settings(max_examples=20, deadline=None)
@given(cap=st.floats(1e-3, 1e6), share=st.floats(0, 1), delta=st.floats(0, 1), excess=st.floats(2e-12, 1e-3))
def test_the_whole_rest_fits_and_no_more(cap: float, share: float, delta: float, excess: float) -> None:
    with TemporaryDirectory() as folder:
        ledger = declared(folder, cap=Budget(cap, 1.0))
        reserve(ledger, "first", cost=Budget(min(cap, cap * share), delta))
        rest = ledger.balance("patients").remaining
        with pytest.raises(BudgetRefusedError):
            reserve(ledger, "more", cost=Budget(rest.epsilon + cap * excess, rest.delta))
        reserve(ledger, "rest", cost=rest)


_SPENT = st.builds(Budget, st.floats(1e-9, 2.9), st.floats(0, 9.9e-5))
_ASKED = st.builds(Budget, st.floats(3.1, 5.0), st.floats(0, 1e-3))


@settings(max_examples=20, deadline=None)
@given(_SPENT, _ASKED)
def test_what_the_refusal_says_would_fit_fits(spent: Budget, asked: Budget) -> None:
    with TemporaryDirectory() as folder:
        ledger = declared(folder, cap=Budget(3.0, 1e-4))
        reserve(ledger, "first", cost=spent)
        with pytest.raises(BudgetRefusedError) as refused:
            reserve(ledger, "second", cost=asked)
        offer = re.search(r"at most epsilon=(\S+), delta=(\S+) would fit", str(refused.value))
        assert offer
        reserve(ledger, "second", cost=Budget(float(offer[1]), float(offer[2])))


_SHARES = st.one_of(st.floats(0, 0.6), st.sampled_from([0.1, 0.2, 0.3, 1 / 3, 1 / 7]))
_RUNS = st.integers(0, 5).map(str)


class AnySteps(RuleBasedStateMachine):
    """Steps in any order on a real file, beside books kept in binary fractions (the ledger adds decimals)."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.cap = Budget(1.0, 0.5)
        self.ledger = declared(self.folder.name, cap=self.cap)
        self.charged: dict[str, Budget] = {}
        self.status: dict[str, str] = {}

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(run_id=_RUNS, epsilon=_SHARES, delta=_SHARES)
    def reserve(self, run_id: str, epsilon: float, delta: float) -> None:
        cost = Budget(epsilon, delta)
        if run_id in self.charged:
            return
        if self._fits(cost):
            reserve(self.ledger, run_id, cost=cost)
            self.charged[run_id], self.status[run_id] = cost, "open"
        else:
            with pytest.raises(BudgetRefusedError):
                reserve(self.ledger, run_id, cost=cost)

    @precondition(lambda self: self.charged)
    @rule(run_id=_RUNS, share=st.floats(0, 1))
    def settle(self, run_id: str, share: float) -> None:
        reserved = self.charged.get(run_id, Budget(1.0, 1.0))
        spent = Budget(reserved.epsilon * share, reserved.delta * share)
        if self.status.get(run_id) == "open":
            self.ledger.settle(run_id, spent, events=[])
            self.charged[run_id], self.status[run_id] = spent, "settled"
        elif self.status.get(run_id) != "settled":
            with pytest.raises(RefusedError):
                self.ledger.settle(run_id, spent, events=[])

    @precondition(lambda self: self.charged)
    @rule(run_id=_RUNS)
    def forfeit(self, run_id: str) -> None:
        if self.status.get(run_id) in ("open", "forfeited"):
            self.ledger.forfeit(run_id)
            self.status[run_id] = "forfeited"
        else:
            with pytest.raises(RefusedError):
                self.ledger.forfeit(run_id)

    @rule(epsilon=st.floats(0, 2), delta=st.floats(0, 1))
    def set_cap(self, epsilon: float, delta: float) -> None:
        self.cap = Budget(epsilon, delta)
        self.ledger.set_cap("patients", self.cap)

    @invariant()
    def history_replays_to_these_books(self) -> None:
        balance = Ledger.open(f"sqlite:///{self.folder.name}/ledger.sqlite").balance("patients")
        assert balance.cap == self.cap
        for total, states in ((balance.spent, {"settled", "forfeited"}), (balance.reserved, {"open"})):
            runs = [self.charged[run_id] for run_id, state in self.status.items() if state in states]
            assert math.isclose(total.epsilon, math.fsum(run.epsilon for run in runs), rel_tol=1e-15)
            assert math.isclose(total.delta, math.fsum(run.delta for run in runs), rel_tol=1e-15)

    def _fits(self, cost: Budget) -> bool:
        budgets = [*self.charged.values(), cost]
        epsilon = sum(Fraction(budget.epsilon) for budget in budgets)
        delta = sum(Fraction(budget.delta) for budget in budgets)
        caps = Fraction(self.cap.epsilon), Fraction(self.cap.delta)
        return epsilon <= caps[0] * (1 + ROUNDING) and delta <= caps[1] * (1 + ROUNDING)


TestAnySteps = AnySteps.TestCase
TestAnySteps.settings = settings(max_examples=7, stateful_step_count=20, deadline=None)


def test_the_first_value_of_each_name_stays_once_a_run_is_reserved(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.declare("patients", CAP, public=False, bound={"holdout": "a"})
    reserve(ledger, "first")
    ledger.declare("patients", CAP, public=False, bound={"holdout": "b"})
    ledger.declare("patients", CAP, public=False)
    assert opened(tmp_path).terms("patients").bound == {"holdout": "a"}
    assert [row.kind for row in ledger.history()] == ["population", "reserve"]
    ledger.declare("patients", CAP, public=False, bound={"holdout": "a", "blocks": "folder"})
    ledger.declare("patients", CAP, public=False, bound={"holdout": "a", "blocks": "sql"})
    assert opened(tmp_path).terms("patients").bound == {"holdout": "a", "blocks": "folder"}
    assert [row.kind for row in ledger.history()] == ["population", "reserve", "cap"]


def test_before_a_run_is_reserved_the_last_values_count(tmp_path: Path) -> None:
    """As where the first run was refused by its cap, so that nothing was trained under what its card said."""
    ledger = opened(tmp_path)
    ledger.declare("others", CAP, public=False, bound={"holdout": "a"})
    for value in ("a", "b", "b", "c"):
        ledger.declare("patients", CAP, public=False, bound={"holdout": value, "blocks": "folder"})
        assert opened(tmp_path).terms("patients").bound == {"holdout": value, "blocks": "folder"}
    assert [row.kind for row in ledger.history("patients")] == ["population", "cap", "cap"]
    reserve(ledger, "first")
    head = ledger.head()
    for bound in ({"holdout": "a"}, {"holdout": "c", "blocks": "sql"}):
        ledger.declare("patients", CAP, public=False, bound=bound)
    assert opened(tmp_path).terms("patients").bound == {"holdout": "c", "blocks": "folder"}
    assert (ledger.head(), ledger.terms("others").bound) == (head, {"holdout": "a"})
    ledger.forfeit("first")
    ledger.declare("patients", CAP, public=False, bound={"holdout": "a"})
    assert ledger.terms("patients").bound["holdout"] == "c"


def test_terms_that_contradict_bind_nothing(tmp_path: Path) -> None:
    """As those of a card that is refused, or the right card could be refused for them."""
    ledger = opened(tmp_path)
    ledger.declare("patients", CAP, public=False)
    ledger.declare("patients", CAP, public=True, bound={"holdout": "b"})
    ledger.declare("patients", CAP, public=False, composition=Composition("zcdp"), bound={"holdout": "b"})
    ledger.declare("patients", CAP, public=False, blocks_per_person=2, bound={"holdout": "b"})
    ledger.declare("patients", CAP, public=False, bound={"holdout": "a"})
    reserve(ledger, "first")
    ledger.declare("patients", CAP, public=False, bound={"holdout": "b", "blocks": "folder"})
    assert opened(tmp_path).terms("patients").bound == {"holdout": "a"}


def test_a_population_without_any_takes_the_first_and_keeps_its_cap(tmp_path: Path) -> None:
    """Runs were charged to it, and its cap was changed."""
    ledger = opened(tmp_path)
    ledger.declare("patients", CAP, public=False)
    reserve(ledger, "first")
    ledger.set_cap("patients", Budget(2.0, 1e-4))
    before, head = ledger.balance("patients"), ledger.head()
    assert ledger.terms("patients").bound == {}
    for value in ("first", "second"):
        ledger.declare("patients", CAP, public=False, bound={"holdout": value})
    again = opened(tmp_path)
    assert again.terms("patients").bound == {"holdout": "first"}
    assert again.balance("patients") == before
    again.verify()
    again.check_contains(head)
    ledger.set_cap("patients", Budget(1.75, 1e-4))
    assert opened(tmp_path).terms("patients").bound == {"holdout": "first"}


def test_rows_of_another_version_are_refused_in_a_sentence(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    draft = Draft("population", "patients", CAP, notes={"public": False})
    row = seal(draft, after=EMPTY_HEAD, written_at="now", written_by="another version")
    with refused("^row 1 of the ledger was written by another version"):
        ledger._store.fill(lambda: iter([row]))

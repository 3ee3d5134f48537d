"""Sums at the cap: rounding neither refuses a run that fits nor lets one in that does not."""

import math
import re
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Ledger
from tests.algorithms.privacy.ledger.conftest import declared, reserve

ROUNDING = Fraction(1, 10**12)


@pytest.mark.parametrize("parts", [3, 7, 10, 11, 49])
def test_equal_parts_of_a_cap_fit_exactly(tmp_path: Path, parts: int) -> None:
    ledger = declared(tmp_path, cap=Budget(0.3, 1.0))
    part = Budget(0.3 / parts, 1.0 / parts)
    assert ledger.affordable("patients", part) == parts
    for i in range(parts):
        reserve(ledger, f"run-{i}", cost=part)
    assert ledger.affordable("patients", part) == 0
    with pytest.raises(BudgetRefusedError, match="nothing more fits"):
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
TestAnySteps.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)

"""Plans, filters, cards and ledgers say the same thing: under replace-one, at delta 0, and under filters."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.core.calibration import Batches, plan_fixed, plan_renyi, plan_zcdp
from algorithms.core.plan import Plan, Target, by_accountants
from algorithms.core.planning_facts import Inputs, PlanningFacts
from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.gradients import L1, L2
from algorithms.models import LossBounds
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import REPLACE_ONE, epsilon
from algorithms.privacy.accounting.filters import RenyiBudget, RenyiFilter, rho_of_budget
from algorithms.privacy.barrier.compute_config import ComputeConfig
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.card import RunRecord, build, text, verify
from algorithms.privacy.documents import StatedPlan
from algorithms.privacy.ledger import Ledger
from algorithms.privacy.mechanisms.release import Gaussian, Laplace, Release, gradient_release
from algorithms.privacy.mechanisms.release_noise import noise_std
from algorithms.privacy.mechanisms.sampling import FullBatch
from tests.algorithms.privacy.conftest import card_of
from tests.support.changed import changed
from tests.support.refusals import refused_as
from tests.support.synthetic_run import left_by, with_entries

DELTA = 1e-5
FACTS = PlanningFacts(
    records=400,
    parameters=15,
    layers=1,
    classes=3,
    inputs=Inputs(3.0, 2.0),
    loss=LossBounds(slope=1.0, curvature=math.inf, least=0.0),
)
TARGET = Target(Budget(2.0, DELTA))


def released(clipping: L1 | L2, noise: Gaussian | Laplace) -> Release:
    return gradient_release(FullBatch(), clipping, noise, 400.0)


def gaussian(multiplier: float) -> list[tuple[Release, int]]:
    return [(released(L2(0.5), Gaussian(multiplier)), 12)]


@dataclass(frozen=True)
class Own:
    lengths: tuple[int, ...]
    why: str


FIXED: dict[str, Any] = {"facts": FACTS, "steps": 12, "sampled": Batches(FullBatch(), 400.0)}


@cache
def under_replace_one() -> Plan:
    own = Own((3, 9), "public")
    return plan_fixed(gaussian, target=TARGET, adjacency="REPLACE_ONE", method_params=own, **FIXED)


def zcdp() -> Plan:
    return plan_zcdp(rho_of_budget(TARGET.budget), target=TARGET, facts=FACTS, steps=12)


def renyi() -> Plan:
    return plan_renyi(12.0, target=TARGET, facts=FACTS, steps=12, sampling_rate=1.0)


@cache
def pure() -> Plan:
    def laplace(multiplier: float) -> list[tuple[Release, int]]:
        return [(released(L1(0.5), Laplace(multiplier)), 12)]

    return plan_fixed(laplace, target=Target(Budget(1.5, 0.0), "pure"), adjacency="REPLACE_ONE", **FIXED)


PLANS = {"schedule": under_replace_one, "zcdp": zcdp, "renyi": renyi, "pure": pure}


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_survives_json_and_holds(kind: str) -> None:
    plan = PLANS[kind]()
    written = json.dumps(plan.to_document().to_json(), allow_nan=False)
    again = Plan.from_document(StatedPlan.model_validate_json(written))
    assert again == plan
    again.check()
    assert again.facts.loss == LossBounds(1.0, math.inf, 0.0) and again.facts.inputs == Inputs(3.0, 2.0)


def test_noise_under_replace_one_is_twice_that_under_add_or_remove_one() -> None:
    plan = under_replace_one()
    other = plan_fixed(gaussian, target=TARGET, **FIXED)
    assert plan.noise_multiplier == pytest.approx(2 * other.noise_multiplier, rel=2e-3)
    assert plan.cost.epsilon == pytest.approx(other.cost.epsilon, rel=2e-3)
    with refused_as("releases_above_target"):
        noise = other.noise_multiplier
        plan_fixed(gaussian, target=TARGET, noise_multiplier=noise, adjacency="REPLACE_ONE", **FIXED)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("schedule", {"adjacency": "ADD_OR_REMOVE_ONE"}),
        ("zcdp", {"adjacency": "REPLACE_ONE"}),
        ("renyi", {"adjacency": "REPLACE_ONE"}),
        ("zcdp", {"filter": {"kind": "zcdp", "rho": 0.9}}),
        ("renyi", {"filter": {"kind": "renyi", "order": 12.0, "limit": 0.1}}),
        ("renyi", {"filter": {"kind": "renyi", "order": 16.0, "limit": 0.9}}),
    ],
)
def test_an_edited_plan_is_refused(kind: str, change: dict[str, Any]) -> None:
    with pytest.raises(RefusedError):
        Plan.from_document(with_entries(PLANS[kind]().to_document(), **change)).check()


@pytest.mark.parametrize("by", [0.5, 1e-7])
def test_a_lower_limit_with_the_epsilon_that_fits_it_is_refused(by: float) -> None:
    plan = renyi()
    assert isinstance(plan.filter, RenyiBudget)
    lower = replace(plan.filter, limit=plan.filter.limit - by)
    edited = replace(plan, filter=lower, epsilon={"rdp": plan.epsilon["rdp"] - by})
    with refused_as("plan_misstates_limit"):
        Plan.from_document(edited.to_document()).check()


@given(order=st.floats(6.0, 200.0), target=st.floats(2.5, 9.0))
@settings(max_examples=60, deadline=None)
def test_a_plan_under_a_renyi_filter_holds_whatever_its_rounding(order: float, target: float) -> None:
    plan = plan_renyi(order, target=Target(Budget(target, DELTA)), facts=FACTS, steps=1, sampling_rate=1.0)
    plan.check()
    assert isinstance(plan.open_filter(), RenyiFilter)


def test_a_planned_run_under_replace_one_is_held_to_its_schedule() -> None:
    plan = under_replace_one()
    privacy_filter, event = plan.open_filter(), plan.schedule[0][0]
    stated = [privacy_filter.epsilon_spent(DELTA)]
    for done in range(1, 13):
        privacy_filter.charge(event)
        stated.append(privacy_filter.epsilon_spent(DELTA))
        assert stated[-1] >= epsilon([(event, done)], DELTA, adjacency=REPLACE_ONE) - 1e-9
    assert stated == sorted(stated)
    assert stated[-1] == plan.cost.epsilon <= 2.0
    with pytest.raises(BudgetRefusedError):
        privacy_filter.charge(event)


def carded(folder: Path, plan: Plan, releases: list[Release]) -> RunRecord:
    """What a run of `plan` would leave, its plan and trace in `folder`."""
    trace, privacy_filter = Trace(), plan.open_filter()
    for one in releases:
        privacy_filter.charge(one.event())
        std = noise_std(one, FACTS.parameters)
        trace.record(one, one.event(), noise_std=std, epsilon=privacy_filter.epsilon_spent(plan.cost.delta))
    return left_by(folder, plan, trace)


def run_of(folder: Path, kind: str) -> RunRecord:
    plan = PLANS[kind]()
    if kind == "pure":
        return carded(folder, plan, [released(L1(0.5), Laplace(plan.noise_multiplier))] * 12)
    noise = Gaussian(plan.noise_multiplier or 20.0)
    return carded(folder, plan, [released(L2(0.5), noise)] * (12 if kind == "schedule" else 5))


REPLACED, ADDED = "is replaced by another.", "is added or removed."


@pytest.mark.parametrize(
    ("kind", "numbers", "change", "finite"),
    [
        ("schedule", (2.0, "1e-05"), REPLACED, {"pld", "rdp"}),
        ("pure", (1.5, "0"), REPLACED, {"pure"}),
        ("zcdp", (2.0, "1e-05"), ADDED, {"rdp"}),
        ("renyi", (2.0, "1e-05"), ADDED, {"rdp"}),
    ],
)
def test_a_card_says_what_the_run_promised_and_holds(
    tmp_path: Path, kind: str, numbers: tuple[float, str], change: str, finite: set[str]
) -> None:
    run = run_of(tmp_path, kind)
    card = build(run)
    assert [check.name for check in verify(card, tmp_path, unsigned=True).failures] == []
    assert card.setting.epsilon == pytest.approx(numbers[0], rel=1e-3) and card.setting.epsilon <= numbers[0]
    assert f"and delta = {numbers[1]}, when" in text.statement(card)
    assert text.statement(card).endswith(change)
    assert ("with any other record in its place" in text.protection_sentence(card)) is (change is REPLACED)
    found = verify(card).recomputed
    assert {name for name, value in found.items() if value is not None} == finite
    assert card.accounting.discretisation.pld_interval is None  # normal noise alone has a closed form
    assert card.accounting.composition.kind == (kind if kind in ("zcdp", "renyi") else "schedule")


@pytest.mark.parametrize("kind", PLANS)
def test_a_card_that_names_the_other_adjacency_does_not_hold(tmp_path: Path, kind: str) -> None:
    other = {"ADD_OR_REMOVE_ONE": "REPLACE_ONE", "REPLACE_ONE": "ADD_OR_REMOVE_ONE"}
    document = build(run_of(tmp_path, kind)).to_json()
    card = card_of(changed(document, "setting.adjacency", other.__getitem__))
    failures = {check.name for check in verify(card, tmp_path).failures}
    assert any(name.startswith("epsilon ") for name in failures)
    assert "terms of the plan" in failures


def reserve(ledger: Ledger, run: str, adjacency: str | None, *, population: str = "people") -> None:
    notes = {} if adjacency is None else {"adjacency": adjacency}
    ledger.reserve(run, population, Budget(1.0, 1e-6), events=[], notes=notes)


@pytest.mark.parametrize("end", ["open", "settled", "forfeited"])
@pytest.mark.parametrize(("first", "second"), [(None, "REPLACE_ONE"), ("REPLACE_ONE", "ADD_OR_REMOVE_ONE")])
def test_a_private_population_is_charged_under_one_adjacency(
    tmp_path: Path, first: str | None, second: str, end: str
) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    ledger.declare("people", Budget(10.0, 1e-4), public=False)
    ledger.declare("others", Budget(10.0, 1e-4), public=False)
    reserve(ledger, "one", first)
    reserve(ledger, "elsewhere", second, population="others")
    if end == "settled":
        ledger.settle("one", Budget(1.0, 1e-6), events=[])
    if end == "forfeited":
        ledger.forfeit("one")
    before = ledger.head()
    with refused_as("adjacency_differs"):
        reserve(ledger, "two", second)
    assert ledger.head() == before
    reserve(ledger, "three", first)
    if end == "open":
        reserve(ledger, "one", first)  # a killed run is taken up


def test_a_public_population_may_be_charged_under_any(tmp_path: Path) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    ledger.declare("people", Budget(10.0, 1e-4), public=True)
    for index, adjacency in enumerate([None, "REPLACE_ONE", "ADD_OR_REMOVE_ONE"]):
        reserve(ledger, f"run {index}", adjacency)
    assert ledger.balance("people").reserved.epsilon == 3.0


def test_accountants_go_over_a_long_schedule_once() -> None:
    """A million steps of two releases are two million rows; the result is that of the two events."""
    first, second = (
        Gaussian(multiplier).event("total", L2(1.0), is_sampled=False) for multiplier in (50.0, 80.0)
    )

    class Rows(list[Any]):
        times = 0

        def __iter__(self) -> Iterator[Any]:
            self.times += 1
            return super().__iter__()

    rows = Rows([(first, 1), (second, 2)] * 20)
    assert by_accountants(rows, DELTA) == by_accountants([(first, 20), (second, 40)], DELTA)
    assert rows.times == 1


@pytest.mark.parametrize(
    ("rate", "bound", "expected"),
    [(0.01, 1_000_000, 1000.0), (1.0, 5000, 500.0), (0.01, 64_000, None), (0.01, None, None)],
)
def test_a_private_number_of_records_has_passes_for_a_tenth_of_its_bound(
    rate: float, bound: int | None, expected: float | None
) -> None:
    facts = replace(FACTS, records=None)
    plan = plan_renyi(12.0, target=TARGET, facts=facts, steps=12, sampling_rate=rate)
    assert plan.with_public_sizes(ComputeConfig(max_number=bound)).expected_batch == expected


def test_a_public_number_of_records_decides_on_passes_whatever_its_bound() -> None:
    plan = plan_renyi(12.0, target=TARGET, facts=FACTS, steps=12, sampling_rate=0.5)
    assert plan.with_public_sizes(ComputeConfig(max_number=10**6)).expected_batch == 200.0

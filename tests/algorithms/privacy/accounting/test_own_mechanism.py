"""A mechanism of one's own: one class and its event with its rule, in one file, and everything else knows it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attrs
import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as distributions
from numpy.typing import NDArray
from torch import Tensor

from algorithms.core.calibration import plan_fixed
from algorithms.core.plan import Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.gradients import L1
from algorithms.privacy.accounting import Budget, event_rules
from algorithms.privacy.accounting.epsilon import REPLACE_ONE, Accountant, epsilon, group_privacy
from algorithms.privacy.accounting.event_rules import EventRule, TraceFields, register
from algorithms.privacy.accounting.events import schedule_from_json, schedule_to_json
from algorithms.privacy.accounting.filters import ZCDPFilter
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.card import build, verify
from algorithms.privacy.mechanisms.noise import Stream
from algorithms.privacy.mechanisms.release import Mechanism, Release, total_release
from algorithms.privacy.mechanisms.sampling import FullBatch
from tests.support.barriers import barrier, no_records
from tests.support.refusals import refused_as
from tests.support.synthetic_run import left_by

DELTA, K = 1e-5, 20_000


@attrs.frozen
class TwofoldDpEvent(dp.DpEvent):  # type: ignore[misc]
    """Laplace noise and a second draw on top of it: at least as private as the first draw alone."""

    width: float


class TwofoldRule(EventRule):
    def is_possible(self, event: Any) -> bool:
        return bool(0 < event.width < math.inf)

    def pure_epsilon(self, event: Any) -> float:
        return float(1.0 / event.width)

    def under_replace_one(self, event: Any) -> dp.DpEvent:
        return TwofoldDpEvent(event.width / 2)

    def pld(self, event: Any, grid: float, adjacency: dp.NeighboringRelation) -> Any:
        return distributions.from_laplace_mechanism(event.width, value_discretization_interval=grid)

    def rdp(self, event: Any, orders: tuple[float, ...], adjacency: dp.NeighboringRelation) -> np.ndarray:
        return np.minimum(np.array(orders) / 2 / event.width**2, 1.0 / event.width)

    def rho(self, event: Any) -> float:
        return float(0.5 / event.width**2)

    def group_privacy(self, event: Any, count: int) -> dp.DpEvent:
        return TwofoldDpEvent(event.width / count)

    def trace_fields(self, event: Any) -> TraceFields:
        return TraceFields({"twofold": event.width})


@dataclass(frozen=True)
class Twofold(Mechanism):
    multiplier: float
    proven = (("total", L1, FullBatch),)

    def draw(self, stream: Stream, count: int, *, box: bool) -> NDArray[np.float64]:
        return stream.laplace(count) + stream.laplace(count)

    def std(self, dimension: int, *, box: bool) -> float:
        return 2.0

    def event(self, kind: str, bound: Any, *, is_sampled: bool) -> dp.DpEvent:
        return TwofoldDpEvent(self.multiplier)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_rules, "_RULES", dict(event_rules._RULES))
    register(TwofoldDpEvent, TwofoldRule())


def nothing(features: Tensor, label: Tensor) -> Tensor:
    return torch.zeros(K)


def test_a_new_mechanism_is_charged_drawn_and_traced() -> None:
    trace = Trace()
    asked = barrier(no_records(16), privacy_filter=ZCDPFilter(0.5 / 4.0**2), trace=trace)
    answer = asked.total(nothing, bound=L1(2.0), noise=Twofold(4.0)).numpy()
    (row,) = trace.rows
    assert answer.std() == pytest.approx(row.noise_std, rel=0.05)
    assert (row.noise, row.noise_multiplier, trace.events()) == ("twofold", 4.0, [TwofoldDpEvent(4.0)])
    with refused_as("filter_exhausted", BudgetRefusedError, mechanism="Twofold"):
        asked.total(nothing, bound=L1(2.0), noise=Twofold(4.0))


def test_a_new_mechanism_is_planned_and_stands_on_a_card(tmp_path: Path) -> None:
    def releases(multiplier: float) -> list[tuple[Release, int]]:
        return [(total_release(L1(2.0), Twofold(multiplier)), 1)]

    facts = PlanningFacts(records=400, parameters=15, layers=1, classes=3)
    target = Target(Budget(0.5, DELTA))
    plan = plan_fixed(releases, target=target, facts=facts)
    assert plan.noise_multiplier == pytest.approx(2.0, rel=1e-3)
    trace = Trace()
    asked = barrier(no_records(16), privacy_filter=plan.open_filter(), trace=trace)
    asked.total(nothing, bound=L1(2.0), noise=Twofold(plan.noise_multiplier))
    card = build(left_by(tmp_path, plan, trace))
    assert [query.noise for query in card.mechanism.queries] == ["twofold"]
    assert verify(card, tmp_path, unsigned=True).passed


@pytest.mark.parametrize("accountant", ["pld", "rdp", "pure"])
def test_a_new_event_is_accounted_as_its_rule_says(accountant: Accountant) -> None:
    delta = 0.0 if accountant == "pure" else DELTA
    own = epsilon([(TwofoldDpEvent(4.0), 10)], delta, accountant=accountant)
    laplace = epsilon([(dp.LaplaceDpEvent(4.0), 10)], delta, accountant=accountant)
    assert own == pytest.approx(laplace, rel=1e-4) if accountant != "rdp" else laplace <= own <= 1.1 * laplace
    replaced = epsilon([(TwofoldDpEvent(8.0), 10)], delta, accountant=accountant, adjacency=REPLACE_ONE)
    assert replaced == own
    assert group_privacy(TwofoldDpEvent(8.0), 2) == TwofoldDpEvent(4.0)


def test_a_new_event_survives_a_document() -> None:
    schedule = [(dp.SelfComposedDpEvent(TwofoldDpEvent(4.0), 3), 2)]
    document: list[Mapping[str, Any]] = list(schedule_to_json(schedule))
    assert schedule_from_json(document) == schedule


def test_a_name_is_registered_once() -> None:
    with pytest.raises(RefusedError, match="has a rule already"):
        register(TwofoldDpEvent, TwofoldRule())

"""PrivGene: its candidates, what its rounds cost, and that it learns."""

import math
from dataclasses import replace
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.core.plan import Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.methods.priv_gene import PrivGene, Selection
from algorithms.models import LossBounds
from algorithms.privacy.accounting import Budget
from algorithms.privacy.mechanisms.release import Gumbel
from tests.support.descent import (
    DELTA,
    EPSILON,
    FEATURES,
    RECORDS,
    made_up,
    model_of,
    planned,
    run,
)
from tests.support.refusals import refused_as


class Scripted:
    """A stand-in for the barrier that selects as given and keeps the candidates."""

    def __init__(self, chosen: list[int]) -> None:
        self.chosen = chosen
        self.candidates: list[Tensor] = []
        self.terms: list[dict[str, Any]] = []

    def argmin(self, candidates: Tensor, **terms: Any) -> int:
        self.candidates.append(candidates)
        self.terms.append(terms)
        return self.chosen[len(self.candidates) - 1]


def test_the_candidates_are_moves_of_one_coordinate_that_become_smaller() -> None:
    method = PrivGene(rounds=3, first_move=0.5, move=0.4, decay=0.5)
    plan = planned(method)
    barrier = Scripted([1, 3, 0])
    state = method.init(torch.zeros(2), plan)
    for _ in range(3):
        state = method.step(state, plan, barrier)  # type: ignore[arg-type]
    expected = [
        [[0.5, 0.0], [0.0, 0.5], [-0.5, 0.0], [0.0, -0.5]],
        [[0.4, 0.5], [0.0, 0.9], [-0.4, 0.5], [0.0, 0.1]],
        [[0.2, 0.1], [0.0, 0.3], [-0.2, 0.1], [0.0, -0.1]],
    ]
    for candidates, rows in zip(barrier.candidates, expected, strict=True):
        torch.testing.assert_close(candidates, torch.tensor(rows))
    torch.testing.assert_close(method.released(state), torch.tensor([0.2, 0.1]))
    assert all(terms["bound"] == 2.0 and isinstance(terms["noise"], Gumbel) for terms in barrier.terms)


@pytest.mark.parametrize("rounds", [1, 7, 40])
def test_the_rounds_share_rho_equally_and_use_it_up(rounds: int) -> None:
    method = PrivGene(rounds=rounds)
    plan = planned(method)
    _, trace, _ = run(method, plan)
    parts = [event.rho for event in trace.events() if isinstance(event, dp.dp_event.ZCDpEvent)]
    assert len(parts) == len(trace.rows) == plan.steps == rounds
    assert len(set(parts)) == 1
    assert math.fsum(parts) <= plan.filter.rho
    assert math.fsum(parts) == pytest.approx(plan.filter.rho, rel=1e-8)
    # epsilon^2 / 8 a round, for losses that move within [0, loss_bound]
    epsilon = 1 / trace.rows[0].noise_multiplier
    assert parts[0] == pytest.approx(epsilon**2 / 8)
    assert trace.rows[0].noise_std == pytest.approx(math.pi / math.sqrt(6) * 2.0 / epsilon)


@pytest.mark.parametrize(
    ("records", "epsilon", "rounds"), [(39_000, 0.1, 5), (39_000, 1.6, 78), (100, 0.1, 1)]
)
def test_the_number_of_rounds_follows_the_paper(records: int, epsilon: float, rounds: int) -> None:
    assert planned(PrivGene(), epsilon=epsilon, records=records).steps == rounds


@pytest.mark.parametrize("name", ["logistic", "svm"])
def test_it_learns(name: str) -> None:
    records, method = made_up(), PrivGene(rounds=30)
    weights = method.released(run(method, planned(method, epsilon=50.0), name=name)[0]).numpy()
    scores = records.features @ weights[:FEATURES] + weights[FEATURES]
    assert np.mean((scores > 0) == (records.labels == 1)) > 0.85


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"loss": None}, "losses_below_0"),
        ({"loss": LossBounds(1.0, 1.0, -0.5)}, "losses_below_0"),
        ({"records": None}, "rounds_missing"),
    ],
)
def test_what_does_not_fit_is_refused(facts: dict[str, Any], code: str) -> None:
    known = {"records": RECORDS, "parameters": 7, "layers": 1, "classes": 2, "loss": model_of().bounds}
    with refused_as(code):
        PrivGene().plan(Target(Budget(EPSILON, DELTA)), PlanningFacts(**(known | facts)))


def test_a_private_number_of_records_is_not_asked_for() -> None:
    method = PrivGene(rounds=3)
    private, counted = (planned(method, records=count).params(Selection) for count in (None, RECORDS))
    assert private.selection_multiplier == counted.selection_multiplier
    assert private.selection_law is not None and counted.selection_law is not None
    assert private.selection_law.distance is None  # the noise is the same, what it is worth is not known
    assert counted.selection_law == replace(
        private.selection_law, gain=counted.selection_law.gain, distance=counted.selection_law.distance
    )

"""PrivGene: descent by noisy selection alone (Zhang, Xiao, Yang, Zhang and Winslett 2013)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from algorithms.core.calibration import SLACK, check_adaptive, plan_zcdp
from algorithms.core.optimizers import MAX_STEPS, Bound, Positive, Share
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.selection_law import SelectionDistribution
from algorithms.core.settings import Strict
from algorithms.errors import RefusedError
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting.filters import rho_of_budget
from algorithms.privacy.mechanisms.release import Gumbel, argmin_release

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from algorithms.privacy.barrier.barrier import Barrier
else:
    torch = lazy_module("torch")

RECORDS_A_ROUND = 800
"""There are n epsilon / 800 rounds, as in the comparison with DP-AGD."""


@dataclass(frozen=True)
class PrivGeneState:
    """parameters: [d], the last round's candidate. count: [], rounds done."""

    parameters: Tensor
    count: Tensor


@dataclass(frozen=True)
class Selection:
    """What the plan keeps: the noise multiplier of a round's selection, and its law; older plans have none."""

    selection_multiplier: float
    selection_law: SelectionDistribution | None = None


@dataclass(frozen=True)
class PrivGene(Strict):
    """PrivGene: descent by noisy selection alone, without gradients (Zhang, Xiao, Yang, Zhang and Winslett 2013).

    A round moves each coordinate of the parameters both ways and selects the candidate whose total loss is least:
    one release, argmin of f - Gumbel(loss_bound / epsilon), which is the exponential mechanism on losses in [0,
    loss_bound]. Under add-or-remove they all move the same way, so a round is (epsilon^2 / 8)-zCDP (Cesar and
    Rogers 2021) and the rounds share rho equally. The moves become smaller from round to round by a fixed factor.

    Differences from the paper: this is the form that was compared with DP-AGD (released code of Lee and Kifer
    2018), with one parent and moves along coordinates instead of crossover; a record's loss is clipped on both
    sides, and selections are accounted by their bounded range.

    rounds: null for n epsilon / 800, rounded, at least 1. loss_bound: a record's loss is clipped to [0, loss_bound].
    first_move, move: how far a coordinate is moved in the first round and in the second; decay: of a later round's
    move, from the one before.

    Example:
        >>> from algorithms import PrivGene
        >>> PrivGene(rounds=20).loss_bound
        2.0
    """

    rounds: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = None
    loss_bound: Bound = 2.0
    first_move: Positive = 0.5
    move: Positive = 0.7
    decay: Share = 0.98

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """An equal part of rho for each round; raises RefusedError for losses below 0 and for a private number."""
        facts.check_losses("a candidate")
        check_adaptive(target)
        rho, rounds = rho_of_budget(target.budget), self.rounds
        if rounds is None and facts.records is None:
            raise RefusedError(
                "the number of records is private, and with it that of the rounds; set {method.rounds}.",
                code="rounds_missing",
            )
        rounds = rounds or max(1, round((facts.records or 0) * target.budget.epsilon / RECORDS_A_ROUND))
        each = rho * (1 - SLACK) / rounds
        multiplier = 1 / math.sqrt(8 * each)
        release = argmin_release(self.loss_bound, Gumbel(multiplier))
        selection = Selection(
            multiplier, SelectionDistribution.of(release, 2 * facts.parameters, rounds, facts)
        )
        return plan_zcdp(rho, target=target, facts=facts, steps=rounds, method_params=selection)

    def init(self, parameters: Tensor, plan: Plan) -> PrivGeneState:
        """The state at the model's start."""
        return PrivGeneState(parameters.clone(), torch.tensor(0))

    def step(self, state: PrivGeneState, plan: Plan, barrier: Barrier) -> PrivGeneState:
        """One round: the best of all moves of one coordinate, by noisy selection."""
        count = int(state.count)
        move = self.first_move if count == 0 else self.move * self.decay ** (count - 1)
        moves = move * torch.eye(len(state.parameters), device=state.parameters.device)
        candidates = torch.cat([state.parameters + moves, state.parameters - moves])
        noise = Gumbel(plan.params(Selection).selection_multiplier)
        chosen = barrier.argmin(candidates, bound=self.loss_bound, noise=noise)
        return PrivGeneState(candidates[chosen].clone(), state.count + 1)

    def released(self, state: PrivGeneState) -> Tensor:
        """The last round's candidate, shape [d]."""
        return state.parameters

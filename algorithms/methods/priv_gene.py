"""PrivGene: descent by noisy selection alone, without gradients (Zhang, Xiao, Yang, Zhang and Winslett 2013).

A round moves each coordinate of the parameters both ways and selects the candidate whose total loss is least: one
release, argmin of f - Gumbel(loss_bound / epsilon), which is the exponential mechanism on losses in [0, loss_bound].
Under add-or-remove they all move the same way, so a round is (epsilon^2 / 8)-zCDP (Cesar and Rogers 2021) and the
rounds share rho equally. The moves become smaller from round to round by a fixed factor.

Differences from the paper: this is the form that was compared with DP-AGD (released code of Lee and Kifer 2018), with
one parent and moves along coordinates instead of crossover; a record's loss is clipped on both sides, and selections
are accounted by their bounded range.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.core.calibration import SLACK, plan_zcdp
from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.optimizers import STRICT, Bound, Count, Positive, Share
from algorithms.errors import RefusedError
from algorithms.privacy.accounting.filters import rho_of_budget
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Gumbel

RECORDS_A_ROUND = 800
"""There are n epsilon / 800 rounds, as in the comparison with DP-AGD."""


@dataclass(frozen=True)
class State:
    """parameters: [d]. count: [], rounds done."""

    parameters: Tensor
    count: Tensor


@dataclass(frozen=True)
class Selection:
    """What the plan keeps: the noise multiplier of a round's selection."""

    selection_multiplier: float


@dataclass(frozen=True)
class PrivGene:
    """Settings of PrivGene.

    rounds: null for n epsilon / 800, rounded, at least 1. loss_bound: a record's loss is clipped to [0, loss_bound].
    first_move, move: how far a coordinate is moved in the first round and in the second; a later round's move is
    `decay` times that of the one before.
    """

    rounds: Count | None = None
    loss_bound: Bound = 2.0
    first_move: Positive = 0.5
    move: Positive = 0.7
    decay: Share = 0.98

    __pydantic_config__ = STRICT

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """An equal part of rho for each round; raises RefusedError for losses below 0 and where rounds are not
        public.
        """
        public.check_losses("a candidate")
        rho, rounds = rho_of_budget(target.budget), self._rounds(target.budget.epsilon, public)
        each = rho * (1 - SLACK) / rounds
        selection = Selection(1 / math.sqrt(8 * each))
        return plan_zcdp(rho, target=target, public=public, steps=rounds, method_params=selection)

    def init(self, parameters: Tensor, plan: Plan) -> State:
        """The state at the model's start."""
        return State(parameters.clone(), torch.tensor(0))

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One round: the best of all moves of one coordinate, by noisy selection."""
        count = int(state.count)
        move = self.first_move if count == 0 else self.move * self.decay ** (count - 1)
        moves = move * torch.eye(len(state.parameters)).to(state.parameters)
        candidates = torch.cat([state.parameters + moves, state.parameters - moves])
        noise = Gumbel(plan.params(Selection).selection_multiplier)
        chosen = barrier.argmin(candidates, bound=self.loss_bound, noise=noise)
        return State(candidates[chosen].clone(), state.count + 1)

    def released(self, state: State) -> Tensor:
        """The last round's candidate, shape [d]."""
        return state.parameters

    def _rounds(self, epsilon: float, public: PublicInfo) -> int:
        if self.rounds is not None:
            return self.rounds
        if public.records is None:
            raise RefusedError(
                "the number of records is private, and with it that of the rounds; set algorithm.rounds."
            )
        return max(1, round(public.records * epsilon / RECORDS_A_ROUND))

"""The library's iteration of DP-AGD's line search (Lee and Kifer 2018, arXiv:1808.09501).

It computes one clipped full-batch gradient and the clipped objective at 20 points along it, and moves to the best. The
choice is made without noise: 20 random numbers cost the same in every method.
"""

import torch
from torch import Tensor

from algorithms.gradients import L2, LinearRecords, LineCandidates
from benchmarks.line import BOUND, STEPS
from benchmarks.methods import OnTorch, Problem


class ClosedForm(OnTorch):
    """The library's closed form, which searches along a line with the margins that the gradient needed."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        model = problem.model()
        self.records = LinearRecords(model, problem.inputs, problem.labels)
        self.parameters = model.initial_parameters()
        self.objectives = torch.zeros(len(STEPS))

    def step(self) -> None:
        """Gradient, objectives, move."""
        total = self.records.clipped_sum(self.parameters, L2(self.problem.clip_norm)).to(
            self.parameters.dtype
        )
        noise = self.problem.noise_scale * torch.randn_like(self.parameters)
        line = LineCandidates(self.parameters, (total + noise) / len(self.problem.labels), STEPS)
        self.objectives = self.records.losses_on(line, bound=BOUND)
        self.parameters = line.at(int(self.objectives.argmin()))

    def released(self) -> dict[str, Tensor]:
        """The new parameters and the objectives."""
        parameters = self.parameters.double().cpu()
        return {"parameters": parameters, "objectives": self.objectives.double().cpu()}

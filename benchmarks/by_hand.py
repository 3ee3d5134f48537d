"""A hand-written step for a network with one hidden layer: the least that PyTorch must do for a clipped sum.

It supports one shape of network and has none of a library's overhead, so the gap to another method is that method's
overhead. The gap between sums in 32 and in 64 bits is the price of sums in which no record's contribution is rounded
away by another's.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from benchmarks.methods import OnTorch, Problem


class Sums64(OnTorch):
    """Forward, backward, norms and weights in 32 bits; sums over records in 64 bits."""

    dtype = torch.float64

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.parameters = problem.model().initial_parameters()
        self.wanted = one_hot(problem.labels, problem.workload.classes).to(self.parameters.dtype)
        width, classes = problem.inputs.shape[1], problem.workload.classes
        hidden = (len(self.parameters) - classes) // (width + 1 + classes)
        self.sizes = [hidden * width, hidden, classes * hidden, classes]

    def step(self) -> None:
        """Clip, sum, add noise, update."""
        inputs = self.problem.inputs
        first, first_bias, second, second_bias = torch.split(self.parameters, self.sizes)
        first, second = first.view(len(first_bias), -1), second.view(len(second_bias), -1)
        seen = torch.addmm(first_bias, inputs, first.T).relu_()
        errors = torch.addmm(second_bias, seen, second.T).softmax(dim=1).sub_(self.wanted)
        back = (errors @ second).mul_(seen > 0)
        squares = _squares(errors) * (1 + _squares(seen)) + _squares(back) * (1 + _squares(inputs))
        weights = (self.problem.clip_norm / squares.sqrt_()).clamp_(max=1.0)[:, None]
        errors, back = ((part * weights).to(self.dtype) for part in (errors, back))
        inputs, seen = inputs.to(self.dtype), seen.to(self.dtype)
        sums = [back.T @ inputs, back.sum(dim=0), errors.T @ seen, errors.sum(dim=0)]
        noisy = torch.randn_like(self.parameters).mul_(self.problem.noise_scale)
        noisy += torch.cat([part.reshape(-1) for part in sums])
        self.parameters.sub_(noisy, alpha=self.problem.learning_rate / len(inputs))

    def released(self) -> dict[str, Tensor]:
        """The parameters."""
        return {"parameters": self.parameters.double().cpu()}


class Sums32(Sums64):
    """The same with sums in 32 bits, whose sensitivity exceeds the clip norm."""

    dtype = torch.float32


def _squares(rows: Tensor) -> Tensor:
    return rows.square().sum(dim=1)

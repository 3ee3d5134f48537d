"""The usual line search in PyTorch or Opacus: a gradient, then a forward pass for each candidate."""

import torch
from torch import Tensor, nn

from benchmarks.line import BOUND, STEPS
from benchmarks.methods import OnTorch, Problem, trained
from benchmarks.opacus_peers import Ghost as OpacusGhost
from benchmarks.opacus_peers import Hooks as OpacusHooks
from benchmarks.opacus_peers import Opacus


class ForwardPasses(OnTorch):
    """Computes the objectives by one forward pass for each candidate."""

    module: nn.Module

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.model = problem.model()
        self.module = self.model.module
        self.objectives = torch.zeros(len(STEPS))

    def search(self) -> None:
        """Move to the best candidate along the gradients that the parameters hold."""
        weights = list(trained(self.module).values())
        origins = [weight.detach().clone() for weight in weights]
        with torch.no_grad(), self.problem.precision():
            self.objectives = torch.stack([self._objective(weights, origins, step) for step in STEPS])
            self._move(weights, origins, STEPS[int(self.objectives.argmin())])

    def released(self) -> dict[str, Tensor]:
        """The new parameters and the objectives."""
        return {"parameters": self.flat(self.model.module), "objectives": self.objectives.double().cpu()}

    def _objective(self, weights: list[nn.Parameter], origins: list[Tensor], step: float) -> Tensor:
        self._move(weights, origins, step)
        losses = self.model.losses(self.module(self.problem.inputs), self.problem.labels)
        return losses.clamp(0.0, BOUND).sum()

    def _move(self, weights: list[nn.Parameter], origins: list[Tensor], step: float) -> None:
        for weight, origin in zip(weights, origins, strict=True):
            assert weight.grad is not None
            torch.add(origin, weight.grad, alpha=-step, out=weight)


class Plain(ForwardPasses):
    """Not private: the mean gradient and the forward passes."""

    def step(self) -> None:
        """Gradient, objectives, move."""
        self.module.zero_grad(set_to_none=True)
        with self.problem.precision():
            losses = self.model.losses(self.module(self.problem.inputs), self.problem.labels)
        losses.mean().backward()  # type: ignore[no-untyped-call]
        self.search()


class Hooks(ForwardPasses):
    """The gradient by Opacus; the direction is what its optimiser leaves in the parameters' gradients."""

    opacus: type[Opacus] = OpacusHooks

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.training = self.opacus(problem)
        self.module = self.training.module

    def step(self) -> None:
        """Gradient, objectives, move."""
        self.training.backward()
        self.training.optimizer.pre_step()
        self.search()

    def released(self) -> dict[str, Tensor]:
        """The new parameters and the objectives."""
        return {**self.training.released(), "objectives": self.objectives.double().cpu()}


class Ghost(Hooks):
    """The same in Opacus's ghost mode."""

    opacus = OpacusGhost

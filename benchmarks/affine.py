"""Clipping after a coordinate-wise affine map, AdaCliP's step (Pichapati et al. 2019, arXiv:1908.07643, Algorithm 1).

A step is a + b (sum of clip((g - a) / b) + noise) / batch; shift a and scale b are fixed, as within one step.
"""

import torch
from torch import Tensor

from algorithms.gradients import Affine
from benchmarks import ours, peers
from benchmarks.methods import Problem


def _shift_and_scale(like: Tensor) -> tuple[Tensor, Tensor]:
    """A shift [d] near zero and a scale [d] around 1."""
    generator = torch.Generator().manual_seed(1)
    shift = 1e-3 * torch.randn(len(like), generator=generator)
    scale = 0.5 + torch.rand(len(like), generator=generator)
    return shift.to(like), scale.to(like)


class BookKeeping(ours.BookKeeping):
    """The library's engine: weighted norms in closed form."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.shift, self.scale = _shift_and_scale(self.parameters)
        self.clipping = Affine(shift=self.shift, scale=self.scale, norm=problem.clip_norm)

    def step(self) -> None:
        """The step in the map's coordinates, mapped back."""
        mean = self.noisy_sum() / len(self.problem.labels)
        self.parameters.sub_(self.shift + self.scale * mean, alpha=self.problem.learning_rate)


class Materialised(peers.PerExample):
    """Every record's gradient by vmap(grad), then the affine map applied to each in place."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        shift, scale = _shift_and_scale(self.model.initial_parameters())
        self.shift, self.scale = self.model.by_name(shift), self.model.by_name(scale)

    def step(self) -> None:
        """Map all gradients, clip, sum, add noise, map back."""
        values = {name: weight.detach() for name, weight in self.weights.items()}
        mapped = self.gradients(values, self.problem.inputs, self.problem.labels)
        for name, gradient in mapped.items():
            gradient.sub_(self.shift[name]).div_(self.scale[name])
        norms = torch.stack([g.flatten(start_dim=1).norm(dim=1) for g in mapped.values()]).norm(dim=0)
        factors = (self.problem.clip_norm / (norms + 1e-6)).clamp(max=1.0)
        for name, weight in values.items():
            total = torch.einsum("i,i...->...", factors, mapped[name])
            total.add_(torch.randn_like(weight), alpha=self.problem.noise_scale)
            mean = total / len(self.problem.labels)
            weight.sub_(self.shift[name] + self.scale[name] * mean, alpha=self.problem.learning_rate)

"""What a model is to the rest: a module, a loss of each record by itself, and parameters as one flat vector."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class ModelRefused(ValueError):
    """A model that does not fit the data or that cannot be trained privately; the message says what to do."""


@dataclass(frozen=True)
class Model:
    """An architecture with the loss of each record.

    module: maps inputs [batch, *input_shape] to outputs [batch, outputs]; its own parameters are the start.
    losses: (outputs [batch, outputs], labels [batch]) -> [batch]; record by record, not averaged.
    scores: outputs -> [batch, classes]; the largest is the predicted class.
    """

    name: str
    module: nn.Module
    losses: Callable[[Tensor, Tensor], Tensor]
    scores: Callable[[Tensor], Tensor]

    @property
    def parameter_count(self) -> int:
        """The number of trained parameters, d."""
        return sum(p.numel() for p in trained(self.module).values())

    def initial_parameters(self) -> Tensor:
        """The start as a flat vector, shape [d], float32."""
        return torch.cat([p.detach().reshape(-1) for p in trained(self.module).values()])

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """A flat vector, shape [d], as views by parameter name."""
        shapes = {name: p.shape for name, p in trained(self.module).items()}
        pieces = torch.split_with_sizes(parameters, [shape.numel() for shape in shapes.values()])
        return {name: piece.view(shape) for piece, (name, shape) in zip(pieces, shapes.items(), strict=True)}

    def outputs(self, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """The module's outputs at given parameters, shape [batch, outputs]."""
        return torch.func.functional_call(self.module, dict(parameters), (inputs,))  # type: ignore[no-any-return]

    def layers(self) -> list[slice]:
        """Where each layer's parameters lie in the flat vector: one slice for each module that owns some."""
        slices: dict[str, slice] = {}
        start = 0
        for name, parameter in trained(self.module).items():
            owner = name.rpartition(".")[0]
            begin = slices[owner].start if owner in slices else start
            start += parameter.numel()
            slices[owner] = slice(begin, start)
        return list(slices.values())


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, in the module's order."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}

"""One forward and one backward pass over some records, recorded or record by record."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from algorithms.gradients.arithmetic import wide
from algorithms.gradients.contributions import Contributions, combined
from algorithms.gradients.layout import Layout, Unrecorded
from algorithms.gradients.per_example import PerExample, Rows
from algorithms.gradients.rules import RULES, general
from algorithms.gradients.tape import Tape
from algorithms.models import Model, ModelRefused


@dataclass(frozen=True)
class Passes:
    """The passes of one model, in its precision."""

    model: Model

    @cached_property
    def _pools(self) -> bool:
        return _pools(self.model.module)

    def taped(
        self,
        parameters: Tensor,
        inputs: Tensor,
        labels: Tensor,
        layouts: tuple[Layout | None, ...],
        *,
        is_learning: bool = False,
    ) -> tuple[Tensor, Tape]:
        """The losses, with a graph, and the tape of the forward pass. Raises Unrecorded where it cannot be recorded."""
        named = self.model.named(parameters.detach())
        if self._pools:
            named, inputs = (
                {name: _channels_last(part) for name, part in named.items()},
                _channels_last(inputs),
            )
        tape = Tape(named, RULES, general, batch=len(labels), layouts=layouts, is_learning=is_learning)
        with torch.enable_grad(), self._precision(inputs.device):
            with tape:
                outputs = self.model.outputs(named, inputs)
                if is_learning:
                    return self.model.losses(outputs, labels), tape
            return self.model.losses(outputs, labels), tape

    def recorded(
        self, parameters: Tensor, inputs: Tensor, labels: Tensor, layouts: tuple[Layout | None, ...]
    ) -> Contributions:
        """Book-keeping: one backward pass to the outputs of the operations that use parameters (Bu et al. 2023).

        Raises Unrecorded where an operation cannot be told apart by record.
        """
        losses, tape = self.taped(parameters, inputs, labels, layouts)
        uses = tape.take_uses()
        errors = self._errors(losses, tape, [use.edge for use in uses]) if uses else ()
        found: dict[str, list[PerExample]] = {}
        with torch.no_grad():
            for use, error in zip(uses, errors, strict=True):
                use.check()
                for name, gradient in (use.gradients(error) if error is not None else {}).items():
                    found.setdefault(name, []).append(gradient)
            gradients = {name: combined(parts) for name, parts in found.items()}
            return self.contributions(parameters, losses.detach(), gradients)

    def _errors(self, losses: Tensor, tape: Tape, edges: list[GradientEdge]) -> tuple[Tensor | None, ...]:
        """What comes back to the outputs of the uses; layers that run again on the way do so as they did before."""

        def back() -> tuple[Tensor | None, ...]:
            with tape:
                return torch.autograd.grad(losses.sum(), edges, allow_unused=True)

        try:
            return self.model.inside(tape.parameters, back)
        except CheckpointError as reason:
            raise Unrecorded(
                "gradient checkpointing that runs layers in another way the second time"
            ) from reason

    def one_by_one(self, parameters: Tensor, inputs: Tensor, labels: Tensor) -> Contributions:
        """Each record's gradient written down by `torch.func`, or in a pass of its own where that cannot."""

        def loss(values: dict[str, Tensor], one_input: Tensor, one_label: Tensor) -> Tensor:
            return self.model.losses(self.model.outputs(values, one_input[None]), one_label[None])[0]

        each = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")
        try:
            named = self.model.named(parameters.detach())
            with self._precision(inputs.device):
                gradients, losses = self.model.inside(named, lambda: each(named, inputs, labels))
        except RuntimeError:  # ways that depend on values, and operations that have no batched form
            return self._each_in_a_pass(parameters, inputs, labels)
        rows = {name: Rows(gradient.flatten(start_dim=1)) for name, gradient in gradients.items()}
        return self.contributions(parameters, losses.detach(), dict(rows))

    def _each_in_a_pass(self, parameters: Tensor, inputs: Tensor, labels: Tensor) -> Contributions:
        """Each record in a pass of its own: slow, and right for whatever autograd differentiates."""
        losses, rows = [], []
        for one_input, one_label in zip(torch.split(inputs, 1), torch.split(labels, 1), strict=True):
            point = parameters.detach().clone().requires_grad_()
            loss = self.followed(point, one_input, one_label)
            gradient = self.back(point, loss.sum())
            rows.append(torch.zeros_like(point) if gradient is None else gradient)
            losses.append(loss.detach())
        written = torch.stack(rows)
        gradients = {name: Rows(written[:, place]) for name, place in self.model.places.items()}
        return self.contributions(parameters, torch.cat(losses), dict(gradients))

    def followed(self, parameters: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each record, [batch], with a graph."""
        with torch.enable_grad(), self._precision(inputs.device):
            return self.model.losses(self.model.outputs(self.model.named(parameters), inputs), labels)

    def back(self, parameters: Tensor, total: Tensor) -> Tensor | None:
        """The gradient [d] of what `followed` led to at these parameters; None where it does not depend on them."""
        if not total.requires_grad:
            return None
        named = self.model.named(parameters)
        (found,) = self.model.inside(named, lambda: torch.autograd.grad(total, parameters, allow_unused=True))
        if parameters.grad is not None:
            raise ModelRefused(
                f"the model {self.model.name} adds up gradients by a backward pass of its own inside of the backward"
                " pass, as reversible layers do, where no record's can be told apart; leave it to autograd."
            )
        return found  # type: ignore[no-any-return]

    def losses(self, parameters: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each record, [batch]."""
        with torch.no_grad(), self._precision(inputs.device):
            return self.model.losses(self.model.outputs(self.model.named(parameters), inputs), labels)

    def contributions(
        self, parameters: Tensor, losses: Tensor, gradients: dict[str, PerExample]
    ) -> Contributions:
        """Gradients by parameter with what the model says of them."""
        return Contributions(losses, gradients, self.model.places, self.model.layers, wide(parameters).dtype)

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.model.precision == torch.bfloat16:
            return torch.autocast(device.type, torch.bfloat16)
        return nullcontext()


def _pools(module: nn.Module) -> bool:
    """Whether a model has poolings, which are several times faster where a pixel's channels lie side by side."""
    return any(isinstance(layer, nn.modules.pooling._MaxPoolNd) for layer in module.modules())


def _channels_last(images: Tensor) -> Tensor:
    """Images and kernels with a pixel's channels side by side; other tensors as they are."""
    if images.dim() != 4:
        return images
    _, channels, height, width = images.shape
    if channels > 1:
        return images.contiguous(memory_format=torch.channels_last)
    return images.contiguous().as_strided(
        images.shape, (height * width, 1, width, 1)
    )  # else torch sees no order

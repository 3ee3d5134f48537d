"""Opacus in the two modes that its documentation describes, both through PrivacyEngine.make_private.

Secure mode is off, so the noise is one call of torch.normal. Batches are given, so no sampler is timed. The
accountant only counts steps.
"""

from collections.abc import Callable
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.grad_sample import register_grad_sampler
from opacus.grad_sample.conv import compute_conv_grad_sample
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.methods import OnTorch, Problem, trained


def _convolution_rule(layer: Any, activations: list[Tensor], backprops: Tensor) -> Any:
    """Opacus's rule on inputs in the memory order that it assumes; free if they already have it."""
    return compute_conv_grad_sample(layer, [inputs.contiguous() for inputs in activations], backprops)


class Criterion:
    """A model's losses with the `reduction` that Opacus switches between its two backward passes."""

    def __init__(self, losses: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.losses = losses
        self.reduction = "mean"

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Losses [batch], or their mean."""
        losses = self.losses(outputs, labels)
        return losses if self.reduction == "none" else losses.mean()


class Opacus(OnTorch):
    """A step of an Opacus training loop in one gradient mode, "hooks" or "ghost"."""

    mode = "hooks"
    memory_format = torch.contiguous_format

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        model = problem.model()
        module = PrivacyEngine.get_compatible_module(model.module).to(memory_format=self.memory_format)
        module.train()
        self.inputs = problem.inputs
        if self.memory_format != torch.contiguous_format:
            self.inputs = problem.inputs.to(memory_format=self.memory_format)
        self.module, self.optimizer, self.criterion = self._private(module, Criterion(model.losses))

    def step(self) -> None:
        """Forward, backward and the optimiser's step."""
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        """Forward and backward; in ghost mode the criterion hides two backward passes."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.problem.precision():
            loss = self.criterion(self.module(self.inputs), self.problem.labels)
        loss.backward()

    def released(self) -> dict[str, Tensor]:
        """The parameters."""
        return {"parameters": self.flat(self.module._module)}

    def _private(self, module: nn.Module, criterion: Criterion) -> tuple[Any, Any, Any]:
        data = TensorDataset(self.inputs, self.problem.labels)
        private = PrivacyEngine(secure_mode=False).make_private(
            module=module,
            optimizer=torch.optim.SGD(trained(module).values(), lr=self.problem.learning_rate),
            criterion=criterion,
            data_loader=DataLoader(data, batch_size=len(data)),
            noise_multiplier=self.problem.noise_multiplier,
            max_grad_norm=self.problem.clip_norm,
            poisson_sampling=False,
            grad_sample_mode=self.mode,
        )
        if self.mode == "ghost":
            wrapped, optimizer, criterion, _ = private
        else:
            wrapped, optimizer, _ = private
        return wrapped, optimizer, criterion


class Hooks(Opacus):
    """Every record's gradient, materialised by a hook on each layer: the default mode."""


class HooksChannelsLast(Opacus):
    """The default mode with weights and inputs in channels-last order, and a rule for convolutions that allows it.

    Opacus 1.6.0's own rule reads any input as channels-first (`unfold2d` computes strides itself), and then returns
    wrong gradients silently; the rule registered here passes it what it expects.
    """

    memory_format = torch.channels_last

    def __init__(self, problem: Problem) -> None:
        register_grad_sampler(nn.Conv2d)(_convolution_rule)
        super().__init__(problem)


class Ghost(Opacus):
    """Norms by ghost clipping where a layer has a rule for them, then a second backward pass."""

    mode = "ghost"

"""The interface that every measured method has, and the registry of methods."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from algorithms.models import Model
from benchmarks.workloads import Workload

_OPTIONAL = ("jax", "jaxlib", "optax")
"""Packages that may be missing; an import error from any other is a defect and is raised."""


class NotAvailableError(Exception):
    """The method cannot run here; the message says what it lacks."""


@dataclass(frozen=True)
class Problem:
    """The input of a method: one batch and the settings of a step.

    The noisy sum is divided by the number of records in the batch, so with that number as the learning rate and no
    noise, a step subtracts the clipped sum itself.
    """

    workload: Workload
    inputs: Tensor
    labels: Tensor
    clip_norm: float = 1.0
    noise_multiplier: float = 1.0
    learning_rate: float = 0.01
    autocast: bool = False

    @property
    def device(self) -> torch.device:
        """The batch's device."""
        return self.inputs.device

    @property
    def noise_scale(self) -> float:
        """Standard deviation of the noise on the clipped sum."""
        return self.noise_multiplier * self.clip_norm

    def model(self) -> Model:
        """A new model at its initial parameters, on the batch's device."""
        model = self.workload.build()
        model.module.to(self.device)
        return model

    def precision(self) -> AbstractContextManager[object]:
        """The autocast context of a forward pass: bfloat16 if requested."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast)


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name, in the module's order."""
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


class Method(Protocol):
    """One way of computing a step."""

    def step(self) -> None:
        """Clip, sum, add noise, update."""

    def wait(self) -> None:
        """Wait until all started work is finished."""

    def released(self) -> dict[str, Tensor]:
        """What all methods must agree on, by name: the flat parameters, and the objectives of a line search."""


class OnTorch:
    """Base class of methods that run in PyTorch."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.trained = list(trained(problem.workload.build().module))

    def wait(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.problem.device.type != "cpu":
            torch.accelerator.synchronize(self.problem.device)

    def flat(self, module: nn.Module) -> Tensor:
        """The trained parameters as one vector in the workload's order, float64 on the CPU."""
        values = module.state_dict()
        return torch.cat([values[name].detach().reshape(-1) for name in self.trained]).double().cpu()


_STEP = {
    "plain": "peers:Plain",
    "opacus_hooks": "opacus_peers:Hooks",
    "opacus_ghost": "opacus_peers:Ghost",
    "opacus_hooks_channels_last": "opacus_peers:HooksChannelsLast",
    "vmap": "peers:PerExample",
    "jax": "jax_peer:PerExample",
    "by_hand_64": "by_hand:Sums64",
    "by_hand_32": "by_hand:Sums32",
    "ours": "ours:BookKeeping",
}

_LINE_SEARCH = {
    "plain": "line_search_peers:Plain",
    "opacus_hooks": "line_search_peers:Hooks",
    "opacus_ghost": "line_search_peers:Ghost",
    "jax": "jax_line_search:Jitted",
    "ours": "line_search:ClosedForm",
}

_AFFINE = {
    "plain": "peers:Plain",
    "materialised": "affine:Materialised",
    "ours_l2": "ours:BookKeeping",
    "ours": "affine:BookKeeping",
}

_ONLY = {"opacus_hooks_channels_last": ("W3",), "by_hand_64": ("W2",), "by_hand_32": ("W2",)}
"""Methods for some workloads only: channels-last order matters where max-pooling is slow, and the hand-written steps
support one shape of network."""


def names(workload: Workload) -> tuple[str, ...]:
    """The methods measured on a workload, in the order of the table."""
    return tuple(_import_paths(workload))


def start(name: str, problem: Problem) -> Method:
    """The named method, ready to step; raises NotAvailableError if a package or a device is missing."""
    module, _, member = _import_paths(problem.workload)[name].partition(":")
    try:
        method = getattr(import_module(f"benchmarks.{module}"), member)
    except ImportError as error:
        if error.name is None or error.name not in _OPTIONAL:
            raise
        raise NotAvailableError(f"{name} needs {error.name}, which is not installed ({error}).") from error
    return cast(Callable[[Problem], Method], method)(problem)


def _import_paths(workload: Workload) -> dict[str, str]:
    paths = {"step": _STEP, "line search": _LINE_SEARCH, "affine": _AFFINE}[workload.task]
    return {name: path for name, path in paths.items() if workload.name in _ONLY.get(name, (workload.name,))}

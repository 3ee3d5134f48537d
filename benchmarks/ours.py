"""The library's own engine as a measured method."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from algorithms.gradients import L2, Clipping, Engine
from benchmarks.methods import OnTorch, Problem


class BookKeeping(OnTorch):
    """One forward and one backward pass to the layers' outputs; L2 clipping."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        workload = problem.workload
        precision = torch.bfloat16 if problem.autocast else torch.float32
        self.model = replace(problem.model(), precision=precision)
        with as_in_a_run(problem.device):
            self.engine = Engine(
                self.model,
                input_shape=workload.input_shape,
                input_dtype=workload.input_dtype,
                device=problem.device,
                memory_mb=_memory_mb(problem.device),
            )
        self.parameters = self.model.initial_parameters()
        self.clipping: Clipping = L2(problem.clip_norm)

    def step(self) -> None:
        """The clipped sum, noise, and the update of the flat parameters."""
        noisy = self.noisy_sum()
        self.parameters.sub_(noisy, alpha=self.problem.learning_rate / len(self.problem.labels))

    def noisy_sum(self) -> Tensor:
        """The clipped sum with noise, shape [d], float32."""
        inputs, labels = self.problem.inputs, self.problem.labels
        with as_in_a_run(self.problem.device):
            total = self.engine.clipped_sum(self.parameters, inputs, labels, self.clipping)
        return torch.randn_like(self.parameters).mul_(self.problem.noise_scale).add_(total)

    def released(self) -> dict[str, Tensor]:
        """The parameters."""
        return {"parameters": self.parameters.double().cpu()}


_DETERMINISTIC: Any = torch.utils.deterministic  # a module, to whose type its one setting is unknown


@contextmanager
def as_in_a_run(device: torch.device) -> Iterator[None]:
    """On a GPU, allow repeatable operations alone within the block, as a run does; the peers may use any."""
    before = torch.are_deterministic_algorithms_enabled(), _DETERMINISTIC.fill_uninitialized_memory
    if device.type != "cpu":
        torch.use_deterministic_algorithms(True)
        _DETERMINISTIC.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        _DETERMINISTIC.fill_uninitialized_memory = before[1]


def _memory_mb(device: torch.device) -> int:
    """The memory limit of a pass: the engine's default on a CPU, half of the free memory on a GPU."""
    return 1024 if device.type == "cpu" else int(torch.accelerator.get_memory_info(device)[0] / 2e6)

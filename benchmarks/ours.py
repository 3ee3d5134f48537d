"""The library's own engine as a measured method."""

from dataclasses import replace

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
        total = self.engine.clipped_sum(self.parameters, inputs, labels, self.clipping)
        return torch.randn_like(self.parameters).mul_(self.problem.noise_scale).add_(total)

    def released(self) -> dict[str, Tensor]:
        """The parameters."""
        return {"parameters": self.parameters.double().cpu()}


def _memory_mb(device: torch.device) -> int:
    """The memory limit of a pass: the engine's default on a CPU, half of the free memory on a GPU."""
    return int(torch.cuda.mem_get_info(device)[0] / 2e6) if device.type == "cuda" else 1024

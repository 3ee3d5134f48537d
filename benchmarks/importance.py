"""Benchmark of importance sampling: `python -m benchmarks.importance`.

A step of DPIS computes the gradients of about `oversampling` times the batch, and an epoch begins with the norms of all
records. Both are compared, through the barrier, with a step of DP-SGD with the same batch on synthetic records.
"""

import time
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import typer
from dp_accounting import DpEvent
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from algorithms.gradients import L2, Normalised
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian
from algorithms.privacy.mechanisms.sampling import Importance, Poisson
from benchmarks.measure import Plan, alternate, spread
from benchmarks.methods import Method
from benchmarks.workloads import WORKLOADS, Workload

_CLIP_NORM = 0.1
_NOISE = Gaussian(1.0)


@dataclass(frozen=True)
class SyntheticRecords:
    """Synthetic records for a barrier."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]


class Free:
    """A privacy filter that allows everything, so that no accounting is measured."""

    def affords(self, event: DpEvent) -> bool:
        """Always true."""
        return True

    def charge(self, event: DpEvent) -> None:
        """Do nothing."""

    def epsilon_spent(self, delta: float) -> float:
        """Always zero."""
        return 0.0


class MeasuredMethod:
    """Base class of the three measured methods: each has its own barrier over the same records."""

    def __init__(self, workload: Workload, records: SyntheticRecords, batch: int) -> None:
        model = workload.build()
        self.point, self.batch, self.count = model.initial_parameters(), batch, len(records.labels)
        self.barrier = Barrier(
            records, model, privacy_filter=Free(), generator=seeded_generator(0), delta=1e-5, trace=Trace()
        )

    def wait(self) -> None:
        """Nothing to wait for on a CPU."""

    def released(self) -> dict[str, Tensor]:
        """The parameters at which gradients are taken."""
        return {"parameters": self.point}


class DPSGDStep(MeasuredMethod):
    """A noised gradient over a Poisson sample."""

    def step(self) -> None:
        """One release."""
        sampling, divisor = Poisson(self.batch / self.count), float(self.batch)
        self.barrier.gradient(
            self.point, sampling=sampling, clipping=L2(_CLIP_NORM), noise=_NOISE, divisor=divisor
        )


class DPISStep(MeasuredMethod):
    """A noised gradient over an importance sample with the same expected number of records."""

    def __init__(
        self, workload: Workload, records: SyntheticRecords, batch: int, oversampling: float
    ) -> None:
        super().__init__(workload, records, batch)
        total = self.barrier.norm_total(self.point, bound=L2(_CLIP_NORM), noise=_NOISE)
        rate = min(batch * _CLIP_NORM / total, 1 / oversampling)
        self.sampling = Importance(rate, oversampling)

    def step(self) -> None:
        """One release."""
        self.barrier.gradient(
            self.point,
            sampling=self.sampling,
            clipping=Normalised(_CLIP_NORM),
            noise=_NOISE,
            divisor=self.sampling.rate * self.count,
        )


class NormPass(MeasuredMethod):
    """The norms of all records, at new parameters each time, since the barrier caches them at the last ones."""

    def step(self) -> None:
        """One release."""
        self.point = self.point + 1e-6
        self.barrier.norm_total(self.point, bound=L2(_CLIP_NORM), noise=_NOISE)


def main(
    workload: Annotated[str, typer.Option(help="Whose model and shape.")] = "W3",
    records: int = 60_000,
    batch: int = 600,
    oversampling: float = 5.0,
    rounds: Annotated[int, typer.Option(min=2)] = 5,
) -> None:
    """Measure a step of DPIS and a pass for norms, relative to DP-SGD with the same batch; CPU time on one thread."""
    torch.set_num_threads(1)
    chosen = WORKLOADS[workload]
    inputs, labels = chosen.data(records, torch.device("cpu"))
    data = SyntheticRecords(inputs.numpy(), labels.numpy())
    methods: dict[str, Method] = {
        "DP-SGD step": DPSGDStep(chosen, data, batch),
        "DPIS step": DPISStep(chosen, data, batch, oversampling),
        "pass for norms": NormPass(chosen, data, batch),
    }
    times = alternate(methods, Plan(rounds=rounds, warmup=1, repeat=True), time.process_time)
    medians = {name: spread(values)["median"] for name, values in times.items()}
    step, console = medians["DP-SGD step"], Console()
    for name, median in medians.items():
        console.print(f"{name}: {median:.1f} ms")
    console.print(f"DPIS step / DP-SGD step: {medians['DPIS step'] / step:.2f}")
    epoch = records / batch * step
    console.print(f"pass for norms / epoch of DP-SGD steps: {medians['pass for norms'] / epoch:.2f}")


if __name__ == "__main__":
    typer.run(main)

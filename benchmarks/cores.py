"""Benchmark of passes in parallel: `python -m benchmarks.cores`.

Workers and threads are compared by wall time in one process, in rounds of random order. On a shared machine only the
ratios within one run are meaningful.
"""

import os
import random
import statistics
import time
from collections import deque
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torch import Tensor

from algorithms.gradients import L2, Engine, split_passes
from algorithms.privacy.barrier.barrier import ComputeConfig
from algorithms.privacy.barrier.fixed_arithmetic import fixed_arithmetic
from algorithms.privacy.barrier.pass_pool import pass_pool
from benchmarks.workloads import WORKLOADS

_SETTINGS = [(1, 1), (2, 1), (1, 2)]
"""Workers, and threads of each."""


def main(
    workloads: Annotated[str, typer.Option(help="Comma-separated.")] = "W3,W4cnn,W6,vit-tiny",
    rounds: Annotated[int, typer.Option(min=2)] = 9,
) -> None:
    """Print the speed-up of a clipped sum over four batches with several workers or threads over one of each."""
    settings = _SETTINGS + [(count, 1) for count in (4, 8) if count <= (os.cpu_count() or 1)]
    typer.echo(f"{'workload':10}" + "".join(f"{w} x {t:<8}" for w, t in settings) + "passes")
    for name in workloads.split(","):
        times, passes = _times(name, settings, rounds)
        typer.echo(f"{name:10}" + "".join(f"{times[0] / each:<12.2f}" for each in times) + str(passes))


def _times(name: str, settings: list[tuple[int, int]], rounds: int) -> tuple[list[float], int]:
    """Median seconds of a sum under each setting, and the number of passes in it."""
    workload = WORKLOADS[name]
    model = workload.build()
    inputs, labels = workload.data(4 * workload.batch, torch.device("cpu"))
    records = _Held(inputs.numpy(), labels.numpy())
    engine = ComputeConfig().engine(model, records)
    point, rows = model.initial_parameters(), np.arange(len(labels))
    passes = list(split_passes(rows, engine.physical_batch))
    seconds_of: dict[tuple[int, int], list[float]] = {each: [] for each in settings}
    for number in range(rounds):
        for workers, threads in random.Random(number).sample(settings, len(settings)):
            torch.set_num_threads(threads)
            compute = replace(ComputeConfig(memory_mb=8192), workers=workers, threads=threads)
            pool = pass_pool(compute, engine, model.parameter_count)

            def run(engine: Engine, some: NDArray[np.intp]) -> Tensor:
                return engine.clipped_sum(point, inputs[some], labels[some], L2(1.0))

            with fixed_arithmetic(compute, engine):
                for _ in range(2):  # the first starts the threads
                    begin = time.perf_counter()
                    deque(pool.map(run, passes), maxlen=0)
                    seconds = time.perf_counter() - begin
            seconds_of[workers, threads].append(seconds)
    return [statistics.median(seconds_of[each]) for each in settings], len(passes)


class _Held:
    """Records for a barrier."""

    def __init__(self, features: np.ndarray, labels: np.ndarray) -> None:
        self.features, self.labels = features, labels


if __name__ == "__main__":
    typer.run(main)

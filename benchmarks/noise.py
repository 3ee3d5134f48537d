"""Benchmark of noise: `python -m benchmarks.noise`.

First the normal draws that a core makes in a second. Then how long a release waits for them: a release without noise,
its noise alone, adding that noise, and the release with noise, which is drawn while the barrier sums, by wall time in
rounds of random order. The sum keeps one core busy, so that noise has the others.
"""

import os
import statistics
import time
from typing import Annotated

import numpy as np
import torch
import typer
from torch import nn

from algorithms.gradients import L2
from algorithms.models import Model
from algorithms.models.objectives import cross_entropy
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import add_steps, seeded_generator, steps_of
from algorithms.privacy.mechanisms.release import Gaussian, Mechanism, NoNoise
from algorithms.privacy.mechanisms.sampling import FullBatch
from benchmarks.importance import Free, SyntheticRecords
from benchmarks.measure import Plan, Timed, alternate

_DRAWS = 4_000_000


def main(
    width: Annotated[int, typer.Option(help="The dense network has twice its square in parameters.")] = 2048,
    records: Annotated[int, typer.Option(min=1)] = 512,
    rounds: Annotated[int, typer.Option(min=2)] = 7,
) -> None:
    """Print draws a second and core, and the wall time of a sum, of its noise and of both together."""
    torch.set_num_threads(1)
    stream = seeded_generator(0).stream(0)
    stream.normal(_DRAWS)
    began = time.process_time()
    stream.normal(_DRAWS)
    typer.echo(f"normal draws a second and core: {_DRAWS / (time.process_time() - began) / 1e6:.1f} million")

    module = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    model = Model("dense", module, cross_entropy, lambda outputs: outputs)
    count, parameters = model.parameter_count, model.initial_parameters()
    made_up = np.random.default_rng(0)
    held = SyntheticRecords(
        made_up.standard_normal((records, width), np.float32), made_up.integers(width, size=records)
    )
    barrier = Barrier(
        held,
        model,
        privacy_filter=Free(),
        generator=seeded_generator(0),
        delta=1e-5,
        trace=Trace(),
        compute=ComputeConfig(workers=1, threads=1),
    )

    def release(noise: Mechanism) -> None:
        barrier.gradient(parameters, sampling=FullBatch(), clipping=L2(1.0), noise=noise, divisor=records)

    total, steps = torch.zeros(count, dtype=torch.float64), steps_of(stream.normal(count), std=1.0)
    parts = {
        "sum": Timed(lambda: release(NoNoise())),
        "noise": Timed(lambda: steps_of(stream.normal(count), std=1.0)),
        "adding": Timed(lambda: add_steps(total, steps, std=1.0)),
        "release": Timed(lambda: release(Gaussian(1.0))),
    }
    times = alternate(parts, Plan(rounds=rounds, warmup=1, repeat=False), time.perf_counter)
    seconds = {name: statistics.median(each) for name, each in times.items()}
    waited = max(0.0, seconds["release"] - seconds["sum"] - seconds["adding"])
    typer.echo(
        f"{count:,} parameters, {records} records, {os.cpu_count()} cores: "
        + ", ".join(f"{name} {each:.2f} s" for name, each in seconds.items())
        + f"; waited for noise: {waited:.2f} s"
    )


if __name__ == "__main__":
    typer.run(main)

"""Whitening before the clip, after section 4.3 of the AdaCliP paper: `python -m comparisons.adaclip_whitening FOLDER`.

Pichapati, Suresh, Yu, Reddi and Kumar 2019 (arXiv:1908.07643). Theorem 1 has one scale a coordinate; whitening by
principal components that are released once has one a direction. Logistic regression on MNIST, where a record's gradient
is (p - y) x^T, so that the directions are those of the records' second moment: a noisy moment of records of unit length
gives M, and the released gradient is sum clip((p - y) (M x)^T) plus noise, times M^-1. Only clipping and noise change,
not the step. The moment's noise is charged; DP-SGD without one has the whole budget for its steps.

M is V diag(values^-power) V^T: power 1/2 whitens, 1/4 is Theorem 1's choice b_i^2 ~ s_i for directions, and "diagonal"
that for coordinates. Eigenvalues below the noise's are raised to half of it, as in `algorithms.features`, and M is
scaled so that records keep their mean square length: one clip norm suits all. The records are public, so noise is
seeded and the sweep charged to nobody.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import dp_accounting as dp
import numpy as np
import pandas as pd
import torch
import typer
from torch import Tensor
from torch.nn import functional

from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.noise_search import calibrate
from data.readers.records import RecordBatch
from tasks.comparing.trial import trial_records
from tasks.comparing.work import prepare_data, work_of

COMPARISON = Path(__file__).with_name("adaclip.yaml")
BATCH, STEPS, CLIP_NORM, MOMENT_NOISE, DELTA = 600, 1000, 4.0, 16.0, 1e-5
EPSILONS = (0.5, 2.0)
RATES = (0.12, 0.25, 0.5, 1.0)
CLASSES = 10


@dataclass(frozen=True)
class Shape:
    """How noise is shaped: by which power of the moment, and whether by its diagonal alone."""

    power: float = 0.0
    diagonal: bool = False

    @property
    def moment_noise(self) -> float | None:
        """The noise multiplier of the moment, where one is released."""
        return MOMENT_NOISE if self.power else None


SHAPES = {
    "DP-SGD": Shape(),
    "diagonal, power 1/4": Shape(0.25, diagonal=True),
    "directions, power 1/4": Shape(0.25),
    "directions, power 1/2 (whitening)": Shape(0.5),
}


def transform_of(shape: Shape, inputs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """M and its inverse, [d, d] each, from a noisy second moment of `inputs`, [n, d]."""
    records, features = inputs.shape
    if not shape.power:
        return torch.eye(features), torch.eye(features)
    unit = functional.normalize(inputs, dim=1).double()
    noise = torch.randn((features, features), generator=generator, dtype=torch.float64).triu()
    moment = (unit.T @ unit + MOMENT_NOISE * (noise + noise.triu(1).T)) / records
    values, vectors = torch.linalg.eigh(torch.diag(moment.diagonal()) if shape.diagonal else moment)
    of_noise = MOMENT_NOISE * (1.0 if shape.diagonal else features**0.5) / records
    shown = (values - of_noise).clamp(min=0.0)
    factors = (shown + of_noise / 2.0) ** -shape.power
    factors *= (shown.sum() / (factors.square() * shown).sum()).sqrt()
    return tuple((vectors @ torch.diag(f) @ vectors.T).float() for f in (factors, 1.0 / factors))


def multiplier_of(shape: Shape, epsilon: float, records: int) -> float:
    """The noise multiplier of the steps that is left by the moment's release."""
    moment = [] if shape.moment_noise is None else [(dp.GaussianDpEvent(shape.moment_noise), 1)]
    return calibrate(
        lambda z: [*moment, (dp.PoissonSampledDpEvent(BATCH / records, dp.GaussianDpEvent(z)), STEPS)],
        Budget(epsilon, DELTA),
    )


def noisy_gradient(
    weights: Tensor, batch: tuple[Tensor, Tensor, Tensor], inverse: Tensor, noise: Tensor
) -> Tensor:
    """The mean of clipped gradients, [d, classes], with noise as it lies behind the transform.

    batch: records [b, d], their labels [b], and the length of each after the transform, [b]. noise: [d, classes].
    """
    inputs, labels, lengths = batch
    residual = torch.softmax(inputs @ weights, dim=1) - functional.one_hot(labels, CLASSES)
    norms = lengths * residual.norm(dim=1)
    clipped = residual * (CLIP_NORM / norms.clamp(min=CLIP_NORM))[:, None]
    mean: Tensor = (inputs.T @ clipped + inverse @ noise) / BATCH
    return mean


@dataclass(frozen=True)
class Case:
    """What runs with one way of shaping noise share, whatever their learning rate; lengths: see `noisy_gradient`."""

    inputs: Tensor
    labels: Tensor
    lengths: Tensor
    inverse: Tensor
    multiplier: float


def case_of(shape: Shape, train: RecordBatch, *, epsilon: float, generator: torch.Generator) -> Case:
    """The records, as vectors that end with a 1, and the noise that is left for the steps."""
    inputs, labels = as_vectors(train.features), torch.tensor(train.labels)
    transform, inverse = transform_of(shape, inputs, generator)
    return Case(
        inputs, labels, (inputs @ transform).norm(dim=1), inverse, multiplier_of(shape, epsilon, len(labels))
    )


def as_vectors(features: np.ndarray) -> Tensor:
    """Records as rows, [n, d], each with a last feature of 1 for the bias."""
    return functional.pad(torch.tensor(features).flatten(1), (0, 1), value=1.0)


def descend(case: Case, rate: float, *, steps: int, generator: torch.Generator) -> Tensor:
    """The weights after `steps` steps from zero, [d, classes]."""
    weights = torch.zeros(case.inputs.shape[1], CLASSES)
    for _ in range(steps):
        chosen = (torch.rand(len(case.inputs), generator=generator) < BATCH / len(case.inputs)).nonzero()[
            :, 0
        ]
        noise = CLIP_NORM * case.multiplier * torch.randn(weights.shape, generator=generator)
        batch = (case.inputs[chosen], case.labels[chosen], case.lengths[chosen])
        weights = weights - rate * noisy_gradient(weights, batch, case.inverse, noise)
    return weights


def main(
    folder: Annotated[
        Path, typer.Argument(help="Where adaclip-whitening.csv goes; made if it is not there.")
    ],
    seeds: Annotated[int, typer.Option(help="How many runs of each case.")] = 2,
    steps: Annotated[int, typer.Option(help="How many steps each takes.")] = STEPS,
) -> None:
    """Compare ways of shaping the noise at equal epsilon, each at its best learning rate."""
    torch.set_num_threads(1)
    work = work_of(COMPARISON, Path.cwd())
    prepare_data(work)
    data, rows = trial_records(work.context.workspace.store, work.trials[0]), []
    held_out, labels = as_vectors(data.test.features), torch.tensor(data.test.labels)
    for epsilon, (name, shape), seed in product(EPSILONS, SHAPES.items(), range(seeds)):
        generator = torch.Generator().manual_seed(seed)
        case = case_of(shape, data.train, epsilon=epsilon, generator=generator)
        for rate in RATES:
            weights = descend(case, rate, steps=steps, generator=generator)
            right = float(((held_out @ weights).argmax(dim=1) == labels).float().mean())
            rows.append({"epsilon": epsilon, "shape": name, "rate": rate, "seed": seed, "accuracy": right})
    folder.mkdir(parents=True, exist_ok=True)
    runs = pd.DataFrame(rows).groupby(["epsilon", "shape", "rate"], sort=False)["accuracy"]
    runs.agg(["mean", "sem", "count"]).round(5).reset_index().to_csv(
        folder / "adaclip-whitening.csv", index=False
    )


if __name__ == "__main__":
    typer.run(main)

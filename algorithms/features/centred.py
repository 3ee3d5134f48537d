"""Private centring of records of unit length, and whitening to a power: for the features of a frozen encoder.

The mean and the second moment are Gaussian releases, the moment as in "Analyze Gauss" (Dwork et al. 2014, Algorithm 1).
A record is divided by its length first, by itself, so that both have a sensitivity of 1.
"""

import copy
from dataclasses import dataclass
from math import prod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from algorithms.core.features import Positive
from algorithms.core.optimizers import STRICT
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.models import Model
from algorithms.models.feature_transforms import Centring, Shape, front_of
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Gaussian, Release, total_release

_MOST = 4096
"""Features whose second moment is released: it has half their square of numbers, and each is noise to the others."""


@dataclass(frozen=True)
class Centred:
    """Records, flat and of unit length, less their noisy mean, whitened by a noisy second moment.

    mean_noise, moment_noise: noise multipliers of the two releases; without the second there is no whitening. power: of
    the inverse second moment that the record is multiplied by, 0.5 for full whitening. ridge: what is added to the
    moment's eigenvalues, relative to the largest. head_noise: noise multiplier of the sums of what comes out, of unit
    length, over each class: a linear head starts at them, its rows head_length long on average; without it the head
    starts as the model says.
    """

    mean_noise: Positive = 40.0
    moment_noise: Positive | None = None
    power: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    ridge: Positive = 0.01
    head_noise: Positive | None = None
    head_length: Positive = 10.0

    __pydantic_config__ = STRICT

    def releases(self, shape: Shape) -> list[Release]:
        """A sum of records, then a sum of second moments, then the sums of the classes."""
        if self.moment_noise is not None and prod(shape) > _MOST:
            raise RefusedError(
                f"whitening records of shape {list(shape)} was asked for, and at most {_MOST} features can be; leave"
                " features.moment_noise out."
            )
        noises = (self.mean_noise, self.moment_noise, self.head_noise)
        return [total_release(L2(1.0), Gaussian(noise)) for noise in noises if noise is not None]

    def learn(self, barrier: Barrier, shape: Shape, records: float) -> dict[str, Tensor]:
        """mean [d]; matrix [d, d], the second moment to minus the power."""
        made = self.module(shape)
        total = barrier.total(
            lambda record, _label: made.normalised(record[None])[0],
            bound=L2(1.0),
            noise=Gaussian(self.mean_noise),
        )
        mean = (total / records).float()
        if self.moment_noise is None:
            return {"mean": mean}

        def centred(record: Tensor, _label: Tensor) -> Tensor:
            return made.normalised(record[None]) - mean.to(record.device)

        moment = barrier.moment(centred, bound=L2(1.0), noise=Gaussian(self.moment_noise)) / records
        values, vectors = torch.linalg.eigh(moment)
        values = values.clamp(min=0.0) + self.ridge * float(values.max().clamp(min=1e-12))
        matrix = vectors @ torch.diag(values**-self.power) @ vectors.T
        return {"mean": mean, "matrix": matrix.float()}

    def check(self, model: Model) -> None:
        """Raises RefusedError where class sums are asked for, and the model behind has no linear head alone."""
        if self.head_noise is not None:
            _head_of(model)

    def start(self, barrier: Barrier, model: Model) -> Tensor:
        """The model's parameters to start at, [parameters]; behind the map with what was learned."""
        parameters = model.initial_parameters()
        if self.head_noise is None:
            return parameters
        name, rows = _head_of(model)
        made = copy.deepcopy(front_of(model))
        assert made is not None

        def of_its_class(record: Tensor, label: Tensor) -> Tensor:
            mapped = made.to(record.device)(record[None])
            unit = mapped / torch.linalg.vector_norm(mapped).clamp(min=1e-6)
            every = torch.arange(rows, device=record.device)
            signs = (label == every) if rows > 1 else 2 * label[None] - 1
            found: Tensor = signs.to(unit.dtype)[:, None] * unit
            return found.reshape(-1)

        sums = barrier.total(of_its_class, bound=L2(1.0), noise=Gaussian(self.head_noise)).float()
        length = torch.linalg.vector_norm(sums) / rows**0.5
        parameters[model.places[name]] = self.head_length * sums / length.clamp(min=1e-6)
        return parameters

    def module(self, shape: Shape) -> Centring:
        """Before anything is learned it brings records to unit length."""
        return Centring(shape, whitens=self.moment_noise is not None)


def _head_of(model: Model) -> tuple[str, int]:
    """The name of the one matrix of a linear model of classes, and its number of rows."""
    matrices = [name for name, shape in model.shapes.items() if len(shape) == 2]
    others = [name for name, shape in model.shapes.items() if len(shape) > 2]
    if len(matrices) != 1 or others or model.label_shape or model.label_dtype != torch.int64:
        raise RefusedError(
            "features.head_noise starts a linear head at the sums of classes, and the model"
            f" {model.name!r} is no such head; choose unit_linear, softmax or logistic, or leave head_noise out."
        )
    return matrices[0], model.shapes[matrices[0]][0]

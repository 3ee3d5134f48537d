"""Private centring of records of unit length, and whitening to a power: for the features of a frozen encoder.

The mean and the second moment are Gaussian releases, the moment as in "Analyze Gauss" (Dwork et al. 2014, Algorithm 1).
A record is divided by its length first, by itself, so that both have a sensitivity of 1.
"""

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
from algorithms.models.feature_transforms import Centring, Shape
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Gaussian, Release, total_release

_MOST = 4096
"""Features whose second moment is released: it has half their square of numbers, and each is noise to the others."""


@dataclass(frozen=True)
class Centred:
    """Records, flat and of unit length, less their noisy mean, whitened by a noisy second moment.

    mean_noise, moment_noise: noise multipliers of the two releases; without the second there is no whitening. power: of
    the inverse second moment that the record is multiplied by, 0.5 for full whitening. ridge: what is added to the
    moment's eigenvalues, relative to the largest.
    """

    mean_noise: Positive = 40.0
    moment_noise: Positive | None = None
    power: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    ridge: Positive = 0.01

    __pydantic_config__ = STRICT

    def releases(self, shape: Shape) -> list[Release]:
        """A sum of records, then a sum of second moments."""
        if self.moment_noise is not None and prod(shape) > _MOST:
            raise RefusedError(
                f"whitening records of shape {list(shape)} was asked for, and at most {_MOST} features can be; leave"
                " features.moment_noise out."
            )
        noises = [self.mean_noise] if self.moment_noise is None else [self.mean_noise, self.moment_noise]
        return [total_release(L2(1.0), Gaussian(noise)) for noise in noises]

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

    def module(self, shape: Shape) -> Centring:
        """Before anything is learned it brings records to unit length."""
        return Centring(shape, whitens=self.moment_noise is not None)

"""Private whitening: channels are decorrelated by a noisy second moment, so that one step size suits all directions.

The moments are Gaussian releases, the second as in "Analyze Gauss" (Dwork et al. 2014, Algorithm 1).
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from algorithms.core.features import Positive
from algorithms.core.optimizers import STRICT
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.models.feature_transforms import Shape, Whitening
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Gaussian, Release, total_release


@dataclass(frozen=True)
class Whitened:
    """Maps [c, h, w], centred by their mean and with channels whitened by their second moment.

    groups: of a group normalisation before it, which takes each record by itself, or 0 for none. mean_noise,
    moment_noise: noise multipliers of the two releases. map_norm: L2 bound of a record's map, by default that of a
    normalised one, sqrt(c h w). moment_bound: of the Frobenius norm of a record's second moment, averaged over
    positions, by default a quarter of that of a normalised map, c. ridge: what is added to the second moment's
    eigenvalues, relative to their mean.
    """

    groups: Annotated[int, Field(ge=0)] = 27
    mean_noise: Positive = 30.0
    moment_noise: Positive = 20.0
    map_norm: Positive | None = None
    moment_bound: Positive | None = None
    ridge: Positive = 0.3

    __pydantic_config__ = STRICT

    def releases(self, shape: Shape) -> list[Release]:
        """A sum of maps, then a sum of second moments."""
        self._check(shape)
        return [
            total_release(self._map_bound(shape), Gaussian(self.mean_noise)),
            total_release(self._moment_bound(shape), Gaussian(self.moment_noise)),
        ]

    def learn(self, barrier: Barrier, shape: Shape, records: float) -> dict[str, Tensor]:
        """mean [c, h, w]; matrix [c, c], the inverse square root of the second moment of the channels."""
        positions, normalised = shape[1] * shape[2], self.module(shape).normalised

        def flat(record: Tensor, _label: Tensor) -> Tensor:
            return normalised(record[None])[0].flatten()

        total = barrier.total(flat, bound=self._map_bound(shape), noise=Gaussian(self.mean_noise))
        mean = (total / records).float().view(shape)

        def centred(record: Tensor, _label: Tensor) -> Tensor:
            found = normalised(record[None])[0] - mean.to(record.device)
            return found.flatten(1).T / math.sqrt(positions)

        noise = Gaussian(self.moment_noise)
        moment = barrier.moment(centred, bound=self._moment_bound(shape), noise=noise) / records
        return {"mean": mean, "matrix": _inverse_root(moment, self.ridge).float()}

    def module(self, shape: Shape) -> Whitening:
        """Before anything is learned it centres by 0 and leaves the channels as they are."""
        return Whitening(shape, groups=self.groups)

    def _map_bound(self, shape: Shape) -> L2:
        return L2(self.map_norm or math.sqrt(math.prod(shape)))

    def _moment_bound(self, shape: Shape) -> L2:
        return L2(self.moment_bound or shape[0] / 4)

    def _check(self, shape: Shape) -> None:
        if len(shape) != 3 or (self.groups and shape[0] % self.groups):
            raise RefusedError(
                f"whitening takes maps (channels, height, width) whose channels make {self.groups or 1} groups, not"
                f" records of shape {list(shape)}; set data.transform to scattering, or features.groups to 0."
            )


def _inverse_root(moment: Tensor, ridge: float) -> Tensor:
    """The inverse square root of a noisy second moment [c, c], its mean eigenvalue times `ridge` added to all."""
    values, vectors = torch.linalg.eigh(moment)
    least = ridge * float(values.mean().clamp(min=1e-12))
    root: Tensor = vectors @ torch.diag((values.clamp(min=0.0) + least).rsqrt()) @ vectors.T
    return root

"""Private principal component analysis (Dwork et al. 2014, "Analyze Gauss"; Abadi et al. 2016, Section 4)."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from algorithms.core.features import Positive
from algorithms.core.optimizers import STRICT
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.models.feature_transforms import Projection, Shape
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Gaussian, Release, total_release


@dataclass(frozen=True)
class PrincipalComponents:
    """Projection on the first principal components of noisy second moments (Dwork et al. 2014; Abadi et al. 2016).

    components: how many. noise: multiplier of the release. Records are scaled to norm 1 for the second moments, and
    projected as they are. Without centring, as in the paper.
    """

    components: Annotated[int, Field(ge=1)] = 60
    noise: Positive = 16.0

    __pydantic_config__ = STRICT

    def releases(self, shape: Shape) -> list[Release]:
        """A sum of second moments."""
        if self.components > math.prod(shape):
            raise RefusedError(
                f"{self.components} principal components were asked for, of records with {math.prod(shape)} features;"
                " set features.components to at most that."
            )
        return [total_release(L2(1.0), Gaussian(self.noise))]

    def learn(self, barrier: Barrier, shape: Shape, records: float) -> dict[str, Tensor]:
        """components [features, components], orthonormal."""

        def unit(record: Tensor, _label: Tensor) -> Tensor:
            return functional.normalize(record.flatten(), dim=0)[None]

        moment = barrier.moment(unit, bound=L2(1.0), noise=Gaussian(self.noise))
        vectors = torch.linalg.eigh(moment).eigenvectors
        return {"components": vectors[:, -self.components :].flip(1).float().contiguous()}

    def module(self, shape: Shape) -> Projection:
        """Before anything is learned it keeps the first features."""
        return Projection(shape, components=self.components)

"""Private data normalisation: channel means and variances from noisy sums (Tramèr and Boneh 2021, Section 2.2)."""

from dataclasses import dataclass

from torch import Tensor

from algorithms.core.features import Positive
from algorithms.core.optimizers import STRICT
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.models.feature_transforms import Shape, Standardisation
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Gaussian, Release, total_release


@dataclass(frozen=True)
class Standardised:
    """Channels of maps [c, h, w] with noisy mean 0 and variance 1 ("data normalisation", Tramèr and Boneh 2021).

    noise: multiplier of both releases. mean_bound, square_bound: L2 bounds of a record's channel means, and of its
    channel mean squares; public.
    """

    noise: Positive = 8.0
    mean_bound: Positive = 1.0
    square_bound: Positive = 1.0

    __pydantic_config__ = STRICT

    def releases(self, shape: Shape) -> list[Release]:
        """A sum of channel means, then of channel mean squares."""
        if len(shape) != 3:
            raise RefusedError(
                f"standardisation takes maps (channels, height, width), not records of shape {list(shape)};"
                " leave features.name at none."
            )
        bounds = (self.mean_bound, self.square_bound)
        return [total_release(L2(bound), Gaussian(self.noise)) for bound in bounds]

    def learn(self, barrier: Barrier, shape: Shape, records: float) -> dict[str, Tensor]:
        """mean, scale: [c, 1, 1]."""
        noise = Gaussian(self.noise)
        mean, square = (
            barrier.total(statistic, bound=L2(bound), noise=noise) / records
            for statistic, bound in ((_means, self.mean_bound), (_mean_squares, self.square_bound))
        )
        variance = (square - mean.square()).clamp(min=0.0) + 1e-5
        return {"mean": mean.float()[:, None, None], "scale": variance.rsqrt().float()[:, None, None]}

    def module(self, shape: Shape) -> Standardisation:
        """Before anything is learned it changes nothing."""
        return Standardisation(shape)


def _means(record: Tensor, _label: Tensor) -> Tensor:
    return record.mean(dim=(1, 2))


def _mean_squares(record: Tensor, _label: Tensor) -> Tensor:
    return record.square().mean(dim=(1, 2))

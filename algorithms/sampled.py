"""What algorithms on Poisson samples share: the rate, their state, and the count where the number is private."""

from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.algorithm import Plan, Public
from algorithms.gradients import L2
from algorithms.privacy.barrier import Barrier
from algorithms.privacy.errors import Refused
from algorithms.privacy.releases import Gaussian, Release, total_release
from algorithms.update import Moving


@dataclass(frozen=True)
class Batches:
    """How records are sampled: `rate` for each record, and the public divisor where the number of records is public."""

    rate: float
    divisor: float | None


@dataclass(frozen=True)
class State:
    """moving: what the update moves. divisor: [], the public number sums are divided by; 0 until it is released."""

    moving: Moving
    divisor: Tensor

    @property
    def parameters(self) -> Tensor:
        """Where the next gradient is taken, shape [d]."""
        return self.moving.parameters


def batches(public: Public, *, batch_size: int | None, sampling_rate: float | None) -> Batches:
    """The sampling that the settings ask for.

    Raises Refused when a batch is larger than the data, and unless exactly the setting is given that fits:
    `batch_size` where the number of records is public, `sampling_rate` where it is private.
    """
    if public.records is None:
        if sampling_rate is None:
            raise Refused(
                "the number of records is private, so batch_size cannot become a sampling rate;"
                " set algorithm.sampling_rate and leave batch_size empty."
            )
        return Batches(sampling_rate, None)
    if batch_size is None:
        raise Refused("algorithm.batch_size is empty; give the expected number of records in a batch.")
    if batch_size > public.records:
        raise Refused(
            f"a batch of {batch_size} was asked for, but there are {public.records} training records;"
            f" set algorithm.batch_size to at most {public.records}."
        )
    return Batches(batch_size / public.records, float(batch_size))


def count_release(noise_multiplier: float) -> Release:
    """The release of the number of records, for data sets where that number is private."""
    return total_release(L2(1.0), Gaussian(noise_multiplier))


def expected_batch(barrier: Barrier, plan: Plan) -> float:
    """The expected batch size by a released count, at least 1."""
    one = torch.ones(1)
    noise = Gaussian(plan.target.count_noise)
    count = barrier.total(lambda features, label: one, bound=L2(1.0), noise=noise)
    return max(1.0, plan.sampling_rate * float(count))

"""Every kind of query of a barrier, and what each costs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import dp_accounting as dp
import pytest
import torch
from torch import Tensor

from algorithms.gradients import L2, Normalised
from algorithms.privacy.accounting.events import ObjectivePerturbationDpEvent, PureDpEvent
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.statistics import as_vector
from algorithms.privacy.mechanisms.release import Gaussian, Gumbel, KNorm, Mechanism, Minimum, ObjectiveNoise
from algorithms.privacy.mechanisms.sampling import FullBatch, Importance, Poisson, Sampling
from tests.support.bench import small_model

PARAMETERS = small_model().initial_parameters()
BINARY = small_model("logistic", classes=2)
PROBLEM = Minimum(clip_norm=1.0, regularisation=1.0, tolerance=1e-6, input_norm=4.0, curvature=4.0)
WHOLE, NOISE, GAUSSIAN = FullBatch(), Gaussian(2.0), dp.GaussianDpEvent(2.0)
Ask = Callable[..., Any]


def gradient(asked: Barrier, sampling: Sampling = WHOLE) -> Tensor:
    clipping = Normalised(1.0) if isinstance(sampling, Importance) else L2(1.0)
    return asked.gradient(PARAMETERS, sampling=sampling, clipping=clipping, noise=NOISE, divisor=1.0)


def pure_gradient(asked: Barrier) -> Tensor:
    return asked.gradient(PARAMETERS, sampling=WHOLE, clipping=L2(1.0), noise=KNorm(2.0), divisor=1.0)


def total(asked: Barrier, sampling: Sampling | None = None) -> Tensor:
    return asked.total(lambda one, label: one.flatten(), bound=L2(1.0), noise=NOISE, sampling=sampling)


def histograms(asked: Barrier) -> Tensor:
    """Of 16 features, each positive or not."""
    return asked.histograms(lambda one, label: (one.flatten() > 0).long(), [2] * 16, noise=NOISE)


def moment(asked: Barrier) -> Tensor:
    return as_vector(asked.moment(lambda one, label: one[0], bound=L2(1.0), noise=NOISE))


def norm_total(asked: Barrier) -> float:
    return asked.norm_total(PARAMETERS, bound=L2(1.0), noise=NOISE)


def norm_count(asked: Barrier, sampling: Sampling | None = None) -> float:
    return asked.norm_count(PARAMETERS, bound=L2(1.0), noise=NOISE, sampling=sampling)


def argmin(asked: Barrier, sampling: Sampling | None = None) -> int:
    return asked.argmin(torch.stack([PARAMETERS] * 2), bound=1.0, noise=Gumbel(0.5), sampling=sampling)


def loss_gain(asked: Barrier) -> float:
    return asked.loss_gain(PARAMETERS, PARAMETERS + 1.0, bound=L2(1.0), noise=NOISE)


def minimum(asked: Barrier, noise: Mechanism = NOISE) -> Tensor:
    return asked.with_model(BINARY).minimum(PROBLEM, noise=noise)


QUESTIONS: dict[str, tuple[Ask, dp.DpEvent]] = {
    "gradient": (gradient, GAUSSIAN),
    "pure gradient": (pure_gradient, PureDpEvent(0.5)),
    "total": (total, GAUSSIAN),
    "histograms": (histograms, GAUSSIAN),
    "moment": (moment, GAUSSIAN),
    "norm total": (norm_total, GAUSSIAN),
    "norm count": (norm_count, GAUSSIAN),
    "argmin": (argmin, dp.dp_event.ZCDpEvent(0.5)),
    "loss gain": (loss_gain, GAUSSIAN),
    "minimum": (minimum, GAUSSIAN),
    "minimum with noise inside": (
        partial(minimum, noise=ObjectiveNoise(2.0, 2.0)),
        dp.ComposedDpEvent([ObjectivePerturbationDpEvent(2.0, 4.0), GAUSSIAN]),
    ),
    **{
        f"{ask.__name__} of a sample": (partial(ask, sampling=Poisson(0.5)), dp.PoissonSampledDpEvent(0.5, event))
        for ask, event in (
            (gradient, GAUSSIAN), (total, GAUSSIAN), (norm_count, GAUSSIAN), (argmin, PureDpEvent(2.0)),
        )
    },
    "gradient of an importance sample": (
        partial(gradient, sampling=Importance(0.5, oversampling=2.0)),
        dp.PoissonSampledDpEvent(0.5, GAUSSIAN),
    ),
}  # fmt: skip
"""Every kind of release with what it costs."""
every_question = pytest.mark.parametrize("kind", list(QUESTIONS))

"""The release of a minimum: the regularised objective over all records, noise in it or on what was found."""

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.errors import RefusedError
from algorithms.gradients import linear_layer
from algorithms.gradients.minimum import Objective, exact_minimum, minimum
from algorithms.models import Model
from algorithms.privacy.mechanisms.noise import Stream
from algorithms.privacy.mechanisms.release import (
    Minimum,
    Noise,
    NoNoise,
    ObjectiveNoise,
    Release,
    add_noise,
    draws,
    minimum_release,
)

_NO_BOUND = 1e150
"""Above the norm of any record and gradient, yet finite."""


def check(model: Model, problem: Minimum, noise: Noise) -> None:
    """Raises RefusedError where the minimum of a model's losses cannot be bounded as `problem` says."""
    layer = linear_layer(model.module)
    if layer is None or layer.out_features != 1 or model.bounds is None:
        raise RefusedError(
            f"the model {model.name} is not a linear model with one output and a bounded loss; use 'logistic'."
        )
    if isinstance(noise, NoNoise):
        return
    most = model.bounds.curvature * problem.input_norm**2
    if not problem.curvature < math.inf or problem.curvature < most * (1 - 1e-12):
        raise RefusedError(
            f"a curvature of {problem.curvature:g} was declared, but losses of {model.name} have up to {most:g};"
            " take a smooth loss and declare at least that."
        )


def minimised(
    model: Model, features: NDArray[np.float32], labels: NDArray[np.int64], release: Release, stream: Stream
) -> Tensor:
    """The answer to the release of a minimum, shape [d], float64."""
    problem = release.clipping
    if not isinstance(problem, Minimum):
        raise TypeError(f"{release} does not ask for a minimum")
    tilt = np.zeros(model.parameter_count)
    if isinstance(release.noise, ObjectiveNoise):
        tilt = release.noise_scale * draws(release, stream, len(tilt))
    whole = Objective(
        model,
        features,
        labels,
        clip_norm=problem.clip_norm,
        input_norm=problem.input_norm,
        regularisation=problem.regularisation,
        tilt=torch.from_numpy(tilt),
    )
    if isinstance(release.noise, NoNoise):
        return exact_minimum(replace(whole, clip_norm=_NO_BOUND, input_norm=_NO_BOUND))
    found = minimum(whole, tolerance=problem.tolerance)
    return torch.from_numpy(add_noise(found.numpy(), _on_the_result(problem, release), stream))


def _on_the_result(problem: Minimum, release: Release) -> Release:
    """The noise on what was found: as asked, or for noise in the objective what hides where the solver stopped."""
    if not isinstance(release.noise, ObjectiveNoise):
        return release
    stopped = Minimum(
        clip_norm=2 * problem.tolerance,
        regularisation=problem.regularisation,
        tolerance=1e-300,
        input_norm=problem.input_norm,
        curvature=problem.curvature,
    )
    return minimum_release(stopped, release.noise.on_result())

"""Refusals of impossible queries, before they are charged, from public facts about the model and the query alone."""

import math

import torch
from torch import Tensor

from algorithms.errors import RefusedError
from algorithms.gradients import L2, Affine, Clipping, PerLayer, linear_layer
from algorithms.models import Model
from algorithms.privacy.mechanisms.release import Mechanism, Minimum, NoNoise
from algorithms.privacy.mechanisms.sampling import Importance, Sampling


def check_points(model: Model, points: Tensor) -> None:
    """Raises RefusedError for points [k, d] of a shape or type that the model cannot take."""
    expected = model.parameter_count
    if points.dim() != 2 or len(points) == 0 or points.shape[1] != expected:
        raise RefusedError(
            f"points of shape {list(points.shape)} do not fit the model; give one or more of {expected}."
        )
    if points.dtype != torch.float32:
        raise RefusedError(f"points of type {points.dtype} do not fit the model; give them as torch.float32.")


def check_gradient(model: Model, point: Tensor, sampling: Sampling, clipping: Clipping) -> None:
    """Raises RefusedError if the model's gradient at a point [d] cannot be released with these terms, such as a number
    of per-layer bounds, or the length of a shift, that does not fit the model.
    """
    check_points(model, point[None])
    layers = len(model.layers)
    if isinstance(clipping, PerLayer) and len(clipping.norms) != layers:
        raise RefusedError(
            f"per-layer clipping has {len(clipping.norms)} bounds, the model has {layers} layers; give one for each."
        )
    parameters = model.parameter_count
    if isinstance(clipping, Affine) and clipping.shift.shape != (parameters,):
        raise RefusedError(
            f"a shift of shape {list(clipping.shift.shape)} does not fit the model; give one of {parameters}."
        )
    if isinstance(sampling, Importance):
        check_norms(model, point)


def check_slices(sampling: Sampling, clipping: Clipping) -> None:
    """Raises RefusedError for clipping or sampling that sharded training does not support."""
    if isinstance(clipping, Affine) or isinstance(sampling, Importance):
        what = type(clipping if isinstance(clipping, Affine) else sampling).__name__
        raise RefusedError(
            "{what} needs whole vectors of parameters, of which {compute.shard_trained} leaves each process"
            " a slice; set it to false.",
            code="clipping_of_whole_vectors",
            what=what,
        )


def check_norms(model: Model, point: Tensor, bound: object = None) -> None:
    """Raises RefusedError for a bound other than L2, and for a model whose norms could depend on each other.

    In bfloat16, matrix products on some processors spoil the rows next to one that is not finite.
    """
    check_points(model, point[None])
    if model.precision == torch.bfloat16:
        raise RefusedError(
            "the model {model} computes in bfloat16, where a record that is not finite can spoil the norms of others;"
            " set {network.precision} to float32 for importance sampling and for releases of norms.",
            code="model_in_bfloat16",
            model=model.name,
        )
    if bound is not None and not isinstance(bound, L2):
        raise RefusedError(
            f"a norm was asked for within {type(bound).__name__}; it is the L2 norm, so give L2."
        )


def check_minimum(model: Model, problem: Minimum, noise: Mechanism) -> None:
    """Raises RefusedError if the minimum of the model's losses does not have the bounds that `problem` declares."""
    layer = linear_layer(model.module)
    if layer is None or layer.out_features != 1 or model.bounds is None:
        raise RefusedError(
            f"the model {model.name} is not a linear model with one output and a bounded loss; use 'logistic'."
        )
    if isinstance(noise, NoNoise):
        return
    max_curvature = model.bounds.curvature * problem.input_norm**2
    if not problem.curvature < math.inf or problem.curvature < max_curvature * (1 - 1e-12):
        raise RefusedError(
            f"a curvature of {problem.curvature:g} was declared, but losses of {model.name} have up to"
            f" {max_curvature:g};"
            " take a smooth loss and declare at least that."
        )

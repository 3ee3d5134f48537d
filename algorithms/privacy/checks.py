"""What the barrier refuses before anything is charged, by what is public of the model and of the question.

A question that is impossible has to be refused here: an error from the arithmetic would come after the charge, and only
where there is a record to compute with.
"""

import torch
from torch import Tensor

from algorithms.gradients import L2, Affine, Clipping, PerLayer
from algorithms.models import Model
from algorithms.privacy.errors import Refused
from algorithms.privacy.performance import Records
from algorithms.privacy.terms import Importance, Sampling, WithoutReplacement


def check_points(model: Model, points: Tensor) -> None:
    """Raises Refused for points [k, d] at which no release can be made."""
    expected = model.parameter_count
    if points.dim() != 2 or len(points) == 0 or points.shape[1] != expected:
        raise Refused(
            f"points of shape {list(points.shape)} do not fit the model; give one or more of {expected}."
        )
    if points.dtype != torch.float32:
        raise Refused(f"points of type {points.dtype} do not fit the model; give them as torch.float32.")


def check_layers(model: Model, clipping: Clipping) -> None:
    """Raises Refused for per-layer bounds of another number of layers, or a shift of another length."""
    layers = len(model.layers)
    if isinstance(clipping, PerLayer) and len(clipping.norms) != layers:
        raise Refused(
            f"per-layer clipping has {len(clipping.norms)} bounds, the model has {layers} layers; give one for each."
        )
    parameters = model.parameter_count
    if isinstance(clipping, Affine) and clipping.shift.shape != (parameters,):
        raise Refused(
            f"a shift of shape {list(clipping.shift.shape)} does not fit the model; give one of {parameters}."
        )


def check_gradient(model: Model, point: Tensor, sampling: Sampling, clipping: Clipping) -> None:
    """Raises Refused for a gradient at a point [d] that cannot be released of the model."""
    check_points(model, point[None])
    check_layers(model, clipping)
    if isinstance(sampling, Importance):
        check_norms(model, point)


def check_norms(model: Model, point: Tensor, bound: object = None) -> None:
    """Raises Refused for norms at a point [d] of a model whose norms could depend on each other, and for another bound.

    Products of bfloat16 on some processors spoil the rows beside one that is not finite.
    """
    check_points(model, point[None])
    if model.precision == torch.bfloat16:
        raise Refused(
            f"the model {model.name} computes in bfloat16, where a record that is not finite can spoil the norms of"
            " others; use 32 bits for importance sampling and for releases of norms."
        )
    if bound is not None and not isinstance(bound, L2):
        raise Refused(f"a norm was asked for within {type(bound).__name__}; it is the L2 norm, so give L2.")


def check_number(sampling: Sampling, records: Records) -> None:
    """Raises Refused for a sample of fixed size of another number of records, which such a sample makes public."""
    if isinstance(sampling, WithoutReplacement) and sampling.records != len(records.labels):
        raise Refused(
            f"a sample without replacement of {sampling.records} records was asked for, but there are others;"
            " it needs their public number."
        )

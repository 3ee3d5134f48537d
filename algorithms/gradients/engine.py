"""Clipped sums of per-example gradients, and losses of single records, for one physical batch.

Each function takes a slice of the records that fits the memory it was sized for and returns a sum in float64, so
any choice of slices gives the same result up to rounding. A record whose gradient is not finite contributes zero.
"""

import math

import torch
from torch import Tensor, nn

from algorithms.gradients.clipping import L1, L2, MARGIN, Clipping, PerLayer, Unclipped
from algorithms.models import Model

_CACHED = 128
"""The per-example gradients that a CPU computes fastest together, measured on the small convolutional network."""

_COPIES = 6
"""How many numbers a per-example gradient needs while it is computed, clipped and summed, as multiples of d."""


def clipped_sum(
    model: Model, parameters: Tensor, inputs: Tensor, labels: Tensor, clipping: Clipping
) -> Tensor:
    """The sum over records of clipped gradients of their losses.

    parameters: flat, shape [d]. inputs: [batch, *input_shape]; an empty batch gives zero. labels: [batch].
    Returns shape [d], float64. Every contribution is within the clipping's bound, rounding included.
    """
    if len(labels) == 0:
        return torch.zeros(len(parameters), dtype=torch.float64, device=parameters.device)
    linear = _single_linear_layer(model.module)
    if linear is not None and not isinstance(clipping, L1):
        return _linear_clipped_sum(model, linear, parameters, inputs, labels, clipping)
    gradients = _per_example_gradients(model, parameters, inputs, labels)
    return clip_and_sum(gradients, clipping, model.layers())


def clip_and_sum(contributions: Tensor, clipping: Clipping, layers: list[slice]) -> Tensor:
    """The sum of rows after clipping; contributions [batch, d] -> [d], float64.

    layers: which columns belong to which layer, for per-layer clipping. A row that is not finite counts as zero.
    """
    finite = torch.isfinite(contributions).all(dim=1)
    rows = torch.where(finite[:, None], contributions, 0.0)
    parts = layers if isinstance(clipping, PerLayer) else [slice(0, rows.shape[1])]
    bounds = clipping.norms if isinstance(clipping, PerLayer) else (clipping.sensitivity,)
    order = 1 if isinstance(clipping, L1) else 2
    sums = []
    for part, bound in zip(parts, bounds, strict=True):
        norms = torch.linalg.vector_norm(rows[:, part], ord=order, dim=1, dtype=torch.float64)
        sums.append((_factors(norms, bound).to(rows.dtype) @ rows[:, part]).double())
    return torch.cat(sums)


def clipped_losses(model: Model, parameters: Tensor, inputs: Tensor, labels: Tensor, bound: float) -> Tensor:
    """The sum over records of their losses, each clipped to [0, bound]; shape [], float64."""

    def loss(one_input: Tensor, one_label: Tensor) -> Tensor:
        return model.losses(model.outputs(named, one_input[None]), one_label[None])[0]

    named = model.named(parameters)
    with torch.no_grad():
        losses = torch.func.vmap(loss)(inputs, labels)
    return torch.nan_to_num(losses.double(), nan=0.0, posinf=bound, neginf=0.0).clamp(0.0, bound).sum()


def physical_batch(model: Model, memory_mb: int, device: torch.device) -> int:
    """How many records to take at once: what fits a memory budget in MB, on a CPU no more than fits its cache."""
    if _single_linear_layer(model.module) is not None:
        numbers = 16 * next(p.shape[1] for p in model.module.parameters() if p.dim() == 2)
        most = math.inf
    else:
        numbers = _COPIES * model.parameter_count
        most = math.inf if device.type == "cuda" else _CACHED
    return int(max(1, min(most, memory_mb * 1e6 / (4 * numbers))))


def unclippable(module: nn.Module) -> str | None:
    """The first layer whose output for one record depends on others, as "name (type)"; None where all is well."""
    for name, layer in module.named_modules():
        mixes = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        remembers = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats
        if mixes or remembers:
            return f"{name} ({type(layer).__name__})"
    return None


def _factors(norms: Tensor, bound: float) -> Tensor:
    """What each contribution of the given norm is multiplied by, at most 1."""
    return torch.clamp(bound * (1.0 - MARGIN) / norms.clamp(min=torch.finfo(norms.dtype).tiny), max=1.0)


def _single_linear_layer(module: nn.Module) -> nn.Linear | None:
    """The linear layer of a module that is nothing but one on flattened inputs."""
    match list(module.children()):
        case [nn.Flatten(), nn.Linear() as layer] if layer.bias is not None and isinstance(
            module, nn.Sequential
        ):
            return layer
    return None


def _linear_clipped_sum(
    model: Model, layer: nn.Linear, parameters: Tensor, inputs: Tensor, labels: Tensor, clipping: Clipping
) -> Tensor:
    """The closed form: a record's gradient is an outer product, so its norm is a product of two norms."""
    rows = inputs.flatten(start_dim=1)
    weight, bias = torch.split_with_sizes(parameters, [layer.weight.numel(), layer.bias.numel()])
    outputs = (rows @ weight.view_as(layer.weight).T + bias).requires_grad_()
    (errors,) = torch.autograd.grad(model.losses(outputs, labels).sum(), outputs)
    squares = _square_norms(errors) * (_square_norms(rows) + 1.0)
    finite = torch.isfinite(squares)
    factors = torch.where(finite, _factors(squares.sqrt(), _one_bound(clipping)), 0.0)
    weighted = torch.where(finite[:, None], errors, 0.0) * factors[:, None].to(errors.dtype)
    kept = torch.where(finite[:, None], rows, 0.0)
    return torch.cat([(weighted.T @ kept).reshape(-1), weighted.sum(dim=0)]).double()


def _square_norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.square()


def _one_bound(clipping: Clipping) -> float:
    """The L2 bound of a model that has a single layer."""
    match clipping:
        case PerLayer(norms=(norm,)):
            return norm
        case L2() | Unclipped():
            return clipping.sensitivity
    raise ValueError(f"{clipping} does not fit a model with one layer; give one bound.")


def _per_example_gradients(model: Model, parameters: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """Gradients of each record's own loss, shape [batch, d]."""

    def loss(values: dict[str, Tensor], one_input: Tensor, one_label: Tensor) -> Tensor:
        return model.losses(model.outputs(values, one_input[None]), one_label[None])[0]

    gradient = torch.func.grad(loss)
    by_name = torch.func.vmap(gradient, in_dims=(None, 0, 0))(model.named(parameters), inputs, labels)
    return torch.cat([g.flatten(start_dim=1) for g in by_name.values()], dim=1)

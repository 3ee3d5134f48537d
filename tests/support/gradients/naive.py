"""Per-example gradients and clipped sums by their definition: a loop over single records with plain autograd."""

import torch
from torch import Tensor

from algorithms.gradients import L1, L2, Affine, Clipping, Normalised, PerLayer, Unclipped
from algorithms.models import Model


def loop(model: Model, parameters: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """The gradient of each record in a batch of its own, [n, d], in the parameters' precision."""
    rows = [_gradient(model, parameters, inputs[i : i + 1], labels[i : i + 1]) for i in range(len(labels))]
    return torch.stack(rows) if rows else parameters.new_zeros(0, len(parameters))


def norms(model: Model, gradients: Tensor, clipping: Clipping) -> Tensor:
    """The norms that a clipping bounds, [n] or for per-layer clipping [n, layers], float64."""
    rows = _moved(gradients, clipping)
    if isinstance(clipping, PerLayer):
        return torch.stack([rows[:, places].norm(dim=1) for places in _layers(model)], dim=1)
    return rows.norm(p=1 if isinstance(clipping, L1) else 2, dim=1)


def contributions(model: Model, gradients: Tensor, clipping: Clipping) -> Tensor:
    """What each record adds to the sum by the clipping's definition, with no room for rounding; [n, d], float64."""
    rows, sizes = _moved(gradients, clipping), norms(model, gradients, clipping)
    match clipping:
        case Unclipped():
            return rows
        case PerLayer():
            clipped = rows.clone()
            for i, (places, bound) in enumerate(zip(_layers(model), clipping.norms, strict=True)):
                clipped[:, places] = _scaled_down(rows[:, places], sizes[:, i], bound)
            return clipped
        case Normalised():
            zero_stays = sizes.clamp(min=1e-14) + clipping.stability
            return rows * (clipping.norm / zero_stays)[:, None]
        case _:
            return _scaled_down(rows, sizes, clipping.norm)


def clippings(model: Model, gradients: Tensor) -> dict[str, Clipping]:
    """Every clipping, with bounds in the middle of these gradients: some records are clipped and some are not."""
    draw, d = torch.Generator().manual_seed(7), model.parameter_count
    spread = 1e-3 if len(gradients) == 0 else float(gradients.abs().mean())
    shift = (spread * torch.randn(d, generator=draw)).to(gradients.dtype)
    scale = torch.exp(2 * torch.rand(d, generator=draw) - 1).to(gradients.dtype)

    def middle(clipping: Clipping) -> list[float]:
        """Between the lower and the upper half of the norms, by layer."""
        if len(gradients) == 0:
            return [1.0] * len(model.layers)
        found = norms(model, gradients, clipping).reshape(len(gradients), -1).sort(dim=0).values
        low, high = (len(found) - 1) // 2, len(found) // 2
        return [max(1e-3, bound) for bound in ((found[low] + found[high]) / 2).tolist()]

    return {
        "L2": L2(middle(L2(1.0))[0]),
        "L1": L1(middle(L1(1.0))[0]),
        "PerLayer": PerLayer(tuple(middle(PerLayer((1.0,))))),
        "Affine": Affine(middle(Affine(1.0, shift, scale))[0], shift, scale),
        "Normalised": Normalised(0.3),
        "Normalised, stable": Normalised(0.3, stability=middle(L2(1.0))[0] / 2),
        "Unclipped": Unclipped(),
    }


def measured(model: Model, contribution: Tensor, clipping: Clipping) -> list[tuple[float, float]]:
    """What a contribution measures, and the bound that it has: one pair, or one for each layer."""
    if isinstance(clipping, PerLayer):
        parts = [float(contribution[places].double().norm()) for places in _layers(model)]
        return list(zip(parts, clipping.norms, strict=True))
    order = 1 if isinstance(clipping, L1) else 2
    return [(float(contribution.double().norm(p=order)), clipping.sensitivity)]


def relative(found: Tensor, expected: Tensor) -> float:
    """The distance of two tensors, relative to the length of the second."""
    distance = float((found.double() - expected.double()).norm())
    return distance if distance == 0.0 else distance / float(expected.double().norm())


def _gradient(model: Model, parameters: Tensor, one: Tensor, label: Tensor) -> Tensor:
    free = parameters.detach().clone().requires_grad_()
    loss = model.losses(model.outputs(model.by_name(free), one), label).sum()
    return torch.autograd.grad(loss, free)[0]


def _layers(model: Model) -> list[Tensor]:
    """The places of each layer's parameters in the flat vector."""
    everywhere = torch.arange(model.parameter_count)
    return [torch.cat([everywhere[model.slices[name]] for name in names]) for names in model.layers]


def _moved(gradients: Tensor, clipping: Clipping) -> Tensor:
    if not isinstance(clipping, Affine):
        return gradients.double()
    return (gradients.double() - clipping.shift.double()) / clipping.scale.double()


def _scaled_down(rows: Tensor, sizes: Tensor, bound: float) -> Tensor:
    return rows * (bound / sizes.clamp(min=bound))[:, None]

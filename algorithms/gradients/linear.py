"""Closed forms for all records of a model that is one linear layer.

A record's gradient is the outer product of its error (the derivative of its loss by the outputs) and its features. Its
norm is a product of two norms, so no per-example gradient is materialised. On a line of candidates w - step * g the
outputs are affine in the step: Xw - step * Xg takes two products for any number of candidates, and one if Xw is cached
from the previous query.
"""

import torch
from torch import Tensor, nn

from algorithms.gradients.clipping import L1, Affine, Box, Clipping, Normalised, PerLayer, factors, margin
from algorithms.gradients.grads import product_in_64_bits
from algorithms.gradients.line_search_losses import CachedLogits, LineCandidates, at_point, blocks, losses_of
from algorithms.gradients.padding import pad_to_multiple
from algorithms.models import Model

_HELD = 2**25
"""Size of the features, in numbers, up to which a second copy in 64 bits is kept."""

_LONGEST = 1e18
"""The norm up to which a record's margins and clipping factors are normal numbers in 32 bits."""


class LinearRecords:
    """All records of a model that is one linear layer, stored by feature, with the margins of the last query.

    model: see `linear_layer`. inputs: [n, *input_shape], of any number type; 16 bits are widened to 32. labels: [n].
    A record that is not finite, or longer than 1e18, adds nothing to a gradient.
    Raises ValueError for a model that is not one linear layer.
    """

    def __init__(self, model: Model, inputs: Tensor, labels: Tensor) -> None:
        layer = linear_layer(model.module)
        if layer is None:
            raise ValueError(f"the model {model.name!r} is not one linear layer; take the general engine.")
        self._layer = layer
        features = _by_feature(inputs, layer)
        norms = {order: _norms(features, order) for order in (1, 2)}
        usual = norms[1] <= _LONGEST
        # For other records, margins that are affine in the step would be inf - inf, so their losses are computed for
        # each candidate. Zeros replace them here, which keeps the other records' positions.
        self._odd_losses = losses_of(model, labels[~usual])
        self._odd_features = self._odd_losses.oriented(features[:, ~usual])
        features[:, ~usual] = 0.0
        self._losses = losses_of(model, labels)
        self._features = self._losses.oriented(features)
        self._wide = self._features.double() if self._features.numel() <= _HELD else None
        self._norms = {order: torch.where(usual, values, 0.0) for order, values in norms.items()}
        self._inverse_norms = {
            order: (1.0 / values.clamp(min=1.0 / _LONGEST)).to(features.dtype)
            for order, values in self._norms.items()
        }
        self._held: CachedLogits | None = None
        self._step = -1

    def at_step(self, step: int) -> "LinearRecords":
        """These records in a training step, without margins of the step before.

        A run may be interrupted and resumed between steps, without the margins, and must repeat its answers exactly.
        """
        if step != self._step:
            self._held, self._step = None, step
        return self

    def clipped_sum(self, parameters: Tensor, clipping: Clipping) -> Tensor:
        """The sum over records of clipped gradients of their losses, shape [d], float64.

        parameters: [d]. Every contribution is within the clipping's bound, rounding included.
        Raises ValueError for a clipping without one bound for the whole gradient.
        """
        if not has_one_bound(clipping):
            raise ValueError(
                f"{clipping} has no single bound for one linear layer; give L2, L1 or one bound."
            )
        bound = clipping.sensitivity
        errors = self._losses.errors(self._at(parameters).margins)
        total = self._summed(self._weighted(errors, clipping, bound))
        weights = self._layer.in_features
        return torch.cat([total[:weights].T.reshape(-1), total[weights:].reshape(-1)])

    def losses_on(self, line: LineCandidates, *, bound: float) -> Tensor:
        """The sums [k], float64, over records of their losses clipped to [0, bound] at a line's candidates.

        A loss that is NaN counts as zero. A later query at one of the candidates starts from these margins.
        """
        held = self._at(line.origin)
        slopes = self._margins(line.direction[None], self._features)[0].contiguous()
        steps = torch.tensor(line.steps, dtype=torch.float64, device=slopes.device)
        self._held = CachedLogits(
            held.parameters, held.margins, held.age, line.direction.detach().clone(), steps, slopes
        )
        return self._losses.along(held.margins, slopes, steps, bound) + self._odd(line.candidates, bound)

    def losses_at(self, candidates: Tensor, *, bound: float) -> Tensor:
        """The sums of `losses_on`, [k], at any candidates [k, d], by a product for each; does not change the cache."""
        sums = self._odd(candidates, bound)
        for records in blocks(self._features.shape[1], candidates.shape[0] * self._layer.out_features):
            margins = self._margins_in_any_place(candidates, self._features[:, records])
            sums += self._losses.at(margins, records, bound)
        return sums

    def _at(self, parameters: Tensor) -> CachedLogits:
        """The cache at the parameters: unchanged, moved along the last line, or from a new product."""
        moved = None if self._held is None else self._held.moved_to(parameters)
        if moved is None:
            margins = self._margins(parameters[None], self._features)[0].contiguous()
            moved = at_point(parameters, margins, torch.zeros((), dtype=torch.int64))
        self._held = moved
        return moved

    def _margins(self, vectors: Tensor, features: Tensor) -> Tensor:
        """Outputs [k, n, o] for flat parameters [k, d] and records stored by feature."""
        count, outputs = len(vectors), self._layer.out_features
        weights, biases = (
            vectors.detach().to(features.dtype).tensor_split([self._layer.weight.numel()], dim=1)
        )
        columns = [weights.reshape(count * outputs, -1), biases.reshape(count * outputs, -1)]
        return (torch.cat(columns, dim=1) @ features).view(count, outputs, -1).transpose(1, 2)

    def _margins_in_any_place(self, vectors: Tensor, features: Tensor) -> Tensor:
        """`_margins` in 64 bits and in padded products, whose results do not depend on the number of records."""
        full = pad_to_multiple(features.T).T.contiguous()
        return self._margins(vectors, full)[:, : features.shape[1]].double()

    def _summed(self, errors: Tensor) -> Tensor:
        """Features times errors [n, o] -> [p, o], in 64 bits, so that records do not affect each other's rounding."""
        if self._wide is not None:
            return self._wide @ errors.double()
        return product_in_64_bits(self._features, errors)

    def _odd(self, candidates: Tensor, bound: float) -> Tensor:
        """The clipped losses [k] of records without cached margins, minus those of the zeros that replace them."""
        if self._odd_features.shape[1] == 0:
            return torch.zeros(len(candidates), dtype=torch.float64, device=self._odd_features.device)
        margins = self._margins_in_any_place(candidates, self._odd_features)
        zeros = self._odd_losses.at(torch.zeros_like(margins), slice(None), bound)
        return self._odd_losses.at(margins, slice(None), bound) - zeros

    def _weighted(self, errors: Tensor, clipping: Clipping, bound: float) -> Tensor:
        """Scale errors [n, o] so that their norm times the features' norm is within the bound."""
        order = 1 if isinstance(clipping, L1) else 2
        if errors.shape[1] == 1 and not isinstance(clipping, Normalised):
            # The norm of a single error is its absolute value, so clamping it clips the gradient.
            limits = self._inverse_norms[order][:, None] * (bound * (1.0 - margin(errors.dtype)))
            return errors.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-limits, limits)
        errors = torch.where(torch.isfinite(errors).all(dim=1, keepdim=True), errors, 0.0)
        own = torch.linalg.vector_norm(errors, order, dim=1, dtype=torch.float64)
        scale = factors(own * self._norms[order], clipping, bound, errors.dtype)
        return errors * scale[:, None].to(errors.dtype)


def has_closed_forms(model: Model) -> bool:
    """Whether a model has closed forms, which compute in the precision of the features."""
    return linear_layer(model.module) is not None and model.precision == torch.float32


def has_one_bound(clipping: Clipping) -> bool:
    """Whether a clipping has a single bound on the whole gradient, which a closed form needs."""
    return not isinstance(clipping, Affine | Box) and not (
        isinstance(clipping, PerLayer) and len(clipping.norms) > 1
    )


def linear_layer(module: nn.Module) -> nn.Linear | None:
    """The layer of a module that consists of one trained linear layer on flattened inputs; otherwise None."""
    if type(module) is not nn.Sequential or not all(p.requires_grad for p in module.parameters()):
        return None
    match list(module):
        case [nn.Flatten(start_dim=1, end_dim=-1), nn.Linear() as layer]:
            # PyTorch's own, without another `forward`, hooks or parametrisations
            is_plain = type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks)
            return layer if is_plain else None
    return None


def _by_feature(inputs: Tensor, layer: nn.Linear) -> Tensor:
    """Inputs as [features, n], with a last row of ones if there is a bias."""
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    rows = layer.in_features + (layer.bias is not None)
    features = torch.ones(rows, len(inputs), dtype=dtype, device=inputs.device)
    features[: layer.in_features] = inputs.flatten(start_dim=1).T
    return features


def _norms(features: Tensor, order: int) -> Tensor:
    """The norm of each record, ones for the bias included; shape [n], float64."""
    norms: Tensor = torch.linalg.vector_norm(features, order, dim=0, dtype=torch.float64)
    return norms

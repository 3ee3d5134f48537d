"""Closed forms for all records of a model that is one linear layer.

A record's gradient is the outer product of its error (the derivative of its loss by the outputs) and its features. Its
norm is a product of two norms, so no per-example gradient is materialised. On a line of candidates w - step * g the
outputs are affine in the step: Xw - step * Xg takes two products for any number of candidates, and one if the previous
query was at w, as a gradient is before a search along it.

Losses and derivatives use the model's own loss function. For single outputs, `logistic_loss` and `hinge_loss` have
several times faster code here, which is used if the model's losses are these two functions.
"""

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.gradients.arithmetic import KERNEL_BATCH, pad_to_multiple
from algorithms.gradients.clipping import (
    L1,
    Affine,
    Box,
    Clipping,
    Normalised,
    PerLayer,
    factors,
    rounding_margin,
)
from algorithms.gradients.devices import upload
from algorithms.gradients.model import PerExampleModel
from algorithms.gradients.parameter_gradients import product_in_64_bits
from algorithms.gradients.sparse_linear import sparse_linear

_COPIED_NUMBERS = 2**25
"""Size of the features, in numbers, up to which a second copy in 64 bits is kept."""

_MAX_RECORD_NORM = 1e18
"""The norm up to which a record's outputs and clipping factors are normal numbers in 32 bits."""

_PRODUCT = 2**11
"""How many records' outputs are one product."""

_OUTPUTS_AT_ONCE = 2**17
"""How many outputs are computed together, so that they fit into a core's cache."""

_EXPONENT = 80.0
"""An exponent whose exp is finite in 32 bits."""

_HALVINGS, _WIDE_EXPONENT = 6, 700.0
"""Base-2 logarithm of the number of records whose factors share one logarithm, and an exponent for 64 bits."""


def logistic_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The logistic loss log(1 + exp(-y f(x))) of each record, with y in {-1, 1}.

    Args:
        outputs: f(x), [batch, 1].
        labels: [batch], 0 for y = -1 and 1 for y = 1.

    Returns:
        [batch], in nats.

    Example:
        >>> logistic_loss(torch.tensor([[0.0], [2.0]]), torch.tensor([1, 0]))
        tensor([0.6931, 2.1269])
    """
    return functional.softplus(-_margins(outputs, labels))


def hinge_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The hinge loss max(0, 1 - y f(x)) of each record; arguments as in `logistic_loss`.

    Example:
        >>> hinge_loss(torch.tensor([[0.5], [2.0]]), torch.tensor([1, 1]))
        tensor([0.5000, 0.0000])
    """
    return functional.relu(1.0 - _margins(outputs, labels))


def _margins(outputs: Tensor, labels: Tensor) -> Tensor:
    """y f(x) with y in {-1, 1}; shapes as in `logistic_loss`."""
    return (2.0 * labels - 1.0) * outputs[..., 0]


@dataclass(frozen=True)
class LineCandidates:
    """The candidates `origin - steps[i] * direction` of a line search.

    Args:
        origin: The point where the line begins, [d].
        direction: [d], on the device of the origin.
        steps: Multiples of the direction, one for each of the k candidates.

    Example:
        >>> LineCandidates(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 2.0]), (0.0, 0.5)).candidates.tolist()
        [[1.0, 0.0], [0.0, -1.0]]
    """

    origin: Tensor
    direction: Tensor
    steps: tuple[float, ...]

    def at(self, index: int) -> Tensor:
        """One candidate, shape [d]."""
        return self.candidates[index].clone()

    @cached_property
    def step_sizes(self) -> Tensor:
        """The steps, shape [k], float64, on the origin's device."""
        return upload(torch.tensor(self.steps, dtype=torch.float64), self.origin.device)()

    @cached_property
    def candidates(self) -> Tensor:
        """All candidates, shape [k, d], computed in 64 bits and rounded to the origin's type; read-only."""
        return (self.origin - self.step_sizes[:, None] * self.direction).to(self.origin.dtype)


@dataclass(frozen=True)
class CachedOutputs:
    """The records' outputs [n, o] at a point; they depend on the records, and are as private.

    source: the tensor that the caller passed. version: the count of in-place changes to it at that time.
    parameters: [d], a copy of its values.
    """

    source: Tensor
    version: int
    parameters: Tensor
    outputs: Tensor

    def is_at(self, parameters: Tensor) -> bool:
        """Whether these are the outputs at the parameters.

        On an accelerator the point is recognised as the same tensor alone: to compare values, the host would wait.
        """
        # PyTorch raises `_version` at every change in place, so the same object may hold another point.
        if parameters is self.source and parameters._version == self.version:
            return True
        return (
            parameters.device.type == "cpu"
            and parameters.dtype == self.parameters.dtype
            and self.parameters.equal(parameters)
        )


@dataclass(frozen=True)
class RecordLosses:
    """The losses of given records, by the model's own function.

    labels: [n, ...]. Outputs have the shape [n, o], those of k candidates [k, n, o].
    """

    model: PerExampleModel
    labels: Tensor

    def orient(self, features: Tensor) -> Tensor:
        """Transform features [p, n] to the form from which outputs are computed; may overwrite them."""
        return features

    def grad_outputs(self, outputs: Tensor) -> Tensor:
        """The derivative of each record's loss with respect to its outputs, shape [n, o]."""
        # Whole vectors of records: what is left at a tensor's end is computed one by one, with other last bits.
        free, labels = pad_to_multiple(outputs.detach()).requires_grad_(), pad_to_multiple(self.labels)
        with torch.enable_grad():
            return torch.autograd.grad(self.model.losses(free, labels).sum(), free)[0][: len(outputs)]

    def at(self, outputs: Tensor, records: slice, bound: float) -> Tensor:
        """The sums [k], float64, of the losses of some records clipped to [0, bound]; may overwrite the outputs.

        outputs: [k, len(records), o]. A loss that is NaN counts as zero.
        """
        count, labels = outputs.shape[1], pad_to_multiple(self.labels[records])
        full = pad_to_multiple(outputs.transpose(0, 1)).transpose(0, 1)  # [k, a multiple of 64, o]
        with torch.no_grad():
            # [k * records, ...], candidate after candidate
            repeated = labels.expand(len(full), *labels.shape).flatten(end_dim=1)
            losses = self.model.losses(full.flatten(end_dim=1), repeated)
        return _sums(losses.view(full.shape[:2])[:, :count], bound)  # [k, records], without the padding

    def along(self, outputs: Tensor, slopes: Tensor, steps: Tensor, bound: float) -> Tensor:
        """The sums [k], float64, of all records' clipped losses at the outputs `outputs - steps[j] * slopes`."""
        total = torch.zeros(len(steps), dtype=torch.float64, device=outputs.device)
        factors = -steps.to(outputs.dtype)[:, None, None]  # [k, 1, 1]
        for records in blocks(len(outputs), len(steps) * outputs.shape[1]):
            total += self.at(torch.addcmul(outputs[records], factors, slopes[records]), records, bound)
        return total


@dataclass(frozen=True)
class _LinearLoss:
    """A loss of v = -y f(x), y in {-1, 1}: row sums clipped to [0, bound], which overwrite v, and the derivative."""

    sums: Callable[[Tensor, float], Tensor]
    derivative: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Signed(RecordLosses):
    """Losses of v = -y f(x); features absorb the sign, since a linear f has -y f(x) = f(-y x)."""

    kind: _LinearLoss

    def orient(self, features: Tensor) -> Tensor:
        return features.mul_(torch.where(self.labels == 1, -1.0, 1.0).to(features.dtype))

    def grad_outputs(self, outputs: Tensor) -> Tensor:
        return self.kind.derivative(outputs)

    def at(self, outputs: Tensor, records: slice, bound: float) -> Tensor:
        return self.kind.sums(outputs[..., 0], bound)


def losses_of(model: PerExampleModel, labels: Tensor) -> RecordLosses:
    """The losses of the records with these labels, with the fastest code for the model."""
    kind = _KINDS.get(model.losses)
    return RecordLosses(model, labels) if kind is None else _Signed(model, labels, kind)


def blocks(records: int, numbers: int) -> list[slice]:
    """Slices of records to compute together if each needs this many numbers."""
    size = max(64, _OUTPUTS_AT_ONCE // max(numbers, 1) // 64 * 64)  # a multiple of 64, as passes have
    return [slice(start, min(start + size, records)) for start in range(0, records, size)]


def _sums(losses: Tensor, bound: float) -> Tensor:
    """Row sums of losses [k, b] clipped to [0, bound], NaN as 0; overwrites the losses."""
    return losses.clamp_(0.0, _below(bound, losses.dtype)).nansum(dim=1, dtype=torch.float64)


@functools.lru_cache(maxsize=16)
def _below(bound: float, dtype: torch.dtype) -> float:
    """The largest number of a float type up to the bound."""
    nearest = torch.tensor(bound, dtype=dtype)
    if nearest.double() > bound:
        nearest = torch.nextafter(nearest, torch.zeros_like(nearest))  # the bound in 32 bits was rounded up
    return float(nearest)


def _logistic_sums(negated: Tensor, bound: float) -> Tensor:
    """Row sums of log(1 + exp(v)), each in 32 bits with an error of 2e-7 relative to max(1, loss).

    Logarithms take most of the time. For usual bounds one is taken of the product of several records' clipped factors,
    in 64 bits: in 32, which records share a product would change the sum by more than the bound on one.
    """
    if bound > _EXPONENT:
        return _sums(functional.softplus(negated), bound)
    factors = negated.exp_().add_(1.0)
    # Below 0.1 the margin in `maximum` would be more than 5e-6 of the bound; above the other limit products overflow.
    if not 0.1 <= bound <= _WIDE_EXPONENT / 2**_HALVINGS:
        return _sums(factors.log_(), bound)
    maximum = _below(math.exp(bound) * (1.0 - 4.0 * torch.finfo(factors.dtype).eps), factors.dtype)
    # The logarithm of `maximum` is within the bound, rounding included.
    factors = factors.nan_to_num_(nan=1.0).clamp_(max=maximum).double()
    # log a + log b = log ab: the second half of the columns is multiplied into the first, several times. No product
    # overflows, since `bound` is at most _WIDE_EXPONENT / 2^_HALVINGS. Of an odd number the middle column stays.
    for _ in range(_HALVINGS):
        count = factors.shape[1]
        half = (count + 1) // 2
        factors[:, : count - half].mul_(factors[:, half:])
        factors = factors[:, :half]
    return factors.log_().sum(dim=1)


def _hinge_sums(negated: Tensor, bound: float) -> Tensor:
    """Row sums of max(0, 1 + v)."""
    return _sums(negated.add_(1.0), bound)


def _above_minus_one(negated: Tensor) -> Tensor:
    """The derivative of max(0, 1 + v), zero at the kink as in PyTorch."""
    return (negated + 1.0 > 0.0).to(negated.dtype)


_KINDS: Mapping[Callable[[Tensor, Tensor], Tensor], _LinearLoss] = {
    logistic_loss: _LinearLoss(_logistic_sums, torch.sigmoid),
    hinge_loss: _LinearLoss(_hinge_sums, _above_minus_one),
}
"""The losses with fast code."""


class LinearRecords:
    """All records of a model that is one linear layer, stored by feature, with the outputs at the last query's point.

    A record that is not finite, or longer than 1e18, adds nothing to a gradient.

    Args:
        model: see `linear_layer`.
        inputs: [n, *input_shape], of any number type; 16 bits are widened to 32.
        labels: [n].
        product: how many records' outputs are one product, a multiple of 64 from public numbers. The last one is filled
            with zeros: kernels follow from shapes, so in one product over all records their number would decide the
            last bits of others, and so whole gradients at a kink or of long records.

    Raises:
        ValueError: for a model that is not one linear layer.

    Example:
        >>> module = nn.Sequential(nn.Flatten(), nn.Linear(2, 1))
        >>> model = PerExampleModel("logistic", module, logistic_loss)
        >>> records = LinearRecords(model, torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 1]))
        >>> records.clipped_sum(torch.zeros(3), L1(1e3)).tolist()  # sum of (sigmoid(0) - y) (x, 1)
        [1.5, -2.0, 0.0]
    """

    def __init__(
        self, model: PerExampleModel, inputs: Tensor, labels: Tensor, product: int = _PRODUCT
    ) -> None:
        layer = linear_layer(model.module)
        if layer is None:
            raise ValueError(f"the model {model.name!r} is not one linear layer; take the general engine.")
        self._layer, self._product = layer, product
        # [p + 1, n] with a bias, else [p, n]
        features = _by_feature(layer_inputs(model.module, inputs), layer)
        norms = {order: _norms(features, order) for order in (1, 2)}
        usual = norms[1] <= _MAX_RECORD_NORM  # [n]; false for NaN, too
        # For other records, outputs that are affine in the step would be inf - inf, so their losses are computed for
        # each candidate. Zeros replace them here, which keeps the other records' positions.
        self._odd = torch.nonzero(~usual)[:, 0]  # the one wait for a device
        self._odd_losses = losses_of(model, labels[self._odd])
        self._odd_features = self._odd_losses.orient(features[:, self._odd])  # [p, odd]
        features.index_fill_(1, self._odd, 0.0)
        self._losses = losses_of(model, labels)
        self._whole_products = _fill_products(self._losses.orient(features), product)
        self._features = self._whole_products[:, : len(labels)]
        self._wide = self._features.double() if self._features.numel() <= _COPIED_NUMBERS else None
        self._norms = {order: torch.where(usual, values, 0.0) for order, values in norms.items()}
        self._inverse_norms = {
            order: (1.0 / values.clamp(min=1.0 / _MAX_RECORD_NORM)).to(features.dtype)
            for order, values in self._norms.items()
        }
        self._cached: CachedOutputs | None = None

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
        grad_outputs = self._losses.grad_outputs(self._outputs_at(parameters))
        total = self._multiply_features(self._scale_grad_outputs(grad_outputs, clipping, bound))
        weights = self._layer.in_features
        # [features + 1, outputs], where the last row is the bias's: the flat vector has [outputs, features], then it.
        return torch.cat([total[:weights].T.reshape(-1), total[weights:].reshape(-1)])

    def losses_on(self, line: LineCandidates, *, bound: float) -> Tensor:
        """The sums [k], float64, over records of their losses clipped to [0, bound] at a line's candidates.

        A loss that is NaN counts as zero.
        """
        # [n, o], by how much outputs fall along the line for a step of 1
        slopes = self._outputs(line.direction[None], self._whole_products)[0, : len(self._losses.labels)]
        outputs, odd = self._outputs_at(line.origin), self._odd
        sums = self._losses.along(outputs, slopes.contiguous(), line.step_sizes, bound)
        # Zeros are subtracted as they were added, in 32 bits, so that an odd record counts at least 0.
        zeros = self._odd_losses.along(outputs[odd], slopes[odd], line.step_sizes, bound)
        return sums - zeros + self._odd_sums(line.candidates, self._odd_features, bound)

    def losses_at(self, candidates: Tensor, *, bound: float) -> Tensor:
        """The sums of `losses_on`, [k], at any candidates [k, d], by products for each."""
        zeros = self._odd_sums(candidates, torch.zeros_like(self._odd_features), bound)
        sums = self._odd_sums(candidates, self._odd_features, bound) - zeros
        for start in range(0, len(self._losses.labels), self._product):
            whole = self._whole_products[:, start : start + self._product]  # [p, product]
            count = min(self._product, len(self._losses.labels) - start)
            outputs = self._outputs(candidates, whole)[:, :count].double()
            sums += self._losses.at(outputs, slice(start, start + count), bound)
        return sums

    def _outputs_at(self, parameters: Tensor) -> Tensor:
        """The outputs [n, o] at the parameters, kept for the next query: the same bits, cached or computed anew."""
        if self._cached is None or not self._cached.is_at(parameters):
            count = len(self._losses.labels)
            outputs = self._outputs(parameters[None], self._whole_products)[0, :count].contiguous()
            point = parameters.detach().clone()
            self._cached = CachedOutputs(parameters, parameters._version, point, outputs)
        return self._cached.outputs

    def _outputs(self, vectors: Tensor, features: Tensor) -> Tensor:
        """Outputs [k, n, o] for flat parameters [k, d] and records stored by feature that fill whole products."""
        count, outputs = len(vectors), self._layer.out_features
        weights, biases = (
            vectors.detach().to(features.dtype).tensor_split([self._layer.weight.numel()], dim=1)
        )
        # [k o, p + 1] times [p + 1, product]: the features' last row is ones, by which the biases are multiplied.
        columns = [weights.reshape(count * outputs, -1), biases.reshape(count * outputs, -1)]
        joined = torch.cat(columns, dim=1)
        # [k o, product] each
        products = [joined @ columns for columns in torch.split(features, self._product, dim=1)]
        return torch.cat(products, dim=1).view(count, outputs, -1).transpose(1, 2)  # [k, n, o]

    def _multiply_features(self, grad_outputs: Tensor) -> Tensor:
        """Features times grad_outputs [n, o] -> [p, o], in 64 bits, so that no record affects another's rounding."""
        if self._wide is not None:
            return self._wide @ grad_outputs.double()
        return product_in_64_bits(self._features, grad_outputs)

    def _odd_sums(self, candidates: Tensor, features: Tensor, bound: float) -> Tensor:
        """The sums [k] of the clipped losses of records without cached outputs, from features [p, odd]."""
        count = features.shape[1]
        if count == 0:
            return torch.zeros(len(candidates), dtype=torch.float64, device=features.device)
        outputs = self._outputs(candidates, _fill_products(features, self._product))[:, :count].double()
        return self._odd_losses.at(outputs, slice(None), bound)

    def _scale_grad_outputs(self, grad_outputs: Tensor, clipping: Clipping, bound: float) -> Tensor:
        """Scale grad_outputs [n, o] so that their norm times the features' norm is within the bound."""
        order = 1 if isinstance(clipping, L1) else 2
        if grad_outputs.shape[1] == 1 and not isinstance(clipping, Normalised):
            # The norm of a single error is its absolute value, so clamping it clips the gradient.
            limits = self._inverse_norms[order][:, None] * (  # |e| <= bound / |x|, [n, 1]
                bound * (1.0 - rounding_margin(grad_outputs.dtype))
            )
            return grad_outputs.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-limits, limits)
        grad_outputs = torch.where(torch.isfinite(grad_outputs).all(dim=1, keepdim=True), grad_outputs, 0.0)
        sizes = torch.linalg.vector_norm(grad_outputs, order, dim=1, dtype=torch.float64)  # |e|, [n]
        # |e x^T| = |e| |x| in both norms
        scale = factors(sizes * self._norms[order], clipping, bound, grad_outputs.dtype)
        return grad_outputs * scale[:, None].to(grad_outputs.dtype)


def has_one_bound(clipping: Clipping) -> bool:
    """Whether a clipping has a single bound on the whole gradient, which a closed form needs.

    Example:
        >>> from algorithms.gradients import L2
        >>> has_one_bound(L2(1.0)), has_one_bound(PerLayer((1.0, 2.0)))
        (True, False)
    """
    return not isinstance(clipping, Affine | Box) and not (
        isinstance(clipping, PerLayer) and len(clipping.norms) > 1
    )


class RecordMap(nn.Module):
    """A fixed map of each record alone, without parameters, which may come before the layer of a linear model.

    Example:
        >>> class Squares(RecordMap):
        ...     def forward(self, inputs: Tensor) -> Tensor:
        ...         return torch.cat([inputs, inputs**2], dim=1)
        >>> module = nn.Sequential(Squares(), nn.Sequential(nn.Flatten(), nn.Linear(2, 1)))
        >>> linear_layer(module)
        Linear(in_features=2, out_features=1, bias=True)
        >>> layer_inputs(module, torch.tensor([[3.0]]))
        tensor([[3., 9.]])
    """


class SparseMap(RecordMap):
    """A map to vectors in which the same few numbers lie at other positions for each record, with zeros elsewhere.

    Attributes:
        numbers: [k].
    """

    numbers: Tensor

    def indices(self, inputs: Tensor) -> Tensor:
        """Where the numbers of each record lie, [batch, k], int64; those of a record must all be different."""
        raise NotImplementedError


class BehindSparseMap(nn.Sequential):
    """A `SparseMap` and a model of its vectors, of which a linear layer without a bias reads the positions alone.

    Neither its outputs nor its gradients take a vector then. Other models, and exporters, get the vectors.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's outputs for the vectors, [batch, ...]."""
        record_map, model = self
        layer = model if type(model) is nn.Linear else _only_layer(model)
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        if layer is None or layer.bias is not None or _has_hooks(layer) or is_traced:
            outputs: Tensor = model(record_map(inputs))
            return outputs
        assert isinstance(record_map, SparseMap)
        return sparse_linear(record_map.indices(inputs), record_map.numbers, layer.weight)


def linear_layer(module: nn.Module) -> nn.Linear | None:
    """The layer of a module that consists of one trained linear layer on flattened inputs; otherwise None.

    A subclass of `nn.Linear` gives None, since its forward pass is not known. A `RecordMap` may come before the layer:
    `nn.Sequential(map, nn.Sequential(nn.Flatten(), nn.Linear(...)))`.

    Example:
        >>> linear_layer(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)))
        Linear(in_features=3, out_features=2, bias=True)
        >>> linear_layer(nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.ReLU())) is None
        True
    """
    module = _split_map(module)[1]
    return _only_layer(module) if all(p.requires_grad for p in module.parameters()) else None


def _only_layer(module: nn.Module) -> nn.Linear | None:
    """The layer of a module that flattens its inputs and has one linear layer, PyTorch's own; otherwise None."""
    if type(module) is not nn.Sequential:
        return None
    match list(module):
        case [nn.Flatten(start_dim=1, end_dim=-1), nn.Linear() as layer]:
            # without another `forward`, hooks or parametrisations
            return layer if type(layer) is nn.Linear and not _has_hooks(layer) else None
    return None


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def layer_inputs(module: nn.Module, inputs: Tensor) -> Tensor:
    """The inputs of the layer of `linear_layer`: the module's own, [n, ...], or what a `RecordMap` makes of them.

    Example:
        >>> layer_inputs(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), torch.ones(4, 3)).shape
        torch.Size([4, 3])
    """
    record_map = _split_map(module)[0]
    if record_map is None:
        return inputs
    vectors: Tensor = copy.deepcopy(record_map).to(inputs.device)(inputs)
    return vectors


def _split_map(module: nn.Module) -> tuple[RecordMap | None, nn.Module]:
    """The map of records before a module, or None, and the module."""
    if type(module) not in (nn.Sequential, BehindSparseMap):
        return None, module
    match list(module.children()):
        case [RecordMap() as record_map, model]:
            return record_map, model
    return None, module


def _by_feature(inputs: Tensor, layer: nn.Linear) -> Tensor:
    """Inputs of the layer as [features, n], with a last row of ones if there is a bias."""
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    rows = layer.in_features + (layer.bias is not None)
    features = torch.ones(rows, len(inputs), dtype=dtype, device=inputs.device)
    features[: layer.in_features] = inputs.flatten(start_dim=1).T
    return features


def _fill_products(features: Tensor, product: int) -> Tensor:
    """Records [features, n] and zeros after them, up to a multiple of `product`."""
    return functional.pad(features, (0, -features.shape[1] % product))


def _norms(features: Tensor, order: int) -> Tensor:
    """The norm of each record, ones for the bias included; shape [n], float64. order: 1 or 2."""
    count = features.shape[1]
    norms = torch.empty(count, dtype=torch.float64, device=features.device)
    for records in blocks(count, len(features)):  # `vector_norm` takes 3 times as long along this dimension
        # Whole vectors of records: what is left at a tensor's end is summed one by one, with other last bits.
        values = _fill_products(features[:, records], KERNEL_BATCH).abs().double()
        sums = (values if order == 1 else values.square()).sum(dim=0)  # over features, [records]
        norms[records] = sums[: records.stop - records.start]
    return norms if order == 1 else norms.sqrt_()

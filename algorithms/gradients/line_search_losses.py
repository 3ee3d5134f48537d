"""Candidates on a line, cached outputs of a linear model along it, and clipped losses of many records at many outputs.

Losses and derivatives use the model's own loss function. For single outputs, logistic and hinge losses have several
times faster code here, which is used if the model's losses are the registry's own functions.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from algorithms.gradients.padding import pad_to_multiple
from algorithms.models import Model, build

CARRIES = 16
"""How many updates of the margins are allowed before they are recomputed, which bounds their drift."""


@dataclass(frozen=True)
class LineCandidates:
    """The candidates `origin - steps[i] * direction`; origin and direction have the shape [d]."""

    origin: Tensor
    direction: Tensor
    steps: tuple[float, ...]

    def at(self, index: int) -> Tensor:
        """One candidate, shape [d]; callers continue from this tensor, so that it is recognised bit for bit."""
        return self.candidates[index].clone()

    @cached_property
    def candidates(self) -> Tensor:
        """All candidates, shape [k, d], computed in 64 bits and rounded to the origin's type; read-only."""
        steps = torch.tensor(self.steps, dtype=torch.float64, device=self.origin.device)
        return (self.origin - steps[:, None] * self.direction).to(self.origin.dtype)


@dataclass(frozen=True)
class CachedLogits:
    """Margins from which the next query starts; they depend on the records, and are as private.

    parameters: [d], the point of the margins [n, o]. age: [], the number of updates since they were computed.
    direction [d], steps [k], slopes [n, o]: the last line from this point and its direction's margins; empty without.
    """

    parameters: Tensor
    margins: Tensor
    age: Tensor
    direction: Tensor
    steps: Tensor
    slopes: Tensor

    def moved_to(self, parameters: Tensor) -> "CachedLogits | None":
        """The margins at the cached point or at a candidate of its line, if not too old; None at other parameters."""
        if parameters.dtype != self.parameters.dtype:
            return None
        if self.parameters.equal(parameters):
            return self
        if len(self.steps) == 0 or int(self.age) >= CARRIES:
            return None
        candidates = LineCandidates(self.parameters, self.direction, tuple(self.steps.tolist())).candidates
        found = (candidates == parameters).all(dim=1).nonzero()
        if len(found) == 0:
            return None
        margins = torch.sub(self.margins, self.slopes, alpha=float(self.steps[found[0, 0]]))
        return at_point(parameters, margins, self.age + 1)


def at_point(parameters: Tensor, margins: Tensor, age: Tensor) -> CachedLogits:
    """Cached margins without a line."""
    none, steps = margins.new_empty(0), torch.empty(0, dtype=torch.float64)
    return CachedLogits(parameters.detach().clone(), margins, age, none, steps, none)


_TOGETHER = 2**17
"""How many outputs are computed together, so that they fit into a core's cache."""

_EXPONENT = 80.0
"""An exponent whose exp is finite in 32 bits."""

_HALVINGS = 3
"""Base-2 logarithm of the number of records whose factors share one logarithm."""


@dataclass(frozen=True)
class Losses:
    """The losses of given records, by the model's own function.

    labels: [n, ...]. Outputs have the shape [n, o], those of k candidates [k, n, o].
    """

    model: Model
    labels: Tensor

    def oriented(self, features: Tensor) -> Tensor:
        """Transform features [p, n] to the form from which outputs are computed; may overwrite them."""
        return features

    def errors(self, outputs: Tensor) -> Tensor:
        """The derivative of each record's loss with respect to its outputs, shape [n, o]."""
        free, labels = pad_to_multiple(outputs.detach()).requires_grad_(), pad_to_multiple(self.labels)
        with torch.enable_grad():
            return torch.autograd.grad(self.model.losses(free, labels).sum(), free)[0][: len(outputs)]

    def at(self, outputs: Tensor, records: slice, bound: float) -> Tensor:
        """The sums [k], float64, of the losses of some records clipped to [0, bound]; may overwrite the outputs.

        outputs: [k, len(records), o]. A loss that is NaN counts as zero.
        """
        count, labels = outputs.shape[1], pad_to_multiple(self.labels[records])
        full = pad_to_multiple(outputs.transpose(0, 1)).transpose(0, 1)
        with torch.no_grad():
            repeated = labels.expand(len(full), *labels.shape).flatten(end_dim=1)
            losses = self.model.losses(full.flatten(end_dim=1), repeated)
        return _sums(losses.view(full.shape[:2])[:, :count], bound)

    def along(self, outputs: Tensor, slopes: Tensor, steps: Tensor, bound: float) -> Tensor:
        """The sums [k], float64, of all records' clipped losses at the outputs `outputs - steps[j] * slopes`."""
        total = torch.zeros(len(steps), dtype=torch.float64, device=outputs.device)
        factors = -steps.to(outputs.dtype)[:, None, None]
        for records in blocks(len(outputs), len(steps) * outputs.shape[1]):
            total += self.at(torch.addcmul(outputs[records], factors, slopes[records]), records, bound)
        return total


@dataclass(frozen=True)
class _Kind:
    """A loss of v = -y f(x), y in {-1, 1}: row sums clipped to [0, bound], which overwrite v, and the derivative."""

    sums: Callable[[Tensor, float], Tensor]
    derivative: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Signed(Losses):
    """Losses of v = -y f(x); features absorb the sign, since a linear f has -y f(x) = f(-y x)."""

    kind: _Kind

    def oriented(self, features: Tensor) -> Tensor:
        return features.mul_(torch.where(self.labels == 1, -1.0, 1.0).to(features.dtype))

    def errors(self, outputs: Tensor) -> Tensor:
        return self.kind.derivative(outputs)

    def at(self, outputs: Tensor, records: slice, bound: float) -> Tensor:
        return self.kind.sums(outputs[..., 0], bound)


def losses_of(model: Model, labels: Tensor) -> Losses:
    """The losses of the records with these labels, with the fastest code for the model."""
    kind = _kinds().get(model.losses)
    return Losses(model, labels) if kind is None else _Signed(model, labels, kind)


def blocks(records: int, numbers: int) -> list[slice]:
    """Slices of records to compute together if each needs this many numbers."""
    size = max(64, _TOGETHER // max(numbers, 1) // 64 * 64)
    return [slice(start, min(start + size, records)) for start in range(0, records, size)]


def _sums(losses: Tensor, bound: float) -> Tensor:
    """Row sums of losses [k, b] clipped to [0, bound], NaN as 0; overwrites the losses."""
    return losses.clamp_(0.0, _below(bound, losses.dtype)).nansum(dim=1, dtype=torch.float64)


@functools.lru_cache(maxsize=16)
def _below(bound: float, dtype: torch.dtype) -> float:
    """The largest number of a float type up to the bound."""
    nearest = torch.tensor(bound, dtype=dtype)
    if nearest.double() > bound:
        nearest = torch.nextafter(nearest, torch.zeros_like(nearest))
    return float(nearest)


def _logistic_sums(negated: Tensor, bound: float) -> Tensor:
    """Row sums of log(1 + exp(v)), in 32 bits with an error of 2e-7 relative to max(1, loss).

    Logarithms take most of the time. For usual bounds one is taken of the product of several records' clipped factors.
    """
    if bound > _EXPONENT:
        return _sums(functional.softplus(negated), bound)
    factors = negated.exp_().add_(1.0)
    if not 0.1 <= bound <= _EXPONENT / 2**_HALVINGS:
        return _sums(factors.log_(), bound)
    most = _below(math.exp(bound) * (1.0 - 4.0 * torch.finfo(factors.dtype).eps), factors.dtype)
    # The logarithm of `most` is within the bound, rounding included.
    factors = factors.nan_to_num_(nan=1.0).clamp_(max=most)
    for _ in range(_HALVINGS):
        count = factors.shape[1]
        half = (count + 1) // 2
        factors[:, : count - half].mul_(factors[:, half:])
        factors = factors[:, :half]
    return factors.log().sum(dim=1, dtype=torch.float64)


def _hinge_sums(negated: Tensor, bound: float) -> Tensor:
    """Row sums of max(0, 1 + v)."""
    return _sums(negated.add_(1.0), bound)


def _above_minus_one(negated: Tensor) -> Tensor:
    """The derivative of max(0, 1 + v), zero at the kink as in PyTorch."""
    return (negated + 1.0 > 0.0).to(negated.dtype)


@functools.cache
def _kinds() -> dict[Callable[[Tensor, Tensor], Tensor], _Kind]:
    """The losses with fast code, by the registry's function that they replace."""
    written = {"logistic": _Kind(_logistic_sums, torch.sigmoid), "svm": _Kind(_hinge_sums, _above_minus_one)}
    return {build(name, input_shape=(1,), classes=2, seed=0).losses: kind for name, kind in written.items()}

"""Norms and weighted sums of the per-example gradients of a parameter that a layer uses entry by entry through a map.

Masked layers of autoregressive networks, pruned layers and weights that are kept positive use such a map. Its
derivative, one number for each entry, is the same for all records, so it multiplies their sum instead of each record's
gradient.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import absolute_norms, square_distances, wide
from algorithms.gradients.factored_gradients import FactoredGrad
from algorithms.gradients.parameter_gradients import FEW_NUMBERS, DenseGrad, LinearGrad, PerExample, slices


def pointwise_gradients(of: PerExample, slopes: Tensor) -> PerExample:
    """Gradients of a parameter from those of a tensor that a map by entries makes of it.

    of: [batch, numel]. slopes: the map's derivative at each entry, [numel].
    """
    if isinstance(of, PointwiseGrad):
        return PointwiseGrad(of.of, of.slopes * slopes)
    if isinstance(of, FactoredGrad):
        return of.times(slopes.view(of.shape))
    is_real = slopes.is_floating_point()
    if isinstance(of, LinearGrad) and of.length == 1 and slopes.numel() > FEW_NUMBERS and is_real:
        return PointwiseGrad(of, slopes.to(wide(of.grad_outputs).dtype))
    return DenseGrad(of.rows * slopes)


@dataclass(frozen=True)
class PointwiseGrad:
    """Outer products whose entries are each multiplied by a slope.

    Attributes:
        of: The gradients of a linear layer without a sequence.
        slopes: The factor of each entry, [outputs * inputs].
    """

    of: LinearGrad
    slopes: Tensor
    is_materialized = False

    @cached_property
    def rows(self) -> Tensor:
        return self.of.rows * self.slopes

    def square_norms(self) -> Tensor:
        # sum_oi (e_o s_oi x_i)^2 is the bilinear form (e^2)^T s^2 (x^2): all terms are positive, none is materialised.
        # In 64 bits, where no square of a number of 32 underflows; the margin is for those of 64.
        squares = self._matrix.double().square()
        lost = 8.0 * torch.finfo(torch.float64).tiny * squares.numel() * (1.0 + squares.amax())
        parts = slices(2 * sum(squares.shape), self.of.inputs[:, 0], self.of.grad_outputs[:, 0])
        sums = []
        for inputs, grad_outputs in parts:
            e, x = grad_outputs.double().square(), inputs.double().square()
            margin = lost * (1.0 + e.sum(dim=1)) * (1.0 + x.sum(dim=1))
            sums.append(torch.linalg.vecdot(e @ squares, x) + margin)
        return torch.cat(sums)

    def absolute_norms(self) -> Tensor:
        return absolute_norms(self.rows)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        return square_distances(self.rows, shift, scale)

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        added = torch.zeros_like(total)
        self.of.add_weighted(weights, added)
        total.addcmul_(added, self.slopes.double())

    def take(self, chosen: Tensor | slice) -> "PointwiseGrad":
        return PointwiseGrad(self.of.take(chosen), self.slopes)

    def double(self) -> "PointwiseGrad":
        return PointwiseGrad(self.of.double(), self.slopes.double())

    @property
    def _matrix(self) -> Tensor:
        return self.slopes.view(self.of.grad_outputs.shape[2], self.of.inputs.shape[2])

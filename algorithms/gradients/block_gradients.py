"""Norms and weighted sums of the per-example gradients of a weight in blocks, each of which multiplies another part.

Members of an ensemble, experts, heads, groups of columns and places of an image have such weights. A block's gradients
are those of a linear layer of its own, so that none of them has to be written out for each record.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import absolute_norms, square_distances, square_norms
from algorithms.gradients.parameter_gradients import FEW_NUMBERS, LinearGrad, slice_of

_HAS_SHORT_ROWS = 4
"""How many times as many outputs as inputs a block has whose gradient is multiplied as its transpose: products with
short rows take up to three times as long."""


def are_worth_blocks(blocks: int, outputs: int, inputs: int) -> bool:
    """Whether a weight of such blocks is measured by them; small gradients are written out, and joined with others."""
    return blocks * outputs * inputs > FEW_NUMBERS and outputs * inputs > outputs + inputs


@dataclass(frozen=True)
class BlockGrad:
    """Gradients of a weight [blocks, outputs, inputs].

    Either factor lies in memory as the model has it, with records or blocks first; nothing is copied to join the two.

    Attributes:
        inputs: [batch, blocks, length, inputs].
        grad_outputs: [batch, blocks, length, outputs].
    """

    inputs: Tensor
    grad_outputs: Tensor

    @property
    def is_materialized(self) -> bool:
        return self._length > 1 and self._joined_blocks.is_materialized

    @cached_property
    def rows(self) -> Tensor:
        return self._by_record(self._joined_blocks.rows).flatten(start_dim=1)

    def square_norms(self) -> Tensor:
        if self._length == 1:  # as of a linear layer: |e x^T| = |e| |x|
            return (_squares(self.inputs) * _squares(self.grad_outputs)).sum(dim=1)
        if self.is_materialized:
            return square_norms(self.rows)
        return self._by_record(self._joined_blocks.square_norms()).sum(dim=1)

    def absolute_norms(self) -> Tensor:
        if self._length > 1:
            return absolute_norms(self.rows)
        return self._by_record(self._joined_blocks.absolute_norms()).sum(dim=1)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        return square_distances(self.rows, shift, scale)

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        totals = total.view(self._blocks, -1)  # [blocks, outputs * inputs], a view
        if self._length > 1:
            for block, into in enumerate(totals):
                LinearGrad(self.inputs[:, block], self.grad_outputs[:, block]).add_weighted(weights, into)
            return
        # [blocks, outputs, batch] x [blocks, batch, inputs] in 64 bits, as in `add_weighted_products`.
        # [blocks, batch, width], views
        seen, back = (part[:, :, 0].transpose(0, 1) for part in (self.inputs, self.grad_outputs))
        size = slice_of(2 * len(weights) * (seen.shape[2] + back.shape[2]), total.device)
        for entering, leaving, into in zip(
            *(torch.split(part, size) for part in (seen, back, totals)), strict=True
        ):
            x, e = entering.double(), leaving.double()  # a few blocks, in 64 bits
            if x.shape[2] < e.shape[2]:  # weights go to the narrower factor
                x = x * weights[:, None]
            else:
                e = e * weights[:, None]
            products = into.view(len(into), e.shape[2], -1)
            if _HAS_SHORT_ROWS * x.shape[2] <= e.shape[2]:
                # [few, inputs, outputs], transposed
                products.add_(torch.bmm(x.transpose(1, 2), e).transpose(1, 2))
            else:
                products.baddbmm_(e.transpose(1, 2), x)

    def take(self, chosen: Tensor | slice) -> "BlockGrad":
        return BlockGrad(self.inputs[chosen], self.grad_outputs[chosen])

    def double(self) -> "BlockGrad":
        return BlockGrad(self.inputs.double(), self.grad_outputs.double())

    @property
    def _blocks(self) -> int:
        return self.inputs.shape[1]

    @property
    def _length(self) -> int:
        return self.inputs.shape[2]

    @cached_property
    def _joined_blocks(self) -> LinearGrad:
        """The gradients of each record's blocks as those of so many records."""
        return LinearGrad(self.inputs.flatten(0, 1), self.grad_outputs.flatten(0, 1))

    def _by_record(self, values: Tensor) -> Tensor:
        """[batch * blocks, ...] -> [batch, blocks, ...]."""
        return torch.unflatten(values, 0, (-1, self._blocks))


def _squares(side: Tensor) -> Tensor:
    """Squared L2 norms of one side without a sequence, [batch, blocks, 1, width] -> [batch, blocks], float64."""
    blocks_first = side.transpose(0, 1)
    if blocks_first.is_contiguous():  # as the model has it, so that no side is copied
        return square_norms(blocks_first.flatten(0, 1)).view(blocks_first.shape[:2]).T
    return square_norms(side.flatten(0, 1)).view(side.shape[:2])

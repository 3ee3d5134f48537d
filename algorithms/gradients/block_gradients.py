"""Norms and weighted sums of the per-example gradients of a weight in blocks, each of which multiplies another part.

Members of an ensemble, experts, heads, groups of columns and places of an image have such weights. A block's gradients
are those of a linear layer of its own, so that none of them has to be written out for each record.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import absolute_norms, square_distances, square_norms
from algorithms.gradients.parameter_gradients import FEW_NUMBERS, LinearGrad, slice_of


def are_worth_blocks(blocks: int, outputs: int, inputs: int) -> bool:
    """Whether a weight of such blocks is measured by them; small gradients are written out, and joined with others."""
    return blocks * outputs * inputs > FEW_NUMBERS and outputs * inputs > outputs + inputs


@dataclass(frozen=True)
class BlockGrad:
    """Gradients of a weight [blocks, outputs, inputs].

    Attributes:
        of: The gradients of each record's blocks as those of so many records, [batch * blocks, length, ...].
        blocks: The number of blocks.
    """

    of: LinearGrad
    blocks: int

    @property
    def is_materialized(self) -> bool:
        return self.of.is_materialized

    @cached_property
    def rows(self) -> Tensor:
        return self._by_record(self.of.rows).flatten(start_dim=1)

    def square_norms(self) -> Tensor:
        if self.is_materialized:
            return square_norms(self.rows)
        return self._by_record(self.of.square_norms()).sum(dim=1)

    def absolute_norms(self) -> Tensor:
        if self.of.length > 1:
            return absolute_norms(self.rows)
        return self._by_record(self.of.absolute_norms()).sum(dim=1)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        return square_distances(self.rows, shift, scale)

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        inputs, grad_outputs = (self._by_record(part) for part in (self.of.inputs, self.of.grad_outputs))
        totals = total.view(self.blocks, -1)
        if self.of.length > 1:
            for block, into in enumerate(totals):
                LinearGrad(inputs[:, block], grad_outputs[:, block]).add_weighted(weights, into)
            return
        # [blocks, outputs, batch] x [blocks, batch, inputs] in 64 bits, as in `add_weighted_products`.
        seen, back = (part[:, :, 0].transpose(0, 1) for part in (inputs, grad_outputs))
        size = slice_of(2 * len(weights) * (seen.shape[2] + back.shape[2]), total.device)
        for entering, leaving, into in zip(
            *(torch.split(part, size) for part in (seen, back, totals)), strict=True
        ):
            x, e = entering.double(), leaving.double()
            if x.shape[2] < e.shape[2]:  # weights go to the narrower factor
                x = x * weights[:, None]
            else:
                e = e * weights[:, None]
            into.view(len(into), e.shape[2], -1).baddbmm_(e.transpose(1, 2), x)

    def take(self, chosen: Tensor | slice) -> "BlockGrad":
        return self._with(lambda part: self._by_record(part)[chosen].flatten(0, 1))

    def double(self) -> "BlockGrad":
        return self._with(lambda part: part.double())

    def _by_record(self, values: Tensor) -> Tensor:
        """[batch * blocks, ...] -> [batch, blocks, ...]."""
        return torch.unflatten(values, 0, (-1, self.blocks))

    def _with(self, change: Callable[[Tensor], Tensor]) -> "BlockGrad":
        """Apply a function to the tensors, and to the materialised gradients if they exist."""
        changed = LinearGrad(change(self.of.inputs), change(self.of.grad_outputs))
        if "rows" in vars(self.of):
            vars(changed)["rows"] = change(self.of.rows)
        return BlockGrad(changed, self.blocks)

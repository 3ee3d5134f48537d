"""Norms and weighted sums of the per-example gradients of a table, of whose entries each record uses few.

They are never as long as the table: what a record's lookups or its bag of entries leave is added up by entry.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import absolute_norms, add_rounding_margin, square_norms, wide
from algorithms.gradients.parameter_gradients import LinearGrad, expansion_room, slices

_SMALL_TABLE = 2**10
"""Numbers of an embedding's table whose gradients have all entries, used or not."""


@dataclass(frozen=True)
class EmbeddingGrad:
    """Gradients of an embedding's table, shape [entries, width].

    Norms and sums use a record's total for each entry, in 64 bits. Single lookups could cancel in a norm, and in a sum
    they could swamp other records.

    Attributes:
        indices: [batch, length], the entries looked up.
        grad_outputs: [batch, length, width], 0 where nothing is learned.
        entries: The number of the table's rows.
    """

    indices: Tensor
    grad_outputs: Tensor
    entries: int
    is_materialized = False

    @cached_property
    def rows(self) -> Tensor:
        # [batch, entries, width]
        table = self._materialized_sums.new_zeros(len(self.indices), self.entries, self.grad_outputs.shape[2])
        # [batch, slots, width]
        entries = self._slot_entries[:, :, None].expand(self._materialized_sums.shape)
        return (
            table.scatter_add_(1, entries, self._materialized_sums)
            .flatten(start_dim=1)
            .to(wide(self.grad_outputs).dtype)
        )

    @property
    def _is_small(self) -> bool:
        """Whether each entry of the table has a slot: sorting lookups would take longer than what it saves."""
        length, width = self.grad_outputs.shape[1:]
        return length > 1 and (self.entries <= length or self.entries * width <= _SMALL_TABLE)

    @cached_property
    def _slots(self) -> Tensor:
        """A slot for every lookup, [batch, length], below `length` or, in a small table, `entries`.

        Lookups of the same entry share a slot.
        """
        if self._is_small:
            return self.indices
        _, order, slots = _number_entries(self.indices)
        return torch.empty_like(slots).scatter_(1, order, slots)  # undoes the sort

    @cached_property
    def _slot_entries(self) -> Tensor:
        """The entry of each slot, [batch, slots]; 0 for unused slots, unless the table is small."""
        if self._is_small:
            return torch.arange(self.entries, device=self.indices.device).expand(len(self.indices), -1)
        if self.indices.shape[1] == 1:
            return self.indices
        # Lookups of one slot all write the same entry.
        return torch.zeros_like(self.indices).scatter_(1, self._slots, self.indices)

    @cached_property
    def _materialized_sums(self) -> Tensor:
        """The sum of the output gradients in each slot, [batch, slots, width], float64; zero for unused slots."""
        grad_outputs, (_, length) = self.grad_outputs.double(), self.indices.shape
        if self._is_small:
            return _sum_by_slot(self.indices, grad_outputs, self.entries)
        return grad_outputs if length == 1 else _sum_by_slot(self._slots, grad_outputs, length)

    def square_norms(self) -> Tensor:
        return square_norms(self._materialized_sums)

    def absolute_norms(self) -> Tensor:
        return absolute_norms(self._materialized_sums)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        """Expand to |g|^2 - 2 g a + |a|^2 over squared scales, in 64 bits, so that only used entries are needed."""
        # [numel] each: 1 / b and a / b
        inverse, moved = scale.double().reciprocal(), shift.double() / scale.double()
        # [batch, slots, width]; unused slots are zeros
        scaled = self._materialized_sums * inverse.view(self.entries, -1)[self._slot_entries]
        # Sum of (g / b) (a / b), [batch]
        mixed = (scaled * moved.view(self.entries, -1)[self._slot_entries]).sum(dim=(1, 2))
        # The constant counts entries that no record used.
        squares, constant = square_norms(scaled), moved.square().sum()
        sizes = squares + constant
        room = expansion_room(scaled[0].numel(), torch.float64) * sizes
        return add_rounding_margin(squares - 2.0 * mixed + constant + room, sizes.sqrt(), 1, torch.float64)

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        if self._is_small:
            total.addmv_(self._materialized_sums.flatten(start_dim=1).T, weights)
            return
        weighted = (self._materialized_sums * weights[:, None, None]).flatten(0, 1)  # [batch * slots, width]
        # Unused slots add zeros to entry 0.
        total.view(self.entries, -1).index_add_(0, self._slot_entries.reshape(-1), weighted)

    def take(self, chosen: Tensor | slice) -> "EmbeddingGrad":
        return self._with(lambda part: part[chosen])

    def double(self) -> "EmbeddingGrad":
        return self._with(lambda part: part.double() if part.is_floating_point() else part)

    def _with(self, change: Callable[[Tensor], Tensor]) -> "EmbeddingGrad":
        """Apply a function to the tensors, and to the materialised sums if they exist."""
        changed = EmbeddingGrad(change(self.indices), change(self.grad_outputs), self.entries)
        if "_materialized_sums" in self.__dict__:
            changed.__dict__.update(
                _materialized_sums=change(self._materialized_sums), _slot_entries=change(self._slot_entries)
            )
        return changed


@dataclass(frozen=True)
class BagGrad:
    """Gradients of a table of which each record sums some entries: outer products of shares and output gradients.

    Attributes:
        indices: [batch, length], the entries in a record's bag, which may repeat.
        shares: [batch, length], what each is multiplied by in the sum; 0 where nothing is learned.
        grad_outputs: [batch, width], the gradients of the sums.
        entries: The number of the table's rows.
    """

    indices: Tensor
    shares: Tensor
    grad_outputs: Tensor
    entries: int
    is_materialized = False

    @cached_property
    def lookups(self) -> EmbeddingGrad:
        """The same as lookups in 64 bits, which take as many numbers for each entry as the table has columns."""
        entries, shares = self._totals
        return EmbeddingGrad(entries, self.grad_outputs.double()[:, None] * shares[:, :, None], self.entries)

    @property
    def rows(self) -> Tensor:
        return self.lookups.rows.to(wide(self.grad_outputs).dtype)

    @cached_property
    def _totals(self) -> tuple[Tensor, Tensor]:
        """The different entries of each bag and their shares, float64; [batch, length] each, and 0 where too few.

        Shares of one entry are added up first: they could cancel in a norm, and in a sum swamp other records.
        """
        shares = self.shares.double()
        if self.indices.shape[1] == 1:
            return self.indices, shares
        entries, order, slots = _number_entries(self.indices)
        # `order`: where the sorted entries' shares are
        totals = torch.zeros_like(shares).scatter_add_(1, slots, shares.gather(1, order))
        return torch.zeros_like(entries).scatter_(1, slots, entries), totals

    def square_norms(self) -> Tensor:
        return square_norms(self._totals[1]) * square_norms(self.grad_outputs)

    def absolute_norms(self) -> Tensor:
        return absolute_norms(self._totals[1]) * absolute_norms(self.grad_outputs)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        return self.lookups.square_distances(shift, scale, cancels=cancels)

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        (entries, shares), table = self._totals, total.view(self.entries, -1)
        weighted = self.grad_outputs.double() * weights[:, None]
        if total.device.type != "cpu":
            table.index_add_(0, entries.flatten(), (weighted[:, None] * shares[:, :, None]).flatten(0, 1))
            return
        # A sparse matrix [entries, batch] of shares: its product is added entry by entry, in one order.
        # [batch * length], as the entries are flattened
        records = torch.arange(len(entries)).repeat_interleave(entries.shape[1])
        sizes, positions = (self.entries, len(entries)), torch.stack([entries.flatten(), records])
        table.addmm_(
            torch.sparse_coo_tensor(positions, shares.flatten(), sizes, check_invariants=False), weighted
        )

    def take(self, chosen: Tensor | slice) -> "BagGrad":
        return self._with(lambda part: part[chosen])

    def double(self) -> "BagGrad":
        return self._with(lambda part: part.double() if part.is_floating_point() else part)

    def _with(self, change: Callable[[Tensor], Tensor]) -> "BagGrad":
        """Apply a function to the tensors, and to the totals if they exist."""
        indices, shares, grad_outputs = map(change, (self.indices, self.shares, self.grad_outputs))
        changed = BagGrad(indices, shares, grad_outputs, self.entries)
        if "_totals" in self.__dict__:
            entries, totals = self._totals
            changed.__dict__["_totals"] = change(entries), change(totals)
        return changed


@dataclass(frozen=True)
class SparseLinearGrad:
    """Gradients of a linear layer's weight on inputs that are zero but for a few positions: [outputs, width].

    Attributes:
        positions: [batch, k], where a record's inputs are not zero, all different.
        numbers: [k], what they are there.
        grad_outputs: [batch, outputs].
        width: The number of inputs.
    """

    positions: Tensor
    numbers: Tensor
    grad_outputs: Tensor
    width: int
    is_materialized = False

    @property
    def _dense(self) -> LinearGrad:
        """The same with all inputs written out."""
        inputs = dense_inputs(self.positions, self.numbers.to(self.grad_outputs.dtype), self.width)
        return LinearGrad(inputs[:, None], self.grad_outputs[:, None])

    @property
    def rows(self) -> Tensor:
        return self._dense.rows

    def square_norms(self) -> Tensor:
        return self.numbers.double().square().sum() * square_norms(self.grad_outputs)

    def absolute_norms(self) -> Tensor:
        return self.numbers.double().abs().sum() * absolute_norms(self.grad_outputs)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        return self._dense.square_distances(shift, scale, cancels=cancels)

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        numbers, table = self.numbers.double(), total.view(-1, self.width)
        # In 64 bits, for the reason given in `add_weighted_products`. Column by column: PyTorch adds single numbers by
        # index several times as fast as rows of a few.
        for positions, grad_outputs, each in slices(
            4 * len(numbers), self.positions, self.grad_outputs, weights
        ):
            # [few * k] and [few, outputs]
            flat, weighted = positions.flatten(), grad_outputs.double() * each[:, None]
            for output, column in enumerate(weighted.unbind(1)):
                table[output].index_add_(0, flat, (column[:, None] * numbers).flatten())

    def take(self, chosen: Tensor | slice) -> "SparseLinearGrad":
        return replace(self, positions=self.positions[chosen], grad_outputs=self.grad_outputs[chosen])

    def double(self) -> "SparseLinearGrad":
        return replace(self, numbers=self.numbers.double(), grad_outputs=self.grad_outputs.double())


def dense_inputs(positions: Tensor, numbers: Tensor, width: int) -> Tensor:
    """Inputs [n, width] with numbers [k] at the positions [n, k] of each row, and zeros elsewhere."""
    return numbers.new_zeros(len(positions), width).scatter(1, positions, numbers.expand(positions.shape))


def _number_entries(indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The entries of each record in order, how they are ordered, and a number from 0 for each different one."""
    # Sorted, equal entries are neighbours, and how often the entry has changed so far numbers the different ones.
    # Shapes do not depend on how many differ.
    entries, order = indices.sort(dim=1)
    slots = torch.zeros_like(entries)
    torch.cumsum(entries[:, 1:] != entries[:, :-1], dim=1, out=slots[:, 1:])
    return entries, order, slots


def _sum_by_slot(slots: Tensor, values: Tensor, count: int) -> Tensor:
    """Sums of values [batch, length, k] by slot below `count`, slots [batch, length] -> [batch, count, k].

    The addition is deterministic on a GPU too, if PyTorch is configured to be.
    """
    batch, _, width = values.shape
    # One flat index_add for the batch: the slots of record i are rows i * count and on.
    first = count * torch.arange(batch, device=values.device)[:, None]
    sums = values.new_zeros(batch * count, width)
    return sums.index_add_(0, (first + slots).flatten(), values.flatten(0, 1)).view(batch, count, width)

"""Per-example gradients of an embedding's table."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import absolute_norms, raised, square_norms, wide
from algorithms.gradients.grads import expansion_room


@dataclass(frozen=True)
class EmbeddingGrad:
    """Gradients of an embedding's table, shape [entries, width].

    indices: [batch, length], the entries looked up. errors: [batch, length, width], zero where nothing is learned.
    Norms and sums use a record's total for each entry, in 64 bits. Single lookups could cancel in a norm, and in a sum
    they could swamp other records.
    """

    indices: Tensor
    errors: Tensor
    entries: int
    is_written = False

    @cached_property
    def rows(self) -> Tensor:
        table = self._written.new_zeros(len(self.indices), self.entries, self.errors.shape[2])
        places = self._named[:, :, None].expand(self._written.shape)
        return table.scatter_add_(1, places, self._written).flatten(start_dim=1).to(wide(self.errors).dtype)

    @cached_property
    def _places(self) -> Tensor:
        """A slot below `length` for every lookup, [batch, length]; lookups of the same entry share a slot."""
        entries, order = self.indices.sort(dim=1, stable=True)
        is_new = entries[:, 1:] != entries[:, :-1]
        places = torch.nn.functional.pad(is_new.cumsum(dim=1), (1, 0))
        return torch.empty_like(places).scatter_(1, order, places)

    @cached_property
    def _named(self) -> Tensor:
        """The entry of each slot, [batch, length]; 0 for unused slots."""
        if self.indices.shape[1] == 1:
            return self.indices
        return torch.zeros_like(self.indices).scatter_(1, self._places, self.indices)

    @cached_property
    def _written(self) -> Tensor:
        """The sum of the errors in each slot, [batch, length, width], float64; zero for unused slots."""
        errors = self.errors.double()
        return errors if self.indices.shape[1] == 1 else _added_up(self._places, errors)

    def square_norms(self) -> Tensor:
        return square_norms(self._written)

    def absolute_norms(self) -> Tensor:
        return absolute_norms(self._written)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        """Expand to |g|^2 - 2 g a + |a|^2 over squared scales, in 64 bits, so that only used entries are needed."""
        inverse, moved = scale.double().reciprocal(), shift.double() / scale.double()
        scaled = self._written * inverse.view(self.entries, -1)[self._named]
        mixed = (scaled * moved.view(self.entries, -1)[self._named]).sum(dim=(1, 2))
        squares, constant = square_norms(scaled), moved.square().sum()
        sizes = squares + constant
        room = expansion_room(scaled[0].numel(), torch.float64) * sizes
        return raised(squares - 2.0 * mixed + constant + room, sizes.sqrt(), 1, torch.float64)

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        weighted = (self._written * weights[:, None, None]).flatten(0, 1)
        total.view(self.entries, -1).index_add_(0, self._named.reshape(-1), weighted)

    def take(self, chosen: Tensor | slice) -> "EmbeddingGrad":
        return self._with(lambda part: part[chosen])

    def double(self) -> "EmbeddingGrad":
        return self._with(lambda part: part.double() if part.is_floating_point() else part)

    def _with(self, change: Callable[[Tensor], Tensor]) -> "EmbeddingGrad":
        """Apply a function to the tensors, and to the materialised sums if they exist."""
        changed = EmbeddingGrad(change(self.indices), change(self.errors), self.entries)
        if "_written" in self.__dict__:
            changed.__dict__.update(_written=change(self._written), _named=change(self._named))
        return changed


def _added_up(places: Tensor, values: Tensor) -> Tensor:
    """Sums of values [batch, length, k] by slot, slots [batch, length] -> [batch, length, k].

    The addition is deterministic on a GPU too, if PyTorch is configured to be.
    """
    batch, length, _ = values.shape
    first = length * torch.arange(batch, device=values.device)[:, None]
    sums = torch.zeros_like(values.flatten(0, 1))
    return sums.index_add_(0, (first + places).flatten(), values.flatten(0, 1)).view(values.shape)

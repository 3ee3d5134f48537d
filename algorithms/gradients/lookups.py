"""Per-example gradients of an embedding's table."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import absolute_norms, raised, square_norms, wide
from algorithms.gradients.products import expansion_room


@dataclass(frozen=True)
class Lookups:
    """Gradients of an embedding's table, shape [entries, width].

    indices: [batch, length], the entries looked up. errors: [batch, length, width], zero where nothing is learned.
    Sums are taken in 64 bits: the same entry many times rounds the same way each time.
    """

    indices: Tensor
    errors: Tensor
    entries: int

    @cached_property
    def rows(self) -> Tensor:
        sums = _added_up(self.indices, self.errors.double(), self.entries)
        return sums.flatten(start_dim=1).to(wide(self.errors).dtype)

    def _merged(self) -> tuple[Tensor, Tensor]:
        """The entries of each record, [batch, length], and the sums of their errors, [batch, length, width], float64.

        An entry is named once; in the places left the sums are zero.
        """
        entries, order = self.indices.sort(dim=1, stable=True)
        is_new = torch.ones_like(entries)
        is_new[:, 1:] = entries[:, 1:] != entries[:, :-1]
        places = is_new.cumsum(dim=1) - 1
        errors = self.errors.double()
        by_entry = errors.gather(1, order[:, :, None].expand(errors.shape))
        named = torch.zeros_like(entries).scatter_(1, places, entries)
        return named, _added_up(places, by_entry, errors.shape[1])

    def square_norms(self) -> Tensor:
        return square_norms(self._merged()[1])

    def absolute_norms(self) -> Tensor:
        return absolute_norms(self._merged()[1])

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        """As |g|^2 - 2 g a + |a|^2 over squared scales, in 64 bits, so that only entries looked up are written down."""
        entries, sums = self._merged()
        inverse, moved = scale.double().reciprocal(), shift.double() / scale.double()
        scaled = sums * inverse.view(self.entries, -1)[entries]
        mixed = (scaled * moved.view(self.entries, -1)[entries]).sum(dim=(1, 2))
        squares, constant = square_norms(scaled), moved.square().sum()
        sizes = squares + constant
        room = expansion_room(scaled[0].numel(), torch.float64) * sizes
        return raised(squares - 2.0 * mixed + constant + room, sizes.sqrt(), 1, torch.float64)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        weighted = (self.errors.double() * weights[:, None, None]).flatten(0, 1)
        table = weighted.new_zeros(self.entries, weighted.shape[1])
        return table.index_add_(0, self.indices.reshape(-1), weighted).reshape(-1)

    def take(self, chosen: Tensor | slice) -> "Lookups":
        return Lookups(self.indices[chosen], self.errors[chosen], self.entries)

    def double(self) -> "Lookups":
        return Lookups(self.indices, self.errors.double(), self.entries)


def _added_up(places: Tensor, values: Tensor, count: int) -> Tensor:
    """Sums of values [batch, length, k] by place, places [batch, length] below `count` -> [batch, count, k].

    By an addition that is deterministic on a GPU, too, where that is asked for.
    """
    batch, _, width = values.shape
    first = count * torch.arange(batch, device=values.device)[:, None]
    sums = values.new_zeros(batch * count, width)
    return sums.index_add_(0, (first + places).flatten(), values.flatten(0, 1)).view(batch, count, width)

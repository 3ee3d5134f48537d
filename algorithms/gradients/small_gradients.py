"""Small gradients of several parameters, side by side: on these, calls take longer than their arithmetic.

Which gradients these are depends on the sizes of parameters, never on the number of records.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import square_norms, wide
from algorithms.gradients.parameter_gradients import (
    FEW_NUMBERS,
    BiasGrad,
    LinearGrad,
    PerExample,
    add_rows,
    materialize,
    slice_of,
)
from algorithms.gradients.parameter_gradients import slices as few_at_a_time
from algorithms.gradients.table_gradients import EmbeddingGrad

_MAX_WIDTH = 256
"""Inputs and outputs of a linear layer, together, that is processed with others."""

_FEW_SIDES = 512
"""Inputs and outputs of all narrow layers whose squares one product adds up; of more, it mostly multiplies zeros."""

_SHORT_SEQUENCE = 1024
"""Inputs and outputs of a record in a linear layer that is materialised in one product with others of its shape."""

_FEWEST_ALIKE = 4
"""The fewest layers of one shape that are materialised together: copying the sides of fewer takes longer than calls."""

_NARROW_ROWS = 64
"""Numbers in a row of a table that is processed with others: of wider ones, rows are added faster than numbers."""

_FEWEST_NUMBERS = 128
"""Size of all narrow layers up to which they are materialised with the others."""


@dataclass(frozen=True)
class SmallGradients:
    """Gradients by parameter, which are measured and summed in few calls for all of them.

    materialized: materialised gradients. layers: outer products of inputs and grad_outputs, for the weights of narrow
    linear layers without sequences; they are multiplied in 64 bits. biases: by weight, the name of the layer's
    bias, if it has one. lookups: of tables with narrow rows, of which each record uses one row.
    """

    materialized: Mapping[str, PerExample]
    layers: Mapping[str, LinearGrad]
    biases: Mapping[str, str]
    lookups: Mapping[str, EmbeddingGrad]

    @staticmethod
    def of(gradients: Mapping[str, PerExample], slices: Mapping[str, slice]) -> "SmallGradients":
        """The small ones among a model's gradients; slices: of the parameters in the flat vector."""
        sizes = {name: slices[name].stop - slices[name].start for name in gradients}
        materialized = {
            name: each
            for name, each in gradients.items()
            if sizes[name] <= FEW_NUMBERS and each.is_materialized
        }
        layers = {
            name: each
            for name, each in gradients.items()
            if isinstance(each, LinearGrad) and _is_narrow(each)
        }
        owners = {id(each): name for name, each in layers.items()}
        biases = {
            owners[id(each.of)]: name
            for name, each in gradients.items()
            if isinstance(each, BiasGrad) and id(each.of) in owners
        }
        lookups = {
            name: each
            for name, each in gradients.items()
            if isinstance(each, EmbeddingGrad) and _is_single(each)
        }
        if len(lookups) == 1:
            lookups = {}
        names = (*layers, *biases.values())
        if sum(sizes[name] for name in names) <= _FEWEST_NUMBERS:
            # Of copies, since materialised gradients are kept, and would then be used by other clippings.
            materialized |= {name: replace(each) for name, each in layers.items()}
            materialized |= {name: gradients[name] for name in biases.values()}
            return SmallGradients(materialized, {}, {}, lookups)
        return SmallGradients(materialized, layers, biases, lookups)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of their parameters."""
        return frozenset((*self.materialized, *self.layers, *self.biases.values(), *self.lookups))

    def square_norms(self) -> list[Tensor]:
        """Squared L2 norms, [batch] each, float64, that add up to those over all of them."""
        squares = [square_norms(self._rows)] if self.materialized else []
        squares += [square_norms(self._grad_outputs_of_lookups)] if self.lookups else []
        return [*squares, self._norms_of_layers()] if self.layers else squares

    def _norms_of_layers(self) -> Tensor:
        """Squared norms over all these layers, [batch], float64."""
        # A layer's gradients are e x^T and, for a bias, e: together |e|^2 (|x|^2 + 1), and without a bias |e|^2 |x|^2.
        ones = _ones(tuple(name in self.biases for name in self.layers), self._device)
        parts = []
        for values in self._slices():
            # The first half are the layers' inputs, the second half their output gradients, in the same order.
            seen, back = self._squares_of_sides(values).tensor_split(2, dim=1)
            parts.append(((seen + ones) * back).sum(dim=1))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _squares_of_sides(self, values: Tensor) -> Tensor:
        """The sum of squares of each side, [records, sides], from all sides next to each other."""
        squares = values.square()
        if sum(self._widths) <= _FEW_SIDES:
            # One product for all sides: its columns are ones where a side lies.
            return squares @ _columns(self._widths, self._device)  # [records, width] x [width, sides]
        return torch.stack([side.sum(dim=1) for side in squares.split_with_sizes(self._widths, dim=1)], dim=1)

    def add_weighted(self, weights: Tensor, total: Tensor, slices: Mapping[str, slice]) -> None:
        """Add the sums of weight times gradient over the first records, weights [n], float64, to a total [d], float64.

        slices: of the parameters in the total, which is on the gradients' device.
        """
        if self.lookups:
            self._add_lookups(weights, total, slices)
        joined, names = [], [*self.materialized]
        if self.materialized:
            # [numbers]
            joined.append(torch.zeros(self._rows.shape[1], dtype=torch.float64, device=total.device))
            add_rows(self._rows[: len(weights)], weights, joined[0])
        if self.layers:
            of_biases = self._add_layers(weights, total, slices)
            joined += [part for name, part in zip(self.layers, of_biases, strict=True) if name in self.biases]
            names += [self.biases[name] for name in self.layers if name in self.biases]
        if joined:
            # One addition by index for all of them, however the parameters lie in the flat vector.
            indices = _indices(tuple((slices[name].start, slices[name].stop) for name in names), total.device)
            total.index_add_(0, indices, torch.cat(joined))

    def _add_lookups(self, weights: Tensor, total: Tensor, slices: Mapping[str, slice]) -> None:
        """Add the weighted output gradients of lookups to a total, each number where it belongs."""
        rows = tuple((slices[name].start, each.grad_outputs.shape[2]) for name, each in self.lookups.items())
        firsts, widths, tables = _columns_of_rows(rows, total.device)
        entries = torch.cat([each.indices for each in self.lookups.values()], dim=1)  # [batch, tables]
        parts = entries[: len(weights)], self._grad_outputs_of_lookups[: len(weights)], weights
        for theirs, grad_outputs, each in few_at_a_time(4 * len(firsts), *parts):
            # [records, numbers]: of the table's first row, and the rows before the one that was looked up.
            # entry times row width, plus where the table starts
            indices = theirs[:, tables].mul_(widths).add_(firsts)
            total.index_add_(0, indices.flatten(), (grad_outputs.double() * each[:, None]).flatten())

    @cached_property
    def _grad_outputs_of_lookups(self) -> Tensor:
        """The output gradients of all lookups next to each other, [batch, numbers]."""
        return torch.cat([wide(each.grad_outputs) for each in self.lookups.values()], dim=2)[:, 0]

    def _add_layers(self, weights: Tensor, total: Tensor, slices: Mapping[str, slice]) -> Sequence[Tensor]:
        """Add the weighted sums of the layers' matrices to a total; returns those of biases, [outputs] each."""
        widths, first = self._widths[: len(self.layers)], total.storage_offset()
        of_outputs = self._widths[len(self.layers) :]
        matrices = [
            # The total may be a slice of a longer vector: strides count from its memory's beginning.
            total.as_strided((outputs, inputs), (inputs, 1), first + slices[name].start)
            for name, outputs, inputs in zip(self.layers, of_outputs, widths, strict=True)
        ]
        of_biases = torch.zeros(sum(of_outputs), dtype=torch.float64, device=total.device)
        for values, each in zip(self._slices(), torch.split(weights, self._size), strict=False):
            # [records, all inputs] and [records, all outputs]
            seen, back = values[: len(each)].split_with_sizes([sum(widths), sum(of_outputs)], dim=1)
            # Weights go to the narrower factor, once for all layers; a bias's sum is that of weighted output gradients.
            back = back * each[:, None]
            of_biases += back.sum(dim=0)
            sides = zip(
                back.T.split_with_sizes(of_outputs), seen.split_with_sizes(widths, dim=1), strict=True
            )
            for matrix, (grad_outputs, inputs) in zip(matrices, sides, strict=True):
                matrix.addmm_(grad_outputs, inputs)  # [outputs, records] x [records, inputs]
        return of_biases.split_with_sizes(of_outputs)

    @cached_property
    def _rows(self) -> Tensor:
        """The materialised gradients next to each other, [batch, numbers]."""
        _materialize_alike(self.materialized.values())
        return torch.cat([wide(each.rows) for each in self.materialized.values()], dim=1)

    @cached_property
    def _sides(self) -> list[Tensor]:
        """The inputs and then the output gradients of all layers, [batch, 1, width] each."""
        return [
            *(each.inputs for each in self.layers.values()),
            *(each.grad_outputs for each in self.layers.values()),
        ]

    @cached_property
    def _widths(self) -> tuple[int, ...]:
        return tuple(side.shape[2] for side in self._sides)

    @property
    def _device(self) -> torch.device:
        return self._sides[0].device

    @property
    def _size(self) -> int:
        """How many records' layers to process at once."""
        return slice_of(sum(self._widths), self._device)

    def _slices(self) -> Iterator[Tensor]:
        """All sides next to each other, a few records at a time: [records, width], float64."""
        if len(self._sides[0]) <= self._size:
            return iter((self._whole,))
        parts = zip(*(torch.split(side, self._size) for side in self._sides), strict=True)
        return (_join_sides(part) for part in parts)

    @cached_property
    def _whole(self) -> Tensor:
        return _join_sides(self._sides)


def _materialize_alike(gradients: Iterable[PerExample]) -> None:
    """Materialise those of short sequences, all of one kind and shape by the same product or sum.

    Each keeps its part, from which norms and sums are then computed.
    """
    products: dict[tuple[int, ...], list[LinearGrad]] = {}
    sums: dict[int, list[BiasGrad]] = {}
    for each in gradients:
        layer = each.of if isinstance(each, BiasGrad) else each
        if not isinstance(layer, LinearGrad) or "rows" in vars(each):
            continue
        (_, length, inputs), outputs = layer.inputs.shape, layer.grad_outputs.shape[2]
        if length > 1 and length * (inputs + outputs) <= _SHORT_SEQUENCE:
            if isinstance(each, BiasGrad):
                sums.setdefault(length, []).append(each)
            else:
                products.setdefault((length, inputs, outputs), []).append(layer)
    for layers in products.values():
        if len(layers) >= _FEWEST_ALIKE:
            sides = ([each.inputs for each in layers], [each.grad_outputs for each in layers])
            # [layers * batch, outputs * inputs], layer after layer
            rows = materialize(*(torch.cat(side) for side in sides))
            for layer, part in zip(layers, rows.tensor_split(len(layers)), strict=True):
                vars(layer)["rows"] = part
    for biases in sums.values():
        if len(biases) >= _FEWEST_ALIKE:
            grad_outputs = [wide(each.of.grad_outputs) for each in biases]
            widths = [each.shape[2] for each in grad_outputs]
            # [batch, all outputs], cut by layer
            parts = torch.cat(grad_outputs, dim=2).sum(dim=1).split_with_sizes(widths, dim=1)
            for bias, part in zip(biases, parts, strict=True):
                vars(bias)["rows"] = part


def _join_sides(sides: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(sides), dim=2)[:, 0].double()  # [records, width]


def _is_narrow(layer: LinearGrad) -> bool:
    is_few = layer.inputs.shape[2] + layer.grad_outputs.shape[2] <= _MAX_WIDTH
    return layer.length == 1 and is_few and "rows" not in vars(layer)


@lru_cache
def _columns(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """A matrix whose product with rows of sides sums up each side."""
    columns = torch.zeros(sum(widths), len(widths), dtype=torch.float64, device=device)
    for side, rows in enumerate(columns.split_with_sizes(widths)):
        rows[:, side] = 1.0  # a column is 1 where its side lies
    return columns


@lru_cache
def _ones(biases: tuple[bool, ...], device: torch.device) -> Tensor:
    """What biases add to the squares of inputs."""
    return torch.tensor(biases, dtype=torch.float64, device=device)


def _is_single(table: EmbeddingGrad) -> bool:
    return (
        table.indices.shape[1] == 1
        and table.grad_outputs.shape[2] <= _NARROW_ROWS
        and "rows" not in vars(table)
    )


@lru_cache
def _columns_of_rows(
    rows: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """For each number of one row of every table: its place in the first row, the row's width, the table's number.

    rows: the place of the table's first number, and its width.
    """
    numbers = [
        (first + column, width, table) for table, (first, width) in enumerate(rows) for column in range(width)
    ]
    firsts, widths, tables = torch.tensor(numbers, device=device).unbind(1)
    return firsts, widths, tables


@lru_cache
def _indices(spans: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """The indices from start to stop of each span, one after another."""
    return torch.cat([torch.arange(*span, device=device) for span in spans])

"""Per-example gradients of one parameter, in the form in which a backward pass leaves them.

A linear layer's gradient is a sum of outer products of what entered and what came back. Its norm and a weighted sum
over records follow from the factors; the gradients themselves are written down only where that is cheaper.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from algorithms.gradients.arithmetic import (
    absolute_norms,
    raised,
    square_distances,
    square_norms,
    wide,
)
from algorithms.gradients.products import (
    prefers_gram,
    product_distances,
    product_norms,
    product_sizes,
    sum_of_rows,
    sum_of_written,
    weighted_products,
    written,
)


class PerExample(Protocol):
    """Gradients of one parameter with `numel` values for each of `batch` records.

    The norms are upper bounds of what `weighted_sum` adds up for a record, rounding included.
    """

    @property
    def rows(self) -> Tensor:
        """The gradients written down, shape [batch, numel]."""
        ...

    def square_norms(self) -> Tensor:
        """Squared L2 norms, shape [batch], float64."""
        ...

    def absolute_norms(self) -> Tensor:
        """L1 norms, shape [batch], float64."""
        ...

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        """Squared L2 norms of (gradient - shift) / scale, both [numel]; shape [batch], float64.

        cancels: as `Affine` has it.
        """
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum over records of weight times gradient, weights [batch] -> [numel], float64."""
        ...

    def take(self, chosen: Tensor | slice) -> "PerExample":
        """The gradients of the chosen records; chosen: their indices, or a slice."""
        ...

    def double(self) -> "PerExample":
        """The same gradients in float64."""
        ...


@dataclass(frozen=True)
class Rows:
    """Gradients that are written down, shape [batch, numel]."""

    rows: Tensor

    def square_norms(self) -> Tensor:
        return square_norms(self.rows)

    def absolute_norms(self) -> Tensor:
        return absolute_norms(self.rows)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        return square_distances(self.rows, shift, scale)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return sum_of_rows(self.rows, weights)

    def take(self, chosen: Tensor | slice) -> "Rows":
        return Rows(self.rows[chosen])

    def double(self) -> "Rows":
        return Rows(self.rows.double())


def as_measured(gradient: PerExample) -> PerExample:
    """The same gradients, as rows where they were written down for their norms: formed anew they round otherwise."""
    return Rows(gradient.rows) if "rows" in gradient.__dict__ else gradient


@dataclass(frozen=True)
class Products:
    """Sums of outer products: the gradients of a linear layer's weight, shape [outputs, inputs].

    inputs: [batch, length, inputs], what entered the layer. errors: [batch, length, outputs], its output's gradient.
    """

    inputs: Tensor
    errors: Tensor

    @cached_property
    def rows(self) -> Tensor:
        return written(self.inputs, self.errors)

    @cached_property
    def error_squares(self) -> Tensor:
        """Squared L2 norms of the errors, shape [batch], float64."""
        return square_norms(self.errors)

    @property
    def length(self) -> int:
        """How many outer products are summed."""
        return self.inputs.shape[1]

    def square_norms(self) -> Tensor:
        if self.length == 1:
            return square_norms(self.inputs) * self.error_squares
        if not prefers_gram(self.length, self.inputs.shape[2], self.errors.shape[2]):
            return square_norms(self.rows)
        squares = product_norms(self.inputs, self.errors)
        return raised(squares, product_sizes(self.inputs, self.errors), self.length, wide(self.errors).dtype)

    def absolute_norms(self) -> Tensor:
        if self.length == 1:
            return absolute_norms(self.inputs) * absolute_norms(self.errors)
        return absolute_norms(self.rows)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        if self.length > 1:
            return square_distances(self.rows, shift, scale)
        return product_distances(self.inputs[:, 0], self.errors[:, 0], shift, scale, cancels=cancels)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.length == 1:
            return weighted_products(self.inputs[:, 0], self.errors[:, 0], weights).reshape(-1)
        numbers = self.inputs.shape[2] * self.errors.shape[2]
        return sum_of_written(written, self.inputs, self.errors, weights, numbers=numbers)

    def take(self, chosen: Tensor | slice) -> "Products":
        return Products(self.inputs[chosen], self.errors[chosen])

    def double(self) -> "Products":
        return Products(self.inputs.double(), self.errors.double())


@dataclass(frozen=True)
class Sums:
    """Gradients of a linear layer's bias, shape [outputs]: the sums of the errors that its weight's products have."""

    of: Products

    @cached_property
    def rows(self) -> Tensor:
        errors = wide(self.of.errors)
        return errors[:, 0] if self.of.length == 1 else errors.sum(dim=1)

    def square_norms(self) -> Tensor:
        return self.of.error_squares if self.of.length == 1 else square_norms(self.rows)

    def absolute_norms(self) -> Tensor:
        return absolute_norms(self.rows)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        rows = self.rows
        return product_distances(rows.new_ones(len(rows), 1), rows, shift, scale, cancels=cancels)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return Rows(self.rows).weighted_sum(weights)

    def take(self, chosen: Tensor | slice) -> "Sums":
        return Sums(self.of.take(chosen))

    def double(self) -> "Sums":
        return Sums(self.of.double())

"""Single gradients in every form that a backward pass leaves, drawn so that rounding does its worst."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from algorithms.gradients import L1, Clipping, PerExampleGradients
from algorithms.gradients.arithmetic import wide
from algorithms.gradients.block_gradients import BlockGrad
from algorithms.gradients.normalised_weights import NormalisedGrad, RowFactorGrad, RowMap
from algorithms.gradients.parameter_gradients import (
    BiasGrad,
    DenseGrad,
    LinearGrad,
    PerExample,
    RowGrad,
)
from algorithms.gradients.pointwise_gradients import PointwiseGrad
from algorithms.gradients.rules.convolution import ConvGrad, Window
from algorithms.gradients.table_gradients import BagGrad, EmbeddingGrad, SparseLinearGrad

Draw = Callable[[torch.Generator], PerExample]


def contributions(gradient: PerExample, dtype: torch.dtype = torch.float32) -> PerExampleGradients:
    """Gradients of one parameter as contributions; dtype: of the losses."""
    if not _LAST or _LAST[0] is not gradient:
        rows = _copied(gradient).rows  # of a copy, since written rows are kept and would then be used
        _LAST[:] = gradient, rows.shape, wide(rows).dtype
    _, (batch, numel), widened = _LAST
    losses = torch.zeros(batch, dtype=dtype)
    return PerExampleGradients(losses, {"w": gradient}, {"w": slice(0, numel)}, (("w",),), widened)


_LAST: list[Any] = []
"""The gradient that was clipped last, the shape of its rows and their type: each is clipped many times."""


def _copied(gradient: PerExample) -> PerExample:
    match gradient:
        case NormalisedGrad():
            return replace(gradient, of=copy(gradient.of))  # type: ignore[arg-type]
        case RowFactorGrad():
            return replace(gradient, of=replace(gradient.of, of=copy(gradient.of.of)))
    return copy(gradient)


def written(gradient: PerExample) -> Tensor:
    """The gradients written down by other sums than the form's own, [batch, numel], float64."""
    match gradient:
        case LinearGrad():
            return torch.einsum(
                "bto,bti->boi", gradient.grad_outputs.double(), gradient.inputs.double()
            ).flatten(1)
        case BlockGrad():
            return torch.einsum(
                "bkto,bkti->bkoi", gradient.grad_outputs.double(), gradient.inputs.double()
            ).flatten(1)
        case PointwiseGrad():
            return written(gradient.of) * gradient.slopes.double()
        case BiasGrad():
            return gradient.of.grad_outputs.double().sum(dim=1)
        case EmbeddingGrad():
            exact = EmbeddingGrad(gradient.indices, gradient.grad_outputs.double(), gradient.entries)
            chosen = torch.nn.functional.one_hot(exact.indices, exact.entries).double()
            return torch.einsum("bte,btw->bew", chosen, exact.grad_outputs).flatten(1)
        case BagGrad():
            chosen = torch.nn.functional.one_hot(gradient.indices, gradient.entries).double()
            shares = torch.einsum("ble,bl->be", chosen, gradient.shares.double())
            return torch.einsum("be,bw->bew", shares, gradient.grad_outputs.double()).flatten(1)
        case SparseLinearGrad():
            chosen = torch.nn.functional.one_hot(gradient.positions, gradient.width).double()
            inputs = torch.einsum("bkw,k->bw", chosen, gradient.numbers.double())
            return torch.einsum("bo,bw->bow", gradient.grad_outputs.double(), inputs).flatten(1)
        case ConvGrad():
            return torch.stack([_convolved(gradient, i) for i in range(len(gradient.inputs))])
        case NormalisedGrad():
            return _mapped(gradient.map, written(gradient.of))
        case RowFactorGrad():
            matrices = written(gradient.of.of).view(-1, *gradient.of.map.direction.shape)
            along = torch.einsum("brp,rpk->krb", matrices, _plane(gradient.of.map))
            return torch.einsum("kr,krb->br", gradient.coefficients, along)
    return gradient.rows.double()


def absolute(gradient: PerExample) -> PerExample:
    """The same with all signs positive, so that nothing cancels."""
    match gradient:
        case DenseGrad():
            return DenseGrad(gradient.rows.abs())
        case BiasGrad():
            return BiasGrad(replace(gradient.of, grad_outputs=gradient.of.grad_outputs.abs()))
        case PointwiseGrad():
            return replace(gradient, of=absolute(gradient.of), slopes=gradient.slopes.abs())  # type: ignore[arg-type]
        case BlockGrad():
            return BlockGrad(gradient.inputs.abs(), gradient.grad_outputs.abs())
        case EmbeddingGrad():
            return replace(gradient, grad_outputs=gradient.grad_outputs.abs())
        case BagGrad():
            return replace(gradient, shares=gradient.shares.abs(), grad_outputs=gradient.grad_outputs.abs())
        case SparseLinearGrad():
            return replace(gradient, numbers=gradient.numbers.abs(), grad_outputs=gradient.grad_outputs.abs())
        case LinearGrad() | ConvGrad():
            return replace(gradient, inputs=gradient.inputs.abs(), grad_outputs=gradient.grad_outputs.abs())
        case NormalisedGrad():
            lengthening = torch.linalg.vector_norm(_matrices(gradient.map), ord=2, dim=(1, 2))
            exact = written(absolute(gradient.of)).view(-1, *gradient.map.direction.shape)
            return DenseGrad((exact * lengthening[:, None]).flatten(1))
        case RowFactorGrad():
            sizes = written(absolute(gradient.of.of)).view(-1, *gradient.of.map.direction.shape).norm(dim=2)
            return DenseGrad(sizes * gradient.coefficients.norm(dim=0))
    raise TypeError(gradient)


def _plane(row_map: RowMap) -> Tensor:
    """1 and the direction of each row, [rows, width, 2]."""
    ones = torch.full_like(row_map.direction, row_map.direction.shape[1] ** -0.5)
    return torch.stack([ones, row_map.direction], dim=2)


def _matrices(row_map: RowMap) -> Tensor:
    """The map of each row as a matrix, [rows, width, width]."""
    plane = _plane(row_map)
    across = torch.eye(plane.shape[1]).double() - plane @ plane.mT
    return row_map.scale[:, None, None] * across + plane @ row_map.inner.permute(2, 0, 1) @ plane.mT


def _mapped(row_map: RowMap, vectors: Tensor) -> Tensor:
    apart = vectors.view(-1, *row_map.direction.shape)
    mapped: Tensor = torch.einsum("rij,brj->bri", _matrices(row_map), apart)
    flat: Tensor = mapped.flatten(1)
    return flat


def cancelling(weights: Tensor, size: float, draw: torch.Generator) -> Tensor:
    """A record [p] whose margins by weights [o, p] are what rounding leaves of terms of a size."""
    wider = weights.double()
    drawn = torch.randn(wider.shape[1], generator=draw).double()
    return (size * (drawn - wider.T @ torch.linalg.solve(wider @ wider.T, wider @ drawn))).float()


def spread(draw: torch.Generator, *shape: int, decades: float = 3.0) -> Tensor:
    """Normal numbers of sizes that differ by orders of magnitude."""
    powers = 10.0 ** (decades * (2 * torch.rand(shape, generator=draw) - 1))
    return torch.randn(shape, generator=draw) * powers


def products(length: int, inputs: int, outputs: int) -> Draw:
    return lambda draw: LinearGrad(
        spread(draw, 1, length, inputs), spread(draw, 1, length, outputs, decades=1)
    )


def blocks(count: int, length: int, inputs: int, outputs: int, *, cancels: bool = False) -> Draw:
    """Outer products of so many blocks of a record; `cancels`: in pairs that nearly cancel."""

    def drawn(draw: torch.Generator) -> PerExample:
        kind = nearly_cancelling if cancels else products
        each = [kind(length, inputs, outputs)(draw) for _ in range(count)]
        sides = ([getattr(part, side) for part in each] for side in ("inputs", "grad_outputs"))
        return BlockGrad(*(torch.stack(side, dim=1) for side in sides))

    return drawn


def by_entries(inputs: int, outputs: int) -> Draw:
    """An outer product whose entries have slopes of all sizes, some of them zero."""

    def drawn(draw: torch.Generator) -> PerExample:
        slopes = spread(draw, 1, outputs * inputs)[0]
        kept = torch.rand(outputs * inputs, generator=draw) < 0.5
        return PointwiseGrad(products(1, inputs, outputs)(draw), slopes * kept)  # type: ignore[arg-type]

    return drawn


def nearly_cancelling(length: int, inputs: int, outputs: int) -> Draw:
    """Outer products in pairs whose sum is smaller than they are by up to seven orders of magnitude."""

    def drawn(draw: torch.Generator) -> PerExample:
        seen, back = (torch.randn(1, length // 2, n, generator=draw) for n in (inputs, outputs))
        return LinearGrad(torch.cat([seen, _nearly(seen, draw)], dim=1), torch.cat([back, -back], dim=1))

    return drawn


def same_signs(length: int, inputs: int, outputs: int) -> Draw:
    """Products without any cancellation, all of one sign, so that roundings do not average out."""

    def drawn(draw: torch.Generator) -> PerExample:
        seen, back = (1.0 + torch.rand(1, length, n, generator=draw) for n in (inputs, outputs))
        return LinearGrad(seen, back)

    return drawn


def sums(length: int, outputs: int) -> Draw:
    def drawn(draw: torch.Generator) -> PerExample:
        back = spread(draw, 1, length, outputs)
        return BiasGrad(
            LinearGrad(spread(draw, 1, 2 * length, 3), torch.cat([back, -_nearly(back, draw)], dim=1))
        )

    return drawn


def lookups(length: int, entries: int, width: int) -> Draw:
    """Words that are looked up often, with errors that nearly cancel."""

    def drawn(draw: torch.Generator) -> PerExample:
        words = torch.randint(0, entries, (1, length), generator=draw)
        back = spread(draw, 1, length, width, decades=1)
        return EmbeddingGrad(
            torch.cat([words, words], dim=1), torch.cat([back, -_nearly(back, draw)], dim=1), entries + 2
        )

    return drawn


def bags(length: int, entries: int, width: int) -> Draw:
    """A bag in which each word occurs again with nearly the opposite share."""

    def drawn(draw: torch.Generator) -> PerExample:
        words = torch.randint(0, entries, (1, length), generator=draw)
        shares = spread(draw, 1, length, decades=1)
        back = spread(draw, 1, width, decades=1)
        return BagGrad(
            torch.cat([words, words], dim=1),
            torch.cat([shares, -_nearly(shares, draw)], dim=1),
            back,
            entries,
        )

    return drawn


def sparse_inputs(count: int, width: int, outputs: int) -> Draw:
    """Inputs with numbers of many sizes at a few positions."""

    def drawn(draw: torch.Generator) -> PerExample:
        positions = torch.randperm(width, generator=draw)[None, :count]
        return SparseLinearGrad(positions, spread(draw, count), spread(draw, 1, outputs, decades=1), width)

    return drawn


def patches(channels: int, size: int, outputs: int, window: Window, *, cancels: bool = False) -> Draw:
    """An image and errors; `cancels`: of one colour, nearly, with errors that add up to nothing."""

    def drawn(draw: torch.Generator) -> PerExample:
        high, wide = (
            (size + 2 * window.padding[i] - window.dilation[i] * (window.kernel[i] - 1) - 1)
            // window.stride[i]
            + 1
            for i in (0, 1)
        )
        seen, back = (
            spread(draw, 1, channels, size, size),
            torch.randn(1, outputs, high, wide, generator=draw),
        )
        if cancels:
            seen, back = _nearly(torch.ones_like(seen), draw), back - back.mean(dim=(2, 3), keepdim=True)
        return ConvGrad(seen, back, window)

    return drawn


def by_rows(of: Draw, *, cancels: bool = False) -> Draw:
    """Gradients of a weight that is used normalised by rows; `cancels`: nearly all of them is what the map removes."""

    def drawn(draw: torch.Generator) -> NormalisedGrad:
        gradient = of(draw)
        assert isinstance(gradient, RowGrad)
        if cancels:
            inputs = _nearly(torch.ones_like(gradient.inputs), draw)  # type: ignore[attr-defined]
            gradient = replace(gradient, inputs=inputs)  # type: ignore[type-var]
        rows = gradient.grad_rows
        direction = torch.randn(rows, written(gradient).shape[1] // rows, generator=draw).double()
        direction -= direction.mean(dim=1, keepdim=True)
        direction /= direction.norm(dim=1, keepdim=True)
        scale, inner = (spread(draw, *shape, rows, decades=1).double() for shape in ((), (2, 2)))
        inner[:, 0] *= not cancels
        return NormalisedGrad(gradient, RowMap(scale, direction, inner))

    return drawn


def gains(of: Draw) -> Draw:
    """Gradients of a gain of each row."""

    def drawn(draw: torch.Generator) -> RowFactorGrad:
        weight = by_rows(of)(draw)
        assert isinstance(weight, NormalisedGrad)
        return RowFactorGrad(weight, spread(draw, 2, weight.of.grad_rows, decades=1).double())

    return drawn


def square(kernel: int, *, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1) -> Window:
    return Window((kernel,) * 2, (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups)


def rows(width: int, dtype: torch.dtype = torch.float32) -> Draw:
    return lambda draw: DenseGrad(spread(draw, 1, width).to(dtype))


def _nearly(values: Tensor, draw: torch.Generator) -> Tensor:
    """The same but for a relative part between one and a ten millionth, all of one size."""
    part = 10.0 ** -int(torch.randint(0, 8, (), generator=draw))
    return values * (1.0 + part * torch.randn(values.shape, generator=draw))


def _convolved(gradient: ConvGrad, record: int) -> Tensor:
    """The gradient of a convolution's weight by autograd, in float64."""
    window, errors = gradient.window, gradient.grad_outputs[record : record + 1].double()
    inputs = gradient.inputs[record : record + 1].double()
    shape = (errors.shape[1], inputs.shape[1] // window.groups, *window.kernel)
    weight = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    settings = (window.stride, window.padding, window.dilation, window.groups)
    output = torch.nn.functional.conv2d(inputs, weight, None, *settings)
    return torch.autograd.grad((output * errors).sum(), weight)[0].flatten()


FORMS: dict[str, Draw] = {
    "rows": rows(50),
    "long rows": rows(5000),
    "rows in 16 bits": rows(3000, torch.bfloat16),
    "one product": products(1, 50, 30),
    "one number": products(1, 1, 1),
    "one large product": products(1, 400, 300),
    "products, written": products(8, 20, 20),
    "products by Gram matrices": products(4, 60, 60),
    "products, written and kept": products(66, 20, 20),
    "products of one sign": same_signs(64, 12, 12),
    "products of one sign, by Gram matrices": same_signs(12, 100, 110),
    "two products that cancel": nearly_cancelling(2, 9, 9),
    "products that cancel, written": nearly_cancelling(64, 20, 20),
    "products that cancel, by Gram matrices": nearly_cancelling(8, 70, 70),
    "products that cancel, kept": nearly_cancelling(80, 8, 8),
    "blocks of one product": blocks(3, 1, 50, 30),
    "blocks of one product, short rows": blocks(3, 1, 12, 60),
    "blocks, written": blocks(3, 8, 20, 20),
    "blocks by Gram matrices": blocks(2, 4, 60, 60),
    "blocks that cancel, written": blocks(3, 64, 20, 20, cancels=True),
    "blocks that cancel, by Gram matrices": blocks(2, 8, 70, 70, cancels=True),
    "entry by entry": by_entries(50, 30),
    "sums of errors that cancel": sums(20, 9),
    "words": lookups(10, 3, 6),
    "one word": lookups(50, 1, 4),
    "a bag": bags(10, 40, 6),
    "a bag of one word": bags(50, 1, 4),
    "sparse inputs": sparse_inputs(12, 90, 4),
    "sparse inputs of one output": sparse_inputs(7, 2000, 1),
    "patches, written": patches(4, 6, 4, square(3, padding=1)),
    "patches, kept": patches(4, 11, 4, square(3, padding=1)),
    "patches by Gram matrices": patches(40, 4, 40, square(3)),
    "patches in groups": patches(4, 6, 8, square(2, stride=2, groups=2)),
    "patches, dilated": patches(2, 7, 3, square(2, dilation=3, padding=1)),
    "patches that cancel, written": patches(3, 6, 4, square(3, padding=1), cancels=True),
    "patches that cancel, kept": patches(2, 12, 4, square(3), cancels=True),
    "patches that cancel, by Gram matrices": patches(40, 4, 40, square(3), cancels=True),
    "normalised weight, one product": by_rows(products(1, 50, 30)),
    "normalised weight, materialised": by_rows(products(8, 20, 20)),
    "normalised weight, by Gram matrices": by_rows(products(4, 60, 60)),
    "normalised weight, removed, one product": by_rows(products(1, 50, 30), cancels=True),
    "normalised weight, removed, materialised": by_rows(products(8, 20, 20), cancels=True),
    "normalised weight, removed, by Gram matrices": by_rows(products(4, 60, 60), cancels=True),
    "normalised weight, patches": by_rows(patches(4, 6, 8, square(2, stride=2, groups=2))),
    "normalised weight, patches, by Gram matrices": by_rows(patches(24, 4, 24, square(3))),
    "normalised weight, patches removed": by_rows(patches(4, 6, 4, square(3)), cancels=True),
    "gain, materialised": gains(products(8, 20, 20)),
    "gain, by Gram matrices": gains(patches(40, 4, 40, square(3))),
}


NEAR = [1 + part for part in (0.0, 1e-8, -1e-8, 1e-7, -1e-7, 1e-6, -1e-6, -3e-6, -0.7)]
"""Bounds relative to a norm: at it, just above it, just under it, and well under it."""


def excess(gradient: PerExample, clipping: Clipping, dtype: torch.dtype = torch.float32) -> float:
    """What one record adds to a sum, relative to what it may."""
    total = contributions(gradient, dtype).clipped_sum(clipping)
    return float(total.norm(p=1 if isinstance(clipping, L1) else 2)) / clipping.sensitivity


def drawn(name: str, count: int = 10) -> list[PerExample]:
    return [FORMS[name](torch.Generator().manual_seed(seed)) for seed in range(count)]

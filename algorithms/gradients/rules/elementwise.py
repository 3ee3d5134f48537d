"""Elementwise operations that broadcast a parameter over the batch: biases, scales, positions."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from algorithms.gradients.grad_sample_recorder import (
    Args,
    Func,
    Gradients,
    GradSampleRecorder,
    Kwargs,
    name_of,
)
from algorithms.gradients.grads import DenseGrad
from algorithms.gradients.padding import Layout, UnrecordedError
from algorithms.gradients.rules.shared import words, writes

_SUMS = words("add __add__ __radd__ __iadd__ add_")
_STRETCHES = words("expand expand_as broadcast_to")
_PRODUCTS = words("mul __mul__ __rmul__ multiply")
_OTHERS = words(
    "sub __sub__ __rsub__ __isub__ sub_ rsub subtract mul __mul__ __rmul__ __imul__ mul_ multiply div __truediv__"
    " __rtruediv__ true_divide divide div_ where masked_fill maximum minimum addcmul addcdiv lerp __pow__ pow"
)
ELEMENTWISE = _SUMS | _STRETCHES | _OTHERS


def elementwise(tape: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """An elementwise function with one output, whose arguments broadcast to its shape."""
    name, out, batch = name_of(func), tape.output_layout, tape.batch
    leaves, structure = tree_flatten((args, kwargs))
    names = {i: own for i, leaf in enumerate(leaves) if (own := tape.name(leaf)) is not None}
    is_real = not any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in leaves)
    is_sum = name in _STRETCHES or (name in _SUMS and not kwargs and is_real)
    is_product = name in _PRODUCTS and len(names) == 1 and not kwargs and is_real
    if kwargs.get("out") is not None or (writes(name, kwargs) and 0 in names):
        raise UnrecordedError(f"the operation '{name}' on a parameter")
    # A value that is overwritten is needed as it was; others must not change until the gradients are computed.
    before = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    kept: list[Tensor] = []
    if not is_sum:
        if writes(name, kwargs):
            before[0] = before[0].clone()
        kept = [leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in names]
        kept = kept[1:] if writes(name, kwargs) else kept
    output = func(*args, **kwargs)
    shape, shapes = output.shape, {i: leaves[i].shape for i in names}

    def gradients(errors: Tensor) -> Gradients:
        stretched = dict.fromkeys(names, errors)
        if is_product:
            (place,) = names
            stretched = {place: errors * before[1 - place]}
        elif not is_sum:
            free = {i: before[i].expand(shape).detach().requires_grad_() for i in names}
            with torch.enable_grad():
                some, named = tree_unflatten(
                    [
                        free.get(i, leaf.clone() if i == 0 and writes(name, kwargs) else leaf)
                        for i, leaf in enumerate(before)
                    ],
                    structure,
                )
                again = func(*some, **named)
            back = torch.autograd.grad(again, list(free.values()), errors, materialize_grads=True)
            stretched = dict(zip(free, back, strict=True))
        rows: dict[str, Tensor] = {}
        for i, values in stretched.items():
            found = summed_to(values, shapes[i], out, batch)
            rows[names[i]] = rows[names[i]] + found if names[i] in rows else found
        return {name: DenseGrad(gradient) for name, gradient in rows.items()}

    return tape.keep(output, gradients, *kept)


def summed_to(values: Tensor, shape: torch.Size, out: Layout, batch: int) -> Tensor:
    """Sum each record's values over the dimensions along which a tensor of this shape was broadcast; [batch, numel]."""
    full = (1,) * (values.dim() - len(shape)) + tuple(shape)
    if full[out.dimension] != 1:
        raise UnrecordedError("a parameter that has the dimension of the records")
    by_record = out.by_record(values, batch)
    rest = full[: out.dimension] + full[out.dimension + 1 :]
    first = 2 if out.folded > 1 else 1
    over = [first + i for i, size in enumerate(rest) if size == 1]
    over += [1] if out.folded > 1 else []
    return (by_record.sum(dim=over) if over else by_record).reshape(batch, -1)

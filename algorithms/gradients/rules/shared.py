"""Tensors computed from parameters alone, which all records share: standardised weights, positions, attention biases.

One autograd graph holds all of these computations. The records' gradients of the results pass back through it in one
batched call. If an operation only reshapes or permutes values, gradients keep their closed form.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from algorithms.gradients.embedding_grad import EmbeddingGrad
from algorithms.gradients.grad_sample_recorder import (
    Args,
    Func,
    Gradients,
    GradSampleRecorder,
    Kwargs,
    has_gradient,
    name_of,
    tensors_in,
)
from algorithms.gradients.grads import DenseGrad, LinearGrad, PerExample
from algorithms.gradients.padding import UnrecordedError
from algorithms.gradients.per_example_gradients import combined


def words(text: str) -> frozenset[str]:
    """The set of names in a text."""
    return frozenset(text.split())


WITHOUT_GRADIENT = words(
    "detach data.__get__ zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full"
    " new_empty new_tensor size sign round floor ceil"
)
"""Functions of a tensor through which no gradient passes."""

_SAME_ORDER = words(
    "view reshape flatten unflatten unsqueeze squeeze view_as reshape_as contiguous to float double type type_as clone"
    " alias"
)
"""Functions whose output has the same numbers as the input, in the same order."""

_MOVES = words("add __add__ __radd__ sub __sub__")
"""Functions whose derivative by the first tensor is 1 if the other argument is a number."""

_LIKE_ANOTHER = words("view_as reshape_as type_as expand_as")
"""Functions that use only the shape or type of their second tensor."""

_TRANSPOSED = frozenset(
    ("t", "transpose", "permute", "swapaxes", "swapdims", "T.__get__", "mT.__get__", "H.__get__")
)


def writes(name: str, kwargs: Kwargs) -> bool:
    """Whether a function writes into an existing tensor."""
    in_place = name.endswith("_") and not name.endswith("__")
    inside = (
        name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
    )
    return (
        in_place
        or inside
        or name == "__setitem__"
        or name.endswith("__set__")
        or kwargs.get("out") is not None
    )


def shared(tape: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """An operation on parameters and on values that all records share."""
    name = name_of(func)
    leaves, structure = tree_flatten((args, kwargs))
    if name in WITHOUT_GRADIENT or not torch.is_grad_enabled():
        return func(*args, **kwargs)
    is_written = writes(name, kwargs)
    if is_written and type(args[0]) is Tensor and args[0]._base is None and has_gradient(args[0]):
        tape.follow(args[0])
    if is_written and (tape.name(args[0]) is None or name.endswith("__set__") or "out" in kwargs):
        raise UnrecordedError(f"the operation '{name}' on a parameter")
    places = [i for i, leaf in enumerate(leaves) if tape.name(leaf) is not None]
    if name in _LIKE_ANOTHER:
        places = [i for i in places if i == 0]
    free = {i: _followed(tape, leaves[i]) for i in places if has_gradient(leaves[i])}
    # Keep tensors that checkpointing would drop: no layer runs again to recompute them.
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        some, named = tree_unflatten([free.get(i, leaf) for i, leaf in enumerate(leaves)], structure)
        followed = func(*some, **named)
    if is_written:
        tape.overwritten(args[0])
    back = {id(copy): leaves[i] for i, copy in free.items()}
    moving = [leaf for leaf in tensors_in(followed) if leaf.requires_grad and id(leaf) not in back]
    if moving:
        source = str(tape.name(leaves[next(iter(free))]))
        closed = _closed_form(name, args, moving[0]) if len(free) == len(moving) == 1 else None
        back |= {id(leaf): own for leaf, own in zip(moving, tape.make(moving, source, closed), strict=True)}
    return tree_map_only(Tensor, lambda leaf: back.get(id(leaf), leaf), followed)


def _followed(tape: GradSampleRecorder, tensor: Tensor) -> Tensor:
    """A parameter, or a tensor computed from parameters, in the shared graph."""
    return tape.graph.setdefault(str(tape.name(tensor)), tensor.detach().requires_grad_())


def pulled_back(tape: GradSampleRecorder, found: dict[str, list[PerExample]]) -> dict[str, list[PerExample]]:
    """Pull gradients of tensors computed from parameters back to the parameters; returns all by parameter."""
    ends: list[tuple[Tensor, Tensor]] = []
    for made in reversed(tape.made):
        for name, end in zip(made.names, made.outputs, strict=True):
            if name in found and name in tape.stale:
                raise UnrecordedError("a value computed from parameters is overwritten after its use")
            if name in found:
                part = combined(found.pop(name))
                given = None if made.closed is None else made.closed(part)
                if given is not None:
                    found.setdefault(made.source, []).append(given)
                else:
                    ends.append((end, part.rows.to(end.dtype).view(-1, *end.shape)))
    starts = {name: tape.graph[name] for name in tape.parameters if name in tape.graph}
    for name, gradient in _through(ends, starts).items() if ends else ():
        found.setdefault(name, []).append(gradient)
    tape.made.clear()
    tape.graph.clear()
    return found


def _closed_form(name: str, args: Args, output: Tensor) -> Callable[[PerExample], PerExample | None] | None:
    """A function from the gradients of a single output to those of its parameter, if that needs no graph."""
    parameter = next((arg for arg in args if isinstance(arg, Tensor)), None)
    if parameter is None or parameter.is_complex() or output.is_complex():
        return None
    is_moved = name in _MOVES and not all(isinstance(arg, Tensor) for arg in args)  # by a Python number
    if (name in _SAME_ORDER or is_moved) and parameter.numel() == output.numel():
        return lambda found: found
    if name in _TRANSPOSED and parameter.dim() == 2 and output.shape == parameter.shape[::-1]:
        return _turned
    if name == "embedding" and len(args) >= 2 and isinstance(args[1], Tensor):
        padding = args[2] if len(args) > 2 else None
        return lambda found: _looked_up(found, args[0], args[1], padding)
    if name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.long:
        return lambda found: _looked_up(found, args[1] % len(args[0]), args[0], None)
    return None


def _turned(found: PerExample) -> PerExample | None:
    return LinearGrad(found.errors, found.inputs) if isinstance(found, LinearGrad) else None


def _looked_up(found: PerExample, indices: Tensor, table: Tensor, padding: int | None) -> PerExample:
    """Gradients of a table if every record looks up the same entries."""
    errors = found.rows.view(len(found.rows), indices.numel(), -1)
    places = indices.reshape(-1).long()
    if padding is not None:
        errors = errors * (places != padding % len(table)).to(errors.dtype)[:, None]
    if len(table) > len(places) and table.dim() == 2:
        return EmbeddingGrad(places.expand(len(errors), -1), errors, len(table))
    rows = errors.new_zeros(len(errors), len(table), errors.shape[2]).index_add_(1, places, errors)
    return DenseGrad(rows.flatten(start_dim=1))


def _through(ends: list[tuple[Tensor, Tensor]], starts: dict[str, Tensor]) -> Gradients:
    """Each record's gradients of the `starts`, by name, from those of the `ends` that follow in the graph."""
    outputs, errors = [output for output, _ in ends], [error for _, error in ends]
    inputs = list(starts.values())

    def back(some: list[Tensor], *, together: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            outputs, inputs, some, retain_graph=True, allow_unused=True, is_grads_batched=together
        )

    try:
        given = back(errors, together=True)
    except RuntimeError:  # an operation whose backward pass has no batched form
        each = [back(list(some), together=False) for some in zip(*errors, strict=True)]
        given = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True))
    return {
        name: DenseGrad(gradient.reshape(len(gradient), -1))
        for name, gradient in zip(starts, given, strict=True)
        if gradient is not None
    }

"""The embedding: rows of a table."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from algorithms.gradients.layout import Layout, Unrecorded
from algorithms.gradients.lookups import Lookups
from algorithms.gradients.rules.linear import as_sequence
from algorithms.gradients.tape import Gradients, Tape


def embedding(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """output = weight[input], for input [...] and weight [entries, width]."""
    return _recorded(tape, func, *args, **kwargs)


def _recorded(
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq:
        raise Unrecorded("an embedding with max_norm or scale_grad_by_freq")
    layout, name = tape.layout(input), str(tape.name(weight))
    output = func(input, weight, padding_idx)
    padding = None if padding_idx is None else padding_idx % len(weight)

    def gradients(errors: Tensor) -> Gradients:
        return {name: _lookups(layout, tape.batch, input, errors, padding, len(weight))}

    return tape.keep(output, gradients, input)


def _lookups(
    layout: Layout, batch: int, indices: Tensor, errors: Tensor, padding: int | None, entries: int
) -> Lookups:
    """The lookups of each record; those of the padding entry learn nothing."""
    places = layout.by_record(indices, batch).reshape(batch, -1).long()
    back = as_sequence(layout.by_record(errors, batch))
    if padding is not None:
        back = back * (places != padding).to(back.dtype)[:, :, None]
    return Lookups(places, back, entries)

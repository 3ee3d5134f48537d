"""Recurrent layers on packed sequences, computed on padded ones, whose shapes do not depend on lengths.

`pack_padded_sequence` sorts the records by length and lays their steps out without padding, so that no row of a tensor
belongs to the same record in every pass. Within `Unpacked`, records keep their order and all steps; a layer keeps the
state of a record whose sequence has ended, and gives zeros there. Every result is that of PyTorch, except that padded
outputs are as long as the input, and not as the longest sequence of the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from algorithms.gradients.grad_sample_recorder import Args, Func, Kwargs, name_of
from algorithms.gradients.padding import UnrecordedError

Cell = Callable[..., Any]

_CELLS: dict[str, Cell] = {
    "lstm": torch.lstm_cell,
    "gru": torch.gru_cell,
    "rnn_tanh": torch.rnn_tanh_cell,
    "rnn_relu": torch.rnn_relu_cell,
}
_SORTS = ("sort", "argsort")


class Unpacked(TorchFunctionMode):
    """Replaces the functions of PyTorch that pack, unpack and process packed sequences within its block."""

    def __torch_function__(
        self, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        name, kwargs = name_of(func), kwargs or {}
        if name == "_pack_padded_sequence":
            return _packed(*args, **kwargs)
        if name == "_pad_packed_sequence":
            return _padded(*args, **kwargs)
        if name in _CELLS and len(args) > 8 and isinstance(args[1], Tensor):
            return _layers(_CELLS[name], *args, **kwargs)
        if name in _SORTS and _is_by_length(*args, **kwargs):
            order = torch.arange(len(args[0]), device=args[0].device)  # the records stay in their order
            return order if name == "argsort" else torch.return_types.sort((args[0], order))
        return func(*args, **kwargs)


def _is_by_length(values: Any = None, *_: Any, descending: bool = False, **__: Any) -> bool:
    return descending and isinstance(values, Tensor) and values.dim() == 1 and values.dtype == torch.int64


def _packed(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """All steps of all records, [time x batch, ...], with the lengths as an attribute."""
    steps = input.transpose(0, 1) if batch_first else input
    return _with_lengths(steps, lengths), torch.full((len(steps),), steps.shape[1])


def _with_lengths(steps: Tensor, lengths: Tensor) -> Tensor:
    found = steps.flatten(0, 1)
    found.lengths = lengths.to(steps.device)  # type: ignore[attr-defined]
    return found


def _lengths_of(data: Tensor) -> Tensor:
    found = getattr(data, "lengths", None)
    if found is None:
        raise UnrecordedError("the data of packed sequences are changed before a layer takes them")
    lengths: Tensor = found
    return lengths


def _padded(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    lengths, steps = _lengths_of(data), torch.unflatten(data, 0, (len(batch_sizes), -1))
    if total_length != len(steps):
        raise UnrecordedError("packed sequences are padded to another length than they had")
    if padding_value != 0.0:
        steps = torch.where(_taken(steps, lengths), steps, padding_value)
    return steps.transpose(0, 1) if batch_first else steps, lengths.cpu()


def _taken(steps: Tensor, lengths: Tensor) -> Tensor:
    """Which steps are within a record's sequence, [time, batch, 1]."""
    places = torch.arange(len(steps), device=steps.device)
    return (places[:, None] < lengths)[..., None]


def _layers(
    cell: Cell,
    data: Tensor,
    batch_sizes: Tensor,
    start: Tensor | tuple[Tensor, ...],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """`torch.lstm` and its like for packed sequences: outputs, hidden states and, of an LSTM, cell states."""
    each, directions = 4 if has_biases else 2, 2 if bidirectional else 1
    if len(weights) != each * layers * directions:
        raise UnrecordedError("a recurrent layer with projections")
    lengths, steps = _lengths_of(data), torch.unflatten(data, 0, (len(batch_sizes), -1))
    taken, starts = _taken(steps, lengths), start if isinstance(start, tuple) else (start,)
    ends = []
    for layer in range(layers):
        outputs = []
        for place in range(layer * directions, (layer + 1) * directions):
            own = weights[place * each : (place + 1) * each]
            state = tuple(part[place] for part in starts)
            found, state = _unrolled(cell, steps, taken, own, state, backward=place % directions == 1)
            outputs.append(found)
            ends.append(state)
        steps = torch.cat(outputs, dim=-1)
        if dropout and training and layer < layers - 1:
            steps = functional.dropout(steps, dropout)
    return _with_lengths(steps, lengths), *(torch.stack(parts) for parts in zip(*ends, strict=True))


def _unrolled(
    cell: Cell,
    steps: Tensor,
    taken: Tensor,
    weights: Sequence[Tensor],
    state: tuple[Tensor, ...],
    *,
    backward: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One direction of one layer: outputs [time, batch, hidden], zero after a sequence's end, and its last state."""
    outputs: list[Tensor] = []
    places = range(len(steps))
    for place in reversed(places) if backward else places:
        found = cell(steps[place], state if len(state) > 1 else state[0], *weights)
        following = found if isinstance(found, tuple) else (found,)
        here = taken[place]
        state = tuple(torch.where(here, new, old) for new, old in zip(following, state, strict=True))
        outputs.append(torch.where(here, following[0], 0.0))
    return torch.stack(outputs[::-1] if backward else outputs), state

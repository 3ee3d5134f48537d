"""LSTM and GRU: one or two directions, several layers.

All gradients of a layer follow from those of its gates before their nonlinearities, so a layer is two linear layers
with a sequence: one of what came from below, one of the hidden state before each step.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from algorithms.gradients import recurrent
from algorithms.gradients.layout import Layout, Unrecorded
from algorithms.gradients.rules.linear import linear_gradients
from algorithms.gradients.tape import Gradients, Tape

_BY_STEP = Layout(1)  # sequences are [length, batch, width] inside


class Weights(NamedTuple):
    """The weights of one direction of one layer."""

    inputs: Tensor
    hidden: Tensor
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None


class Settings(NamedTuple):
    """What `torch.lstm` and `torch.gru` take after the weights."""

    has_biases: bool
    layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1


def lstm(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.lstm(input, (h, c), weights, ...) -> (output, h, c)."""
    input, start, weights, *rest = args
    return _run(tape, input, tuple(start), weights, Settings(*rest), _lstm_layer)


def gru(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.gru(input, h, weights, ...) -> (output, h)."""
    input, start, weights, *rest = args
    return _run(tape, input, (start,), weights, Settings(*rest), _gru_layer)


Layer = Callable[[Tape, Tensor, list[Weights], tuple[Tensor, ...]], recurrent.Unrolled]


def _run(
    tape: Tape,
    input: Tensor,
    start: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    settings: Settings,
    layer: Layer,
) -> tuple[Tensor, ...]:
    """All layers, one after the other; each runs both directions at once."""
    by_direction = _grouped(weights, settings)
    if not tape.has_layout(input, Layout(0 if settings.batch_first else 1)):
        raise Unrecorded("a recurrent layer whose records are folded into another dimension")
    sequence = input.transpose(0, 1) if settings.batch_first else input
    ends = []
    for index in range(settings.layers):
        place = slice(index * settings.directions, (index + 1) * settings.directions)
        both = torch.stack([sequence, sequence.flip(0)][: settings.directions])
        unrolled = layer(tape, both, by_direction[place], tuple(part[place] for part in start))
        ends.append(unrolled.last)
        forward, *backward = unrolled.outputs.unbind()
        sequence = torch.cat([forward, *(part.flip(0) for part in backward)], dim=-1)
        if settings.dropout and settings.training and index < settings.layers - 1:
            sequence = functional.dropout(sequence, settings.dropout)
    output = sequence.transpose(0, 1) if settings.batch_first else sequence
    return (output, *(torch.cat(parts) for parts in zip(*ends, strict=True)))


def _grouped(weights: Sequence[Tensor], settings: Settings) -> list[Weights]:
    """The flat list of torch as weights by layer and direction."""
    each = 4 if settings.has_biases else 2
    if (
        not isinstance(settings.has_biases, bool)
        or len(weights) != each * settings.layers * settings.directions
    ):
        raise Unrecorded("a recurrent layer with packed sequences or projections")
    return [Weights(*weights[i : i + each]) for i in range(0, len(weights), each)]


def _lstm_layer(
    tape: Tape, sequences: Tensor, weights: list[Weights], start: tuple[Tensor, ...]
) -> recurrent.Unrolled:
    """sequences: [directions, length, batch, inputs]; the gates' gradients are those of both biases, too."""
    # The hidden states are known only after the gates were kept; gradients are asked for after both.
    later: list[recurrent.Unrolled] = []

    def gradients(errors: Tensor) -> Gradients:
        below = _gradients(tape, sequences, errors, [(w.inputs, w.input_bias) for w in weights])
        return below | _gradients(
            tape, later[0].previous, errors, [(w.hidden, w.hidden_bias) for w in weights]
        )

    biases = [
        part
        for part in (_stacked(weights, "input_bias"), _stacked(weights, "hidden_bias"))
        if part is not None
    ]
    gates = _gates(sequences, weights, sum(biases[1:], biases[0]) if biases else None)
    # Gates = W x + b_x + U h + b_h: all four have the gates' gradient as their error, each step adding a product.
    gates = tape.keep(gates, gradients, sequences)
    h, c = (part.to(gates.dtype) for part in start)
    later.append(recurrent.lstm(gates, torch.stack([w.hidden for w in weights]).to(gates.dtype), (h, c)))
    return later[0]


def _gru_layer(
    tape: Tape, sequences: Tensor, weights: list[Weights], start: tuple[Tensor, ...]
) -> recurrent.Unrolled:
    """As `_lstm_layer`; the gates that come from the hidden state have gradients of their own."""
    later: list[recurrent.Unrolled] = []

    def of_inputs(errors: Tensor) -> Gradients:
        return _gradients(tape, sequences, errors, [(w.inputs, w.input_bias) for w in weights])

    def of_hidden(errors: Tensor) -> Gradients:
        return _gradients(tape, later[0].previous, errors, [(w.hidden, w.hidden_bias) for w in weights])

    gates = tape.keep(_gates(sequences, weights, _stacked(weights, "input_bias")), of_inputs, sequences)
    # In `new` the reset gate multiplies U h + b_h but not W x + b_x, so the two have different errors: zeros that are
    # added to the hidden part are an output of their own, whose gradient is the error of U and b_h.
    added = tape.keep(torch.zeros_like(gates), of_hidden)
    hidden = torch.stack([w.hidden for w in weights]).to(gates.dtype)
    bias = _stacked(weights, "hidden_bias")
    bias = None if bias is None else bias.to(gates.dtype)
    later.append(recurrent.gru(gates, added, hidden, bias, start[0].to(gates.dtype)))
    return later[0]


def _gates(sequences: Tensor, weights: list[Weights], bias: Tensor | None) -> Tensor:
    """What the inputs add to the gates, [directions, length, batch, gates], both directions in one product."""
    transposed = torch.stack([w.inputs for w in weights]).transpose(1, 2)
    flat = sequences.flatten(start_dim=1, end_dim=2)
    gates = torch.bmm(flat, transposed) if bias is None else torch.baddbmm(bias[:, None, :], flat, transposed)
    return torch.unflatten(gates, 1, sequences.shape[1:3])


def _stacked(weights: list[Weights], part: str) -> Tensor | None:
    """One bias of every direction, [directions, gates]; None for layers without biases."""
    found = [getattr(w, part) for w in weights]
    return None if found[0] is None else torch.stack(found)


def _gradients(
    tape: Tape, inputs: Tensor, errors: Tensor, pairs: list[tuple[Tensor, Tensor | None]]
) -> Gradients:
    """The gradients of one weight and one bias of every direction."""
    found: Gradients = {}
    for x, error, (weight, bias) in zip(inputs, errors, pairs, strict=True):
        found |= linear_gradients(x, error, _BY_STEP, (tape.name(weight), tape.name(bias)), tape.batch)
    return found

"""LSTM, GRU and simple recurrent layers, with one or two directions and several layers, and single steps of them.

The gradient of each weight is a sum over steps of outer products of the preactivations' gradient and the step's input
or previous hidden state (Lee and Kifer 2021, arXiv:2009.03106). A layer therefore counts as two linear layers on a
sequence, and one backward pass that returns the gradient of every step's preactivations gives all that per-example
gradients need. Backpropagation through time is written by hand: a few calls per step for both directions together, and
no autograd graph within a sequence.

Packed sequences are computed as padded ones within `Unpacked`. `pack_padded_sequence` sorts the records by length and
lays their steps out without padding, so that no row of a tensor belongs to the same record in every pass. Within
`Unpacked`, records keep their order and all steps; a layer keeps the state of a record whose sequence has ended, and
gives zeros there. Every result is that of PyTorch, except that padded outputs are as long as the input, and not as the
longest sequence of the batch. The rule takes all steps together: it reverses each sequence within its length, so that
what follows an end changes nothing before it, and reads each record's final states where its sequence ends.

Letters in shapes: D directions, T steps in processing order, B records, H hidden units. A second direction runs over
reversed time; the caller flips its inputs and outputs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from algorithms.gradients.grad_sample_recorder import (
    Args,
    Func,
    Gradients,
    GradSampleRecorder,
    Kwargs,
    Layout,
    RecordedTensor,
    UnrecordedError,
    active_recorder,
    name_of,
)
from algorithms.gradients.parameter_gradients import BiasGrad, PerExample
from algorithms.gradients.rules.general import general
from algorithms.gradients.rules.layers import linear, linear_gradients

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


class Unrolled(NamedTuple):
    """The results of a recurrence.

    outputs: [D, T, B, H], the hidden state after each step. previous: [D, T, B, H], the hidden state before each step,
    without gradient. last: the final hidden state and, for an LSTM, the final cell state, each [D, B, H].
    """

    outputs: Tensor
    previous: Tensor
    last: tuple[Tensor, ...]


def unrolled_lstm(
    gates: Tensor, weight: Tensor, start: tuple[Tensor, Tensor], *, ends: Tensor | None = None
) -> Unrolled:
    """Run an LSTM, given its inputs times the input weight plus biases (Hochreiter and Schmidhuber 1997).

    gates: [D, T, B, 4H], in the order input, forget, cell, output, both biases added; its gradient is that of the
    preactivations. weight: [D, 4H, H], from hidden state to gates; no gradient is computed for it. start: the hidden
    and the cell state before the first step, each [D, B, H]. All have the same floating type. ends: how many steps each
    record has taken when its final cell state is read, [B]; all by default. Not differentiable twice, and results must
    not be overwritten in place.
    """
    outputs, previous, *last = _Lstm.apply(gates, weight, *start, ends)  # type: ignore[no-untyped-call]
    return Unrolled(outputs, previous, tuple(last))


def unrolled_gru(
    gates: Tensor, recurrent: Tensor, weight: Tensor, bias: Tensor | None, start: Tensor
) -> Unrolled:
    """Run a GRU, given its inputs times the input weight plus bias (Cho et al. 2014, arXiv:1406.1078).

    gates: [D, T, B, 3H], in the order reset, update, new. recurrent: [D, T, B, 3H], zeros to add to the hidden state's
    part, h weight^T + bias; they may be expanded from one number. As in `torch.nn.GRU`, the reset gate multiplies that
    part in `new`, so the preactivations of the two parts have different gradients: those of `gates` and of `recurrent`.
    weight: [D, 3H, H] and bias: [D, 3H]; no gradient is computed for them. start: the hidden state before the first
    step, [D, B, H]. All have the same floating type. Not differentiable twice, and results must not be overwritten in
    place.
    """
    outputs, previous, *last = _Gru.apply(gates, recurrent, weight, bias, start)  # type: ignore[no-untyped-call]
    return Unrolled(outputs, previous, tuple(last))


def unrolled_rnn(
    gates: Tensor, weight: Tensor, start: tuple[Tensor], *, squash: Callable[[Tensor], Tensor]
) -> Unrolled:
    """Run a simple recurrent network, h_t = squash(gates_t + weight h_(t-1)) (Elman 1990).

    gates: [D, T, B, H], both biases added. weight: [D, H, H]. start: the hidden state before the first step, [D, B, H].
    """
    transposed, states = weight.transpose(1, 2), list(start)  # [D, H, H], and states [D, B, H]
    for step in gates.unbind(1):  # [D, B, H]
        states.append(squash(torch.baddbmm(step, states[-1], transposed)))
    previous = torch.stack([state.detach() for state in states[:-1]], dim=1)
    return Unrolled(torch.stack(states[1:], dim=1), previous, (states[-1],))


class _Lstm(Function):
    # Views of all steps are made before the loops: a view takes as long as the arithmetic of a small step.

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor, ends: Tensor | None
    ) -> tuple[Tensor, ...]:
        # `hiddens`: [D, T + 1, B, H], the state before each step and after the last.
        steps = gates.shape[1]
        # saved: [T + 1, 6, D, B, H], of each step the cell state c before it, i, f, g, o and tanh(c'). After the last
        # step there is the cell state alone.
        hiddens, saved = _states(hidden, steps), hidden.new_empty(steps + 1, 6, *hidden.shape)
        # sums: [D, B, 4H], in the order i, f, g, o, which each product fills.
        sums, transposed = hidden.new_empty(gates[:, 0].shape), weight.transpose(1, 2)
        # [4, D, B, H]; by step [4, D, B, H] and [2, D, B, H]
        by_gate, gates_at, i_and_f = _by_gate(sums, 4), saved[:, 1:5].unbind(), saved[:, 1:3].unbind()
        # By step, [D, B, H] each.
        h, (c, i, f, g, o, squashed) = hiddens.unbind(1), (part.unbind() for part in saved.unbind(1))
        c[0].copy_(cell)
        # c' = f c + i g and h' = o tanh(c'), of the gates i, f, o = sigmoid(...) and g = tanh(...).
        for t, step in enumerate(gates.unbind(1)):
            torch.baddbmm(step, h[t], transposed, out=sums)
            # A CPU computes functions of strided values one row at a time, so they are copied first.
            gates_at[t].copy_(by_gate)
            i_and_f[t].sigmoid_()
            g[t].tanh_()
            o[t].sigmoid_()
            torch.mul(f[t], c[t], out=c[t + 1]).addcmul_(i[t], g[t])
            torch.tanh(c[t + 1], out=squashed[t])
            torch.mul(o[t], squashed[t], out=h[t + 1])
        ctx.save_for_backward(weight, saved, hiddens, ends)
        cells = saved[:, 0].transpose(0, 1)  # [D, T + 1, B, H]
        return *_results(ctx, hiddens), cells[:, -1] if ends is None else _at_steps(cells, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, saved, hiddens, ends = ctx.saved_tensors
        outputs, to_hidden = _gradients_above(above, hiddens)
        to_ends = None if ends is None else above[3]
        # A copy, since the loop changes it in place.
        to_cell = _or_zero(above[3] if ends is None else None, saved[0, 0]).clone()
        # [D, T, B, 4H], the gradients of preactivations
        delta = outputs.new_empty(*outputs.shape[:3], weight.shape[1])
        by_gate = _by_gate(delta, 4)  # [4, D, T, B, H]
        to_output, delta_at, forget = outputs.unbind(1), delta.unbind(1), saved[:, 2].unbind()
        to_i_f_g, to_o = by_gate[:3].unbind(2), by_gate[3].unbind(1)  # by step, [3, D, B, H] and [D, B, H]
        to_hidden += to_output[-1]
        each = max(1, _IN_CACHE // to_cell.numel())  # how many steps' derivatives are computed together
        for first in reversed(range(0, len(delta_at), each)):
            steps = range(first, min(first + each, len(delta_at)))
            of_i_f_g, of_o, through_tanh = _lstm_derivatives(saved[steps.start : steps.stop])
            for t in reversed(steps):
                if to_ends is not None:  # after this step, where it is a record's last
                    to_cell += torch.where((ends == t + 1)[:, None], to_ends, 0.0)
                # h' = o tanh(c') hands its gradient to o and to c', which also has that of the next step.
                torch.mul(to_hidden, of_o[t - first], out=to_o[t])
                to_cell.addcmul_(to_hidden, through_tanh[t - first])
                # c' = f c + i g hands it on to the gates and, times f, to the state before.
                torch.mul(to_cell, of_i_f_g[t - first], out=to_i_f_g[t])
                to_cell *= forget[t]
                # [D, B, 4H] x [D, 4H, H]: for the state before the step, which is also an output
                if t:
                    torch.baddbmm(to_output[t - 1], delta_at[t], weight, out=to_hidden)
                else:
                    torch.bmm(delta_at[t], weight, out=to_hidden)
        return delta, None, to_hidden, to_cell, None


_IN_CACHE = 2**16
"""How many numbers of steps a backward pass computes together: for a few steps, calls take longer than arithmetic."""


def _lstm_derivatives(saved: Tensor) -> tuple[Sequence[Tensor], ...]:
    """Derivatives by preactivations and states, for some steps of an LSTM at once; each a sequence by step.

    saved: as in `_Lstm`, of these steps. Returns those of c' by the preactivations of i, f and g, [3, D, B, H], of h'
    by that of o, and of h' by c'.
    """
    c, i, f, g, o, squashed = saved.unbind(1)
    of_gates = torch.empty_like(saved[:, :4])
    # The derivative of sigmoid is y - y^2, that of tanh 1 - y^2.
    for index, gate, factor in ((0, i, g), (1, f, c), (3, o, squashed)):
        # (y - y^2) times the other factor of c' or h'
        torch.addcmul(gate, gate, gate, value=-1.0, out=of_gates[:, index]).mul_(factor)
    torch.addcmul(i, i * g, g, value=-1.0, out=of_gates[:, 2])  # i (1 - g^2)
    through_tanh = torch.addcmul(o, o * squashed, squashed, value=-1.0)  # o (1 - tanh(c')^2)
    return of_gates[:, :3].unbind(), of_gates[:, 3].unbind(), through_tanh.unbind()


class _Gru(Function):
    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, recurrent: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor
    ) -> tuple[Tensor, ...]:
        steps = gates.shape[1]
        # saved: [T, 4, D, B, H], of each step r, z, n and the part of n that r multiplies.
        hiddens, saved = _states(hidden, steps), hidden.new_empty(steps, 4, *hidden.shape)
        sums, transposed = hidden.new_empty(gates[:, 0].shape), weight.transpose(1, 2)
        by_gate, of_inputs = _by_gate(sums, 3), _by_gate(gates, 3)  # [3, D, B, H] and [3, D, T, B, H]
        sums_of_both, sum_of_new = by_gate[:2], by_gate[2]
        inputs_of_both, input_of_new = of_inputs[:2].unbind(2), of_inputs[2].unbind(1)
        # By step; both: r and z, [2, D, B, H]
        offsets, h, both = recurrent.unbind(1), hiddens.unbind(1), saved[:, :2].unbind()
        r, z, n, part = (each.unbind() for each in saved.unbind(1))
        added = None if bias is None else bias[:, None]
        # h' = (1 - z) n + z h, of r, z = sigmoid(inputs + sums) and n = tanh(input + r sum): r multiplies n's recurrent
        # part alone, so that the two parts have different gradients.
        for t in range(steps):
            torch.baddbmm(offsets[t], h[t], transposed, out=sums)
            if added is not None:
                sums += added
            torch.add(inputs_of_both[t], sums_of_both, out=both[t]).sigmoid_()
            part[t].copy_(sum_of_new)
            torch.addcmul(input_of_new[t], r[t], part[t], out=n[t]).tanh_()
            torch.lerp(n[t], h[t], z[t], out=h[t + 1])  # n + z (h - n)
        ctx.save_for_backward(weight, saved, hiddens)
        return _results(ctx, hiddens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, saved, hiddens = ctx.saved_tensors
        outputs, to_hidden = _gradients_above(above, hiddens)
        delta = outputs.new_empty(*outputs.shape[:3], weight.shape[1])  # [D, T, B, 3H]
        delta_recurrent = torch.empty_like(delta)
        of_inputs, of_sums = _by_gate(delta, 3), _by_gate(delta_recurrent, 3)  # [3, D, T, B, H] each
        to_r, to_z, to_n = (each.unbind(1) for each in of_inputs)
        both, sums_of_both, sum_of_new = of_inputs[:2].unbind(2), of_sums[:2].unbind(2), of_sums[2].unbind(1)
        to_output, h, recurrent_at = outputs.unbind(1), hiddens.unbind(1), delta_recurrent.unbind(1)
        r, z, n, part = (each.unbind() for each in saved.unbind(1))
        for t in reversed(range(len(saved))):
            to_hidden += to_output[t]
            # dh'/dz = h - n, times z (1 - z)
            _sigmoid_backward(to_hidden * (h[t] - n[t]), z[t], grad_input=to_z[t])
            _tanh_backward(to_hidden * (1 - z[t]), n[t], grad_input=to_n[t])  # dh'/dn = 1 - z, times 1 - n^2
            _sigmoid_backward(to_n[t] * part[t], r[t], grad_input=to_r[t])  # r multiplies n's recurrent part
            # Inputs and recurrent sums are added in r and z, so that their gradients are the same there.
            sums_of_both[t].copy_(both[t])
            torch.mul(to_n[t], r[t], out=sum_of_new[t])
            to_hidden *= z[t]  # what reaches the state before through z
            to_hidden.baddbmm_(recurrent_at[t], weight)  # [D, B, 3H] x [D, 3H, H]
        return delta, delta_recurrent, None, None, to_hidden


def _states(start: Tensor, steps: int) -> Tensor:
    """A buffer for the states before each step and after the last, [D, T + 1, B, H], with the first filled in."""
    directions, batch, width = start.shape
    states = start.new_empty(directions, steps + 1, batch, width)
    states[:, 0] = start
    return states


def _at_steps(states: Tensor, steps: Tensor) -> Tensor:
    """Each record's state at a step of its own: [D, T, B, H], [B] -> [D, B, H]."""
    return torch.take_along_dim(states, steps.view(1, 1, -1, 1), dim=1).squeeze(1)


def _by_gate(preactivations: Tensor, gates: int) -> Tensor:
    """A view of [..., gates H] as [gates, ..., H]."""
    return torch.unflatten(preactivations, -1, (gates, -1)).movedim(-2, 0)


def _results(ctx: Any, hiddens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs, the hidden state before each step, and the final hidden state, as views of the same memory."""
    outputs, previous, last = hiddens[:, 1:], hiddens[:, :-1], hiddens[:, -1]
    # `previous` is a factor of the weights' gradients alone. Gradients of
    # outputs that nothing uses then come as None.
    ctx.mark_non_differentiable(previous)
    ctx.set_materialize_grads(False)
    return outputs, previous, last


def _gradients_above(above: tuple[Tensor | None, ...], hiddens: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the outputs and, as a new tensor, of the final hidden state; zero if there is none."""
    return _or_zero(above[0], hiddens[:, 1:]), _or_zero(above[2], hiddens[:, -1]).clone()


def _or_zero(gradient: Tensor | None, like: Tensor) -> Tensor:
    return like.new_zeros(()).expand_as(like) if gradient is None else gradient


class Weights(NamedTuple):
    """The weights of one direction of one layer."""

    inputs: Tensor
    hidden: Tensor
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None


class RecurrentSettings(NamedTuple):
    """The arguments of `torch.lstm`, `torch.gru` and `torch.rnn_tanh` after the weights."""

    has_biases: bool
    layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1


def lstm(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """torch.lstm(input, (h, c), weights, ...) -> (output, h, c)."""
    input, start, weights, *rest = args
    return _run(recorder, input, tuple(start), weights, RecurrentSettings(*rest), _lstm_layer)


def gru(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """torch.gru(input, h, weights, ...) -> (output, h)."""
    input, start, weights, *rest = args
    return _run(recorder, input, (start,), weights, RecurrentSettings(*rest), _gru_layer)


def rnn(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """torch.rnn_tanh(input, h, weights, ...) -> (output, h), and torch.rnn_relu."""
    input, start, weights, *rest = args
    return _run(recorder, input, (start,), weights, RecurrentSettings(*rest), _LAYERS[name_of(func)])


def recurrent_cell(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """torch.lstm_cell(input, (h, c), weights and biases) -> (h, c) and similar cells, for input [batch, width]."""
    input, start, *weights = args
    states = tuple(start) if isinstance(start, tuple | list) else (start,)
    parts = (input, *states)
    layouts = {recorder.layout_if_any(part) for part in parts}
    first = all(layout is not None and layout.dimension == 0 for layout in layouts)
    if kwargs or not first or len(layouts) > 1 or any(recorder.name(part) is not None for part in parts):
        return general(recorder, func, args, kwargs)
    of_input, of_hidden, *biases = weights
    input_bias, hidden_bias = biases or (None, None)
    below = linear(recorder, functional.linear, (input, of_input, input_bias), {})
    beside = linear(recorder, functional.linear, (states[0], of_hidden, hidden_bias), {})
    return _CELLS[func](below, beside, *states)


def _lstm_cell(below: Tensor, beside: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (below + beside).chunk(4, dim=1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru_cell(below: Tensor, beside: Tensor, hidden: Tensor) -> Tensor:
    (r, z, n), (of_r, of_z, of_n) = below.chunk(3, dim=1), beside.chunk(3, dim=1)
    # (1 - z) n + z h
    return torch.lerp((n + (r + of_r).sigmoid() * of_n).tanh(), hidden, (z + of_z).sigmoid())


_CELLS: dict[Func, Callable[..., Any]] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: lambda below, beside, hidden: (below + beside).tanh(),
    torch.rnn_relu_cell: lambda below, beside, hidden: (below + beside).relu(),
}
Layer = Callable[[GradSampleRecorder, Layout, Tensor, list[Weights], tuple[Tensor, ...]], Unrolled]


def _run(
    recorder: GradSampleRecorder,
    input: Tensor,
    start: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    settings: RecurrentSettings,
    layer: Layer,
) -> tuple[Tensor, ...]:
    """Run all layers in turn, each in both directions at once."""
    by_direction = _group_weights(weights, settings)
    layout = recorder.layout_if_any(input)
    if layout is None or layout.dimension != (0 if settings.batch_first else 1):
        raise UnrecordedError("a recurrent layer whose records are in another dimension")
    layout = layout._replace(dimension=1)  # sequences are [length, batch, width] inside
    sequence = input.transpose(0, 1) if settings.batch_first else input
    sequence, ends = _in_turn(
        recorder, layout, sequence, start, by_direction, settings, layer, lambda steps: steps.flip(0)
    )
    return (sequence.transpose(0, 1) if settings.batch_first else sequence), *ends


def _in_turn(
    recorder: GradSampleRecorder,
    layout: Layout,
    sequence: Tensor,
    start: tuple[Tensor, ...],
    by_direction: list[Weights],
    settings: RecurrentSettings,
    layer: Layer,
    turn: Callable[[Tensor], Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """The last layer's outputs and all final states; turn: reverses sequences [length, batch, width] in time."""
    ends = []
    for index in range(settings.layers):
        directions = slice(index * settings.directions, (index + 1) * settings.directions)
        # [D, T, B, width]; the second direction reads time backwards
        both = torch.stack([sequence, turn(sequence)] if settings.bidirectional else [sequence])
        unrolled = layer(
            recorder, layout, both, by_direction[directions], tuple(part[directions] for part in start)
        )
        ends.append(unrolled.last)  # [D, B, H] each
        forward, *backward = unrolled.outputs.unbind()
        # [T, B, D H], in the order of time again
        sequence = torch.cat([forward, *(turn(part) for part in backward)], dim=-1)
        if settings.dropout and settings.training and index < settings.layers - 1:
            sequence = functional.dropout(sequence, settings.dropout)
    # [layers * D, B, H] each, as torch orders them
    return sequence, [torch.cat(parts) for parts in zip(*ends, strict=True)]


def _group_weights(weights: Sequence[Tensor], settings: RecurrentSettings) -> list[Weights]:
    """Group torch's flat list of weights by layer and direction."""
    each, count = 4 if settings.has_biases else 2, settings.layers * settings.directions
    # `nn.LSTM` with `proj_size` has `weight_hr` after the others of each direction.
    is_projected = len(weights) == (each + 1) * count
    if not isinstance(settings.has_biases, bool) or not (is_projected or len(weights) == each * count):
        raise UnrecordedError("a recurrent layer with packed sequences")
    parts = [weights[i : i + each + is_projected] for i in range(0, len(weights), each + is_projected)]
    return [
        Weights(*weights_of_layer[:each])._replace(
            projection=weights_of_layer[each] if is_projected else None
        )
        for weights_of_layer in parts
    ]


def _lstm_layer(
    recorder: GradSampleRecorder,
    layout: Layout,
    sequences: Tensor,
    weights: list[Weights],
    start: tuple[Tensor, ...],
    ends: Tensor | None = None,
) -> Unrolled:
    is_plain = weights[0].projection is None
    unroll = (
        partial(unrolled_lstm, ends=ends)
        if is_plain
        else partial(_unrolled_projected, recorder, layout, weights)
    )
    return _layer_of_one_sum(unroll, recorder, layout, sequences, weights, start)


def _unrolled_projected(
    recorder: GradSampleRecorder,
    layout: Layout,
    weights: list[Weights],
    gates: Tensor,
    weight: Tensor,
    start: tuple[Tensor, Tensor],
) -> Unrolled:
    """`unrolled_lstm` with each hidden state projected, h_t = P (o_t tanh(c_t)) (Sak et al. 2014, arXiv:1402.1128)."""
    hidden, cell = start
    projections = [w.projection for w in weights if w.projection is not None]
    before, projected = [hidden], list[Tensor]()

    def gradients(grad_outputs: Tensor) -> Gradients:
        pairs = [(projection, None) for projection in projections]
        return _gradients(recorder, layout, torch.stack(projected, dim=1).detach(), grad_outputs, pairs)

    transposed = torch.stack(projections).to(gates.dtype).transpose(1, 2)  # [D, H, P], for P projected units
    # Zeros are added to the projections and recorded as a separate output, as in `_gru_layer`.
    added = recorder.keep(gates.new_zeros(*gates.shape[:3], hidden.shape[2]), gradients)  # [D, T, B, P]
    for step, zeros in zip(gates.unbind(1), added.unbind(1), strict=True):
        # [D, B, H] each; hidden states before are [D, B, P]
        i, f, g, o = torch.baddbmm(step, before[-1], weight.transpose(1, 2)).chunk(4, dim=2)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        projected.append(o.sigmoid() * cell.tanh())  # the projection's input, [D, B, H]
        before.append(torch.baddbmm(zeros, projected[-1], transposed))
    outputs, previous = (torch.stack(part, dim=1) for part in (before[1:], before[:-1]))
    return Unrolled(outputs, previous.detach(), (before[-1], cell))


def _layer_of_one_sum(
    unroll: Callable[..., Unrolled],
    recorder: GradSampleRecorder,
    layout: Layout,
    sequences: Tensor,
    weights: list[Weights],
    start: tuple[Tensor, ...],
) -> Unrolled:
    """A layer whose gates are one sum, so that both biases have the gates' gradients.

    sequences: [directions, length, batch, inputs].
    """
    # The hidden states become known only after the gates are recorded, but before gradients are computed.
    later: list[Unrolled] = []

    def gradients(grad_outputs: Tensor) -> Gradients:
        # Of products e x^T with the inputs, and with the hidden states before each step.
        below = _gradients(
            recorder, layout, sequences, grad_outputs, [(w.inputs, w.input_bias) for w in weights]
        )
        beside = _gradients(
            recorder, layout, later[0].previous, grad_outputs, [(w.hidden, w.hidden_bias) for w in weights]
        )
        for w in weights:
            names = recorder.name(w.input_bias), recorder.name(w.hidden_bias)
            _share_sum(below.get(str(names[0])), beside.get(str(names[1])))
        return below | beside

    biases = [
        part
        for part in (_stack_biases(weights, "input_bias"), _stack_biases(weights, "hidden_bias"))
        if part is not None
    ]
    gates = _gates(sequences, weights, sum(biases[1:], biases[0]) if biases else None)
    # Gates = W x + b_x + U h + b_h: the gates' gradient is the error of all four, summed over steps.
    gates = recorder.keep(gates, gradients, sequences)
    states = tuple(part.to(gates.dtype) for part in start)
    later.append(unroll(gates, torch.stack([w.hidden for w in weights]).to(gates.dtype), states))
    return later[0]


def _share_sum(first: PerExample | None, second: PerExample | None) -> None:
    """Sum output gradients over steps once for two biases that have the same."""
    if isinstance(first, BiasGrad) and isinstance(second, BiasGrad) and first.of.length > 1:
        vars(second)["rows"] = first.rows


def _gru_layer(
    recorder: GradSampleRecorder,
    layout: Layout,
    sequences: Tensor,
    weights: list[Weights],
    start: tuple[Tensor, ...],
) -> Unrolled:
    """`_layer_of_one_sum` for a GRU, where the hidden state's part of the gates has a separate gradient."""
    later: list[Unrolled] = []

    def of_inputs(grad_outputs: Tensor) -> Gradients:
        return _gradients(
            recorder, layout, sequences, grad_outputs, [(w.inputs, w.input_bias) for w in weights]
        )

    def of_hidden(grad_outputs: Tensor) -> Gradients:
        return _gradients(
            recorder, layout, later[0].previous, grad_outputs, [(w.hidden, w.hidden_bias) for w in weights]
        )

    gates = recorder.keep(
        _gates(sequences, weights, _stack_biases(weights, "input_bias")), of_inputs, sequences
    )
    # In `new` the reset gate multiplies U h + b_h but not W x + b_x, so the two have different output gradients. Zeros
    # are added to the hidden part and recorded as a separate output; their gradient is that of U h + b_h.
    added = recorder.keep(torch.zeros_like(gates), of_hidden)
    hidden = torch.stack([w.hidden for w in weights]).to(gates.dtype)
    bias = _stack_biases(weights, "hidden_bias")
    bias = None if bias is None else bias.to(gates.dtype)
    later.append(unrolled_gru(gates, added, hidden, bias, start[0].to(gates.dtype)))
    return later[0]


def _gates(sequences: Tensor, weights: list[Weights], bias: Tensor | None) -> Tensor:
    """The inputs' part of the gates, [directions, length, batch, gates]; both directions in one product."""
    transposed = torch.stack([w.inputs for w in weights]).transpose(1, 2)  # [D, inputs, gates]
    flat = sequences.flatten(start_dim=1, end_dim=2)  # [D, T B, inputs]
    gates = torch.bmm(flat, transposed) if bias is None else torch.baddbmm(bias[:, None, :], flat, transposed)
    return torch.unflatten(gates, 1, sequences.shape[1:3])  # [D, T, B, gates]


def _stack_biases(weights: list[Weights], part: str) -> Tensor | None:
    """One bias of every direction, [directions, gates]; None for layers without biases."""
    tensors = [getattr(w, part) for w in weights]
    return None if tensors[0] is None else torch.stack(tensors)


def _gradients(
    recorder: GradSampleRecorder,
    layout: Layout,
    inputs: Tensor,
    grad_outputs: Tensor,
    pairs: Sequence[tuple[Tensor, Tensor | None]],
) -> Gradients:
    """The gradients of one weight and one bias of every direction."""
    by_name: Gradients = {}
    # A direction's [T, B, inputs] and [T, B, gates]
    for x, grad_output, (weight, bias) in zip(inputs, grad_outputs, pairs, strict=True):
        by_name |= linear_gradients(
            x, grad_output, layout, (recorder.name(weight), recorder.name(bias)), recorder.batch
        )
    return by_name


Cell = Callable[..., Any]

_PADDED_CELLS: dict[str, Cell] = {
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
        # What `nn.utils.rnn` and layers of sequences call by `torch._VF`, below their Python code.
        if name == "_pack_padded_sequence":
            return _pack(*args, **kwargs)
        if name == "_pad_packed_sequence":
            return _pad(*args, **kwargs)
        if name in _PADDED_CELLS and _is_packed(*args):
            return _packed_layers(name, *args, **kwargs)
        # By lengths, as `pack_padded_sequence` sorts. If a model sorts something else like this, its losses differ from
        # those of single records, and the inspection does not unpack it.
        if name in _SORTS and _is_by_length(*args, **kwargs):
            order = torch.arange(len(args[0]), device=args[0].device)  # the records stay in their order
            return order if name == "argsort" else torch.return_types.sort((args[0], order))
        return func(*args, **kwargs)


def _is_packed(*args: Any) -> bool:
    """Whether a layer's call is of packed sequences: its weights then come fourth, and third otherwise.

    That the second argument is a tensor does not say so: it is that of batch sizes, or a state that is no pair.
    """
    return len(args) > 8 and not isinstance(args[2], list) and isinstance(args[3], list)


def _is_by_length(values: Any = None, *_: Any, descending: bool = False, **__: Any) -> bool:
    return descending and isinstance(values, Tensor) and values.dim() == 1 and values.dtype == torch.int64


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """All steps of all records, [time x batch, ...], and the batch sizes, with the lengths as an attribute."""
    steps = input.transpose(0, 1) if batch_first else input
    batch_sizes = torch.full((len(steps),), steps.shape[1])  # as if all sequences were as long as the longest
    batch_sizes.lengths = lengths.to(steps.device)  # type: ignore[attr-defined]
    return steps.flatten(0, 1), batch_sizes


def _unpack(data: Tensor, batch_sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The steps, [time, batch, ...], the lengths, and which steps are within them, [time, batch, 1]."""
    lengths: Tensor | None = getattr(batch_sizes, "lengths", None)
    if lengths is None:
        raise UnrecordedError("the batch sizes of packed sequences are changed")
    steps = torch.unflatten(data, 0, (len(batch_sizes), -1))  # [T, B, ...]
    return steps, lengths, _within_sequence(steps, lengths)


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    steps, lengths, taken = _unpack(data, batch_sizes)
    if total_length != len(steps):
        raise UnrecordedError("packed sequences are padded to another length than they had")
    # The model may have changed the data, as by a bias.
    # [T, B, 1] as [T, B, 1, ...]
    steps = torch.where(taken.view(*taken.shape[:2], *(1,) * (steps.dim() - 2)), steps, padding_value)
    # PyTorch returns lengths in main memory
    return steps.transpose(0, 1) if batch_first else steps, lengths.cpu()


def _packed_layers(
    name: str,
    data: Tensor,
    batch_sizes: Tensor,
    start: Tensor | tuple[Tensor, ...],
    weights: Sequence[Tensor],
    _has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """`torch.lstm` and its like for packed sequences: outputs, hidden states and, of an LSTM, cell states."""
    steps, lengths, _ = _unpack(data, batch_sizes)
    starts = start if isinstance(start, tuple) else (start,)
    args = name, steps, lengths, starts, tuple(weights), layers, dropout, training, bidirectional
    recorder = active_recorder()
    # 2 or 4 weights a direction, and 1 of a projection
    is_projected = len(weights) // (layers * (2 if bidirectional else 1)) % 2 == 1
    # The rule is not differentiable twice, and knows no projection's cell state at an end.
    is_by_rule = recorder is not None and not (recorder.uses_double_backward or is_projected)
    if recorder is not None and is_by_rule and any(isinstance(part, RecordedTensor) for part in weights):
        outputs, *ends = recorder.report(padded_layers, args, {})
    else:
        outputs, *ends = padded_layers(*args)
    return outputs.flatten(0, 1), *ends


def padded_layers(
    name: str,
    steps: Tensor,
    lengths: Tensor,
    starts: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Layers on sequences [time, batch, width] that end after `lengths` steps, by one cell a step.

    name: of torch's function. starts, weights: as it takes them.
    """
    directions, cell = 2 if bidirectional else 1, _PADDED_CELLS[name]
    each = len(weights) // (layers * directions)
    if each % 2:  # the last weight is a projection
        cell = _projected_cell
    taken, ends = _within_sequence(steps, lengths), []
    for layer in range(layers):
        outputs = []
        for index in range(layer * directions, (layer + 1) * directions):
            layer_weights = weights[index * each : (index + 1) * each]
            state = tuple(part[index] for part in starts)
            unrolled, state = _unroll(
                cell, steps, taken, layer_weights, state, backward=index % directions == 1
            )
            outputs.append(unrolled)
            ends.append(state)
        steps = torch.cat(outputs, dim=-1)
        if dropout and training and layer < layers - 1:
            steps = functional.dropout(steps, dropout)
    return steps, *(torch.stack(parts) for parts in zip(*ends, strict=True))


def padded_recurrence(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`padded_layers`, with all steps of both directions of a layer together."""
    name, steps, lengths, starts, weights, layers, dropout, training, bidirectional = args
    layout = recorder.layout_if_any(steps)
    if layout is None or layout.dimension != 1 or any(recorder.name(part) is not None for part in starts):
        raise UnrecordedError("a recurrent layer whose records are in another dimension")
    has_biases = len(weights) == 4 * layers * (2 if bidirectional else 1)
    settings = RecurrentSettings(has_biases, layers, dropout, training, bidirectional, batch_first=False)
    taken = _within_sequence(steps, lengths)
    positions = torch.arange(len(steps), device=steps.device)[:, None]  # [T, 1]
    # Reversed within its length, each sequence starts at the first step in both directions.
    order = torch.where(taken[..., 0], lengths - 1 - positions, positions)[..., None]  # [T, B, 1]

    def layer(*of_layer: Any) -> Unrolled:
        unrolled = _LAYERS[name](*of_layer, **({"ends": lengths} if name == "lstm" else {}))
        # A record without steps keeps its state from the start.
        hidden = torch.where(
            (lengths > 0)[:, None], _at_steps(unrolled.outputs, (lengths - 1).clamp(min=0)), of_layer[-1][0]
        )
        outputs = torch.where(taken, unrolled.outputs, 0.0)
        return Unrolled(outputs, unrolled.previous, (hidden, *unrolled.last[1:]))

    by_direction = _group_weights(weights, settings)
    outputs, ends = _in_turn(
        *(recorder, layout, steps, starts, by_direction, settings, layer),
        lambda sequence: torch.take_along_dim(sequence, order, dim=0),
    )
    return outputs, *ends


def _within_sequence(steps: Tensor, lengths: Tensor) -> Tensor:
    """Which steps are within their sequences, [time, batch, 1]."""
    return (torch.arange(len(steps), device=steps.device)[:, None] < lengths)[..., None]


_LAYERS: dict[str, Layer] = {
    "lstm": _lstm_layer,
    "gru": _gru_layer,
    "rnn_tanh": partial(_layer_of_one_sum, partial(unrolled_rnn, squash=torch.tanh)),
    "rnn_relu": partial(_layer_of_one_sum, partial(unrolled_rnn, squash=torch.relu)),
}
"""A layer of each kind, by the name of torch's function."""


def _projected_cell(
    input: Tensor, start: tuple[Tensor, Tensor], of_input: Tensor, of_hidden: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor]:
    """A step of an LSTM whose hidden state is projected, which `torch.lstm_cell` does not know."""
    *biases, projection = others
    input_bias, hidden_bias = biases or (None, None)
    below = functional.linear(input, of_input, input_bias)
    hidden, cell = _lstm_cell(below, functional.linear(start[0], of_hidden, hidden_bias), *start)
    return functional.linear(hidden, projection), cell


def _unroll(
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
    order = range(len(steps))
    for t in reversed(order) if backward else order:
        output = cell(steps[t], state if len(state) > 1 else state[0], *weights)
        following = output if isinstance(output, tuple) else (output,)
        here = taken[t]
        state = tuple(torch.where(here, new, old) for new, old in zip(following, state, strict=True))
        outputs.append(torch.where(here, following[0], 0.0))  # [B, H]
    return torch.stack(outputs[::-1] if backward else outputs), state

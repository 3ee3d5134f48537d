"""One spec for every way in which a layer can be set up."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.gradients import BehindSparseMap, SparseMap
from tests.support.gradients.problems import Spec, Wired

LINEAR = {
    "linear": Spec(lambda: nn.Linear(4, 3), (4,)),
    "linear, no bias": Spec(lambda: nn.Linear(4, 3, bias=False), (4,)),
    "linear, sequence": Spec(lambda: nn.Linear(4, 3), (5, 4)),
    "linear, sequence, no bias": Spec(lambda: nn.Linear(4, 3, bias=False), (5, 4)),
    "linear, two dimensions of places": Spec(lambda: nn.Linear(4, 3), (2, 3, 4)),
    "linear, long sequence": Spec(lambda: nn.Linear(3, 2), (70, 3)),
    "linear, wide": Spec(lambda: nn.Linear(8, 250), (8,)),  # not side by side with others, but by one product
    "linear, wide sequence": Spec(lambda: nn.Linear(40, 40), (2, 40)),  # by its Gram matrices
    "linear, sequence of one": Spec(lambda: nn.Linear(4, 3), (1, 4)),
}

CONVOLUTION = {
    "conv1d": Spec(lambda: nn.Conv1d(2, 3, 3), (2, 7)),
    "conv1d, all settings": Spec(lambda: nn.Conv1d(4, 6, 3, 2, 2, 2, groups=2), (4, 11)),
    "conv1d, no bias": Spec(lambda: nn.Conv1d(2, 3, 2, bias=False), (2, 5)),
    "conv1d, same": Spec(lambda: nn.Conv1d(2, 3, 4, padding="same", dilation=3), (2, 9)),
    "conv1d, valid": Spec(lambda: nn.Conv1d(2, 3, 3, padding="valid"), (2, 5)),
    "conv1d, circular": Spec(lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), (2, 5)),
    "conv1d, as the function has it": Spec(
        lambda: Wired(
            lambda self, x: functional.conv1d(x, self.kernel.weight, stride=2, padding=2, dilation=2),
            kernel=nn.Conv1d(2, 3, 2, bias=False),
        ),
        (2, 7),
    ),
    "conv1d, long": Spec(lambda: nn.Conv1d(1, 2, 3), (1, 90)),
    "conv2d": Spec(lambda: nn.Conv2d(2, 3, 3), (2, 5, 6)),
    "conv2d, stride and padding": Spec(lambda: nn.Conv2d(2, 3, 3, (2, 1), (2, 1)), (2, 6, 5)),
    "conv2d, dilation": Spec(lambda: nn.Conv2d(2, 3, 2, dilation=(2, 3), padding=1), (2, 6, 6)),
    "conv2d, oblong": Spec(lambda: nn.Conv2d(2, 3, (3, 1)), (2, 5, 4)),
    "conv2d, groups": Spec(lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "conv2d, depthwise": Spec(lambda: nn.Conv2d(3, 6, 3, groups=3, bias=False), (3, 5, 5)),
    "conv2d, depthwise on many places": Spec(lambda: nn.Conv2d(3, 3, 3, groups=3), (3, 11, 11)),
    "conv2d, same": Spec(lambda: nn.Conv2d(2, 3, (2, 4), padding="same", dilation=(1, 2)), (2, 6, 7)),
    "conv2d, same, one dilation": Spec(lambda: nn.Conv2d(2, 3, 3, padding="same", dilation=[2]), (2, 6, 7)),
    "conv2d, circular": Spec(lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), (2, 4, 5)),
    "conv2d, reflect": Spec(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 4, 4)),
    "conv2d, many places": Spec(lambda: nn.Conv2d(1, 2, 3, padding=1), (1, 9, 9)),
    "conv2d, many places, groups": Spec(lambda: nn.Conv2d(2, 4, 3, groups=2, stride=2), (2, 19, 19)),
    "conv2d, many channels": Spec(lambda: nn.Conv2d(24, 24, 3, groups=2), (24, 3, 4)),  # by its Gram matrices
    "conv2d, one pixel": Spec(lambda: nn.Conv2d(5, 4, 1), (5, 1, 1)),
    "conv2d, one place": Spec(lambda: nn.Conv2d(5, 4, (3, 2), padding=(1, 0), dilation=(1, 2)), (5, 1, 3)),
    "conv2d, one place, groups": Spec(lambda: nn.Conv2d(4, 6, (2, 3), groups=2), (4, 2, 3)),
    "conv1d, one place, large groups": Spec(lambda: nn.Conv1d(40, 60, 3, groups=2, padding=1), (40, 1)),
    "conv3d": Spec(lambda: nn.Conv3d(2, 3, 2), (2, 3, 4, 3)),
    "conv3d, all settings": Spec(
        lambda: nn.Conv3d(4, 6, (2, 3, 2), (2, 1, 2), (1, 2, 0), (1, 2, 1), groups=2, bias=False),
        (4, 3, 5, 4),
    ),
    "conv3d, depthwise": Spec(lambda: nn.Conv3d(3, 6, 2, padding=1, groups=3), (3, 3, 2, 4)),
    "conv3d, same": Spec(lambda: nn.Conv3d(1, 2, (2, 3, 2), padding="same"), (1, 3, 4, 2)),
    "conv3d, many channels": Spec(lambda: nn.Conv3d(24, 24, 2), (24, 3, 2, 2)),  # by its Gram matrices
    "transposed 1d": Spec(lambda: nn.ConvTranspose1d(4, 6, 3, 3, 1, 2, 2, dilation=2), (4, 5)),
    "transposed 2d": Spec(lambda: nn.ConvTranspose2d(2, 3, 2, bias=False), (2, 3, 4)),
    "transposed 2d, stride": Spec(lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 4, 3)),
    "transposed 2d, all settings": Spec(
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), groups=2, dilation=(1, 2)), (4, 3, 4)
    ),
    "transposed 2d, depthwise": Spec(lambda: nn.ConvTranspose2d(3, 3, 3, 2, 1, groups=3), (3, 4, 4)),
    "transposed 2d, many channels": Spec(lambda: nn.ConvTranspose2d(24, 24, 2), (24, 2, 2)),
    "transposed 1d, one place, large groups": Spec(lambda: nn.ConvTranspose1d(40, 60, 3, groups=2), (40, 1)),
    "transposed 2d, one place": Spec(lambda: nn.ConvTranspose2d(5, 4, 2), (5, 1, 1)),
    "transposed 3d": Spec(
        lambda: nn.ConvTranspose3d(2, 3, 2, (1, 2, 2), output_padding=(0, 1, 0)), (2, 2, 3, 2)
    ),
} | {
    f"{name} of images in a record": Spec(lambda layer=layer: _folded(layer()), (3, 4, 5, 4))
    for name, layer in {
        "conv2d": lambda: nn.Conv2d(4, 3, 3, 2, 1),
        "depthwise conv2d": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
        "transposed conv2d": lambda: nn.ConvTranspose2d(4, 2, 2, 2),
        "conv1d": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 3, 3)),
        "group norm": lambda: nn.GroupNorm(2, 4),
        "fixed batch norm": lambda: _used(nn.BatchNorm2d(4)),
        "prelu": lambda: nn.PReLU(4),
    }.items()
}
PRELU = {
    "prelu": Spec(lambda: nn.PReLU(3), (3, 4, 2)),
    "prelu, one number": Spec(lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU()), (4,)),
    "prelu of numbers": Spec(lambda: nn.PReLU(5), (5,)),
}


def _folded(layer: nn.Module) -> nn.Module:
    """A layer of single images for records of several."""
    return Wired(lambda self, x: self.layer(x.flatten(0, 1)).unflatten(0, (len(x), -1)), layer=layer)


def _looked_up(table: nn.Embedding) -> nn.Module:
    return Wired(lambda self, words: self.table(words), table=table)


def _bags(self: Wired, words: Tensor) -> Tensor:
    """Two bags of unequal lengths for each record, one after the other, as by offsets."""
    length = words.shape[1]
    starts = torch.arange(0, words.numel(), length, device=words.device)
    offsets = torch.stack([starts, starts + 2], dim=1).flatten()
    return self.bag(words.flatten(), offsets).view(len(words), -1)


def _bag(self: Wired, words: Tensor) -> Tensor:
    """One bag for each record, by offsets."""
    offsets = torch.arange(0, words.numel(), words.shape[1], device=words.device)
    return self.bag(words.flatten(), offsets)


def _waves(self: Wired, words: Tensor) -> Tensor:
    """Entries that occur again may cancel."""
    signs = torch.cos(torch.arange(words.shape[1], device=words.device) * 2.0).to(self.bag.weight.dtype)
    return self.bag(words, per_sample_weights=(words + 1) * signs)


def _weighted(self: Wired, words: Tensor) -> Tensor:
    return self.bag(words, per_sample_weights=torch.sin(self.weights(words)[..., 0]))


class _Chosen(SparseMap):
    """Each of three whole numbers below 5 says where in its part of a vector a number lies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.tensor([0.5, -2.0, 1.5]))

    def indices(self, inputs: Tensor) -> Tensor:
        return inputs.long() + torch.arange(0, 15, 5, device=inputs.device)

    def forward(self, inputs: Tensor) -> Tensor:
        places = self.indices(inputs)
        numbers = self.numbers.expand(places.shape)
        return self.numbers.new_zeros(len(inputs), 15).scatter(1, places, numbers)


EMBEDDING = {
    "sparse inputs of a linear layer": Spec(
        lambda: BehindSparseMap(_Chosen(), nn.Linear(15, 2, bias=False)), (3,), entries=5
    ),
    "sparse inputs in records": Spec(
        lambda: _folded(BehindSparseMap(_Chosen(), nn.Linear(15, 2, bias=False))), (4, 3), entries=5
    ),
    "sparse inputs of another model": Spec(
        lambda: BehindSparseMap(_Chosen(), nn.Sequential(nn.Linear(15, 4), nn.Tanh(), nn.Linear(4, 2))),
        (3,),
        entries=5,
    ),
    "bags by offsets": Spec(
        lambda: Wired(_bags, bag=nn.EmbeddingBag(5, 3, mode="mean", padding_idx=1)), (7,), entries=5
    ),
    "bags in records": Spec(lambda: _folded(nn.EmbeddingBag(5, 3, mode="sum")), (2, 4), entries=5),
    "bags of a large table": Spec(
        lambda: Wired(_bags, bag=nn.EmbeddingBag(60, 3, mode="mean", padding_idx=1)), (7,), entries=60
    ),
    "large bags in records": Spec(lambda: _folded(nn.EmbeddingBag(60, 3, mode="sum")), (2, 4), entries=60),
    "weighted bags": Spec(
        lambda: Wired(_weighted, bag=nn.EmbeddingBag(5, 3, mode="sum"), weights=nn.Embedding(5, 1)),
        (4,),
        entries=5,
    ),
    "a bag of a large table": Spec(
        lambda: nn.EmbeddingBag(400, 3, mode="mean", padding_idx=1), (9,), entries=6
    ),
    "a sum of a large table": Spec(lambda: nn.EmbeddingBag(400, 3, mode="sum"), (9,), entries=6),
    "one entry of a large table": Spec(lambda: nn.EmbeddingBag(400, 3, mode="sum"), (1,), entries=60),
    "a bag by offsets": Spec(
        lambda: Wired(_bag, bag=nn.EmbeddingBag(400, 3, mode="mean", padding_idx=1)), (9,), entries=6
    ),
    "a bag of weights of both signs": Spec(
        lambda: Wired(_waves, bag=nn.EmbeddingBag(400, 3, mode="sum", padding_idx=2)), (9,), entries=6
    ),
    "a large table used twice": Spec(
        lambda: Wired(
            lambda self, words: self.bag(words[:, :5]) * self.bag(words[:, 3:]), bag=nn.EmbeddingBag(400, 3)
        ),
        (9,),
        entries=6,
    ),
    "a large table of bags and words": Spec(
        lambda: Wired(
            lambda self, words: self.bag(words) * functional.embedding(words[:, 0], self.bag.weight),
            bag=nn.EmbeddingBag(400, 3),
        ),
        (9,),
        entries=6,
    ),
    "the largest of a bag": Spec(lambda: nn.EmbeddingBag(400, 3, mode="max", padding_idx=1), (3,), entries=3),
    "the largest of a bag by offsets": Spec(
        lambda: Wired(_bag, bag=nn.EmbeddingBag(5, 3, mode="max")), (4,), entries=5
    ),
    "the largest of bags in records": Spec(
        lambda: _folded(nn.EmbeddingBag(500, 3, mode="max")), (2, 4), entries=4
    ),
    "embedding, one word": Spec(lambda: nn.Embedding(5, 3), (), entries=5),
    "embedding": Spec(lambda: nn.Embedding(5, 3), (8,), entries=5),
    "embedding, sentences": Spec(lambda: nn.Embedding(5, 3), (2, 4), entries=5),
    "embedding, padding": Spec(lambda: nn.Embedding(4, 3, padding_idx=0), (8,), entries=4),
    "embedding, padding from the end": Spec(lambda: nn.Embedding(4, 3, padding_idx=-1), (8,), entries=4),
    "embedding, padding as the function has it": Spec(
        lambda: Wired(
            lambda self, words: functional.embedding(words, self.table.weight, padding_idx=-2),
            table=nn.Embedding(4, 3),
        ),
        (8,),
        entries=4,
    ),
    "embedding, one entry": Spec(lambda: _looked_up(nn.Embedding(2, 1)), (6,), entries=2),
}


def _used(layer: nn.Module) -> nn.Module:
    """Batch normalisation with statistics of its own, that it does not change."""
    for name, buffer in layer.named_buffers():
        if name.startswith("running"):
            buffer.uniform_(0.5, 2.0)
    return layer.eval()


NORMALISATION = {
    "layer norm": Spec(lambda: nn.LayerNorm(4), (4,)),
    "layer norm, sequence": Spec(lambda: nn.LayerNorm(4), (3, 4)),
    "layer norm, no bias": Spec(lambda: nn.LayerNorm(4, bias=False), (2, 3, 4)),
    "layer norm, two dimensions": Spec(lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    "layer norm, the whole record": Spec(lambda: nn.LayerNorm((3, 4)), (3, 4)),
    "rms norm": Spec(lambda: nn.RMSNorm(4), (4,)),
    "rms norm, sequence": Spec(lambda: nn.RMSNorm(4, eps=0.1), (3, 4)),
    "group norm": Spec(lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "group norm, sequence": Spec(lambda: nn.GroupNorm(2, 4), (4, 5)),
    "group norm, channels only": Spec(lambda: nn.GroupNorm(2, 6), (6,)),
    "instance norm 1d": Spec(lambda: nn.InstanceNorm1d(3, affine=True), (3, 5)),
    "instance norm 2d": Spec(lambda: nn.InstanceNorm2d(3, affine=True), (3, 3, 4)),
    "batch norm 1d, fixed": Spec(lambda: _used(nn.BatchNorm1d(4)), (4,)),
    "batch norm 1d, fixed, sequence": Spec(lambda: _used(nn.BatchNorm1d(3)), (3, 5)),
    "batch norm 2d, fixed": Spec(lambda: _used(nn.BatchNorm2d(3)), (3, 3, 4)),
}


def _sequence(self: Wired, inputs: Tensor) -> Tensor:
    """Everything that a recurrent layer returns, one row for each record."""
    is_first = self.layer.batch_first
    outputs, ends = self.layer(inputs if is_first else inputs.transpose(0, 1))
    outputs = outputs if is_first else outputs.transpose(0, 1)
    ends = ends if isinstance(ends, tuple) else (ends,)
    return torch.cat([part.flatten(1) for part in (outputs, *(end.transpose(0, 1) for end in ends))], dim=1)


def _recurrent(kind: str, layers: int, directions: int, bias: bool, batch_first: bool) -> Spec:
    layer = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN, "relu": partial(nn.RNN, nonlinearity="relu")}[
        kind
    ]

    def make() -> nn.Module:
        settings = {"bias": bias, "batch_first": batch_first, "bidirectional": directions == 2}
        return Wired(_sequence, layer=layer(3, 4, num_layers=layers, **settings))

    return Spec(make, (5, 3))


def _of_sequences(self: Wired, inputs: Tensor) -> Tensor:
    """A recurrent layer for records of several sequences."""
    return self.layer(inputs.flatten(0, 1))[0].unflatten(0, (len(inputs), -1))


def _steps(layer: nn.RNNCellBase) -> Spec:
    """A cell that goes over a sequence."""

    def wiring(self: Wired, inputs: Tensor) -> Tensor:
        state, outputs = None, []
        for step in inputs.unbind(1):
            state = self.layer(step, state)
            outputs.append(torch.cat(state, dim=1) if isinstance(state, tuple) else state)
        return torch.cat(outputs, dim=1)

    return Spec(lambda: Wired(wiring, layer=layer), (4, 3))


RECURRENT = {
    f"{kind}, {layers} layers, {directions} directions{', biases' * bias}{', batch first' * first}": _recurrent(
        kind, layers, directions, bias, first
    )
    for kind in ("lstm", "gru", "rnn", "relu")
    for layers, directions, bias, first in (
        (1, 1, True, True),
        (1, 1, False, False),
        (1, 2, True, False),
        (2, 1, True, False),
        (3, 2, True, True),
        (2, 2, False, True),
    )
}
RECURRENT |= {
    "lstm, the last state": Spec(
        lambda: Wired(lambda self, x: self.layer(x)[1][1][-1], layer=nn.LSTM(3, 4, batch_first=True)), (5, 3)
    ),
    "lstm with projections": Spec(
        lambda: Wired(
            _sequence, layer=nn.LSTM(3, 5, num_layers=2, bidirectional=True, proj_size=2, batch_first=True)
        ),
        (4, 3),
    ),
    "lstm with projections, no biases": Spec(
        lambda: Wired(_sequence, layer=nn.LSTM(3, 4, proj_size=3, bias=False)), (4, 3)
    ),
    "gru, a start from the record": Spec(
        lambda: Wired(
            lambda self, x: self.layer(x[:, 1:], self.first(x[:, 0])[None])[0].flatten(1),
            first=nn.Linear(3, 4),
            layer=nn.GRU(3, 4, batch_first=True),
        ),
        (4, 3),
    ),
    "gru of sequences in a record": Spec(
        lambda: Wired(_of_sequences, layer=nn.GRU(4, 3, batch_first=True)), (3, 5, 4)
    ),
    "lstm of sequences in a record": Spec(
        lambda: Wired(_of_sequences, layer=nn.LSTM(4, 3, bidirectional=True, batch_first=True)), (2, 3, 4)
    ),
    "gru, one step": replace(_recurrent("gru", 1, 2, True, True), shape=(1, 3)),
    "lstm cell": _steps(nn.LSTMCell(3, 4)),
    "lstm cell, no bias": _steps(nn.LSTMCell(3, 4, bias=False)),
    "gru cell": _steps(nn.GRUCell(3, 4)),
    "rnn cell": _steps(nn.RNNCell(3, 4)),
    "rnn cell, relu": _steps(nn.RNNCell(3, 4, nonlinearity="relu")),
}


def _attention(
    settings: dict[str, Any], call: Callable[[Tensor], dict[str, Any]], between: str = "xxx"
) -> Spec:
    """Attention between the first three places of a record (x) and the others (z), in the order query, key, value."""

    def wiring(self: Wired, inputs: Tensor) -> Tensor:
        parts = {"x": inputs[:, :3], "z": inputs[:, 3:]}
        is_first = self.layer.batch_first
        given = [parts[part] if is_first else parts[part].transpose(0, 1) for part in between]
        same = given[:1] * 3 if between == "xxx" else given
        output, weights = self.layer(*same, **call(inputs))
        output = output if is_first else output.transpose(0, 1)
        return (
            output.flatten(1)
            if weights is None
            else torch.cat([output.flatten(1), weights.flatten(1)], dim=1)
        )

    def make() -> nn.Module:
        return Wired(wiring, layer=nn.MultiheadAttention(4, 2, **settings))

    return Spec(make, (5, 4))


def _later(inputs: Tensor) -> dict[str, Any]:
    mask = torch.ones(3, 3, dtype=torch.bool, device=inputs.device).triu(1)
    return {"attn_mask": mask, "need_weights": False}


def _added(inputs: Tensor) -> dict[str, Any]:
    return {"attn_mask": torch.linspace(-1, 1, 9, dtype=inputs.dtype, device=inputs.device).view(3, 3)}


def _by_head(inputs: Tensor) -> dict[str, Any]:
    """A mask for each record and head, which depends on the record."""
    scores = inputs[:, :3, 0].detach()
    each = (scores[:, :, None] * scores[:, None, :]).repeat_interleave(2, dim=0)
    return {"attn_mask": each, "average_attn_weights": False}


def _padding(inputs: Tensor) -> dict[str, Any]:
    """Some places are left out, for each record others; never the first."""
    left_out = inputs[:, :3, 0].detach() > 0.3
    first = torch.arange(3, device=inputs.device) == 0
    return {"key_padding_mask": left_out & ~first, "need_weights": False}


def _both(inputs: Tensor) -> dict[str, Any]:
    return _later(inputs) | _padding(inputs)


def _plain(_inputs: Tensor) -> dict[str, Any]:
    return {}


def _quiet(_inputs: Tensor) -> dict[str, Any]:
    return {"need_weights": False}


_FIRST = {"batch_first": True}
ATTENTION = {
    "attention to itself": _attention({}, _plain),
    "attention to itself, batch first": _attention(_FIRST, _plain),
    "attention without weights": _attention({}, _quiet),
    "attention without weights, batch first": _attention(_FIRST, _quiet),
    "attention without bias": _attention({"bias": False}, _plain),
    "attention across": _attention({}, _plain, "xzz"),
    "attention across, batch first, without weights": _attention(_FIRST, _quiet, "xzz"),
    "attention with another value": replace(_attention(_FIRST, _plain, "zxz"), shape=(6, 4)),
    "attention with keys and values of another width": Spec(
        lambda: Wired(
            lambda self, x: self.layer(x, x[..., :3], x[..., 2:])[0],
            layer=nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True),
        ),
        (5, 4),
    ),
    "attention to what came before": _attention(_FIRST, _later),
    "attention with added scores": _attention({}, _added),
    "attention with a mask for each head": _attention(_FIRST, _by_head),
    "attention with padding": _attention(_FIRST, _padding),
    "attention with both masks": _attention({}, _both),
}

LAYERS = LINEAR | CONVOLUTION | PRELU | EMBEDDING | NORMALISATION | RECURRENT | ATTENTION

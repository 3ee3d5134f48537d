"""Specs of whole networks, and of parameters that are shared, frozen, or used outside of any layer."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from algorithms.models.objectives import cross_entropy
from tests.support.gradients.layers import LAYERS
from tests.support.gradients.problems import Spec, Wired, frozen


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def _tied() -> nn.Module:
    """A decoder whose weight is the table of words."""
    embedding, decoder = nn.Embedding(6, 4), nn.Linear(4, 6)
    decoder.weight = embedding.weight
    return nn.Sequential(embedding, nn.Tanh(), decoder)


def _lora(self: Wired, inputs: Tensor) -> Tensor:
    return self.base(inputs) + self.up(self.down(inputs))


def _packed(use: Any, rows: int = 9) -> nn.Module:
    """Parts of one packed weight and bias, each used as a layer of its own."""
    return Wired(use, w=_parameter(rows, 4), b=_parameter(rows))


def _three_parts(self: Wired, x: Tensor) -> Tensor:
    query, key, value = (
        functional.linear(x, w, b) for w, b in zip(self.w.chunk(3), self.b.split(3), strict=True)
    )
    return (query @ key.transpose(1, 2)) @ value


def _parts_in_turn(self: Wired, x: Tensor) -> Tensor:
    """The middle and the last part, then the middle again; nobody uses the first rows."""
    middle = torch.tanh(functional.linear(x, self.w[3:7], self.b[3:7]))
    return functional.linear(middle, self.w[7:]) + functional.linear(middle, self.w[3:7])[..., :2]


def _parts_of_parts(self: Wired, x: Tensor) -> Tensor:
    half = self.w[1:9]
    return functional.linear(x, half[2:5]) * half[0].sum() + functional.linear(x, half.view(2, 4, 4)[1][:3])


def _overlapping_parts(self: Wired, x: Tensor) -> Tensor:
    return functional.linear(x, self.w[:5]) + functional.linear(x, self.w[3:8]) * self.b[2]


def _parts_that_are_apart(self: Wired, x: Tensor) -> Tensor:
    """Every third row, and some columns, whose entries are not consecutive."""
    return functional.linear(x, self.w[::3]) + functional.linear(x[..., :2], self.w[:3, 1:3])


class _Scaled(torch.autograd.Function):
    """A parameter that learns at a tenth of the rate."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Tensor:
        return 0.1 * error


def _again(layer: nn.Module) -> nn.Module:
    """A layer that is used three times."""
    return Wired(lambda self, x: self.layer(torch.tanh(self.layer(x))) + self.layer(x * x), layer=layer)


SHARING = {
    "linear, used again": Spec(lambda: _again(nn.Linear(4, 4)), (4,)),
    "linear sequence, used again": Spec(lambda: _again(nn.Linear(4, 4)), (3, 4)),
    "linear, used on parts of different length": Spec(
        lambda: Wired(
            lambda self, x: torch.cat([self.layer(x[:, 0]), self.layer(x).flatten(1)], 1),
            layer=nn.Linear(4, 3),
        ),
        (3, 4),
    ),
    "convolution, used again": Spec(lambda: _again(nn.Conv2d(3, 3, 3, padding=1)), (3, 4, 4)),
    "group norm, used again": Spec(lambda: _again(nn.GroupNorm(2, 4)), (4, 3)),
    "lstm, used again": Spec(
        lambda: Wired(
            lambda self, x: self.layer(torch.tanh(self.layer(x)[0]))[0],
            layer=nn.LSTM(3, 3, batch_first=True),
        ),
        (4, 3),
    ),
    "embedding, used again": Spec(
        lambda: Wired(lambda self, x: torch.cat([self.t(x), self.t(1 - x)], 1), t=nn.Embedding(2, 3)),
        (4,),
        entries=2,
    ),
    "decoder tied to the embedding": Spec(_tied, (5,), entries=6),
    "parts of a packed weight": Spec(lambda: _packed(_three_parts), (5, 4)),
    "parts of a packed weight, without a sequence": Spec(lambda: _packed(_parts_in_turn), (4,)),
    "parts of a packed weight, used twice": Spec(lambda: _packed(_parts_in_turn), (3, 4)),
    "parts of parts": Spec(lambda: _packed(_parts_of_parts), (3, 4)),
    "a view whose gradient is scaled on its way back": Spec(
        lambda: _packed(lambda self, x: functional.linear(x, _Scaled.apply(self.w)) + self.b), (3, 4)
    ),
    "overlapping parts": Spec(lambda: _packed(_overlapping_parts), (3, 4)),
    "parts that are apart": Spec(lambda: _packed(_parts_that_are_apart), (3, 4)),
    "attention to other inputs": Spec(
        lambda: Wired(
            lambda self, x: self.layer(self.q.expand(len(x), 2, 4), x, x * x, need_weights=False)[0],
            layer=nn.MultiheadAttention(4, 2, batch_first=True),
            q=_parameter(2, 4),
        ),
        (3, 4),
    ),
    "transformer decoder layer": Spec(
        lambda: Wired(
            lambda self, x: self.layer(x[:, :2], torch.tanh(x)),
            layer=nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        ),
        (3, 4),
    ),
    "first layer frozen": Spec(
        lambda: nn.Sequential(frozen(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)), (4,)
    ),
    "layer in the middle frozen": Spec(
        lambda: nn.Sequential(nn.Linear(4, 5), frozen(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 3)), (4,)
    ),
    "bias frozen": Spec(lambda: frozen(nn.Linear(4, 3), "bias"), (4,)),
    "weight frozen": Spec(lambda: frozen(nn.Conv2d(2, 3, 3), "weight"), (2, 5, 5)),
    "lstm, some weights frozen": Spec(
        lambda: Wired(
            lambda self, x: self.layer(x)[0],
            layer=frozen(nn.LSTM(3, 4, batch_first=True), "weight_hh_l0", "bias_ih_l0"),
        ),
        (4, 3),
    ),
    "attention, projections frozen": Spec(
        lambda: Wired(
            lambda self, x: self.layer(x, x, x)[0],
            layer=frozen(nn.MultiheadAttention(4, 2, batch_first=True), "in_proj_weight", "in_proj_bias"),
        ),
        (3, 4),
    ),
    "attention, output frozen": Spec(
        lambda: Wired(
            lambda self, x: self.layer(x, x, x)[0],
            layer=frozen(nn.MultiheadAttention(4, 2, batch_first=True), "out_proj.weight", "out_proj.bias"),
        ),
        (3, 4),
    ),
    "pairs, one after the other in the batch": Spec(
        lambda: Wired(
            lambda self, x: (lambda a, b: a * b)(*self.norm(self.layer(torch.cat(x.unbind(1)))).chunk(2)),
            layer=nn.Linear(4, 5),
            norm=nn.LayerNorm(5),
        ),
        (2, 4),
    ),
    "low-rank adaptation": Spec(
        lambda: Wired(
            _lora, base=frozen(nn.Linear(4, 3)), down=nn.Linear(4, 2, bias=False), up=nn.Linear(2, 3)
        ),
        (4,),
    ),
}


def _in_several_forms(self: Wired, x: Tensor) -> Tensor:
    """A weight as it is, turned, and bent by itself and by another parameter."""
    bent = torch.tanh(self.w)
    scaled = (bent * self.scale).reshape_as(self.w)
    return functional.linear(x, self.w) @ bent.T + functional.linear(x, scaled) + x @ bent


OF_PARAMETERS = {
    "filter by the Fourier transform": Spec(
        lambda: Wired(
            lambda self, x: torch.fft.irfft(
                torch.fft.rfft(x) * torch.fft.rfft(self.w) * self.scale + self.w[0], n=6
            ),
            w=_parameter(6),
            scale=_parameter(4),
        ),
        (3, 6),
    ),
    "weight in several forms": Spec(
        lambda: Wired(_in_several_forms, w=_parameter(4, 4), scale=_parameter(4, 1)), (4,)
    ),
    "position added": Spec(
        lambda: Wired(lambda self, x: x + self.position, position=_parameter(3, 4)), (3, 4)
    ),
    "scale and shift": Spec(
        lambda: Wired(
            lambda self, x: torch.addcmul(self.shift, x, self.scale), scale=_parameter(4), shift=_parameter(4)
        ),
        (3, 4),
    ),
    "product with a matrix": Spec(lambda: Wired(lambda self, x: x @ self.w, w=_parameter(4, 3)), (4,)),
    "merged low-rank adaptation": Spec(
        lambda: Wired(
            lambda self, x: functional.linear(x, self.base.weight + self.b @ self.a),
            base=frozen(nn.Linear(4, 3)),
            a=_parameter(2, 4),
            b=_parameter(3, 2),
        ),
        (4,),
    ),
    "normalised weight": Spec(lambda: weight_norm(nn.Linear(4, 3)), (4,)),
    "position looked up": Spec(
        lambda: Wired(
            lambda self, x: x + self.table(torch.arange(3, device=x.device)), table=nn.Embedding(3, 4)
        ),
        (3, 4),
    ),
    "transposed weight": Spec(lambda: Wired(lambda self, x: x @ self.w.T, w=_parameter(3, 4)), (4,)),
    "bilinear": Spec(lambda: Wired(lambda self, x: self.layer(x, x), layer=nn.Bilinear(4, 4, 3)), (4,)),
    "einsum": Spec(
        lambda: Wired(lambda self, x: torch.einsum("btj,jk->btk", x, self.w), w=_parameter(4, 3)), (3, 4)
    ),
}


class _Product(torch.autograd.Function):
    """A product with a parameter."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor) -> Tensor:
        return inputs @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        error = error.to(weight.dtype)  # in 16 bits, where the forward pass was
        return error @ weight.T, inputs.T @ error


WITHOUT_RULE = {
    "complex weight": Spec(
        lambda: Wired(
            lambda self, x: functional.linear(torch.view_as_complex(x), torch.view_as_complex(self.w)).abs(),
            w=_parameter(3, 4, 2),
        ),
        (4, 2),
    ),
    "distances": Spec(lambda: Wired(lambda self, x: torch.cdist(x, self.w), w=_parameter(3, 4)), (2, 4)),
    "einsum with a parameter twice": Spec(
        # Of these sizes, so that the order of the two products is the same for 3 records and for 64.
        lambda: Wired(lambda self, x: torch.einsum("bi,ij,kj->bk", x, self.w, self.w), w=_parameter(5, 2)),
        (5,),
    ),
    "function of one's own": Spec(
        lambda: Wired(lambda self, x: _Product.apply(x, self.w).tanh(), w=_parameter(4, 3)), (4,)
    ),
}

AS_A_WHOLE = {
    "transform of each record": Spec(
        lambda: Wired(
            lambda self, x: torch.func.vmap(lambda one: torch.tanh(self.scale * (one @ self.w)))(x),
            w=_parameter(4, 3),
            scale=_parameter(),
        ),
        (4,),
    ),
}


class Residual(nn.Module):
    """Two convolutions with group normalisation and a way around them; everything in place that can be."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)
        self.norm = nn.GroupNorm(2, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.last_norm = nn.GroupNorm(2, outputs)
        self.around = nn.Conv2d(channels, outputs, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last_norm(self.second(self.relu(self.norm(self.first(inputs)))))
        out += self.around(inputs)
        return self.relu(out)


def _cnn() -> nn.Module:
    features = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3, 2)]
    return nn.Sequential(
        *features, nn.Tanh(), nn.Flatten(), nn.Linear(5 * 2 * 2, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def _resnet() -> nn.Module:
    first = [nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)]
    return nn.Sequential(*first, Residual(4, 4, 1), Residual(4, 6, 2), *last)


def _scattering() -> nn.Module:
    """The network for scattering features of Tramèr and Boneh 2021 (arXiv:2011.11660), with fewer channels."""
    return nn.Sequential(
        nn.GroupNorm(27, 81, affine=False),
        nn.Conv2d(81, 8, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8 * 3 * 3, 3),
    )


def _bilstm() -> nn.Module:
    def wiring(self: Wired, words: Tensor) -> Tensor:
        outputs, (ends, _) = self.lstm(self.table(words).transpose(0, 1))
        return self.last(torch.cat([outputs.mean(dim=0), ends[-1]], dim=1))

    lstm = nn.LSTM(4, 5, num_layers=2, bidirectional=True)
    return Wired(wiring, table=nn.Embedding(7, 4, padding_idx=0), lstm=lstm, last=nn.Linear(15, 3))


def _transformer(*, batch_first: bool, norm_first: bool) -> nn.Module:
    def wiring(self: Wired, words: Tensor) -> Tensor:
        sequence = self.table(words) if batch_first else self.table(words).transpose(0, 1)
        return self.last(self.encoder(sequence).mean(dim=1 if batch_first else 0))

    layer = nn.TransformerEncoderLayer(
        6, 2, 9, dropout=0.0, activation="gelu", batch_first=batch_first, norm_first=norm_first
    )
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Wired(wiring, table=nn.Embedding(7, 6), encoder=encoder, last=nn.Linear(6, 3))


NETWORKS = {
    "cnn": Spec(_cnn, (1, 10, 10), losses=cross_entropy),
    "resnet": Spec(_resnet, (2, 8, 8), losses=cross_entropy),
    "scattering": Spec(_scattering, (81, 7, 7), losses=cross_entropy),
    "bilstm": Spec(_bilstm, (6,), entries=7, losses=cross_entropy),
    "transformer": Spec(
        lambda: _transformer(batch_first=True, norm_first=True), (5,), entries=7, losses=cross_entropy
    ),
    "transformer, time first": Spec(
        lambda: _transformer(batch_first=False, norm_first=False), (5,), entries=7, losses=cross_entropy
    ),
    "transformer, fixed": Spec(
        lambda: _transformer(batch_first=True, norm_first=False).eval(), (5,), entries=7, losses=cross_entropy
    ),
}

SPECS = LAYERS | SHARING | OF_PARAMETERS | WITHOUT_RULE | AS_A_WHOLE | NETWORKS
"""All of them, and every layer."""

REPEATS = {
    *(
        f"{kind}, {layers} layers, {directions} directions{rest}"
        for kind, kept in (("lstm", (0, 4)), ("gru", (2, 5)), ("rnn", (3,)), ("relu", (0,)))
        for place, (layers, directions, rest) in enumerate(
            [
                *((1, 1, ", biases, batch first"), (1, 1, ""), (1, 2, ", biases"), (2, 1, ", biases")),
                *((3, 2, ", biases, batch first"), (2, 2, ", batch first")),
            ]
        )
        if place not in kept
    ),
    *("conv1d, valid", "conv1d, circular", "conv2d, same", "conv2d, dilation"),
    *("conv3d, depthwise", "conv3d, same", "transposed 1d", "transposed 2d, stride"),
    *("depthwise conv2d of images in a record", "transposed conv2d of images in a record"),
    *("attention to itself, batch first", "attention without weights", "attention across"),
    *("attention with another value", "attention to what came before", "attention with added scores"),
    *(
        "lstm with projections, no biases",
        "lstm cell, no bias",
        "rnn cell, relu",
        "gru of sequences in a record",
    ),
    *("transformer, time first", "transformer, fixed", "scattering", "resnet"),
    *("linear, no bias", "linear, sequence, no bias", "linear, two dimensions of places"),
    *("conv1d", "conv1d, no bias", "conv1d, long", "conv2d, oblong", "conv2d, one place"),
    *("conv2d, many places, groups", "conv1d, one place, large groups", "transposed 2d"),
    *("transposed 2d, one place", "conv1d of images in a record", "group norm of images in a record"),
    *("prelu of images in a record", "prelu", "layer norm, no bias", "layer norm, the whole record"),
    *("rms norm", "group norm, sequence", "instance norm 1d", "batch norm 1d, fixed, sequence"),
    *("lstm, 1 layers, 1 directions, biases, batch first", "lstm, the last state", "bags of a large table"),
    *("attention without weights, batch first", "attention across, batch first, without weights"),
    *("a sum of a large table", "embedding, padding from the end"),
    *("linear sequence, used again", "group norm, used again", "layer in the middle frozen", "bias frozen"),
    "attention, projections frozen",
}
"""Of settings that others have two at a time, with no branch or function of their own: `make soak` takes them, too."""

TYPICAL = [
    "linear",
    "linear, sequence",
    "linear, long sequence",
    "linear, wide sequence",
    "conv2d",
    "conv2d, many places",
    "conv2d, many channels",
    "layer norm, sequence",
    "lstm, 3 layers, 2 directions, biases, batch first",
    "gru, 2 layers, 2 directions, batch first",
    "attention to itself",
    "conv3d",
    "einsum",
    "merged low-rank adaptation",
    "normalised weight",
    "cnn",
    "resnet",
    "scattering",
]
"""One spec for each form of gradient whose inputs are numbers."""
ON_TOKENS = ["embedding", "embedding, padding", "decoder tied to the embedding", "bilstm", "transformer"]

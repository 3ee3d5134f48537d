"""The architectures that are shipped: linear models, a dense network, networks for images, and one for texts.

Linear models start at zero, so their start depends on neither data nor randomness. `mlp` and `conv_fc` are from Abadi
et al. 2016, "Deep Learning with Differential Privacy", sections 5.2 and 5.3; the small networks for images and those
for CIFAR from Papernot et al. 2021, "Tempered Sigmoid Activations", Tables 1 and 2; those on scattering coefficients
from Tramèr and Boneh 2021, "Differentially Private Learning Needs Better Features"; `bilstm` from Wei et al. 2022
(DPIS), for IMDb.

What normalises scattering coefficients is a function of one record alone, so it costs no privacy. Groups of channels
get mean 0 and variance 1; for linear models each record then gets unit L2 norm, so that clipping hardly changes the
gradients. No message about a file of words quotes a line, since the file may have been named by mistake.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import Field, JsonValue, model_validator
from torch import Tensor, nn

from algorithms.errors import ModelRefusedError
from algorithms.gradients import logistic_loss
from algorithms.models.bounds import LOGISTIC, LossBounds
from algorithms.models.libraries import digest
from algorithms.models.model import ACTIVATIONS, Model, ModelSettings, ModelSpec
from algorithms.models.objectives import as_they_are, classifier, cross_entropy

LossFunction = Callable[[Tensor, Tensor], Tensor]


def softmax(spec: ModelSpec) -> Model:
    """Softmax regression: cross-entropy of one linear layer with an output for each class.

    Raises ModelRefusedError for targets that are no classes.
    """
    if spec.predicts != "class":
        raise ModelRefusedError(
            f"the model 'softmax' is for classes, the data have the target of {spec.predicts}; use 'linear'."
        )
    return classifier("softmax", _linear(spec, spec.classes))


def linear(spec: ModelSpec) -> Model:
    """A linear layer with the loss for the target: half the squared error of a number, or that of several labels.

    Raises ModelRefusedError for classes.
    """
    if spec.predicts == "class":
        raise ModelRefusedError(
            f"the model 'linear' predicts a number or labels, and the data have {spec.classes} classes; use 'softmax'."
        )
    return Model("linear", _linear(spec, spec.classes), cross_entropy, as_they_are)


def two_classes(
    name: str, losses: LossFunction, bounds: LossBounds, spec: ModelSpec, *, bias: bool = True
) -> Model:
    """A linear layer with one output, for two classes: logistic regression or a linear support vector machine.

    Raises ModelRefusedError for other targets.
    """
    is_class = spec.predicts == "class"
    if spec.classes != 2 or not is_class:
        others = (
            f"{spec.classes} classes; use 'softmax'"
            if is_class
            else f"the target of {spec.predicts}; use 'linear'"
        )
        raise ModelRefusedError(f"the model {name!r} is for 2 classes, the data have {others}.")
    return Model(name, _linear(spec, 1, bias=bias), losses, _two_scores, bounds=bounds)


def additive(spec: ModelSpec) -> Model:
    """A sum of a number for each active cell of an encoded table, with the loss for the target; starts at zero.

    It has one output for two classes, and no bias, since the vectors of cells all have the same norm.
    """
    if spec.predicts != "class":
        return Model("additive", _linear(spec, spec.classes, bias=False), cross_entropy, as_they_are)
    if spec.classes == 2:
        return two_classes("additive", logistic_loss, LOGISTIC, spec, bias=False)
    return classifier("additive", _linear(spec, spec.classes, bias=False))


def _linear(spec: ModelSpec, outputs: int, *, bias: bool = True) -> nn.Module:
    layer = nn.Linear(torch.Size(spec.input_shape).numel(), outputs, bias=bias)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), layer)


def _two_scores(outputs: Tensor) -> Tensor:
    return torch.cat([-outputs, outputs], dim=-1) / 2


class DenseSettings(ModelSettings):
    """hidden: units of the hidden layer."""

    hidden: int = Field(default=1000, ge=1)


def mlp(spec: ModelSpec, settings: DenseSettings) -> Model:
    """One hidden ReLU layer on flattened inputs; 71,010 parameters on 60 features, 1000 units and 10 classes."""
    features = torch.Size(spec.input_shape).numel()
    module = nn.Sequential(
        nn.Flatten(),
        nn.Linear(features, settings.hidden),
        nn.ReLU(),
        nn.Linear(settings.hidden, spec.classes),
    )
    return classifier("mlp", module)


_CIFAR_CHANNELS = ((32, 32), (64, 64), (128, 128))
"""The channels of the convolutions before each pooling."""


def conv_fc(spec: ModelSpec) -> Model:
    """Two 5 x 5 ReLU convolutions of 64 channels, each before a pooling, and two dense layers of 384 units.

    1,832,266 parameters on CIFAR-10. spec: images [channels, height, width], at least 4 pixels high and wide. Raises
    ModelRefusedError otherwise. The layers are named conv1, conv2, fc1, fc2 and fc3.
    """
    _check_images("conv_fc", spec, 4)
    channels, height, width = spec.input_shape
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (before, after) in enumerate(((channels, 64), (64, 64)), start=1):
        layers[f"conv{i}"] = nn.Conv2d(before, after, kernel_size=5, padding=2)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"pool{i}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    layers["fc1"], layers["relu3"] = nn.Linear(64 * (height // 4) * (width // 4), 384), nn.ReLU()
    layers["fc2"], layers["relu4"] = nn.Linear(384, 384), nn.ReLU()
    layers["fc3"] = nn.Linear(384, spec.classes)
    return classifier("conv_fc", nn.Sequential(layers))


def small_cnn(name: str, activation: str, spec: ModelSpec) -> Model:
    """Two convolutions with overlapping max-pooling and two dense layers; 26,010 parameters on 1 x 28 x 28.

    spec: images [channels, height, width], at least 20 pixels high and wide. Raises ModelRefusedError otherwise.
    """
    _check_images(name, spec, 20)
    height, width = (_side(pixels) for pixels in spec.input_shape[1:])
    act = ACTIVATIONS[activation]
    module = nn.Sequential(
        nn.Conv2d(spec.input_shape[0], 16, kernel_size=8, stride=2, padding=2),
        act(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        act(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * height * width, 32),
        act(),
        nn.Linear(32, spec.classes),
    )
    return classifier(name, module)


def _side(pixels: int) -> int:
    """Height or width after both convolutions and both poolings."""
    # (pixels + padding - kernel) // stride + 1 of a convolution; the pooling, of stride 1, takes another one.
    first = (pixels + 4 - 8) // 2 + 1 - 1
    return (first - 4) // 2 + 1 - 1


def cifar_cnn(name: str, activation: str, spec: ModelSpec) -> Model:
    """Six convolutions in three pairs, each before a pooling, and two dense layers; 550,570 parameters on CIFAR-10.

    spec: images [channels, height, width], at least 8 pixels high and wide. Raises ModelRefusedError otherwise. The
    layers are named conv1 to conv6, fc1 and fc2.
    """
    _check_images(name, spec, 8)
    channels, height, width = spec.input_shape
    act, layers = ACTIVATIONS[activation], OrderedDict[str, nn.Module]()
    widths = [channels, *(width for pair in _CIFAR_CHANNELS for width in pair)]
    for i, (before, after) in enumerate(pairwise(widths), start=1):
        layers[f"conv{i}"], layers[f"act{i}"] = nn.Conv2d(before, after, kernel_size=3, padding=1), act()
        if i % 2 == 0:
            layers[f"pool{i // 2}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    layers["fc1"], layers["act7"] = nn.Linear(widths[-1] * (height // 8) * (width // 8), 128), act()
    layers["fc2"] = nn.Linear(128, spec.classes)
    return classifier(name, nn.Sequential(layers))


def _check_images(name: str, spec: ModelSpec, minimum: int) -> None:
    if len(spec.input_shape) != 3 or min(spec.input_shape[1:]) < minimum:
        raise ModelRefusedError(
            f"the model {name!r} takes images of at least {minimum} x {minimum} pixels, not inputs of shape"
            f" {spec.input_shape}; use 'softmax'."
        )


_GREY, _COLOUR = 81, 243
"""Channels of a scattering transform of depth 2 with 8 angles, for images of one and of three channels."""

_SMALLEST_NORM = 1e-6
"""The smallest norm to divide by, so that a record of zeros does not become NaN."""


class GroupSettings(ModelSettings):
    """groups: number of channel groups to normalise; 0 for none, as when learned features are normalised."""

    groups: int = Field(default=27, ge=0)


class UnitSettings(ModelSettings):
    """bias: the constant feature."""

    bias: float = Field(default=0.3, ge=0)


class ScatteredSettings(GroupSettings, UnitSettings):
    """The settings of both."""


class UnitRecords(nn.Module):
    """Flattens each record, divides it by its L2 norm and appends a constant; [batch, ...] -> [batch, features + 1]."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(start_dim=1)
        norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=_SMALLEST_NORM)
        return torch.cat([flat / norms, torch.full_like(norms, self.constant)], dim=1)


def unit_linear(spec: ModelSpec, settings: UnitSettings) -> Model:
    """Softmax regression on records of unit L2 norm with a constant feature; starts at zero."""
    module = nn.Sequential(UnitRecords(settings.bias), _readout(spec))
    return classifier("unit_linear", module)


def scatter_linear(spec: ModelSpec, settings: ScatteredSettings) -> Model:
    """`unit_linear` on normalised groups of channels; starts at zero.

    spec: maps [channels, height, width] whose channels the groups divide. Raises ModelRefusedError otherwise.
    """
    normalised = _normalisation("scatter_linear", spec, settings.groups)
    module = nn.Sequential(normalised, UnitRecords(settings.bias), _readout(spec))
    return classifier("scatter_linear", module)


def scatter_cnn(spec: ModelSpec, settings: GroupSettings) -> Model:
    """The paper's two tanh convolutions on normalised coefficients.

    33,066 parameters on 81 x 7 x 7 (grey images), and 187,210 on 243 x 8 x 8 (colour images). Raises ModelRefusedError
    for other numbers of channels and for maps smaller than 2 x 2.
    """
    normalised = _normalisation("scatter_cnn", spec, settings.groups)
    channels, height, width = spec.input_shape
    if channels not in (_GREY, _COLOUR) or min(height, width) < 2:
        raise ModelRefusedError(
            "the model 'scatter_cnn' takes scattering coefficients of {grey} or {colour} channels and at"
            " least 2 x 2 places, not inputs of shape {shape}; set {records.transform} to scattering.",
            code="scattering_only",
            grey=_GREY,
            colour=_COLOUR,
            shape=spec.input_shape,
        )
    layers = (
        [
            nn.Conv2d(channels, 16, kernel_size=3, stride=2, padding=1),
            nn.Tanh(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(32 * ((height + 1) // 2) * ((width + 1) // 2), 32),
            nn.Tanh(),
            nn.Linear(32, spec.classes),
        ]
        if channels == _GREY
        else [
            nn.Conv2d(channels, 64, kernel_size=3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, kernel_size=3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(64 * (height // 2) * (width // 2), spec.classes),
        ]
    )
    return classifier("scatter_cnn", nn.Sequential(normalised, *layers))


def _readout(spec: ModelSpec) -> nn.Linear:
    layer = nn.Linear(torch.Size(spec.input_shape).numel() + 1, spec.classes, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def _normalisation(name: str, spec: ModelSpec, groups: int) -> nn.Module:
    """Group normalisation without parameters; none for 0 groups."""
    shape = spec.input_shape
    if len(shape) == 3 and groups == 0:
        return nn.Identity()
    if len(shape) != 3 or shape[0] % groups or torch.Size(shape).numel() < 2 * groups:
        raise ModelRefusedError(
            "the model {model!r} takes maps [channels, height, width] whose channels {groups} groups divide,"
            " not inputs of shape {shape}; set {records.transform} to scattering, or other groups.",
            code="groups_of_channels",
            model=name,
            groups=groups,
            shape=shape,
        )
    return nn.GroupNorm(groups, shape[0], affine=False)


FIRST_WORD = 2
"""The entry of the list's first word: 0 is padding, 1 is any word that is not on the list."""

_GIVE_THE_LIST = "set words_file to the words.txt that preparing the data writes beside them"


def read_words(path: Path, entries: int, *, sha256: str | None) -> dict[str, int]:
    """The entry of each word in a file with one word per line; the first word has entry 2.

    entries: size of the vocabulary. sha256: of the list with which the data were prepared. Raises ModelRefusedError for
    an unreadable file, and for any other list, since its words may have other entries.
    """
    words: dict[str, int] = {}
    for number, line in _lines(path, "words_file"):
        if line.strip() in words or not line.strip():
            raise ModelRefusedError(
                f"line {number} of {path.name} is no new word; give a list with a word a line."
            )
        words[line.strip()] = FIRST_WORD + len(words)
    if len(words) != entries - FIRST_WORD:
        raise ModelRefusedError(
            f"{path.name} has {len(words)} words, but the data's vocabulary has {entries - FIRST_WORD};"
            f" {_GIVE_THE_LIST}."
        )
    if sha256 is None:
        raise ModelRefusedError(
            "no SHA-256 says which words the tokens stand for, and word vectors need it; state that of their list.",
            code="words_unstated",
        )
    if digest(path) != sha256:
        raise ModelRefusedError(
            f"{path.name} is not the list of the words that the tokens of these data stand for; {_GIVE_THE_LIST}."
        )
    return words


def read_vectors(path: Path, words: dict[str, int], width: int) -> dict[int, Tensor]:
    """The vectors of `words` by entry, from a file of a word and its numbers in each line (Pennington et al. 2014).

    Raises ModelRefusedError, with the line's number, for another width and for values that are not finite numbers, and
    if the file has none of the words.
    """
    vectors: dict[int, Tensor] = {}
    for number, line in _lines(path, "embedding_file"):
        word, *numbers = line.rstrip().split(" ")
        if len(numbers) != width:
            raise ModelRefusedError(
                f"line {number} of {path.name} has {len(numbers)} numbers after the word, not {width}; give a file of"
                f" that width, or set width."
            )
        if word not in words:
            continue
        try:
            vectors[words[word]] = torch.tensor([float(part) for part in numbers])
        except ValueError:
            vectors[words[word]] = torch.tensor(math.nan)
        if not vectors[words[word]].isfinite().all():
            raise ModelRefusedError(
                f"line {number} of {path.name} has a value that is not a finite number; repair the file."
            )
    if not vectors:
        raise ModelRefusedError(
            f"{path.name} has none of the words; give word vectors of the data's language."
        )
    return vectors


def _lines(path: Path, setting: str) -> Iterator[tuple[int, str]]:
    """The lines of a text file, numbered from 1."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from enumerate(file, start=1)
    except (OSError, UnicodeDecodeError):
        raise ModelRefusedError(f"{path} is no text file that can be read; set {setting} to one.") from None


_UNITS, _HIDDEN = 32, 16


class TextSettings(ModelSettings):
    """Settings of a model of words.

    embedding: "random" and "glove" are frozen, "learned" is trained with the rest. embedding_file: word vectors. width:
    of them. words_file: the vocabulary's words in the order of its entries, one per line: the words.txt beside the
    prepared data. activation: of the two dense layers.
    """

    embedding: Literal["random", "glove", "learned"] = "random"
    embedding_file: str | None = Field(default=None, min_length=1)
    words_file: str | None = Field(default=None, min_length=1)
    width: int = Field(default=100, ge=1)
    activation: Literal["relu", "tanh"] = "relu"

    @model_validator(mode="after")
    def _has_its_files(self) -> Self:
        has = [self.embedding_file is not None, self.words_file is not None]
        if has != [self.embedding == "glove"] * 2:
            raise ValueError(
                f"embedding is {self.embedding}, and embedding_file and words_file belong to glove alone; give both or"
                " neither"
            )
        return self

    def without_files(self) -> dict[str, JsonValue]:
        form = "learned" if self.embedding == "learned" else "random"
        return {"embedding": form, "width": self.width, "activation": self.activation}


class Texts(nn.Module):
    """An embedding, a bidirectional LSTM between dense layers; tokens [batch, length] -> [batch, classes]."""

    def __init__(self, table: Tensor, classes: int, activation: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(table), table.shape[1], _weight=table)
        self.first = nn.Linear(table.shape[1], _UNITS)
        self.lstm = nn.LSTM(_UNITS, _UNITS, batch_first=True, bidirectional=True)
        self.second = nn.Linear(2 * _UNITS, _HIDDEN)
        self.last = nn.Linear(_HIDDEN, classes)
        self.activation = ACTIVATIONS[activation]()
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("bias_hh"):  # torch adds two biases to each gate, of which one is redundant
                nn.init.zeros_(parameter)
                parameter.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.activation(self.first(self.embedding(tokens)))
        _, (states, _) = self.lstm(words)
        both = torch.cat([states[0], states[1]], dim=1)
        outputs: Tensor = self.last(self.activation(self.second(both)))
        return outputs


def bilstm(spec: ModelSpec, settings: TextSettings) -> Model:
    """The network, with 20,946 trained parameters on an embedding of width 100 and two classes.

    spec: tokens [length]. Raises ModelRefusedError for other inputs and for files that do not fit.
    """
    if spec.tokens is None or len(spec.input_shape) != 1 or spec.tokens < 3:
        raise ModelRefusedError(
            f"the model 'bilstm' takes texts as tokens of a vocabulary, not numbers of shape {spec.input_shape}; use"
            " 'softmax' or 'mlp'."
        )
    table, note = _table(spec.tokens, spec.words_sha256, settings)
    module = Texts(table, spec.classes, settings.activation)
    module.embedding.weight.requires_grad_(settings.embedding == "learned")
    return classifier("bilstm", module, notes=(note,))


def _table(entries: int, words_sha256: str | None, settings: TextSettings) -> tuple[Tensor, str]:
    """The initial embedding [entries, width], and a note on it."""
    table = torch.randn(entries, settings.width) / math.sqrt(settings.width)
    table[0] = 0.0  # padding
    if settings.embedding_file is None or settings.words_file is None:
        if settings.embedding == "learned":
            return table, "The embedding is trained with the rest of the model, under the same privacy."
        return table, "The embedding is random, drawn from the model's seed, and frozen."
    path = Path(settings.embedding_file)
    words = read_words(Path(settings.words_file), entries, sha256=words_sha256)
    vectors = read_vectors(path, words, settings.width)
    for entry, vector in vectors.items():
        table[entry] = vector
    return table, (
        f"The embedding is the public file {path.name} (SHA-256 {digest(path)}), frozen; {len(words) - len(vectors)} of"
        f" {len(words)} words are not in it and have random vectors."
    )

"""A recurrent network for texts: the one of Wei et al. 2022 (DPIS) for IMDb."""

from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from algorithms.models.given import ACTIVATIONS, Given, Settings
from algorithms.models.linear import CROSS_ENTROPY, as_they_are, cross_entropy
from algorithms.models.model import Model, ModelRefused
from algorithms.models.words import digest, random_vectors, read_vectors, read_words

_UNITS, _HIDDEN = 32, 16


class TextSettings(Settings):
    """Of a model of words.

    embedding: "random" and "glove" are frozen, "learned" is trained with the rest. embedding_file: word vectors of
    `width` numbers. words_file: the vocabulary's words in the order of its entries, one a line, which is the words.txt
    beside the prepared data. activation: of the two dense layers.
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

    def without_files(self) -> dict[str, Any]:
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
        self._freeze_second_biases()

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.activation(self.first(self.embedding(tokens)))
        _, (states, _) = self.lstm(words)
        both = torch.cat([states[0], states[1]], dim=1)
        outputs: Tensor = self.last(self.activation(self.second(both)))
        return outputs

    def _freeze_second_biases(self) -> None:
        """torch adds two biases to each gate, of which one does nothing: it stays at zero."""
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("bias_hh"):
                nn.init.zeros_(parameter)
                parameter.requires_grad_(False)


def bilstm(given: Given, settings: TextSettings) -> Model:
    """The network, with 20,946 trained parameters on an embedding of width 100 and two classes.

    given: tokens [length]. Raises ModelRefused for other inputs and for files that do not fit.
    """
    if given.tokens is None or len(given.input_shape) != 1 or given.tokens < 3:
        raise ModelRefused(
            f"the model 'bilstm' takes texts as tokens of a vocabulary, not numbers of shape {given.input_shape}; use"
            " 'softmax' or 'mlp'."
        )
    table, note = _table(given.tokens, given.words_sha256, settings)
    module = Texts(table, given.classes, settings.activation)
    module.embedding.weight.requires_grad_(settings.embedding == "learned")
    return Model("bilstm", module, cross_entropy, as_they_are, bounds=CROSS_ENTROPY, notes=(note,))


def _table(entries: int, words_sha256: str | None, settings: TextSettings) -> tuple[Tensor, str]:
    """The embedding [entries, width] at the start, and a sentence on it."""
    table = random_vectors(entries, settings.width)
    if settings.embedding_file is None or settings.words_file is None:
        if settings.embedding == "learned":
            return table, "The embedding is trained with the rest of the model, under the same privacy."
        return table, "The embedding is random, drawn from the model's seed, and frozen."
    path = Path(settings.embedding_file)
    words = read_words(Path(settings.words_file), entries, sha256=words_sha256)
    found = read_vectors(path, words, settings.width)
    for entry, vector in found.vectors.items():
        table[entry] = vector
    return table, (
        f"The embedding is the public file {path.name} (SHA-256 {digest(path)}), frozen; {found.missing} of"
        f" {len(words)} words are not in it and have random vectors."
    )

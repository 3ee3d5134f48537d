"""A recurrent network for texts, that of Wei et al. 2022 (DPIS) for IMDb, and word vectors from a public text file.

No message quotes a line, since the file may have been named by mistake.
"""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from algorithms.models.linear import classifier
from algorithms.models.model import ACTIVATIONS, Model, ModelRefusedError, ModelSpec, Settings

FIRST_WORD = 2
"""The entry of the list's first word: 0 is padding, 1 is any word that is not on the list."""

_GIVE_THE_LIST = "set words_file to the words.txt that preparing the data writes beside them"


def random_vectors(entries: int, width: int) -> Tensor:
    """A table [entries, width] of N(0, 1 / width) from torch's generator, with zeros for padding."""
    table = torch.randn(entries, width) / math.sqrt(width)
    table[0] = 0.0
    return table


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
            "the data card does not say by words_sha256 which words the tokens stand for, and word vectors need it;"
            " add to the card's reader the SHA-256 of datasets/prepared/words.txt, and prepare again."
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
        if word in words:
            vectors[words[word]] = _vector(numbers, number, path)
    if not vectors:
        raise ModelRefusedError(
            f"{path.name} has none of the words; give word vectors of the data's language."
        )
    return vectors


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hex; raises ModelRefusedError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        raise ModelRefusedError(f"there is no file {path}; give the path of one, or leave it out.") from None


def _vector(numbers: list[str], line: int, path: Path) -> Tensor:
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = [math.nan]
    if not all(map(math.isfinite, values)):
        raise ModelRefusedError(
            f"line {line} of {path.name} has a value that is not a finite number; repair the file."
        )
    return torch.tensor(values)


def _lines(path: Path, setting: str) -> Iterator[tuple[int, str]]:
    """The lines of a text file, numbered from 1."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from enumerate(file, start=1)
    except (OSError, UnicodeDecodeError):
        raise ModelRefusedError(f"{path} is no text file that can be read; set {setting} to one.") from None


_UNITS, _HIDDEN = 32, 16


class TextSettings(Settings):
    """Settings of a model of words.

    embedding: "random" and "glove" are frozen, "learned" is trained with the rest. embedding_file: word vectors of
    `width` numbers. words_file: the vocabulary's words in the order of its entries, one per line: the words.txt beside
    the prepared data. activation: of the two dense layers.
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


def bilstm(given: ModelSpec, settings: TextSettings) -> Model:
    """The network, with 20,946 trained parameters on an embedding of width 100 and two classes.

    given: tokens [length]. Raises ModelRefusedError for other inputs and for files that do not fit.
    """
    if given.tokens is None or len(given.input_shape) != 1 or given.tokens < 3:
        raise ModelRefusedError(
            f"the model 'bilstm' takes texts as tokens of a vocabulary, not numbers of shape {given.input_shape}; use"
            " 'softmax' or 'mlp'."
        )
    table, note = _table(given.tokens, given.words_sha256, settings)
    module = Texts(table, given.classes, settings.activation)
    module.embedding.weight.requires_grad_(settings.embedding == "learned")
    return classifier("bilstm", module, notes=(note,))


def _table(entries: int, words_sha256: str | None, settings: TextSettings) -> tuple[Tensor, str]:
    """The initial embedding [entries, width], and a note on it."""
    table = random_vectors(entries, settings.width)
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

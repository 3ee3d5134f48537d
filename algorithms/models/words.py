"""Word vectors from a public text file, for the words of a public list.

No message quotes a line: it may be of a file that was named by mistake.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from algorithms.models.model import ModelRefused

FIRST_WORD = 2
"""The entry of the list's first word: 0 is padding, 1 any word that is not on the list."""

_GIVE_THE_LIST = "set words_file to the words.txt that preparing the data writes beside them"


@dataclass(frozen=True)
class Found:
    """Vectors [words, width] by entry of the vocabulary. missing: how many words of the list the file lacks."""

    vectors: dict[int, Tensor]
    missing: int


def random_vectors(entries: int, width: int) -> Tensor:
    """A table [entries, width] of N(0, 1 / width) from torch's generator; the entry of padding is zero."""
    table = torch.randn(entries, width) / math.sqrt(width)
    table[0] = 0.0
    return table


def read_words(path: Path, entries: int, *, sha256: str | None) -> dict[str, int]:
    """The entries of the words of a list with a word a line, the first at 2.

    entries: of the vocabulary. sha256: of the one list whose lines are the entries that the data have. Raises
    ModelRefused for a file that cannot be read and for any other list, in which words may stand at other entries.
    """
    words: dict[str, int] = {}
    for number, line in _lines(path, "words_file"):
        if line.strip() in words or not line.strip():
            raise ModelRefused(
                f"line {number} of {path.name} is no new word; give a list with a word a line."
            )
        words[line.strip()] = FIRST_WORD + len(words)
    if len(words) != entries - FIRST_WORD:
        raise ModelRefused(
            f"{path.name} has {len(words)} words, but the data's vocabulary has {entries - FIRST_WORD};"
            f" {_GIVE_THE_LIST}."
        )
    if sha256 is None:
        raise ModelRefused(
            "the data card does not say by words_sha256 which words the tokens stand for, and word vectors need it;"
            " add to the card's reader the SHA-256 of data/prepared/words.txt, and prepare again."
        )
    if digest(path) != sha256:
        raise ModelRefused(
            f"{path.name} is not the list of the words that the tokens of these data stand for; {_GIVE_THE_LIST}."
        )
    return words


def read_vectors(path: Path, words: dict[str, int], width: int) -> Found:
    """The vectors of the words that a text file has, a word and then its numbers in each line (Pennington et al. 2014).

    Raises ModelRefused, by the number of the line, for another width and for what is no finite number.
    """
    vectors: dict[int, Tensor] = {}
    for number, line in _lines(path, "embedding_file"):
        word, *numbers = line.rstrip().split(" ")
        if len(numbers) != width:
            raise ModelRefused(
                f"line {number} of {path.name} has {len(numbers)} numbers after the word, not {width}; give a file of"
                f" that width, or set width."
            )
        if word in words:
            vectors[words[word]] = _vector(numbers, number, path)
    if not vectors:
        raise ModelRefused(f"{path.name} has none of the words; give word vectors of the data's language.")
    return Found(vectors, len(words) - len(vectors))


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits; raises ModelRefused where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        raise ModelRefused(f"there is no file {path}; give the path of one, or leave it out.") from None


def _vector(numbers: list[str], line: int, path: Path) -> Tensor:
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = [math.nan]
    if not all(map(math.isfinite, values)):
        raise ModelRefused(f"line {line} of {path.name} has what is no finite number; repair the file.")
    return torch.tensor(values)


def _lines(path: Path, setting: str) -> Iterator[tuple[int, str]]:
    """The lines of a text file, numbered from 1."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from enumerate(file, start=1)
    except (OSError, UnicodeDecodeError):
        raise ModelRefused(f"{path} is no text file that can be read; set {setting} to one.") from None

"""Texts, unchanged for a text encoder or as tokens of a public list of words.

They are in the columns of rows, or in a tar archive with the layout of the Large Movie Review Dataset (Maas et al.
2011).

The words that have a token never come from the texts, and every text is processed independently.
"""

import hashlib
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.card import DataRefusedError
from data.formats import Reviews, Texts, Tokens
from data.readers import encoding
from data.readers.records import PARTS, RecordBatch, RecordChunk, SplitPart
from data.targets import Tags

PADDING, UNKNOWN_WORD = 0, 1
WORD_SEPARATOR = "\x1f"
"""The separator of words that are tagged: the unit separator."""
_FIRST_WORD = 2
_LINE_BREAK = re.compile(r"<br\s*/?>")
_PUNCTUATION = str.maketrans(dict.fromkeys('!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~', " "))
"""Punctuation that Keras' text tokenizer removes by default; the apostrophe stays, as in "don't"."""
_BROKEN = (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error)


def read_tokens(
    files: Mapping[str, Path], declared: Reviews, *, classes: tuple[str, ...]
) -> Iterator[RecordChunk]:
    """Read one block per part: the tokens of each text, int32 [n, length], and the index of its folder in `classes`.

    Records are in the order of class and number, since archives of the same texts have different orders; only tokens
    are kept until all texts are read. Raises DataRefusedError, which names the file and no text, if the archive is
    truncated, lacks the list of words or has a text twice, or if the list is too short or not UTF-8.
    """
    words, length = words_of(files, declared), declared.length
    for part, labels, rows in _in_order(
        files["archive"], classes, partial(tokens, words=words, length=length)
    ):
        yield RecordChunk(part, RecordBatch(np.array(rows, np.int32).reshape(-1, length), labels))


def read_texts(files: Mapping[str, Path], *, classes: tuple[str, ...]) -> Iterator[RecordChunk]:
    """Read one block per part: the texts as an array of strings [n], without HTML line breaks.

    The order is that of `read_tokens`. Raises DataRefusedError as it does.
    """
    for part, labels, texts in _in_order(files["archive"], classes, without_breaks):
        yield RecordChunk(part, RecordBatch(np.array(texts, dtype=object), labels))


def _in_order(
    archive: Path, classes: tuple[str, ...], make: Callable[[str], Any]
) -> Iterator[tuple[SplitPart, NDArray[np.int64], list[Any]]]:
    """For each part, the labels of its texts and what is made of them, in the order of class and number."""
    by_part: dict[SplitPart, dict[tuple[int, int], Any]] = {part: {} for part in PARTS}
    for part, label, number, text in _texts(archive, classes):
        if (label, number) in by_part[part]:
            raise DataRefusedError(
                "{path} has a text twice in its {part} folder; fetch it again.",
                code="unreadable_file",
                path=archive,
                part=part,
            )
        by_part[part][label, number] = make(text)
    for part in PARTS:
        keys = sorted(by_part[part])
        yield part, np.array([label for label, _ in keys], np.int64), [by_part[part][key] for key in keys]


def word_list(files: Mapping[str, Path], declared: Reviews | Tokens) -> bytes:
    """The words that have a token, one per line in the order of their tokens, which start at 2.

    Lines of the public list that splitting a text never gives are left out, so the line numbers of the list are other
    tokens. Raises DataRefusedError as `read_tokens` does, and if the words do not match the checksum in `declared`.
    """
    listed = "".join(f"{word}\n" for word in words_of(files, declared)).encode()
    digest, path = hashlib.sha256(listed).hexdigest(), _file_of_words(files, declared)
    if declared.words_sha256 not in (None, digest):
        raise DataRefusedError(
            "the words that have a token by the list in {path} have the SHA-256"
            " {digest}, not the one that the data card declares; correct words_sha256, or give the list that it is of.",
            code="altered_file",
            path=path,
            digest=digest,
        )
    return listed


def tokens(text: str, words: Mapping[str, int], *, length: int) -> NDArray[np.int32]:
    """The last `length` tokens of a text, padded at the start, as by Keras' defaults.

    words: the token of each word that has one.
    """
    last = split(text)[-length:]
    row = np.full(length, PADDING, np.int32)
    row[length - len(last) :] = [words.get(word, UNKNOWN_WORD) for word in last]
    return row


def token_rows(texts: Sequence[str], words: Mapping[str, int], *, length: int) -> NDArray[np.int32]:
    """The `tokens` of several texts, [n, length]."""
    return np.array([tokens(text, words, length=length) for text in texts], np.int32).reshape(-1, length)


def decode_text(content: bytes | None) -> str:
    """A record's text; empty if it is not UTF-8, since a refusal would reveal something about that record."""
    try:
        return (content or b"").decode("utf-8")
    except UnicodeDecodeError:
        return ""


def without_breaks(text: str) -> str:
    """A text with a space for each HTML line break, as a text encoder takes it."""
    return _LINE_BREAK.sub(" ", text)


def split(text: str) -> list[str]:
    """The words of a text in lower case, without HTML line breaks and punctuation."""
    return without_breaks(text.lower()).translate(_PUNCTUATION).split()


def words_of(files: Mapping[str, Path], declared: Reviews | Tokens) -> dict[str, int]:
    """The token of each word that has one; raises DataRefusedError as `read_tokens` does."""
    path, member = _file_of_words(files, declared), declared.words if isinstance(declared, Reviews) else None
    return _vocabulary(
        path.read_bytes() if member is None else _member(path, member), declared.vocabulary, path
    )


def _file_of_words(files: Mapping[str, Path], declared: Reviews | Tokens) -> Path:
    return files["archive" if isinstance(declared, Reviews) and declared.words else "words"]


def _vocabulary(listed: bytes, size: int, path: Path) -> dict[str, int]:
    """Tokens of the first words of a list, except lines that splitting a text never gives."""
    words: dict[str, int] = {}
    try:
        lines = listed.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise DataRefusedError(
            "{path} has a list of words that is not UTF-8; correct it.", code="unreadable_file", path=path
        ) from None
    for line in lines:
        if len(words) < size - _FIRST_WORD and split(line) == [line.strip()]:
            words.setdefault(line.strip(), _FIRST_WORD + len(words))
    if len(words) < size - _FIRST_WORD:
        raise DataRefusedError(
            "the list of words in {path} has {words} words, too few for a vocabulary of {size}; declare a "
            "smaller one in the data card.",
            code="bad_card",
            path=path,
            words=len(words),
            size=size,
            keys=("reader.vocabulary",),
        )
    return words


def _texts(path: Path, classes: tuple[str, ...]) -> Iterator[tuple[SplitPart, int, int, str]]:
    """Part, class, number and content of each text of the archive, in its order."""
    alternatives = "|".join(re.escape(name) for name in classes)
    pattern = re.compile(rf"(.*/)?(train|test)/({alternatives})/[0-9]+_[0-9]+\.txt")
    for name, content in _members(path, pattern):
        *_, part, folder, file = name.split("/")
        number = int(file.split("_")[0])
        yield "train" if part == "train" else "test", classes.index(folder), number, decode_text(content)


def _member(path: Path, name: str) -> bytes:
    for _, content in _members(path, re.compile(re.escape(name))):
        return content
    raise DataRefusedError(
        "{path} holds no {name!r}; fetch it again, or correct words in the data card.",
        code="unreadable_file",
        path=path,
        name=name,
    )


def _members(path: Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of the files of an archive whose full name matches `wanted`."""
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                file = archive.extractfile(member) if wanted.fullmatch(member.name) else None
                if file is not None:
                    yield member.name, file.read()
                archive.members = []  # type: ignore[attr-defined] # otherwise it keeps all members that it has read
    except _BROKEN:
        raise DataRefusedError(
            "{path} is not a whole tar archive; fetch it again.", code="unreadable_file", path=path
        ) from None


def join_texts(table: pa.Table, declared: Texts, tags: Tags | None = None) -> tuple[list[str], list[bytes]]:
    """The texts of some rows, cut to the longest allowed length, and a key of each row's content.

    The key decides on which side of the split a record is, so another `longest` or `join` moves no record. tags: the
    target, if words are tagged; the words are then separated by WORD_SEPARATOR, and at most as many as the target uses.
    """
    columns = [encoding.contents(table[name], lists=tags is not None) for name in declared.columns]
    whole = list(zip(*columns, strict=True))
    if tags is None:
        texts = [truncate(declared.join.join(map(decode_text, parts)), declared) for parts in whole]
    else:
        texts = [apart(encoding.words_of(content), tags) for (content,) in whole]
    # With lengths, so that no two rows have one key whose columns differ.
    keys = [b"".join(b"%d " % len(part or b"") + (part or b"") for part in parts) for parts in whole]
    return texts, keys


def as_features(
    texts: list[str], declared: Texts, words: Mapping[str, int] | None
) -> NDArray[np.object_] | NDArray[np.int32]:
    """The texts unchanged, or as tokens if `words` is given."""
    if words is None or declared.tokens is None:
        return np.array(texts, dtype=object)
    return token_rows(texts, words, length=declared.tokens.length)


def apart(words: list[str], tags: Tags) -> str:
    """The words that are tagged, joined by WORD_SEPARATOR; a separator within a word becomes a space."""
    return WORD_SEPARATOR.join(word.replace(WORD_SEPARATOR, " ") for word in words[: tags.words])


def truncate(text: str, declared: Texts) -> str:
    """The part of a text that is kept."""
    return text[: declared.longest] if declared.keep == "start" else text[-declared.longest :]

"""Texts in the columns of rows, as they are for a text encoder or as tokens of a public list of words."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.readers import encoding, reviews
from data.schema.formats import Texts
from data.schema.targets import Tags

_Words = Mapping[str, int]
BETWEEN = "\x1f"
"""Between the words of a text that are tagged one by one: the unit separator."""


def joined(table: pa.Table, declared: Texts, tags: Tags | None = None) -> tuple[list[str], list[bytes]]:
    """The texts of some rows, cut to their longest length, and what each was made of.

    The latter decides on a record's side, so that another `longest` or `join` moves none. tags: where the words are
    tagged one by one, which are then apart by BETWEEN, and as many as the target takes.
    """
    columns = [encoding.contents(table[name], lists=tags is not None) for name in declared.columns]
    whole = list(zip(*columns, strict=True))
    if tags is None:
        texts = [cut(declared.join.join(map(_decoded, parts)), declared) for parts in whole]
    else:
        texts = [apart(encoding.words_of(content), tags) for (content,) in whole]
    keys = [b"".join(b"%d " % len(part or b"") + (part or b"") for part in parts) for parts in whole]
    return texts, keys


def as_features(
    texts: list[str], declared: Texts, words: _Words | None
) -> NDArray[np.object_] | NDArray[np.int32]:
    """The texts as they are, or as tokens where there are words."""
    if words is None:
        made: NDArray[np.object_] = np.empty(len(texts), dtype=object)
        made[:] = texts
        return made
    length = 0 if declared.tokens is None else declared.tokens.length
    found = [reviews.tokens(text, words, length=length) for text in texts]
    return np.array(found, np.int32).reshape(-1, length)


def _decoded(content: bytes | None) -> str:
    try:
        return (content or b"").decode("utf-8")
    except UnicodeDecodeError:
        return ""


def apart(words: list[str], tags: Tags) -> str:
    """The words that are tagged, as one text; a word that a tokenizer could not take is a blank one."""
    return BETWEEN.join(word.replace(BETWEEN, " ") for word in words[: tags.words])


def cut(text: str, declared: Texts) -> str:
    """What is kept of a text."""
    return text[: declared.longest] if declared.keep == "start" else text[-declared.longest :]

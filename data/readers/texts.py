"""Texts in the columns of rows, unchanged for a text encoder, or as tokens of a public list of words."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.formats import Texts
from data.readers import encoding, reviews
from data.targets import Tags

_Words = Mapping[str, int]
BETWEEN = "\x1f"
"""The separator of words that are tagged: the unit separator."""


def joined(table: pa.Table, declared: Texts, tags: Tags | None = None) -> tuple[list[str], list[bytes]]:
    """The texts of some rows, cut to the longest allowed length, and a key of each row's content.

    The key decides on which side of the split a record is, so another `longest` or `join` moves no record. tags: the
    target, if words are tagged; the words are then separated by BETWEEN, and at most as many as the target uses.
    """
    columns = [encoding.contents(table[name], lists=tags is not None) for name in declared.columns]
    whole = list(zip(*columns, strict=True))
    if tags is None:
        texts = [cut(declared.join.join(map(reviews.decoded, parts)), declared) for parts in whole]
    else:
        texts = [apart(encoding.words_of(content), tags) for (content,) in whole]
    keys = [b"".join(b"%d " % len(part or b"") + (part or b"") for part in parts) for parts in whole]
    return texts, keys


def as_features(
    texts: list[str], declared: Texts, words: _Words | None
) -> NDArray[np.object_] | NDArray[np.int32]:
    """The texts unchanged, or as tokens if `words` is given."""
    if words is None or declared.tokens is None:
        return np.array(texts, dtype=object)
    return reviews.token_rows(texts, words, length=declared.tokens.length)


def apart(words: list[str], tags: Tags) -> str:
    """The words that are tagged, joined by BETWEEN; a separator within a word becomes a space."""
    return BETWEEN.join(word.replace(BETWEEN, " ") for word in words[: tags.words])


def cut(text: str, declared: Texts) -> str:
    """The part of a text that is kept."""
    return text[: declared.longest] if declared.keep == "start" else text[-declared.longest :]

"""What is refused is refused in one sentence."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from algorithms.errors import RefusedError, WordedError
from data.card import DataRefusedError
from data.documents import CONTRADICTION

Kind = type[Exception] | tuple[type[Exception], ...]


@contextmanager
def refused(words: str, kind: Kind = RefusedError) -> Iterator[None]:
    """What runs within is refused in one sentence in which this pattern is found."""
    with pytest.raises(kind, match=words) as refusal:
        yield
    assert re.fullmatch(r"[^\n]+\.", str(refusal.value))


@contextmanager
def refused_as(
    code: str, kind: type[WordedError | DataRefusedError] = RefusedError, /, **fields: object
) -> Iterator[pytest.ExceptionInfo[WordedError | DataRefusedError]]:
    """What runs within is refused with this code and with these values among its fields; the refusal, afterwards."""
    # A union would be seen as Exception alone.
    expected: Any = kind
    with pytest.raises(expected) as refusal:
        yield refusal
    assert refusal.value.code == code, str(refusal.value)
    assert {name: refusal.value.fields.get(name) for name in fields} == fields


def names_in(refusal: pytest.ExceptionInfo[WordedError | DataRefusedError], field: str) -> Sequence[str]:
    """The names that a field of a refusal lists."""
    names = refusal.value.fields[field]
    assert isinstance(names, tuple | list), names
    return names


@contextmanager
def contradicting(*keys: str) -> Iterator[None]:
    """What runs within validates a document whose first fault is that these keys of a part of it do not go together."""
    with pytest.raises(ValidationError) as refusal:
        yield
    first, *_ = refusal.value.errors()
    assert first["type"] == CONTRADICTION and first["ctx"]["keys"] == keys, first["msg"]


def check_refusals(steps: Mapping[str, Any]) -> None:
    """Each of these steps is refused in a sentence with its words."""
    for words, step in steps.items():
        with refused(re.escape(words)):
            step()

"""What is refused is refused in one sentence."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from algorithms.errors import RefusedError

Kind = type[Exception] | tuple[type[Exception], ...]


@contextmanager
def refused(words: str, kind: Kind = RefusedError) -> Iterator[None]:
    """What runs within is refused in one sentence in which this pattern is found."""
    with pytest.raises(kind, match=words) as refusal:
        yield
    assert re.fullmatch(r"[^\n]+\.", str(refusal.value))


def check_refusals(steps: Mapping[str, Any]) -> None:
    """Each of these steps is refused in a sentence with its words."""
    for words, step in steps.items():
        with refused(re.escape(words)):
            step()

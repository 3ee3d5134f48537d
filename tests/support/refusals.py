"""What is refused is refused in one sentence."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from algorithms.errors import RefusedError


@contextmanager
def refused(words: str, kind: type[Exception] = RefusedError) -> Iterator[None]:
    """What runs within is refused in one sentence that has these words."""
    with pytest.raises(kind, match=re.escape(words)) as refusal:
        yield
    assert re.fullmatch(r"[^\n]+\.", str(refusal.value))


def check_refusals(steps: Mapping[str, Any]) -> None:
    """Each of these steps is refused in a sentence with its words."""
    for words, step in steps.items():
        with refused(words):
            step()

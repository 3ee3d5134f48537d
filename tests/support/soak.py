"""Which cases of a family every run of the tests takes, and which `make soak` takes too."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def soak_but(chosen: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases of which only the chosen ones are in every run of the tests; a tuple has one value for each name.

    Choose each value that takes a way of its own through the code; the others repeat these ways in other sizes or in
    other company.
    """
    cases = list(cases)
    assert all(case in cases for case in chosen), "a chosen case is none of the cases"
    return [
        case if case in chosen else pytest.param(*_values(case), marks=pytest.mark.soak) for case in cases
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)

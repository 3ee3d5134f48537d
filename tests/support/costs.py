"""Costs of equal releases, which are asked for by many tests, computed once."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from algorithms.privacy.accounting import epsilon

_EPSILONS = cache(epsilon._epsilon.__wrapped__)


@contextmanager
def computed_once() -> Iterator[None]:
    """In the block every epsilon is remembered, for later blocks as well; for tests that change no accounting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epsilon, "_epsilon", _EPSILONS)
        yield


@pytest.fixture(autouse=True, scope="module")
def costs_once() -> Iterator[None]:
    """For a module to import."""
    with computed_once():
        yield

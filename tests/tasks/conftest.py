"""Figures are drawn pixel by pixel for the fixtures of whole modules alone, whose tests look at what they left."""

from collections.abc import Iterator

import pytest

from tests.support.pictures import undrawn


@pytest.fixture(autouse=True)
def _quick_figures() -> Iterator[None]:
    with undrawn():
        yield

"""Figures are drawn pixel by pixel for the fixtures of whole modules alone, whose tests look at what they left."""

from collections.abc import Iterator

import pytest

from tests.support.quick_work import quick_work


@pytest.fixture(autouse=True)
def _quick_work() -> Iterator[None]:
    with quick_work():
        yield

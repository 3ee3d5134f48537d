"""Figures are drawn pixel by pixel for the fixtures of whole modules alone, whose tests look at what they left."""

from collections.abc import Iterator

import pytest

from tests.support.quick_reports import quick_reports


@pytest.fixture(autouse=True)
def _quick_reports() -> Iterator[None]:
    with quick_reports():
        yield

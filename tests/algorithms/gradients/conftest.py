"""Tests of the engine say themselves how models are inspected; passes of a full inspection are compared once."""

import pytest

from algorithms.gradients import engine


@pytest.fixture
def usual_inspections() -> None:
    """As small models are, in full."""


@pytest.fixture
def all_comparisons() -> None:
    """For tests of what many comparisons of passes find."""


@pytest.fixture(autouse=True)
def compared_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """More comparisons, of other made-up records, would take a fifth of a full inspection."""
    if "all_comparisons" not in request.fixturenames:
        monkeypatch.setattr(engine, "MAX_SEEDS", 1)

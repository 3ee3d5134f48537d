"""Models are inspected briefly, in a fifth of the time; `gradients` tests the inspections themselves."""

import pytest

from algorithms.gradients import engine


@pytest.fixture
def full_inspections() -> None:
    """For tests of what a full inspection alone sees."""


@pytest.fixture(autouse=True)
def usual_inspections(request: pytest.FixtureRequest) -> None:
    if "full_inspections" not in request.fixturenames:
        request.getfixturevalue("brief_inspections")


@pytest.fixture
def recorded_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look into passes, none of which is replayed."""
    monkeypatch.setattr(engine, "_REPLAYED_BYTES", 0.0)

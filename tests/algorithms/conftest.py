"""Models are inspected briefly, in a fifth of the time; `gradients` tests the inspections themselves."""

import pytest

from algorithms.gradients import replay


@pytest.fixture
def full_inspections() -> None:
    """For tests of what a full inspection alone sees."""


@pytest.fixture(autouse=True)
def usual_inspections(request: pytest.FixtureRequest) -> None:
    if "full_inspections" not in request.fixturenames:
        request.getfixturevalue("brief_inspections")


@pytest.fixture
def replayed_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that have a replay are replayed from the first one on."""
    monkeypatch.setattr(replay, "RECORDED", 0)

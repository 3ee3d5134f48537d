"""Models are inspected briefly, in a fifth of the time; `gradients` tests the inspections themselves."""

import pytest


@pytest.fixture
def full_inspections() -> None:
    """For tests of what a full inspection alone sees."""


@pytest.fixture(autouse=True)
def usual_inspections(request: pytest.FixtureRequest) -> None:
    if "full_inspections" not in request.fixturenames:
        request.getfixturevalue("brief_inspections")

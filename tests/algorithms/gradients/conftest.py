"""Tests of the engine say themselves how models are inspected."""

import pytest


@pytest.fixture
def usual_inspections() -> None:
    """As small models are, in full."""

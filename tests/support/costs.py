"""Costs of equal releases, and the noise that they need, which many tests ask for, computed once."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from algorithms.core import calibration
from algorithms.privacy.accounting import epsilon
from algorithms.privacy.accounting.noise_search import calibrate
from algorithms.privacy.card import verify_card
from tests.support.bounds_once import lower_bounds_once

_EPSILONS = cache(epsilon._epsilon.__wrapped__)
_NOISES = dict[str, float]()
_MULTIPLIERS = (0.7, 3.0, 50.0)
"""Releases that are equal at these are equal at every multiplier."""


def _calibrated(schedule_at: Any, *asked: Any, **settings: Any) -> float:
    key = repr(([schedule_at(noise) for noise in _MULTIPLIERS], asked, settings))
    if key not in _NOISES:
        _NOISES[key] = calibrate(schedule_at, *asked, **settings)
    return _NOISES[key]


@contextmanager
def computed_once() -> Iterator[None]:
    """In the block every epsilon, noise for one and bound by `verify_card` is remembered, for later blocks as well.

    For tests that change no accounting.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "calibrate", _calibrated)
        patch.setattr(epsilon, "_epsilon", _EPSILONS)
        patch.setattr(verify_card, "lower_bounds", lower_bounds_once)
        yield


@pytest.fixture(autouse=True, scope="module")
def costs_once() -> Iterator[None]:
    """For a module to import."""
    with computed_once():
        yield

"""What takes longest in plans and reports, and is the same from test to test, is done once or not at all."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from algorithms.privacy.accounting.risk import Profile, risk_profile
from algorithms.privacy.ledger import store
from tasks import report, reporting
from tasks.reporting import figures
from tests.support.costs import computed_once

_PROFILES: dict[str, Profile] = {}
_TEMPLATES = cache(reporting.environment)
_PRAGMAS = [pragma.replace("synchronous = FULL", "synchronous = OFF") for pragma in store._SQLITE_PRAGMAS]


def _once(*asked: Any) -> Profile:
    key = repr(asked)
    if key not in _PROFILES:
        _PROFILES[key] = risk_profile(*asked)
    return _PROFILES[key]


@pytest.fixture(autouse=True)
def quick_work() -> Iterator[None]:
    """A figure is made, but drawn to a few bytes; cost and risk of equal releases are computed once.

    The page's template is compiled once. SQLite does not wait for the disk, which matters where the power fails alone.
    Fixtures of whole modules are made before it: what they leave has figures to look at.
    """
    with computed_once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "png", lambda _figure: b"undrawn")
        patch.setattr(report, "risk_profile", _once)
        patch.setattr(reporting, "environment", _TEMPLATES)
        patch.setattr(store, "_SQLITE_PRAGMAS", _PRAGMAS)
        yield

"""Bounds of the verifier of one file for equal events and terms, computed once."""

import json
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from algorithms.privacy.card import verify_card

BOUNDS_OF, RDP_OF = verify_card.lower_bounds, verify_card.rdp


@lru_cache(maxsize=1000)
def _bounds_once(terms: str) -> Any:
    return BOUNDS_OF(*json.loads(terms))


@lru_cache(maxsize=1000)
def _rdp_once(rows: str, orders: tuple[float, ...]) -> Any:
    return RDP_OF(json.loads(rows), np.array(orders))


def lower_bounds_once(rows: Any, adjacency: str, accounting: Any) -> Any:
    """`verify_card.lower_bounds`, in whose place it stands, computed once for equal events and terms."""
    terms = {name: accounting[name] for name in ("delta", "composition")}
    return _bounds_once(
        json.dumps([rows, adjacency, terms | {"epsilon": {"pld": accounting["epsilon"]["pld"]}}])
    )


@pytest.fixture
def bounds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes each bound once: they take most of the time, and most edits leave the events as they are."""

    def rdp(rows: Any, alpha: Any) -> Any:
        return sum((n * _rdp_once(json.dumps([(event, 1)]), tuple(alpha)) for event, n in rows), 0.0 * alpha)

    monkeypatch.setattr(verify_card, "lower_bounds", lower_bounds_once)
    monkeypatch.setattr(verify_card, "rdp", rdp)

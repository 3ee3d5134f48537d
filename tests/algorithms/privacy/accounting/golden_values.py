"""Reference values computed without the product, and how near to them a result has to be."""

import json
from pathlib import Path
from typing import Any

import pytest

GOLDEN: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("golden.json").read_text())


def golden_value(name: str) -> Any:
    tolerance = GOLDEN[name]["tolerance"]
    return pytest.approx(GOLDEN[name]["value"], rel=tolerance.get("rel", 0), abs=tolerance.get("abs", 0))

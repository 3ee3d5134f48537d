"""The examples in the docstrings run as they stand."""

import doctest
import linecache
from importlib import import_module

import pytest

from tests.support.checkout import PROJECT

MODULES = sorted(
    ".".join(path.relative_to(PROJECT).with_suffix("").parts)
    for package in ("algorithms", "tasks", "data", "flows")
    for path in (PROJECT / package).rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)


def test_there_are_examples() -> None:
    assert {"algorithms.fitting", "algorithms.privacy.accounting.risk"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # For each docstring, doctest's debugger would ask for the date of every source that this process has shown.
    monkeypatch.setattr(linecache, "checkcache", lambda *_: None)
    found = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0
    assert found.failed == 0

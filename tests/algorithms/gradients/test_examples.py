"""The examples in the docstrings run as they stand."""

import doctest
from types import ModuleType

import pytest

from algorithms.gradients import clipping, engine, model_inspection


@pytest.mark.parametrize("module", [clipping, engine, model_inspection], ids=lambda module: module.__name__)
def test_examples_give_what_they_say(module: ModuleType) -> None:
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0
    assert found.failed == 0

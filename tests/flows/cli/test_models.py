"""A card by whoever is checked within bounds of time and memory, or refused in a sentence."""

import itertools
import resource
import signal

import numpy as np
import pytest

from flows.cli import models
from tests.support.refusals import refused


def test_what_takes_for_ever_ends_in_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_MAX_SECONDS", 0.05)
    before = signal.getsignal(signal.SIGPROF)
    with refused("this card cannot be checked: it takes more than 0.05 s of a processor"), models._bounded():
        for _ in itertools.repeat(None):
            pass
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_what_needs_all_memory_ends_in_a_refusal() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with refused("this card cannot be checked: Unable to allocate 8.00 GiB"), models._bounded():
        np.empty(2**30)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with refused("it needs too much memory"), models._bounded():
        raise MemoryError

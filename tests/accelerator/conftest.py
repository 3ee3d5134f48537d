"""The simulated accelerator, for the tests of this folder alone."""

from collections.abc import Iterator

import pytest
import torch

from algorithms.privacy.barrier.device import device_of
from tests.accelerator import simulator

if simulator.why_not() is None:
    # PyTorch counts the devices at a process's first backward pass: one that another folder's tests make when imported.
    simulator.device_library()


@pytest.fixture(autouse=True)
def usual_inspections(brief_inspections: None) -> None:
    """Brief ones; what is inspected there is what is inspected on the CPU."""


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device as a run takes it, which makes PyTorch deterministic."""
    if reason := simulator.why_not():
        pytest.skip(reason)
    before = torch.get_deterministic_debug_mode()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # type: ignore[attr-defined]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        with simulator.available():
            yield device_of("sim")
    finally:
        torch.set_deterministic_debug_mode(before)

"""Which device computes: what is there, by its name, and nothing that cannot add sums in 64 bits."""

import os
from typing import Any

import pytest
import torch

from algorithms.privacy.barrier.device import device_of
from tests.support.refusals import refused_as


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whether PyTorch was made deterministic, once for each time; it is left as it is."""
    calls: list[Any] = []
    monkeypatch.setattr(torch, "set_deterministic_debug_mode", calls.append)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # type: ignore[attr-defined]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    return calls


def see(monkeypatch: pytest.MonkeyPatch, accelerator: str | None) -> None:
    """Let PyTorch see an accelerator of a kind, or none."""
    found = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)


@pytest.mark.parametrize(
    ("name", "accelerator", "device"),
    [("auto", None, "cpu"), ("cpu", "cuda", "cpu"), ("auto", "cuda", "cuda"), ("cuda", "cuda", "cuda")],
)
def test_a_device_is_taken_by_its_name(
    name: str, accelerator: str | None, device: str, monkeypatch: pytest.MonkeyPatch, deterministic: list[Any]
) -> None:
    see(monkeypatch, accelerator)
    assert device_of(name) == torch.device(device)
    assert deterministic == ["error"] * (device != "cpu")
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (None if device == "cpu" else ":4096:8")


@pytest.mark.parametrize(
    ("name", "accelerator", "choice"),
    [
        ("cuda", None, "auto or cpu"),
        ("xpu", "cuda", "auto, cpu or cuda"),
        ("gpu", "cuda", "auto, cpu or cuda"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    name: str, accelerator: str | None, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, accelerator)
    with refused_as("device_missing", name=name, choice=choice):
        device_of(name)


def test_a_device_without_64_bits_is_refused_and_never_chosen(
    monkeypatch: pytest.MonkeyPatch, deterministic: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """In this build of PyTorch no tensor can be on the device `mps`, whatever its type."""
    see(monkeypatch, "mps")
    with refused_as("device_without_64_bits", name="mps"):
        device_of("mps")
    assert device_of("auto") == torch.device("cpu") and not deterministic
    assert "so the CPU computes" in caplog.text

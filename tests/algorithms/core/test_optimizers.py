"""Updates by released gradients: the same on every device, whatever PyTorch's optimizers prefer there."""

import importlib
from dataclasses import astuple
from typing import Any

import pytest
import torch

from algorithms.core.optimizers import OptimizerConfig
from tests.support.device import DEVICE

UPDATES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9, "averaging": "ema"},
    "adam": {"optimizer": "adam", "momentum": 0.9, "averaging": "tail"},
    "adamw": {"optimizer": "adam", "momentum": 0.9, "weight_decay": 0.1, "schedule": "cosine"},
}


def states(settings: dict[str, Any], device: torch.device) -> list[torch.Tensor]:
    """The tensors of the state after four steps, on the CPU."""
    update, draw = OptimizerConfig(learning_rate=0.1, **settings), torch.Generator().manual_seed(0)
    state = update.start(torch.randn(50, generator=draw).to(device))
    for _ in range(4):
        state = update.apply(state, torch.randn(50, generator=draw).to(device), steps=4)
    return [part.cpu() for part in astuple(state)]


@pytest.mark.parametrize("name", UPDATES)
def test_steps_are_the_same_where_pytorch_prefers_other_loops(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator it prefers `foreach`, whose Adam takes no whole number of steps."""
    expected = states(UPDATES[name], torch.device("cpu"))
    for optimizer in ("adam", "sgd"):
        module = importlib.import_module(f"torch.optim.{optimizer}")
        monkeypatch.setattr(module, "_default_to_fused_or_foreach", lambda *_, **__: (False, True))
    assert all(map(torch.equal, states(UPDATES[name], torch.device("cpu")), expected))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="compares a device with the CPU")
@pytest.mark.parametrize("name", UPDATES)
def test_steps_on_the_device_are_those_of_the_cpu(name: str) -> None:
    for found, expected in zip(
        *(states(UPDATES[name], where) for where in (DEVICE, torch.device("cpu"))), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)

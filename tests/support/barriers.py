"""A barrier over made-up records whose filter affords everything."""

from functools import cache
from typing import Any

import dp_accounting as dp
import numpy as np
import torch
from torch import nn

from algorithms.models import Model, build
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from tests.support.bench import MadeUp, OneLook, small_model

FALSE_ALARM = 1e-6
"""Of each statistical test."""


class Free:
    """A filter that affords everything and remembers what it was charged."""

    def __init__(self) -> None:
        self.events: list[dp.DpEvent] = []

    def affords(self, event: dp.DpEvent) -> bool:
        return True

    def charge(self, event: dp.DpEvent) -> None:
        self.events.append(event)

    def epsilon_spent(self, delta: float) -> float:
        return 0.0


def barrier(records: MadeUp, model: Model | None = None, **changes: Any) -> Barrier:
    settings: dict[str, Any] = {
        "privacy_filter": Free(),
        "generator": seeded_generator(5),
        "delta": 1e-5,
        "trace": Trace(),
        "compute": OneLook(),
    }
    return Barrier(records, model or small_model(), **(settings | changes))


@cache
def wide_model() -> Model:
    """A softmax model with 30,003 parameters, to have many draws of noise in one answer."""
    return build("softmax", input_shape=(10_000,), classes=3, seed=0)


def no_records(width: int = 10_000) -> MadeUp:
    return MadeUp(np.zeros((0, width), dtype=np.float32), np.zeros(0, dtype=np.int64))


def conv_model() -> Model:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
    return Model("conv", module, small_model().losses, lambda outputs: outputs)

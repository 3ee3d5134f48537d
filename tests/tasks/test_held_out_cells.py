"""What is counted of private held-out records: one person's part of it, whoever else is held out."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from algorithms.models import Model
from algorithms.models.objectives import cross_entropy
from data.description import DatasetInfo
from data.prepared import HeldOut
from tasks.held_out_cells import count_held_out, histogram_of
from tests.support.synthetic_run import description

WIDTH = 6


class EvenOdds(nn.Module):
    """Two ways to compute one number, whose difference is rounding alone: it decides on which side of even odds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        once = self.layer(inputs).sum(dim=1)
        again = inputs @ self.layer.weight.sum(dim=0) + self.layer.bias.sum()
        return torch.stack([torch.zeros_like(once), once - again], dim=1)


class Asking(EvenOdds):
    """The same, computed in another order where any record has padding, as models of texts do."""

    def forward(self, inputs: Tensor) -> Tensor:
        if bool((inputs > 50.0).any()):
            return -super().forward(inputs).flip(1)
        return super().forward(inputs)


@pytest.fixture
def two_classes() -> DatasetInfo:
    return replace(description(), input_shape=(WIDTH,), classes=("no", "yes"), holdout="private")


def counted(module: nn.Module, features: Any, info: DatasetInfo) -> Any:
    model = Model("tried", module, cross_entropy, scores=lambda outputs: outputs)
    labels = np.arange(len(features)) % 2
    held_out = HeldOut(info, features.astype(np.float32), labels)
    return count_held_out(histogram_of(info.label_type), model, dict(module.named_parameters()), held_out)


@pytest.mark.parametrize("make", [EvenOdds, Asking])
@pytest.mark.parametrize("count", [63, 64, 100])
def test_one_more_record_moves_its_own_cells_alone(make: Any, count: int, two_classes: DatasetInfo) -> None:
    torch.manual_seed(0)
    module, draw = make(), np.random.default_rng(count)
    features = draw.normal(size=(count, WIDTH))
    loud = np.full((2, WIDTH), 100.0)  # an even number, so that the others keep their labels
    alone = counted(module, features, two_classes)
    with_more = counted(module, np.concatenate([loud, features]), two_classes)
    assert np.array_equal(with_more - alone, counted(module, loud, two_classes))

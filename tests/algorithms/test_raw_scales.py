"""Features on raw scales are warned of by what is public: types, made-up records, and the values of public records."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from epsilonflow import DPSGD, fit

ROWS, MANY = 40, np.random.default_rng(0).integers(0, 256, (40, 1, 8, 8))
LABELS = np.arange(ROWS) % 2


class Scaling(nn.Module):
    """Divides by 255 before its convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.body = convolution()

    def forward(self, pixels: Tensor) -> Tensor:
        scores: Tensor = self.body(pixels / 255)
        return scores


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))


def linear(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 2))


def warned(model: nn.Module, X: Any, **more: Any) -> list[str]:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(
            model,
            "cross_entropy",
            X,
            LABELS,
            method=DPSGD(steps=1, expected_batch_size=20),
            epsilon=3,
            delta=1e-3,
            **more,
        )
    said = [one for one in caught if "take" in str(one.message)]
    assert {one.filename for one in said} <= {__file__}  # the line that calls fit
    return [str(one.message) for one in said]


@pytest.mark.parametrize(
    ("model", "X", "what", "layer"),
    [
        (convolution, MANY.astype(np.uint8), "uint8", "Conv2d"),
        (convolution, torch.from_numpy(MANY.astype(np.uint8)), "uint8", "Conv2d"),
        (lambda: linear(64), MANY, "int64", "Linear"),
        (
            lambda: linear(2),
            pd.DataFrame({"age": np.arange(ROWS), "share": np.linspace(0, 1, ROWS)}),
            "age",
            "Linear",
        ),
    ],
    ids=["images", "a tensor", "numbers", "a column"],
)
def test_whole_numbers_that_reach_a_layer_with_weights_are_warned_of(
    model: Callable[[], nn.Module], X: Any, what: str, layer: str
) -> None:
    (text,) = warned(model(), X)
    assert text.startswith(f"X has whole numbers ({what}), which the layer {layer} takes as they are")


@pytest.mark.parametrize(
    ("model", "X"),
    [
        (Scaling, MANY.astype(np.uint8)),
        (lambda: nn.Sequential(nn.GroupNorm(1, 1), convolution()), MANY.astype(np.uint8)),
        (lambda: linear(64), MANY.astype(np.float32)),
        (lambda: linear(64), MANY > 100),
        (
            lambda: nn.Sequential(nn.Embedding(256, 2), nn.Flatten(), nn.Linear(128, 2)),
            MANY.reshape(ROWS, 64),
        ),
    ],
    ids=["a model that scales", "a norm", "private floats", "yes and no", "tokens"],
)
def test_what_is_scaled_or_says_nothing_by_its_type_is_not(model: Callable[[], nn.Module], X: Any) -> None:
    assert warned(model(), X) == []


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_values_of_private_records_change_no_warning(kind: Any) -> None:
    """What a call says of zeros and of the largest values is the same."""
    zeros = np.zeros(MANY.shape, kind)
    assert warned(linear(64), zeros) == warned(linear(64), zeros + kind(255))


def test_public_records_are_looked_at() -> None:
    public = {"public": True, "noise": "seeded"}
    (text,) = warned(linear(64), MANY.astype(np.float32), **public)
    assert text.startswith("X has numbers up to 255, which the layer Linear takes as they are: clipping")
    assert warned(linear(64), LABELS[:, None] * np.ones(64, np.int64), **public) == []

"""A dense network with one hidden layer (Abadi et al. 2016, "Deep Learning with Differential Privacy", section 5.2)."""

import torch
from pydantic import Field
from torch import nn

from algorithms.models.given import Given, Settings
from algorithms.models.linear import CROSS_ENTROPY, as_they_are, cross_entropy
from algorithms.models.model import Model


class DenseSettings(Settings):
    """hidden: units of the hidden layer."""

    hidden: int = Field(default=1000, ge=1)


def mlp(given: Given, settings: DenseSettings) -> Model:
    """One hidden ReLU layer on flattened inputs; 71,010 parameters on 60 features, 1000 units and 10 classes."""
    features = torch.Size(given.input_shape).numel()
    module = nn.Sequential(
        nn.Flatten(),
        nn.Linear(features, settings.hidden),
        nn.ReLU(),
        nn.Linear(settings.hidden, given.classes),
    )
    return Model("mlp", module, cross_entropy, as_they_are, bounds=CROSS_ENTROPY)

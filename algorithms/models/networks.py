"""A dense network with one hidden layer, and convolutional networks for images.

`mlp` and `conv_fc` are from Abadi et al. 2016, "Deep Learning with Differential Privacy", sections 5.2 and 5.3. The two
small networks for 28 x 28 images and the two for CIFAR are from Papernot et al. 2021, "Tempered Sigmoid Activations",
Tables 1 and 2.
"""

from collections import OrderedDict
from itertools import pairwise

import torch
from pydantic import Field
from torch import nn

from algorithms.models.linear import classifier
from algorithms.models.model import ACTIVATIONS, Model, ModelRefusedError, ModelSpec, Settings


class DenseSettings(Settings):
    """hidden: units of the hidden layer."""

    hidden: int = Field(default=1000, ge=1)


def mlp(given: ModelSpec, settings: DenseSettings) -> Model:
    """One hidden ReLU layer on flattened inputs; 71,010 parameters on 60 features, 1000 units and 10 classes."""
    features = torch.Size(given.input_shape).numel()
    module = nn.Sequential(
        nn.Flatten(),
        nn.Linear(features, settings.hidden),
        nn.ReLU(),
        nn.Linear(settings.hidden, given.classes),
    )
    return classifier("mlp", module)


_CIFAR_CHANNELS = ((32, 32), (64, 64), (128, 128))
"""The channels of the convolutions before each pooling."""


def tanh_cnn(given: ModelSpec) -> Model:
    """Two tanh convolutions with overlapping max-pooling and two dense layers; 26,010 parameters on 1 x 28 x 28.

    given: images [channels, height, width], at least 20 pixels high and wide. Raises ModelRefusedError otherwise.
    """
    return _small("tanh_cnn", given, "tanh")


def relu_cnn(given: ModelSpec) -> Model:
    """`tanh_cnn` with rectified linear units."""
    return _small("relu_cnn", given, "relu")


def cifar_cnn(given: ModelSpec) -> Model:
    """Six ReLU convolutions in three pairs, each before a pooling, and two dense layers.

    550,570 parameters on CIFAR-10. given: images [channels, height, width], at least 8 pixels high and wide. Raises
    ModelRefusedError otherwise. The layers are named conv1 to conv6, fc1 and fc2.
    """
    return _cifar("cifar_cnn", given, "relu")


def cifar_tanh_cnn(given: ModelSpec) -> Model:
    """`cifar_cnn` with tanh instead of rectified linear units."""
    return _cifar("cifar_tanh_cnn", given, "tanh")


def conv_fc(given: ModelSpec) -> Model:
    """Two 5 x 5 ReLU convolutions of 64 channels, each before a pooling, and two dense layers of 384 units.

    1,832,266 parameters on CIFAR-10. given: images [channels, height, width], at least 4 pixels high and wide. Raises
    ModelRefusedError otherwise. The layers are named conv1, conv2, fc1, fc2 and fc3.
    """
    _check_images("conv_fc", given, 4)
    channels, height, width = given.input_shape
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (before, after) in enumerate(((channels, 64), (64, 64)), start=1):
        layers[f"conv{i}"] = nn.Conv2d(before, after, kernel_size=5, padding=2)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"pool{i}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    layers["fc1"], layers["relu3"] = nn.Linear(64 * (height // 4) * (width // 4), 384), nn.ReLU()
    layers["fc2"], layers["relu4"] = nn.Linear(384, 384), nn.ReLU()
    layers["fc3"] = nn.Linear(384, given.classes)
    return classifier("conv_fc", nn.Sequential(layers))


def _small(name: str, given: ModelSpec, activation: str) -> Model:
    _check_images(name, given, 20)
    height, width = (_side(pixels) for pixels in given.input_shape[1:])
    act = ACTIVATIONS[activation]
    module = nn.Sequential(
        nn.Conv2d(given.input_shape[0], 16, kernel_size=8, stride=2, padding=2),
        act(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        act(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * height * width, 32),
        act(),
        nn.Linear(32, given.classes),
    )
    return classifier(name, module)


def _side(pixels: int) -> int:
    """Height or width after both convolutions and both poolings."""
    first = (pixels + 4 - 8) // 2 + 1 - 1
    return (first - 4) // 2 + 1 - 1


def _cifar(name: str, given: ModelSpec, activation: str) -> Model:
    _check_images(name, given, 8)
    channels, height, width = given.input_shape
    act, layers = ACTIVATIONS[activation], OrderedDict[str, nn.Module]()
    widths = [channels, *(width for pair in _CIFAR_CHANNELS for width in pair)]
    for i, (before, after) in enumerate(pairwise(widths), start=1):
        layers[f"conv{i}"], layers[f"act{i}"] = nn.Conv2d(before, after, kernel_size=3, padding=1), act()
        if i % 2 == 0:
            layers[f"pool{i // 2}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    layers["fc1"], layers["act7"] = nn.Linear(widths[-1] * (height // 8) * (width // 8), 128), act()
    layers["fc2"] = nn.Linear(128, given.classes)
    return classifier(name, nn.Sequential(layers))


def _check_images(name: str, given: ModelSpec, least: int) -> None:
    if len(given.input_shape) != 3 or min(given.input_shape[1:]) < least:
        raise ModelRefusedError(
            f"the model {name!r} takes images of at least {least} x {least} pixels, not inputs of shape"
            f" {given.input_shape}; use 'softmax'."
        )

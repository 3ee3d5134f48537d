"""The models by name."""

from collections.abc import Callable
from dataclasses import replace

import torch

from algorithms.models.convolutional import tanh_cnn
from algorithms.models.linear import logistic, logistic_through_origin, softmax, svm
from algorithms.models.model import Model, ModelRefused

CATALOGUE: dict[str, Callable[[tuple[int, ...], int], Model]] = {
    "softmax": softmax,
    "logistic": logistic,
    "logistic_through_origin": logistic_through_origin,
    "svm": svm,
    "tanh_cnn": tanh_cnn,
}

_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(
    name: str, *, input_shape: tuple[int, ...], classes: int, seed: int, precision: str = "float32"
) -> Model:
    """The named model for inputs of a shape and a number of classes; its random start is drawn from `seed`.

    precision: float32 or bfloat16. Raises ModelRefused for an unknown name and for a model that does not fit the data.
    """
    if name not in CATALOGUE:
        raise ModelRefused(f"there is no model {name!r}; choose one of {', '.join(CATALOGUE)}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CATALOGUE[name](input_shape, classes)
    return replace(model, precision=_PRECISIONS[precision])

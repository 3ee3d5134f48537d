"""A warning before `fit` spends a budget on features that a model takes on their raw scale.

Clipping bounds a record's gradient as a whole, so that features in the hundreds leave nothing of the others. Whoever
runs a call sees its warnings, so that one which read private records would reveal single ones. It looks at what
is public: what the model does with made-up records, the values of public records alone, and the type of the numbers,
which is taken to be as public as their shape; who reads tables whose types follow from their rows sets them by `dtype`.
"""

import copy
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from algorithms.gradients.patches import without_shortcuts
from algorithms.models.mapped_arrays import row_chunks
from algorithms.user_warnings import warn_user

_WEIGHTED_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
"""Layers whose gradients are as large as what they receive."""
_MADE_UP = 100.0
"""The number that made-up records are full of; each type of whole numbers holds it."""
_MAX_ABS = 50.0
"""The largest public value that raises no warning: numbers of mean 0 and variance 1 hardly reach it."""
_MAX_NAMES = 5


def whole_numbers(X: Any, array: NDArray[Any]) -> str:
    """What of records has a type of whole numbers, in words; empty for nothing. array: the records as one array.

    Example:
        >>> whole_numbers(pd.DataFrame({"age": [40], "share": [0.5]}), np.array([[40, 0.5]]))
        'X has whole numbers (age)'
        >>> whole_numbers(None, np.zeros((1, 8, 8), np.uint8))
        'X has whole numbers (uint8)'
    """
    if isinstance(X, pd.DataFrame):
        names = [str(name) for name, of in X.dtypes.items() if of.kind in "iu"]
        names = names if len(names) <= _MAX_NAMES else [*names[:_MAX_NAMES], "..."]
    else:
        names = [str(array.dtype)] if array.dtype.kind in "iu" else []
    return f"X has whole numbers ({', '.join(names)})" if names else ""


def warn_of_raw_scales(module: nn.Module, features: NDArray[Any], whole: str, *, is_public: bool) -> None:
    """Warn if features reach a layer with weights on what is probably their raw scale.

    Args:
        module: takes [batch, *shape] of the features' type.
        features: the records [n, *shape].
        whole: what of them is whole numbers, as `whole_numbers` says.
        is_public: whether the records are public, so that their values decide instead of their type.
    """
    if is_public:
        largest = max(float(np.abs(features[rows]).max()) for rows in row_chunks(features))
        what, unless = f"X has numbers up to {largest:.3g}" if largest > _MAX_ABS else "", ""
    else:
        what, unless = whole, "unless they are about one, such as 0 and 1, "
    layer = _first_on_raw_scale(module, features) if what else None
    if layer is not None:
        warn_user(
            f"{what}, which the layer {layer} takes as they are: {unless}clipping leaves little of the other features."
            " Scale them to about one by bounds that are known without the data, such as pixels by 255"
            f"{'; floats of private records raise no warning.' if unless else '.'}"
        )


def _first_on_raw_scale(module: nn.Module, features: NDArray[Any]) -> str | None:
    """The first layer with weights in a pass over made-up records; None if they do not reach it as they are."""
    received: list[tuple[str, float]] = []

    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            received.append((type(layer).__name__, float(inputs[0].abs().max())))

    duplicate = copy.deepcopy(module)
    for layer in duplicate.modules():
        if isinstance(layer, _WEIGHTED_LAYERS):
            layer.register_forward_pre_hook(note)
    probe = torch.full((2, *features.shape[1:]), _MADE_UP)
    with suppress(Exception), torch.no_grad(), without_shortcuts():
        duplicate(probe)
    return received[0][0] if received and received[0][1] >= _MADE_UP else None

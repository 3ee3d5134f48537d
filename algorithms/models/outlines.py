"""What planning needs to know of a shipped model, without building it or importing PyTorch.

Linear models have outlines, since most models that are shipped for tables are. A test compares each with its model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from algorithms.models.bounds import CROSS_ENTROPY, HINGE, HUBER_HINGE, LOGISTIC, SQUARED_ERROR, LossBounds


@dataclass(frozen=True)
class LinearOutline:
    """A linear model that starts at zero: one layer on flattened inputs.

    Attributes:
        width: Of its inputs.
        outputs: Their number.
        has_bias: Whether there is a bias for each output.
        bounds: Of a record's loss.
        start_loss: The largest loss of a record of a class where all outputs are 0; None for a number.
    """

    width: int
    outputs: int
    has_bias: bool
    bounds: LossBounds
    start_loss: float | None

    @property
    def parameter_count(self) -> int:
        """Their number."""
        return self.outputs * (self.width + self.has_bias)


_OF_TWO_CLASSES: Mapping[str, tuple[LossBounds, float, bool]] = {
    "logistic": (LOGISTIC, math.log(2), True),
    "logistic_through_origin": (LOGISTIC, math.log(2), False),
    "svm": (HINGE, 1.0, True),
    "huber_svm": (HUBER_HINGE, 1.0, True),
}
"""Bounds of the loss, the loss where the output is 0, and whether there is a bias."""


def outline_of(
    name: str, *, input_shape: tuple[int, ...], classes: int, predicts: str
) -> LinearOutline | None:
    """The outline of the model that `build` makes of these, without settings of the model.

    None where there is no outline: for models that are not linear, other targets, and what `build` refuses.
    """
    width, is_class = math.prod(input_shape), predicts == "class"
    if predicts == "number" and name in ("linear", "additive"):
        return LinearOutline(width, classes, name == "linear", SQUARED_ERROR, None)
    if is_class and classes == 2 and (name in _OF_TWO_CLASSES or name == "additive"):
        bounds, loss, has_bias = _OF_TWO_CLASSES.get(name, _OF_TWO_CLASSES["logistic_through_origin"])
        return LinearOutline(width, 1, has_bias, bounds, loss)
    if is_class and classes >= 2 and name in ("softmax", "additive"):
        return LinearOutline(width, classes, name == "softmax", CROSS_ENTROPY, math.log(classes))
    return None

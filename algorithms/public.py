"""What an algorithm may know before its first release: declared values, never computed from records."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from algorithms.models import LossBounds
from algorithms.privacy.errors import Refused


@dataclass(frozen=True)
class Inputs:
    """The largest norms of the vector that a linear model multiplies with its weights, a bias's 1 included.

    width: its largest coordinate above 0 plus its largest below, the norm of `Box`. outputs: of the model.
    """

    l1: float
    l2: float
    width: float = math.inf
    outputs: int = 1


@dataclass(frozen=True)
class Public:
    """What an algorithm may know before its first release.

    records: number of training records, or None where it is private. parameters: d. layers: length of the model's
    list of layers. classes: number of classes. inputs: for a linear model on data whose card bounds them, else None.
    loss: of a record, by the model's outputs, or None where nothing is known.
    """

    records: int | None
    parameters: int
    layers: int
    classes: int
    inputs: Inputs | None = None
    loss: LossBounds | None = None

    def known_records(self, what: str) -> int:
        """The number of records; raises Refused where it is private, since `what` needs it."""
        if self.records is None:
            raise Refused(
                f"the number of records is private, and {what} needs it; declare it public, or use 'dp_gd' or 'dp_sgd'."
            )
        return self.records

    def gradient_norm(self, order: Literal[1, 2, "box"]) -> float:
        """The largest norm of a record's gradient, by `L1`, `L2` or `Box`, of a linear model with one output.

        Raises Refused where a public bound is missing.
        """
        inputs, loss = self._bounded("sensitivity")
        return loss.slope * {1: inputs.l1, 2: inputs.l2, "box": inputs.width}[order]

    def smoothness(self) -> float:
        """The largest eigenvalue of a record's Hessian; raises Refused where no public bound gives it."""
        inputs, loss = self._bounded("smoothness")
        if not math.isfinite(loss.curvature):
            raise Refused(
                "smoothness was asked of a loss with a kink, like the hinge loss, which has none;"
                " use the model 'huber_svm' or 'logistic', or another algorithm."
            )
        return loss.curvature * inputs.l2**2

    def _bounded(self, what: str) -> tuple[Inputs, LossBounds]:
        if self.inputs is None or self.loss is None:
            raise Refused(
                f"a public bound for {what} is missing; take a linear model on data whose card bounds every feature,"
                " or an algorithm that clips."
            )
        return self.inputs, self.loss

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values; an infinite number becomes null."""
        document = asdict(self)
        for name in ("inputs", "loss"):
            if document[name] is not None:
                document[name] = to_finite(document[name])
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The facts that `to_json` wrote."""
        inputs, loss = document.get("inputs"), document.get("loss")
        own = {key: value for key, value in document.items() if key not in ("inputs", "loss")}
        return cls(
            **own,
            inputs=None if inputs is None else Inputs(**from_finite(inputs)),
            loss=None if loss is None else LossBounds(**from_finite(loss)),
        )


def to_finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Numbers as JSON has them: an infinite one becomes None."""
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def from_finite(values: Mapping[str, float | None]) -> dict[str, Any]:
    """The numbers that `to_finite` wrote."""
    return {key: math.inf if value is None else value for key, value in values.items()}

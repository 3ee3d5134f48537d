"""What a method may use before its first release: declared, public values, and the bounds that follow from them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, JsonValue, ValidationError

from algorithms.core.settings import adapter
from algorithms.errors import RefusedError
from algorithms.models.bounds import LossBounds, Unbounded

NumberKind: TypeAlias = Literal["number", "count"]
"""A number whose mean is predicted by the squared error, or a count by the Poisson loss."""


@dataclass(frozen=True)
class Inputs:
    """Bounds on the norms of the vector that a linear model multiplies with its weights, including the bias's 1.

    width: the largest coordinate above 0 plus the largest below, as for `Box`. outputs: of the model.
    """

    l1: Unbounded
    l2: Unbounded
    width: Unbounded = math.inf
    outputs: int = 1


@dataclass(frozen=True)
class Intercepts:
    """The parameters of a linear model of classes or labels that count alike for every record, one for each output.

    first, step: their places in the flat parameters. outputs: their number. weight: what they are multiplied with: 1
    for biases, and that of the cell that all rows of an encoded table share. class_weights: of the loss, relative to
    the largest; empty if it has none. of_labels: whether each output is of a label, of which a record can have several.
    """

    first: int
    step: int
    outputs: int
    weight: float
    class_weights: Annotated[tuple[float, ...], Field(exclude_if=lambda weights: not weights)] = ()
    of_labels: Annotated[bool, Field(exclude_if=lambda value: not value)] = False

    @property
    def indices(self) -> list[int]:
        """Their places, in the order of the outputs."""
        return [self.first + self.step * output for output in range(self.outputs)]


@dataclass(frozen=True)
class PlanningFacts:
    """What an algorithm may use before its first release.

    Attributes:
        records: Number of training records, None if it is private.
        parameters: Their number d.
        layers: Number of the model's layers.
        classes: Number of classes, 1 if the target is not a class.
        inputs: For a linear model on data whose card bounds them, else None.
        loss: Bounds of a record's loss as a function of the outputs, None if unknown.
        rows_per_user: Number of rows of a record that is a person with several rows, else None.
        bfloat16: Whether the model computes in it.
        start_loss: The largest loss of a record at the model's own start, see `zero_start_loss`; it serves planning
            alone, so a plan read from disk has none.
        intercepts: Of a linear classifier, see `intercepts_of`; they serve planning alone, too.
        number: What a model predicts that starts by saying the centre of a number, see `number_of`; for planning alone.
    """

    records: int | None
    parameters: int
    layers: int
    classes: int
    inputs: Inputs | None = None
    loss: LossBounds | None = None
    rows_per_user: Annotated[int | None, Field(alias="pooled", exclude_if=lambda value: value is None)] = None
    bfloat16: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    start_loss: Annotated[float | None, Field(exclude=True)] = field(default=None, compare=False)
    intercepts: Annotated[Intercepts | None, Field(exclude=True)] = field(default=None, compare=False)
    number: Annotated[NumberKind | None, Field(exclude=True)] = field(default=None, compare=False)

    def known_records(self, what: str) -> int:
        """The number of records, which `what` needs; raises RefusedError if it is private."""
        if self.records is None:
            raise RefusedError(
                "the number of records is private, and {what} needs it; declare it public, or use 'dp_gd' or"
                " 'dp_sgd'.",
                code="records_private",
                what=what,
            )
        return self.records

    def check_rows(self) -> None:
        """Raises RefusedError if a record is a person with several rows, for which minima are not implemented."""
        if self.rows_per_user is not None:
            raise RefusedError(
                "the method finds a minimum over single rows, and a training record here is a person with up"
                " to {rows}; use a method that takes steps, such as 'dp_sgd', or keep one row of each"
                " person.",
                code="minimum_of_people",
                rows=self.rows_per_user,
            )

    def check_norms(self) -> None:
        """Raises RefusedError in bfloat16, where products on some processors spoil the rows next to one not finite."""
        if self.bfloat16:
            raise RefusedError(
                "the method releases or samples by norms of gradients, and in bfloat16 a record that is not"
                " finite can spoil those of others; set {network.precision} to float32, or take another"
                " method.",
                code="norms_in_bfloat16",
            )

    def check_losses(self, selected: str) -> None:
        """Raises RefusedError unless losses are known to be at least 0, as the noisy selection of `selected` needs."""
        if self.loss is None or self.loss.least < 0:
            raise RefusedError(
                "the selection of {selected} compares losses from 0 up, and this model's are not known to"
                " be; use a model whose losses are, such as 'logistic'.",
                code="losses_below_0",
                selected=selected,
            )

    def gradient_norm(self, order: Literal[1, 2, "box"]) -> float:
        """A bound on the norm, `L1`, `L2` or `Box`, of a record's gradient for a linear model with one output.

        Raises RefusedError if a public bound is missing.
        """
        inputs, loss = self._require_bounds("sensitivity")
        if not math.isfinite(loss.slope):
            raise RefusedError(
                "a sensitivity was asked of a loss whose gradient has no bound, such as the squared error or the"
                " Poisson loss; use an algorithm that clips, such as 'dp_sgd' or 'dp_gd'.",
                code="slope_unbounded",
            )
        return loss.slope * {1: inputs.l1, 2: inputs.l2, "box": inputs.width}[order]

    def smoothness(self) -> float:
        """A bound on the eigenvalues of a record's Hessian; raises RefusedError if public bounds do not give one."""
        inputs, loss = self._require_bounds("smoothness")
        if not math.isfinite(loss.curvature):
            raise RefusedError(
                "smoothness was asked of a loss with a kink, like the hinge loss, which has none; use the"
                " model 'huber_svm' or 'logistic', or another algorithm.",
                code="loss_with_kink",
            )
        return loss.curvature * inputs.l2**2

    def _require_bounds(self, what: str) -> tuple[Inputs, LossBounds]:
        if self.inputs is None or self.loss is None:
            raise RefusedError(
                "a public bound for {what} is missing; take a linear model on data whose card bounds every"
                " feature, or an algorithm that clips.",
                code="public_bound_missing",
                what=what,
            )
        return self.inputs, self.loss

    def to_json(self) -> dict[str, JsonValue]:
        """The facts as JSON values; an infinite number becomes null."""
        document: dict[str, JsonValue] = adapter(PlanningFacts).dump_python(self, mode="json", by_alias=True)
        return document

    @staticmethod
    def from_json(document: Mapping[str, JsonValue]) -> "PlanningFacts":
        """The facts that `to_json` wrote; raises RefusedError for others."""
        try:
            return adapter(PlanningFacts).validate_python(document)
        except ValidationError as error:
            raise RefusedError(
                "the plan's public facts are not those that calibration writes ({why}); {plan.remedy}.",
                code="planning_facts_edited",
                why=error.errors()[0]["msg"],
            ) from None


def to_finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Numbers for JSON: infinity becomes None."""
    return {key: value if math.isfinite(value) else None for key, value in values.items()}

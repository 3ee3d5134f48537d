"""Events and what they cost: by PLD, by Rényi divergences, purely; filters; calibration of noise; risk.

`epsilon.epsilon` is the cost of a schedule of events; `release_rules` and `compound_rules` have the theorem of each
event.

Reads no record and draws no noise; of a release's row in a trace it knows the names that belong to an event. Imports
nothing else of ours but errors.
"""

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from typing import Any, Literal, TypeAlias

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from algorithms.errors import RefusedError

Accountant: TypeAlias = Literal["pld", "rdp", "pure"]

MAX_EPSILON = 1e4
"""The largest epsilon of a private run; it promises nothing, and the accountants' numbers overflow above it."""


EventJson: TypeAlias = dict[str, Any]
"""An event in a document: the name of its class under "type", beside the fields of that class."""


class EventRow(TypedDict):
    """Releases of one event in a document: count of them in a row, at least 1."""

    event: EventJson
    count: int


@dataclass(frozen=True)
class Budget:
    """An (epsilon, delta) pair, to be spent or already spent.

    Attributes:
        epsilon: At least 0; infinity stands for a run without noise.
        delta: From 0 to 1.

    Raises:
        RefusedError: For numbers outside of these ranges.

    Example:
        >>> str(Budget(0.1 + 0.2, 1e-5))  # as messages write it, to 12 digits
        'epsilon=0.3, delta=1e-05'
        >>> Budget(3.0, 1e-5).check_spendable()
        >>> Budget(float("inf"), 1e-5).check_spendable()
        Traceback (most recent call last):
        algorithms.errors.RefusedError: ...
    """

    epsilon: float
    delta: float

    def __str__(self) -> str:
        return f"epsilon={self.epsilon:.12g}, delta={self.delta:.12g}"

    def __post_init__(self) -> None:
        if math.isnan(self.epsilon) or self.epsilon < 0:
            raise RefusedError(
                "epsilon must be at least 0, not {epsilon}; give 0 or a positive number.",
                code="epsilon_negative",
                epsilon=self.epsilon,
            )
        if not 0 <= self.delta <= 1:
            raise RefusedError(
                "delta must lie between 0 and 1, not {delta}; give a probability.",
                code="delta_no_probability",
                delta=self.delta,
            )

    def check_spendable(self) -> None:
        """Raises RefusedError unless it can be spent adaptively: a finite epsilon above 0 and delta in (0, 1)."""
        if not 0 < self.epsilon < math.inf or not 0 < self.delta < 1:
            raise RefusedError(
                "epsilon {epsilon:g} at delta {delta:g} is no budget that a run can spend on the way; set"
                " {target.epsilon} to a finite number above 0, and {target.delta} above 0 and below 1.",
                code="budget_not_spendable",
                epsilon=self.epsilon,
                delta=self.delta,
            )


def rounded_up(number: float, digits: int = 4) -> str:
    """A number in `digits` significant digits, never below it, as statements about privacy need it."""
    return f"{Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(number))).normalize():f}"

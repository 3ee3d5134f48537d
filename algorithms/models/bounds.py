"""Public bounds on the losses of records, from which noise and steps are planned, without PyTorch."""

import math
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, PlainSerializer

Unbounded: TypeAlias = Annotated[
    float,
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None),
]
"""A number that may be infinite, which is null in JSON."""


@dataclass(frozen=True)
class LossBounds:
    """Public bounds on a record's loss as a function of the outputs, never computed from data.

    Attributes:
        slope: A bound on the L2 norm of its gradient.
        curvature: A bound on the eigenvalues of its Hessian; infinite if the loss has a kink.
        least: The smallest loss.
    """

    slope: Unbounded
    curvature: Unbounded
    least: Unbounded


CROSS_ENTROPY = LossBounds(slope=math.sqrt(2.0), curvature=0.5, least=0.0)
"""Its gradient is p - e_y, its Hessian diag(p) - p p^T (Böhning 1992)."""

LOGISTIC = LossBounds(slope=1.0, curvature=0.25, least=0.0)
HINGE = LossBounds(slope=1.0, curvature=math.inf, least=0.0)

HUBER_HALF_WIDTH = 0.5
"""Half the width over which the Huber hinge loss rounds off the kink; as in Chaudhuri et al. 2011, section 6."""
HUBER_HINGE = LossBounds(slope=1.0, curvature=1.0 / (2.0 * HUBER_HALF_WIDTH), least=0.0)

SQUARED_ERROR = LossBounds(slope=math.inf, curvature=1.0, least=0.0)
"""Half the squared error, whose slope grows with the error without a bound."""


def bounds_of_labels(count: int) -> LossBounds:
    """The bounds for a mean of `count` logistic losses."""
    return LossBounds(slope=1.0 / math.sqrt(count), curvature=0.25 / count, least=0.0)

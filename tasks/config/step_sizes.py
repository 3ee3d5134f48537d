"""Learning rates with which linear models cannot diverge, from public numbers alone.

Steps with momentum m on a loss of curvature at most L stay stable below 2 (1 + m) / L (Polyak 1964). The curvature of a
linear model's mean loss is at most that of the loss as a function of the outputs times the square of the longest
record, both of which are public. Half of the limit leaves room for batches that turn out larger than expected.

Where a loss's slope is bounded, as the logistic one's, a longer step only swings within what the slope allows. The
squared error's slope grows with the error, so that one diverges.
"""

import math

from algorithms.models import LossBounds


def stable_rate(bounds: LossBounds | None, norm: float, momentum: float) -> float:
    """The learning rate up to which descent on a linear model's loss is stable, with a margin of 2; else infinity.

    norm: bound on the L2 norm of a record, with a bias's constant.

    Example:
        >>> from algorithms.models.bounds import SQUARED_ERROR
        >>> stable_rate(SQUARED_ERROR, norm=2.0, momentum=0.5)
        0.375
    """
    curvature = math.inf if bounds is None else bounds.curvature * norm**2
    return (1.0 + momentum) / curvature if 0.0 < curvature < math.inf else math.inf


def diverges(bounds: LossBounds | None) -> bool:
    """Whether steps beyond the stable rate can grow without a limit, as the loss's slope has none."""
    return bounds is not None and math.isinf(bounds.slope)

"""Learning rates with which linear models cannot diverge, from public numbers alone.

Steps with momentum m on a loss of curvature at most L stay stable below 2 (1 + m) / L (Polyak 1964). The curvature of a
linear model's mean loss is at most that of the loss as a function of the outputs times the square of the longest
record, both of which are public. Half of the limit leaves room for batches that turn out larger than expected.

Where a loss's slope is bounded, as the logistic one's, a longer step only swings within what the slope allows. The
squared error's slope grows with the error, so that one diverges.
"""

import math

from algorithms.models import LossBounds
from data.documents import Document

_SHORT, _MIN_STEPS, _MAX_STEPS = 0.5, 100, 300
"""Of heavy ball: steps in 1 / L, of which there are more before they become longer, and the fewest and most of them."""
_MIN_ACCELERATED, _MAX_ACCELERATED = 10, 1000


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


def heavy_ball_path(bounds: LossBounds | None, length: float, momentum: float) -> Document:
    """The steps of descent with momentum on unit vectors, whose lengths add up to what their noise lets them.

    Noise that is the same in all steps moves an output by the sum of all lengths times its standard deviation on the
    mean of all records, had these been released once. Short steps end nearer to the minimum, and more take longer.

    length: the sum of the lengths of all steps, with momentum, if a record's slope is at most 1.

    Example:
        >>> from algorithms.models.bounds import LOGISTIC
        >>> heavy_ball_path(LOGISTIC, length=2600.0, momentum=0.9)
        {'steps': 130, 'relative_step': 0.5}
        >>> heavy_ball_path(LOGISTIC, length=400.0, momentum=0.9)
        {'steps': 100, 'relative_step': 0.1}
    """
    whole = _in_curvature(bounds, length) * (1.0 - momentum)
    steps = round(min(_MAX_STEPS, max(_MIN_STEPS, whole / _SHORT)))
    return {"steps": steps, "relative_step": float(f"{min(1.0, whole / steps):.2g}")}


def nesterov_path(bounds: LossBounds | None, length: float) -> Document:
    """The same for Nesterov's method with steps of 1 / L, whose momentum follows from the regularisation.

    A condition number of twice the length, in 1 / L, and 1.5 of its root as steps come as far as that length.

    Example:
        >>> from algorithms.models.bounds import LOGISTIC
        >>> nesterov_path(LOGISTIC, length=2600.0)
        {'steps': 54, 'relative_step': 1.0, 'regularisation': 9.6e-05}
    """
    condition = 2.0 * _in_curvature(bounds, length)
    steps = round(min(_MAX_ACCELERATED, max(_MIN_ACCELERATED, 1.5 * math.sqrt(condition))))
    size = condition * (1.5 / steps) ** 2 if steps == _MIN_ACCELERATED else 1.0
    curvature = 1.0 if bounds is None or math.isinf(bounds.curvature) else bounds.curvature
    regularisation = float(f"{curvature / (2.0 * condition):.2g}")
    return {
        "steps": steps,
        "relative_step": float(f"{min(1.0, size):.2g}"),
        "regularisation": regularisation,
    }


def _in_curvature(bounds: LossBounds | None, length: float) -> float:
    """A length in 1 / L for a loss of these bounds; of others, which the methods refuse, that of the bounds 1."""
    if bounds is None or math.isinf(bounds.slope) or math.isinf(bounds.curvature):
        return length
    return length * bounds.curvature / bounds.slope

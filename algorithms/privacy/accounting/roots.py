"""Where a continuous function crosses zero, without SciPy's optimisation, whose import takes longer than a search."""

import math
from collections.abc import Callable

_MAX_STEPS = 100
_RTOL = 4 * 2.0**-52


def find_root(
    f: Callable[[float], float], low: float, high: float, *, xtol: float = 2e-12, rtol: float = _RTOL
) -> float:
    """A root of f between `low` and `high`, where it has other signs, by Brent's method.

    The number is that of `scipy.optimize.brentq`, to the last bit: secants and inverse quadratic interpolation, and
    halves of the bracket wherever these do not shorten it fast enough.

    Args:
        f: Continuous, with finite values.
        low: One end of the bracket, which is allowed to be the larger one.
        high: The other.
        xtol: The root is within xtol + rtol |root| of a change of sign.
        rtol: See `xtol`.

    Raises:
        ValueError: Where f has the same sign at both ends, and where a value of it is NaN.
        RuntimeError: Where a hundred steps do not suffice.

    Source:
        Brent 1973, "Algorithms for Minimization without Derivatives", chapter 4.

    Example:
        >>> round(find_root(lambda x: x * x - 2, 0.0, 2.0), 12)
        1.414213562373
    """
    before, here = float(low), float(high)
    f_before, f_here = _value(f, before), _value(f, here)
    if f_before == 0:
        return before
    if f_here == 0:
        return here
    if (f_before < 0) == (f_here < 0):
        raise ValueError(f"a root was looked for between {low} and {high}, where both values have one sign")
    across, f_across, last, step = before, f_before, 0.0, 0.0  # the other end of the bracket, and two steps
    for _ in range(_MAX_STEPS):
        if f_before != 0 and f_here != 0 and (f_before < 0) != (f_here < 0):
            across, f_across = before, f_before
            last = step = here - before
        if abs(f_across) < abs(f_here):
            before, here, across = here, across, here
            f_before, f_here, f_across = f_here, f_across, f_here
        near, half = (xtol + rtol * abs(here)) / 2, (across - here) / 2
        if f_here == 0 or abs(half) < near:
            return here
        tried = math.inf
        if abs(last) > near and abs(f_here) < abs(f_before):
            tried = _interpolated(before, here, across, f_before, f_here, f_across)
        is_short = 2 * abs(tried) < min(abs(last), 3 * abs(half) - near)
        last, step = (step, tried) if is_short else (half, half)
        before, f_before = here, f_here
        here += step if abs(step) > near else math.copysign(near, half)
        f_here = _value(f, here)
    raise RuntimeError(f"no root was found between {low} and {high} in {_MAX_STEPS} steps")


def _interpolated(
    before: float, here: float, across: float, f_before: float, f_here: float, f_across: float
) -> float:
    """The step from `here` to where the secant, or the inverse parabola through all three points, is 0."""
    if before == across:
        return _ratio(-f_here * (here - before), f_here - f_before)
    slope, slope_across = (f_before - f_here) / (before - here), (f_across - f_here) / (across - here)
    return _ratio(
        -f_here * (f_across * slope_across - f_before * slope), slope_across * slope * (f_across - f_before)
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.inf


def _value(f: Callable[[float], float], at: float) -> float:
    value = float(f(at))
    if math.isnan(value):
        raise ValueError(f"a function whose root was looked for is no number at {at}")
    return value

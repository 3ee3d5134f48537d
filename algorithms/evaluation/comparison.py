"""The difference of two models on the same people, as one release.

Each person's bounded score by the first model is taken from the one by the second, and three sums leave: of the
differences, of the people and of the squared differences. One person changes them by a vector of norm at most 1,
nearly all of which is the difference's, so the noise in the mean difference is little more than that of a single sum.
"""

import math
from dataclasses import dataclass

from scipy.stats import norm

from algorithms.evaluation.estimates import difference_sums, metrics_of
from algorithms.evaluation.histogram import Released
from algorithms.evaluation.intervals import Estimate


@dataclass(frozen=True)
class Comparison:
    """How much better the second model is.

    Attributes:
        difference: of the mean score; None where noise drowns it.
        probability_better: that the mean difference is above 0, given what was released and before it no preference;
            1/2 where scores are not finite.
    """

    difference: Estimate | None
    probability_better: float


def comparison_of(released: Released) -> Comparison:
    """The comparison that a histogram of the kind "difference" holds.

    The sum of differences less its mean is normal with the noise's variance plus the sum of squares, so the probability
    is one minus the p-value of the one-sided test of no difference: a model that is equal has one above .95 in 5 % of
    releases.

    Example:
        >>> import numpy as np
        >>> from algorithms.evaluation import count, histogram_for
        >>> spec = histogram_for("difference", 1)
        >>> changes = np.repeat([1.0, 0.0, -1.0], [300, 2500, 200])
        >>> comparison = comparison_of(Released(spec, count(spec, changes, changes), 5.0))
        >>> round(comparison.difference.value, 3), comparison.probability_better > 0.99
        (0.033, True)
    """
    sums = difference_sums(released.values, released.noise_std)
    deviation = math.sqrt(max(sums.squares, 0.0) + sums.noise**2)
    is_known = deviation > 0 and not released.has_invalid
    is_better = float(norm.cdf(sums.differences / deviation)) if is_known else 0.5
    return Comparison(metrics_of(released)["difference"], is_better)

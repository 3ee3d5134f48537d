"""How often intervals hold what they are of, over many releases."""

import math
from collections.abc import Collection

import numpy as np

from algorithms.evaluation import Estimate

Z = 1.959964
_AT_LEAST = {"majority_accuracy", "calibration"}
"""The largest of several shares, and what merged bins may hide: wider than needed in some cases, never narrower."""


class Intervals:
    """What the 95 % intervals of metrics say of the truth, release by release.

    The share of 400 releases that hold it has a standard deviation of 1.1 points, so a width that is a sixth off shows.
    The root mean square of the distance to the truth, in deviations that the interval tells, has one of 3.5 %, so a
    tenth shows, as it would in the share of 1,000 releases.
    """

    def __init__(self, draws: int) -> None:
        self.draws = draws
        self.hits: dict[str, list[bool]] = {}
        self.distances: dict[str, list[float]] = {}

    def note(self, name: str, estimate: Estimate | None, truth: float) -> None:
        """Count an interval, if there is one, and how many of its deviations the truth is away from the estimate."""
        if estimate is None:
            return
        off = truth - estimate.value
        reach = estimate.high - estimate.value if off > 0 else estimate.value - estimate.low
        self.hits.setdefault(name, []).append(bool(estimate.low <= truth <= estimate.high))
        self.distances.setdefault(name, []).append(Z * off / max(reach, 1e-12))

    def check(self, *, shown: int, not_normal: Collection[str] = ()) -> None:
        """Check metrics that nearly all releases have, of which there are as many as shown.

        Those that noise drowns in many releases are no fair sample in the others. All bounds are nearly three standard
        deviations away.

        not_normal: Metrics whose distances are not, such as those that are cut off near a bound; by their first word.
        """
        names = [name for name, each in self.hits.items() if len(each) >= 0.95 * self.draws]
        assert len(names) >= shown, names
        off = 2.75 * math.sqrt(0.05 * 0.95 / self.draws)
        wide = {name for name in names if name.split()[0] in _AT_LEAST}
        shares = {name: float(np.mean(self.hits[name])) for name in names}
        assert not {
            name: share
            for name, share in shares.items()
            if not 0.95 - off <= share <= (1.0 if name in wide else 0.95 + off)
        }
        spread = 2.83 / math.sqrt(2 * self.draws)
        sizes = {name: float(np.sqrt(np.mean(np.square(self.distances[name])))) for name in names}
        assert not {
            name: size
            for name, size in sizes.items()
            if name not in wide and name.split()[0] not in not_normal and abs(size - 1.0) > spread
        }

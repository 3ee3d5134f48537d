"""How far a number's errors have fallen in a training, and the clip norm that falls with them.

Noise is drawn for the clip norm. What is long enough for the errors of a model that says the centre is too long for
those of a trained one, where there was much to learn, so each release on the way draws the noise in.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from algorithms.core.optimizers import Count, Positive
from algorithms.gradients import L2
from algorithms.privacy.mechanisms.release import Gaussian, Release, total_release

MEAN_SQUARE = 0.44
"""The mean square of a number's error where the centre is said, as it varies by the 1.5th part of its scale."""
_BOUND = L2(1.0)
"""Of a record's gain, in units of the loss on the released scale."""
_RELEASED_AFTER = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
"""After which shares of the steps errors are looked at."""
_MIN_SHARE = 0.1
_MAX_NOISE = 0.25
"""Of one release, in mean squares. With more, as where records are far fewer than a public bound on them, the clip norm
would fall and rise with the noise alone."""


@dataclass(frozen=True)
class ErrorReleases:
    """What a plan states of the releases on the way.

    noise: multiplier of each. after: the numbers of steps before them, rising.
    """

    noise: Positive
    after: Annotated[tuple[Count, ...], Field(min_length=1)]

    @property
    def bound(self) -> L2:
        """That of a record's gain."""
        return _BOUND

    @property
    def between(self) -> dict[int, list[tuple[Release, int]]]:
        """The sum of clipped gains in loss, by the number of steps before."""
        release = total_release(_BOUND, Gaussian(self.noise))
        return {step: [(release, 1)] for step in self.after}

    def clip_share(self, gain: float, records: float) -> float:
        """The share of the clip norm from now on, by a released gain, which is taken to be smaller by its noise.

        1 where that noise is more than a quarter of the mean square.

        gain: the sum over the records, of which there are so many, public or released.

        Example:
            >>> quiet = ErrorReleases(noise=0.001, after=(15,))
            >>> [round(quiet.clip_share(100.0 * gain, records=100.0), 2) for gain in (-1.0, 0.05, 0.165, 0.22)]
            [1.0, 0.88, 0.5, 0.1]
        """
        at_the_centre = records * MEAN_SQUARE / 2.0
        noise = self.noise * _BOUND.norm
        if noise > _MAX_NOISE * at_the_centre:
            return 1.0
        left = max(0.0, 1.0 - (gain - noise) / at_the_centre)
        return min(1.0, max(_MIN_SHARE, math.sqrt(left)))


def error_releases(noise: float, steps: int) -> ErrorReleases | None:
    """The releases of a run of so many steps, of which none is after the last; None for a single step.

    Example:
        >>> error_releases(100.0, steps=300).after
        (15, 30, 60, 90, 150, 210)
        >>> error_releases(100.0, steps=4).after
        (1, 2, 3)
    """
    candidates = {max(1, round(share * steps)) for share in _RELEASED_AFTER}
    after = tuple(sorted(step for step in candidates if step < steps))
    return ErrorReleases(noise, after) if after else None

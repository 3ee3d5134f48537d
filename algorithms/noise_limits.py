"""How far steps and their noise should move a parameter, when a model of a table is shrunk, and when its clip norm
follows its errors, from public numbers.

comparisons/results/tables.md has what they were chosen with, and docs/explanation/shrinking.md those of an encoder.
"""

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

from algorithms.privacy.accounting.gaussian import SHARE_OF_FEATURES, noise_for_share

OutputKind: TypeAlias = Literal["classes", "number"]
"""What is predicted."""
_OF_CLASSES, _OF_A_NUMBER = (0.7, 0.03), (0.35, 0.015)
"""The largest limit, and how it grows with the root of the records in standard deviations of a count."""
_MIN_IF_SHRUNK: Mapping[OutputKind, float] = {"classes": 0.5, "number": 0.27}
CLIP_OF_COUNTS = 2.0
"""The clip norm of a count's gradients, in which the few large counts weigh: clipped at 1, rates would be too low."""
_FEW_RECORDS = 272.0
"""Records in standard deviations of a count, up to which `shrink_share` is the largest."""
_FEW_OF_FEATURES = 136.0
"""The same for a head on a public encoder, whose features tell so much that what is spent on it would be missed."""
_MIN_SHARE = 1e-4
_ENOUGH_FOR_ERRORS, _SHARE_OF_ERRORS = 700.0, 0.001
"""Records in standard deviations of a count, from which on releases of so small a share say how far errors have fallen.
"""
USUAL_MOMENTUM, _MAX_MOMENTUM = 0.9, 0.99  # 1 would never forget
_LONG_MOMENTUM_RECORDS = 1000.0
"""The records in standard deviations of a count, times what momentum leaves of 1 where they are many."""
_MEMORY = 0.1
"""How many of all steps momentum remembers at most, so that the last ones still slow down."""


def usual_noise_limit(records: float, epsilon: float, of: OutputKind, *, is_shrunk: bool = False) -> float:
    """The limit where records are unit vectors, for log-odds of classes or for a number in units of its scale.

    With little information there is little that is worth the noise, so it grows with the root of the records over the
    standard deviation of a count, released for the whole budget. Models that are shrunk besides, see `shrink_share`,
    need no low limit.

    Example:
        >>> [usual_noise_limit(records, epsilon=1.0, of="number") for records in (480, 1000, 5000)]
        [0.17, 0.25, 0.35]
        >>> [usual_noise_limit(records, epsilon=1.0, of="classes") for records in (480, 1500, 5000)]
        [0.34, 0.6, 0.7]
        >>> [usual_noise_limit(480, epsilon=1.0, of=of, is_shrunk=True) for of in ("classes", "number")]
        [0.5, 0.27]
    """
    maximum, of_information = _OF_CLASSES if of == "classes" else _OF_A_NUMBER
    limit = of_information * _information(records, epsilon)
    return float(f"{min(maximum, max(_MIN_IF_SHRUNK[of], limit) if is_shrunk else limit):.2g}")


def noise_limit_of_features(records: float, epsilon: float) -> float:
    """The limit for the log-odds of classes by the features of a public encoder, which are unit vectors.

    It is that of tables but for their largest one: features tell more than cells do, so that of many records longer
    steps are worth their noise.

    Example:
        >>> [noise_limit_of_features(records, epsilon=1.0) for records in (480, 1500, 60_000)]
        [0.34, 0.6, 3.8]
    """
    return float(f"{_OF_CLASSES[1] * _information(records, epsilon):.2g}")


def _information(records: float, epsilon: float) -> float:
    return math.sqrt(records / noise_for_share(1.0, epsilon))


def shrink_share(records: float, epsilon: float, *, of_features: bool = False) -> float:
    """The share of the squared mu for each release by which a model is shrunk.

    With nothing to learn, the noise in a model becomes harmless only with very many records. The share falls as their
    number grows, since releases of a smaller share of more records are still more exact.

    of_features: of a head on the features of a public encoder.

    Example:
        >>> [shrink_share(records, epsilon=1.0) for records in (480, 2000, 5000, 100_000)]
        [0.05, 0.025, 0.01, 0.00051]
        >>> [shrink_share(records, epsilon=1.0, of_features=True) for records in (480, 2000, 5000, 100_000)]
        [0.05, 0.013, 0.0051, 0.00025]
    """
    few = _FEW_OF_FEATURES if of_features else _FEW_RECORDS
    share = SHARE_OF_FEATURES * min(1.0, few * noise_for_share(1.0, epsilon) / records)
    return float(f"{max(_MIN_SHARE, share):.2g}")


def target_share(records: float, epsilon: float) -> float:
    """The share of the squared mu for the histogram of a number to predict, by which its centre and scale follow.

    Of few records it is twice the usual one: their counts hardly stand out from the noise, and a model that is shrunk
    says little more than the centre.

    Example:
        >>> [target_share(records, epsilon=1.0) for records in (480, 1500, 5000)]
        [0.1, 0.068, 0.05]
    """
    few = 2.0 * _FEW_RECORDS * noise_for_share(1.0, epsilon) / records
    return float(f"{SHARE_OF_FEATURES * min(2.0, max(1.0, few)):.2g}")


def error_share(records: float, epsilon: float) -> float | None:
    """The share of the squared mu for each release by which the clip norm of a number follows its errors.

    None where the records are too few for it, so that noise alone would make the clip norm fall.

    Example:
        >>> [error_share(records, epsilon=1.0) for records in (2000, 5000)]
        [None, 0.001]
    """
    return _SHARE_OF_ERRORS if records / noise_for_share(1.0, epsilon) >= _ENOUGH_FOR_ERRORS else None


def usual_momentum(records: float, epsilon: float, steps: int) -> float:
    """The momentum where records are unit vectors and one of several classes is predicted.

    Their stable rate follows from curvature alone. With much information, steps of that rate would end long before
    noise ends them, and a model say less than it has to say. More momentum carries them further, in proportion to the
    records in standard deviations of a count. Numbers gain by that on some tables and lose on others.

    Example:
        >>> [usual_momentum(records, epsilon=1.0, steps=300) for records in (480, 42_000, 84_000, 1_000_000)]
        [0.9, 0.91, 0.96, 0.97]
    """
    longer = 1.0 - _LONG_MOMENTUM_RECORDS * noise_for_share(1.0, epsilon) / records
    maximum = min(_MAX_MOMENTUM, 1.0 - 1.0 / (_MEMORY * steps))
    return float(f"{max(USUAL_MOMENTUM, min(maximum, longer)):.2g}")

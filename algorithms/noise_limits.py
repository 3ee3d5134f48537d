"""How far all noise together should move a parameter of a table, from public numbers; docs/results/tables.md."""

import math
from typing import Literal, TypeAlias

from algorithms.privacy.accounting.gaussian import noise_for_share

Kind: TypeAlias = Literal["classes", "number"]
"""What is predicted."""
_OF_CLASSES, _OF_A_NUMBER = (0.7, 0.03), (0.35, 0.015)
"""The largest limit, and how it grows with the root of the records in standard deviations of a count."""
_LEAST_IF_SHRUNK = 0.5
_FEW = 544.0
"""Records in standard deviations of a count, below which a classifier is shrunk towards the frequencies."""


def usual_noise_limit(records: float, epsilon: float, of: Kind, *, is_shrunk: bool = False) -> float:
    """The limit where records are unit vectors, for log-odds of classes or for a number in units of its scale.

    With little information there is little that is worth the noise, so it grows with the root of the records over the
    standard deviation of a count, released for the whole budget. Classifiers that are shrunk besides, see `shrinks`,
    need no limit below one half.

    Example:
        >>> [usual_noise_limit(records, epsilon=1.0, of="number") for records in (480, 1000, 5000)]
        [0.17, 0.25, 0.35]
        >>> [usual_noise_limit(records, epsilon=1.0, of="classes") for records in (480, 1500, 5000)]
        [0.34, 0.6, 0.7]
        >>> usual_noise_limit(480, epsilon=1.0, of="classes", is_shrunk=True)
        0.5
    """
    most, of_information = _OF_CLASSES if of == "classes" else _OF_A_NUMBER
    limit = of_information * math.sqrt(records / noise_for_share(1.0, epsilon))
    return float(f"{min(most, max(_LEAST_IF_SHRUNK, limit) if is_shrunk else limit):.2g}")


def shrinks(records: float, epsilon: float) -> bool:
    """Whether a classifier of so few records is worth shrinking towards the frequencies of its classes.

    Example:
        >>> [shrinks(records, epsilon=1.0) for records in (480, 2000, 5000)]
        [True, True, False]
    """
    return records / noise_for_share(1.0, epsilon) < _FEW

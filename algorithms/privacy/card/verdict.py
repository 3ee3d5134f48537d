"""What the checks of a privacy card find, and how closely numbers have to agree."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

BELOW, ABOVE, ABSOLUTE = 1e-6, 1e-2, 1e-9
"""How far a stated epsilon may lie below and above the one recomputed, relatively, and either way absolutely.

Below: the same events give the same epsilon up to the rounding of the accountants' Fourier transforms, about 1e-9.
Above: an accountant of another version may be tighter by its discretisation or its orders, well under one percent;
a card that says more than that was not computed from these events, although it promises too little.
"""


@dataclass(frozen=True)
class Check:
    """One thing that was checked. passed: None where there was nothing to check it against."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class Verification:
    """What became of a card's claims. recomputed: epsilon by accountant, None where it has no finite bound."""

    recomputed: Mapping[str, float | None]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing that could be checked failed."""
        return all(check.passed is not False for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.passed is False)


def agrees(stated: float | None, recomputed: float | None) -> bool:
    """Whether a stated epsilon is that of the events, within what versions of the accountants may differ by."""
    if stated is None or recomputed is None:
        return stated is recomputed
    low, high = recomputed * (1 - BELOW) - ABSOLUTE, recomputed * (1 + ABOVE) + ABSOLUTE
    return low <= stated <= high


def covers(stated: float | None, least: float) -> bool:
    """Whether a number is not below another, but for rounding; None stands for an infinite one."""
    return stated is None or stated >= least * (1 - BELOW) - ABSOLUTE


def in_words(number: float | None) -> str:
    """A number as the checks show it."""
    return "none" if number is None else f"{number:.10g}"


def finite(number: float) -> float | None:
    """A number as cards have it: None where it is infinite."""
    return float(number) if math.isfinite(number) else None

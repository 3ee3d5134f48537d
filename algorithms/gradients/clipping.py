"""How one record's contribution to a sum is bounded."""

import math
from dataclasses import dataclass

MARGIN = 1e-6
"""Relative room below a bound, so that rounding can only make a contribution smaller than its bound."""

_SMALLEST, _LARGEST = 1e-12, 1e12
"""Well inside 32-bit arithmetic, in which factors and sums are computed."""


@dataclass(frozen=True)
class _Norm:
    """Scale a contribution down to a norm of at most `norm`."""

    norm: float

    def __post_init__(self) -> None:
        _check(self.norm)

    @property
    def sensitivity(self) -> float:
        """The most that one record can add to the sum, in this norm."""
        return self.norm


class L2(_Norm):
    """Scale a contribution down to L2 norm at most `norm` (Abadi et al. 2016)."""


class L1(_Norm):
    """Scale a contribution down to L1 norm at most `norm`."""


@dataclass(frozen=True)
class PerLayer:
    """Scale each layer's part of a contribution down to its own L2 norm (McMahan et al. 2018, "per-layer clipping").

    norms: one bound for each layer, in the model's order.
    """

    norms: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.norms:
            raise ValueError("per-layer clipping needs a bound for each layer, not none; give at least one.")
        for norm in self.norms:
            _check(norm)

    @property
    def sensitivity(self) -> float:
        """The most that one record can add to the sum, in the L2 norm over all layers."""
        return math.sqrt(math.fsum(norm**2 for norm in self.norms))


@dataclass(frozen=True)
class Unclipped:
    """No bound: for a run that is not private."""

    @property
    def sensitivity(self) -> float:
        """Unbounded."""
        return math.inf


Clipping = L2 | L1 | PerLayer | Unclipped


def _check(norm: float) -> None:
    if not _SMALLEST <= norm <= _LARGEST:
        raise ValueError(f"a clip norm must lie between {_SMALLEST:g} and {_LARGEST:g}, not {norm}; try 1.0.")

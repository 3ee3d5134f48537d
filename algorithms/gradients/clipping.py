"""Clipping: how one record's contribution to a sum is bounded.

The norms that it bounds are computed in `parameter_gradients`, for one layer, and `model_gradients`, for all.

Who plans a run names a clipping and its bound, and needs no PyTorch for that, so functions of tensors import it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MIN_NORM, _MAX_NORM = 1e-12, 1e12
"""Bounds on norms, well within the range of 32-bit arithmetic."""

_SMALLEST_SCALE, _LARGEST_SCALE = 1e-15, 1e15
"""Bounds on the scale of an affine map."""

FARTHEST = 1e3
"""The largest shift, in units of the norm: it magnifies rounding in 32 bits, which depends on the other records."""

_SMALLEST_NORM = 1e-14
"""Smaller norms vanish when squared in 32 bits; such a contribution is not normalised."""


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
    """Scale a contribution down to L2 norm at most `norm` (Abadi et al. 2016).

    Example:
        >>> L2(1.5).sensitivity
        1.5
        >>> L2(-1.0)
        Traceback (most recent call last):
        ValueError: ...
    """


class L1(_Norm):
    """Scale a contribution down to L1 norm at most `norm`; for Laplace noise.

    Example:
        >>> L1(2.0).sensitivity
        2.0
    """


class Box(_Norm):
    """Scale a contribution down so that its largest coordinate above 0 plus its largest below is at most `norm`.

    The unit ball of this norm is the convex hull of [0, 1]^d and [-1, 0]^d, which contains the gradients of linear
    models with features in [0, 1]. For K-norm noise (Hardt and Talwar 2010).

    Example:
        >>> Box(1.0).sensitivity  # in the box's own norm
        1.0
    """


@dataclass(frozen=True)
class PerLayer:
    """Scale each layer's part of a contribution down to its own L2 norm (McMahan et al. 2018, "per-layer clipping").

    Args:
        norms: One bound for each layer, in the model's order.

    Raises:
        ValueError: Without a bound, and for one that is no clip norm.

    Example:
        >>> PerLayer((3.0, 4.0)).sensitivity
        5.0
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


@dataclass(frozen=True, eq=False)
class Affine(_Norm):
    """Sum (gradient - shift) / scale, each scaled down to L2 norm at most `norm` (AdaCliP, Pichapati et al. 2019).

    Args:
        norm: The L2 norm of what one record adds to the sum at most.
        shift: [d], finite, a function of public values and releases only; |shift / scale| is at most 1000 times the
            norm.
        scale: [d], from 1e-15 to 1e15, a function of the same.

    Raises:
        ValueError: For a shift or a scale outside of these.

    Example:
        >>> import torch
        >>> Affine(1.0, torch.tensor([3.0, 0.0]), torch.tensor([1.0, 2.0])).offset  # of a gradient that is zero
        3.0
    """

    shift: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift.shape != self.scale.shape:
            raise ValueError(
                f"the shift has shape {list(self.shift.shape)}, the scale {list(self.scale.shape)}; give equal shapes."
            )
        minimum, maximum, offset, are_numbers = self._facts
        if not (are_numbers and minimum > 0):
            raise ValueError(
                "the shift and the scale must be finite and the scale positive; bound them from below."
            )
        if minimum < _SMALLEST_SCALE or maximum > _LARGEST_SCALE or offset > FARTHEST * self.norm:
            raise ValueError(
                f"the scale goes from {minimum:.3g} to {maximum:.3g}, and the shift is {offset:.3g} of it; keep the"
                f" scale between {_SMALLEST_SCALE:g} and {_LARGEST_SCALE:g}, and the shift within {FARTHEST:g} times"
                f" the norm {self.norm:g}."
            )

    @classmethod
    def within_reach(cls, norm: float, shift: Tensor, scale: Tensor) -> Affine:
        """The same clipping with the shift shortened, if necessary, to the largest that this scale allows."""
        offset = (shift.double() / scale.double()).norm()
        # Computed as a tensor, so that nothing waits for a device.
        # A little less than the limit, which `__post_init__` compares with the shift after rounding.
        reach = (0.999 * FARTHEST * norm / offset.clamp(min=norm)).clamp(max=1.0)
        return cls(norm, shift * reach.to(shift.dtype), scale)

    @cached_property
    def _facts(self) -> tuple[float, float, float, bool]:
        """The smallest and the largest scale, the offset, and whether all are finite; with one wait for a device."""
        import torch

        shift, scale = self.shift.double(), self.scale.double()
        are_numbers = torch.isfinite(shift).all() & torch.isfinite(scale).all()
        facts = [*scale.aminmax(), (shift / scale).norm(), are_numbers.double()]
        minimum, maximum, offset, finite = torch.stack(facts).tolist()
        return minimum, maximum, offset, finite == 1.0

    @property
    def offset(self) -> float:
        """The L2 norm of shift / scale, to which a zero gradient is mapped."""
        return self._facts[2]

    @property
    def cancels(self) -> float:
        """The largest |g|^2 + |a|^2 for |g - a|^2 = 1, over squared scales and in units of the squared norm.

        By the triangle inequality |g| is at most |a| + 1. How much larger this is than 1 says how many digits cancel
        where |g - a|^2 is expanded.
        """
        farthest = self.offset / self.norm
        return (farthest + 1.0) ** 2 + farthest**2


@dataclass(frozen=True)
class Normalised(_Norm):
    """Scale every contribution to L2 norm `norm` |g| / (|g| + stability) (automatic clipping, Bu et al. 2023).

    With stability 0 this is what importance sampling adds for an accepted record (Wei et al. 2022, DPIS, equation 7).

    Args:
        norm: The L2 norm that a long contribution comes close to.
        stability: From 0, in units of a gradient's norm: gradients much shorter than it stay short.

    Raises:
        ValueError: For a stability below 0.

    Example:
        >>> import torch
        >>> factors(torch.tensor([0.99], dtype=torch.float64), Normalised(1.0, 0.01), 1.0, torch.float64).tolist()
        [0.9999...]
    """

    stability: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.stability <= _MAX_NORM:
            raise ValueError(
                f"the stability must lie between 0 and {_MAX_NORM:g}, not {self.stability}; try 0.01."
            )


@dataclass(frozen=True)
class Unclipped:
    """No bound: for a run that is not private."""

    @property
    def sensitivity(self) -> float:
        """Unbounded."""
        return math.inf


Clipping = L2 | L1 | Box | PerLayer | Affine | Normalised | Unclipped


def factors(norms: Tensor, clipping: Clipping, bound: float, dtype: torch.dtype) -> Tensor:
    """The clipping factors of contributions with given norms, shape [batch], float64.

    norms: [batch], float64, upper bounds. bound: the allowed norm. dtype: of the gradients, which decides the margin
    below the bound for the rounding of norms.
    """
    import torch

    # Norms, factors and products are each rounded: the margin keeps the rounded contribution within the bound.
    room = bound * (1.0 - rounding_margin(dtype))
    if isinstance(clipping, Normalised):
        scales = room / (norms.clamp(min=_SMALLEST_NORM) + clipping.stability)
    else:
        scales = torch.clamp(room / norms, max=1.0)  # a zero gradient has infinity here, and so 1
    # Rounding could raise smaller factors by any amount.
    return torch.nn.functional.hardshrink(scales, torch.finfo(dtype).tiny)


def rounding_margin(dtype: torch.dtype) -> float:
    """The relative margin below a bound that keeps a contribution within the bound despite rounding in `dtype`."""
    import torch

    return 1e-12 if dtype == torch.float64 else 3e-6


def _check(norm: float) -> None:
    if not _MIN_NORM <= norm <= _MAX_NORM:
        raise ValueError(
            f"a clip norm must lie between {_MIN_NORM:g} and {_MAX_NORM:g}, not {norm}; try 1.0."
        )

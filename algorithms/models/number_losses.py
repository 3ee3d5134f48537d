"""Losses of a number to predict other than the squared error: of counts, and of a quantile.

Labels are numbers scaled to [-1, 1]. Outputs are [batch, 1], or [batch, 3] with a released centre and scale beside each
(`scaled_target`); without them the centre is 0 and the scale 1. Both losses have a public bound on their curvature, so
steps of descent have a length at which they cannot diverge.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_LINEAR_FROM = 1.0
"""The output from which a rate grows linearly, no longer exponentially: at e times the centre."""
_LOWEST = -10.0
_SMALLEST_RATE = 1e-6
_KINK_HALF_WIDTH = 0.1
"""Half the width over which the kink of the pinball loss is rounded off, in scales."""


def parts_of(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output, centre and scale of each record, [batch] each."""
    if outputs.shape[-1] == 3:
        output, centre, scale = outputs.unbind(-1)
        return output, centre, scale
    output = outputs[..., 0]
    return output, torch.zeros_like(output), torch.ones_like(output)


@dataclass(frozen=True)
class CountLoss:
    """The Poisson loss of a rate r for a count y, r - y log r, less its least value; both as shares of the bound.

    With the centre c the rate is c exp(f) up to f = 1, and c e f above: multiplicative effects below, and a bounded
    curvature. The loss is the one whose derivative by f is (r - y) over the scale, so at its minimum rates are means
    (the matching loss of Auer et al. 1996; below f = 1 it is the Poisson loss itself). The scale is at least c.
    """

    curvature = math.e

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        output, rate_at_zero, scale = self._parts(outputs)
        count = (labels + 1.0) / 2.0
        ratio = count / rate_at_zero
        # The output whose rate is the count: log(ratio), or ratio / e on the linear part.
        best = torch.where(ratio > math.e, ratio / math.e, ratio.clamp(min=_SMALLEST_RATE).log())
        gap = rate_at_zero * (_potential(output) - _potential(best)) - count * (output - best)
        return gap / scale

    def scores(self, outputs: Tensor) -> Tensor:
        """The rate as a number in [-1, ...], [..., 1]."""
        output, rate_at_zero, _ = self._parts(outputs)
        rate = torch.where(output > _LINEAR_FROM, math.e * output, output.clamp(_LOWEST, _LINEAR_FROM).exp())
        return (2.0 * rate_at_zero * rate - 1.0)[..., None]

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output, the rate where it is 0 and the scale, as shares of the largest count."""
        output, centre, scale = parts_of(outputs)
        rate = ((centre + 1.0) / 2.0).clamp(min=_SMALLEST_RATE)
        return output, rate, torch.maximum(scale / 2.0, rate)


def _potential(output: Tensor) -> Tensor:
    """What the rate over the centre is the derivative of."""
    above = math.e * (output.square() + 1.0) / 2.0  # the integral of e f, equal to e at f = 1
    return torch.where(output > _LINEAR_FROM, above, output.clamp(max=_LINEAR_FROM).exp())


@dataclass(frozen=True)
class QuantileLoss:
    """The pinball loss of a quantile, in scales, whose kink is rounded off (Fernandes, Guerre and Horta 2021).

    level: of the quantile, the share of records below it, in (0, 1).
    """

    level: float
    curvature = 1.0 / (2.0 * _KINK_HALF_WIDTH)

    @property
    def slope(self) -> float:
        """The largest slope, at most 1."""
        return max(self.level, 1.0 - self.level)

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        output, centre, scale = parts_of(outputs)
        above = (labels - centre) / scale - output
        sharp = torch.maximum(self.level * above, (self.level - 1.0) * above)
        near = above.clamp(-_KINK_HALF_WIDTH, _KINK_HALF_WIDTH)
        # The parabola with the pinball loss's values and slopes at -h and h; its second derivative is 1 / 2 h.
        rounded = (
            (self.level - 0.5) * near + near.square() / (4.0 * _KINK_HALF_WIDTH) + _KINK_HALF_WIDTH / 4.0
        )
        return torch.where(above.abs() < _KINK_HALF_WIDTH, rounded, sharp)

    def scores(self, outputs: Tensor) -> Tensor:
        """The quantile as a number, [..., 1]."""
        output, centre, scale = parts_of(outputs)
        return (centre + scale * output)[..., None]

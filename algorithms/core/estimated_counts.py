"""Estimates of how many records each class has, from counts with known noise.

Whatever is said of a class that holds fewer records than the noise is wide, its logarithm decides how much a model
loses. So no count is taken as it was drawn, or cut off at a number that somebody chose.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from algorithms.lazy_imports import lazy_module

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_module("torch")

_SMALL_COUNT = 10.0
"""A count in standard deviations of its noise, up to which all sizes are asked about."""
_MIN_COUNT = 1e-3
"""A count in standard deviations of its noise, below which none is estimated, so that no class seems impossible."""


def estimated_counts(counts: Tensor, noise: float) -> Tensor:
    """Counts of the classes by noisy ones, all above 0, [classes].

    Of more than three classes they are drawn to each other as far as the noise alone would set them apart (the positive
    part of James and Stein 1961). Then each becomes the mean of what it can be after that, if all frequencies were
    equally likely before: a normal law cut off at 0. Of more than three classes the counts also say themselves how
    likely each size is, which is right where few classes have most records, and wrong by chance more often; what is
    taken is halfway between both.

    Example:
        >>> estimated_counts(torch.tensor([100.0, 0.0, -10.0]), noise=10.0)
        tensor([96.6667,  6.8816,  4.6480])
    """
    classes = len(counts)
    mean = float(counts.sum().clamp(min=noise * math.sqrt(classes))) / classes
    apart = float((counts - mean).square().sum())
    share = 1.0 if classes <= 3 else max(0.0, 1.0 - (classes - 3) * noise**2 / max(apart, noise**2))
    left = noise * math.sqrt(max(share, 0.05))
    centre = (mean + share * (counts - mean)) / left - left / mean
    # The mean of a normal law cut off at 0 is its own plus density over distribution function, both at its place.
    above = math.sqrt(2.0 / math.pi) / torch.special.erfcx(-centre / math.sqrt(2.0))
    estimated: Tensor = left * (centre + above).clamp(min=_MIN_COUNT)
    if classes <= 3:
        return estimated
    by_their_law = noise * _means_by_their_law(counts.double().cpu() / noise, mean / noise)
    return (estimated + by_their_law.to(counts)) / 2.0


def _means_by_their_law(counts: Tensor, mean: float) -> Tensor:
    """The mean of what each count can be by the law of all, which is learned from the noisy ones.

    That law is the likeliest one for the counts seen (Kiefer and Wolfowitz 1956; steps of expectation and
    maximisation), with two more that are exponential. So many small counts are drawn to each other, whatever a few
    large ones are.

    counts: in standard deviations of their noise, [classes]. mean: of the exponential law.
    """
    small = _SMALL_COUNT * (torch.arange(1, 49) / 48.0).double().square()
    values = torch.cat([small, (4.0 * counts[counts > _SMALL_COUNT]).round() / 4.0]).unique()  # type: ignore[no-untyped-call]
    ends = torch.tensor([0.0, math.inf]).double()
    edges = torch.cat([ends[:1], (values[1:] + values[:-1]) / 2.0, ends[1:]])
    before = -(-edges / mean).exp().diff() + 1e-12
    before /= before.sum()
    fits = (-0.5 * (counts[:, None] - values).square()).softmax(dim=1)
    law = before
    for _ in range(20):
        law = ((fits * law / (fits @ law)[:, None]).sum(0) + 2.0 * before) / (len(counts) + 2.0)
    means: Tensor = (fits * law) @ values / (fits @ law)
    return means

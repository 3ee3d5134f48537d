"""Families of samples that are nearly alike, whose losses are put on a grid together.

A distribution on a grid takes a hundred steps with arrays of a few hundred numbers, most of which is not arithmetic. A
schedule of a thousand kinds of samples has a few dozen families, which take each step once.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from algorithms.privacy.accounting.mechanism_plds import (
    GaussianPLD,
    PoissonReplacedPLD,
    ReversedPLD,
    SampledPLD,
)
from algorithms.privacy.accounting.pld import PLDFamily, PrivacyLoss

_FEW, _MAX_MEMBERS = 24, 64
"""Up to so many distributions are taken one by one; and the most members of a family, whose arrays stay small."""


def in_families(plds: Sequence[tuple[PrivacyLoss, int]]) -> list[tuple[PrivacyLoss, int]]:
    """Samples with normal noise in families of rates and means that are alike, if there are many; others as they are.

    Rates differ by at most a factor of two and means over standard deviations by about a fifth, so that the cells that
    do for the widest member do for all.

    Args:
        plds: Each with the number of times that it occurs.
    """
    if len(plds) <= _FEW:
        return [*plds]
    samples: dict[tuple[object, ...], list[tuple[float, float, int]]] = {}
    every: list[tuple[PrivacyLoss, int]] = []
    for pld, count in plds:
        match pld:
            case SampledPLD(GaussianPLD(mu), rate) | ReversedPLD(SampledPLD(GaussianPLD(mu), rate)):
                pass
            case PoissonReplacedPLD(multiplier, rate):
                mu = 1 / multiplier
            case _:
                every.append((pld, count))
                continue
        alike = type(pld), math.floor(math.log2(rate)), math.floor(2 * math.log2(mu) + 2 * mu)
        samples.setdefault(alike, []).append((rate, mu, count))
    for (kind, *_), members in samples.items():
        members.sort()
        for first in range(0, len(members), _MAX_MEMBERS):
            every.append(_family(kind, members[first : first + _MAX_MEMBERS]))
    return every


def _family(kind: object, members: list[tuple[float, float, int]]) -> tuple[PrivacyLoss, int]:
    """Losses of one kind, by rate, mean and count, as one family; a single one as it is."""
    rates, mus, counts = np.array(members).T
    widest = _sample(kind, max(rates), max(mus))
    if len(members) == 1:
        return widest, members[0][2]
    family = PLDFamily(_sample(kind, rates[:, None], mus[:, None]), counts, widest)
    return family, family.count


def _sample(kind: object, rate: Any, mu: Any) -> PrivacyLoss:
    """The loss of one sample, or, of columns of numbers, of several."""
    if kind is PoissonReplacedPLD:
        return PoissonReplacedPLD(1 / mu, rate)
    sample = SampledPLD(GaussianPLD(mu), rate)
    return ReversedPLD(sample) if kind is ReversedPLD else sample

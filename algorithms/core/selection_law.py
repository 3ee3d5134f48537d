"""How far a noisy selection is from a uniform draw, which plans state so that a reader sees whether it can tell."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from algorithms.core.planning_facts import PlanningFacts
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.mechanisms.release import Gumbel, Mechanism, Release

stats = lazy_module("scipy.stats")


@dataclass(frozen=True)
class SelectionDistribution:
    """How far the choice among candidates is from a uniform draw, by public numbers alone.

    candidates: their number. noise_scale: of the noise on a candidate's total loss. gain: the stated signal: how far
    the best candidate's total loss lies below all others, the mean that a step can gain at most, as all steps together
    cannot gain more than the loss that the model starts with; None where the number of records is private. distance:
    in total variation between the law of the choice at that gain and the uniform law; 0 is a coin's toss.
    """

    candidates: int
    noise_scale: float
    gain: float | None
    distance: float | None

    @classmethod
    def of(cls, release: Release, candidates: int, steps: int, facts: PlanningFacts) -> SelectionDistribution:
        """The law of one of `steps` selections."""
        scale, bound = release.noise_scale, release.clipping.sensitivity
        if facts.records is None:
            return cls(candidates, scale, None, None)
        start = bound if facts.start_loss is None else min(bound, facts.start_loss)
        gain = release.sampling.rate * facts.records * start / steps
        return cls(candidates, scale, gain, distance_from_uniform(gain / scale, candidates, release.noise))


def distance_from_uniform(lead: float, candidates: int, noise: Mechanism) -> float:
    """The total variation between a noisy choice and a uniform one, where one candidate leads all others by the same.

    lead: in scales of the noise. The leader's share is that of a softmax for Gumbel noise, and for Laplace noise the
    mean of F(x + lead)^(candidates - 1), by the midpoint rule over the quantiles of its own noise.
    """
    if isinstance(noise, Gumbel):
        share = 1.0 / (1.0 + (candidates - 1) * math.exp(-lead))
    else:
        quantiles = (np.arange(20_000) + 0.5) / 20_000
        share = float(np.mean(stats.laplace.cdf(stats.laplace.ppf(quantiles) + lead) ** (candidates - 1)))
    return share - 1.0 / candidates

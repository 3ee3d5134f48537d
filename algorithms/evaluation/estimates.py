"""Metrics of a released histogram, with intervals that count the noise and that the records are a sample."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from algorithms.evaluation.histogram import Floats, HistogramSpec, Released, error_nodes, score_nodes

_Z = 1.959964
MAX_NOISE = 0.05
"""A metric whose standard error by noise alone is above this is not shown."""


@dataclass(frozen=True)
class Estimate:
    """A metric of the people that the held-out records are a sample of: its estimate and its 95 % interval."""

    value: float
    low: float
    high: float


def metrics_of(released: Released) -> Mapping[str, Estimate | None]:
    """The metrics of the histogram by name; None where noise drowns them."""
    spec, noise = released.spec, released.noise_std
    if spec.kind == "two classes":
        low, high = released.table("score x label, 2")
        return {"accuracy": _proportion(low[0] + high[1], low[1] + high[0], noise * math.sqrt(2))}
    if spec.kind == "classes":
        wrong, right = released.table("right")
        return {"accuracy": _proportion(right, wrong, noise)}
    if spec.kind == "score":
        return {"score": _mean(released.table("score"), score_nodes(spec.bins), noise)}
    nodes = np.append(error_nodes(spec.bins), 1.0)
    return {
        "mae": _mean(released.table("error"), nodes, noise),
        "mse": _mean(released.table("error"), np.square(nodes), noise),
    }


def expected_errors(spec: HistogramSpec, at_most: int, noise_std: float) -> Mapping[str, float]:
    """Standard errors of the metrics that are expected with at most so many people, before anything is released."""
    sampling = 0.25 / max(1, at_most)
    return {"accuracy": math.sqrt(sampling + (noise_std / max(1, at_most)) ** 2)}


def _proportion(hits: float, misses: float, noise: float) -> Estimate | None:
    return _mean(np.array([misses, hits]), np.array([0.0, 1.0]), noise)


def _mean(cells: Floats, nodes: Floats, noise: float) -> Estimate | None:
    total = float(cells.sum())
    if total <= 4 * noise * math.sqrt(len(cells)):
        return None
    value = float(cells @ nodes) / total
    by_noise = noise * float(np.linalg.norm(nodes - value)) / total
    if by_noise > MAX_NOISE:
        return None
    error = _Z * math.sqrt(by_noise**2 + max(0.0, float(cells @ np.square(nodes - value))) / total**2)
    return Estimate(value, value - error, value + error)

"""Counts of classes as they are estimated from noisy ones: by closed forms, and beside what an oracle would say."""

import math

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import truncnorm

from algorithms.core.estimated_counts import estimated_counts


@pytest.mark.parametrize("counts", [(400.0, 300.0), (100.0, 3.0, -25.0), (-50.0, 10.0, 0.0)])
def test_a_count_is_estimated_by_what_it_can_be(counts: tuple[float, ...]) -> None:
    """If every frequency is equally likely before, a count has an exponential law, and given its noise a cut normal."""
    noise, mean = 20.0, max(sum(counts), 20.0 * math.sqrt(len(counts))) / len(counts)
    expected = [
        truncnorm.mean(-place / noise, math.inf, loc=place, scale=noise)
        for place in (one - noise**2 / mean for one in counts)
    ]
    found = estimated_counts(torch.tensor(counts, dtype=torch.float64), noise)
    assert found.numpy() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["even", "uneven"])
def test_the_frequencies_of_many_classes_are_nearer_than_their_noisy_counts(kind: str) -> None:
    """In nats that they lose to the exact ones, in the mean of 60 releases; before, what was below 0 was set to 0."""
    draw, noise, classes = np.random.default_rng(0), 23.0, 26
    shares = np.ones(classes) if kind == "even" else 1.0 / np.arange(1, classes + 1)
    shares /= shares.sum()
    lost = []
    for _ in range(60):
        noisy = torch.from_numpy(2000 * shares + draw.normal(0, noise, classes))
        for found in (estimated_counts(noisy, noise), noisy.clamp(min=0.0) + 0.5 * noise):
            said = (found / found.sum()).numpy()
            lost.append(float((shares * np.log(shares / said)).sum()))
    ours, before = np.reshape(lost, (60, 2)).mean(axis=0)
    assert ours < (0.6 if kind == "even" else 0.95) * before


def drawn_together(counts: np.ndarray, noise: float) -> np.ndarray:
    """Noisy counts by the positive part of James and Stein 1961 and by the noise left after that."""
    mean = max(counts.sum(), noise * math.sqrt(len(counts))) / len(counts)
    kept = max(0.0, 1.0 - (len(counts) - 3) * noise**2 / np.square(counts - mean).sum())
    left = noise * math.sqrt(max(kept, 0.05))
    places = mean + kept * (counts - mean) - left**2 / mean
    return np.array(truncnorm.mean(-places / left, math.inf, loc=places, scale=left))


@pytest.mark.parametrize(("kind", "classes"), [("one has most", 26), ("one has most", 60), ("fewer", 60)])
def test_many_small_classes_are_told_from_a_few_large_ones(kind: str, classes: int) -> None:
    """In nats beyond those that an oracle loses, which knows all counts, but not whose each is (Robbins 1951)."""
    draw, noise = np.random.default_rng(1), 9.6
    most = np.where(np.arange(classes) == 0, 9.0 * (classes - 1), 1.0)
    counts = {"one has most": most, "fewer": 0.75 ** np.arange(classes)}[kind]
    counts *= 2000 / counts.sum()
    lost = []
    for _ in range(40):
        noisy = counts + draw.normal(0, noise, classes)
        chances = softmax(-0.5 * np.square((noisy[:, None] - counts) / noise), axis=1)
        ours = estimated_counts(torch.from_numpy(noisy), noise).numpy()
        for found in (ours, drawn_together(noisy, noise), chances @ counts):
            lost.append(float((counts / 2000 * np.log(counts / 2000 / (found / found.sum()))).sum()))
    ours, before, oracle = np.reshape(lost, (40, 3)).mean(axis=0)
    assert oracle <= ours < oracle + 0.65 * (before - oracle)


@pytest.mark.parametrize("counts", [[-60.0] * 12, [1e6] * 6 + [0.0] * 6, [3e8, *range(-5, 15)]])
@pytest.mark.parametrize("noise", [1e-9, 10.0, 1e5])
def test_the_counts_of_many_classes_are_above_zero_whatever_is_released(
    counts: list[float], noise: float
) -> None:
    found = estimated_counts(torch.tensor(counts), noise)
    assert found.dtype == torch.float32 and bool((found > 0).all()) and bool(found.isfinite().all())
    large = torch.tensor(counts) > 100 * noise
    assert found[large].numpy() == pytest.approx(np.array(counts)[large.numpy()], abs=noise / 2, rel=1e-5)

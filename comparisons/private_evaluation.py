"""Measures the intervals of private evaluation: `python -m comparisons.private_evaluation FOLDER`.

Made-up people of known kinds are sampled many times, and each sample's histogram is released. The table says how often
the 95 % interval of a metric holds the metric of all people, which is computed from them without a histogram, how wide
it is and how far estimates are off on average. Of metrics that noise drowns in some draws, those that are shown count.
A second table compares rules for bins: the bias of the AUC, and the noise in accuracy and AUC.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import typer
from numpy.typing import NDArray
from scipy.stats import norm
from sklearn.metrics import f1_score, log_loss, precision_score, recall_score, roc_auc_score

from algorithms.evaluation import HistogramSpec, ReleasedHistogram, count, histogram_for, metrics_of
from algorithms.evaluation.histogram import BINARY, MULTICLASS, score_edges

Array = NDArray[np.float64]
NOISE = {0.2: 16.30, 0.5: 7.03, 1.0: 3.73, 3.0: 1.39}
"""Standard deviation of the noise by epsilon, for sensitivity 1 and delta 1e-5."""
PEOPLE = (200, 1000, 5000, 50_000)


@dataclass(frozen=True)
class Population:
    """Kinds of people, how frequent each is, and the metrics of all of them, computed without cells."""

    spec: HistogramSpec
    scores: Array
    labels: Array
    frequencies: Array
    truth: dict[str, float]

    @cached_property
    def _cells_of_each(self) -> Array:
        """[kinds, cells], counted at once, where each kind is a group of its own."""
        kinds = np.arange(len(self.labels))
        apart = replace(self.spec, groups=(("kind", tuple(map(str, kinds))),))
        cells = count(apart, self.scores, self.labels, kinds[:, None])
        of_each = cells[self.spec.cells - 1 : -1].reshape(len(kinds), -1)  # after the tables of all
        return np.pad(of_each, ((0, 0), (0, 1)))  # nobody is left out for a score that is not finite

    def released(self, people: int, epsilon: float, draw: np.random.Generator) -> ReleasedHistogram:
        """A noisy histogram of a sample."""
        return self.releases(people, NOISE[epsilon], draw, 1)[0]

    def releases(
        self, people: int, noise: float, draw: np.random.Generator, draws: int
    ) -> list[ReleasedHistogram]:
        """Noisy histograms of samples; noise: of a release of sensitivity 1."""
        cells = draw.multinomial(people, self.frequencies, size=draws) @ self._cells_of_each
        deviation = noise * self.spec.sensitivity
        noisy = cells + draw.normal(0.0, deviation, cells.shape)
        return [ReleasedHistogram(self.spec, values, deviation) for values in noisy]


def two_classes(positive: float, mean: tuple[float, float], spread: tuple[float, float]) -> Population:
    """Log-odds are normal in each class; positive: its share. mean, spread: of negatives and of positives."""
    quantiles = (np.arange(1000) + 0.5) / 1000
    odds = np.concatenate([norm.ppf(quantiles, m, s) for m, s in zip(mean, spread, strict=True)])
    labels = np.repeat([0.0, 1.0], 1000)
    each = np.repeat([(1 - positive) / 1000, positive / 1000], 1000)
    scores = np.stack([1 / (1 + np.exp(odds)), 1 / (1 + np.exp(-odds))], axis=1)
    predicted = (odds > 0).astype(np.float64)
    cut = 1 / (1 + np.exp(-np.clip(odds, -8, 8)))
    truth = {
        "accuracy": 1.0 - float(each @ (predicted != labels)),  # exactly 1 without mistakes
        "majority_accuracy": max(positive, 1 - positive),
        "positive_share": positive,
        "auc": roc_auc_score(labels, odds, sample_weight=each),
        "f1": f1_score(labels, predicted, average="macro", sample_weight=each),
        "positive_f1": f1_score(labels, predicted, sample_weight=each),
        "precision": precision_score(labels, predicted, sample_weight=each, zero_division=0),
        "recall": recall_score(labels, predicted, sample_weight=each),
        "log_loss": log_loss(labels, cut, sample_weight=each),
        "calibration_gap": float(each @ (scores[:, 1] - labels)),
    }
    return Population(histogram_for(BINARY, 2), scores, labels, each, truth)


def classes(outputs: int, frequencies: list[float], accuracy: float) -> Population:
    """Predictions are right with the same probability in every class, otherwise they are any class."""
    draw, kinds = np.random.default_rng(11), 2000
    labels = draw.choice(outputs, kinds, p=np.array(frequencies) / np.sum(frequencies))
    predicted = np.where(draw.random(kinds) < accuracy, labels, draw.integers(0, outputs, kinds))
    confidence = draw.uniform(0.5, 1.0, kinds)
    scores = np.repeat(((1 - confidence) / (outputs - 1))[:, None], outputs, axis=1)
    scores[np.arange(kinds), predicted] = confidence
    truth = {
        "accuracy": float(np.mean(predicted == labels)),
        "majority_accuracy": float(np.bincount(labels).max() / kinds),
        "f1": f1_score(labels, predicted, average="macro"),
        "log_loss": float(np.minimum(-np.log(scores[np.arange(kinds), labels]), 9.0).mean()),
    }
    return Population(
        histogram_for(MULTICLASS, outputs), scores, labels.astype(np.float64), _equal(kinds), truth
    )


def numbers(spread: float) -> Population:
    """Targets are even in [-.6, .6], predictions four fifths of them with normal errors."""
    draw = np.random.default_rng(12)
    target = draw.uniform(-0.6, 0.6, 2000)
    predicted = 0.8 * target + draw.normal(0.0, spread, 2000)
    error = np.abs(predicted - target)
    truth = {
        "r2": float(1 - np.mean(error**2) / np.var(target)),
        "rmse": float(np.sqrt(np.mean(error**2))),
        "mae": float(np.mean(error)),
        "mean_rmse": float(np.std(target)),
    }
    return Population(histogram_for("number", 1), predicted[:, None], target, _equal(2000), truth)


def bounded_scores() -> Population:
    scores = np.random.default_rng(13).beta(5.0, 1.5, (2000, 1))
    truth = {"score": float(scores.mean())}
    return Population(histogram_for("score", 1), scores, np.zeros(2000), _equal(2000), truth)


def _equal(kinds: int) -> Array:
    return np.full(kinds, 1 / kinds)


def populations() -> dict[str, Population]:
    """All that are measured."""
    return {
        "even classes": two_classes(0.5, (-1.0, 1.0), (1.5, 1.5)),
        "skewed classes": two_classes(0.24, (-3.2, 0.3), (2.0, 1.5)),
        "good model": two_classes(0.4, (-6.0, 6.0), (2.5, 2.5)),
        "rare class": two_classes(0.01, (-6.0, -3.0), (1.5, 1.5)),
        "five classes": classes(5, [5, 4, 3, 2, 1], 0.8),
        "a hundred classes": classes(100, [1] * 100, 0.6),
        "numbers": numbers(0.2),
        "bounded scores": bounded_scores(),
    }


def measured(
    population: Population, people: int, epsilon: float, draws: int, seed: int
) -> list[dict[str, float | str]]:
    """A row for each metric that some draw shows."""
    draw = np.random.default_rng([seed, people, int(10 * epsilon)])
    drawn = [metrics_of(population.released(people, epsilon, draw)) for _ in range(draws)]
    rows: list[dict[str, float | str]] = []
    for metric, truth in population.truth.items():
        shown = [estimate for each in drawn if (estimate := each[metric]) is not None]
        if shown:
            rows.append(
                {
                    "metric": metric,
                    "truth": truth,
                    "shown": len(shown) / draws,
                    "coverage": float(np.mean([each.low <= truth <= each.high for each in shown])),
                    "bias": float(np.mean([each.value for each in shown])) - truth,
                    "deviation": float(np.std([each.value for each in shown])),
                    "half_width": float(np.mean([(each.high - each.low) / 2 for each in shown])),
                }
            )
    return rows


SHAPES = {
    "skewed": (0.24, (-3.2, 0.3), (2.0, 1.5)),
    "rare, 1 %": (0.01, (-6.0, -3.0), (1.5, 1.5)),
    "rare, scores close together": (0.01, (-4.8, -4.3), (0.5, 0.5)),
    "near chance": (0.5, (-0.3, 0.3), (0.5, 0.5)),
    "hardly trained": (0.5, (-0.05, 0.05), (0.1, 0.1)),
    "confident": (0.5, (-6.0, 6.0), (4.0, 4.0)),
}
"""Share of positives, means and spreads of the log-odds."""
_TWENTY = np.arange(1, 20) / 20
RULES = {
    "20 bins even in probability": (np.log(_TWENTY / (1 - _TWENTY)), (20,)),
    "64 bins even in log-odds": (np.linspace(-8, 8, 63), (64,)),
    "the rule's 64 bins alone": (score_edges(64), (64,)),
    "the rule's five resolutions": (score_edges(64), (2, 4, 8, 16, 64)),
}
"""Edges in log-odds, and the resolutions that are released."""


def bins_row(
    positive: float,
    mean: tuple[float, float],
    spread: tuple[float, float],
    edges: Array,
    resolutions: tuple[int, ...],
) -> dict[str, float]:
    """Bias of the AUC, with ties as halves and extrapolated, and the noise in accuracy and AUC per unit of noise and
    person, at an L2 sensitivity of 1."""
    ends = np.concatenate([[-np.inf], edges, [np.inf]])
    negatives, positives = (np.diff(norm.cdf((ends - m) / s)) for m, s in zip(mean, spread, strict=True))
    bins = len(negatives)
    half = np.tril(np.ones((bins, bins)), -1) + np.eye(bins) / 2
    pairs = np.kron(np.eye(bins // 2), np.ones((1, 2)))
    coarse = pairs.T @ (np.tril(np.ones((bins // 2, bins // 2)), -1) + np.eye(bins // 2) / 2) @ pairs
    kernel = (4 * half - coarse) / 3
    truth = float(norm.cdf((mean[1] - mean[0]) / np.hypot(*spread)))
    raw, area = float(positives @ half @ negatives), float(positives @ kernel @ negatives)
    slopes = [(kernel.T @ positives - area) / (1 - positive), (kernel @ negatives - area) / positive]
    above = np.arange(bins) >= bins / 2
    right = (1 - positive) * negatives[~above].sum() + positive * positives[above].sum()
    sums = np.concatenate([np.kron(np.eye(size), np.ones((1, bins // size))) for size in resolutions])
    noise = len(resolutions) * np.linalg.inv(sums.T @ sums)
    return {
        "bias": raw - truth,
        "bias_extrapolated": area - truth,
        "noise_accuracy": float(np.sqrt(sum(w @ noise @ w for w in (~above - right, above - right)))),
        "noise_auc": float(np.sqrt(sum(w @ noise @ w for w in slopes))),
    }


def main(folder: Path, draws: int = 1000, seed: int = 1) -> None:
    """Write private-evaluation.csv and private-evaluation-bins.csv into FOLDER."""
    compared = [
        {"scores": shape, "rule": rule, **bins_row(*SHAPES[shape], *RULES[rule])}
        for shape in SHAPES
        for rule in RULES
    ]
    pd.DataFrame(compared).to_csv(folder / "private-evaluation-bins.csv", index=False, float_format="%.3g")
    rows = []
    for name, population in populations().items():
        for people in PEOPLE:
            for epsilon in NOISE:
                for row in measured(population, people, epsilon, draws, seed):
                    rows.append({"population": name, "people": people, "epsilon": epsilon, **row})
        typer.echo(f"{name}: {len(rows)} rows")
    pd.DataFrame(rows).to_csv(folder / "private-evaluation.csv", index=False, float_format="%.4g")


if __name__ == "__main__":
    typer.run(main)

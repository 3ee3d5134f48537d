"""Populations of made-up people whose metrics are known, and noisy histograms of samples of them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.stats import norm
from sklearn.metrics import f1_score, log_loss, precision_score, recall_score, roc_auc_score

from algorithms.evaluation import HistogramSpec, Released, count, histogram_for

NOISE = {0.2: 16.30, 0.5: 7.03, 1.0: 3.73, 3.0: 1.39}
"""Standard deviation of the noise by epsilon, for sensitivity 1 and delta 1e-5."""


@dataclass(frozen=True)
class Population:
    """People of some kinds that are equally frequent, and the metrics of all of them, computed without cells."""

    spec: HistogramSpec
    scores: np.ndarray
    labels: np.ndarray
    truth: dict[str, float]

    @cached_property
    def cells_of_each(self):
        rows = range(len(self.labels))
        return np.stack([count(self.spec, self.scores[i : i + 1], self.labels[i : i + 1]) for i in rows])

    def released(self, people, epsilon, draw):
        """A noisy histogram of a sample."""
        kinds = len(self.labels)
        cells = draw.multinomial(people, np.full(kinds, 1 / kinds)) @ self.cells_of_each
        noise = NOISE[epsilon] * self.spec.sensitivity
        return Released(self.spec, cells + draw.normal(0.0, noise, self.spec.cells), noise)


def two_classes(negatives, positives, mean, spread):
    """Log-odds are normal in each class; mean, spread: of negatives and of positives."""
    odds = np.concatenate(
        [
            norm.ppf((np.arange(size) + 0.5) / size, m, s)
            for size, m, s in zip((negatives, positives), mean, spread, strict=True)
        ]
    )
    labels = np.repeat([0, 1], [negatives, positives])
    scores = np.stack([1 / (1 + np.exp(odds)), 1 / (1 + np.exp(-odds))], axis=1)
    predicted = (odds > 0).astype(int)
    cut = np.clip(odds, -8, 8)
    share = positives / (negatives + positives)
    truth = {
        "accuracy": np.mean(predicted == labels),
        "majority_accuracy": max(share, 1 - share),
        "positive_share": share,
        "auc": roc_auc_score(labels, odds),
        "f1": f1_score(labels, predicted, average="macro"),
        "positive_f1": f1_score(labels, predicted),
        "precision": precision_score(labels, predicted, zero_division=0),
        "recall": recall_score(labels, predicted),
        "log_loss": log_loss(labels, 1 / (1 + np.exp(-cut))),
        "calibration_gap": scores[:, 1].mean() - share,
    }
    return Population(histogram_for("two classes", 2), scores, labels, truth)


def classes(outputs, frequencies, accuracy):
    """Predictions are right with the same probability in every class, and wrong ones are anything."""
    draw = np.random.default_rng(11)
    labels = draw.choice(outputs, 2000, p=np.array(frequencies) / np.sum(frequencies))
    predicted = np.where(draw.random(2000) < accuracy, labels, draw.integers(0, outputs, 2000))
    confidence = draw.uniform(0.5, 1.0, 2000)
    scores = np.repeat(((1 - confidence) / (outputs - 1))[:, None], outputs, axis=1)
    scores[np.arange(2000), predicted] = confidence
    truth = {
        "accuracy": np.mean(predicted == labels),
        "majority_accuracy": np.bincount(labels).max() / 2000,
        "f1": f1_score(labels, predicted, average="macro"),
        "log_loss": np.minimum(-np.log(scores[np.arange(2000), labels]), 9.0).mean(),
    }
    return Population(histogram_for("classes", outputs), scores, labels, truth)


def numbers(spread):
    """Targets are even in [-.6, .6], predictions four fifths of them with normal errors."""
    draw = np.random.default_rng(12)
    target = draw.uniform(-0.6, 0.6, 2000)
    predicted = 0.8 * target + draw.normal(0.0, spread, 2000)
    error = np.abs(predicted - target)
    truth = {
        "r2": 1 - np.mean(error**2) / np.var(target),
        "rmse": np.sqrt(np.mean(error**2)),
        "mae": np.mean(error),
        "mean_rmse": np.std(target),
    }
    return Population(histogram_for("number", 1), predicted[:, None], target, truth)


def bounded_scores():
    scores = np.random.default_rng(13).beta(5.0, 1.5, (2000, 1))
    return Population(histogram_for("score", 1), scores, np.zeros(2000), {"score": scores.mean()})

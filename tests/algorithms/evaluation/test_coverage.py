"""How often intervals hold the metric of all people, for each metric of very different populations.

Each release is of a new sample with new noise. Seeds are fixed.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from algorithms.evaluation import (
    ReleasedHistogram,
    calibration_error_of,
    class_metrics_of,
    group_differences,
    groups_of,
    histogram_for,
    metrics_of,
)
from algorithms.evaluation.curves import threshold_at
from algorithms.evaluation.estimates import scored_cells
from comparisons import private_evaluation as populations
from comparisons.private_evaluation import Population, classes, numbers, two_classes
from tests.support.intervals import Intervals
from tests.support.soak import soak_but

DRAWS, OF_GROUPS = 400, 1000
NOISE = {0.3: 11.24, 0.5: 7.03, 1.0: 3.73, 3.0: 1.39, 5.0: 0.892}
"""Standard deviation by epsilon, for sensitivity 1 and delta 1e-5."""


@dataclass(frozen=True)
class Case:
    population: Population
    people: int
    epsilon: float
    shown: int
    """How many metrics at least have an interval in nearly all releases."""


def heavy_tailed_numbers() -> Population:
    """Errors of a t distribution with two degrees of freedom, whose variance is that of the cut-off alone."""
    made = numbers(0.2)
    draw = np.random.default_rng(14)
    predicted = np.clip(0.9 * made.labels + 0.05 * draw.standard_t(2.0, len(made.labels)), -1.0, 1.0)
    error = np.minimum(np.abs(predicted - made.labels), 1.0)
    truth = {
        "r2": float(1 - np.mean(error**2) / np.var(made.labels)),
        "rmse": float(np.sqrt(np.mean(error**2))),
        "mae": float(np.mean(error)),
        "mean_rmse": float(np.std(made.labels)),
    }
    return replace(made, scores=predicted[:, None], truth=truth)


def certain_mistakes() -> Population:
    """A good model of which one in fifty labels is the other one."""
    made = two_classes(0.5, (-4.0, 4.0), (1.0, 1.0))
    odds = np.log(made.scores[:, 1] / made.scores[:, 0])
    labels, each = np.tile(made.labels, 2), np.concatenate([0.98 * made.frequencies, 0.02 * made.frequencies])
    labels[len(odds) :] = 1 - labels[len(odds) :]
    scores, odds = np.tile(made.scores, (2, 1)), np.tile(odds, 2)
    right = each @ ((odds > 0) == labels)
    truth = {
        "accuracy": right,
        "f1": right,  # both classes are alike
        "positive_f1": right,
        "precision": right,
        "recall": right,
        "auc": roc_auc_score(labels, odds, sample_weight=each),
        "log_loss": float(each @ np.logaddexp(0, np.clip(np.where(labels == 1, -odds, odds), -8, 8))),
    }
    return Population(made.spec, scores, labels, each, truth)


CASES = {
    "even classes": lambda: Case(two_classes(0.5, (-1.0, 1.0), (1.5, 1.5)), 2000, 1.0, 9),
    "even classes, few people": lambda: Case(two_classes(0.5, (-1.0, 1.0), (1.5, 1.5)), 60, 5.0, 5),
    "near chance": lambda: Case(two_classes(0.5, (-0.05, 0.05), (0.5, 0.5)), 20_000, 0.3, 9),
    "nearly perfect": lambda: Case(two_classes(0.4, (-6.0, 6.0), (2.5, 2.5)), 1000, 3.0, 9),
    "perfect": lambda: Case(two_classes(0.4, (-4.0, 4.0), (1.0, 1.0)), 5000, 0.3, 8),
    "certain mistakes": lambda: Case(certain_mistakes(), 2000, 3.0, 6),
    "rare class": lambda: Case(two_classes(0.01, (-6.0, -1.0), (1.5, 1.5)), 20_000, 1.0, 8),
    "five classes": lambda: Case(classes(5, [5, 4, 3, 2, 1], 0.8), 5000, 0.5, 3),
    "forty classes": lambda: Case(classes(40, [1] * 40, 0.6), 20_000, 1.0, 3),
    "one of fifty classes": lambda: Case(classes(50, [100, *[0.001] * 49], 0.99), 1000, 3.0, 2),
    "light-tailed numbers": lambda: Case(numbers(0.2), 1000, 5.0, 4),
    "heavy-tailed numbers": lambda: Case(heavy_tailed_numbers(), 20_000, 0.5, 4),
    "bounded scores": lambda: Case(populations.bounded_scores(), 300, 1.0, 1),
}


IN_SUITE = [
    *("even classes, few people", "perfect", "certain mistakes", "rare class", "five classes"),
    *("heavy-tailed numbers", "bounded scores"),
]
"""Where noise drowns metrics, none is wrong, mistakes are certain, and classes, numbers and scores are uneven."""


@pytest.mark.parametrize("name", soak_but(IN_SUITE, CASES))
def test_each_metric_is_covered_in_92_to_98_of_100_releases(name: str) -> None:
    case, seen = CASES[name](), Intervals(DRAWS)
    truth = case.population.truth
    for released in case.population.releases(
        case.people, NOISE[case.epsilon], np.random.default_rng(71), DRAWS
    ):
        metrics = metrics_of(released)
        for metric in truth:
            seen.note(metric, metrics[metric], truth[metric])
    # An interval that does not hold is shown in few releases, also of a metric that noise drowns in most.
    assert all(each.count(False) <= 0.08 * DRAWS for each in seen.hits.values())
    seen.check(shown=case.shown, not_normal=truth if name in ("perfect", "nearly perfect") else ())


def test_what_follows_from_a_threshold_is_covered() -> None:
    """Selected, precision, recall, false positives and lift from a probability on, each class, and the calibration."""
    population, seen = CASES["rare class"]().population, Intervals(DRAWS)
    chances, each, labels = population.scores[:, 1], population.frequencies, population.labels
    positive = float(each @ labels)
    inner = np.sinh(np.linspace(-1, 1, 63) * np.arcsinh(16)) / 2  # even in asinh(2 z), up to 8
    inside = np.searchsorted(1 / (1 + np.exp(-inner[3::4])), chances, side="right")
    sizes = np.bincount(inside, each, 16)
    sums = np.bincount(inside, each * (chances - labels), 16)
    off = float(np.sqrt(np.sum(sums[sizes > 0] ** 2 / sizes[sizes > 0])))
    for released in population.releases(20_000, NOISE[1.0], np.random.default_rng(72), DRAWS):
        cells = scored_cells(released.view())
        for cut in (24, 36):
            point = threshold_at(cells, cut)
            named = each * (chances > point.threshold)
            selected, right = float(named.sum()), float(named @ labels)
            for metric, truth in {
                "selected": selected,
                "precision": right / selected,
                "recall": right / positive,
                "false_positive_rate": (selected - right) / (1 - positive),
                "lift": right / selected / positive,
            }.items():
                seen.note(f"{metric} from {cut}", getattr(point, metric), truth)
        error = calibration_error_of(released)
        seen.note("calibration error", None if isinstance(error, str) else error, off)
    seen.check(shown=7, not_normal={"false_positive_rate"})


def test_metrics_of_each_class_are_covered() -> None:
    case, seen = CASES["five classes"](), Intervals(DRAWS)
    each, real = case.population.frequencies, case.population.labels.astype(int)
    predicted = case.population.scores.argmax(axis=1)
    for released in case.population.releases(20_000, NOISE[1.0], np.random.default_rng(73), DRAWS):
        for label, metrics in enumerate(class_metrics_of(released)):
            right = each[(real == label) & (predicted == label)].sum()
            for metric, truth in {
                "share": each[real == label].sum(),
                "recall": right / each[real == label].sum(),
                "precision": right / each[predicted == label].sum(),
            }.items():
                seen.note(f"{metric} of {label}", getattr(metrics, metric), truth)
    seen.check(shown=15)


def two_groups(
    first: Population, second: Population, people: tuple[int, int], noise: float, draw: np.random.Generator
) -> list[ReleasedHistogram]:
    """Releases in which each group's people are of another population."""
    spec = histogram_for(first.spec.kind, first.spec.outputs, (("sex", ("f", "m")),))
    cells = np.zeros((OF_GROUPS, spec.cells))
    for at, (population, number) in enumerate(zip((first, second), people, strict=True)):
        for values, without_noise in zip(
            cells, population.releases(number, 0.0, draw, OF_GROUPS), strict=True
        ):
            for name, table in without_noise.view().tables.items():
                spec.tables_of("sex", values)[name][at] = table
                spec.tables_of("", values)[name][0] += table
    deviation = noise * spec.sensitivity
    noisy = cells + draw.normal(0.0, deviation, cells.shape)
    return [ReleasedHistogram(spec, values, deviation) for values in noisy]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["two classes", "numbers"])
def test_metrics_of_groups_and_their_differences_are_covered(kind: str) -> None:
    """In `test_groups` a group's metrics are those of its people alone, and ends of differences follow from theirs."""
    pair = (
        (two_classes(0.5, (-1.0, 1.0), (1.5, 1.5)), two_classes(0.3, (-2.0, 2.0), (1.5, 1.5)))
        if kind == "two classes"
        else (numbers(0.2), numbers(0.15))
    )
    seen = Intervals(OF_GROUPS)
    for released in two_groups(*pair, (6000, 2000), NOISE[3.0], np.random.default_rng(74)):
        groups = groups_of(released)["sex"]
        (between,) = group_differences(groups)
        for metric, truth in pair[0].truth.items():
            for group, population in zip(groups, pair, strict=True):
                seen.note(f"{metric} of {group.name}", group.metrics[metric], population.truth[metric])
            seen.note(f"{metric} between", between.metrics.get(metric), truth - pair[1].truth[metric])
    seen.check(shown=10 if kind == "numbers" else 20, not_normal=pair[0].truth)

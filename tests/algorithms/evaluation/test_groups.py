"""Metrics by groups, their differences, and groups that are too small."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from algorithms.evaluation import (
    Estimate,
    ReleasedHistogram,
    count,
    expected_group_errors,
    histogram_for,
    metrics_of,
)
from algorithms.evaluation.groups import group_differences, groups_of
from algorithms.evaluation.intervals import difference
from comparisons.private_evaluation import NOISE
from tests.support.soak import soak_but

SHARES = {"a": 0.5, "b": 0.35, "c": 0.14, "d": 0.01}
ACCURACY = {"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.7}
SEXES = ("f", "m")


@cache
def kinds_of_people(cross):
    """Ten classes; who is right depends on the region alone. The share of each kind of people, and its cells."""
    spec = histogram_for("classes", 3, (("region", tuple(SHARES)), ("sex", SEXES)), cross)
    shares, cells = [], []
    for (region, name), sex, label, is_right in product(enumerate(SHARES), (0, 1), range(3), (True, False)):
        shares.append(SHARES[name] / 6 * (ACCURACY[name] if is_right else 1 - ACCURACY[name]))
        scores = np.full((1, 3), 0.1)
        scores[0, label if is_right else (label + 1) % 3] = 0.8
        cells.append(count(spec, scores, np.array([label]), np.array([[region, sex]])))
    return spec, np.array(shares), np.array(cells)


def released(draw, people=5000, epsilon=1.0, cross=False):
    spec, shares, cells = kinds_of_people(cross)
    noise = NOISE[epsilon] * spec.sensitivity
    noisy = draw.multinomial(people, shares) @ cells + draw.normal(0.0, noise, spec.cells)
    return ReleasedHistogram(spec, noisy, noise)


@pytest.mark.parametrize("cross", soak_but([False], [False, True]))
def test_intervals_of_groups_and_differences_cover_in_95_of_100_draws(cross):
    draw = np.random.default_rng(21)
    hits, differences, widths = [], [], []
    for _ in range(200):
        groups = {each.name: each for each in groups_of(released(draw, 8000, cross=cross))["region"]}
        for name in ("a", "b", "c"):
            accuracy = groups[name].metrics["accuracy"]
            hits.append(accuracy.low <= ACCURACY[name] <= accuracy.high)
            assert groups[name].size.low < 8000 * SHARES[name] * 1.3
        for pair in (("a", "b"), ("a", "c"), ("b", "c")):
            (between,) = group_differences(tuple(groups[name] for name in pair))
            assert (between.first, between.second) == pair
            gap, truth = between.metrics["accuracy"], ACCURACY[pair[0]] - ACCURACY[pair[1]]
            differences.append(gap.low <= truth <= gap.high)
            widths.append(gap.high - gap.low)
    assert 0.93 <= np.mean(hits) <= 0.97
    assert 0.93 <= np.mean(differences) <= 0.97
    assert np.median(widths) < 0.12


TABLES = {"two classes": 2, "classes": 3, "number": 1, "score": 1}
GROUPS = (("region", ("a", "b", "c")), ("sex", SEXES))


def alone(spec, tables, noise):
    """Metrics of a histogram without groups that has these tables."""
    whole = histogram_for(spec.kind, spec.outputs)
    values = np.concatenate([*(tables[name].ravel() for name in whole.shapes), [0.0]])
    return metrics_of(ReleasedHistogram(whole, values, noise))


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("kind", TABLES)
def test_metrics_of_a_group_are_those_of_its_people_alone(kind, cross):
    """Of crossed groups a column's group is the sum of its cells, whose noise adds up."""
    draw, spec = np.random.default_rng(25), histogram_for(kind, TABLES[kind], GROUPS, cross)
    people, members = 6000, np.stack([draw.integers(0, 3, 6000), draw.integers(0, 2, 6000)], axis=1)
    scores = draw.dirichlet(np.ones(max(2, spec.outputs)), people)[:, : spec.outputs]
    labels = draw.integers(0, 2, people)
    noise = 0.5
    values = count(spec, scores, labels, members) + draw.normal(0.0, noise, spec.cells)
    values[-1] = 0.0
    found = groups_of(ReleasedHistogram(spec, values, noise))
    if cross:
        tables = spec.tables_of("region x sex", values)
        by_pair = {name: table.reshape(3, 2, *table.shape[1:]) for name, table in tables.items()}
        parts = {
            "region": (1, {name: table.sum(axis=1) for name, table in by_pair.items()}),
            "sex": (0, {name: table.sum(axis=0) for name, table in by_pair.items()}),
            "region x sex": (None, tables),
        }
    else:
        parts = {name: (None, spec.tables_of(name, values)) for name in ("region", "sex")}
    assert list(found) == list(parts)
    for part, (summed, tables) in parts.items():
        of_all = noise * (1.0 if summed is None else np.sqrt((3, 2)[summed]))
        for at, group in enumerate(found[part]):
            own = alone(spec, {name: table[at] for name, table in tables.items()}, of_all)
            assert set(group.metrics) == set(own) and any(own.values())
            for name, estimate in group.metrics.items():
                ends = None if estimate is None else (estimate.value, estimate.low, estimate.high)
                expected = None if own[name] is None else (own[name].value, own[name].low, own[name].high)
                assert ends == (None if expected is None else pytest.approx(expected, rel=1e-9, abs=1e-12))


def test_ends_of_a_difference_are_as_far_as_those_of_both_metrics_together():
    """By hand: distances of 3 and 4 add up to 5, those of 5 and 12 to 13."""
    between = difference(Estimate(0.7, 0.67, 0.82), Estimate(0.5, 0.45, 0.54))
    assert (between.value, between.low, between.high) == pytest.approx((0.2, 0.15, 0.33))


def test_crossed_groups_have_the_groups_of_each_column_too():
    groups = groups_of(released(np.random.default_rng(22), cross=True))
    assert list(groups) == ["region", "sex", "region x sex"]
    assert [each.name for each in groups["sex"]] == ["f", "m"]
    assert "a / f" in [each.name for each in groups["region x sex"]]


def test_small_groups_are_merged_by_their_released_size():
    # The size of a group of three classes is the sum of two cells: 8 deviations of it are 45 people at this noise.
    sizes, noise = {"a": 1000, "b": 44, "c": 44, "d": 44, "e": 44}, 4.0
    region = np.repeat(np.arange(5), list(sizes.values()))
    labels, right = np.zeros(len(region), np.int64), np.arange(len(region)) % 4 > 0
    scores = np.where(right[:, None], [0.8, 0.1, 0.1], [0.1, 0.8, 0.1])
    spec = histogram_for("classes", 3, (("region", tuple(sizes)),))
    cells = count(spec, scores, labels, region[:, None])
    alone, merged = groups_of(ReleasedHistogram(spec, cells, noise))["region"]
    assert (alone.name, merged.name) == ("a", "b, c, d, e")
    assert (alone.size.value, merged.size.value) == (1000, 176)
    assert merged.metrics["accuracy"].value == pytest.approx(0.75)
    half = groups_of(ReleasedHistogram(spec, cells, noise / 2))["region"]
    assert [each.name for each in half] == list(sizes)
    double = groups_of(ReleasedHistogram(spec, cells, 4 * noise))["region"]
    assert double[-1].members == ("b", "c", "d", "e") and set(double[-1].metrics.values()) == {None}


def test_sizes_decide_on_released_cells_alone():
    # The same noisy cells give the same groups, whatever the people were.
    one = released(np.random.default_rng(24), 2000)
    moved = one.values.copy()
    tables = one.spec.tables_of("region", moved)
    for table in tables.values():
        table[0] *= 0.01
    shrunk = groups_of(replace(one, values=moved))["region"]
    assert "a" in shrunk[-1].members and "b" in [each.name for each in shrunk]


def test_expected_errors_of_groups_are_those_of_their_part_of_the_people():
    spec = histogram_for("classes", 3, (("sex", SEXES),))
    noise = NOISE[1.0] * spec.sensitivity
    accuracy = expected_group_errors(spec, 10_000, noise)["sex"]["accuracy"]
    # Sampling .8 (1 - .8) / 5,000, as wrong guesses of three classes are right by chance; noise on two cells.
    assert accuracy == pytest.approx(np.hypot(np.sqrt(0.16 / 5000), 0.82 * noise / 5000), rel=0.1)
    assert set(expected_group_errors(spec, 200, noise)["sex"].values()) == {None}

"""The histogram's cells, and what one person can change in them."""

import json
import math

import numpy as np
import pytest

from algorithms.evaluation import HistogramSpec, ReleasedHistogram, count, histogram_for, metrics_of
from algorithms.evaluation.counts import spread, temperature_cells
from algorithms.evaluation.histogram import (
    MAX_BRIER_GAIN,
    TEMPERATURE_NORM,
    TEMPERATURES,
    error_nodes,
    score_nodes,
    target_nodes,
)

GROUPS = (("sex", ("f", "m")), ("region", ("north", "east", "south")))
SPECS = {
    "two": (histogram_for("two classes", 2), math.sqrt(5)),
    "two, uncrossed": (histogram_for("two classes", 2, GROUPS), math.sqrt(15)),
    "two, crossed": (histogram_for("two classes", 2, GROUPS, cross=True), math.sqrt(10)),
    "four": (histogram_for("classes", 4), 2.0),
    "a hundred": (histogram_for("classes", 100), math.sqrt(5)),
    "number, crossed": (histogram_for("number", 1, GROUPS, cross=True), math.sqrt(6)),
    "score": (histogram_for("score", 1), 1.0),
    "score, compared": (histogram_for("score", 1, compared=True), math.sqrt(2)),
    "two, compared": (histogram_for("two classes", 2, GROUPS[:1], halves=True, compared=True), math.sqrt(22)),
    "two, halves": (histogram_for("two classes", 2, halves=True), math.sqrt(6)),
    "four, halves": (histogram_for("classes", 4, halves=True), math.sqrt(5)),
}
EXTREMES = [
    math.nan,
    math.inf,
    -math.inf,
    -1e300,
    1e300,
    -1.0,
    0.0,
    5e-324,
    0.25,
    0.5,
    0.9999999,
    1.0,
    1.5,
    2.0,
]


def hostile_records(spec, draw):
    scores = draw.choice(EXTREMES, (600, spec.outputs))
    fair = draw.dirichlet(np.full(max(2, spec.outputs), 0.3), 300)[:, : spec.outputs]
    scores[:300] = fair * 2 - 1 if spec.kind == "number" else fair
    labels = draw.choice(EXTREMES, 600) if spec.kind == "number" else draw.integers(-2, spec.outputs + 2, 600)
    groups = draw.integers(-2, 5, (600, len(spec.groups)))
    differences = draw.choice([*EXTREMES, -0.3, -0.9999999], 600) if spec.compared else None
    return scores, labels, groups, differences


def of_rows(differences, rows):
    return None if differences is None else differences[rows]


@pytest.mark.parametrize("name", SPECS)
def test_no_record_adds_more_than_the_sensitivity(name):
    spec, sensitivity = SPECS[name]
    assert spec.sensitivity == pytest.approx(sensitivity)
    scores, labels, groups, differences = hostile_records(spec, np.random.default_rng(1))
    parts = [
        count(
            spec,
            scores[[i]],
            labels[[i]],
            groups[[i]],
            np.array([weight]),
            np.array([i]),
            of_rows(differences, [i]),
        )
        for i in range(0, 600, 4)
        for weight in (1.0, 7.0)
    ]
    norms = np.linalg.norm(parts, axis=1)
    assert max(norms) <= sensitivity * (1 + 1e-12)
    # And some record reaches it, but for no record is each temperature's gain the largest.
    assert max(norms) >= sensitivity * (0.9 if name == "four, halves" else 1 - 1e-9)
    assert max(np.abs(parts).sum(axis=1)) <= spec.l1_sensitivity * (1 + 1e-12)


@pytest.mark.parametrize("name", SPECS)
def test_all_rows_of_a_person_together_add_at_most_the_sensitivity(name):
    spec, sensitivity = SPECS[name]
    draw = np.random.default_rng(2)
    scores, labels, groups, differences = hostile_records(spec, draw)
    for rows in (2, 3, 17):
        picked = draw.integers(0, 600, rows)
        person = count(
            spec,
            scores[picked],
            labels[picked],
            groups[picked],
            np.full(rows, 1 / rows),
            np.full(rows, 1),
            of_rows(differences, picked),
        )
        assert np.linalg.norm(person) <= sensitivity * (1 + 1e-12)


def test_two_classes_by_score_and_label():
    spec = histogram_for("two classes", 2)
    scores = np.array([[0.9, 0.1], [0.5, 0.5], [0.4, 0.6], [0.0, 1.0], [math.nan, 1.0]])
    cells = ReleasedHistogram(spec, count(spec, scores, np.array([0, 0, 1, 1, 1])), 0.0)
    # even odds are the first class
    assert cells.view().tables["score x label, 2"].tolist() == [
        [2.0, 0.0],
        [0.0, 2.0],
    ]
    assert cells.view().tables["score x label, 64"][63].tolist() == [0.0, 1.0]
    assert cells.values[-1] == 1.0  # the score that is not a number


def test_no_temperature_changes_a_brier_score_by_more_than_the_bound():
    """Of probabilities of every shape, whatever the label."""
    draw = np.random.default_rng(3)
    odds = np.concatenate([draw.normal(0, scale, (4000, 6)) for scale in (0.3, 2.0, 8.0, 60.0)])
    labels = draw.integers(0, 6, len(odds))
    for temperature in TEMPERATURES:
        scores = []
        for divided in (odds, odds / temperature):
            shares = np.exp(divided - divided.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
            scores.append(np.square(shares - np.eye(6)[labels]).sum(axis=1))
        is_first = odds.argmax(axis=1) == labels
        assert max(score[is_first].max() for score in scores) <= 1.0
        assert min(score[~is_first].min() for score in scores) >= 0.5 - 1e-12
        assert max(score[~is_first].max() for score in scores) <= 2.0
        probabilities = np.exp(odds - odds.max(axis=1, keepdims=True))
        gained = temperature_cells(probabilities, labels)[:, 1 + TEMPERATURES.index(temperature)]
        assert np.allclose(gained * TEMPERATURE_NORM * MAX_BRIER_GAIN, scores[0] - scores[1])


def test_classes_by_prediction_and_label():
    spec = histogram_for("classes", 3)
    scores = np.array([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4], [0.1, 0.5, 0.4]])
    cells = ReleasedHistogram(spec, count(spec, scores, np.array([0, 2, 7])), 0.0)
    assert cells.view().tables["right"].tolist() == [1.0, 1.0]
    assert cells.view().tables["predicted x label"].tolist() == [[1.0, 0, 0], [0, 0, 1.0], [0, 0, 0]]
    assert cells.values[-1] == 1.0  # the label that is no class


def test_groups_are_counted_by_column_or_crossed():
    scores, labels = np.array([[0.2, 0.8]] * 3), np.array([1, 1, 0])
    members = np.array([[0, 2], [1, 0], [-1, 1]])
    single = histogram_for("two classes", 2, GROUPS)
    cells = ReleasedHistogram(single, count(single, scores, labels, members), 0.0)
    assert cells.view("sex", (0,)).tables["score x label, 2"][1].tolist() == [0.0, 1.0]
    assert cells.view("region", (1,)).tables["score x label, 2"][1].tolist() == [1.0, 0.0]
    crossed = histogram_for("two classes", 2, GROUPS, cross=True)
    assert crossed.parts == {
        "sex x region": ("f / north", "f / east", "f / south", "m / north", "m / east", "m / south")
    }
    cells = ReleasedHistogram(crossed, count(crossed, scores, labels, members), 0.0)
    sizes = [cells.view("sex x region", (group,)).tables["score x label, 2"].sum() for group in range(6)]
    assert sizes == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]  # a record of no declared sex is in none


@pytest.mark.parametrize("nodes", [error_nodes(12), target_nodes(), score_nodes(3)])
def test_sums_over_nodes_are_sums_over_records(nodes):
    values = np.random.default_rng(3).uniform(nodes[0], 1.0, 1000)
    at_nodes = spread(values, nodes).sum(axis=0)
    for power in (0, 1, 2):
        assert at_nodes @ nodes**power == pytest.approx((values**power).sum())


def test_a_histogram_and_a_release_survive_json():
    spec = histogram_for("number", 1, GROUPS, cross=True)
    assert HistogramSpec.from_json(spec.to_json()) == spec
    assert spec.cells == 7 * (13 + 8 + 13 * 16) + 1  # all people and six groups, in three tables
    values = np.random.default_rng(4).normal(size=spec.cells)
    again = ReleasedHistogram.from_json(ReleasedHistogram(spec, values, 2.5).to_json())
    assert again.spec == spec and again.noise_std == 2.5 and (again.values == values).all()


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"kind": "two classes", "outputs": 2, "bins": 3, "groups": []}']
)
def test_other_texts_are_no_histogram(text):
    with pytest.raises(ValueError, match="histogram"):
        HistogramSpec.from_json(text)
    with pytest.raises(ValueError, match="histogram"):
        ReleasedHistogram.from_json(json.dumps({"spec": json.loads(text), "values": [], "noise_std": 1.0}))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="outputs"):
        histogram_for("two classes", 3)
    alike = (("a", ("x / y", "x")), ("b", ("z", "y / z")))
    assert len(histogram_for("score", 1, alike).parts) == 2
    with pytest.raises(ValueError, match="named x / y / z"):
        histogram_for("score", 1, alike, cross=True)
    with pytest.raises(ValueError, match="declared once"):
        histogram_for("score", 1, (("sex", ("f", "f")),))
    with pytest.raises(ValueError, match="cells"):
        histogram_for("two classes", 2, tuple((f"c{i}", tuple("abcdefghij")) for i in range(5)), cross=True)


def test_a_comparison_needs_the_differences():
    with pytest.raises(ValueError, match="compares two models"):
        count(histogram_for("score", 1, compared=True), np.zeros((3, 1)), np.zeros(3))


def test_groups_are_needed_where_they_are_counted():
    with pytest.raises(ValueError, match="every column"):
        count(histogram_for("score", 1, GROUPS), np.zeros((3, 1)), np.zeros(3))


def test_laplace_noise_covers_nearly_as_often():
    # A single Laplace draw is within 1.96 of its standard deviations in 1 - exp(-1.96 sqrt(2)) = 93.7 % of the cases.
    spec = histogram_for("score", 1)
    draw = np.random.default_rng(9)
    cells = count(spec, np.full((5000, 1), 0.8), np.zeros(5000))
    hits = []
    for _ in range(1000):
        noisy = ReleasedHistogram(spec, cells + draw.laplace(0.0, 20.0, spec.cells), 20.0 * math.sqrt(2))
        score = metrics_of(noisy)["score"]
        hits.append(score.low <= 0.8 <= score.high)
    assert 0.925 <= np.mean(hits) <= 0.965


@pytest.mark.parametrize(
    ("kind", "outputs", "bins", "cells"),
    [
        ("two classes", 2, 64, 2 * (2 + 4 + 8 + 16 + 64) + 1),
        ("classes", 10, 16, 2 + 2 * 16 + 16 + 100 + 1),
        ("classes", 100, 16, 2 + 2 * 16 + 16 + 200 + 100 + 1),
        ("number", 1, 12, 13 + 8 + 13 * 16 + 1),
        ("score", 1, 3, 3 + 1),
    ],
)
def test_what_earlier_runs_have_released_can_be_read(kind, outputs, bins, cells):
    # Written by the first version; evaluations on disk have this layout.
    text = f'{{"bins": {bins}, "cross": false, "groups": [], "halves": false, "kind": "{kind}", "outputs": {outputs}}}'
    spec = HistogramSpec.from_json(text)
    assert spec.cells == cells and spec.to_json() == text
    assert (
        ReleasedHistogram.from_json(
            f'{{"noise_std": 1.5, "spec": {text}, "values": {[2.0] * cells}}}'
        ).noise_std
        == 1.5
    )

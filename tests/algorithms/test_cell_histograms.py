"""One release of all columns' histograms: what a row adds, what is drawn on it, and that trees follow from it alone."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from algorithms.cell_histograms import CellHistograms, TableHistograms
from algorithms.core.learned_features import learn_buffers
from algorithms.core.user_level import user_level_barrier, user_level_model
from algorithms.histogram_columns import HistogramColumn, HistogramPart
from algorithms.model_facts import ModelFacts
from algorithms.models import Model, build
from algorithms.models.cell_histograms import HistogramCells, Splits
from algorithms.models.cells import behind_cells
from algorithms.models.feature_transforms import front, in_front
from algorithms.models.saved import architecture
from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE, REPLACE_ONE, epsilon
from algorithms.privacy.mechanisms.noise import seeded_generator
from data.cells import Categories, Grids
from tests.support.barriers import barrier
from tests.support.bench import MadeUp
from tests.support.refusals import refused_as

SIZES = (9, 9, 4, 3, 3, 3, 16)
"""A number's linear and logarithmic grid, three categories, an ordered column of two steps, and a public tree."""
COLUMNS = (
    HistogramColumn(2, (HistogramPart((0, 1), True),)),
    HistogramColumn(1, (HistogramPart((2,), False),)),
    HistogramColumn(3, (HistogramPart((3,), True),)),
)
PARTS = ((0, 1), (2,), (3,))
QUIET = 1e-4


def rows_of(count: int, seed: int = 0) -> NDArray[np.float32]:
    """Numbers near the low end of their bounds, as codes of both grids; a tenth of everything is missing."""
    draw = np.random.default_rng(seed)
    shares = np.minimum(draw.exponential(0.05, count), 0.999)
    codes = [np.floor(8 * shares), np.floor(8 * np.log1p(100 * shares) / np.log(101))]
    codes += [
        draw.choice(3, count, p=[0.7, 0.2, 0.1]),
        *draw.integers(0, 2, (3, count)),
        draw.integers(0, 16, count),
    ]
    rows = np.stack(codes, axis=1).astype(np.float32)
    rows[draw.random(count) < 0.1, :2] = 8
    rows[draw.random(count) < 0.1, 2] = 3
    return rows


def features_of(noise: float, *, is_of_number: bool = False, **settings: Any) -> TableHistograms:
    return CellHistograms(noise=noise, **settings).of_table(SIZES, COLUMNS, is_of_number=is_of_number)


def model_of(features: TableHistograms) -> Model:
    made, predicts = features.module((len(features.sizes),)), "number" if features.is_of_number else "class"
    sizes, weights = made.layout
    classes = 1 if features.is_of_number else 2
    model = build("additive", input_shape=(sum(sizes),), classes=classes, seed=0, predicts=predicts)
    return in_front(made, behind_cells(model, sizes, weights))


def learn(
    features: TableHistograms, rows: NDArray[np.float32], labels: NDArray[np.generic]
) -> dict[str, torch.Tensor]:
    asked = barrier(MadeUp(rows, labels), model_of(features))  # type: ignore[arg-type]
    return learn_buffers(features, asked, len(rows), QUIET)


def exact_counts(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of each histogram, by NumPy: the sum of the codes at its positions."""
    counts = []
    for positions in PARTS:
        cells = sum(SIZES[at] - 1 for at in positions) + 1
        counts.append(np.bincount(rows[:, list(positions)].sum(1).astype(int), minlength=cells))
    return np.concatenate(counts).astype(float)


def test_a_row_adds_one_to_a_cell_of_each_histogram() -> None:
    rows = rows_of(300)
    learned = learn(features_of(QUIET), rows, np.zeros(300, np.int64))
    assert learned["counts"].numpy() == pytest.approx(exact_counts(rows), abs=0.01)


def test_the_noise_is_that_of_all_histograms_together() -> None:
    """A count's standard deviation is the multiplier times sqrt(3); of 840 counts, within 14 % but for 1 in 10^6."""
    rows, labels, features = rows_of(300), np.zeros(300, np.int64), features_of(50.0)
    errors = []
    for seed in range(30):
        asked = barrier(MadeUp(rows, labels), model_of(features), generator=seeded_generator(seed))
        errors.append(learn_buffers(features, asked, 300, QUIET)["counts"].numpy() - exact_counts(rows))
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(50.0 * math.sqrt(3), rel=0.14)
    assert np.mean(errors) == pytest.approx(0.0, abs=15.0)


def test_the_release_is_charged_by_its_multiplier_and_twice_where_a_row_is_replaced() -> None:
    (release,) = features_of(10.0).releases((len(SIZES),))
    (quiet,) = features_of(5.0).releases((len(SIZES),))
    assert release.clipping.sensitivity == pytest.approx(math.sqrt(3))
    assert features_of(10.0, is_of_number=True).releases((7,))[0].clipping.sensitivity == pytest.approx(2.0)
    added = epsilon([(quiet.event(), 1)], 1e-5, adjacency=ADD_OR_REMOVE_ONE)
    replaced = epsilon([(release.event(), 1)], 1e-5, adjacency=REPLACE_ONE)
    assert replaced == pytest.approx(added, rel=1e-3)


def test_the_rows_of_a_person_count_one_together() -> None:
    rows = rows_of(300).reshape(100, 3, -1)
    labels = np.zeros((100, 3), np.int64)
    labels[:50, 1:] = -100  # half of the people have one row, whose other rows are filled up
    features = features_of(QUIET)
    asked = user_level_barrier(barrier(MadeUp(rows, labels), user_level_model(model_of(features), 3)), 3)
    counts = learn_buffers(features, asked, 100, QUIET)["counts"].numpy()
    expected = exact_counts(rows[:50, 0]) + sum(exact_counts(rows[50:, at]) for at in range(3)) / 3
    assert counts == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("trees", "share"), [(5, 0.25), (0, 0.25)])
def test_trees_have_the_share_of_the_norm_that_the_table_gives_them(trees: int, share: float) -> None:
    asked = CellHistograms(trees=trees, bins=4).of_table(SIZES, COLUMNS, is_of_number=False, tree_share=share)
    squares = np.square(asked.module((len(SIZES),)).layout[1])
    assert squares.sum() == pytest.approx(1.0, rel=1e-6) and squares.sum() <= 1.0
    assert squares[len(squares) - trees :].sum() == pytest.approx(share if trees else 0.0, rel=1e-6)


@pytest.mark.parametrize("trees", [5, 0])
def test_a_cell_that_all_rows_share_stays_with_its_share_of_the_norm(trees: int) -> None:
    """A row whose other cells nobody has is predicted by it, so that it is not noise alone."""
    sizes, rows = (*SIZES, 1), np.pad(rows_of(50), ((0, 0), (0, 1)))
    asked = CellHistograms(trees=trees).of_table(
        sizes, COLUMNS, is_of_number=False, tree_share=0.225, constant_share=0.1
    )
    made = asked.module((len(sizes),))
    after, weights = made.layout
    squares = np.square(weights)
    assert after[-1] == 1 and squares[-1] == pytest.approx(0.1, rel=1e-6)
    assert squares.sum() == pytest.approx(1.0, rel=1e-6) and squares.sum() <= 1.0
    assert squares[:6].sum() == pytest.approx(0.9 - (0.225 if trees else 0.0), rel=1e-6)
    told = made(torch.from_numpy(rows))
    assert told.shape == (50, len(after)) and not told[:, -1].any()
    assert front(made.settings, (len(sizes),)).layout == made.layout  # as in a model's file


@pytest.mark.parametrize("noise", [QUIET, 30.0, 1e5])
def test_trees_follow_from_the_released_counts_alone(noise: float) -> None:
    """Whatever the noise, what is learned is what a copy of the rule makes of the counts that left."""
    features = features_of(noise, trees=5, depth=3, bins=4)
    learned = learn(features, rows_of(400), np.zeros(400, np.int64))
    made = features.module((len(SIZES),))
    made.load_state_dict(learned)
    std = noise * math.sqrt(3)
    sizes = [sum(SIZES[at] - 1 for at in positions) + 1 for positions in PARTS]
    shares = []
    for counts in np.split(learned["counts"].numpy(), np.cumsum(sizes)[:-1]):
        values = np.where(counts < 2 * std, 0.0, counts)[:-1]
        values = values if values.sum() else np.ones(len(values))
        shares.append(values / values.sum())
    middles = [np.cumsum(one) - one / 2 for one in shares]
    # a row for each cell of the number, the last for a missing one
    every = np.zeros((17, len(SIZES)), np.float32)
    every[:, 0], every[:, 1] = np.minimum(np.arange(17), 8), np.maximum(np.arange(17) - 8, 0)
    binned = made(torch.from_numpy(every)).numpy()[:, 6]
    assert binned.tolist() == [*np.minimum(np.floor(4 * middles[0]), 3), 4]
    at = 17  # behind the quantile bins
    for test in made.tests():
        size = sizes[test.part]
        found, at = learned["table"].numpy()[at : at + size], at + size
        if test.part == 1:
            before = np.cumsum(shares[1][list(test.order)]) - shares[1][list(test.order)]
            chosen = [test.order[k] for k in range(3) if before[k] < 0.5]
            assert set(np.flatnonzero(found)) == set(chosen)
        else:
            assert found.tolist() == [*(middles[test.part] >= test.quantile), 0]
    assert at == len(learned["table"])


def test_splits_are_where_the_rows_are() -> None:
    """Half of the tests at quantiles between 0 and 1 pass for each number, however skewed its column is."""
    features, rows = features_of(QUIET, trees=200, depth=1), rows_of(4000)
    learned = learn(features, rows, np.zeros(4000, np.int64))
    made = features.module((len(SIZES),))
    made.load_state_dict(learned)
    present = rows[(rows[:, 0] < 8)]
    leaves = made(torch.from_numpy(present))[:, 6:].numpy()
    numeric = [k for k, test in enumerate(made.tests()) if test.part == 0]
    assert 0.4 < leaves[:, numeric].mean() < 0.6


def test_splits_by_content_are_of_the_columns_that_say_most() -> None:
    """By the root of the entropy of each column's counts, and each split has rows on both sides."""
    rows = rows_of(4000)
    rows[:, 3:6] = 0.0
    rows[:1000, 3] = 1.0  # a column of two values
    features = features_of(QUIET, trees=800, depth=1, splits="by_content")
    learned = learn(features, rows, np.zeros(4000, np.int64))
    made = features.module((len(SIZES),))
    made.load_state_dict(learned)
    roots = []
    for counts in np.split(exact_counts(rows), [17, 21]):
        shares = counts[counts > 0] / counts.sum()
        roots.append(math.sqrt(-(shares * np.log(shares)).sum()))
    splits = np.bincount(learned["looked_up"].numpy(), minlength=3) / 800
    assert splits == pytest.approx(np.array(roots) / sum(roots), abs=0.09)  # 5 standard deviations
    # Noise makes values of some empty cells, too.
    held = np.split(learned["counts"].numpy() >= 2 * QUIET * math.sqrt(3), [17, 21])
    tables = np.split(learned["table"].numpy(), made.offsets.numpy()[1:])
    for part, table in zip(learned["looked_up"].tolist(), tables, strict=True):
        assert set(table[np.flatnonzero(held[part])]) == {0, 1}


def test_splits_by_content_are_even_in_the_roots_of_the_counts() -> None:
    """A number with 1600, 400 and 100 records at three values: roots 40, 20 and 10, with middles at 20, 50 and 65."""
    rows = np.zeros((2100, len(SIZES)), np.float32)
    rows[1600:2000, :2], rows[2000:, :2] = 2.0, 5.0
    features = features_of(QUIET, trees=800, depth=1, splits="by_content")
    made = features.module((len(SIZES),))
    made.load_state_dict(learn(features, rows, np.zeros(2100, np.int64)))
    passed = made(torch.from_numpy(rows))[:, 6:].numpy().sum(0)
    assert set(passed) == {100.0, 500.0}
    assert (passed == 500.0).mean() == pytest.approx((50 - 20) / (65 - 20), abs=0.09)  # 5 standard deviations


@pytest.mark.parametrize("noise", [QUIET, 30.0, 1e5])
def test_splits_by_content_follow_from_the_released_counts_alone(noise: float) -> None:
    """So they may be as they are: what is learned is the same for other rows with the same noisy counts."""
    features = features_of(noise, trees=5, depth=3, bins=4, splits="by_content")
    learned = learn(features, rows_of(400), np.zeros(400, np.int64))
    made = features.module((len(SIZES),))
    again = made.buffers_from(learned["counts"], noise * math.sqrt(3))
    assert sorted(again) == ["counts", "looked_up", "table"]
    assert all(torch.equal(again[name], learned[name]) for name in again)
    made.load_state_dict(learned)
    assert bool((made(torch.from_numpy(rows_of(50, 3))) < torch.tensor(made.layout[0])).all())


def test_every_row_is_a_vector_of_norm_one() -> None:
    features = features_of(QUIET, bins=4)
    learned = learn(features, rows_of(400), np.zeros(400, np.int64))
    made = features.module((len(SIZES),))
    made.load_state_dict(learned)
    sizes, weights = made.layout
    codes = made(torch.from_numpy(rows_of(50, 3)))
    assert codes.shape == (50, len(sizes))
    assert bool((codes < torch.tensor(sizes)).all()) and bool((codes >= 0).all())
    norm = math.sqrt(math.fsum(np.float32(weight).item() ** 2 for weight in weights))
    assert 1 - 1e-6 < norm <= 1.0


def test_the_finest_grids_may_be_for_histograms_alone() -> None:
    """Their share of the norm belongs to the number's other grids; a number of a single pair keeps it."""
    columns = (
        HistogramColumn(4, (HistogramPart((2, 3), True),)),
        HistogramColumn(2, (HistogramPart((4, 5), True),)),
        HistogramColumn(1, (HistogramPart((6,), False),)),
    )
    settings = CellHistograms(noise=QUIET, trees=2, depth=1, learns_finest=False)
    made = settings.of_table((3, 3, 9, 9, 5, 5, 4), columns, is_of_number=False).module((7,))
    sizes, weights = made.layout
    assert sizes == (3, 3, 9, 9, 5, 5, 4, 2, 2)
    # Half of the squared norm is for three columns, half for two trees.
    squares = [1 / 12, 1 / 12, 0, 0, 1 / 12, 1 / 12, 1 / 6, 1 / 4, 1 / 4]
    assert [weight**2 for weight in weights] == pytest.approx(squares, abs=1e-6)
    assert made.part_sizes == (17, 9, 4)
    again = HistogramCells((7,), **{key: value for key, value in made.settings.items() if key != "kind"})
    assert again.layout == made.layout


@pytest.mark.parametrize("splits", ["even", "by_content"])
def test_cells_that_are_counted_as_one_are_those_of_a_coarser_grid(splits: Splits) -> None:
    """Numbers, missing ones too, a day of the year, which has no second grid, and an ordered category of five."""
    grids, generator = Grids(30.0), np.random.default_rng(5)
    days, sizes = Grids(372.0, logarithmic=False), (4, 16)
    shares = np.where(generator.random(300) < 0.1, np.nan, generator.random(300) ** 3)
    others = np.array([generator.random(300), generator.integers(0, 5, 300)])

    def released(finest: int, merged: int) -> tuple[TableHistograms, dict[str, torch.Tensor], torch.Tensor]:
        cells = (*sizes, finest)
        category = Categories(5, is_ordered=True)
        codes = [
            *grids.codes(shares, cells),
            *days.codes(others[0], cells),
            *category.codes(others[1]),
        ]
        columns = (
            HistogramColumn(6, (HistogramPart((4, 5), True),)),
            HistogramColumn(3, (HistogramPart((8,), True),)),
            HistogramColumn(5, (HistogramPart((9,), True),)),
        )
        settings = CellHistograms(noise=QUIET, trees=8, depth=3, splits=splits, merged_cells=merged)
        layout = (*grids.sizes(cells), *days.sizes(cells), *category.sizes())
        features = settings.of_table(layout, columns, is_of_number=False)
        rows = np.stack(codes, axis=1).astype(np.float32)
        return features, learn(features, rows, np.zeros(300, np.int64)), torch.from_numpy(rows)

    (coarse, of_coarse, coarse_rows), (fine, of_fine, fine_rows) = released(64, 1), released(256, 4)
    assert fine.releases((14,)) == coarse.releases((14,))
    assert torch.equal(of_fine["counts"], of_coarse["counts"]) and torch.equal(
        of_fine["table"], of_coarse["table"]
    )
    leaves = []
    for features, learned, rows in ((coarse, of_coarse, coarse_rows), (fine, of_fine, fine_rows)):
        made = features.module((14,))
        made.load_state_dict(learned)
        again = HistogramCells((14,), **{key: value for key, value in made.settings.items() if key != "kind"})
        again.load_state_dict(learned)
        assert torch.equal(again(rows), made(rows)) and again.layout == made.layout
        leaves.append(made(rows)[:, 14:])
    assert torch.equal(*leaves)


def test_cells_that_cannot_be_merged_evenly_are_refused() -> None:
    with refused_as("cells_not_divided", asked=3, cells=8):
        CellHistograms(merged_cells=3).of_table(SIZES, COLUMNS, is_of_number=False)


def test_trees_that_split_evenly_are_the_same_for_ever() -> None:
    """The part of each of their tests is in no model's file, only the seed."""
    tests = features_of(QUIET, trees=2, depth=3).module((len(SIZES),)).tests()
    found = [(test.part, round(test.quantile, 6), test.order) for test in tests]
    assert found == [
        (2, 0.757954, ()),
        (1, 0.783799, (0, 2, 1)),
        (0, 0.476597, ()),
        (1, 0.755804, (2, 1, 0)),
        (1, 0.810217, (0, 1, 2)),
        (2, 0.310148, ()),
    ]


def test_a_number_s_centre_and_scale_come_from_the_same_release() -> None:
    labels = np.random.default_rng(0).normal(-0.5, 0.1, 400).clip(-1, 1).astype(np.float32)
    learned = learn(features_of(QUIET, is_of_number=True), rows_of(400), labels)
    assert float(learned["centre"]) == pytest.approx(-0.5, abs=0.03)
    assert 0.8 < float(learned["scale"]) / (1.5 * 0.1) < 1.6


@pytest.mark.parametrize("splits", ["even", "by_content"])
@pytest.mark.parametrize("is_of_number", [False, True])
def test_a_model_s_file_brings_trees_and_scale_back(is_of_number: bool, splits: str) -> None:
    features = features_of(QUIET, is_of_number=is_of_number, splits=splits)
    labels = np.zeros(400, np.float32 if is_of_number else np.int64)
    model, rows = model_of(features), torch.from_numpy(rows_of(20, 5))
    front = model.module.get_submodule("features")
    assert isinstance(front, HistogramCells)
    front.load_state_dict(learn(features, rows_of(400), labels))
    facts = {
        "model": "additive",
        "input_shape": [len(SIZES)],
        "classes": [] if is_of_number else ["no", "yes"],
        "outputs": 1 if is_of_number else 2,
        "predicts": "number" if is_of_number else "class",
        "cells": {"sizes": SIZES, "weights": [0.1] * len(SIZES)},
        "front": front.settings,
    }
    again, published = (
        architecture(ModelFacts.model_validate_json(json.dumps(facts))),
        model.published_tensors(torch.randn(model.parameter_count)),
    )
    expected = model.scores(model.outputs(published, rows))
    assert torch.equal(again.scores(again.outputs(published, rows)), expected)


def test_records_without_cells_are_refused() -> None:
    with refused_as("no_cells"):
        CellHistograms().releases((3,))

"""What is counted of private held-out records: one person's part of it, whoever else is held out."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from algorithms.models import Model
from algorithms.models.objectives import cross_entropy
from data.description import DatasetInfo
from data.prepared import HeldOut
from tasks.calibrate import histogram_of
from tasks.evaluation_counts import count_held_out, passes_alone
from tasks.tuning.scoring import score_statistic
from tests.support.even_odds import WIDTH, Asking, EvenOdds
from tests.support.soak import soak_but
from tests.support.synthetic_run import description


@pytest.fixture
def two_classes() -> DatasetInfo:
    return replace(description(), input_shape=(WIDTH,), classes=("no", "yes"), holdout="private")


def counts_of(module: nn.Module, features: Any, info: DatasetInfo) -> Any:
    model = Model("tried", module, cross_entropy, scores=lambda outputs: outputs)
    labels = np.arange(len(features)) % 2
    held_out = HeldOut(info, features.astype(np.float32), labels)
    return count_held_out(histogram_of(info.label_type), (model, dict(module.named_parameters())), held_out)


@pytest.mark.parametrize(
    ("make", "count"),
    soak_but(
        [(EvenOdds, 63), (Asking, 100)],
        [(make, count) for make in (EvenOdds, Asking) for count in (63, 64, 100)],
    ),
)
def test_one_more_record_moves_its_own_cells_alone(make: Any, count: int, two_classes: DatasetInfo) -> None:
    torch.manual_seed(0)
    module, draw = make(), np.random.default_rng(count)
    features = draw.normal(size=(count, WIDTH))
    loud = np.full((2, WIDTH), 100.0)  # an even number, so that the others keep their labels
    alone = counts_of(module, features, two_classes)
    with_more = counts_of(module, np.concatenate([loud, features]), two_classes)
    assert np.array_equal(with_more - alone, counts_of(module, loud, two_classes))


def test_counting_takes_no_more_memory_for_many_records(two_classes: DatasetInfo) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 2))
    model = Model("linear", module, cross_entropy, scores=lambda outputs: outputs)
    spec, parameters, peaks = histogram_of(two_classes.label_type), dict(module.named_parameters()), []
    for count in (640, 640, 64_000):  # the first imports
        held_out = HeldOut(two_classes, np.zeros((count, WIDTH), np.float32), np.arange(count) % 2)
        tracemalloc.start()
        count_held_out(spec, (model, parameters), held_out)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + 64_000  # a byte of each


def test_in_a_comparison_a_record_moves_its_own_cells_alone(two_classes: DatasetInfo) -> None:
    """Also where only one of the two models can take many records at once."""
    torch.manual_seed(0)
    draw = np.random.default_rng(1)
    features, loud = draw.normal(size=(100, WIDTH)), np.full((2, WIDTH), 100.0)
    spec = histogram_of(two_classes.label_type, compared=True)
    models = [
        Model("tried", make(), cross_entropy, scores=lambda outputs: outputs) for make in (EvenOdds, Asking)
    ]
    trained, other = ((model, dict(model.module.named_parameters())) for model in models)

    def cells_of(rows: Any) -> Any:
        held_out = HeldOut(two_classes, rows.astype(np.float32), np.arange(len(rows)) % 2)
        return count_held_out(spec, trained, held_out, other)

    both = cells_of(np.concatenate([loud, features]))
    assert np.allclose(both - cells_of(features), cells_of(loud), atol=1e-12)
    assert np.abs(spec.comparison_cells(both)).min() > 0


@pytest.mark.parametrize("make", [EvenOdds, Asking])
def test_a_score_of_a_search_does_not_depend_on_other_records(make: Any, two_classes: DatasetInfo) -> None:
    """In a pass of the barrier, with and without two others in front."""
    torch.manual_seed(0)
    module = make()
    model = Model("tried", module, cross_entropy, scores=lambda outputs: outputs)
    size, *_ = passes_alone(model, two_classes)
    score = score_statistic(two_classes, model, dict(module.named_parameters()), size=size)
    features = torch.randn(128, WIDTH)
    others = torch.cat([torch.full((2, WIDTH), 100.0), features])[:128]
    labels = torch.arange(128) % 2
    alone, among = (torch.func.vmap(score)(some, labels) for some in (features, others))
    assert torch.equal(among[2:], alone[:-2]) and 0 < int(alone.sum()) < 128

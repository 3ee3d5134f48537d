"""Diagnostics: what is measured of a gradient, that measuring changes nothing, and that no algorithm can reach it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from algorithms.gradients import L2, Affine, Clipping, Normalised, PerLayer, Unclipped
from algorithms.privacy.barrier.trace import Diagnostics, Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian, NoNoise
from algorithms.privacy.mechanisms.sampling import FullBatch, Importance, Poisson
from tests.support.barriers import barrier
from tests.support.bench import MadeUp, made_up, small_model

POINT = 0.1 * torch.ones(small_model().parameter_count)
WIDTH = len(POINT)
SHIFTED = Affine(1.0, torch.full((WIDTH,), 0.01), torch.linspace(0.5, 2.0, WIDTH))


def measured(
    records: MadeUp, clipping: Clipping, *, rate: float = 0.5, noise: float = 1.0
) -> tuple[Any, Any]:
    """The one row of a gradient and the answer, whose divisor is 10."""
    diagnostics = Diagnostics()
    held = barrier(records, diagnostics=diagnostics)
    drawn = Poisson(rate) if rate < 1 else FullBatch()
    added = Gaussian(noise) if noise else NoNoise()
    answer = held.gradient(POINT, sampling=drawn, clipping=clipping, noise=added, divisor=10.0)
    (row,) = diagnostics.rows
    return row, answer.double()


def gradients(records: MadeUp) -> torch.Tensor:
    """The gradient of each record, [n, d]."""
    model = small_model()
    rows = []
    for features, label in zip(records.features, records.labels, strict=True):
        point = POINT.clone().requires_grad_()
        inputs, labels = torch.from_numpy(features[None]), torch.tensor([label])
        loss = model.losses(model.outputs(model.by_name(point), inputs), labels).sum()
        rows.append(torch.autograd.grad(loss, point)[0].double())
    return torch.stack(rows)


@pytest.mark.parametrize("clipping", [L2(0.5), SHIFTED, PerLayer((0.5,)), Unclipped()])
def test_the_error_is_the_distance_to_the_exact_gradient_of_the_sample(clipping: Clipping) -> None:
    records = made_up()
    row, answer = measured(records, clipping, noise=0.0 if isinstance(clipping, Unclipped) else 1.0)
    coins = seeded_generator(5).stream(0).of_sample().coins(len(records.labels), 0.5)
    each = gradients(records)[torch.from_numpy(coins)]
    exact, estimate = each.sum(dim=0) / 10, answer
    if isinstance(clipping, Affine):
        estimate = clipping.shift + clipping.scale * answer
    moved = (each - clipping.shift) / clipping.scale if isinstance(clipping, Affine) else each
    assert row.exact == pytest.approx(float(exact.norm()), rel=1e-5)
    assert row.error == pytest.approx(float((estimate - exact).norm()), rel=1e-4, abs=1e-6)
    beyond = moved.norm(dim=1) > clipping.sensitivity
    assert row.clipped == pytest.approx(float(beyond.double().mean()))
    assert row.clipped > 0 or isinstance(clipping, Unclipped)


def test_the_noise_is_measured_without_the_clipping() -> None:
    row, _ = measured(made_up(), L2(0.5), noise=1.0)
    assert row.noise == pytest.approx(0.5 / 10 * math.sqrt(WIDTH), rel=0.5)
    silent, _ = measured(made_up(), L2(1e6), noise=0.0, rate=1.0)
    assert silent.noise == 0.0
    assert silent.error == pytest.approx(0.0, abs=1e-6)
    assert silent.clipped == 0.0


def test_noise_of_an_affine_clipping_is_in_units_of_the_gradient() -> None:
    row, answer = measured(made_up(0), SHIFTED)
    assert row.noise == pytest.approx(float((SHIFTED.scale * answer).norm()), rel=1e-5)
    assert row.error == pytest.approx(float((SHIFTED.shift + SHIFTED.scale * answer).norm()), rel=1e-5)
    assert row.exact == 0.0
    assert math.isnan(row.clipped)


def test_a_record_without_a_finite_gradient_counts_as_clipped_and_adds_nothing() -> None:
    records = made_up(4)
    features = records.features.copy()
    features[0] = np.inf
    row, _ = measured(replace(records, features=features), L2(1e6), rate=1.0)
    rest = MadeUp(records.features[1:], records.labels[1:])
    assert row.clipped == 0.25
    assert row.exact == pytest.approx(float(gradients(rest).sum(dim=0).norm()) / 10, rel=1e-5)


def test_measuring_changes_no_answer_and_has_the_places_of_the_trace(tmp_path: Path) -> None:
    diagnostics, trace = Diagnostics(), Trace()
    watched, plain = barrier(made_up(), diagnostics=diagnostics, trace=trace), barrier(made_up())
    for step in range(3):
        trace.step = step
        answers = []
        for held in (watched, plain.with_model(small_model())):
            held.total(lambda features, label: torch.ones(1), bound=L2(1.0), noise=Gaussian(1.0))
            asked: dict[str, Any] = {"clipping": L2(0.5), "noise": Gaussian(1.0), "divisor": 10.0}
            answers.append(held.gradient(POINT, sampling=Poisson(0.5), **asked))
        assert torch.equal(*answers)
    diagnostics.write(tmp_path / "diagnostics.parquet")
    table = pd.read_parquet(tmp_path / "diagnostics.parquet")
    assert list(table["release"]) == [1, 3, 5]
    assert list(table["step"]) == [0, 1, 2]


def test_another_model_of_the_same_records_is_measured_too() -> None:
    diagnostics = Diagnostics()
    again = barrier(made_up(), diagnostics=diagnostics).with_model(small_model())
    again.gradient(POINT, sampling=Poisson(0.5), clipping=L2(0.5), noise=Gaussian(1.0), divisor=10.0)
    assert len(diagnostics.rows) == 1


def test_importance_samples_have_no_row_and_no_answer_leads_to_the_diagnostics() -> None:
    diagnostics = Diagnostics()
    held = barrier(made_up(), diagnostics=diagnostics)
    sampling = Importance(0.1, oversampling=1.0, floor=0.01)
    held.gradient(POINT, sampling=sampling, clipping=Normalised(1.0), noise=Gaussian(1.0), divisor=10.0)
    assert diagnostics.rows == []
    assert not [name for name in dir(held) if "diagnos" in name and not name.startswith("_Barrier__")]


def test_nothing_measured_is_an_empty_table(tmp_path: Path) -> None:
    Diagnostics().write(tmp_path / "diagnostics.parquet")
    table = pd.read_parquet(tmp_path / "diagnostics.parquet")
    assert list(table.columns) == ["release", "step", "error", "noise", "exact", "clipped"]
    assert table.empty

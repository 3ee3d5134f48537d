"""Every method on the simulated accelerator: it ends where the CPU does, and is resumed bit for bit."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.cell_histograms import CellHistograms
from algorithms.core.facts_of_models import intercepts_of, number_of
from algorithms.core.learned_features import FeatureLearner
from algorithms.core.method import Algorithm
from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.plan import Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.features import Centred
from algorithms.histogram_columns import HistogramColumn, HistogramPart
from algorithms.methods import CATALOGUE
from algorithms.methods.dp_sgd import DPSGD
from algorithms.models import Model, build
from algorithms.models.cells import behind_cells
from algorithms.models.feature_transforms import in_front
from algorithms.privacy.accounting import Budget
from tests.support import bench
from tests.support.bench import MadeUp, OneLook, StoppedError

CPU = torch.device("cpu")
MODEL = bench.small_model("logistic", classes=2)


def asked(name: str, **settings: Any) -> Algorithm[Any]:
    """A method of two or three steps, with Adam where it takes an optimizer."""
    fields = vars(CATALOGUE[name])["__dataclass_fields__"]
    adam = {"optimizer": "adam", "averaging": "ema", "momentum": 0.9, "learning_rate": 0.1}
    settings = {"steps": 3, "update": adam} | settings
    return bench.algorithm(name, **{key: value for key, value in settings.items() if key in fields})


def trained(
    method: Algorithm[Any], device: torch.device, folder: Path, *, stop_after: int | None = None
) -> Tensor:
    plan = bench.planned(method, MODEL, accountant="rdp")
    state, _, _ = bench.trained(
        method,
        plan,
        MODEL,
        folder,
        records=lambda: bench.made_up(classes=2),
        compute=OneLook(device, number=bench.RECORDS),
        stop_after=stop_after,
    )
    return method.released(state)


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_a_method_ends_where_the_cpu_does_and_is_resumed_bit_for_bit(
    name: str, sim: torch.device, tmp_path: Path
) -> None:
    method = asked(name)
    expected = trained(method, CPU, tmp_path / "cpu")
    released = trained(method, sim, tmp_path / "sim")
    assert released.device.type == "sim"
    torch.testing.assert_close(released.cpu(), expected, rtol=0, atol=1e-6)
    with pytest.raises(StoppedError):
        trained(method, sim, tmp_path / "resumed", stop_after=1)
    assert torch.equal(trained(method, sim, tmp_path / "resumed").cpu(), released.cpu())


def head() -> tuple[FeatureLearner, Model]:
    features = Centred(mean_noise=5.0, moment_noise=5.0)
    return features, in_front(
        features.module((6,)), build("unit_linear", input_shape=(6,), classes=3, seed=0)
    )


def table() -> tuple[FeatureLearner, Model]:
    """Of a number on two grids, a category, and a cell that all rows share, by which a number is predicted."""
    columns = (
        HistogramColumn(2, (HistogramPart((0, 1), True),)),
        HistogramColumn(1, (HistogramPart((2,), False),)),
    )
    settings, sizes = (
        CellHistograms(noise=2.0, trees=3, depth=2, splits="by_content", mean_noise=3.0),
        (7, 7, 6, 2, 2, 1),
    )
    features = settings.of_table(sizes, columns, is_of_number=True, constant_share=0.1)
    made = features.module((len(sizes),))
    after, weights = made.layout
    linear = build("additive", input_shape=(sum(after),), classes=1, seed=0, predicts="number")
    return features, in_front(made, behind_cells(linear, after, weights))


@pytest.mark.parametrize("made", [head, table])
def test_learned_features_and_a_shrinkage_end_where_the_cpu_does(
    made: Any, sim: torch.device, tmp_path: Path
) -> None:
    """Killed after its counts, and before its last release, it is resumed bit for bit."""
    draw, (features, model) = np.random.default_rng(0), made()
    rows = draw.integers(0, 6, (300, 6)).astype(np.float32)
    labels = rows[:, 2].astype(np.int64) // 2 if made is head else rows[:, 2] / 2.5 - 1.0
    records = MadeUp(rows, labels)
    records.features[0] = math.nan
    update = OptimizerConfig(learning_rate=1.0, momentum=0.9, noise_limit=2.0)
    intercepts, number = intercepts_of(model, 3), number_of(model)
    method = DPSGD(
        steps=3,
        expected_batch_size=100,
        shrink_share=0.1,
        error_share=None if number is None else 0.1,
        update=update,
    )
    facts = PlanningFacts(300, model.parameter_count, 1, 3, intercepts=intercepts, number=number)
    before = tuple((release.event(), 1) for release in features.releases((6,)))
    plan = method.plan(Target(Budget(200.0, 1e-3), "rdp", prior_events=before), facts)

    def run(device: torch.device, folder: str, *, stop_after: int | None = None) -> Any:
        compute = OneLook(device, number=300)
        return bench.trained(
            method,
            plan,
            model,
            tmp_path / folder,
            records=lambda: records,
            features=features,
            compute=compute,
            stop_after=stop_after,
        ).state

    expected, found = run(CPU, "cpu"), run(sim, "sim")
    assert found.parameters.device.type == "sim" and float(expected.kept) > 0.0
    for name in ("start", "clip_shares", "gain", "kept"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.parameters.cpu(), expected.parameters, rtol=1e-4, atol=1e-4)
    for step in (1, 3):
        with pytest.raises(StoppedError):
            run(sim, f"resumed {step}", stop_after=step)
        assert torch.equal(run(sim, f"resumed {step}").parameters.cpu(), found.parameters.cpu())

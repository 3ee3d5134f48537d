"""Models of rows that are encoded as cells: the same sums as over the vectors, for every way to compute them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from algorithms.errors import ModelRefusedError
from algorithms.gradients import L2, Engine, LinearRecords, LineCandidates, linear_layer
from algorithms.model_facts import ModelFacts
from algorithms.models import Model, build
from algorithms.models.cells import CellVectors, behind_cells
from algorithms.models.saved import architecture, load_start
from tests.support.refusals import refused_as

SIZES, WEIGHTS = (3, 5, 2, 8), (0.5, 0.5, 0.1, 0.7)
TOTAL = sum(SIZES)
TARGETS = [("class", 2), ("class", 4), ("number", 1), ("labels", 3)]


def additive(predicts: str, outputs: int) -> Model:
    model = build("additive", input_shape=(TOTAL,), classes=outputs, seed=0, predicts=predicts)
    return behind_cells(model, SIZES, WEIGHTS)


def rows_of(count: int) -> torch.Tensor:
    draw = np.random.default_rng(0)
    return torch.from_numpy(np.stack([draw.integers(0, size, count) for size in SIZES], 1).astype(np.float32))


def labels_of(predicts: str, outputs: int, count: int) -> torch.Tensor:
    draw = np.random.default_rng(1)
    if predicts == "class":
        return torch.from_numpy(draw.integers(0, outputs, count))
    shape = (count,) if predicts == "number" else (count, outputs)
    return torch.from_numpy(draw.integers(0, 2, shape).astype(np.float32))


def clipped_by_index(
    model: Model, point: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor, bound: float
) -> torch.Tensor:
    """The clipped sum by its definition: each record adds its error, times a weight, to the cells that it activates."""
    outputs = len(point) // TOTAL
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    places = rows.long() + torch.tensor([0, *np.cumsum(SIZES[:-1])])
    total = torch.zeros(TOTAL, outputs, dtype=torch.float64)
    for active, label in zip(places, labels, strict=True):
        made = (
            (weights[:, None] * point.double().view(outputs, TOTAL).T[active]).sum(0)[None].requires_grad_()
        )
        (error,) = torch.autograd.grad(model.losses(made, label[None]).sum(), made)
        added = weights[:, None] * error
        total.index_add_(0, active, added * min(1.0, bound / float(added.norm())))
    return total.T.reshape(-1)


@pytest.mark.parametrize(("predicts", "outputs"), TARGETS)
@pytest.mark.parametrize("bound", [0.05, 10.0])
def test_the_engine_sums_what_each_record_adds_to_its_cells(
    predicts: str, outputs: int, bound: float
) -> None:
    model, rows = additive(predicts, outputs), rows_of(70)
    labels = labels_of(predicts, outputs, 70)
    point = torch.randn(model.parameter_count, generator=torch.Generator().manual_seed(2))
    expected = clipped_by_index(model, point, rows, labels, bound)
    engine = Engine(model, input_shape=(len(SIZES),))
    assert torch.allclose(engine.clipped_sum(point, rows, labels, L2(bound)), expected, rtol=1e-5, atol=1e-6)
    closed = LinearRecords(model, rows, labels)
    assert torch.allclose(closed.clipped_sum(point, L2(bound)), expected, rtol=1e-5, atol=1e-6)
    line = LineCandidates(point, point, (0.5,))
    losses = model.losses(model.outputs(model.by_name(point / 2), rows), labels).clamp(0, 1).double().sum()
    assert float(closed.losses_on(line, bound=1.0)) == pytest.approx(float(losses), rel=1e-5)


@pytest.mark.parametrize(("predicts", "outputs"), TARGETS)
def test_a_pass_writes_no_vector_of_all_cells(
    predicts: str, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pass takes goes with a row's own cells, of which a wide table has far fewer than there are in all."""
    model, rows, labels = additive(predicts, outputs), rows_of(9), labels_of(predicts, outputs, 9)
    point = torch.randn(model.parameter_count, generator=torch.Generator().manual_seed(3))
    vectors = CellVectors(SIZES, WEIGHTS)(rows)
    by_vectors = model.module.get_submodule("model")(vectors)  # of the start, which is zero
    assert torch.equal(model.outputs({}, rows), by_vectors)

    def writes(self: CellVectors, rows: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a vector of all cells")

    monkeypatch.setattr(CellVectors, "forward", writes)
    engine = Engine(model, input_shape=(len(SIZES),))
    assert engine.clipped_sum(point, rows, labels, L2(1.0)).any()
    made = model.outputs(model.by_name(point), rows).double()
    exact = vectors.double() @ point.double().view(-1, TOTAL).T
    assert torch.allclose(made, exact, atol=1e-6)


def test_a_layer_with_hooks_gets_the_vectors() -> None:
    model, rows = additive("class", 2), rows_of(9)
    seen = []
    layer = linear_layer(model.module)
    assert layer is not None
    layer.register_forward_hook(lambda _layer, inputs, _outputs: seen.append(inputs[0]))
    model.outputs({}, rows)
    assert torch.equal(seen[0], CellVectors(SIZES, WEIGHTS)(rows))


def test_two_classes_have_one_output_and_no_model_has_a_bias() -> None:
    for (predicts, outputs), width in zip(TARGETS, (1, 4, 1, 3), strict=True):
        layer = linear_layer(additive(predicts, outputs).module)
        assert layer is not None and layer.bias is None and layer.out_features == width
        assert not additive(predicts, outputs).initial_parameters().any()


def test_a_number_that_is_no_cell_disturbs_no_other_record() -> None:
    odd = torch.tensor([[1e9, -5.0, float("nan"), float("inf")], [1.0, 2.0, 0.0, 7.0]])
    vectors = CellVectors(SIZES, WEIGHTS)(odd)
    assert torch.equal(vectors[0].nonzero()[:, 0], torch.tensor([2, 3, 8, 17]))
    assert torch.equal(vectors[1], CellVectors(SIZES, WEIGHTS)(odd[1:])[0])


def test_the_map_comes_back_from_a_file_and_a_release_is_a_start(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = additive("class", 4)
    facts = {
        "model": "additive", "input_shape": [len(SIZES)], "classes": list("abcd"), "outputs": 4, "predicts": "class",
        "cells": {"sizes": SIZES, "weights": WEIGHTS},
    }  # fmt: skip
    again, point = (
        architecture(ModelFacts.model_validate_json(json.dumps(facts))),
        torch.randn(model.parameter_count),
    )
    assert torch.equal(
        again.outputs(again.by_name(point), rows_of(9)), model.outputs(model.by_name(point), rows_of(9))
    )
    save_file(model.published_tensors(point), tmp_path / "model.safetensors")
    inner = build("additive", input_shape=(TOTAL,), classes=4, seed=0)
    assert torch.equal(load_start(inner, tmp_path / "model.safetensors").initial_parameters(), point)


def test_bfloat16_is_refused() -> None:
    model = build("additive", input_shape=(TOTAL,), classes=2, seed=0, precision="bfloat16")
    with refused_as("cells_in_bfloat16", ModelRefusedError):
        behind_cells(model, SIZES, WEIGHTS)

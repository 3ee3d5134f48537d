"""The group `model` of params.yaml, from the plan to the evaluation of what was published."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from algorithms.models import ModelRefusedError, build
from algorithms.models.saved import adapt
from data import DatasetInfo
from data.card import data_card
from data.prepared import load
from tasks import calibrate, evaluate, model_building
from tasks.comparing.definition import Problem, Trial
from tasks.config import params
from tasks.config.params import ParamsRefusedError
from tests.support.refusals import names_in, refused_as
from tests.support.workspace import PARAMS, Workspace, prepared_digits, workspace

__all__ = ["prepared_digits", "workspace"]  # fixtures

HIDDEN = {"hidden": 8}
SHAPE = (1, 8, 8)


def settings_of(**model: Any) -> params.Params:
    document = {key: PARAMS[key] for key in ("privacy", "algorithm")} | {"model": {"name": "mlp"} | model}
    return params.parse(document, reads=calibrate.READS)


def start_file(path: Path, seed: int = 5) -> Path:
    other = build("mlp", input_shape=SHAPE, classes=10, seed=seed, settings=HIDDEN)
    save_file(other.published_tensors(other.initial_parameters()), path)
    return path


@pytest.fixture
def info(prepared_digits: Path) -> DatasetInfo:
    return DatasetInfo.from_json((prepared_digits / "public.json").read_text())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("settings", ["hidden"]),
        ("start", ""),
        ("start", 3),
        ("reinitialize", "fc1"),
        ("freeze", [""]),
        ("freeze", [1]),
        ("augmentations", 0),
        ("augmentations", 2.0),
        ("freezes", []),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_path(key: str, value: object) -> None:
    with refused_as("bad_keys", ParamsRefusedError) as refusal:
        settings_of(**{key: value})
    assert all(named.startswith(f"model.{key}") for named in names_in(refusal, "keys"))


def test_a_plan_holds_the_file_s_digest_so_that_another_file_is_another_plan(
    info: DatasetInfo, tmp_path: Path
) -> None:
    path = start_file(tmp_path / "start.safetensors")
    settings = settings_of(settings=HIDDEN, start=str(path), freeze=["[0-2]"])
    document = calibrate.calibrate(settings, info)
    calibrate.check_plan(document, settings, info)
    assert list(document.model.files) == ["start"]
    assert document.model.parameters == 8 * 10 + 10
    assert [note.split()[0] for note in document.model.notes] == ["The", "Not"]
    start_file(path, seed=6)
    with refused_as("stale_plan", differing="model"):
        calibrate.check_plan(document, settings, info)


def test_what_was_trained_from_a_start_with_frozen_layers_is_evaluated_without_the_files(
    workspace: Workspace, tmp_path: Path
) -> None:
    path = start_file(tmp_path / "start.safetensors")
    workspace.set("model", name="mlp", settings=HIDDEN, start=str(path), freeze=["1"], augmentations=2)
    workspace.train()
    start = load_file(path)
    path.unlink()
    model, parameters = evaluate.load_model(workspace.root / "artifacts/model.safetensors")
    assert parameters.keys() == start.keys()
    for name, tensor in parameters.items():
        assert torch.equal(tensor, start[name]) == name.startswith("1.")
    data = load(workspace.root / "datasets/prepared")
    found = evaluate.evaluate(model, parameters, data)
    inputs = torch.from_numpy(np.array(data.test_features)).flatten(start_dim=1)
    hidden = torch.relu(inputs @ parameters["1.weight"].T + parameters["1.bias"])
    scores = hidden @ parameters["3.weight"].T + parameters["3.bias"]
    assert (found.predicted == scores.argmax(dim=1).numpy()).all()


def test_a_file_that_lacks_a_parameter_is_not_evaluated(tmp_path: Path) -> None:
    path = start_file(tmp_path / "model.safetensors")
    facts = {
        "model": "mlp",
        "model_settings": HIDDEN,
        "input_shape": SHAPE,
        "classes": [str(i) for i in range(10)],
    }
    tensors = load_file(path)
    del tensors["1.bias"]
    save_file(tensors, path, metadata={"epsilonflow": json.dumps(facts | {"features": {"name": "none"}})})
    with pytest.raises(ModelRefusedError, match=r"lacks 1\.bias"):
        evaluate.load_model(path)


def cell_of(**changes: Any) -> Trial:
    card = data_card("digits")
    cell = Trial(
        card.name, "0", "mlp", "a", "a", "", {"name": "dp_sgd"}, "pld", 1.0, 1e-5, 0, None, {"curves": False}
    )
    return replace(cell, **changes)


def test_digest_of_a_cell_changes_only_with_the_models_settings_and_files() -> None:
    digests = {
        cell_of().digest,
        cell_of(model_settings={"settings": HIDDEN}).digest,
        cell_of(model_settings={"settings": HIDDEN, "files": {"start": "a"}}).digest,
        cell_of(model_settings={"settings": HIDDEN, "files": {"start": "b"}}).digest,
    }
    assert len(digests) == 4
    assert cell_of().digest == "6bb1ab81da0c8c5aef02110e"
    group = cell_of(model_settings={"settings": HIDDEN, "files": {"start": "a"}}).model_group
    assert group == {"name": "mlp", "seed": 0, "settings": HIDDEN}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": 3}, "unknown key model_settings.hidden, the keys are adapter, augmentations, checkpoint"),
        ({"seed": 3}, "unknown key model_settings.seed"),
        ({"augmentations": 0}, "model_settings.augmentations is 0"),
    ],
)
def test_impossible_settings_of_a_comparison_s_model_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(dataset="digits", model="mlp", model_settings=settings)


def test_a_start_on_several_views_is_the_same_start(info: DatasetInfo) -> None:
    chosen = settings_of(settings=HIDDEN, augmentations=3).model
    model = model_building.model_of(chosen, info)
    plain = adapt(model_building.model_of(settings_of(settings=HIDDEN).model, info), input_shape=SHAPE)
    assert torch.equal(model.initial_parameters(), plain.initial_parameters())

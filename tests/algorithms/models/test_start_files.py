"""Starts from files, layers that are not trained, and what is published of them."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from algorithms.gradients import Engine
from algorithms.models import Model, ModelRefusedError
from algorithms.models.feature_transforms import front, in_front
from algorithms.models.saved import adapt, load
from tests.algorithms.models.forms import FORMS, form_of, moved, records
from tests.support.gradients import naive
from tests.support.refusals import refused, refused_as

SHAPE = FORMS["conv_fc"].shape
CONVOLUTIONS = ["conv1", "conv2"]
BEYOND_32_BITS = torch.full((3,), 1e300, dtype=torch.float64)


def stored(path: Path, change: Callable[[dict[str, Tensor]], object] = lambda tensors: None) -> Path:
    """A file with the parameters of another seed, changed."""
    other = form_of("conv_fc", seed=5)
    tensors = {name: t.clone() for name, t in other.published_tensors(other.initial_parameters()).items()}
    change(tensors)
    save_file(tensors, path)
    return path


def test_a_start_is_that_of_its_seed_whatever_other_threads_draw() -> None:
    """A search makes the models of its trials in threads."""
    seeds = [0, 1] * 20
    alone = [form_of("conv_fc", seed=seed).initial_parameters() for seed in (0, 1)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda seed: form_of("conv_fc", seed=seed).initial_parameters(), seeds))
    assert all(torch.equal(start, alone[seed]) for start, seed in zip(found, seeds, strict=True))


def test_a_start_is_the_file_s_and_is_stated(tmp_path: Path) -> None:
    path = stored(tmp_path / "start.safetensors")
    model = adapt(form_of("conv_fc"), input_shape=SHAPE, start=path)
    assert torch.equal(model.initial_parameters(), form_of("conv_fc", seed=5).initial_parameters())
    assert model.notes[0].startswith("The start is the file start.safetensors (SHA-256 ")


def test_a_fresh_layer_keeps_its_random_start_whatever_the_file_has(tmp_path: Path) -> None:
    def other_head(tensors: dict[str, Tensor]) -> None:
        tensors["fc3.weight"] = torch.zeros(100, 384)  # of 100 classes
        del tensors["fc3.bias"]

    path = stored(tmp_path / "start.safetensors", other_head)
    model = adapt(form_of("conv_fc"), input_shape=SHAPE, start=path, reinitialize=["fc3"])
    own, other = form_of("conv_fc"), form_of("conv_fc", seed=5)
    for name, value in model.by_name(model.initial_parameters()).items():
        origin = own if name.startswith("fc3") else other
        assert torch.equal(value, origin.by_name(origin.initial_parameters())[name])


def test_a_release_with_a_learned_map_in_front_starts_the_model_behind_it(tmp_path: Path) -> None:
    shape = FORMS["scatter_linear"].shape
    whole = in_front(front({"kind": "whitening", "groups": 3}, shape), form_of("scatter_linear", seed=5))
    at = torch.linspace(-1, 1, whole.parameter_count)
    path = tmp_path / "start.safetensors"
    save_file(whole.published_tensors(at), path)
    model = adapt(form_of("scatter_linear"), input_shape=shape, start=path)
    assert torch.equal(model.initial_parameters(), at)
    assert "learned map in front of it there is not taken over" in model.notes[0]


def test_an_embedding_that_is_not_trained_is_in_the_file_too(tmp_path: Path) -> None:
    first = form_of("bilstm", seed=5)
    path = tmp_path / "start.safetensors"
    save_file(first.published_tensors(first.initial_parameters()), path)
    model = adapt(form_of("bilstm"), input_shape=FORMS["bilstm"].shape, start=path)
    table = "embedding.weight"
    assert torch.equal(model.module.get_parameter(table), first.module.get_parameter(table))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("fc1.bias"), "lacks fc1.bias"),
        (lambda tensors: tensors.update({"fc3.bias": BEYOND_32_BITS}), "fc3.bias .* not finite"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), "has, unlike the model, extra"),
        (lambda tensors: tensors.update({"fc3.bias": torch.zeros(4)}), r"fc3.bias is numbers of shape \[4\]"),
        (lambda tensors: tensors.update({"fc3.bias": torch.zeros(3, dtype=torch.int64)}), "whole numbers"),
        (lambda tensors: tensors["conv2.weight"].view(-1)[7:8].fill_(torch.nan), "conv2.weight .* finite"),
        (lambda tensors: tensors["conv2.weight"].view(-1)[7:8].fill_(torch.inf), "conv2.weight .* finite"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    path = stored(tmp_path / "start.safetensors", change)
    with refused(message, ModelRefusedError):
        adapt(form_of("conv_fc"), input_shape=SHAPE, start=path)


def test_a_damaged_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    path = stored(tmp_path / "start.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    for place in (path, tmp_path / "nothing.safetensors"):
        with refused_as("start_unreadable", ModelRefusedError):
            adapt(form_of("conv_fc"), input_shape=SHAPE, start=place)


def test_fresh_layers_without_a_start_or_without_a_name_are_refused(tmp_path: Path) -> None:
    with refused_as("reinitialize_without_start", ModelRefusedError):
        adapt(form_of("conv_fc"), input_shape=SHAPE, reinitialize=["fc3"])
    path = stored(tmp_path / "start.safetensors")
    with refused_as("layer_unknown", ModelRefusedError, prefix="fc4", model="conv_fc") as refusal:
        adapt(form_of("conv_fc"), input_shape=SHAPE, start=path, reinitialize=["fc4"])
    assert str(refusal.value.fields["layers"]).startswith("conv1, ")


def test_frozen_layers_are_not_trained_and_the_rest_has_the_same_gradient() -> None:
    whole, part = form_of("conv_fc"), adapt(form_of("conv_fc"), input_shape=SHAPE, freeze=CONVOLUTIONS)
    assert list(part.shapes) == [name for name in whole.shapes if name.startswith("fc")]
    assert part.notes == ("Not trained: conv1, conv2.",)
    inputs, labels = records(FORMS["conv_fc"])
    engine = Engine(part, input_shape=SHAPE)
    found = engine.contributions(part.initial_parameters(), inputs, labels).weighted_sum(torch.ones(5))
    rows = naive.loop(whole, whole.initial_parameters(), inputs, labels).sum(dim=0)
    expected = torch.cat([rows[whole.slices[name]] for name in part.shapes])
    assert naive.relative(found, expected) < 1e-5


def test_one_parameter_can_be_frozen_and_a_layer_of_a_similar_name_is_not() -> None:
    model = adapt(form_of("relu_cnn"), input_shape=FORMS["relu_cnn"].shape, freeze=["0.bias"])
    assert next(iter(model.shapes)) == "0.weight" and "0.bias" not in model.shapes
    with refused_as("layer_unknown", ModelRefusedError, setting="network.freeze", prefix="conv"):
        adapt(form_of("conv_fc"), input_shape=SHAPE, freeze=["conv"])


def test_freezing_everything_is_refused() -> None:
    with refused_as("all_frozen", ModelRefusedError):
        adapt(form_of("mlp"), input_shape=(6,), freeze=["1", "3"])


def test_what_is_published_makes_the_same_answers_in_a_model_of_another_seed(tmp_path: Path) -> None:
    path = stored(tmp_path / "start.safetensors")
    model = adapt(form_of("conv_fc"), input_shape=SHAPE, start=path, freeze=CONVOLUTIONS)
    point = moved(model)
    published = model.published_tensors(point)
    assert published.keys() == form_of("conv_fc").shapes.keys()
    inputs, _ = records(FORMS["conv_fc"])
    again: Model = form_of("conv_fc", seed=9)
    torch.testing.assert_close(again.outputs(published, inputs), model.outputs(model.by_name(point), inputs))


@pytest.mark.parametrize("lacks", ["model", "input_shape", "classes"])
def test_a_file_that_lacks_a_fact_is_no_model(lacks: str, tmp_path: Path) -> None:
    facts = {"model": "logistic", "input_shape": [3], "classes": ["no", "yes"]}
    del facts[lacks]
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors", {"epsilonflow": json.dumps(facts)})
    with pytest.raises(ModelRefusedError, match="is not a model that epsilonflow trained"):
        load(tmp_path / "model.safetensors")


@pytest.mark.parametrize("temperature", [0, -1.5, "2", True, [2.0], float("nan"), float("inf")])
def test_a_file_whose_scores_are_divided_by_no_positive_number_is_no_model(
    temperature: object, tmp_path: Path
) -> None:
    facts = {"model": "logistic", "input_shape": [3], "classes": ["no", "yes"], "temperature": temperature}
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors", {"epsilonflow": json.dumps(facts)})
    with pytest.raises(ModelRefusedError, match="is not a model that epsilonflow trained"):
        load(tmp_path / "model.safetensors")

"""Models of timm and Hugging Face, which are extras: made, refused, started from files, adapted, and read again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from algorithms.gradients import L2, Engine
from algorithms.models import Model, ModelRefusedError, build
from algorithms.models.batch_norm import batch_norm_layers, replace_batch_norm
from algorithms.models.libraries import LibraryMissingError, imported_library
from algorithms.models.library_files import save_pretrained
from algorithms.models.public_models import library_model
from tests.algorithms.models.forms import FORMS, LORA, TINY_BERT, form_of, moved, records
from tests.support.gradients import naive
from tests.support.public_texts import WORDS, publish
from tests.support.refusals import refused_as


def of_timm(architecture: str, **settings: Any) -> Model:
    own = {"architecture": architecture} | settings
    return build("timm", input_shape=(3, 16, 16), classes=3, seed=0, settings=own)


def test_padding_changes_nothing() -> None:
    model = form_of("huggingface")
    at = model.by_name(moved(model))
    texts = torch.tensor([[3, 5, 0, 0], [3, 5, 7, 8]])
    own = library_model(model)
    with torch.no_grad():
        short = model.outputs(at, texts[:, :2])
        found = model.outputs(at, texts)
        with model.using(at):
            unmasked = own(input_ids=texts).logits
    torch.testing.assert_close(found[0], short[0])
    assert not torch.allclose(unmasked[0], short[0])


def test_batch_norm_is_refused_by_name_and_replaced_where_asked() -> None:
    with refused_as("batch_norm_of_model", ModelRefusedError, layer="conv1.1"):
        of_timm("resnet10t")
    model = of_timm("resnet10t", replace_batch_norm=True)
    kinds = {type(layer) for layer in model.module.modules()}
    assert nn.GroupNorm in kinds
    assert not kinds & {nn.BatchNorm1d, nn.BatchNorm2d}
    assert model.module(torch.zeros(2, 3, 16, 16)).shape == (2, 3)


def test_a_module_that_is_a_batch_norm_becomes_a_group_norm() -> None:
    assert isinstance(replace_batch_norm(nn.BatchNorm1d(6)), nn.GroupNorm)
    assert batch_norm_layers(replace_batch_norm(nn.Sequential(nn.Sequential(nn.BatchNorm2d(2))))) == []


def test_a_norm_over_maps_of_one_place_has_channels_to_compare() -> None:
    model = of_timm("skresnet18", replace_batch_norm=True)  # its attention has 16 channels of one place
    norms = [layer for layer in model.module.modules() if isinstance(layer, nn.GroupNorm)]
    assert all(norm.num_channels > norm.num_groups for norm in norms)
    assert bool(model.module(torch.randn(1, 3, 16, 16)).isfinite().all())


def test_frozen_batch_norm_keeps_the_public_statistics_and_its_weights_are_trained(tmp_path: Path) -> None:
    public = imported_library("timm").create_model("resnet10t", num_classes=5).train()
    with torch.no_grad():
        public(3.0 + torch.randn(8, 3, 16, 16))  # its statistics are no longer 0 and 1
    save_file(public.state_dict(), tmp_path / "model.safetensors")
    chosen = {"checkpoint_file": str(tmp_path / "model.safetensors"), "replace_batch_norm": "frozen"}
    model = of_timm("resnet10t", **chosen)
    norm: Any = model.module.get_submodule("conv1.1")
    assert torch.equal(norm.running_mean, public.get_buffer("conv1.1.running_mean"))
    assert {"conv1.1.weight", "conv1.1.bias"} <= model.shapes.keys()
    inputs, labels = torch.randn(4, 3, 16, 16), torch.arange(4) % 3
    at = model.initial_parameters()
    rows = naive.loop(model, at, inputs, labels)
    clipping = L2(float(rows.norm(dim=1).median()))
    found = Engine(model, input_shape=(3, 16, 16), physical_batch=4).clipped_sum(at, inputs, labels, clipping)
    assert naive.relative(found, naive.contributions(model, rows, clipping).sum(dim=0)) < 1e-5
    again = build("timm", input_shape=(3, 16, 16), classes=3, seed=0, settings=model.settings)
    again.module.load_state_dict(model.published_tensors(at))
    assert torch.equal(again.module(inputs), model.module(inputs))


def test_an_activation_inside_a_batch_norm_is_kept() -> None:
    model = of_timm("mobilenetv3_small_050", replace_batch_norm=True)
    replaced = [
        layer
        for layer in model.module.modules()
        if isinstance(layer, nn.Sequential) and len(layer) and isinstance(layer[0], nn.GroupNorm)
    ]
    assert any(isinstance(part, nn.Hardswish) for layer in replaced for part in layer)


def test_adapters_and_the_head_alone_are_trained_and_clipped_rightly() -> None:
    model = form_of("huggingface", adapter=LORA)
    assert all("lora_" in name or name.startswith("model.classifier.") for name in model.shapes)
    assert len(model.shapes) == 6
    inputs, labels = records(FORMS["huggingface"])
    at = moved(model)
    rows = naive.loop(model, at, inputs, labels)
    clipping = L2(float(rows.norm(dim=1).median()))
    engine = Engine(model, input_shape=(4,), input_dtype=inputs.dtype)
    expected = naive.contributions(model, rows, clipping).sum(dim=0)
    assert naive.relative(engine.clipped_sum(at, inputs, labels, clipping), expected) < 1e-5


def test_trained_experts_are_taken_in_one_pass() -> None:
    experts = TINY_BERT | {"model_type": "mixtral", "num_key_value_heads": 1, "num_local_experts": 3}
    model = form_of("huggingface", config=experts)
    inputs, labels = records(FORMS["huggingface"])
    at = moved(model)
    engine = Engine(model, input_shape=(4,), input_dtype=inputs.dtype)
    assert engine.is_batched and engine.physical_batch > 1
    rows = naive.loop(model, at, inputs, labels)
    expected = naive.contributions(model, rows, L2(1e-2)).sum(dim=0)
    assert naive.relative(engine.clipped_sum(at, inputs, labels, L2(1e-2)), expected) < 1e-5


def test_a_checkpoint_gives_all_but_the_head_and_stands_in_the_notes(tmp_path: Path) -> None:
    other = form_of("huggingface", seed=5)
    body = {
        name.removeprefix("bert."): tensor
        for name, tensor in library_model(other).state_dict().items()
        if name.startswith("bert.")
    }
    path = tmp_path / "model.safetensors"
    save_file(body, path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_BERT), encoding="utf-8")
    own = {"config_file": str(config), "checkpoint_file": str(path)}
    model = build("huggingface", input_shape=(4,), classes=2, seed=0, tokens=9, settings=own)
    found = library_model(model).state_dict()
    assert all(torch.equal(found[f"bert.{name}"], tensor) for name, tensor in body.items())
    assert torch.equal(found["classifier.weight"], library_model(form_of("huggingface")).classifier.weight)
    assert "SHA-256" in model.notes[0] and "classifier.weight" in model.notes[0]
    again = build("huggingface", input_shape=(4,), classes=2, seed=0, tokens=9, settings=model.settings)
    assert again.shapes == model.shapes

    save_file({name: tensor for name, tensor in body.items() if "query" not in name}, path)
    with pytest.raises(ModelRefusedError, match=r"does not give bert\.encoder.*query"):
        build("huggingface", input_shape=(4,), classes=2, seed=0, tokens=9, settings=own)
    path.unlink()
    with refused_as("checkpoint_unreadable", ModelRefusedError):
        build("huggingface", input_shape=(4,), classes=2, seed=0, tokens=9, settings=own)


def test_a_checkpoint_is_a_folder_with_a_configuration_and_weights(tmp_path: Path) -> None:
    weights = publish(tmp_path)
    own: dict[str, Any] = {"checkpoint": str(tmp_path)}
    form = {"input_shape": (4,), "classes": 3, "seed": 0, "tokens": len(WORDS), "padding": 7}
    model = build("huggingface", **form, settings=own)
    found = library_model(model).state_dict()
    assert all(torch.equal(found[f"bert.{name}"], tensor) for name, tensor in weights.items())
    assert f"file {tmp_path.name} (" in model.notes[0] and str(tmp_path) not in model.notes[0]
    again = build("huggingface", **form, settings=model.settings)
    assert (again.shapes, again.settings) == (model.shapes, model.settings)
    at = model.by_name(model.initial_parameters())
    with torch.no_grad():
        short, filled, other = (
            model.outputs(at, torch.tensor([row])) for row in ([1, 2], [1, 2, 7, 7], [1, 2, 0, 0])
        )
    torch.testing.assert_close(filled, short)
    assert not torch.allclose(other, short)
    with_adapters = build("huggingface", **form, settings=own | {"adapter": {"rank": 2}})
    assert {name.split(".")[-4] for name in with_adapters.shapes if "lora_" in name} == {"query", "value"}
    with pytest.raises(ModelRefusedError, match="has 16 positions, and the texts have 17 tokens"):
        build("huggingface", **(form | {"input_shape": (17,)}), settings=own)
    with pytest.raises(ModelRefusedError, match="checkpoint has its weights with it"):
        build("huggingface", **form, settings=own | {"checkpoint_file": "weights"})
    with pytest.raises(ModelRefusedError, match="get it by `hf download nobody/nothing`"):
        build("huggingface", **form, settings={"checkpoint": "nobody/nothing"})


@pytest.mark.parametrize("adapter", [None, LORA])
def test_a_release_is_read_by_transformers_in_one_line(adapter: Any, tmp_path: Path) -> None:
    model = form_of("huggingface", adapter=adapter)
    released = model.published_tensors(moved(model))
    inputs, _ = records(FORMS["huggingface"])
    with torch.no_grad():
        expected = model.outputs(released, inputs)
        save_pretrained(model, released, tmp_path)
        auto = imported_library("transformers").AutoModelForSequenceClassification
        read = auto.from_pretrained(tmp_path, use_safetensors=True).eval()
        ids = inputs.long()
        found = read(input_ids=ids, attention_mask=(ids != 0).long()).logits
    torch.testing.assert_close(found, expected)


def test_a_release_is_read_by_timm_in_one_line(tmp_path: Path) -> None:
    model = form_of("timm")
    released = model.published_tensors(moved(model))
    inputs, _ = records(FORMS["timm"])
    with torch.no_grad():
        expected = model.outputs(released, inputs)
        save_pretrained(model, released, tmp_path)
        own = FORMS["timm"].settings
        read = imported_library("timm").create_model(
            own["architecture"],
            num_classes=3,
            checkpoint_path=str(tmp_path / "model.safetensors"),
            **own["options"],
        )
        found = read.eval()(inputs)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("name", "tokens", "settings", "message"),
    [
        ("timm", None, {"architecture": "no_such_net"}, "cannot be made with these settings"),
        ("huggingface", 9, {}, "config or config_file, one of them"),
        ("huggingface", 10, {"config": TINY_BERT}, "vocab_size 9, and the data have 10 tokens"),
        ("huggingface", None, {"config": TINY_BERT}, "cannot be made with these settings"),
        ("huggingface", 9, {"config": TINY_BERT, "adapter": LORA | {"targets": ["nowhere"]}}, "nowhere"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, tokens: int | None, settings: Any, message: str) -> None:
    shape = (3, 8, 8) if name == "timm" else (4,)
    with pytest.raises(ModelRefusedError, match=message):
        build(name, input_shape=shape, classes=2, seed=0, tokens=tokens, settings=settings)


def test_a_library_whose_compiled_part_does_not_load_is_imported_all_the_same() -> None:
    model = imported_library("timm").create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    assert imported_library("transformers").BertConfig().hidden_size == 768


def test_a_library_that_is_not_there_says_how_to_get_it() -> None:
    with pytest.raises(
        LibraryMissingError, match=r"^nowhere was asked for.*pip install 'epsilonflow\[models\]'\.$"
    ):
        imported_library("nowhere.at_all")

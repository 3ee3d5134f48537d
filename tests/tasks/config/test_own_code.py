"""What a file from elsewhere names is not run: code of one's own has to be chosen by the user, in params or by name."""

import importlib
import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import save_file
from typer.testing import CliRunner

import algorithms
from algorithms.encoders import EncoderSettings, encoder
from algorithms.errors import ModelRefusedError
from algorithms.extension import NotUsableError, source_digest
from algorithms.model_facts import FACTS, ModelFacts
from algorithms.models import build
from algorithms.models.saved import architecture, load_start
from data.card import DataRefusedError, data_card
from data.readers.images import load_pickle
from flows.cli.main import app
from tasks import export, retraining
from tasks.comparing.work import work_of
from tasks.config import params
from tasks.config.overrides import ParamOverrides, params_edit
from tasks.config.own_code import named_code
from tasks.predict import predict
from tasks.tuning import settings as tune_settings
from tests.support.checkout import Checkout
from tests.support.comparisons import document, small, write
from tests.support.public_texts import publish
from tests.support.refusals import refused_as
from tests.support.workspace import Workspace

NAME = "strange:make"
CODE = """
from pathlib import Path
LEFT = Path(__file__).parents[1] / "left"
LEFT.touch()

def make(*given, **named):
    from torch import nn
    LEFT.touch()
    return nn.Linear(4, 2)
"""


@dataclass(frozen=True)
class Strange:
    """A module whose import, and whose factory, leave a file."""

    folder: Path

    def has_run(self) -> bool:
        return (self.folder / "left").exists() or "strange" in sys.modules


@pytest.fixture
def strange(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Strange:
    folder = tmp_path_factory.mktemp("strange")
    (folder / "strange").mkdir()
    (folder / "strange/__init__.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "strange", raising=False)
    importlib.invalidate_caches()
    return Strange(folder)


def model_file(folder: Path, **facts: Any) -> Path:
    """A model of two classes on four numbers, as its file states it, with other facts."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"input_shape": [4], "classes": ["no", "yes"], "model": "softmax", "tokens": None}
    model = build("softmax", input_shape=(4,), classes=2, seed=0)
    tensors = dict(model.module.state_dict())
    save_file(tensors, folder / "model.safetensors", {FACTS: json.dumps(own | facts)})
    return folder / "model.safetensors"


def preparation(**changes: Any) -> dict[str, Any]:
    own = {"kind": "csv", "columns": [{"name": "x", "kind": "numeric", "bounds": [0, 1]}]}
    known = {"name": "some", "classes": ["no", "yes"], "shape": [4], "reader": own, "transform": "none"}
    return known | {"words": None, "encoder": None} | changes


def named_by_a_model() -> dict[str, dict[str, Any]]:
    """The facts of a file that names the module at each place where a name can stand."""
    own = {"name": NAME, "settings": {}, "checkpoint": None, "sha256": "0" * 64}
    reader = {"kind": "own", "factory": NAME, "settings": {}, "source_sha256": source_digest(NAME)}
    return {
        "model": {"model": NAME},
        "encoder": {"preparation": preparation(transform="encoder", encoder=own)},
        "reader": {"preparation": preparation(reader=reader)},
    }


@pytest.mark.parametrize("place", ["model", "encoder", "reader"])
def test_a_models_file_names_no_code_that_predict_runs(
    strange: Strange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = model_file(tmp_path / "release", **named_by_a_model()[place])
    (tmp_path / "new.csv").write_text("x\n0.5\n")
    said = CliRunner().invoke(app, ["predict", "new.csv", "--model", "release"], env={"COLUMNS": "200"})
    assert said.exit_code == 2 and f"allow it by --allow-code {NAME}" in said.stderr
    with refused_as("code_not_allowed", NotUsableError):
        list(predict(path, tmp_path / "new.csv"))
    with refused_as("code_not_allowed", NotUsableError):
        list(predict(path, tmp_path / "new.csv", allow_code=["other:make"]))
    assert not strange.has_run()


@pytest.mark.parametrize("form", export.FORMS)
def test_a_models_file_names_no_code_that_export_runs(strange: Strange, tmp_path: Path, form: str) -> None:
    path = model_file(tmp_path / "release", model=NAME)
    arguments = ["export", "--to", form, "--model", str(path.parent), "--output", str(tmp_path / "made")]
    said = CliRunner().invoke(app, arguments)
    assert said.exit_code == 2 and "names code" in said.stderr
    assert not strange.has_run() and not (tmp_path / "made").exists()


def test_a_folder_of_transformers_names_no_code(strange: Strange) -> None:
    """Which `export --to huggingface` writes: its configuration holds the facts."""
    from tasks.hub import EpsilonflowConfig, EpsilonflowModel

    facts = {"input_shape": [4], "classes": ["no", "yes"], "model": NAME}
    with refused_as("code_not_allowed", NotUsableError):
        EpsilonflowModel(EpsilonflowConfig(facts=json.dumps(facts)))
    assert not strange.has_run()
    EpsilonflowModel(EpsilonflowConfig(facts=json.dumps(facts)), allow_code=[NAME])
    assert strange.has_run()


def test_a_release_runs_no_code_that_the_models_file_names(
    strange: Strange, checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its card holds, as of whoever signed it."""
    artifacts = checkout.root / "artifacts"
    model_file(artifacts, model=NAME)
    monkeypatch.setattr(export, "verify", lambda *_, **__: type("Held", (), {"passed": True}))
    with refused_as("code_not_allowed", NotUsableError):
        export.release(artifacts, tmp_path / "release", key=None)
    assert not strange.has_run() and not (tmp_path / "release").exists()


def test_what_the_user_chose_is_run(
    strange: Strange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name at the command, or in params.yaml; another name stays refused."""
    monkeypatch.chdir(tmp_path)
    path = model_file(tmp_path / "release", model=NAME)
    with pytest.raises(ModelRefusedError, match="lacks"):  # of another form, but it was built
        algorithms.load(path, allow_code=[NAME])
    assert strange.has_run()
    np.save("new.npy", np.zeros((1, 4), np.float32))
    command = ["predict", "new.npy", "--model", "release"]
    assert "lacks" in CliRunner().invoke(app, [*command, "--allow-code", NAME]).stderr
    assert "names code" in CliRunner().invoke(app, [*command, "--allow-code", "other:make"]).stderr
    Path("params.yaml").write_text(f"model: {{name: '{NAME}'}}\n")
    assert "lacks" in CliRunner().invoke(app, command).stderr


def test_the_users_code_is_what_params_and_data_cards_name(tmp_path: Path) -> None:
    assert named_code(tmp_path) == frozenset()
    groups = {
        "algorithm": {"name": "a.b:c"},
        "features": {"name": "none"},
        "model": {"name": "d:e"},
        "data": {"dataset": "digits", "encoder": {"name": "f:g"}},
    }
    (tmp_path / "params.yaml").write_text(json.dumps(groups))
    cards = tmp_path / "data/cards"
    cards.mkdir(parents=True)
    (cards / "broken.yaml").write_text("factory: [")
    card = json.loads(data_card("digits").model_dump_json(exclude_none=True)) | {
        "name": "mine",
        "reader": {"kind": "own", "factory": "h:i", "source_sha256": "1" * 64},
        "files": {"train": {"path": "x", "sha256": "2" * 64}},
    }
    (cards / "mine.yaml").write_text(json.dumps(card))
    assert named_code(tmp_path) == {"a.b:c", "d:e", "f:g", "h:i"}


def test_the_start_of_a_model_names_no_code(strange: Strange, tmp_path: Path) -> None:
    path = model_file(tmp_path, model=NAME, preparation=preparation(encoder={"name": NAME}))
    load_start(build("softmax", input_shape=(4,), classes=2, seed=1), path)
    assert not strange.has_run()


def test_a_plan_and_a_card_name_no_code(strange: Strange, checkout: Checkout, workspace: Workspace) -> None:
    path = workspace.root / "artifacts/plan.json"
    plan = json.loads(path.read_text())
    changed = plan | {"algorithm": NAME, "code": {"algorithm": "0" * 64, "model": "0" * 64}}
    path.write_text(json.dumps(changed | {"model": plan["model"] | {"name": NAME}}))
    with refused_as("stale_plan", differing="algorithm"):
        workspace.train()
    place = checkout.root / "artifacts/privacy_card.json"
    card = json.loads(place.read_text())
    card["mechanism"] |= {"algorithm": NAME}
    card["mechanism"]["model"] |= {"name": NAME}
    card["events"][0]["event"] |= {"type": NAME}
    place.write_text(json.dumps(card))
    for command in ("verify", "show"):
        assert CliRunner().invoke(app, ["card", command, str(place)]).exit_code != 0
    assert not strange.has_run()


PLACES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "model": lambda content: content["problems"][0].update(model=NAME),
    "encoder": lambda content: content["problems"][0].update(
        transform="encoder", encoder={"name": NAME, "settings": {}}
    ),
    "method": lambda content: content["methods"]["dp_sgd"].update(algorithm={"name": NAME}),
    "features": lambda content: content["methods"]["dp_sgd"].update(features={"name": NAME}),
    "varied method": lambda content: content["methods"]["dp_sgd"].update(vary={"name": [NAME]}),
    "method at an epsilon": lambda content: content["methods"]["dp_sgd"].update(
        by_epsilon={4.0: {"name": NAME}}
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_comparison_names_no_code(strange: Strange, tmp_path: Path, place: str) -> None:
    root, content = small(tmp_path / "checkout"), document()
    PLACES[place](content)
    with refused_as("code_not_allowed", NotUsableError, file="tiny.yaml", name="strange:make"):
        work_of(write(root, content), root)
    assert not strange.has_run()
    with pytest.raises((ValueError, TypeError, AttributeError)):  # whatever comes of it
        work_of(write(root, content), root, allow_code=[NAME])
        raise ValueError
    assert strange.has_run() or place == "model"  # which is imported when a trial is planned


@pytest.mark.parametrize(
    "space",
    [{f"{group}.name": ["softmax", NAME]} for group in ("algorithm", "features", "model")]
    + [{"model": [{"name": NAME}]}],
)
def test_a_search_names_no_code(strange: Strange, tmp_path: Path, space: dict[str, Any]) -> None:
    path = tmp_path / "tune.yaml"
    path.write_text(json.dumps({"space": space, "epsilon": 3.0}))
    with refused_as("code_not_allowed", NotUsableError, file="tune.yaml", name="strange:make"):
        tune_settings.load(path)
    assert tune_settings.load(path, allow_code=[NAME]).epsilon == 3.0
    assert not strange.has_run()


REMOTE = """
from pathlib import Path
(Path({folder!r}) / "left").touch()
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

class Own(BertConfig):
    model_type = "own"

class OwnModel(BertModel):
    config_class = Own

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("library", ["tokenizer", "huggingface"])
def test_a_public_folder_runs_no_code_and_asks_nobody_whether_to(
    strange: Strange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    publish(tmp_path)
    (tmp_path / "own.py").write_text(REMOTE.format(folder=str(strange.folder)))
    classes = {
        "AutoConfig": "own.Own",
        "AutoModel": "own.OwnModel",
        "AutoTokenizer": [None, "own.OwnTokenizer"],
    }
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((tmp_path / name).read_text()) | {"auto_map": classes}
        if name == "config.json":
            content["model_type"] = "own"
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    try:
        encoder(f"{library}/{tmp_path}", EncoderSettings()).load()
    except ModelRefusedError as refusal:
        assert "cannot be read as a public model" in str(refusal)
    assert not strange.has_run()


def test_a_models_settings_name_no_files_and_no_places_to_load_from(tmp_path: Path) -> None:
    """As those of a file that epsilonflow wrote, whose values are in it."""
    facts = {"input_shape": [3, 8, 8], "classes": ["no", "yes"], "model": "timm"}
    (tmp_path / "own").write_bytes(b"")
    for settings, words in (
        ({"architecture": "resnet10t", "checkpoint_file": "/etc/passwd"}, "as checkpoint_file"),
        ({"architecture": "resnet10t", "checkpoint": "/etc"}, "as checkpoint"),
        ({"architecture": "hf-hub:nobody/model"}, "architecture"),
        ({"architecture": f"local-dir:{tmp_path}"}, "architecture"),
        ({"architecture": "resnet10t", "options": {"checkpoint_path": str(tmp_path / "own")}}, "no option"),
        ({"architecture": "resnet10t", "options": {"pretrained": True}}, "no option"),
    ):
        with pytest.raises(ModelRefusedError, match=words):
            architecture(ModelFacts.model_validate_json(json.dumps(facts | {"model_settings": settings})))
    for config in (
        {"model_type": "timm_wrapper", "architecture": "local-dir:x", "model_args": {"checkpoint_path": "x"}},
        {"model_type": "vit", "use_pretrained_backbone": True},
        {
            "model_type": "gemma3",
            "vision_config": {"model_type": "timm_wrapper", "architecture": "resnet10t"},
        },
        {"model_type": "gemma3n", "vision_config": {"model_args": {"checkpoint_path": "x"}}},
        {"model_type": "gemma3n", "vision_config": {"architecture": "hf-hub:nobody/model"}},
        {
            "model_type": "vit",
            "towers": [{"vision_config": {"model_type": "timm_backbone", "backbone": "x"}}],
        },
        {"model_type": "vit", "backbone_config": {"backbone": "local-dir:x"}},
    ):
        with pytest.raises(ModelRefusedError, match="that timm builds or that downloads"):
            architecture(
                ModelFacts.model_validate_json(
                    json.dumps(facts | {"model": "huggingface", "model_settings": {"config": config}})
                )
            )
    with pytest.raises(ModelRefusedError, match="timm has no model"):
        encoder(f"timm/local-dir:{tmp_path}", EncoderSettings())


def test_a_configuration_of_transformers_names_no_code(strange: Strange, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REMOTE.format(folder=str(strange.folder)))
    config = {
        "model_type": "vit",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "image_size": 8,
        "patch_size": 4,
        "_name_or_path": str(tmp_path),
        "auto_map": {"AutoModelForImageClassification": "own.OwnModel"},
    }
    facts = {"input_shape": [3, 8, 8], "classes": ["no", "yes"], "model": "huggingface"}
    assert (
        architecture(
            ModelFacts.model_validate_json(json.dumps(facts | {"model_settings": {"config": config}}))
        ).name
        == "huggingface"
    )
    assert not strange.has_run()


class Leaves:
    """A pickle of it makes a folder where it is loaded without a thought."""

    def __reduce__(self) -> Any:
        return Path.mkdir, (Path("left"),)


def test_no_file_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("new.npy", np.array([Leaves()], object))
    torch.save({"weight": Leaves()}, "model.safetensors")
    with pytest.raises(pickle.UnpicklingError):
        load_pickle(io.BytesIO(pickle.dumps(Leaves())))
    with refused_as("unreadable_file", DataRefusedError):
        list(predict(model_file(tmp_path / "release"), "new.npy"))
    with pytest.raises(ModelRefusedError):
        algorithms.load("model.safetensors")
    with pytest.raises(ModelRefusedError):
        load_start(build("softmax", input_shape=(4,), classes=2, seed=1), Path("model.safetensors"))
    assert not Path("left").exists()


def test_no_yaml_makes_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = small(tmp_path / "checkout")
    monkeypatch.chdir(root)
    text = "name: !!python/object/apply:os.mkdir ['left']\n"
    (root / "data/cards/own.yaml").write_text(text)
    (root / "own.yaml").write_text(text)
    kept = (root / "params.yaml").read_text()
    for load, refusal in (
        (lambda: data_card("own", root / "data/cards"), DataRefusedError),
        (lambda: params.load(root / "own.yaml", reads=params.GROUPS), params.ParamsRefusedError),
        (lambda: work_of(root / "own.yaml", root), params.ParamsRefusedError),
        (lambda: tune_settings.load(root / "own.yaml"), params.ParamsRefusedError),
        (lambda: retraining.load(root / "own.yaml"), params.ParamsRefusedError),
        (lambda: params_edit(root, ParamOverrides(epsilon=1.0)), ValueError),
    ):
        (root / "params.yaml").write_text(kept + f"other: {text.removeprefix('name: ')}")
        with pytest.raises(refusal):
            load()
    YAML().load(kept + f"other: {text.removeprefix('name: ')}")  # which keeps comments, and tags as they are
    assert not (root / "left").exists()
    shutil.rmtree(root)

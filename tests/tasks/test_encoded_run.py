"""A run on the features of a frozen encoder, from params.yaml to a card that says whose people it does not protect."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from algorithms.encoders import Frozen
from algorithms.errors import ModelRefusedError
from algorithms.models.saved import load as load_model
from algorithms.privacy.card import load, text, verify
from data.card import CARDS
from tasks import evaluate, prepare, report
from tasks.config import params
from tasks.config.overrides import Request, revise
from tasks.predict import predict
from tests.support import tiny_encoder
from tests.support.workspace import Workspace

DATA: dict[str, Any] = {
    "dataset": "digits",
    "transform": "encoder",
    "encoder": {"name": "tests.support.tiny_encoder:make", "settings": {"mirror": True}},
}


def test_a_run_on_an_encoders_features_ends_with_a_card_that_holds(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = workspace.root
    tiny_encoder.LOADED.clear()
    assert workspace.prepare(**DATA).input_shape == (12,)
    assert [loaded.mirror for loaded in tiny_encoder.LOADED] == [True]  # once, however many workers
    workspace.replace("data", DATA)
    workspace.replace("features", {"name": "centred", "mean_noise": 5.0, "moment_noise": 10.0})
    workspace.train()
    monkeypatch.chdir(root)
    monkeypatch.setenv("EPSILONFLOW_HOME", str(workspace.home))
    evaluate.main()
    report.report(artifacts=root / "artifacts", prepared=root / "datasets/prepared", root=root)
    card = load(root / "artifacts" / report.CARD)
    assert verify(card, root / "artifacts", unsigned=True).passed
    assert card.mechanism.encoder is not None
    assert card.mechanism.encoder.sha256 == "ab" * 32
    assert "whose people this run does not protect" in text.transform(card.mechanism)
    assert "whose people this run does not protect" in (root / "artifacts" / report.PAGE).read_text()
    events = [row.event["type"] for row in card.events]
    assert events[:2] == ["GaussianDpEvent"] * 2  # the mean and the moment are charged


def test_a_model_on_an_encoders_features_predicts_from_images(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    workspace.prepare(**DATA)
    workspace.replace("data", DATA)
    workspace.train()
    folder = tmp_path / "new"
    folder.mkdir()
    pixels = load_digits().images[:10].astype(np.uint8)  # ink from 0 to 16
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number}.png")
    trained = load_model(workspace.root / "artifacts/model.safetensors")
    encode = tiny_encoder.make(Frozen()).load()
    expected = trained(torch.from_numpy(encode(pixels[:, None] / np.float32(16)))).argmax(-1)
    (found,) = predict(trained, folder)
    assert found.names == tuple(f"{number}.png" for number in range(10))
    assert found.predicted == tuple(str(place) for place in expected.tolist())
    other = replace(tiny_encoder.make(Frozen()), sha256="cd" * 32)
    monkeypatch.setattr(tiny_encoder, "make", lambda _settings: other)
    with pytest.raises(ModelRefusedError, match="has other weights than the one"):
        next(predict(trained, folder))


def test_an_encoder_is_all_there_is_to_type(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text((Path(__file__).parents[2] / "params.yaml").read_text())
    (tmp_path / "data").mkdir()
    (tmp_path / "data/cards").symlink_to(CARDS)
    asked = revise(tmp_path, Request(dataset="cifar-10", epsilon=1.0, encoder="efficientnet-lite0"))
    asked.write()
    chosen = asked.params
    assert chosen.data.transform == "encoder"
    assert chosen.data.encoder is not None
    assert chosen.data.encoder.settings == {"size": 160}
    assert (chosen.model.name, chosen.features_settings["name"]) == ("unit_linear", "centred")
    at_half = revise(tmp_path, Request(epsilon=0.5, encoder="efficientnet-lite0")).params
    rates = [one.algorithm_settings["update"]["learning_rate"] for one in (at_half, chosen)]
    assert 0 < rates[0] < rates[1]
    plain = revise(tmp_path, Request(dataset="mnist")).params
    assert (plain.data.transform, plain.data.encoder, plain.features) == ("none", None, None)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"transform": "encoder"}, "give both or neither"),
        ({"encoder": {"name": "wordllama"}}, "give both or neither"),
    ],
)
def test_an_encoder_and_its_transform_come_together(data: dict[str, Any], words: str) -> None:
    with pytest.raises(params.ParamsRefusedError, match=words):
        params.parse({"data": {"dataset": "digits"} | data}, reads=prepare.READS)


def test_settings_that_an_encoder_has_not_are_refused_by_name() -> None:
    from tasks.prepare import encoder_of

    with pytest.raises(ModelRefusedError, match=r"data\.encoder\.settings\.sise"):
        encoder_of(params.Encoder(name="wordllama", settings=json.loads('{"sise": 3}')))

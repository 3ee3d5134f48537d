"""A model card's metadata is made by the hub's own library, which reads it strictly and writes it again as it was."""

import json
import logging
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from ruamel.yaml import YAML

from algorithms import models
from algorithms.model_facts import ModelFacts
from algorithms.models.saved import TrainedModel
from algorithms.plain_text import visible
from algorithms.privacy.card import PrivacyCard, build
from algorithms.privacy.card.text import statement
from tasks.model_card import model_card
from tests.algorithms.privacy.conftest import KEY
from tests.support.hostile_texts import HOSTILE
from tests.support.synthetic_run import CLASSES, Kind, record, write_run

hub: Any = pytest.importorskip("huggingface_hub")
PUBLIC = {"test_accuracy": 0.8, "test_loss": 0.61, "majority_accuracy": 0.5, "test_records": 100}
PRIVATE = {
    "held_out": "private",
    "evaluation_epsilon": 1.0,
    "test_accuracy": {"value": 0.8, "low": 0.7, "high": 0.9},
    "test_majority_accuracy": {"value": 0.5, "low": 0.4, "high": 0.6},
    "test_log_loss": None,
}


def model_of(reader: str = "csv", predicts: str = "class") -> TrainedModel:
    """An untrained model whose file would say what it reads and predicts."""
    model = models.build("softmax", input_shape=(5,), classes=3, seed=0)
    facts = ModelFacts(
        model="softmax",
        input_shape=(5,),
        classes=CLASSES,
        predicts=predicts,
        preparation={
            "name": "some",
            "classes": [*CLASSES],
            "shape": None,
            "reader": {"kind": reader},
            "transform": "none",
        },
    )
    return TrainedModel(model, model.module.state_dict(), facts)


def card_of(folder: Path, kind: Kind = "private") -> PrivacyCard:
    return build(record(write_run(folder, kind=kind)), KEY)


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> PrivacyCard:
    return card_of(tmp_path_factory.mktemp("private"))


def test_the_library_reads_a_card_strictly_and_writes_it_again(private: PrivacyCard, tmp_path: Path) -> None:
    text = model_card(private, model_of(), PUBLIC)
    (tmp_path / "README.md").write_text(text)
    card = hub.ModelCard.load(tmp_path / "README.md", ignore_metadata_errors=False)
    assert str(card) == text
    assert hub.ModelCardData(**card.data.to_dict()).to_dict() == card.data.to_dict()
    assert card.data.library_name == "epsilonflow"
    assert card.data.pipeline_tag == "tabular-classification"
    assert card.data.tags == ["differential-privacy", "dp_sgd"]
    assert card.data.metrics == ["accuracy"]
    assert card.data.datasets is None and card.data.license is None
    assert card.data.model_name == "animals-dp_sgd"
    assert card.data.eval_results == [
        hub.EvalResult(
            "tabular-classification",
            "animals",
            "Animals & friends <drawn>",
            "accuracy",
            0.8,
            dataset_split="test",
            metric_name="accuracy",
        )
    ]


def test_a_card_without_metrics_has_no_results(private: PrivacyCard) -> None:
    card = hub.ModelCard(model_card(private, model_of(), {}))
    assert card.data.eval_results is None and card.data.metrics is None
    assert "None was recorded with the model." in card.text


def test_a_private_estimate_has_its_interval_and_a_drowned_one_is_left_out(
    private: PrivacyCard,
) -> None:
    (result,) = hub.ModelCard(model_card(private, model_of(), PRIVATE)).data.eval_results
    assert result.metric_value == 0.8
    assert result.metric_name == "accuracy, 95% interval 0.7 to 0.9"


def test_a_seeded_run_is_not_tagged_private(tmp_path: Path) -> None:
    card = hub.ModelCard(model_card(card_of(tmp_path, "seeded"), model_of(), PUBLIC))
    assert card.data.tags == ["dp_sgd"]
    assert "NOT PRIVATE" in card.text


@pytest.mark.parametrize(
    ("reader", "predicts", "metrics", "task", "metric"),
    [
        ("texts", "class", PUBLIC, "text-classification", "accuracy"),
        ("images", "class", PUBLIC, "image-classification", "accuracy"),
        ("own", "class", PUBLIC, "other", "accuracy"),
        (
            "parquet",
            "number",
            {"test_r2": 0.5, "test_rmse": 2.0, "test_mae": 1.0, "mean_rmse": 3.0},
            "tabular-regression",
            "r_squared",
        ),
        (
            "images",
            "number",
            {"test_r2": 0.5, "test_rmse": 2.0, "test_mae": 1.0, "mean_rmse": 3.0},
            "other",
            "r_squared",
        ),
        (
            "texts",
            "next token",
            {
                "test_token_accuracy": 0.5,
                "test_perplexity": 9.0,
                "test_loss": 2.2,
                "unigram_perplexity": 20.0,
            },
            "text-generation",
            "accuracy",
        ),
        (
            "texts",
            "tags",
            {"test_token_f1": 0.5, "test_token_accuracy": 0.8, "majority_accuracy": 0.6},
            "token-classification",
            "token_f1",
        ),
    ],
)
def test_tasks_and_metrics_have_the_hubs_names(
    private: PrivacyCard, reader: str, predicts: str, metrics: dict[str, Any], task: str, metric: str
) -> None:
    data = hub.ModelCard(model_card(private, model_of(reader, predicts), metrics)).data
    assert data.metrics == [metric] and data.eval_results[0].metric_type == metric
    assert {result.task_type for result in data.eval_results} == {task}
    assert data.pipeline_tag == (None if task == "other" else task)


@pytest.mark.parametrize("text", HOSTILE)
def test_the_library_reads_a_name_that_looks_like_markup_as_a_name(private: PrivacyCard, text: str) -> None:
    card = private.model_copy(update={"setting": private.setting.model_copy(update={"title": text})})
    made = model_card(card, model_of(), PUBLIC)
    read = hub.ModelCard(made)
    assert read.data.eval_results[0].dataset_name == visible(text)
    assert str(read) == made


class _Hub(BaseHTTPRequestHandler):
    """Checks `model-index` for what the hub's specification of the metadata requires, as a push to the hub does."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        head = YAML(typ="safe").load(body["content"].split("---\n")[1])
        problems = [
            f"{part}.{key} is required"
            for index in head.get("model-index", [])
            for result in index["results"]
            for part, keys in (("task", ("type",)), ("dataset", ("type", "name")))
            for key in keys
            if key not in result[part]
        ] + [
            f"metrics.{key} is required"
            for index in head.get("model-index", [])
            for result in index["results"]
            for metric in result["metrics"]
            for key in ("type", "value")
            if key not in metric
        ]
        problems += (
            [] if (self.path, body["repoType"]) == ("/api/validate-yaml", "model") else ["not a model"]
        )
        self.send_response(400 if problems else 200)
        self.end_headers()
        self.wfile.write("; ".join(problems).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server on this machine in place of the hub."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize("metrics", [{}, PUBLIC, PRIVATE], ids=["none", "public", "private"])
def test_the_librarys_validation_accepts_a_card(private: PrivacyCard, metrics: dict[str, Any]) -> None:
    hub.ModelCard(model_card(private, model_of(), metrics)).validate()


@pytest.mark.usefixtures("endpoint")
def test_the_librarys_validation_refuses_a_result_of_no_data_set(
    private: PrivacyCard,
) -> None:
    card = hub.ModelCard(model_card(private, model_of(), PUBLIC))
    card.data.eval_results[0].dataset_name = None
    with pytest.raises(ValueError, match=r"dataset\.name is required"):
        card.validate()


def test_card_without_the_library_has_no_metadata_and_a_warning(
    private: PrivacyCard,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The warning says how to get the library."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with caplog.at_level(logging.WARNING, "tasks.model_card"):
        text = model_card(private, model_of(), PUBLIC)
    assert text.startswith("# ") and statement(private) in text.replace("\\", "")
    (message,) = caplog.messages
    assert message.endswith("huggingface_hub is missing: pip install 'epsilonflow[hub]'.")

"""Searches by a private score of what is no class: a number, several labels, next tokens and tags."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from algorithms.models.saved import load_model
from algorithms.privacy.card import load as load_card
from algorithms.privacy.card import verify
from algorithms.privacy.card.verify import check_charged
from data.description import DatasetInfo
from data.prepared import load
from data.targets import Classes, Labels, LabelType, NextToken, Number, Tags
from tasks.prediction_passes import record_scores
from tasks.tuning import scoring
from tasks.tuning.search import SCORE, Search, SearchTrial, tune
from tasks.tuning.search_plan import plan_search
from tasks.tuning.settings import Tuning
from tests.support.own_records import declared as declared
from tests.support.public_texts import publish
from tests.support.refusals import refused_as
from tests.support.soak import soak_but
from tests.support.workspace import Workspace

__all__ = ["declared"]

TAGS = Tags(tags=("O", "WHO", "WHAT"), outside="O")


@pytest.mark.parametrize(
    ("known", "scores", "labels", "expected"),
    [
        (Classes(classes=("a", "b")), [[0.0, 1.0], [1.0, 0.0]], [1, 1], [1.0, 0.0]),
        (Number(bounds=(0.0, 1.0)), [[0.5], [9.0], [-1.0]], [0.0, 1.0, 0.5], [0.75, 1.0, 0.0]),
        (
            Labels(labels=("a", "b")),
            [[1.0, 1.0], [-1.0, -1.0], [-1.0, 1.0]],
            [[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]],
            [2 / 3, 1.0, 0.0],
        ),
    ],
)
def test_a_record_is_scored_by_itself(
    known: LabelType, scores: Any, labels: Any, expected: list[float]
) -> None:
    found = record_scores(known, torch.tensor(scores), torch.tensor(labels))
    assert found.tolist() == pytest.approx(expected)


def test_a_text_is_scored_by_its_tokens() -> None:
    said = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0, 0], [0, 0, 0, 0]]), 3).float()
    tags = torch.tensor([[1, 0, 0, -100], [0, -100, -100, -100]])
    assert record_scores(TAGS, said, tags).tolist() == pytest.approx([2 / 3, 1.0])
    tokens = torch.tensor([[0, 1, 2, 1], [1, -100, -100, -100]])
    assert record_scores(NextToken(next="token"), said, tokens).tolist() == pytest.approx([2 / 3, 0.0])


@pytest.mark.parametrize("known", [TAGS, Labels(labels=("a", "b", "c"))])
def test_a_score_of_labels_is_the_f1_of_each_record(known: LabelType) -> None:
    draw = np.random.default_rng(0)
    if known.has_tokens:
        scores, labels = draw.normal(size=(50, 6, 3)), draw.integers(0, 3, (50, 6))
        said = scores.argmax(-1)
        expected = [
            f1_score(real, own, labels=[1, 2], average="micro", zero_division=1.0)
            for real, own in zip(labels, said, strict=True)
        ]
    else:
        scores, labels = draw.normal(size=(50, 3)), draw.integers(0, 2, (50, 3)).astype(np.float64)
        expected = [
            f1_score(real, own, zero_division=1.0) for real, own in zip(labels, scores > 0, strict=True)
        ]
    found = record_scores(known, torch.from_numpy(scores), torch.from_numpy(labels))
    assert found.tolist() == pytest.approx(expected) and 0 <= float(found.min()) <= float(found.max()) <= 1


def _rows(root: Path, public: Path, kind: str) -> tuple[str, dict[str, Any]]:
    """A file of 120 records, and what a card and the data group say of it."""
    draw = np.random.default_rng(0).random((120, 2)).round(3)
    if kind in ("number", "labels"):
        rows = [f"{a},{b},{5 * (a + b):.3f},{int(a > 0.5)},{int(b > 0.7)}" for a, b in draw]
        (root / "t.csv").write_text("\n".join(["a,b,sum,big,odd", *rows]) + "\n")
        own = ["sum"] if kind == "number" else ["big", "odd"]
        columns = [{"name": name, "kind": "numeric", "bounds": [0, 1]} for name in ("a", "b")]
        columns += [{"name": n, "kind": "label" if n in own else "ignored"} for n in ("sum", "big", "odd")]
        target = {"bounds": [0, 10]} if kind == "number" else {"labels": own}
        return "t.csv", {"target": target, "reader": {"kind": "csv", "columns": columns}}
    words = np.random.default_rng(0).choice(["a", "good", "film", "bad"], (120, 4)).tolist()
    lines = [{"text": " ".join(text), "tags": [n % 2, 0, 2, 0]} for n, text in enumerate(words)]
    (root / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    reader: dict[str, Any] = {"kind": "texts", "format": "jsonl", "columns": ["text"]}
    if kind == "tags":
        return "t.jsonl", {"target": TAGS.model_dump(mode="json"), "reader": reader | {"label": "tags"}}
    return "t.jsonl", {"target": {"next": "token"}, "reader": reader}


@pytest.mark.parametrize("kind", soak_but(["number", "labels"], ["number", "labels", "next token", "tags"]))
def test_a_private_score_is_charged_for_every_target(
    workspace: Workspace, declared: Callable[..., None], tmp_path: Path, kind: str
) -> None:
    public, is_text = tmp_path / "public", kind in ("next token", "tags")
    publish(public, causal=kind == "next token")
    data, model = None, {"name": "linear"}
    if is_text:
        encoder = {"name": f"tokenizer/{public}", "settings": {"length": 6}}
        data = {"transform": "encoder", "encoder": encoder}
        model = {"name": "huggingface", "checkpoint": str(public)}
    path, keys = _rows(workspace.root, public, kind)
    declared(path, data, model, classes=[], **keys)
    prepared = workspace.root / "datasets/prepared"
    found = DatasetInfo.read(prepared)
    base = {
        "data": {"dataset": "mine"} | (data or {}),
        "privacy": {"epsilon": 1.0, "delta": 1e-5},
        "algorithm": {"name": "dp_sgd", "sampling_rate": 0.2, "steps": 3},
        "model": model,
        "performance": {"threads": 1},
    }
    objective = {"on": "private", "share": 0.5, "noise_multiplier": 2.0}
    asked = Tuning.model_validate(
        {
            "space": {"algorithm.clip_norm": [0.5, 1.0]},
            "epsilon": 8.0,
            "show_all": True,
            "objective": objective,
        }
    )
    search = Search(asked, plan_search(asked, base, found), prepared, found)
    ran: list[tuple[float, float]] = []

    def noting(trials: Sequence[SearchTrial]) -> None:
        for trial in trials:
            trial.run()
            to_score, to_train = trial.records()
            assert to_score is not None
            assert len(to_score.labels) + len(to_train.labels) == len(load(prepared).train_labels)
            own, parameters = load_model(trial.folder / "model.safetensors")
            with torch.no_grad():
                scores = own.scores(own.outputs(parameters, torch.from_numpy(to_score.features)))
            exact = float(record_scores(found.label_type, scores, torch.from_numpy(to_score.labels)).sum())
            ran.append((exact, json.loads((trial.folder / SCORE).read_text())))

    tune(search, ledger=workspace.ledger, home=workspace.home, root=workspace.root, run_all=noting)
    assert len(ran) == 2
    for exact, score in ran:
        assert abs(score - exact) < 12  # noise of deviation 2: beyond it once in 1e9
    card = load_card(workspace.root / "tuned/privacy_card.json")
    assert {query.kind for query in card.mechanism.queries} == {"gradient", "total"}
    assert verify(card, workspace.root / "tuned", unsigned=True, key=None).passed
    check_charged(card, workspace.ledger)


def test_a_model_that_cannot_be_asked_about_one_record_is_refused_before_anything_is_spent(
    workspace: Workspace, declared: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, keys = _rows(workspace.root, workspace.root, "number")
    declared(path, None, {"name": "linear"}, classes=[], **keys)

    def refusing(*_: object) -> None:
        raise ValueError("more records, please")

    monkeypatch.setattr(scoring, "record_scores", refusing)
    base = {
        "data": {"dataset": "mine"},
        "privacy": {"epsilon": 1.0, "delta": 1e-5},
        "algorithm": {"name": "dp_sgd", "sampling_rate": 0.2, "steps": 3},
        "model": {"name": "linear"},
    }
    asked = {"space": {"algorithm.clip_norm": [1.0]}, "epsilon": 8.0, "objective": {"on": "private"}}
    info = DatasetInfo.read(workspace.root / "datasets/prepared")
    with refused_as("bad_keys", model="linear", keys=("objective.on",)):
        plan_search(Tuning.model_validate(asked), base, info)

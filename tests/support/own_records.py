"""A run on records of one's own, from their card to the verified card of the run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from algorithms.privacy.card import load, text, verify
from algorithms.privacy.card.verify import check_charged
from tasks import evaluate, report
from tasks.check_data import check_data
from tests.support.cards import card
from tests.support.workspace import Workspace

CARD = card(
    "mine",
    records={"at_most": 400},
    classes=["no", "yes"],
    split={"salt": "mine", "test_fraction": 0.3},
)


RUN: dict[str, Any] = {
    "privacy": {"epsilon": 3.0, "delta": 1e-5},
    "algorithm": {"name": "dp_sgd", "sampling_rate": 0.2, "steps": 5},
    "model": {"name": "softmax"},
}


@pytest.fixture
def declared(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Prepares a card with these keys and plans a run on it; checksums are filled in as `data check` says them."""
    monkeypatch.chdir(workspace.root)
    monkeypatch.setenv("EPSILONFLOW_HOME", str(workspace.home))
    cards = workspace.root / "data/cards"

    def declare(
        path: str, data: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **keys: Any
    ) -> None:
        cards.mkdir(parents=True, exist_ok=True)
        document = CARD | {"files": {"train": {"path": path, "keyed_sha256": "0" * 64}}} | keys
        _write(cards / "mine.yaml", document)
        right = dict(check_data("mine", workspace.root, counted=False).checksums)
        for file in document["files"].values():
            file["keyed_sha256"] = right.pop(file["path"]).removeprefix("keyed_sha256: ")
        document["reader"] |= dict(line.split(": ") for line in right.values())
        _write(cards / "mine.yaml", document)
        group = {"dataset": "mine"} | (data or {})
        workspace.prepare(**group)
        own = {} if model is None else {"model": model}
        _write(workspace.root / "params.yaml", RUN | {"data": group} | own)
        workspace.set("model")

    return declare


def _write(path: Path, document: dict[str, Any]) -> None:
    YAML(typ="safe", pure=True).dump(document, path)


def finish(workspace: Workspace) -> str:
    """Train, evaluate and report; the card's sentences, once it is verified against the ledger."""
    workspace.train()
    evaluate.main()
    artifacts = workspace.root / "artifacts"
    report.report(artifacts=artifacts, prepared=workspace.root / "datasets/prepared", root=workspace.root)
    card = load(artifacts / report.CARD)
    assert verify(card, artifacts, unsigned=True).passed
    check_charged(card, workspace.ledger)
    return text.markdown(card)

"""A checkout that is retrained in this process, and the weeks of data that arrive in it."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from algorithms.privacy.ledger import Ledger
from tasks import prepare
from tasks.config.params import load
from tasks.retraining import Retraining
from tasks.retraining.delivery import DeliveryWork, Outcome, retrain
from tasks.runs.dvc_stages import StageFailedError, StageRefusedError
from tasks.runs.stage_main import refusals
from tests.support.cards import card, csv_of, label, number

MONDAY = datetime(2026, 1, 5, 3, tzinfo=UTC)


CARD = card(
    "tiny",
    cap={"epsilon": 4.0, "delta": 1e-4},
    records={"at_most": 5000},
    classes=["no", "yes"],
    files={},
    blocks={"kind": "folder", "path": "weeks"},
    split={"salt": "tiny", "test_fraction": 0.3},
    reader=csv_of(number("age", 0, 100), label("answer")),
)


PARAMS: dict[str, Any] = {
    "data": {"dataset": "tiny"},
    "privacy": {"epsilon": 1.0, "delta": 1e-5, "accountant": "rdp"},
    "algorithm": {"name": "dp_sgd", "sampling_rate": 0.5, "steps": 4},
    "model": {"name": "logistic"},
    "tracking": {"mode": "disabled"},
    "performance": {"threads": 1},
}


CARD_FILE = "data/cards/tiny.yaml"


SETTINGS: dict[str, Any] = {
    "name": "visits",
    "dataset": "tiny",
    "blocks": {"policy": "all", "at_least": 2},
    "spread": {"policy": "equal", "planned": 3},
    "minimal_gain": -1.0,
}


class Place:
    """A checkout whose stages run in this process; `report` writes an empty card."""

    def __init__(self, root: Path, **changes: Any) -> None:
        self.root, self.stages, self.said = root, list[str](), list[str]()
        self.settings = Retraining.model_validate_json(json.dumps(SETTINGS | changes))

    def run_stage(self, stage: str, root: Path) -> None:
        self.stages.append(stage)
        try:
            if stage == "prepare":
                settings = load(root / "params.yaml", reads=prepare.READS)
                home = Path(os.environ["EPSILONFLOW_HOME"])
                place = root / prepare.PREPARED
                cards = root / "data/cards"
                prepare.prepare(settings, mirror=None, home=home, destination=place, root=root, cards=cards)
            elif stage == "report":
                (root / "artifacts/privacy_card.json").write_text("{}")
            else:
                import_module(f"tasks.{stage}").main()
        except refusals() as error:
            refusal: Any = error
            raise StageRefusedError(str(refusal), refusal.code, refusal.fields) from None
        except OSError as error:
            raise StageFailedError(str(error)) from None

    def deliver(self, week: int = 0, **changes: Any) -> Outcome:
        work = DeliveryWork(self.settings, self.root, self.run_stage, self.said.append)
        return retrain(replace(work, **changes), now=MONDAY + timedelta(weeks=week))

    def arrive(self, *names: str) -> None:
        for name in names:
            drawn = np.random.default_rng(len(name) + ord(name[-1])).integers(0, 100, 60)
            lines = ["age,answer", *(f"{age},{'yes' if age > 50 else 'no'}" for age in drawn)]
            (self.root / f"weeks/{name}.csv").write_text("\n".join(lines) + "\n")

    @property
    def folders(self) -> dict[str, Path]:
        """All that belongs to it."""
        return {"root": self.root, "home": Path(os.environ["EPSILONFLOW_HOME"])}

    @property
    def ledger(self) -> Ledger:
        return Ledger.open(f"sqlite:///{os.environ['EPSILONFLOW_HOME']}/ledger.sqlite")

    def rows(self, kind: str) -> list[str]:
        """The runs of the ledger's rows of a kind, each once."""
        return list(dict.fromkeys(row.run_id or "" for row in self.ledger.history() if row.kind == kind))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for folder in ("weeks", "data/cards", ".dvc/tmp"):
        (tmp_path / folder).mkdir(parents=True)
    yaml = YAML(typ="safe", pure=True)
    yaml.dump(CARD, tmp_path / CARD_FILE)
    yaml.dump(PARAMS, tmp_path / "params.yaml")
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    monkeypatch.chdir(tmp_path)
    made = Place(tmp_path)
    made.arrive("w1", "w2")
    return made

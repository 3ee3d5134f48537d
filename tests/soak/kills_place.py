"""The checkout whose retrainings are killed: invented records in blocks, one a period, and a model of milliseconds."""

import json
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML

from tasks.retraining import Retraining
from tests.support.cards import card, csv_of, label, number

POPULATION = "killed"
_RECORDS, _FIRST_BLOCKS = 80, 3
_FIRST = datetime(2026, 1, 5, 3, tzinfo=UTC)
CARD = card(
    POPULATION,
    cap={"epsilon": 6.0, "delta": 1e-5},
    composition={"kind": "renyi", "order": 6.0},
    records={"at_most": 4000},
    classes=["no", "yes"],
    files={},
    blocks={"kind": "folder", "path": "datasets/raw/killed"},
    split={"salt": POPULATION, "test_fraction": 0.25},
    reader=csv_of(number("age", 0, 100), number("weight", 0, 100), label("answer")),
)
PARAMS: dict[str, Any] = {
    "data": {"dataset": POPULATION},
    "privacy": {"epsilon": 1.0, "delta": 1e-5, "accountant": "rdp"},
    "algorithm": {"name": "dp_sgd", "sampling_rate": 0.25, "steps": 200},
    "model": {"name": "logistic"},
    "tracking": {"mode": "disabled"},
    "performance": {"threads": 1, "checkpoint_seconds": 0.02},
}
RETRAINING: dict[str, Any] = {
    "name": POPULATION,
    "dataset": POPULATION,
    "every": "week",
    "blocks": {"policy": "last", "window": 3, "at_least": 2},
    "spread": {"policy": "equal", "planned": 3},
}


@dataclass(frozen=True)
class Place:
    """A checkout, the home of its runs, and the ledger that it charges.

    dvc: whether its stages are run by DVC. held_back: the numbers of blocks that do not arrive.
    """

    root: Path
    home: Path
    url: str
    dvc: bool = False
    held_back: set[int] = field(default_factory=set)

    @property
    def settings(self) -> Retraining:
        """Of its retraining."""
        return Retraining.model_validate_json(json.dumps(RETRAINING))

    @property
    def registry(self) -> Path:
        """The folder of its models."""
        return self.root / "models" / POPULATION

    @property
    def states(self) -> Path:
        """The folder of what became of its periods."""
        return self.home / "retrainings" / POPULATION

    def moment(self, week: int) -> datetime:
        """When the retraining of a week is due, which is counted from 0."""
        return _FIRST + timedelta(weeks=week)

    def period(self, week: int) -> str:
        """The name of a week's period."""
        return self.settings.period(self.moment(week))

    def arrive(self, week: int) -> None:
        """The blocks that are there in a week."""
        for index in range(week + _FIRST_BLOCKS):
            path = self.root / CARD["blocks"]["path"] / f"w{index:03}.csv"
            if index not in self.held_back and not path.exists():
                drawn = np.random.default_rng(index).integers(0, 101, (_RECORDS, 2))
                lines = [f"{age},{weight},{'yes' if age > weight else 'no'}" for age, weight in drawn]
                path.write_text("\n".join(["age,weight,answer", *lines]) + "\n")


def make(folder: Path, url: str | None, *, source: Path | None = None) -> Place:
    """Makes the checkout and the home below a folder.

    url: of the ledger, a file of SQLite when None. source: the checkout that is cloned where DVC is to run the stages.
    """
    ledger = url or f"sqlite:///{folder}/home/ledger.sqlite"
    place = Place(folder / "checkout", folder / "home", ledger, dvc=source is not None)
    if source is None:
        place.root.mkdir(parents=True)
        (place.root / "dvc.yaml").write_text("stages: {}\n")
    else:
        subprocess.run(["git", "clone", "--quiet", str(source), str(place.root)], check=True)
    for path in (CARD["blocks"]["path"], "data/cards", ".dvc/tmp"):
        (place.root / path).mkdir(parents=True, exist_ok=True)
    place.home.mkdir(mode=0o700)
    yaml = YAML(typ="safe", pure=True)
    yaml.dump(CARD, place.root / "data/cards" / f"{POPULATION}.yaml")
    params = place.root / "params.yaml"
    yaml.dump((yaml.load(params) if params.exists() else {}) | PARAMS, params)
    return place

"""A folder in which the train stage can run, on digits; its fixtures are those of all tests of tasks."""

import copy
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from algorithms.core.training import Hooks
from algorithms.privacy.ledger import Ledger
from data import DatasetInfo
from data.card import CARDS
from tasks import calibrate, prepare, train
from tasks.config import params
from tasks.runs import store
from tests.support.beginnings import Beginnings
from tests.support.checkout import PROJECT
from tests.support.warm_processes import ModuleProcess

PARAMS: dict[str, Any] = {
    "data": {"dataset": "digits"},
    "privacy": {"epsilon": 3.0, "delta": 1e-5},
    "algorithm": {
        "name": "dp_sgd",
        "expected_batch_size": 64,
        "steps": 6,
        "update": {"momentum": 0.9, "averaging": "ema"},
    },
    "model": {"name": "softmax"},
    "performance": {"checkpoint_seconds": 1e-3, "threads": 1},
}


@dataclass(frozen=True)
class Workspace:
    """A folder with params.yaml, prepared data and a plan, and a home with the ledger."""

    root: Path
    home: Path

    def prepare(self, dataset: str, **data: Any) -> DatasetInfo:
        """Prepare a data set of this folder's cards, or of the catalogue where it has none."""
        settings = params.parse({"data": {"dataset": dataset} | data}, reads=prepare.READS)
        own, place = self.root / "data/cards", self.root / "datasets/prepared"
        cards = own if own.exists() else CARDS
        return prepare.prepare(
            settings, mirror=None, home=self.home, destination=place, root=self.root, cards=cards
        )

    def set(self, group: str, **values: Any) -> None:
        """Change params.yaml and make the plan again."""
        path = self.root / "params.yaml"
        document = YAML(typ="safe", pure=True).load(path) if path.exists() else copy.deepcopy(PARAMS)
        self.write(document | {group: document.get(group, {}) | values})

    def replace(self, group: str, values: dict[str, Any]) -> None:
        """Change a whole group of params.yaml and make the plan again."""
        path = self.root / "params.yaml"
        self.write(YAML(typ="safe", pure=True).load(path) | {group: values})

    def write(self, document: dict[str, Any]) -> None:
        """Set params.yaml and make the plan."""
        path = self.root / "params.yaml"
        YAML(typ="safe", pure=True).dump(document, path)
        settings = params.load(path, reads=calibrate.READS)
        plan = self.root / "artifacts" / "plan.json"
        plan.parent.mkdir(exist_ok=True)
        plan.write_text(calibrate.calibrate(settings, self.info).to_text())

    @property
    def info(self) -> DatasetInfo:
        return DatasetInfo.from_json((self.root / "datasets/prepared/public.json").read_text())

    def declare(self, **changes: Any) -> None:
        """Change what the data card declares, as prepared."""
        info = dataclasses.replace(self.info, **changes)
        (self.root / "datasets/prepared/public.json").write_text(info.to_json())

    @property
    def ledger(self) -> Ledger:
        return Ledger.open(f"sqlite:///{self.home}/ledger.sqlite")

    def train(self, home: Path | None = None, **changes: Any) -> dict[str, Any]:
        """Run the stage in this process, with the runs of another home where one is given; returns the receipt."""
        settings = params.load(self.root / "params.yaml", reads=train.READS)
        artifacts, prepared = self.root / "artifacts", self.root / "datasets/prepared"
        job = train.Job(
            settings, (artifacts / "plan.json").read_bytes(), prepared, changes.get("info", self.info)
        )
        train.train(job, ledger=self.ledger, home=home or self.home, root=self.root, artifacts=artifacts)
        return self.receipt

    def mark_used(self) -> None:
        """As a later stage does that has the result in hand."""
        store.mark_used(self.home, self.receipt["run_id"], keeps=not self.info.is_public)

    @property
    def receipt(self) -> dict[str, Any]:
        receipt: dict[str, Any] = json.loads((self.root / "artifacts/receipt.json").read_text())
        return receipt

    def start(self) -> ModuleProcess:
        """Run the stage in a process of its own."""
        own = {"EPSILONFLOW_HOME": str(self.home), "PYTHONPATH": str(PROJECT)}
        return ModuleProcess("tasks.train", cwd=self.root, env=os.environ | own)

    def model(self) -> str:
        return hashlib.sha256((self.root / "artifacts/model.safetensors").read_bytes()).hexdigest()

    @property
    def run_folders(self) -> list[Path]:
        return sorted((self.home / "runs").glob("*")) if (self.home / "runs").exists() else []


@pytest.fixture(scope="session")
def prepared_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    Workspace(folder, folder).prepare("digits")
    return folder / "datasets/prepared"


@pytest.fixture
def workspace(tmp_path: Path, own_home: Path, prepared_digits: Path, beginnings: Beginnings) -> Workspace:
    place = Workspace(tmp_path, own_home)

    def plan() -> None:
        shutil.copytree(prepared_digits, tmp_path / "datasets/prepared")
        place.set("privacy")

    beginnings.begin("planned digits", {"root": tmp_path}, plan)
    return place


NO_HOOKS = Hooks()


def crash(*_arguments: Any, hooks: Hooks = NO_HOOKS, **_named: Any) -> Any:
    """In place of whatever is called; in place of training it reserves first."""
    hooks.reserve()
    raise KeyboardInterrupt


@contextmanager
def killed_in(owner: Any, name: str, how: Callable[..., Any] = crash) -> Iterator[None]:
    """What runs within is killed where it calls this."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, how)
        yield

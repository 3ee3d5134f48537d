"""A checkout with the card of a private table, whose stages run by their main functions."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from algorithms.privacy.ledger import Ledger
from tasks import evaluate, report, train
from tasks.config import params
from tests.support.beginnings import Beginnings
from tests.support.checkout import PROJECT
from tests.support.workspace import PARAMS, Workspace

OUTS = ("model.safetensors", "trace.parquet", "diagnostics.parquet", "evaluation.json", "receipt.json")


CARD = (PROJECT / "examples/own_data/visits.yaml").read_text()


@dataclass(frozen=True)
class Visits:
    """A checkout with the card of a private table, whose stages run by their main functions."""

    place: Workspace

    @property
    def folders(self) -> dict[str, Path]:
        """All that belongs to it."""
        return {"root": self.place.root, "home": self.place.home}

    def prepare(self, card: str = CARD) -> None:
        root = self.place.root
        (root / "data/cards/visits.yaml").write_text(card)
        self.place.prepare("visits")
        document = {
            **PARAMS,
            "tracking": {"mode": "disabled"},
            "algorithm": {"name": "dp_sgd", "sampling_rate": 0.1, "steps": 3},
        }
        YAML(typ="safe", pure=True).dump(document, root / "params.yaml")
        self.place.set("privacy", epsilon=1.0)

    def train(self) -> str:
        """As DVC runs the stage: what it wrote before is deleted; returns the id of the run."""
        for name in OUTS:
            (self.place.root / "artifacts" / name).unlink(missing_ok=True)
        train.main()
        run_id: str = self.place.receipt["run_id"]
        return run_id

    def finish(self) -> None:
        evaluate.main()
        report.main()

    def digest(self) -> str:
        root = self.place.root
        settings = params.load(root / "params.yaml", reads=train.READS)
        plan = (root / "artifacts/plan.json").read_bytes()
        job = train.Job(settings, plan, root / "datasets/prepared", self.place.info)
        return job.digest(self.place.home)

    @property
    def runs(self) -> int:
        ledger = Ledger.open(f"sqlite:///{self.place.home}/ledger.sqlite")
        return sum(row.kind == "reserve" for row in ledger.history("visits"))


@pytest.fixture
def unprepared_visits(tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Visits:
    (tmp_path / "data/cards").mkdir(parents=True)
    (tmp_path / "examples").symlink_to(PROJECT / "examples")
    monkeypatch.chdir(tmp_path)
    return Visits(Workspace(tmp_path, own_home))


@pytest.fixture
def visits(unprepared_visits: Visits, beginnings: Beginnings) -> Visits:
    beginnings.begin("prepared visits", unprepared_visits.folders, unprepared_visits.prepare)
    return unprepared_visits

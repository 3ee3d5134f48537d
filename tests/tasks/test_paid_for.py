"""What a private run paid for is had again for nothing, whatever became of the checkout."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from algorithms.errors import RefusedError
from algorithms.privacy.ledger import Ledger
from tasks import calibrate, evaluate, report, train
from tasks.config import params
from tests.support.checkout import PROJECT
from tests.support.workspace import PARAMS, Workspace

OUTS = ("model.safetensors", "trace.parquet", "diagnostics.parquet", "receipt.json")
CARD = (PROJECT / "examples/own_data/visits.yaml").read_text()


@dataclass(frozen=True)
class Visits:
    """A checkout with the card of a private table, whose stages run by their main functions."""

    place: Workspace

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
        job = train.Job(settings, plan, root / "datasets/prepared", self.place.public)
        return job.digest(self.place.home)

    @property
    def runs(self) -> int:
        ledger = Ledger.open(f"sqlite:///{self.place.home}/ledger.sqlite")
        return sum(row.kind == "reserve" for row in ledger.history("visits"))


@pytest.fixture
def visits(tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Visits:
    (tmp_path / "data/cards").mkdir(parents=True)
    (tmp_path / "examples").symlink_to(PROJECT / "examples")
    monkeypatch.chdir(tmp_path)
    found = Visits(Workspace(tmp_path, own_home))
    found.prepare()
    return found


def test_a_model_that_was_evaluated_and_lost_is_brought_back_with_its_receipt(visits: Visits) -> None:
    first, model = visits.train(), visits.place.model()
    visits.finish()
    assert visits.train() == first
    assert (visits.place.model(), visits.runs) == (model, 1)
    assert all((visits.place.root / "artifacts" / name).is_file() for name in OUTS)
    visits.finish()


def test_who_agrees_to_spend_again_gets_another_model(
    visits: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = visits.train()
    visits.finish()
    monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
    second = visits.train()
    assert (second != first, visits.runs) == (True, 2)
    visits.finish()
    monkeypatch.delenv("EPSILONFLOW_SPEND_AGAIN")
    assert (visits.train(), visits.runs) == (second, 2)


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_the_order_in_which_a_plan_is_written_asks_for_no_other_run(
    visits: Visits, is_evaluated: bool
) -> None:
    """Another algorithm and then the old one again leaves the settings of params.yaml in another order."""
    first, model = visits.train(), visits.place.model()
    if is_evaluated:
        visits.finish()
    path = visits.place.root / "artifacts/plan.json"
    plan = json.loads(path.read_text())
    path.write_text(json.dumps({key: plan[key] for key in reversed(plan)}))
    assert visits.train() == first
    assert (visits.place.model(), visits.runs) == (model, 1)
    visits.finish()


def test_a_plan_is_written_in_one_order(visits: Visits) -> None:
    path = visits.place.root / "params.yaml"
    document = YAML(typ="safe", pure=True).load(path)
    plans = set()
    for order in (1, -1):
        document["algorithm"] = dict(list(document["algorithm"].items())[::order])
        yaml = YAML()
        yaml.dump(document, path)
        calibrate.main()
        plans.add((visits.place.root / "artifacts/plan.json").read_bytes())
    assert len(plans) == 1


def test_words_and_cap_of_the_card_ask_for_no_other_run(visits: Visits) -> None:
    first, model, card = visits.train(), visits.place.model(), CARD
    visits.finish()
    words = {f"{name}: ": f"{name}: Corrected " for name in ("source", "licence", "citation", "title")}
    for old, new in (words | {"{epsilon: 10.0": "{epsilon: 12.0"}).items():
        assert card.count(old) == 1
        card = card.replace(old, new)
    visits.prepare(card)
    assert visits.train() == first
    assert (visits.place.model(), visits.runs) == (model, 1)
    visits.finish()
    assert "Corrected" in (visits.place.root / "artifacts/report.html").read_text()


def test_a_result_that_was_not_evaluated_yet_is_handed_out_under_the_corrected_words(visits: Visits) -> None:
    first = visits.train()
    visits.prepare(CARD.replace("title: ", "title: Corrected "))
    assert (visits.train(), visits.runs) == (first, 1)
    visits.finish()


def test_another_record_asks_for_another_run(visits: Visits) -> None:
    first = visits.digest()
    visits.prepare(CARD.replace("salt: ", "salt: another "))
    assert visits.digest() != first


def test_another_unit_asks_for_no_other_run_and_its_result_is_not_handed_out_under_it(visits: Visits) -> None:
    first, digest = visits.train(), visits.digest()
    visits.finish()
    visits.prepare(CARD.replace("unit: ", "unit: a part of "))
    assert first == f"{visits.digest()}-1" == f"{digest}-1"
    with pytest.raises(RefusedError, match=r"counts .* as one record"):
        visits.train()
    visits.prepare()
    assert (visits.train(), visits.runs) == (first, 1)

"""Cards, a ledger and run ids of an earlier version stay valid, so that nobody pays twice and no evidence is lost.

The files in tests/golden were made once, by the version whose settlements they hold, and are never made again.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from algorithms.privacy.card import check_charged, load, verify
from algorithms.privacy.documents import PlanDocument
from algorithms.privacy.ledger import Ledger
from data import DatasetInfo
from tasks.config.params import ModelParams
from tasks.runs import store

GOLDEN = Path(__file__).parent / "golden"
CARDS = sorted(GOLDEN.glob("card-*.json"))
RUNS: list[dict[str, Any]] = json.loads((GOLDEN / "runs.json").read_text())


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    shutil.copy(GOLDEN / "ledger.sqlite", tmp_path)
    return Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")


def test_there_are_ten_cards() -> None:
    assert len(CARDS) == 10


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_a_card_of_before_verifies_against_its_ledger(path: Path, ledger: Ledger) -> None:
    card = load(path)
    assert verify(card, key=(GOLDEN / "owner.pub").read_text().strip()).failures == ()
    check_charged(card, ledger)


def test_a_ledger_of_before_has_its_chain_its_prices_and_its_balances(ledger: Ledger) -> None:
    verified = ledger.verify(prices=True)
    assert verified.read == 28
    assert verified.head.hash == "de53d8d5ff7ad18e565709da0672ebc807558aec86db3f4a8bcef5823541ea2c"
    spent = {(row.population, row.block): row.spent.epsilon for row in ledger.balances()}
    assert spent == {
        ("private", "all"): pytest.approx(17.775018544129523, rel=1e-12),
        ("blocks", "february"): pytest.approx(36.40675962955313, rel=1e-12),
        ("blocks", "january"): pytest.approx(36.40675962955313, rel=1e-12),
        ("private-counted", "all"): pytest.approx(11.999756902891729, rel=1e-12),
        ("a-number", "all"): pytest.approx(3.999857248875851, rel=1e-12),
    }


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("plan-*.json")), ids=lambda path: path.stem)
def test_a_plan_is_written_as_it_was_read(path: Path) -> None:
    """To the digit: a run's id covers its plan, and that of a search the plans of its trials."""
    written = json.dumps(json.loads(path.read_text()), sort_keys=True)
    assert json.dumps(PlanDocument.read(path).to_json(), sort_keys=True) == written


@pytest.mark.parametrize("index", range(len(RUNS)))
def test_a_run_of_before_is_recognised(index: int, tmp_path: Path) -> None:
    run = RUNS[index]
    plan, public = (
        json.loads((GOLDEN / f"{kind}-{index:02d}-{run['method']}.json").read_text())
        for kind in ("plan", "public")
    )
    (tmp_path / "owner.key").write_bytes(bytes.fromhex((GOLDEN / "owner.key.hex").read_text()))
    (tmp_path / "contents").write_text(run["contents"])
    digest = store.training_digest(
        plan,
        ModelParams(**run["model"]),
        tuple(run["blocks"]),
        DatasetInfo.from_json(json.dumps(public)),
        tmp_path,
        home=tmp_path,
    )
    assert f"{digest}-1" == run["run_id"]

"""The blocks on a privacy card: as the ledger had them at settlement, and never less than the run itself cost."""

import math
from pathlib import Path
from typing import Any

import pytest

from algorithms.core.receipt import account_of
from algorithms.errors import RefusedError
from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.card.build import PrivacyCard, RunRecord, build, verify
from algorithms.privacy.card.check import digest
from algorithms.privacy.ledger import Composition, Ledger
from tests.support.synthetic_run import DELTA, record, write_run

BASIC, ZCDP, RENYI = Composition(), Composition("zcdp"), Composition("renyi", 6.0)


def charge(ledger: Ledger, run_id: str, run: RunRecord, *blocks: str) -> None:
    cost, events = run.receipt["epsilon"]["pld"], run.receipt["events"]
    budget = Budget(math.inf if cost is None else cost, DELTA)
    ledger.reserve(run_id, "painters", budget, events=events, about={}, blocks=blocks)
    ledger.settle(run_id, budget, events=events)


def settled(ledger: Ledger, run: RunRecord, rule: Composition, count: int) -> RunRecord:
    """The run charged to the second and third of three blocks, another having been charged to the first two."""
    ledger.declare("painters", Budget(900.0, 0.1), public=True, composition=rule, blocks_per_person=count)
    for block in ("may", "june", "july"):
        ledger.declare_block("painters", block)
    charge(ledger, "before", run, "may", "june")
    charge(ledger, run.receipt["run_id"], run, "june", "july")
    account = account_of(ledger, "painters", run.receipt["run_id"])
    return RunRecord(run.plan, {**run.receipt, **account}, run.public, run.trace, run.software)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return record(write_run(tmp_path_factory.mktemp("run")))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")


@pytest.mark.parametrize(("rule", "count"), [(BASIC, 1), (BASIC, 2), (ZCDP, 1), (RENYI, 2)])
def test_the_card_has_each_block_that_was_charged_and_fails_when_one_claims_too_little(
    ledger: Ledger, plain: RunRecord, rule: Composition, count: int
) -> None:
    made = build(settled(ledger, plain, rule, count))
    assert verify(made).passed
    blocks = made.accounting.blocks
    assert blocks is not None
    assert [block.name for block in blocks.charged] == ["june", "july"]
    for block in blocks.charged:
        assert block.spent.epsilon == ledger.balance("painters", block.name).spent.epsilon
    twice, once = (block.spent.epsilon or 0.0 for block in blocks.charged)
    assert 0 < once < twice
    if rule.kind == "basic":
        assert once == pytest.approx(count * plain.receipt["epsilon"]["pld"])
    document = made.to_json()
    document["accounting"]["blocks"]["charged"][1]["spent"]["epsilon"] *= 1 - 1e-4
    document["evidence"]["card_sha256"] = digest(document)
    assert {check.name for check in verify(document).failures} == {"blocks"}
    document = made.to_json()
    document["accounting"]["blocks"]["charged"][1]["spent"]["delta"] /= 10
    document["accounting"]["blocks"]["unit"] = "Protected is everybody."
    document["evidence"]["card_sha256"] = digest(document)
    assert {check.name for check in verify(document).failures} == {"blocks", "words"}


def test_the_account_is_that_of_the_settlement_however_late_it_is_taken(
    ledger: Ledger, plain: RunRecord
) -> None:
    run = settled(ledger, plain, BASIC, 1)
    charge(ledger, "later", plain, "june", "july")
    ledger.set_cap("painters", Budget(1.0, 1e-5), block="july")
    again = account_of(ledger, "painters", run.receipt["run_id"])["ledger"]
    assert again["head"] == ledger.head() != run.receipt["ledger"]["head"]
    assert again | {"head": ""} == run.receipt["ledger"] | {"head": ""}
    with pytest.raises(RefusedError, match="no settlement of run 'never'"):
        account_of(ledger, "painters", "never")


def test_it_says_who_is_protected_and_how_runs_add_up(ledger: Ledger, plain: RunRecord) -> None:
    made = build(settled(ledger, plain, RENYI, 3))
    blocks = made.accounting.blocks
    assert blocks is not None
    assert "one person with records (one drawing) in at most 3 blocks" in blocks.unit
    assert "multiplied by 3" in blocks.unit
    assert (blocks.composition.kind, blocks.composition.order) == ("renyi", 6.0)
    assert "Rényi divergences of order 6.0" in made.accounting.population.statement
    assert "basic" not in made.accounting.population.statement


def test_a_run_without_noise_on_public_blocks_takes_nothing(ledger: Ledger, tmp_path: Path) -> None:
    made = build(settled(ledger, record(write_run(tmp_path, kind="none")), BASIC, 1))
    assert verify(made).passed
    assert made.accounting.blocks is not None
    assert {block.spent.epsilon for block in made.accounting.blocks.charged} == {0.0}


def test_a_card_of_a_whole_population_has_no_blocks_and_reads_as_before(plain: RunRecord) -> None:
    made = build(plain)
    document = made.to_json()
    assert "blocks" not in document["accounting"]
    assert "basic composition" in document["accounting"]["population"]["statement"]
    assert PrivacyCard.model_validate_json(made.model_dump_json()).to_json() == document


@pytest.mark.parametrize("change", [{"charged": []}, {"blocks_per_person": 0}, {"unit": " "}, {"more": 1}])
def test_blocks_that_say_too_little_are_refused(
    ledger: Ledger, plain: RunRecord, change: dict[str, Any]
) -> None:
    document = build(settled(ledger, plain, BASIC, 1)).to_json()
    document["accounting"]["blocks"] |= change
    with pytest.raises(RefusedError, match=r"accounting\.blocks"):
        verify(document)


def test_a_block_cannot_be_stated_twice(ledger: Ledger, plain: RunRecord) -> None:
    document = build(settled(ledger, plain, BASIC, 1)).to_json()
    document["accounting"]["blocks"]["charged"] *= 2
    with pytest.raises(RefusedError, match="charged to a block once"):
        verify(document)

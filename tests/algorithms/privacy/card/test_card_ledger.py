"""A card is compared with what the ledger was told when its run was settled."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from algorithms.core.receipt import account_of
from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.card import (
    SIGNER,
    PrivacyCard,
    RunRecord,
    build,
    check_charged,
    public_key_of,
    text,
    verify,
)
from algorithms.privacy.ledger import Ledger
from tests.algorithms.privacy.card.charged_run import charge
from tests.algorithms.privacy.conftest import KEY, card_of
from tests.support.changed import changed
from tests.support.soak import soak_but
from tests.support.synthetic_run import DELTA, Kind, record, with_entries, write_run


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")


OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def of(document: dict[str, Any]) -> PrivacyCard:
    """The card of these facts, signed by the owner."""
    return card_of(document).sign(KEY)


SETTLED: list[tuple[Kind, tuple[str, ...], str]] = [
    ("private", (), "basic"),
    ("private", ("may", "june"), "zcdp"),
    ("private", ("may", "june"), "basic"),
    ("private", (), "zcdp"),
    ("seeded", ("may", "june"), "basic"),
    ("none", (), "zcdp"),
]
"""Each rule with and without blocks; noise that protects nobody with one of them."""


@pytest.mark.parametrize(
    ("kind", "blocks", "rule"),
    soak_but(SETTLED, product(get_args(Kind), ((), ("may", "june")), ("basic", "zcdp"))),
)
def test_the_card_that_the_run_wrote_is_that_of_its_settlement(
    ledger: Ledger, tmp_path: Path, kind: Kind, blocks: tuple[str, ...], rule: str
) -> None:
    run = record(write_run(tmp_path / "run", kind=kind))
    if rule == "zcdp":
        run.receipt.events[-1]["event"] = run.receipt.events[0]["event"]  # a sample has no rho
    check_charged(charge(ledger, run, *blocks, rule="basic" if kind == "none" else rule), ledger)


def one(rows: list[Any]) -> list[Any]:
    return rows[:1]


def halved(number: float) -> float:
    return number / 2


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("accounting.across_runs.kind", "zcdp", "composition"),
        ("setting.public_records", False, "public_records"),
        ("mechanism.algorithm", "adaclip", "algorithm"),
        ("setting.dataset", "others", "dataset"),
        ("setting.unit", "one visit", "unit"),
        ("evidence.ledger_head", "0" * 64, "ledger_head"),
        ("events", one, "events"),
        ("accounting.epsilon.pld", 0.0272, "cost"),
        ("accounting.delta", 1e-9, "cost"),
        (("evidence", "files", "model.safetensors"), "a" * 64, "model"),
        ("setting.adjacency", "REPLACE_ONE", "adjacency"),
        ("accounting.population.cap.epsilon", 9000.0, "population"),
        ("accounting.blocks.charged", one, "blocks"),
        ("accounting.blocks.charged.0.spent.epsilon", halved, "blocks"),
        ("accounting.blocks.blocks_per_person", 2, "blocks_per_person"),
    ],
)
def test_another_card_is_refused_by_what_differs(
    ledger: Ledger, tmp_path: Path, place: str, value: object, named: str
) -> None:
    blocks = ("may", "june") if "blocks" in place else ()
    card = charge(ledger, record(write_run(tmp_path / "run")), *blocks)
    other = of(changed(card.to_json(), place, value))
    with pytest.raises(RefusedError, match=f"differ in {named};"):
        check_charged(other, ledger)
    with pytest.raises(RefusedError, match=f"differ in signature, {named};"):
        check_charged(other.sign(OTHER), ledger)


@pytest.mark.parametrize("stated", [None, 1, 2])
def test_all_records_of_a_person_count_where_a_population_was_declared_with_several(
    ledger: Ledger, tmp_path: Path, stated: int | None
) -> None:
    run = record(write_run(tmp_path / "run"))
    run = replace(run, data=with_entries(run.data, public=True, per_person=3))
    terms = {"unit": run.data.unit}
    ledger.declare("painters", Budget(900.0, 0.1), public=True, blocks_per_person=3, bound=terms)
    cost = Budget(run.receipt.cost or math.inf, DELTA)
    notes = run.plan.ledger_notes | {SIGNER: public_key_of(KEY)}
    ledger.reserve(run.receipt.run_id, "painters", cost, events=run.receipt.events, notes=notes)
    ledger.settle(run.receipt.run_id, cost, events=run.receipt.events, model=None)
    account = account_of(ledger, "painters", run.receipt.run_id)
    card = build(replace(run, receipt=run.receipt.model_copy(update={"ledger": account})), KEY)
    check_charged(card, ledger)
    document = changed(card.to_json(), "setting.per_person", stated)
    if stated is None:
        del document["setting"]["per_person"]
    with pytest.raises(RefusedError, match="differ in per_person;"):
        check_charged(of(document), ledger)


def test_a_run_is_signed_with_the_key_it_was_reserved_with(ledger: Ledger, tmp_path: Path) -> None:
    card = charge(ledger, record(write_run(tmp_path / "run")))
    check_charged(card, ledger)
    for other in (card.sign(None), card.sign(OTHER)):
        with pytest.raises(RefusedError, match="differ in signature;"):
            check_charged(other, ledger)


def test_a_run_with_known_noise_cannot_be_shown_as_a_private_one(ledger: Ledger, tmp_path: Path) -> None:
    """Not even where the plan beside the card is made anew for it and the owner signs it."""
    run = record(write_run(tmp_path / "run", kind="seeded"))
    honest = charge(ledger, run)
    account = account_of(ledger, "painters", run.receipt.run_id)
    receipt = run.receipt.model_copy(update={"ledger": account, "private_noise": True})
    plan, data = with_entries(run.plan, noise="secure"), with_entries(run.data, public=True)
    forged = build(RunRecord(plan, receipt, data, run.trace), KEY)
    check_charged(honest, ledger)
    assert verify(forged).passed and forged.setting.private
    assert [check.name for check in verify(forged, tmp_path / "run/artifacts").failures] == [
        "terms of the plan"
    ]
    with pytest.raises(RefusedError, match="differ in noise;"):
        check_charged(forged, ledger)


def test_the_card_says_whom_the_numbers_of_blocks_protect_and_how_runs_add_up(
    ledger: Ledger, tmp_path: Path
) -> None:
    run = record(write_run(tmp_path / "run"))
    whole = charge(ledger, run)
    assert whole.accounting.blocks is None and "basic composition" in text.population(whole)
    document = whole.to_json()
    account = {"name": "may"} | document["accounting"]["population"]
    document["accounting"] |= {
        "blocks": {"charged": [account], "blocks_per_person": 3},
        "across_runs": {"kind": "renyi", "order": 6.0},
    }
    card = of(document)
    assert "one person with records (one drawing) in at most 3 blocks" in text.block_unit(card)
    assert "Rényi divergences of order 6.0" in text.population(card)
    assert "basic" not in text.markdown(card)


def test_the_account_is_that_of_the_settlement_however_late_it_is_taken(
    ledger: Ledger, tmp_path: Path
) -> None:
    run = record(write_run(tmp_path / "run"))
    card, run_id = charge(ledger, run, "may", "june"), run.receipt.run_id
    before = account_of(ledger, "painters", run_id)
    ledger.set_cap("painters", Budget(1.0, 1e-5), block="june")
    again = account_of(ledger, "painters", run_id)
    assert again.head == ledger.head() != before.head
    assert again.model_copy(update={"head": ""}) == before.model_copy(update={"head": ""})
    blocks = card.accounting.blocks
    assert blocks is not None and [block.name for block in blocks.charged] == ["may", "june"]
    with pytest.raises(RefusedError, match="no settlement of run 'never'"):
        account_of(ledger, "painters", "never")


def test_a_head_from_before_the_settlement_is_refused_and_a_later_one_is_not(
    ledger: Ledger, tmp_path: Path
) -> None:
    document = charge(ledger, record(write_run(tmp_path / "run"))).to_json()
    for row in ledger.history():
        document["evidence"]["ledger_head"] = row.hash
        card = of(document)
        if row.seq >= 3:  # the population, the reservation, the settlement
            check_charged(card, ledger)
        else:
            with pytest.raises(RefusedError, match="differ in ledger_head;"):
                check_charged(card, ledger)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("evidence.run_id", "another", "no settlement of run 'another' on 'painters'"),
        ("setting.population", "drawers", "drawers"),
    ],
)
def test_a_run_that_was_never_settled_there_is_refused(
    ledger: Ledger, tmp_path: Path, place: str, value: str, words: str
) -> None:
    card = charge(ledger, record(write_run(tmp_path / "run")))
    with pytest.raises(RefusedError, match=words):
        check_charged(of(changed(card.to_json(), place, value)), ledger)

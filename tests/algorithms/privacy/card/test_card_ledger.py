"""A card is compared with what the ledger was told when its run was settled."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from algorithms.core.receipt import account_of
from algorithms.errors import RefusedError
from algorithms.privacy.accounting.budget import Budget
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
from algorithms.privacy.ledger import Composition, Ledger
from tests.algorithms.privacy.conftest import KEY
from tests.support.synthetic_run import DELTA, Kind, record, write_run


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")


OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def of(document: dict[str, Any]) -> PrivacyCard:
    """The card of these facts, signed by the owner."""
    return PrivacyCard.model_validate_json(json.dumps(document)).signed(KEY)


def charged(ledger: Ledger, run: RunRecord, *blocks: str, rule: str = "basic") -> PrivacyCard:
    """The card of the run, charged to a population and settled there; another run is charged after it."""
    run = replace(run, public={**run.public, "public": True})
    terms = {"unit": run.public["unit"]}
    ledger.declare("painters", Budget(900.0, 0.1), public=True, composition=Composition(rule), bound=terms)
    for block in blocks:
        ledger.declare_block("painters", block)
    cost = Budget(math.inf if run.receipt["epsilon"]["pld"] is None else run.receipt["epsilon"]["pld"], DELTA)
    for run_id, model in (
        (run.receipt["run_id"], run.receipt["sha256"]["model.safetensors"]),
        ("later", None),
    ):
        about = {name: run.plan[name] for name in ("algorithm", "dataset", "adjacency", "noise")}
        about[SIGNER] = public_key_of(KEY)
        events, named = run.receipt["events"], blocks or ("all",)
        ledger.reserve(run_id, "painters", cost, events=events, about=about, blocks=named)
        ledger.settle(run_id, cost, events=run.receipt["events"], model=model)
    account = account_of(ledger, "painters", run.receipt["run_id"])
    return build(replace(run, receipt={**run.receipt, **account}), KEY)


@pytest.mark.parametrize("kind", ["private", "seeded", "none"])
@pytest.mark.parametrize("blocks", [(), ("may", "june")])
@pytest.mark.parametrize("rule", ["basic", "zcdp"])
def test_the_card_that_the_run_wrote_is_that_of_its_settlement(
    ledger: Ledger, tmp_path: Path, kind: Kind, blocks: tuple[str, ...], rule: str
) -> None:
    run = record(write_run(tmp_path / "run", kind=kind))
    if rule == "zcdp":
        run.receipt["events"][-1]["event"] = run.receipt["events"][0]["event"]  # a sample has no rho
    check_charged(charged(ledger, run, *blocks, rule="basic" if kind == "none" else rule), ledger)


def cut_events(document: dict[str, Any]) -> None:
    document["events"] = document["events"][:1]


def lower_the_cost(document: dict[str, Any]) -> None:
    document["accounting"]["epsilon"]["pld"] = 0.0272


def lower_delta(document: dict[str, Any]) -> None:
    document["accounting"]["delta"] = 1e-9


def name_another_model(document: dict[str, Any]) -> None:
    document["evidence"]["files"]["model.safetensors"] = "a" * 64


def turn_adjacency(document: dict[str, Any]) -> None:
    document["setting"]["adjacency"] = "REPLACE_ONE"


def raise_the_cap(document: dict[str, Any]) -> None:
    document["accounting"]["population"]["cap"]["epsilon"] = 9000.0


def add_up_otherwise(document: dict[str, Any]) -> None:
    document["accounting"]["across_runs"]["kind"] = "zcdp"


def make_the_records_public(document: dict[str, Any]) -> None:
    document["setting"]["public_records"] = not document["setting"]["public_records"]


def name_another_algorithm(document: dict[str, Any]) -> None:
    document["mechanism"]["algorithm"] = "adaclip"


def name_another_data_set(document: dict[str, Any]) -> None:
    document["setting"]["dataset"] = "others"


def protect_another_unit(document: dict[str, Any]) -> None:
    document["setting"]["unit"] = "one visit"


def name_no_head(document: dict[str, Any]) -> None:
    document["evidence"]["ledger_head"] = "0" * 64


CHANGES = [
    (add_up_otherwise, "composition"),
    (make_the_records_public, "public_records"),
    (name_another_algorithm, "algorithm"),
    (name_another_data_set, "dataset"),
    (protect_another_unit, "unit"),
    (name_no_head, "ledger_head"),
    (cut_events, "events"),
    (lower_the_cost, "cost"),
    (lower_delta, "cost"),
    (name_another_model, "model"),
    (turn_adjacency, "adjacency"),
    (raise_the_cap, "population"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_another_card_is_refused_by_what_differs(
    ledger: Ledger, tmp_path: Path, change: Callable[[dict[str, Any]], None], named: str
) -> None:
    document = charged(ledger, record(write_run(tmp_path / "run"))).to_json()
    change(document)
    with pytest.raises(RefusedError, match=f"differ in {named};"):
        check_charged(of(document), ledger)
    with pytest.raises(RefusedError, match=f"differ in signature, {named};"):
        check_charged(of(document).signed(OTHER), ledger)


def test_a_run_that_was_to_be_signed_is_signed_with_the_key_it_was_reserved_with(
    ledger: Ledger, tmp_path: Path
) -> None:
    card = charged(ledger, record(write_run(tmp_path / "run")))
    check_charged(card, ledger)
    for other in (card.signed(None), card.signed(OTHER)):
        with pytest.raises(RefusedError, match="differ in signature;"):
            check_charged(other, ledger)


def test_a_run_with_known_noise_cannot_be_shown_as_a_private_one(ledger: Ledger, tmp_path: Path) -> None:
    """Not even where the plan beside the card is made anew for it and the owner signs it."""
    run = record(write_run(tmp_path / "run", kind="seeded"))
    honest = charged(ledger, run)
    ledger_part = account_of(ledger, "painters", run.receipt["run_id"])
    receipt = {**run.receipt, **ledger_part, "private_noise": True}
    plan, public = {**run.plan, "noise": "secure"}, {**run.public, "public": True}
    forged = build(RunRecord(plan, receipt, public, run.trace, run.software), KEY)
    check_charged(honest, ledger)
    assert verify(forged).passed and forged.setting.private
    assert [check.name for check in verify(forged, tmp_path / "run/artifacts").failures] == [
        "terms of the plan"
    ]
    with pytest.raises(RefusedError, match="differ in noise;"):
        check_charged(forged, ledger)


def test_other_blocks_are_refused(ledger: Ledger, tmp_path: Path) -> None:
    document = charged(ledger, record(write_run(tmp_path / "run")), "may", "june").to_json()
    spent = document["accounting"]["blocks"]["charged"][0]["spent"]["epsilon"]
    for blocks in (
        document["accounting"]["blocks"]["charged"][1:],
        [
            {**row, "spent": {"epsilon": spent / 2, "delta": DELTA}}
            for row in document["accounting"]["blocks"]["charged"]
        ],
    ):
        other = {**document, "accounting": {**document["accounting"]}}
        other["accounting"]["blocks"] = {**document["accounting"]["blocks"], "charged": blocks}
        with pytest.raises(RefusedError, match="differ in blocks;"):
            check_charged(of(other), ledger)


def test_another_number_of_blocks_a_person_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    document = charged(ledger, record(write_run(tmp_path / "run")), "may", "june").to_json()
    document["accounting"]["blocks"]["blocks_per_person"] = 2
    with pytest.raises(RefusedError, match="differ in blocks_per_person;"):
        check_charged(of(document), ledger)


def test_the_card_says_whom_the_numbers_of_blocks_protect_and_how_runs_add_up(
    ledger: Ledger, tmp_path: Path
) -> None:
    run = record(write_run(tmp_path / "run"))
    whole = charged(ledger, run)
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
    card, run_id = charged(ledger, run, "may", "june"), run.receipt["run_id"]
    before = account_of(ledger, "painters", run_id)["ledger"]
    ledger.set_cap("painters", Budget(1.0, 1e-5), block="june")
    again = account_of(ledger, "painters", run_id)["ledger"]
    assert again["head"] == ledger.head() != before["head"]
    assert again | {"head": ""} == before | {"head": ""}
    blocks = card.accounting.blocks
    assert blocks is not None and [block.name for block in blocks.charged] == ["may", "june"]
    with pytest.raises(RefusedError, match="no settlement of run 'never'"):
        account_of(ledger, "painters", "never")


def test_a_head_from_before_the_settlement_is_refused_and_a_later_one_is_not(
    ledger: Ledger, tmp_path: Path
) -> None:
    document = charged(ledger, record(write_run(tmp_path / "run"))).to_json()
    for row in ledger.history():
        document["evidence"]["ledger_head"] = row.hash
        card = of(document)
        if row.seq >= 3:  # the population, the reservation, the settlement
            check_charged(card, ledger)
        else:
            with pytest.raises(RefusedError, match="differ in ledger_head;"):
                check_charged(card, ledger)


def test_a_run_that_was_never_settled_there_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    card = charged(ledger, record(write_run(tmp_path / "run")))
    document = card.to_json()
    document["evidence"]["run_id"] = "another"
    with pytest.raises(RefusedError, match="no settlement of run 'another' on 'painters'"):
        check_charged(of(document), ledger)
    document = card.to_json()
    document["setting"]["population"] = "drawers"
    with pytest.raises(RefusedError, match="drawers"):
        check_charged(of(document), ledger)

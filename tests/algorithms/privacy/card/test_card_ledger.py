"""A card is compared with what the ledger was told when its run was settled."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from algorithms.core.receipt import account_of
from algorithms.errors import RefusedError
from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.card.build import PrivacyCard, RunRecord, build, verify
from algorithms.privacy.card.ledger import check_charged
from algorithms.privacy.card.words import across_runs
from algorithms.privacy.ledger import Composition, Ledger
from tests.support.synthetic_run import DELTA, Kind, record, write_run


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")


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
        events, named = run.receipt["events"], blocks or ("all",)
        ledger.reserve(run_id, "painters", cost, events=events, about=about, blocks=named)
        ledger.settle(run_id, cost, events=run.receipt["events"], model=model)
    account = account_of(ledger, "painters", run.receipt["run_id"])
    return build(RunRecord(run.plan, {**run.receipt, **account}, run.public, run.trace, run.software))


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
    sentence = across_runs({"composition": {"kind": "zcdp"}})
    document["accounting"]["population"]["statement"] = sentence


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
        check_charged(PrivacyCard.model_validate_json(json.dumps(document)), ledger)


def test_a_run_with_known_noise_cannot_be_shown_as_a_private_one(ledger: Ledger, tmp_path: Path) -> None:
    """Not even where every sentence, the plan beside the card and all checksums are made anew for it."""
    run = record(write_run(tmp_path / "run", kind="seeded"))
    honest = charged(ledger, run)
    ledger_part = account_of(ledger, "painters", run.receipt["run_id"])
    receipt = {**run.receipt, **ledger_part, "private_noise": True}
    forged = build(
        RunRecord(
            {**run.plan, "noise": "secure"}, receipt, {**run.public, "public": True}, run.trace, run.software
        )
    )
    check_charged(honest, ledger)
    assert verify(forged).passed and forged.setting.private
    assert [check.name for check in verify(forged, tmp_path / "run/artifacts").failures] == ["mechanism"]
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
            check_charged(PrivacyCard.model_validate_json(json.dumps(other)), ledger)


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("blocks_per_person", 2, "blocks_per_person"),
        ("composition", {"kind": "renyi", "order": 8.0, "statement": "?"}, "composition"),
    ],
)
def test_other_terms_of_blocks_are_refused(
    ledger: Ledger, tmp_path: Path, part: str, value: object, named: str
) -> None:
    document = charged(ledger, record(write_run(tmp_path / "run")), "may", "june").to_json()
    document["accounting"]["blocks"][part] = value
    with pytest.raises(RefusedError, match=f"differ in {named};"):
        check_charged(PrivacyCard.model_validate_json(json.dumps(document)), ledger)


def test_a_head_from_before_the_settlement_is_refused_and_a_later_one_is_not(
    ledger: Ledger, tmp_path: Path
) -> None:
    document = charged(ledger, record(write_run(tmp_path / "run"))).to_json()
    for row in ledger.history():
        document["evidence"]["ledger_head"] = row.hash
        card = PrivacyCard.model_validate_json(json.dumps(document))
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
        check_charged(PrivacyCard.model_validate_json(json.dumps(document)), ledger)
    document = card.to_json()
    document["setting"]["population"] = "drawers"
    with pytest.raises(RefusedError, match="drawers"):
        check_charged(PrivacyCard.model_validate_json(json.dumps(document)), ledger)

"""Documents of a run that somebody edited: what is no longer what it says is refused in one sentence."""

import json
from typing import Any

import pytest

from algorithms.privacy.documents import Receipt
from tests.support.refusals import refused_as

AMOUNT = {"epsilon": 1.0, "delta": 1e-5}
RECEIPT = {
    "run_id": "0123-1",
    "algorithm": "dp_sgd",
    "dataset": "fruit",
    "population": "people",
    "description_sha256": None,
    "private_noise": True,
    "diagnostics": False,
    "device": "cpu",
    "steps": 3,
    "releases": 3,
    "epsilon": {"pld": 1.0, "rdp": 1.5, "pure": None},
    "accountant": "pld",
    "delta": 1e-5,
    "events": [{"event": {"type": "GaussianDpEvent", "noise_multiplier": 2}, "count": 3}],
    "ledger": {"cap": AMOUNT, "spent": AMOUNT, "remaining": AMOUNT, "head": None},
    "software": {"recorded": "training", "python": "3.11", "packages": {"torch": "2"}, "git": None},
    "sha256": {"model.safetensors": "0" * 64},
}


def test_a_receipt_is_read_as_it_was_written() -> None:
    receipt = Receipt.from_json(json.dumps(RECEIPT), "receipt.json")
    assert {name: receipt.to_json()[name] for name in RECEIPT if name != "ledger"} == {
        name: value for name, value in RECEIPT.items() if name != "ledger"
    }
    assert receipt.cost == 1.0


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("delta", "1e-5"),
        ("delta", float("nan")),
        ("delta", 2.0),
        ("epsilon", {"pld": float("nan")}),
        ("epsilon", {"pld": -1.0}),
        ("epsilon", {"rdp": 1.0}),
        ("evaluation_epsilon", float("inf")),
        ("private_noise", "yes"),
        ("private_noise", 1),
        ("steps", 3.0),
        ("steps", True),
        ("steps", -3),
        ("events", [{"event": {}, "count": "3"}]),
        ("run_id", 7),
    ],
)
def test_an_entry_of_another_kind_is_not_taken_for_what_it_resembles(entry: str, value: Any) -> None:
    with refused_as("document_incomplete", where="receipt.json") as refusal:
        Receipt.from_json(json.dumps(RECEIPT | {entry: value}), "receipt.json")
    found = refusal.value.fields
    assert str(found["entry"]).startswith(entry) or entry in str(found["why"])  # where all entries lack one


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(RECEIPT).replace('"delta": 1e-05, "events"', '"delta": 1e400, "events"'),
        json.dumps(RECEIPT).replace('"steps": 3', '"steps": 3' + "0" * 5000),
        "[" * 100_000,
        '{"events": ' + "[" * 5000 + "]" * 5000 + "}",
        b"\xff{}",
        "",
    ],
    ids=["beyond a float", "endless number", "deep", "deep inside", "no text", "empty"],
)
def test_what_no_document_can_be_is_refused_in_one_sentence(content: str | bytes) -> None:
    assert content != json.dumps(RECEIPT)
    with refused_as("document_incomplete", where="receipt.json"):
        Receipt.from_json(content, "receipt.json")

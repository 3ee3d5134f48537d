"""A privacy card that was changed, or whose files were, does not hold; what rounding does to it is tolerated."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from algorithms.privacy.card.build import PrivacyCard, verify
from algorithms.privacy.card.check import digest
from algorithms.privacy.card.verdict import ABOVE, BELOW
from tests.support.synthetic_run import Folders, write_run


def failed(document: dict[str, Any], folder: Path | None = None) -> set[str]:
    return {check.name for check in verify(document, folder).failures}


def hashed_again(document: dict[str, Any]) -> dict[str, Any]:
    document["evidence"]["card_sha256"] = digest(document)
    return document


def understate(document: dict[str, Any]) -> None:
    document["accounting"]["epsilon"]["rdp"] *= 1 - 10 * BELOW


def overstate(document: dict[str, Any]) -> None:
    document["accounting"]["epsilon"]["rdp"] *= 1 + 2 * ABOVE


def understate_the_promise(document: dict[str, Any]) -> None:
    document["setting"]["epsilon"] /= 2


def loosen_delta(document: dict[str, Any]) -> None:
    document["setting"]["delta"] = 1e-7


def add_noise_on_paper(document: dict[str, Any]) -> None:
    document["events"][1]["event"]["event"]["noise_multiplier"] *= 1.1


def drop_an_event(document: dict[str, Any]) -> None:
    document["events"][1]["count"] -= 1


def hide_the_seed(document: dict[str, Any]) -> None:
    document["implementation"]["noise"]["private"] = False


def overspend(document: dict[str, Any]) -> None:
    document["accounting"]["target"]["epsilon"] = 1.0


def choose_a_filter(document: dict[str, Any]) -> None:
    document["accounting"]["composition"] |= {"kind": "renyi", "order": 8.0, "limit": 1.0}


EPSILONS = {"epsilon by PLD", "epsilon by RDP"}
EVENTS = {"events of the trace", "releases of the plan"}


@pytest.mark.parametrize(
    ("change", "checks"),
    [
        (understate, {"epsilon by RDP"}),
        (overstate, {"epsilon by RDP"}),
        (understate_the_promise, {"promise"}),
        (loosen_delta, {"promise"}),
        (add_noise_on_paper, {*EPSILONS, *EVENTS, "queries"}),
        (drop_an_event, {*EPSILONS, *EVENTS, "releases"}),
        (hide_the_seed, {"promise", "statement", "words", "noise", "mechanism"}),
        (overspend, {"target", "mechanism"}),
        (choose_a_filter, {*EPSILONS, "promise", "composition", "statement", "words"}),
    ],
)
def test_a_changed_card_fails_even_with_a_new_hash(
    folders: Folders, document: dict[str, Any], change: Callable[[dict[str, Any]], None], checks: set[str]
) -> None:
    change(document)
    assert failed(copy.deepcopy(document), folders.artifacts) == checks | {"card_sha256"}
    assert failed(hashed_again(document), folders.artifacts) == checks


def test_any_changed_word_breaks_the_hash(document: dict[str, Any]) -> None:
    document["implementation"]["device"] += "!"
    assert failed(document) == {"card_sha256"}


@pytest.mark.parametrize(
    ("factor", "passes"), [(1 - BELOW / 2, True), (1 + ABOVE / 2, True), (1 - 2 * BELOW, False)]
)
def test_rounding_is_tolerated_and_no_more(document: dict[str, Any], factor: float, passes: bool) -> None:
    document["accounting"]["epsilon"]["rdp"] *= factor
    assert verify(hashed_again(document)).passed is passes


def test_other_files_are_noticed(tmp_path: Path, built: PrivacyCard) -> None:
    folders = write_run(tmp_path)
    model = folders.artifacts / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\x01")
    trace = pd.read_parquet(folders.artifacts / "trace.parquet")
    trace.iloc[:-1].to_parquet(folders.artifacts / "trace.parquet", index=False)
    assert failed(built.to_json(), folders.artifacts) == {
        "model.safetensors",
        "trace.parquet",
        "events of the trace",
        "columns of the trace",
    }
    (folders.artifacts / "trace.parquet").write_bytes(b"no parquet")
    assert "events of the trace" in failed(built.to_json(), folders.artifacts)

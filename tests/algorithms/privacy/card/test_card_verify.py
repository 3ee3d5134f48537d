"""A card that was changed in any fact or byte does not hold, nor does one whose events, files or key are others."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pandas as pd
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.epsilon import epsilon_of_rdp
from algorithms.privacy.accounting.events import (
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    Schedule,
    schedule_to_json,
)
from algorithms.privacy.card import PrivacyCard, build, load, public_key_of, text, verify, verify_card
from algorithms.privacy.card.build import row_fits
from algorithms.privacy.documents import BlockSection, Commit
from algorithms.privacy.ledger import Composition as Rule
from tests.algorithms.privacy.conftest import KEY, card_of
from tests.support.bounds_once import bounds_once
from tests.support.card_edits import both_verdicts, sign
from tests.support.changed import changed
from tests.support.refusals import refused
from tests.support.synthetic_run import Folders, read_json, record, with_entries, write_json, write_run

__all__ = ["bounds_once"]

pytestmark = pytest.mark.usefixtures("bounds_once")

Document = dict[str, Any]
OWNER = public_key_of(KEY)
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
Place = tuple[str | int, ...]


METHOD_FACTS: Document = {
    "selection_law": {"candidates": 11, "noise_scale": 8990.0, "gain": 601.9, "distance": 0.0057},
    "paper_protocol": {"paper": "A. Author", "settings": {"clip_norm": 2.0}, "departures": ["clip_norm"]},
}
"""What a method may have planned that a card states."""


@cache
def full(folder: Path) -> PrivacyCard:
    """A card of which no field is null or empty."""
    run = record(write_run(folder))
    account = run.receipt.ledger
    block = BlockSection(name="may", cap=account.cap, spent=account.spent, remaining=account.remaining)
    ledger = account.model_copy(
        update={"blocks": (block,), "blocks_per_person": 2, "composition": Rule("renyi", 6.0)}
    )
    software = run.receipt.software.model_copy(update={"git": Commit(commit="c0ffee", dirty=False)})
    model = run.plan.model.to_json() | {
        "settings": {"units": 3},
        "files": {"start": "a" * 64, "words_file": "b" * 64},
        "reinitialize": ["head"],
        "freeze": ["body"],
    }
    plan = with_entries(
        run.plan,
        model=model,
        features={"name": "whitened", "groups": 0},
        filter={"kind": "renyi", "order": 8.0, "limit": 1.0},
        method_params=METHOD_FACTS,
    )
    receipt = run.receipt.model_copy(update={"ledger": ledger, "software": software})
    run = replace(run, plan=plan, receipt=receipt)
    return build(run, KEY)


def leaves(value: Any, above: Place = ()) -> Iterator[Place]:
    """The places of all facts that hold no others."""
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from leaves(item, (*above, key))
    else:
        yield above


def _another(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1 if value >= 1 else value / 2 + 1e-3
        case str() if len(value) in (64, 128):
            return value[:-1] + ("0" if value[-1] != "0" else "1")
        case str():
            return _OTHERS.get(value, f"{value}!")
        case None:
            return 1.0
    return [value]


_OTHERS = {
    "ADD_OR_REMOVE_ONE": "REPLACE_ONE",
    "none": "scattering",
    "private": "seeded",
    "secure": "seeded",
    "pld": "rdp",
    "training": "report",
    "float32": "bfloat16",
}


def failed(card: PrivacyCard, folder: Path | None = None) -> set[str]:
    return {check.name for check in verify(card, folder, key=OWNER).failures}


def test_every_fact_is_signed_and_every_byte_counts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whoever changes a fact is found out, also with a key of his own; what is no card any more is refused."""
    card, path = full(tmp_path_factory.mktemp("full")), tmp_path_factory.mktemp("file") / "privacy_card.json"
    document, refusals = card.to_json(), 0
    places = list(leaves(document))
    assert len(places) > 110
    assert card.signature_holds()
    for place in places:
        edited = changed(document, place, _another)
        assert edited != document
        try:
            other = card_of(edited)
        except ValueError:  # no card at all
            path.write_bytes((json.dumps(edited, indent=2, ensure_ascii=False) + "\n").encode())
            with pytest.raises(RefusedError):
                load(path)
            refusals += 1
            continue
        assert not other.signature_holds(), place
        by_another = other.sign(OTHER)
        assert by_another.signature_holds()
        try:
            assert {"signature"} <= failed(other)
            assert failed(by_another) >= {"owner"}, place
        except RefusedError:  # of events that are none
            assert "events" in place
    assert refusals < len(places) / 5


def test_no_byte_of_the_file_can_be_changed(tmp_path: Path, built: PrivacyCard) -> None:
    path, content = tmp_path / "privacy_card.json", built.to_bytes()
    path.write_bytes(content)
    assert load(path) == built
    text = content.decode()
    delta = '"delta": 1e-05'
    assert delta in text
    others = [text[:-1], text + "\n", text.replace("  ", " "), text.replace("{", "{ ", 1), " " + text]
    others += [text.replace(delta, '"delta": 0.00001'), text.replace(delta, f"{delta}, {delta}", 1)]
    others += [text.replace("one drawing", "one dr\\u0061wing"), text.replace("\n", "\r\n")]
    steps = '"settings": {\n      "steps": '
    assert steps in text
    others += [text.replace(steps, f"{steps}1e9", 1)]  # 1e930, which no number is
    for other in others:
        path.write_bytes(other.encode())
        with pytest.raises(RefusedError, match="was edited"):
            load(path)


def test_a_card_needs_the_owner_s_key(folders: Folders, built: PrivacyCard) -> None:
    assert verify(built, folders.artifacts, key=OWNER).passed
    assert [check.passed for check in verify(built).checks if check.name == "owner"] == [None]
    assert failed(built.sign(OTHER)) == {"owner"}
    bare = build(record(folders))
    assert bare == built.sign(None)
    assert {check.name for check in verify(bare).failures} == {"signature"}
    assert verify(bare, unsigned=True).passed


EPSILONS = {"epsilon by PLD", "epsilon by RDP"}
EVENTS = {"events of the trace", "releases of the plan"}


def times(factor: float) -> Callable[[float], float]:
    return lambda number: number * factor


CHANGES: list[tuple[str, object, set[str]]] = [
    ("accounting.epsilon.rdp", times(1 - 1e-5), {"epsilon by RDP"}),
    ("accounting.epsilon.rdp", times(1.02), {"epsilon by RDP"}),
    ("accounting.epsilon.rdp", None, {"epsilon by RDP"}),
    ("setting.epsilon", times(0.5), {"guarantee"}),
    ("setting.delta", 1e-7, {"guarantee"}),
    ("events.1.event.event.noise_multiplier", times(0.9), {*EPSILONS, *EVENTS}),
    ("events.1.event.event.noise_multiplier", times(1.1), {"epsilon by RDP", *EVENTS}),
    ("events.1.count", lambda count: count + 1, {*EPSILONS, *EVENTS, "releases"}),
    ("events.1.count", lambda count: count - 1, {"epsilon by RDP", *EVENTS, "releases"}),
    ("implementation.noise", "seeded", {"guarantee", "terms of the plan"}),
    ("mechanism.diagnostics", True, {"guarantee"}),
    ("mechanism.settings_from_records", True, {"guarantee", "terms of the plan"}),
    ("accounting.target.epsilon", 1.0, {"target", "terms of the plan"}),
    (
        "accounting.composition",
        lambda fixed: fixed | {"kind": "renyi", "order": 8.0, "limit": 1.0},
        {*EPSILONS, "guarantee", "terms of the plan", "rounding"},
    ),
    ("implementation.rounding.grid_bits", 52, {"rounding"}),
    ("setting.records", 4000, {"terms of the plan"}),
    ("mechanism.model.start", "a" * 64, {"terms of the plan"}),
    ("mechanism.queries.1.clip_norm.least", 0.1, {"columns of the trace"}),
]


@pytest.mark.parametrize(("place", "value", "checks"), CHANGES)
def test_what_contradicts_its_events_or_files_fails_also_where_the_owner_signed_it(
    folders: Folders, document: Document, place: str, value: object, checks: set[str]
) -> None:
    assert failed(card_of(changed(document, place, value)).sign(KEY), folders.artifacts) == checks


@pytest.mark.parametrize(
    ("factor", "passes"), [(1 - 5e-7, True), (1.005, True), (1 - 2e-6, False), (0.9999, False), (0.99, False)]
)
def test_an_epsilon_may_be_above_what_its_events_cost_but_not_below(
    document: Document, factor: float, passes: bool
) -> None:
    other = card_of(changed(document, "accounting.epsilon.rdp", times(factor)))
    assert verify(other.sign(KEY)).passed is passes


@pytest.fixture
def folder(folders: Folders, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders.artifacts, tmp_path / "artifacts"))


def test_other_files_are_noticed(folder: Path, built: PrivacyCard) -> None:
    model = folder / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\x01")
    trace = pd.read_parquet(folder / "trace.parquet")
    trace.iloc[:-1].to_parquet(folder / "trace.parquet", index=False)
    columns = {"events of the trace", "columns of the trace"}
    assert failed(built, folder) == {"model.safetensors", "trace.parquet", *columns}
    (folder / "trace.parquet").write_bytes(b"no parquet")
    assert columns <= failed(built, folder)


COLUMNS: list[Mapping[str, float | str]] = [
    {"noise_std": 0.0},
    {"noise_std": 1e9},
    {"noise_multiplier": 1e-3},
    {"sampling_rate": 1.0},
    {"clip_norm": 5.0},
    {"clip_norm": 5e-4, "noise_multiplier": 1.5e-3},
    {"noise": "laplace"},
    {"sampling": "without replacement"},
    {"epsilon": 0.01},
    {"epsilon": 9.0},
]


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_trace_that_contradicts_its_events_fails(
    folder: Path, built: PrivacyCard, columns: Mapping[str, float | str]
) -> None:
    trace = pd.read_parquet(folder / "trace.parquet")
    trace.loc[trace["kind"] == "gradient", list(columns)] = list(columns.values())
    trace.to_parquet(folder / "trace.parquet", index=False)
    assert failed(built, folder) == {"columns of the trace", "trace.parquet"}


def test_the_beginning_of_a_run_under_a_filter_is_that_of_its_plan(folder: Path, built: PrivacyCard) -> None:
    plan, document = read_json(folder / "plan.json"), built.to_json()
    plan["filter"] = {"kind": "zcdp", "rho": 0.5}
    for before, holds in ([], True), (plan["schedule"][:1], True), (plan["schedule"][1:], False):
        write_json(folder / "plan.json", plan | {"prior_events": before})
        assert ("releases of the plan" not in failed(card_of(document), folder)) is holds
    document["events"] = document["events"][:1]
    for before, holds in (plan["schedule"][:1], True), (plan["schedule"], False):
        write_json(folder / "plan.json", plan | {"prior_events": before})
        assert ("releases of the plan" not in failed(card_of(document), folder)) is holds


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("noise_multiplier", 1e-3),
        ("sampling_rate", 1.0),
        ("steps", 999),
        ("divisor", 7.0),
        ("delta", 0.1),
        ("settings", {"steps": 3}),
        ("dataset", "plants"),
        ("features", {"name": "x"}),
        ("noise", "seeded"),
        ("algorithm", "adaclip"),
        ("target", {"epsilon": 7.0, "delta": 1e-5}),
        ("diagnostics", True),
        *(("method_params", {name: fact}) for name, fact in METHOD_FACTS.items()),
    ],
)
def test_the_plan_of_another_run_is_noticed(folder: Path, built: PrivacyCard, key: str, value: Any) -> None:
    write_json(folder / "plan.json", read_json(folder / "plan.json") | {key: value})
    assert failed(built, folder) == {"terms of the plan", "plan.json"}


def test_what_a_method_has_planned_is_on_the_card_and_in_its_words(folder: Path) -> None:
    plan = read_json(folder / "plan.json") | {"method_params": METHOD_FACTS}
    write_json(folder / "plan.json", plan)
    run = record(Folders(folder, folder))
    card = build(run, KEY)
    assert card.to_json()["mechanism"].items() >= METHOD_FACTS.items()
    (folder / "privacy_card.json").write_bytes(card.to_bytes())
    assert failed(card, folder) == {"plan.json"}  # its checksum alone: the file was changed after the run
    alone = [name for name, passed, _ in verify_card.verify(folder, key=OWNER) if passed is False]
    assert alone == ["plan.json"]
    said = text.markdown(card)
    assert (
        "0.0057 away from a uniform draw" in said and "one of 11 candidates by noise of scale 8,990" in said
    )
    assert "by A. Author: clip" in said and "not the paper's: clip" in said


@pytest.mark.parametrize("content", [b"no plan", b"[]", b"{}", b'{"filter": 1, "adjacency": "x"}'])
def test_a_plan_that_cannot_be_read_fails(folder: Path, built: PrivacyCard, content: bytes) -> None:
    (folder / "plan.json").write_bytes(content)
    assert {"terms of the plan", "releases of the plan"} <= failed(built, folder)


@pytest.mark.parametrize("entry", ["features", "filter", "model"])
def test_a_text_in_place_of_a_section_fails_by_both_verifiers(
    folder: Path, built: PrivacyCard, entry: str
) -> None:
    write_json(folder / "plan.json", read_json(folder / "plan.json") | {entry: "text"})
    (folder / "privacy_card.json").write_bytes(built.to_bytes())
    assert {"terms of the plan", "releases of the plan"} <= failed(built, folder)
    alone = {name for name, passed, _ in verify_card.verify(folder, key=OWNER) if passed is False}
    assert alone == {"plan.json", "plan"}


def test_without_the_files_the_card_is_checked_alone(tmp_path: Path, built: PrivacyCard) -> None:
    checks = verify(built, tmp_path, key=OWNER).checks
    assert {check.name for check in checks if check.passed is None} == {
        "model.safetensors",
        "trace.parquet",
        "plan.json",
        "events of the trace",
        "columns of the trace",
        "releases of the plan",
        "terms of the plan",
    }


OBJECTIVE = dp.ComposedDpEvent([ObjectivePerturbationDpEvent(2.0, 0.1), dp.GaussianDpEvent(60.0)])


@pytest.mark.parametrize(
    ("event", "noise", "multiplier"),
    [
        (dp.GaussianDpEvent(2.0), "gaussian", 2.0),
        (dp.LaplaceDpEvent(2.0), "laplace", 2.0),
        (PureDpEvent(0.25), "knorm", 4.0),
        (dp.dp_event.ZCDpEvent(1 / 8), "laplace", 2.0),
        (OBJECTIVE, "objectivenoise", 2.0),
        (dp.ComposedDpEvent([PureDpEvent(0.6), PureDpEvent(1 / 60)]), "pureobjectivenoise", 2.0),
    ],
)
def test_a_row_is_told_by_its_event(event: dp.DpEvent, noise: str, multiplier: float) -> None:
    def told(
        multiplier: float, event: dp.DpEvent = event, sampling: str = "full batch", rate: float = 1.0
    ) -> bool:
        row = {"kind": "gradient", "clipping": "L2", "noise": noise}
        row |= {"noise_multiplier": multiplier, "sampling": sampling, "sampling_rate": rate}
        return row_fits(row, event)

    of_two = dp.SampledWithoutReplacementDpEvent(10, 2, event)
    sampled = dp.PoissonSampledDpEvent(0.2, event)
    assert told(multiplier)
    assert not told(multiplier / 2)
    assert not told(multiplier, sampled)
    assert told(multiplier, sampled, "poisson", 0.2)
    assert told(multiplier, sampled, "importance", 0.2)
    assert not told(multiplier, sampled, "poisson", 0.1)
    assert told(multiplier, of_two, "without replacement", 0.2)
    assert not told(multiplier, of_two, "without replacement", 0.3)
    assert not told(multiplier, dp.NonPrivateDpEvent())


def test_a_delta_that_no_accountant_takes_fails(built: PrivacyCard, tmp_path: Path) -> None:
    document = built.to_json()
    document["accounting"]["delta"] = document["setting"]["delta"] = 5e-324
    path = tmp_path / "privacy_card.json"
    path.write_bytes(sign(document, KEY))
    verification = verify(load(path), tmp_path, key=public_key_of(KEY))
    assert set(verification.recomputed.values()) == {None}
    assert {"epsilon by PLD", "epsilon by RDP"} <= {check.name for check in verification.failures}


def test_numbers_at_which_an_accountant_fails_are_refused_in_a_sentence(
    built: PrivacyCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No card is known that does it, so an accountant that fails stands in for one."""

    def fail(*_: Any, **__: Any) -> float:
        raise OverflowError("math range error")

    monkeypatch.setattr("algorithms.privacy.accounting.epsilon.epsilon_near", fail)
    with refused("this card's events cannot be priced: math range error"):
        verify(built)


@pytest.mark.parametrize("multiplier", [[1.0], {}, 10**400, 1e308, "1"])
def test_an_event_of_another_form_is_refused_in_a_sentence_by_both_verifiers(
    tmp_path: Path, built: PrivacyCard, multiplier: Any
) -> None:
    document = built.to_json()
    document["events"][0]["event"] = {"type": "GaussianDpEvent", "noise_multiplier": multiplier}  # type: ignore[index, call-overload]
    path = tmp_path / "privacy_card.json"
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    with pytest.raises(RefusedError, match=r"field|noise|event"):
        verify(load(path), unsigned=True)
    with pytest.raises(verify_card.BadCardError):
        verify_card.verify(path, unsigned=True)


@pytest.mark.parametrize(
    "filter_", [{"kind": "zcdp", "rho": 0.1}, {"kind": "renyi", "order": 8.0, "limit": 0.1}]
)
def test_a_filter_at_delta_0_bounds_nothing(built: PrivacyCard, filter_: Document) -> None:
    document = built.to_json()
    document["accounting"]["delta"] = 0.0  # type: ignore[index, call-overload]
    document["accounting"]["composition"] |= filter_  # type: ignore[index, call-overload, operator]
    assert {"guarantee", "epsilon by RDP"} <= failed(card_of(document))


def test_card_of_a_filtered_run_with_a_thousand_kinds_of_samples_verifies(
    tmp_path: Path,
) -> None:
    """As one with importance sampling, whose rate is another in each epoch."""
    document = build(record(write_run(tmp_path / "run")), KEY).to_json()
    rates = (1e-3 + 1e-6 * number for number in range(1100))
    events = [(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(2.0)), 1) for rate in rates]
    price = epsilon_of_rdp(np.array([0.1]), 1e-5, (16.0,))
    costs = {"pld": None, "rdp": price, "pure": None}
    document["accounting"] |= {"accountant": "rdp", "epsilon": costs}
    document["setting"]["epsilon"] = price
    path, query = tmp_path / "privacy_card.json", document["mechanism"]["queries"][0]

    def verdicts(some: Schedule, composition: Mapping[str, Any]) -> tuple[bool, bool]:
        document["events"], document["accounting"]["composition"] = schedule_to_json(some), composition
        document["mechanism"] |= {"releases": len(some), "queries": [query | {"count": len(some)}]}
        path.write_bytes(sign(document, KEY))
        return both_verdicts(path, public_key_of(KEY))

    filtered = {"kind": "renyi", "rho": None, "order": 16.0, "limit": 0.1}
    assert verdicts(events, filtered) == (True, True)
    assert verdicts(events[:50], filtered | {"kind": "schedule", "order": None, "limit": None}) == (
        False,
        False,
    )

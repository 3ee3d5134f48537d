"""The privacy card: facts that survive a file, epsilon from its events alone, and sentences written from both."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, get_args

import dp_accounting as dp
import pytest

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import rounded_up
from algorithms.privacy.accounting.epsilon import REPLACE_ONE, epsilon
from algorithms.privacy.accounting.events import PureDpEvent, schedule_to_json
from algorithms.privacy.accounting.filters import conversion, epsilon_of_zcdp
from algorithms.privacy.card import PrivacyCard, RunRecord, build, load, recompute, text, verify
from algorithms.privacy.card.build import placeholder_trace
from algorithms.privacy.card.schema import CompositionSection, Event, Guarantee
from algorithms.privacy.documents import BlockSection, Receipt
from data.description import Transform
from tests.algorithms.privacy.conftest import KEY, card_of
from tests.support.changed import changed
from tests.support.refusals import refused_as
from tests.support.synthetic_run import DELTA, Folders, Kind, read_json, record, with_entries, write_run

MAY_BE_EMPTY = {"settings", "files", "reinitialize", "frozen"}
FIXED = CompositionSection(kind="schedule", rho=None, order=None, limit=None)


def places(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all fields of a card."""
    if isinstance(value, dict) and above[-1:] not in [("settings",), ("packages",)]:
        for key, item in value.items():
            yield (*above, key)
            yield from places(item, (*above, key))


def without_privacy(run: RunRecord, *, diagnosed: bool, caveat: bool) -> RunRecord:
    plan = with_entries(run.plan, not_private="It was computed from the records." if caveat else None)
    return replace(run, plan=plan, receipt=with_entries(run.receipt, diagnostics=diagnosed))


@pytest.mark.parametrize(
    ("kind", "diagnosed", "caveat", "guarantee"),
    [
        ("private", False, False, "private"),
        ("private", True, False, "diagnosed"),
        ("private", False, True, "diagnosed"),
        ("seeded", False, False, "seeded"),
        ("seeded", True, True, "seeded"),
        ("none", False, False, "none"),
        ("none", True, False, "none"),
    ],
)
@pytest.mark.parametrize("started", [False, True])
def test_every_guarantee_has_facts_that_hold_and_sentences(
    tmp_path: Path, kind: Kind, diagnosed: bool, caveat: bool, guarantee: Guarantee, started: bool
) -> None:
    run = without_privacy(record(write_run(tmp_path, kind=kind)), diagnosed=diagnosed, caveat=caveat)
    start = {"files": {"start": "a" * 64}} if started else {}
    plan = with_entries(run.plan, model=run.plan.model.to_json() | start)
    card = build(replace(run, plan=plan), KEY)
    assert not verify(card).failures
    assert card.setting.guarantee == guarantee
    assert (card.setting.epsilon is None) is (guarantee != "private")
    assert (card.cost is None) is (guarantee == "none")
    assert (card.implementation.rounding is None) is (guarantee == "none")
    said, page = text.statement(card), text.markdown(card)
    assert not re.search(r"[\[{]['\"\d]|\b(None|True|False|null|true)\b|[\[{][\]}]", page)  # no value as code
    assert (
        said in page
        and card.setting.unit in page
        and text.rounding(card.implementation.rounding, "cpu") in page
    )
    assert said.startswith("NOT PRIVATE: ") is (guarantee != "private")
    assert text.protection_sentence(card).startswith("Nobody.") is (guarantee != "private")
    assert any("k times as much" in one for one in text.not_protected(card)) is (guarantee == "private")
    assert ("when one record (one drawing) is added or removed" in said) is (guarantee == "private")
    assert (text.DIAGNOSED in said) is diagnosed and (text.FROM_RECORDS in said) is caveat
    assert ("without noise and may give away" in said) is (guarantee == "none")
    assert ("seeded generator" in said) is (guarantee == "seeded")
    assert ("starts from" in said) is started
    assert any("starts from" in item for item in text.not_protected(card)) is started
    assert ("start" in text.owner_must(card)[-1]) is started
    number = rounded_up(card.cost or 0.0)
    assert f"epsilon by PLD: {'none' if card.cost is None else number}" in page
    assert "at delta 0" not in page and "PerExample" not in page
    checks = {check.name: check.detail for check in verify(card).checks}
    assert checks["epsilon at delta 0"] == "there is no finite one, as stated"
    assert (f"epsilon = {number}" in said) is (guarantee != "none" and not caveat)


def test_the_card_survives_a_file(tmp_path: Path, built: PrivacyCard) -> None:
    (tmp_path / "privacy_card.json").write_bytes(built.to_bytes())
    again = load(tmp_path / "privacy_card.json")
    assert again == built and again.to_bytes() == built.to_bytes() and again.signature_holds()
    assert PrivacyCard.model_validate_json(built.model_dump_json()) == built


def test_a_card_holds_facts_and_no_sentences(document: dict[str, Any]) -> None:
    texts = re.findall(r'": "([^"]*)"', json.dumps(document))
    assert not [found for found in texts if found.endswith(".") or len(found.split()) > 6]


def test_no_field_may_be_missing_or_empty_and_no_other_is_allowed(tmp_path: Path, built: PrivacyCard) -> None:
    file, document = tmp_path / "privacy_card.json", built.to_json()

    def refused(other: dict[str, Any], words: str) -> None:
        file.write_text(json.dumps(other))
        with pytest.raises(RefusedError, match=f"{words}|was edited" if "runs" in words else words):
            load(file)

    paths = list(places(document))
    assert len(paths) > 90
    for path in paths:
        *above, last = path
        without = {key: value for key, value in reduce(getitem, above, document).items() if key != last}
        refused(changed(document, above, without) if above else without, ".".join(path[:2]))
        value = reduce(getitem, path, document)
        if isinstance(value, str | dict | list) and last not in MAY_BE_EMPTY:
            refused(
                changed(document, path, "  " if isinstance(value, str) else type(value)()), ".".join(path[:2])
            )
    for section in ((), ("setting",), ("accounting",), ("mechanism",), ("implementation",), ("evidence",)):
        refused(changed(document, (*section, "surprise"), 1), "surprise")


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"setting": 1}'])
def test_what_is_no_card_is_refused_in_a_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "privacy_card.json"
    path.write_text(content)
    with pytest.raises(RefusedError, match=r"privacy_card\.json"):
        load(path)
    with pytest.raises(RefusedError, match="there is no file"):
        load(tmp_path / "none.json")


def test_an_unknown_event_is_refused(document: dict[str, Any]) -> None:
    magic = {"type": "MagicDpEvent", "noise_multiplier": 1.0}
    with pytest.raises(RefusedError, match="MagicDpEvent"):
        verify(card_of(changed(document, "events.0.event", magic)))


def test_a_run_that_recorded_too_little_gets_no_card(folders: Folders) -> None:
    run = record(folders)
    for missing in ("run_id", "ledger", "epsilon", "private_noise", "device"):
        receipt = {key: value for key, value in run.receipt.to_json().items() if key != missing}
        with refused_as("document_incomplete", where="receipt.json", entry=missing):
            Receipt.from_json(json.dumps(receipt), "receipt.json")
    with refused_as("card_incomplete", field="unit"):
        build(replace(run, data=with_entries(run.data, unit="")))


def test_it_holds_no_checksum_but_those_of_released_files(folders: Folders, document: dict[str, Any]) -> None:
    receipt, signature = read_json(folders.artifacts / "receipt.json"), document["signature"]
    hashes = set(re.findall(r"[0-9a-f]{32,}", json.dumps(document)))
    signed, run_digest = {signature["public_key"], signature["value"]}, receipt["run_id"].rpartition("-")[0]
    assert hashes == {*receipt["sha256"].values(), receipt["ledger"]["head"], run_digest, *signed}


def test_the_model_and_the_features_are_told(folders: Folders) -> None:
    run = record(folders)
    plain = build(run).mechanism
    assert text.features(plain.features) == text.NOTHING_LEARNED
    start = f"Initialised by the architecture's own rule from seed {plain.model.seed}"
    assert text.model_parts(plain.model) == f"{start}. Every parameter is trained."
    files = {"start": "a" * 64, "words_file": "b" * 64}
    model = {"files": files, "reinitialize": ["head"], "freeze": ["body"]}
    plan = with_entries(
        run.plan,
        features={"name": "whitened", "noise_multiplier": 8.0},
        model=run.plan.model.to_json() | model | {"augmentations": 4},
    )
    data = with_entries(run.data, transform="scattering")
    made = build(replace(run, plan=plan, data=data)).mechanism
    assert made.transform == "scattering"
    assert text.features(made.features).startswith("whitened (noise_multiplier: 8.0): learned from the")
    told = text.model_parts(made.model)
    assert f"file with SHA-256 {'a' * 64}, except head, from the seed." in told
    assert "Not trained: body." in told and "4 views" in told
    assert f"words_file: the file with SHA-256 {'b' * 64}" in told


def test_every_choice_has_words() -> None:
    assert set(text.TRANSFORMS) == set(get_args(Transform))
    assert set(text.COMPOSITION) == set(get_args(CompositionSection.model_fields["kind"].annotation))


def test_the_queries_sum_up_the_trace(built: PrivacyCard) -> None:
    count, steps = built.mechanism.queries
    assert (count.kind, count.count, count.noise_std.most) == ("total", 1, 50.0)
    assert (steps.kind, steps.count) == ("gradient", 12)
    assert (steps.clip_norm.least, steps.noise_std.least) == (0.5, 0.75)


def test_an_unbounded_query_is_stated_as_null(tmp_path: Path) -> None:
    made = build(record(write_run(tmp_path, kind="none")))
    assert made.mechanism.queries[0].clip_norm.most is None
    assert made.events[0].event == schedule_to_json([(dp.NonPrivateDpEvent(), 1)])[0]["event"]


def test_epsilon_comes_from_the_events_alone() -> None:
    events = [(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.1)), 1000)]
    found = recompute(events, 1e-5, FIXED)
    assert found["pld"] == pytest.approx(1.5154, abs=5e-5)
    assert found["rdp"] == pytest.approx(1.7118, abs=5e-5)


def test_pld_is_left_out_where_it_does_not_apply() -> None:
    selection = dp.dp_event.ZCDpEvent(0.01)
    found = recompute([(selection, 5)], DELTA, FIXED)
    assert found["pld"] is None
    assert found["rdp"] == pytest.approx(epsilon([(selection, 5)], DELTA, accountant="rdp"))


@pytest.mark.parametrize(("limit", "charged"), [(0.3, 0.3), (0.05, 0.05 + 0.06)])
def test_an_adaptive_spend_costs_what_its_filter_allowed_or_what_was_charged(
    limit: float, charged: float
) -> None:
    chosen = CompositionSection(kind="zcdp", rho=limit, order=None, limit=None)
    mixed = [(dp.dp_event.ZCDpEvent(0.01), 5), (dp.GaussianDpEvent(5.0), 3)]
    expected = pytest.approx(epsilon_of_zcdp(charged, DELTA))
    assert recompute(mixed, DELTA, chosen) == {"pld": None, "rdp": expected, "pure": None}


def test_a_pure_schedule_is_recomputed_as_a_sum() -> None:
    events = [(dp.LaplaceDpEvent(8.0), 4)]
    assert recompute(events, 0.0, FIXED)["pure"] == pytest.approx(0.5)
    assert recompute(events, 0.0, FIXED, REPLACE_ONE)["pure"] == pytest.approx(1.0)


def test_an_adaptive_spend_is_not_accounted_at_the_order_that_suits_it_best() -> None:
    events = [(dp.GaussianDpEvent(3.0), 2)]
    best = recompute(events, DELTA, FIXED)["rdp"]
    at_four = CompositionSection(kind="renyi", rho=None, order=4.0, limit=0.001)
    at_order = recompute(events, DELTA, at_four)["rdp"]
    assert best is not None and at_order is not None and at_order > best * 1.2
    limited = recompute(events, DELTA, at_four.model_copy(update={"limit": 9.0}))["rdp"]
    assert limited == pytest.approx(9.0 + conversion(4.0, DELTA))


@pytest.mark.parametrize("most", [None, 1, 3])
def test_a_card_says_of_whom_how_many_records_were_used(tmp_path: Path, most: int | None) -> None:
    run = record(write_run(tmp_path))
    card = build(replace(run, data=with_entries(run.data, per_person=most)), key=None)
    said, page = text.statement(card), text.markdown(card)
    assert card.setting.per_person == most
    for words, where in (
        ("per_person", card.to_json()["setting"]),
        ("chosen by a keyed hash", page),
        ("the person's column has one name", page),
    ):
        assert (words in where) == (most is not None)
    assert ("one person (" in said) == (most == 1)
    assert ("at most 3 records of a person" in said) == ("together it is" in said) == (most == 3)
    cost = card.setting.epsilon or 0.0
    delta = card.setting.delta * sum(math.exp(place * cost) for place in range(3))
    both = f"epsilon = {rounded_up(3 * cost)} and delta = {rounded_up(delta)}"
    assert (f"for all records of a person together it is {both}" in said) == (most == 3)


@pytest.mark.parametrize("per_person", [None, 1])
def test_a_card_says_who_can_change_sides_only_where_no_column_names_the_person(
    tmp_path: Path, per_person: int | None
) -> None:
    run = record(write_run(tmp_path))
    card = build(
        replace(run, data=with_entries(run.data, holdout="private", per_person=per_person)), key=None
    )
    files = card.evidence.files | {"evaluation.json": "0" * 64}
    card = card.model_copy(update={"evidence": card.evidence.model_copy(update={"files": files})})
    assert ("can be of the other side later" in text.holdout(card)) == (per_person is None)
    who = "Whoever contributed records (one drawing) to the data, held-out records included, of whose own one"
    assert (who in text.protection_sentence(card)) == (per_person == 1)


@pytest.mark.parametrize("rows_per_user", [None, 3])
def test_of_a_population_with_blocks_a_card_protects_a_person_in_one_block(
    tmp_path: Path, rows_per_user: int | None
) -> None:
    run = record(write_run(tmp_path))
    account = run.receipt.ledger
    block = BlockSection(name="may", cap=account.cap, spent=account.spent, remaining=account.remaining)
    ledger = account.model_copy(update={"blocks": (block,), "blocks_per_person": 1})
    receipt = run.receipt.model_copy(update={"ledger": ledger})
    data = with_entries(run.data, per_person=1, pooled=rows_per_user)
    card = build(replace(run, data=data, receipt=receipt), key=None)
    unit, used = "in one block (one drawing), of whose records there", f"{rows_per_user or 'one'}"
    assert f"when what one person has {unit} {used}" in text.statement(card)
    assert (
        "What one person (one drawing) has in one block of the training data, of whose"
        in text.protection_sentence(card)
    )
    assert any("One person in k blocks" in item for item in text.not_protected(card))
    assert "what one person has (one drawing) in one block" in text.block_unit(card)
    whole = build(replace(run, data=data), key=None)
    assert "in one block" not in text.markdown(whole) and "one person (one drawing)" in text.statement(whole)


@pytest.mark.parametrize(("rate", "share"), [(1e-7, "100%"), (4e-6, "25%"), (1e-3, None)])
def test_a_card_says_that_delta_is_not_negligible_where_records_are_hardly_read(
    tmp_path: Path, rate: float, share: str | None
) -> None:
    """Ten steps at delta 1e-5, which is all of 1e-6, a quarter of 4e-5, and a thousandth of 0.01."""
    assert DELTA == 1e-5
    step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(1.0))
    (row,) = schedule_to_json([(step, 10)])
    card = build(record(write_run(tmp_path)), key=None)
    card = card.model_copy(update={"events": (Event(event=row["event"], count=10),)})
    said = [one for one in text.not_protected(card) if one.startswith("A record that is read")]
    assert len(said) == (share is not None) and all(f"is {share} of that" in one for one in said)


@pytest.mark.parametrize("event", [PureDpEvent(0.0), dp.dp_event.ZCDpEvent(0.0)])
def test_a_release_without_a_cost_is_none_that_a_card_can_state(event: dp.DpEvent) -> None:
    with pytest.raises(RefusedError, match="event of no release"):
        placeholder_trace([(event, 1)])

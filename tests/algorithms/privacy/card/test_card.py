"""The privacy card: complete, recomputable from its events alone, and worth nothing without its parts."""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import dp_accounting as dp
import pytest
from safetensors.torch import save_file

from algorithms.errors import RefusedError
from algorithms.models import adapted
from algorithms.privacy.accounting.adjacency import REPLACE_ONE
from algorithms.privacy.accounting.epsilon import epsilon
from algorithms.privacy.accounting.events import schedule_to_json
from algorithms.privacy.accounting.filters import conversion, epsilon_of_zcdp
from algorithms.privacy.card import build as card
from algorithms.privacy.card.build import PrivacyCard, RunRecord, build, read, recompute, verify
from algorithms.privacy.card.model import Composition
from algorithms.privacy.card.start import STARTED
from algorithms.privacy.card.words import DIAGNOSED, NO_NOTES, NOTHING_LEARNED, TRANSFORMS
from data.prepare.description import Transform
from tests.algorithms.models.forms import FORMS, form_of
from tests.support.synthetic_run import DELTA, Folders, Kind, read_json, record, write_json, write_run

FREE = ("mechanism.settings", "implementation.packages", "events")
FIXED = Composition(kind="schedule", rho=None, order=None, limit=None, statement="fixed")


def places(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all fields of a card but those whose keys are free."""
    if isinstance(value, dict) and ".".join(above) not in FREE:
        for key, item in value.items():
            yield (*above, key)
            yield from places(item, (*above, key))


def holder(document: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path[:-1]:
        document = document[key]
    return document


@pytest.mark.parametrize(
    ("kind", "private", "protected"),
    [("private", True, "Whoever"), ("seeded", False, "Nobody"), ("none", False, "Nobody")],
)
def test_every_run_has_a_card_that_holds_and_says_whether_it_is_private(
    tmp_path: Path, kind: Kind, private: bool, protected: str
) -> None:
    folders = write_run(tmp_path, kind=kind)
    run = record(folders)
    made = build(run)
    verification = verify(made, folders.artifacts)
    assert {check.passed for check in verification.checks} == {True}
    assert verification.recomputed == {"pure": None} | run.receipt["epsilon"]
    assert made.setting.private is private
    assert (made.setting.epsilon is not None) is private
    assert made.setting.statement.startswith("NOT PRIVATE") is not private
    assert made.scope.protected.startswith(protected)
    assert (made.accounting.epsilon.pld is None) is (kind == "none")


def test_a_run_with_diagnostics_is_never_private(tmp_path: Path) -> None:
    run = record(write_run(tmp_path))
    made = build(replace(run, receipt={**run.receipt, "diagnostics": True}))
    assert verify(made).passed
    assert (made.setting.private, made.setting.epsilon) == (False, None)
    assert made.setting.statement.startswith("NOT PRIVATE: Diagnostics were computed from the records")
    assert made.scope.protected == "Nobody."
    assert "neither logged nor stored" not in made.scope.side_channels
    assert made.scope.released[-1].startswith("the diagnostics")


@pytest.mark.parametrize("kind", ["seeded", "none"])
def test_diagnostics_are_stated_where_a_run_is_not_private_anyway(tmp_path: Path, kind: Kind) -> None:
    run = record(write_run(tmp_path, kind=kind))
    made = build(replace(run, receipt={**run.receipt, "diagnostics": True}))
    assert made.setting.statement.startswith("NOT PRIVATE: the")
    assert made.setting.statement.endswith(DIAGNOSED)


def test_hidden_diagnostics_do_not_make_a_run_private(document: dict[str, Any]) -> None:
    document["mechanism"]["diagnostics"] = True
    assert "promise" in {check.name for check in verify(document).failures}


def test_the_card_says_what_records_and_model_were_made_of(tmp_path: Path) -> None:
    run = record(write_run(tmp_path))
    plain = build(run).mechanism
    assert (plain.transform, plain.features) == (TRANSFORMS["none"], NOTHING_LEARNED)
    assert plain.model.notes == NO_NOTES
    notes = ["The embedding is random.", "Not trained: embedding."]
    features = {"name": "whitened", "noise_multiplier": 8.0}
    plan = {**run.plan, "features": features, "model": {**run.plan["model"], "notes": notes}}
    made = build(replace(run, plan=plan, public={**run.public, "transform": "scattering"})).mechanism
    assert made.transform == TRANSFORMS["scattering"]
    assert made.features.startswith("whitened (noise_multiplier: 8.0): learned from the records")
    assert made.model.notes == "The embedding is random. Not trained: embedding."


def test_a_model_that_starts_from_a_file_is_not_said_to_cost_this_run_alone(
    tmp_path: Path, folders: Folders
) -> None:
    first = form_of("softmax")
    save_file(first.published(first.initial_parameters()), tmp_path / "start.safetensors")
    shape = FORMS["softmax"].shape
    notes = adapted(form_of("softmax"), input_shape=shape, start=tmp_path / "start.safetensors").notes
    run = record(folders)
    plan = {**run.plan, "model": {**run.plan["model"], "notes": list(notes)}}
    alone, started = build(run), build(replace(run, plan=plan))
    assert verify(started).passed
    assert "is not in that number" in started.setting.statement
    assert "by both together" in started.scope.protected
    assert "number" not in alone.setting.statement and "start" not in alone.scope.protected


def started(run: RunRecord, *, public: bool = False, caveat: str | None = None) -> RunRecord:
    """The run with a model that starts from a file."""
    notes = ["The start is the file earlier.safetensors (SHA-256 ab)."]
    own = {} if caveat is None else {"not_private": caveat}
    plan = {**run.plan, "model": {**run.plan["model"], "notes": notes}, "own": own}
    return replace(run, plan=plan, public={**run.public, "public": public})


@pytest.mark.parametrize("diagnosed", [False, True])
@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize(
    ("kind", "caveat"),
    [("private", None), ("none", None), ("seeded", None), ("seeded", "The step size is of the records.")],
)
def test_a_start_has_its_own_people_whatever_the_run_promises_and_of_whom(
    tmp_path: Path, kind: Kind, public: bool, diagnosed: bool, caveat: str | None
) -> None:
    run = record(write_run(tmp_path, kind=kind))
    run = replace(run, receipt={**run.receipt, "diagnostics": diagnosed})
    made = build(started(run, public=public, caveat=caveat))
    assert not [check.name for check in verify(made).failures]
    said = made.setting.statement
    assert "model that this one starts from" in said if made.setting.private else said.endswith(STARTED)
    assert "the start" in made.scope.protected or "the model that it starts from" in made.scope.protected
    assert any("starts from, whether or not" in item for item in made.scope.not_protected)
    last = made.responsibility.owner_must[-1]
    assert (
        "people in the start" in last if made.setting.private else "unless the model that it starts" in last
    )


def test_a_start_may_not_be_left_out_of_a_card_without_privacy(tmp_path: Path) -> None:
    run = record(write_run(tmp_path, kind="none"))
    document, bare = build(started(run, public=True)).to_json(), build(run).to_json()
    document["setting"]["statement"] = bare["setting"]["statement"]
    for section, names in (("scope", ("protected", "not_protected")), ("responsibility", ("owner_must",))):
        for name in names:
            document[section][name] = bare[section][name]
    assert {"statement", "words"} <= {check.name for check in verify(document).failures}


def test_every_transform_has_words() -> None:
    assert set(TRANSFORMS) == set(get_args(Transform))


def test_a_card_says_what_the_plan_knows_against_its_epsilon(tmp_path: Path) -> None:
    run = record(write_run(tmp_path, kind="seeded"))
    plan = {**run.plan, "own": {"not_private": "The step size was computed from the private records."}}
    made = build(RunRecord(plan, run.receipt, run.public, run.trace, run.software))
    assert made.setting.statement == "NOT PRIVATE: The step size was computed from the private records."
    assert made.setting.private is False


def test_epsilon_comes_from_the_events_alone() -> None:
    events = [(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.1)), 1000)]
    found = recompute(events, 1e-5, FIXED)
    assert found["pld"] == pytest.approx(1.5154, abs=5e-5)
    assert found["rdp"] == pytest.approx(1.7118, abs=5e-5)


def test_the_card_survives_a_file_and_is_checked_without_the_others(
    tmp_path: Path, document: dict[str, Any]
) -> None:
    write_json(tmp_path / "privacy_card.json", document)
    again = read(tmp_path / "privacy_card.json")
    assert again == document
    assert verify(again).passed
    unchecked = {check.name for check in verify(again, tmp_path).checks if check.passed is None}
    assert unchecked == {
        "model.safetensors",
        "trace.parquet",
        "plan.json",
        "events of the trace",
        "columns of the trace",
        "composition",
        "releases of the plan",
        "mechanism",
    }


def test_no_field_may_be_missing_or_empty(document: dict[str, Any]) -> None:
    paths = list(places(document))
    assert len(paths) > 70
    for path in paths:
        without = copy.deepcopy(document)
        del holder(without, path)[path[-1]]
        with pytest.raises(RefusedError, match=re.escape(path[0])):
            verify(without)
    for path in paths:
        value = holder(document, path)[path[-1]]
        if isinstance(value, str | dict | list) and value and path != ("mechanism", "settings"):
            emptied = copy.deepcopy(document)
            holder(emptied, path)[path[-1]] = type(value)() if not isinstance(value, str) else "  "
            with pytest.raises(RefusedError, match=re.escape(path[0])):
                verify(emptied)


def test_no_other_field_is_allowed(document: dict[str, Any]) -> None:
    for path in [(), *((section,) for section in document if section != "events")]:
        more = copy.deepcopy(document)
        holder(more, (*path, ""))["surprise"] = 1
        with pytest.raises(RefusedError, match="surprise"):
            verify(more)


def test_a_run_that_recorded_too_little_gets_no_card(folders: Folders) -> None:
    run = record(folders)
    for missing in ("run_id", "ledger", "epsilon", "private_noise", "device"):
        receipt = {key: value for key, value in run.receipt.items() if key != missing}
        with pytest.raises(RefusedError, match=missing):
            build(RunRecord(run.plan, receipt, run.public, run.trace, run.software))
    with pytest.raises(RefusedError, match="unit"):
        build(RunRecord(run.plan, run.receipt, {**run.public, "unit": ""}, run.trace, run.software))


def test_it_holds_no_checksum_but_those_of_released_files(folders: Folders, document: dict[str, Any]) -> None:
    receipt = read_json(folders.artifacts / "receipt.json")
    hashes = set(re.findall(r"[0-9a-f]{32,}", json.dumps(document)))
    assert hashes == {
        *receipt["sha256"].values(),
        receipt["ledger"]["head"],
        document["evidence"]["card_sha256"],
    }


def test_pld_is_left_out_where_it_does_not_apply() -> None:
    selection = dp.dp_event.ZCDpEvent(0.01)
    found = recompute([(selection, 5)], DELTA, FIXED)
    assert found["pld"] is None
    assert found["rdp"] == pytest.approx(epsilon([(selection, 5)], DELTA, accountant="rdp"))


@pytest.mark.parametrize(("limit", "charged"), [(0.3, 0.3), (0.05, 0.05 + 0.06)])
def test_an_adaptive_spend_costs_what_its_filter_allowed_or_what_was_charged(
    limit: float, charged: float
) -> None:
    chosen = Composition(kind="zcdp", rho=limit, order=None, limit=None, statement="chosen on the way")
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
    at_four = Composition(kind="renyi", rho=None, order=4.0, limit=0.001, statement="chosen on the way")
    at_order = recompute(events, DELTA, at_four)
    assert best is not None
    assert at_order["rdp"] is not None
    assert at_order["rdp"] > best * 1.2
    assert recompute(events, DELTA, at_four.model_copy(update={"limit": 9.0}))["rdp"] == pytest.approx(
        9.0 + conversion(4.0, DELTA)
    )


def test_the_queries_sum_up_the_trace(built: PrivacyCard) -> None:
    count, steps = built.mechanism.queries
    assert (count.kind, count.count, count.noise_std.most) == ("total", 1, 50.0)
    assert (steps.kind, steps.count, steps.clip_norm.least, steps.noise_std.least) == (
        "gradient",
        12,
        0.5,
        0.75,
    )


def test_an_unbounded_query_is_stated_as_null(tmp_path: Path) -> None:
    made = build(record(write_run(tmp_path, kind="none")))
    assert made.mechanism.queries[0].clip_norm.most is None
    assert made.events[0].event == schedule_to_json([(dp.NonPrivateDpEvent(), 1)])[0]["event"]


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"a": 1, "a": 2}', '{"setting": {"epsilon": 1, "epsilon": 3}}']
)
def test_what_is_no_card_is_refused_in_a_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "privacy_card.json"
    path.write_text(content)
    with pytest.raises(RefusedError, match=r"privacy_card\.json"):
        card.read(path)
    with pytest.raises(RefusedError, match="there is no file"):
        card.read(tmp_path / "none.json")


def test_an_unknown_event_is_refused(document: dict[str, Any]) -> None:
    document["events"][0]["event"] = {"type": "MagicDpEvent", "noise_multiplier": 1.0}
    with pytest.raises(RefusedError, match="MagicDpEvent"):
        verify(document)

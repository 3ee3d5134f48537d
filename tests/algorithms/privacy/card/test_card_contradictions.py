"""A privacy card that contradicts itself or the files beside it does not hold, though every checksum was made again."""

import hashlib
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pandas as pd
import pytest

from algorithms.privacy.accounting.events import ObjectivePerturbationDpEvent, PureDpEvent
from algorithms.privacy.card.build import PrivacyCard, build, verify
from algorithms.privacy.card.check import digest
from algorithms.privacy.card.terms import Between, fits
from tests.support.synthetic_run import Folders, Kind, read_json, record, write_json, write_run

Change = Callable[[dict[str, Any]], None]
PLANNED = {"releases of the plan"}


@pytest.fixture
def folder(folders: Folders, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders.artifacts, tmp_path / "artifacts"))


def failed(document: dict[str, Any], folder: Path | None = None) -> set[str]:
    """The checks that fail of a card whose checksums are those of its files and of itself."""
    if folder is not None:
        for name in document["evidence"]["files"]:
            document["evidence"]["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    document["evidence"]["card_sha256"] = digest(document)
    return {check.name for check in verify(document, folder).failures}


def test_a_run_cut_to_its_first_release_is_not_that_of_its_plan(folder: Path, built: PrivacyCard) -> None:
    short = write_run(folder / "short", steps=1)
    document = build(record(short)).to_json()
    for name in ("trace.parquet", "model.safetensors"):
        shutil.copy(short.artifacts / name, folder / name)
    document["mechanism"]["steps"] = built.mechanism.steps
    document["mechanism"]["settings"]["steps"] = built.mechanism.steps
    assert failed(document, folder) == PLANNED
    assert failed(document) == set()


def test_the_beginning_of_a_run_under_a_filter_is_that_of_its_plan(folder: Path, built: PrivacyCard) -> None:
    plan, document = read_json(folder / "plan.json"), built.to_json()
    plan["filter"] = {"kind": "zcdp", "rho": 0.5}
    for before, holds in ([], True), (plan["schedule"][:1], True), (plan["schedule"][1:], False):
        write_json(folder / "plan.json", plan | {"before": before})
        assert ("releases of the plan" not in failed(document, folder)) is holds
    document["events"] = document["events"][:1]
    for before, holds in (plan["schedule"][:1], True), (plan["schedule"], False):
        write_json(folder / "plan.json", plan | {"before": before})
        assert ("releases of the plan" not in failed(document, folder)) is holds


def say_a_smaller_epsilon(document: dict[str, Any]) -> None:
    document["setting"]["statement"] = document["setting"]["statement"].replace("1.387", "0.01")


def protect_another_unit(document: dict[str, Any]) -> None:
    document["setting"]["unit"] = "one gallery"


def protect_everybody(document: dict[str, Any]) -> None:
    document["scope"]["protected"] = "Everybody for ever."


def leave_nobody_out(document: dict[str, Any]) -> None:
    document["scope"]["not_protected"] = ["Nobody."]


def hide_the_number(document: dict[str, Any]) -> None:
    document["scope"]["not_protected"][-1] = document["scope"]["not_protected"][-1].replace("400", "4000")


def free_the_owner(document: dict[str, Any]) -> None:
    document["responsibility"]["owner_must"] = ["Nothing."]


def add_up_otherwise(document: dict[str, Any]) -> None:
    document["accounting"]["population"]["statement"] = "Nothing adds up."


def spend_less_than_the_run(document: dict[str, Any]) -> None:
    document["accounting"]["population"]["spent"]["epsilon"] = 1.386


def spend_a_smaller_delta(document: dict[str, Any]) -> None:
    document["accounting"]["population"]["spent"]["delta"] = 1e-6


def leave_a_million(document: dict[str, Any]) -> None:
    document["accounting"]["population"]["remaining"]["epsilon"] = 1e6


def leave_all_of_delta(document: dict[str, Any]) -> None:
    account = document["accounting"]["population"]
    account["remaining"]["delta"] = account["cap"]["delta"]


def lower_the_cap_and_leave_as_much(document: dict[str, Any]) -> None:
    document["accounting"]["population"]["cap"]["epsilon"] = 0.001


def ask_with_less_noise(document: dict[str, Any]) -> None:
    for query in document["mechanism"]["queries"]:
        query["noise_multiplier"] = {"least": 1e-3, "most": 1e-3}


def ask_all_records(document: dict[str, Any]) -> None:
    document["mechanism"]["queries"][1]["sampling_rate"]["most"] = 1.0


def ask_for_other_noise(document: dict[str, Any]) -> None:
    document["mechanism"]["queries"][1]["noise"] = "laplace"


def start_from_a_file(document: dict[str, Any]) -> None:
    document["mechanism"]["model"]["notes"] = "The start is the file earlier.safetensors."


ALONE = [
    (start_from_a_file, {"statement", "words"}),
    (say_a_smaller_epsilon, {"statement"}),
    (protect_another_unit, {"statement", "words"}),
    (protect_everybody, {"words"}),
    (leave_nobody_out, {"words"}),
    (free_the_owner, {"words"}),
    (add_up_otherwise, {"population"}),
    (spend_less_than_the_run, {"population"}),
    (spend_a_smaller_delta, {"population"}),
    (leave_a_million, {"population"}),
    (leave_all_of_delta, {"population"}),
    (lower_the_cap_and_leave_as_much, {"population"}),
    (ask_with_less_noise, {"queries"}),
    (ask_all_records, {"queries"}),
    (ask_for_other_noise, {"queries"}),
]


@pytest.mark.parametrize(("change", "checks"), ALONE)
def test_a_card_that_contradicts_itself_fails_without_its_files(
    built: PrivacyCard, change: Change, checks: set[str]
) -> None:
    document = built.to_json()
    assert failed(document) == set()
    change(document)
    assert failed(document) == checks


def test_a_cap_lowered_below_what_is_spent_leaves_nothing(built: PrivacyCard) -> None:
    document = built.to_json()
    account = document["accounting"]["population"]
    account["cap"]["epsilon"], account["remaining"]["epsilon"] = 0.001, 0.0
    assert failed(document) == set()


@pytest.mark.parametrize(
    ("field", "value"),
    [("noise_multiplier", 1e-3), ("sampling_rate", 1.0), ("steps", 999), ("divisor", 7.0)],
)
def test_a_mechanism_that_is_not_the_plan_s_fails(
    folder: Path, built: PrivacyCard, field: str, value: float
) -> None:
    document = built.to_json()
    document["mechanism"][field] = value
    assert failed(document, folder) == {"mechanism"}


def test_settings_model_data_set_and_target_are_the_plan_s(folder: Path, built: PrivacyCard) -> None:
    places = [("mechanism", "settings", "steps"), ("mechanism", "model", "name"), ("setting", "dataset")]
    places += [("mechanism", "features"), ("accounting", "target", "epsilon")]
    for *above, last in places:
        document = built.to_json()
        holder = document
        for key in above:
            holder = holder[key]
        holder[last] = 7.0 if last == "epsilon" else 3 if last == "steps" else "another"
        assert failed(document, folder) == {"mechanism"}, last


def test_with_a_plan_the_number_of_records_is_the_plan_s(folder: Path, built: PrivacyCard) -> None:
    document = built.to_json()
    hide_the_number(document)
    assert failed(document) == set()
    assert failed(document, folder) == {"words"}


@pytest.mark.parametrize("content", [b"no plan", b"[]", b"{}", b'{"filter": 1, "adjacency": "x"}'])
def test_a_plan_that_cannot_be_read_fails(folder: Path, built: PrivacyCard, content: bytes) -> None:
    (folder / "plan.json").write_bytes(content)
    assert {"composition", "mechanism", *PLANNED} <= failed(built.to_json(), folder)


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
    trace, document = pd.read_parquet(folder / "trace.parquet"), built.to_json()
    assert failed(document, folder) == set()
    trace.loc[trace["kind"] == "gradient", list(columns)] = list(columns.values())
    trace.to_parquet(folder / "trace.parquet", index=False)
    assert failed(document, folder) == {"columns of the trace"}


def test_a_card_that_sums_up_another_trace_fails(folder: Path, built: PrivacyCard) -> None:
    document = built.to_json()
    document["mechanism"]["queries"][1]["clip_norm"] = {"least": 0.1, "most": 0.5}
    assert failed(document, folder) == {"columns of the trace"}


@pytest.mark.parametrize("kind", ["seeded", "none"])
def test_a_run_without_privacy_may_not_say_otherwise(tmp_path: Path, kind: Kind) -> None:
    document = build(record(write_run(tmp_path, kind=kind))).to_json()
    assert failed(document) == set()
    document["setting"]["statement"] = "Differential privacy with epsilon = 1 and delta = 1e-05."
    document["scope"]["protected"] = "Everybody."
    assert failed(document) == {"statement", "words"}


def test_what_the_plan_knows_against_its_epsilon_stays_on_the_card(tmp_path: Path) -> None:
    folders = write_run(tmp_path, kind="seeded")
    plan = read_json(folders.artifacts / "plan.json") | {
        "own": {"not_private": "It was tuned on the records."}
    }
    write_json(folders.artifacts / "plan.json", plan)
    document = build(record(folders)).to_json()
    assert failed(document, folders.artifacts) == failed(document) == set()
    document["setting"]["statement"] = "NOT PRIVATE: a formality."
    assert failed(document, folders.artifacts) == {"statement"}


@pytest.mark.parametrize(
    ("event", "noise", "multiplier"),
    [
        (dp.GaussianDpEvent(2.0), "gaussian", 2.0),
        (dp.LaplaceDpEvent(2.0), "laplace", 2.0),
        (PureDpEvent(0.25), "knorm", 4.0),
        (PureDpEvent(0.25), "gumbel", 4.0),
        (dp.dp_event.ZCDpEvent(1 / 32), "gumbel", 2.0),
        (dp.dp_event.ZCDpEvent(1 / 8), "laplace", 2.0),
        (
            dp.ComposedDpEvent([ObjectivePerturbationDpEvent(2.0, 0.1), dp.GaussianDpEvent(60.0)]),
            "objectivenoise",
            2.0,
        ),
        (
            dp.ComposedDpEvent([PureDpEvent(math.log1p(0.1) + 0.5), PureDpEvent(1 / 60)]),
            "pureobjectivenoise",
            2.0,
        ),
    ],
)
def test_noise_is_told_by_its_event(event: dp.DpEvent, noise: str, multiplier: float) -> None:
    def told(
        multiplier: float, event: dp.DpEvent = event, sampling: str = "full batch", rate: float = 1.0
    ) -> bool:
        terms = {"sampling": sampling, "noise": noise}
        return fits(event, **terms, rate=Between(rate, rate), multiplier=Between(multiplier, multiplier))

    sampled = dp.PoissonSampledDpEvent(0.2, event)
    of_two = dp.SampledWithoutReplacementDpEvent(10, 2, event)
    assert told(multiplier)
    assert not told(multiplier / 2)
    assert not told(multiplier, sampled)
    assert told(multiplier, sampled, "poisson", 0.2)
    assert told(multiplier, sampled, "importance", 0.2)
    assert not told(multiplier, sampled, "poisson", 0.1)
    assert told(multiplier, of_two, "without replacement", 0.2)
    assert not told(multiplier, of_two, "without replacement", 0.3)
    assert not told(multiplier, dp.NonPrivateDpEvent())

"""Tracking online, against a stand-in on 127.0.0.1.

This proves which requests are sent, in which order and with what in them. It does not prove that Weights & Biases
accepts them, takes equal artifacts for one, or draws a curve.
"""

import json
import logging
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tasks.tracking import runs as finished_runs
from tests.support.offline_run import (
    CONFIG,
    HISTORY,
    LIVE,
    LIVE_CONFIG,
    ROOT,
    SUMMARY,
    keys_of,
    track,
    write_finished,
)
from tests.support.synthetic_run import read_json
from tests.support.tracked_group import GROUP, TABLE
from tests.support.tracked_run import MODEL
from tests.support.waiting import HANG_SECONDS
from tests.support.wandb_answers import ENTITY
from tests.support.wandb_stand_in import Request, StandIn, standing_in

USER, SALT = "a-person-of-flesh", b"salt of the prepared data, hidden"
SENT_FILES = {
    "wandb-summary.json",
    "config.yaml",
    "manifest",
    "plan.json",
    "model.safetensors",
    "trace.parquet",
    "privacy_card.json",
}


class Online:
    """What the stand-in received of a run that was tracked whole."""

    def __init__(self, root: Path) -> None:
        self.root, self.entry = root, write_finished(root)
        (root / "datasets/prepared/salt").write_bytes(SALT)
        self.run_id = self.entry.name
        with standing_in() as self.backend:
            own = {"USER": USER, "LOGNAME": USER}
            printed, self.complaints = track(root, "online", self.backend.known.url, own).communicate(
                timeout=HANG_SECONDS
            )
        assert printed, self.complaints
        self.found: list[Any] = json.loads(printed)


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Online:
    return Online(tmp_path_factory.mktemp("online"))


@pytest.fixture(scope="module")
def backend(online: Online) -> StandIn:
    return online.backend


def test_all_of_it_was_logged_without_a_complaint(online: Online) -> None:
    logged, url, promoted, again = online.found
    assert (logged, promoted, again) == (True, True, True)
    assert url.startswith(f"{online.backend.known.url}/{ENTITY}/epsilonflow/reports/")
    assert online.complaints == ""


def test_the_live_curve_comes_first_and_the_run_goes_on_with_the_whole_truth(online: Online) -> None:
    rows = online.backend.rows(online.run_id)
    live = [row for row in rows if "live/step" in row]
    assert rows[: len(live)] == live
    assert [(row["live/step"], row["live/epsilon_so_far"], row["live/noise_std"]) for row in live] == [
        (1, 0.05, 0.75),
        (30, 1.5, 0.75),
    ]
    assert all(not set(row) & set(HISTORY) for row in live)
    assert [row["_step"] for row in rows] == list(range(len(rows)))


def test_no_step_of_the_curve_is_logged_twice_though_it_was_reported_twice(online: Online) -> None:
    rows = online.backend.rows(online.run_id)
    assert [row["privacy/step"] for row in rows if "privacy/step" in row] == list(range(1, 31))


def test_a_pipeline_is_one_run_with_what_it_used_and_made(online: Online) -> None:
    assert online.backend.artifacts(online.run_id) == ({"dataset"}, {"plan", "model", "trace", "card"})
    upserts = [asked for asked in online.backend.asked("UpsertBucket") if asked["groupName"]]
    assert {asked["groupName"] for asked in upserts} == {online.run_id}
    assert {asked["jobType"] for asked in upserts} == {"train", "promotion"}
    of_training = [asked["displayName"] for asked in upserts if asked["name"] == online.run_id]
    assert of_training[0] == "dp_sgd on animals, in training"
    assert re.fullmatch(r"dp_sgd on animals, epsilon [0-9.]+", of_training[-1])


def test_a_promotion_is_an_artifact_that_serves_and_is_in_the_registry(online: Online) -> None:
    made = [asked["input"] for asked in online.backend.asked("CreateArtifact")]
    (serving,) = (asked for asked in made if asked["artifactCollectionName"] == MODEL)
    assert {alias["alias"] for alias in serving["aliases"]} == {"latest", "serving"}
    (link,) = (asked["input"] for asked in online.backend.asked("LinkArtifact"))
    assert link["artifactID"] == f"{MODEL}:{serving['digest']}"
    assert (link["projectName"], link["artifactPortfolioName"]) == ("wandb-registry-model", MODEL)
    assert [alias["alias"] for alias in link["aliases"]] == ["serving"]


def test_a_registry_that_refuses_costs_a_line(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing:
        def wait(self, timeout: int) -> None:
            raise RuntimeError("there is no\nregistry")

    with caplog.at_level(logging.WARNING):
        finished_runs._register(None, Refusing(), "visits")  # type: ignore[arg-type]
    assert caplog.messages == [
        "W&B's registry did not take visits, which serves without it: there is no registry"
    ]


def test_the_report_is_saved_once_and_kept_as_a_file(online: Online) -> None:
    (saved,) = online.backend.asked("upsertView")
    assert (saved["type"], saved["projectName"], saved["entityName"]) == ("runs", "epsilonflow", ENTITY)
    assert online.run_id in saved["displayName"]
    document = read_json(online.root / ".wandb" / f"report-{online.run_id}.json")
    assert (document["id"], document["project"]["entityName"]) == ("Vmlldzox", ENTITY)
    headings = [
        b["children"][0]["text"] for b in json.loads(saved["spec"])["blocks"] if b["type"] == "heading"
    ]
    assert headings == [
        b["children"][0]["text"] for b in document["spec"]["blocks"] if b["type"] == "heading"
    ]
    assert len(headings) == 6


def test_only_allowed_keys_are_sent(backend: StandIn) -> None:
    for asked in backend.asked("UpsertBucket"):
        sent = keys_of({name: item["value"] for name, item in json.loads(asked["config"]).items()})
        # both are empty here, and have no keys of their own
        config = CONFIG - {"model/files", "model/settings"}
        assert sent in (LIVE_CONFIG, config, config | LIVE_CONFIG, {"name", "run_id"}), sent
        assert asked["program"] in (None, "epsilonflow")
        unsaid = ("host", "repo", "commit", "description", "notes", "sweep", "state")
        assert not any(asked[name] for name in unsaid)
        assert asked["tags"] in (None, [], ["animals", "dp_sgd", "private"])
    for name in backend.known.runs:
        assert {key for row in backend.rows(name) for key in keys_of(row)} <= LIVE | HISTORY
    for stream in (r.document for r in backend.requests if r.path.endswith("file_stream")):
        files = stream.get("files", {})
        assert set(files) <= {"wandb-history.jsonl", "wandb-summary.json"}
        lines = files.get("wandb-summary.json", {}).get("content", [])
        assert {key for line in lines for key in keys_of(json.loads(line))} <= LIVE | HISTORY | SUMMARY


def test_only_allowed_files_are_sent(backend: StandIn) -> None:
    assert {Path(r.path).name for r in backend.requests if r.path.startswith("/upload/")} == SENT_FILES


def test_nothing_about_the_machine_the_person_or_the_salt_is_sent(online: Online) -> None:
    hidden = [USER, socket.gethostname(), str(online.root), str(ROOT), str(Path.home()), SALT.hex()]
    secrets = [rb"(?<![\w/+])" + re.escape(text.encode()) + rb"\b" for text in hidden] + [re.escape(SALT)]
    assert len(online.backend.requests) > 50
    for request in online.backend.requests:
        sent = _whole(request)
        assert not [secret for secret in secrets if re.search(secret, sent)], (request.path, sent[:300])


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    """What the stand-in received of a comparison's group and of the winner of a search."""
    root = tmp_path_factory.mktemp("group")
    write_finished(root)
    with standing_in() as backend:
        printed, complaints = track(root, "online", backend.known.url, {}, "tracked_group").communicate(
            timeout=HANG_SECONDS
        )
    assert (printed, complaints) == ("true", "")
    return backend


def test_a_group_is_a_run_a_member_with_its_numbers_tables_figures_and_files(group: StandIn) -> None:
    upserts = [asked for asked in group.asked("UpsertBucket") if asked["groupName"] == GROUP]
    runs = {asked["jobType"]: asked for asked in upserts}
    assert set(runs) == {"dp_sgd", "summary"}
    assert [run["displayName"] for run in runs.values()] == [f"{GROUP}: {kind}" for kind in runs]
    assert json.loads(runs["dp_sgd"]["config"])["epsilon"]["value"] == 1.0
    assert json.loads(group.known.runs[runs["dp_sgd"]["name"]]["summaryMetrics"])["accuracy"] == 0.75
    name = runs["summary"]["name"]
    assert group.artifacts(name)[1] >= {"comparison"}
    (row,) = group.rows(name)
    assert {key for key in row if not key.startswith("_")} == {"methods", "accuracy"}
    assert (row["methods"]["_type"], row["methods"]["nrows"]) == ("table-file", len(TABLE))
    assert (row["accuracy"]["_type"], row["accuracy"]["width"]) == ("image-file", 4)
    sent = {Path(request.path).name for request in group.requests if request.path.startswith("/upload/")}
    assert "table.csv" in sent
    assert any(name.endswith(".png") for name in sent) and any(name.endswith(".table.json") for name in sent)


def test_winner_of_search_is_named_and_configured_like_any_other_run(group: StandIn) -> None:
    (asked, *_) = (a for a in group.asked("UpsertBucket") if a["jobType"] == "search")
    run_id = asked["name"]
    assert (asked["groupName"], asked["tags"]) == ("animals searches", ["animals", "dp_sgd", "private"])
    assert re.fullmatch(r"dp_sgd on animals, epsilon [0-9.]+", asked["displayName"])
    config = {name: item["value"] for name, item in json.loads(asked["config"]).items() if name != "_wandb"}
    assert keys_of(config) == CONFIG - {"model/files", "model/settings"}  # which are empty here
    summary = json.loads(group.known.runs[run_id]["summaryMetrics"])
    guarantee = {"privacy/epsilon_total", "privacy/delta", "privacy/private"}
    assert {name for name in summary if not name.startswith("_")} == guarantee
    assert group.artifacts(run_id)[1] == {"trace", "card"}
    assert group.rows(run_id) == []


def _whole(request: Request) -> bytes:
    headers = "\n".join(f"{name}: {value}" for name, value in request.headers.items())
    return f"{request.path}\n{headers}\n".encode() + request.body

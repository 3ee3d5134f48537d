"""Tracking: the offline file is read back and every key in it compared with an allow-list; nothing else gets out."""

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tasks import tracking
from tasks.figures import Curve
from tasks.groups import Tracking
from tasks.report import Report, report
from tasks.tracking import CONFIG, HISTORY, STEP, SUMMARY, Finished, history, log_run
from tasks.tracking_promotion import log_promotion
from tests.offline_run import ROOT, Logged, listening, logged_run, read_records, start
from tests.synthetic_run import Folders, public_document, read_json, write_run

OF_WANDB_ITSELF = {"_step", "_runtime", "_timestamp", "_wandb"}
RECORDS = {
    "header",
    "run",
    "telemetry",
    "metric",
    "summary",
    "history",
    "artifact",
    "exit",
    "final",
    "footer",
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    return logged_run(tmp_path_factory.mktemp("tracked"))


def key_of(item: Any) -> str:
    return str(item.key or item.nested_key[0])


def test_only_allowed_kinds_of_records_are_kept(logged: Logged) -> None:
    assert logged.printed == "True\n"
    assert {record.WhichOneof("record_type") for record in logged.records} <= RECORDS


def test_every_key_is_allowed(logged: Logged) -> None:
    (run,) = logged.of("run")
    config = {key_of(item) for item in run.config.update}
    assert config - OF_WANDB_ITSELF == set(CONFIG)
    logged_history = {key_of(item) for record in logged.of("history") for item in record.item}
    assert logged_history - OF_WANDB_ITSELF == set(HISTORY)
    summary = {key_of(item) for record in logged.of("summary") for item in record.update}
    assert summary - OF_WANDB_ITSELF == {*SUMMARY, *HISTORY}
    metrics = {metric.name or metric.glob_name for metric in logged.of("metric")}
    assert metrics == {STEP, "privacy/*"}
    assert not run.config.remove


def test_the_trace_is_logged_by_step(logged: Logged) -> None:
    trace = pd.read_parquet(logged.root / "artifacts" / "trace.parquet").groupby("step").last()
    rows = [
        {key_of(item): json.loads(item.value_json) for item in record.item} for record in logged.of("history")
    ]
    assert [row[STEP] for row in rows] == list(range(1, 31))
    assert [row["privacy/epsilon_bound"] for row in rows] == trace["epsilon"].tolist()
    assert [row["privacy/noise_std"] for row in rows] == trace["noise_std"].tolist()
    card = read_json(logged.root / "artifacts" / "privacy_card.json")
    assert rows[-1]["privacy/epsilon"] == card["setting"]["epsilon"]


def test_the_results_are_the_summary(logged: Logged) -> None:
    summary = {key_of(i): json.loads(i.value_json) for record in logged.of("summary") for i in record.update}
    metrics = read_json(logged.root / "artifacts" / "metrics.json")
    assert summary["test/accuracy"] == metrics["test_accuracy"]
    assert summary["privacy/epsilon_total"] == metrics["epsilon"]
    assert summary["privacy/private"] is True


def test_artifacts_and_their_lineage(logged: Logged) -> None:
    artifacts = {artifact.type: artifact for artifact in logged.of("artifact")}
    assert set(artifacts) == {"dataset", "plan", "trace", "model", "card"}
    assert {kind for kind, artifact in artifacts.items() if artifact.use_after_commit} == {"dataset", "plan"}
    files = {
        kind: [entry.path for entry in artifact.manifest.contents] for kind, artifact in artifacts.items()
    }
    assert files.pop("dataset") == ["description"]
    assert files == {
        "plan": ["plan.json"],
        "trace": ["trace.parquet"],
        "model": ["model.safetensors"],
        "card": ["privacy_card.json"],
    }


def test_the_data_set_is_a_reference_with_its_public_description(logged: Logged) -> None:
    (dataset,) = (artifact for artifact in logged.of("artifact") if artifact.type == "dataset")
    (entry,) = dataset.manifest.contents
    assert entry.ref == "dataset://animals"
    assert not entry.local_path
    assert json.loads(dataset.metadata) == json.loads(json.dumps(public_document()))


def test_nothing_about_the_machine_is_kept(logged: Logged) -> None:
    (run,) = logged.of("run")
    of_run = {field.name for field, _ in run.ListFields()}
    assert of_run == {"run_id", "project", "config", "display_name", "start_time", "telemetry"}
    of_telemetry = {field.name for record in logged.of("telemetry") for field, _ in record.ListFields()}
    versions = {"python_version", "cli_version", "platform"}
    assert of_telemetry <= {"imports_init", "imports_finish", "feature", *versions}


def test_nobody_was_contacted_and_nothing_was_said(logged: Logged) -> None:
    assert logged.connections == 0
    assert logged.complaints == ""


def test_the_network_test_would_notice_a_contact(tmp_path: Path) -> None:
    write_run(tmp_path)
    with listening() as listener:
        process = start(tmp_path, "online", listener)
        try:
            deadline = threading.Event()
            while listener.connections == 0 and process.poll() is None:
                deadline.wait(0.1)
        finally:
            process.kill()
            process.communicate()
    assert listener.connections > 0


def test_files_stay_in_the_project(logged: Logged) -> None:
    assert list((logged.root / "home").iterdir()) == []
    assert {path.name for path in logged.root.iterdir()} == {
        ".wandb",
        "artifacts",
        "data",
        "home",
        "matplotlib",
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def done(folders: Folders) -> Report:
    return report(artifacts=folders.artifacts, prepared=folders.prepared, root=folders.artifacts)


@pytest.fixture
def run(done: Report) -> Finished:
    return Finished(done.card, done.run.metrics, done.run.trace, done.run.public, done.curve)


def test_disabled_touches_nothing(tmp_path: Path, folders: Folders, run: Finished) -> None:
    assert log_run(run, Tracking(mode="disabled"), artifacts=folders.artifacts, root=tmp_path) is False
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_one_line_and_no_loss(
    tmp_path: Path, run: Finished, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the server is\non fire")

    monkeypatch.setattr(tracking, "_log_run", fail)
    before = dict(os.environ)
    with caplog.at_level(logging.WARNING):
        assert log_run(run, Tracking(), artifacts=tmp_path, root=tmp_path) is False
    (line,) = caplog.messages
    assert "the server is on fire" in line
    assert "\n" not in line
    assert dict(os.environ) == before


def test_places_named_by_the_environment_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "mine"))
    monkeypatch.delenv("WANDB_CACHE_DIR", raising=False)
    with tracking._places(tmp_path / "project"):
        assert os.environ["WANDB_DIR"] == str(tmp_path / "mine")
        assert os.environ["WANDB_CACHE_DIR"] == str(tmp_path / "project" / ".wandb" / "cache")
    assert "WANDB_CACHE_DIR" not in os.environ


def test_a_long_run_is_thinned_and_an_infinite_cost_left_out(run: Finished) -> None:
    steps = 10_000
    trace = pd.DataFrame({"step": range(steps), "epsilon": np.inf, "noise_std": 0.0, "noise_multiplier": 0.0})
    rows = list(history(replace(run, trace=trace, curve=Curve([], []))))
    assert len(rows) == 2000
    assert (rows[0][STEP], rows[-1][STEP]) == (1, steps)
    assert set(rows[0]) == {STEP, "privacy/noise_std", "privacy/noise_multiplier"}
    accounted = list(history(replace(run, trace=trace, curve=Curve([4321], [0.5]))))
    assert [row["privacy/epsilon"] for row in accounted if "privacy/epsilon" in row] == [0.5]


def test_a_promotion_is_an_artifact_that_serves(tmp_path: Path) -> None:
    entry = tmp_path / "models/visits/run-1"
    entry.mkdir(parents=True)
    for name in ("model.safetensors", "privacy_card.json"):
        (entry / name).write_text(name)
    code = "import sys; from pathlib import Path; from tasks.groups import Tracking\n"
    code += "from tasks.tracking_promotion import log_promotion\n"
    code += "log_promotion('visits', Path(sys.argv[1]), Tracking(), root=Path(sys.argv[2]))"
    command = [sys.executable, "-c", code, str(entry), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)  # W&B writes the file to its end when the process ends
    (file,) = tmp_path.rglob("run-*.wandb")
    kinds = [(record.WhichOneof("record_type"), record) for record in read_records(file.read_bytes())]
    (artifact,) = (record.artifact for kind, record in kinds if kind == "artifact")
    assert (artifact.name, artifact.type, sorted(artifact.aliases)) == (
        "visits",
        "model",
        ["latest", "serving"],
    )
    assert not log_promotion("visits", entry, Tracking(mode="disabled"), root=tmp_path)

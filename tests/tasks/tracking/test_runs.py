"""Tracking: the offline file is read back and every key in it compared with an allow-list; nothing else gets out."""

import json
import logging
import os
import re
import struct
import subprocess
import sys
import threading
from contextlib import chdir, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from tasks import report
from tasks import tracking as sessions
from tasks.config.params import Tracking
from tasks.reporting.figures import CostsByStep
from tasks.tracking import group_of, has_run_to_log, is_whole, safely, session, wandb_folders
from tasks.tracking import runs as tracking
from tasks.tracking.runs import FinishedRun, history, log_promotion, log_report, log_run, summary
from tests.support.checkout import PROJECT
from tests.support.offline_run import (
    CONFIG,
    DESCRIPTION,
    HISTORY,
    SUMMARY,
    Logged,
    keys_of,
    listening,
    logged_run,
    start,
    track,
    write_finished,
)
from tests.support.refusals import refused_as
from tests.support.synthetic_run import description, read_json
from tests.support.tracked_run import HISTORY as PAST
from tests.support.tracked_run import MODEL, finished
from tests.support.waiting import HANG_SECONDS, before_long

FILES = {
    "dataset": ["description"],
    "plan": ["plan.json"],
    "trace": ["trace.parquet"],
    "model": ["model.safetensors"],
    "card": ["privacy_card.json"],
}
RECORDS = {
    *("header", "run", "telemetry", "metric", "summary", "history", "artifact", "exit", "final", "footer")
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    return logged_run(tmp_path_factory.mktemp("tracked"))


def key_of(item: Any) -> str:
    return str(item.key or item.nested_key[0])


def items_of(records: Any) -> dict[str, Any]:
    return {key_of(item): json.loads(item.value_json) for item in records}


SENT = {
    "train": (CONFIG, HISTORY, SUMMARY | HISTORY),
    "promotion": ({"name", "run_id"}, set(), set()),
}
"""The keys of a run's config, history and summary, by job type."""


def test_an_offline_run_is_opened_in_the_terminal_by_the_command_on_the_page(logged: Logged) -> None:
    """The command has the summary beside the view that needs a terminal."""
    page = (PROJECT / "docs/how-to/tracking.md").read_text()
    words = re.findall(r"`wandb (leet) (\.wandb/wandb/offline-run-)NAME`", page)[0]
    (run,) = logged.root.glob(f"{words[1]}*-{logged.of('run')[0].run_id}")
    command = ["wandb", words[0], "inspect", "--summary", str(run)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "finished" in shown and "privacy/epsilon" in shown


def test_no_other_record_or_key_is_sent(logged: Logged) -> None:
    assert logged.found[0] is True and set(logged.runs) == set(SENT)
    for records in logged.runs.values():
        assert {record.WhichOneof("record_type") for record in records} <= RECORDS
    for job_type, expected in SENT.items():
        (run,) = logged.of("run", job_type)
        rows = [item for record in logged.of("history", job_type) for item in record.item]
        results = [item for record in logged.of("summary", job_type) for item in record.update]
        found = tuple(keys_of(items_of(items)) for items in (run.config.update, rows, results))
        assert found == expected, job_type
        assert not run.config.remove
        for artifact in logged.of("artifact", job_type):
            wanted = DESCRIPTION if artifact.type == "dataset" else {"run_id"}
            assert set(json.loads(artifact.metadata)) == wanted
    assert {metric.name or metric.glob_name for metric in logged.of("metric")} == {
        "privacy/step",
        "privacy/*",
    }


def test_tags_and_config_say_what_ran_and_who_accounted_for_it(logged: Logged) -> None:
    (run,) = logged.of("run", "train")
    config = items_of(run.config.update)
    assert list(run.tags) == [config["dataset"], config["algorithm"], "private"]
    assert config["accountant"] in ("pld", "rdp") and config["algorithm"] == "dp_sgd"


def test_the_trace_is_logged_by_step(logged: Logged) -> None:
    trace = pd.read_parquet(logged.root / "artifacts" / "trace.parquet").groupby("step").last()
    rows = [items_of(record.item) for record in logged.of("history")]
    assert [row["privacy/step"] for row in rows] == list(range(1, 31))
    assert [row["privacy/epsilon_so_far"] for row in rows] == trace["epsilon"].tolist()
    assert [row["privacy/noise_std/gradient"] for row in rows] == trace["noise_std"].tolist()
    card = read_json(logged.root / "artifacts" / "privacy_card.json")
    assert rows[-1]["privacy/epsilon"] == card["setting"]["epsilon"]


def test_the_results_are_the_summary(logged: Logged) -> None:
    summary = items_of(item for record in logged.of("summary") for item in record.update)
    metrics = read_json(logged.root / "artifacts" / "metrics.json")
    assert summary["test/accuracy"] == metrics["test_accuracy"]
    assert summary["privacy/epsilon_total"] == metrics["epsilon"]
    assert summary["privacy/private"] is True


def test_what_is_used_has_the_content_that_was_made(logged: Logged) -> None:
    digests: dict[str, set[tuple[str, str]]] = {}
    for job_type in logged.runs:
        for artifact in logged.of("artifact", job_type):
            digests.setdefault(artifact.type, set()).add((artifact.name, artifact.digest))
    assert {kind: len(found) for kind, found in digests.items()} == dict.fromkeys(FILES, 1) | {"model": 2}
    (serving,) = (a for a in logged.of("artifact", "promotion") if not a.use_after_commit)
    assert (serving.name, serving.type, sorted(serving.aliases)) == (MODEL, "model", ["latest", "serving"])


def test_an_artifact_is_one_file_and_the_data_set_a_reference_with_its_public_description(
    logged: Logged,
) -> None:
    made = logged.of("artifact")
    assert {a.type: [entry.path for entry in a.manifest.contents] for a in made} == FILES
    (dataset,) = (artifact for artifact in made if artifact.type == "dataset")
    (entry,) = dataset.manifest.contents
    assert entry.ref == "dataset://animals"
    assert not entry.local_path
    assert json.loads(dataset.metadata) == json.loads(description().to_json())


def test_nothing_about_the_machine_is_kept(logged: Logged) -> None:
    named = {"run_id", "run_group", "job_type", "project", "display_name"}
    versions = {"python_version", "cli_version", "platform"}
    for job_type in logged.runs:
        (run,) = logged.of("run", job_type)
        assert {field.name for field, _ in run.ListFields()} == named | {
            "config",
            "start_time",
            "tags",
            "telemetry",
        }
        told = {field.name for record in logged.of("telemetry", job_type) for field, _ in record.ListFields()}
        assert told <= {"imports_init", "imports_finish", "feature", *versions}


def test_nobody_was_contacted_and_nothing_was_said(logged: Logged) -> None:
    assert logged.connections == 0
    assert logged.complaints == ""


def test_the_network_test_would_notice_a_contact(tmp_path: Path) -> None:
    write_finished(tmp_path)
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
    ours = {".wandb", "artifacts", "datasets", "home", "models"}
    assert {path.name for path in logged.root.iterdir()} == ours


@pytest.fixture
def run(logged: Logged) -> FinishedRun:
    return finished(logged.root)


def test_disabled_touches_nothing(tmp_path: Path, logged: Logged, run: FinishedRun) -> None:
    off, entry = Tracking(mode="disabled"), logged.root / "models" / run.card.evidence.run_id
    assert log_run(run, off, artifacts=logged.root / "artifacts", root=tmp_path) is False
    assert log_report(run, PAST, off, root=tmp_path) is None
    assert log_promotion(MODEL, entry, off, root=tmp_path) is False
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_one_line_and_no_loss(
    tmp_path: Path, run: FinishedRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("the server is\non fire")

    monkeypatch.setattr(wandb, "init", fail)
    before = dict(os.environ)
    with caplog.at_level(logging.WARNING):
        assert log_run(run, Tracking(), artifacts=tmp_path, root=tmp_path) is False
    (line,) = caplog.messages
    assert "the server is on fire" in line
    assert "\n" not in line
    assert dict(os.environ) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full stands for a full disk")
def test_log_file_on_a_full_disk_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler, log = logging.FileHandler("/dev/full"), logging.getLogger("a-client")
    log.addHandler(handler)
    try:
        with wandb_folders(tmp_path):
            log.warning("a line")
        assert capsys.readouterr().err == ""
        log.warning("a line")
        assert "No space left on device" in capsys.readouterr().err
    finally:
        log.removeHandler(handler)
        with suppress(OSError):
            handler.close()


def test_file_that_a_full_disk_cut_off_is_not_whole(logged: Logged, tmp_path: Path) -> None:
    """Wherever it was cut, also between two records; `logged` is a run that W&B's own client wrote."""
    file = next(logged.root.rglob("run-*.wandb"))
    content, cut = file.read_bytes(), tmp_path / "cut.wandb"
    assert is_whole(file)
    for length in [0, 7, *range(len(content) - 600, len(content)), *range(7, len(content), 997)]:
        cut.write_bytes(content[:length])
        assert not is_whole(cut)


def test_file_that_ends_with_a_block_within_a_record_is_not_whole(tmp_path: Path) -> None:
    """W&B's client writes blocks of 32 KiB, so that a longer record is seen so while it is written."""
    records: Any = wandb_internal_pb2  # whose names its module makes as it is imported
    table = records.Record(output_raw={"line": "0" * 40_000}).SerializeToString()
    end = records.Record(exit={"exit_code": 0}).SerializeToString()
    left = 32_768 - 7 - 7  # without the header of the file and of the part
    content, file = bytes(7), tmp_path / "run.wandb"
    for kind, part in ((2, table[:left]), (4, table[left:]), (1, end)):
        content += struct.pack("<LHB", 0, len(part), kind) + part
        file.write_bytes(content)
        assert is_whole(file) == (part is end)


def test_run_that_a_full_disk_cut_off_is_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """W&B's client writes in another process, and does not say that the disk was full."""
    finish = wandb.Run.finish

    def cut_off(run: Any, *args: Any, **kwargs: Any) -> None:
        finish(run, *args, **kwargs)
        assert before_long(lambda: is_whole(Path(run.settings.sync_file)))
        os.truncate(run.settings.sync_file, 100)

    def log() -> None:
        with session(Tracking(), job_type="train", group="a", name="a", config={}):
            pass

    monkeypatch.setattr(wandb.Run, "finish", cut_off)
    monkeypatch.setattr(sessions, "SECONDS_TO_WRITE", 0)
    assert safely(log, Tracking(), "this run", tmp_path) is False
    (line,) = [text for text in caplog.messages if text.startswith("W&B did not log this run")]
    assert "is not whole, as on a full disk" in line


def test_failure_within_a_session_prints_no_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError, match="disk"), wandb_folders(tmp_path), chdir(tmp_path):  # noqa: SIM117
        with session(Tracking(), job_type="train", group="a", name="a", config={}):
            raise OSError("the disk is full")
    assert capfd.readouterr().err == ""


def test_no_session_starts_the_launch_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B imports it, which takes as long as W&B itself, for jobs that it started."""
    asked = list[str]()
    launch = ModuleType("wandb.sdk.launch.inputs.internal")
    launch.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, launch.__name__, launch)
    with wandb_folders(tmp_path), chdir(tmp_path):  # noqa: SIM117
        with session(Tracking(), job_type="train", group="a", name="a", config={}):
            pass
    assert asked == []


def test_no_session_has_telemetry_of_wandbs_own(tmp_path: Path) -> None:
    """It would send tracebacks, and how long W&B's calls take."""
    with wandb_folders(tmp_path), chdir(tmp_path):  # noqa: SIM117
        with session(Tracking(), job_type="train", group="a", name="a", config={}):
            from wandb.analytics.opentelemetry.opentelemetry_proxy import get_open_telemetry_proxy

            assert get_open_telemetry_proxy() is None


def test_places_named_by_the_environment_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "mine"))
    monkeypatch.delenv("WANDB_CACHE_DIR", raising=False)
    with wandb_folders(tmp_path / "project"):
        assert os.environ["WANDB_DIR"] == str(tmp_path / "mine")
        assert os.environ["WANDB_CACHE_DIR"] == str(tmp_path / "project" / ".wandb" / "cache")
    assert "WANDB_CACHE_DIR" not in os.environ


def test_a_long_run_is_thinned_and_an_infinite_cost_left_out(run: FinishedRun) -> None:
    steps = 10_000
    noise = {"kind": "gradient", "noise_std": 0.0, "noise_multiplier": 0.0}
    trace = pd.DataFrame({"step": range(steps), "epsilon": np.inf} | noise)
    rows = list(history(replace(run, trace=trace, curve=CostsByStep([], []))))
    assert len(rows) == 2000
    assert (rows[0]["privacy/step"], rows[-1]["privacy/step"]) == (1, steps)
    assert set(rows[0]) == {"privacy/step", "privacy/noise_std/gradient", "privacy/noise_multiplier/gradient"}
    accounted = list(history(replace(run, trace=trace, curve=CostsByStep([4321], [0.5]))))
    assert [row["privacy/epsilon"] for row in accounted if "privacy/epsilon" in row] == [0.5]


def test_each_kind_of_release_has_its_own_noise(run: FinishedRun) -> None:
    trace = pd.DataFrame(
        {
            "step": [0, 0, 1, 1],
            "kind": ["gradient", "argmin", "gradient", "argmin"],
            "epsilon": [0.1, 0.2, 0.3, 0.4],
            "noise_std": [2.0, 11529.6, 3.0, 11529.6],
            "noise_multiplier": [1.0, 4.0, 1.5, 4.0],
        }
    )
    first, second = history(replace(run, trace=trace, curve=CostsByStep([], [])))
    assert (first["privacy/noise_std/gradient"], second["privacy/noise_std/gradient"]) == (2.0, 3.0)
    assert first["privacy/noise_std/argmin"] == second["privacy/noise_std/argmin"] == 11529.6
    assert second["privacy/noise_multiplier/gradient"] == 1.5


def test_epsilon_so_far_stays_below_the_claim(run: FinishedRun) -> None:
    claim = run.card.setting.epsilon
    assert claim is not None
    rows = list(history(replace(run, trace=run.trace.assign(epsilon=claim * 1.003))))
    assert {row["privacy/epsilon_so_far"] for row in rows} == {claim}


def test_summary_has_every_metric_of_the_target(run: FinishedRun) -> None:
    scores = {"test_auc": 0.9, "test_f1": 0.7, "calibration_error": 0.02}
    sent = summary(dict(run.metrics) | scores, run.card)
    assert (sent["test/auc"], sent["test/f1"], sent["test/calibration_error"]) == (0.9, 0.7, 0.02)
    assert "test/auc" not in summary(dict(run.metrics) | scores | {"test_auc": None}, run.card)


def test_runs_on_blocks_of_a_population_are_one_group() -> None:
    assert group_of("run-1", "visits", is_on_blocks=True) == group_of("run-2", "visits", is_on_blocks=True)
    assert group_of("run-1", "visits", is_on_blocks=False) == "run-1"


def test_tables_of_a_comparison_are_logged_without_absolute_paths(tmp_path: Path) -> None:
    write_finished(tmp_path)
    process = track(tmp_path, "offline", "http://127.0.0.1:9", {}, "tracked_group")
    assert process.communicate(timeout=HANG_SECONDS) == ("true", "")
    files = [path for path in tmp_path.rglob("run-*.wandb") if path.is_file()]
    tables = [path for path in files if b".table.json" in path.read_bytes()]
    assert tables
    assert not [path for path in files if str(tmp_path).encode() in path.read_bytes()]


class TestTrack:
    """The run of a checkout is logged once, and by a later command where W&B was away."""

    @pytest.fixture
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        write_finished(tmp_path)
        (tmp_path / "params.yaml").write_text("tracking: {mode: offline}\n")
        (tmp_path / "artifacts" / "plots").mkdir(exist_ok=True)
        (tmp_path / "artifacts" / "plots" / "epsilon.csv").write_text("step,epsilon\n30,0.5\n")
        return tmp_path

    @pytest.fixture
    def logs(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The modes in which runs were logged."""
        logs: list[str] = []

        def log(_run: object, settings: Tracking, **_: object) -> bool:
            logs.append(settings.mode)
            return True

        monkeypatch.setattr(tracking, "log_run", log)
        monkeypatch.setattr(report, "log_report", lambda *_, **__: "report")
        return logs

    def test_logs_once(self, root: Path, logs: list[str]) -> None:
        assert has_run_to_log(root)
        assert report.track(root).endswith("is logged at W&B, offline")
        assert not has_run_to_log(root)
        assert report.track(root).endswith("is logged at W&B already, offline")
        assert logs == ["offline"]

    def test_logs_after_an_outage(self, root: Path, logs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as outage:
            outage.setattr(tracking, "log_run", lambda *_, **__: False)
            assert report.track(root).endswith("is not logged at W&B; `epsilonflow track` tries again")
        assert has_run_to_log(root)
        report.track(root)
        assert logs == ["offline"] and not has_run_to_log(root)

    def test_pulled_run_is_logged_where_it_was_trained(self, root: Path, logs: list[str]) -> None:
        (root / "datasets" / "prepared" / "public.json").unlink()
        with refused_as("no_run"):
            report.track(root)
        assert logs == []

    def test_logs_online_what_was_offline(
        self, root: Path, logs: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        report.track(root)
        monkeypatch.setenv("WANDB_MODE", "online")
        report.track(root)
        monkeypatch.setenv("WANDB_MODE", "offline")
        report.track(root)
        assert logs == ["offline", "online"]

    def test_full_disk_for_the_note_is_a_line(
        self,
        root: Path,
        logs: list[str],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError("No space left on device")

        monkeypatch.setattr(report, "note_logged", fail)
        assert report.track(root).endswith("is logged at W&B, offline")
        assert "W&B did not log a note of this run" in caplog.text and has_run_to_log(root)
        assert logs == ["offline"]

    def test_disabled_logs_nothing(
        self, root: Path, logs: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WANDB_MODE", "disabled")
        assert report.track(root).endswith("is not logged at W&B, as tracking is disabled")
        assert not has_run_to_log(root) and logs == []

"""Flows under a real Prefect server: the pipeline, deployed and refused, and comparisons, as a command and stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pandas as pd
import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ParameterTypeError
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.states import Cancelled, Running
from prefect.testing.cli import CycloptsCliRunner
from prefect.utilities.callables import parameter_schema
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from algorithms.core.plan import Plan
from algorithms.core.training import train as run_training
from algorithms.privacy.accounting import Budget
from flows.cli import runs
from flows.cli.main import app
from flows.compare import comparison, plan, run
from flows.deployed import TAG, pipeline, report, report_reservations, run_stage
from flows.scheduled import audit, retrain, verify
from flows.server import install_automations, keep_schedules, start_server
from flows.task_runners import task_runner
from flows.tune import tune
from tasks import train
from tasks.comparing import trial as one_trial
from tasks.comparing.trial import ComparisonFolder
from tasks.config.params import ParamsRefusedError
from tasks.runs.dvc_stages import STAGES
from tests.flows.conftest import HTTP, PATIENTLY, free_port, get, post
from tests.support.checkout import PROJECT, Checkout
from tests.support.comparisons import document, small, write
from tests.support.one_process import stay_in_this_process
from tests.support.refusals import refused_as
from tests.support.retraining import CARD, PARAMS, SETTINGS
from tests.support.retraining import Place as Retrained
from tests.support.retraining import place as retrained  # noqa: F401 - a fixture
from tests.support.waiting import HANG_SECONDS, before_long
from tests.support.workspace import killed_in


def test_no_task_is_tried_again_and_none_is_cached_by_prefect() -> None:
    assert {each.retries for each in (run_stage, pipeline, plan, run, comparison)} == {0}
    assert run_stage.cache_policy is not None
    assert run_stage.cache_policy.compute_key(task_ctx=None, inputs={}, flow_parameters={}) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "parameters",
    [
        {"epsilon": "much"},
        {"epsilon": -1.0},
        {"epsilon": 0.0},
        {"epsilon": 1e5},
        {"delta": 1.0},
        {"delta": -1e-5},
        {"seed": -1},
        {"seed": 2**63},
    ],
)
def test_prefect_refuses_parameters_out_of_range(parameters: dict[str, Any]) -> None:
    """So that a page or a command of Prefect refuses them before a run is made."""
    with pytest.raises(ParameterTypeError):
        pipeline.validate_parameters(parameters)
    assert pipeline.validate_parameters({"epsilon": 1.5, "delta": 0.0})["epsilon"] == 1.5


@pytest.mark.parametrize("flow", [pipeline, comparison, retrain, tune, audit, report, verify])
def test_prefects_schema_has_the_ranges_of_the_numbers(flow: Any) -> None:
    for name, part in parameter_schema(flow.fn).properties.items():
        (kind, *_) = part.get("anyOf", [part])
        if kind["type"] in ("number", "integer"):
            assert kind.keys() & {"minimum", "exclusiveMinimum"}, name
            assert name in ("runs", "canaries", "workers") or kind.keys() & {"maximum", "exclusiveMaximum"}, (
                name
            )


def test_a_server_in_the_background_speaks_to_a_file_and_keeps_leases_in_files(
    server: str, server_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a pipe that nobody reads it would stop at a warning. Without its lease, the next server ends a run."""
    note, log = server_home / "server.pid", server_home / "server.log"
    process = psutil.Process(int(note.read_text()))
    assert process.pid != os.getpid() and process.is_running()
    assert [Path(f"/proc/{process.pid}/fd/{number}").resolve() for number in (1, 2)] == [log, log]
    with temporary_settings({PREFECT_HOME: server_home}), free_port() as other:
        monkeypatch.setenv("PREFECT_HOME", str(server_home))
        assert start_server(urlsplit(server).port or 0) == server
        with refused_as("server_runs", ParamsRefusedError, process=process.pid):
            start_server(other)
    limits = f"{server}/v2/concurrency_limits"
    post(f"{limits}/", {"name": "one", "limit": 1})
    taken = post(f"{limits}/increment-with-lease", {"names": ["one"], "slots": 1, "lease_duration": 300})
    assert [*server_home.rglob(f"{taken['lease_id']}.json")]


@pytest.fixture
def served(server: str, checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkout]:
    """The finished checkout as the current folder, with a server that is up."""
    monkeypatch.chdir(checkout.root)
    for name, value in checkout.where(PREFECT_API_URL=server)["env"].items():
        monkeypatch.setenv(name, value)
    with temporary_settings(PATIENTLY | {PREFECT_API_URL: server}):
        yield checkout


def prefect(*arguments: str) -> None:
    """A command of Prefect that must succeed."""
    done = CycloptsCliRunner().invoke(list(arguments))
    assert done.exit_code == 0, done.output


def test_a_flow_runs_with_parameters_and_shows_its_steps(
    server: str, served: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process; what a worker takes of a deployment is tested with a worker that is killed."""
    before = served.balance.spent.epsilon
    stay_in_this_process(monkeypatch)
    rows: Any = pipeline(epsilon=1.5, seed=4, settings={"algorithm.steps": 4})
    assert ("data set", "digits") in rows  # a caller gets the rows, though the flow returns a state
    _check_what_was_asked(served, before)
    _check_what_prefect_shows(server, served)


@pytest.mark.soak
def test_a_deployment_runs_with_parameters_and_shows_its_steps(server: str, served: Checkout) -> None:
    """All are deployed; a worker takes what was asked of one, and runs it in processes of its own."""
    before = served.balance.spent.epsilon
    pool = {"name": "local-pool", "type": "process"}
    HTTP.post(f"{server}/work_pools/", json=pool).raise_for_status()
    prefect("--no-prompt", "deploy", "--all")
    asked = ["--param", "epsilon=1.5", "--param", "seed=4", "--param", 'settings={"algorithm.steps": 4}']
    prefect("deployment", "run", "pipeline/train", *asked)
    prefect("worker", "start", "--pool", "local-pool", "--type", "process", "--run-once")
    _check_what_was_asked(served, before)
    _check_what_prefect_shows(server, served)


def _check_what_was_asked(served: Checkout, before: float) -> None:
    plan = served.artifact("plan.json")
    assert (plan["target"]["epsilon"], plan["model"]["seed"], plan["steps"]) == (1.5, 4, 4)
    assert served.balance.spent.epsilon == pytest.approx(before + served.artifact("metrics.json")["epsilon"])


def _check_what_prefect_shows(server: str, served: Checkout) -> None:
    completed = dict.fromkeys(STAGES, "Completed")
    runs = _filter(server, "task_runs", lambda found: _states_by_name(found) == completed)
    train = next(run["id"] for run in runs if run["name"] == "train")
    _filter(server, "logs", _say_the_last_step, logs={"task_run_id": {"any_": [train]}})
    (flow,) = _filter(server, "flow_runs", flow_runs={"tags": {"all_": ["digits"]}})
    assert (flow["name"], set(flow["tags"])) == (
        "train digits epsilon 1.5",
        {"epsilonflow", "digits", "dp_sgd"},
    )
    accuracy = f"{100 * served.artifact('metrics.json')['test_accuracy']:.2f}%"
    said = f"trained dp_sgd on digits for epsilon 1.5 at delta 1e-05: held-out accuracy {accuracy}. The privacy card "
    assert flow["state"]["message"].startswith(said)
    artifacts = {artifact["key"]: artifact["data"] for artifact in _filter(server, "artifacts")}
    assert set(artifacts) == {"privacy-card", "metrics"}
    assert "## Accounting" in artifacts["privacy-card"]
    assert {"what": "data set", "value": "digits"} in json.loads(artifacts["metrics"])


def _states_by_name(runs: list[dict[str, Any]]) -> dict[str, str]:
    return {run["name"]: run["state_name"] for run in runs}


def _say_the_last_step(lines: list[dict[str, Any]]) -> bool:
    return any("step 4 of 4" in line["message"] for line in lines)


def _filter(server: str, kind: str, wanted: Any = bool, **filters: Any) -> list[dict[str, Any]]:
    """Objects of the server once they are as wanted, which may take it a moment."""
    found = list[dict[str, Any]]()

    def are_as_wanted() -> bool:
        found[:] = post(f"{server}/{kind}/filter", filters)
        return bool(wanted(found))

    assert before_long(are_as_wanted), found
    return found


@pytest.mark.soak
def test_two_flows_at_once_in_one_checkout_both_succeed(server: str, checkout: Checkout) -> None:
    before = checkout.balance.spent.epsilon
    runs = [
        subprocess.Popen(
            checkout.command("flows.cli.main", "run", "--epsilon", epsilon),
            **checkout.where(PREFECT_API_URL=server),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for epsilon in ("0.5", "0.25")
    ]
    written = [run.communicate(timeout=HANG_SECONDS)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], written
    assert any("waiting" in text for text in written)
    for text, epsilon in zip(written, ("0.5", "0.25"), strict=True):
        assert f"│ epsilon of this run                │ {epsilon} at delta 1e-05" in text
    assert checkout.balance.spent.epsilon == pytest.approx(before + 0.75, rel=1e-2)
    assert checkout.artifact("plan.json")["target"]["epsilon"] in (0.5, 0.25)


def test_a_run_that_the_ledger_refuses_leaves_ledger_parameters_and_model_alone(
    served: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a deployment, for which no command has looked ahead."""
    ledger = served.ledger
    ledger.set_cap("digits", Budget(4.0, 1e-3))
    head, params = ledger.head(), (served.root / "params.yaml").read_text()
    stay_in_this_process(monkeypatch)
    monkeypatch.setattr(runs, "_check_before_run", lambda *_: nullcontext())
    done = CliRunner().invoke(app, ["run", "--epsilon", "2.5"])
    assert done.exit_code == 2, done.output
    refusals = [line for line in done.stderr.splitlines() if line.startswith("refused: ")]
    assert len(refusals) == 1
    assert "cap" in refusals[0]
    assert "Traceback" not in done.stderr
    assert "NoneType" not in done.stderr
    assert ledger.head() == head
    assert (served.root / "params.yaml").read_text() == params
    assert (served.root / "artifacts" / "model.safetensors").exists()


@pytest.fixture
def place(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ComparisonFolder]:
    """A small checkout as the current folder, with a server that is up."""
    root = small(tmp_path / "checkout")
    monkeypatch.chdir(root)
    untracked(root)
    # No lines are sent: at its end the process would try for a minute to reach a server that is gone.
    with temporary_settings(PATIENTLY | {PREFECT_API_URL: server, PREFECT_LOGGING_TO_API_ENABLED: False}):
        yield ComparisonFolder(root, "tiny")


def quick() -> dict[str, Any]:
    """The tiny comparison without what takes time and has tests of its own: curves and all but one figure."""
    return document() | {"record": {}}


def untracked(root: Path) -> None:
    """Logs nothing to W&B: that takes a process a run, and has tests of its own."""
    path = root / "params.yaml"
    path.write_text(path.read_text().replace("mode: offline", "mode: disabled"))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", *arguments], env={"COLUMNS": "200"})


def table(place: ComparisonFolder) -> pd.DataFrame:
    return pd.read_csv(place.folder / "results.csv")


def test_a_comparison_runs_and_then_has_nothing_to_do(place: ComparisonFolder) -> None:
    file = write(place.root, quick())
    result = call(str(file), "--workers", "2")
    assert result.exit_code == 0, result.output
    assert len(table(place)) == 3
    assert (place.folder / "report.html").exists()
    before = {path: path.stat().st_mtime_ns for path in place.trials.glob("*.json")}
    assert len(before) == 3
    more = quick() | {"epsilons": [1.0, 2.0, 4.0]}
    result = call(str(write(place.root, more)))
    assert result.exit_code == 0, result.output
    assert sorted(table(place)["epsilon"].dropna()) == [1.0, 2.0, 4.0]
    after = {path: path.stat().st_mtime_ns for path in place.trials.glob("*.json")}
    new = after.keys() - before.keys()
    assert len(new) == 1
    assert "There were 4 runs" in (place.folder / "report.html").read_text()


def test_what_cannot_run_is_refused_before_the_first_trains(place: ComparisonFolder) -> None:
    wrong = quick()
    wrong["problems"].append({"dataset": "digits", "model": "logistic"})
    result = call(str(write(place.root, wrong)))
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("refused: ")]
    assert "2 classes" in line
    assert place.finished_digests() == set()
    assert place.finished_digests() == set()


def test_what_cannot_run_is_listed_where_the_file_says_so(place: ComparisonFolder) -> None:
    wrong = quick() | {"skip_refused": True, "seeds": 2}
    wrong["problems"].append({"dataset": "digits", "model": "logistic"})
    result = call(str(write(place.root, wrong)))
    assert result.exit_code == 0, result.output
    assert set(table(place)["model"]) == {"softmax"}
    page = (place.folder / "page.md").read_text()
    assert page.count("2 classes") == 3  # once a method and epsilon, not once a seed


def test_a_failed_trial_fails_the_flow_and_leaves_the_others(
    place: ComparisonFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(algorithm: Any, plan: Plan, *given: Any, **more: Any) -> Any:
        if plan.cost.epsilon <= 1.0:
            raise RuntimeError("out of luck")
        return run_training(algorithm, plan, *given, **more)

    monkeypatch.setattr(one_trial, "train", fails)
    result = call(str(write(place.root, quick())))
    assert result.exit_code == 1
    assert "1 of 3 runs failed: dp_sgd on digits, softmax, epsilon 1: out of luck" in result.stderr
    assert len(table(place)) == 2
    monkeypatch.undo()
    monkeypatch.chdir(place.root)
    assert call(str(place.root / "comparisons" / "tiny.yaml")).exit_code == 0
    assert len(table(place)) == 3


def test_an_unknown_runner_is_refused(place: ComparisonFolder) -> None:
    result = call(str(write(place.root, quick())), "--runner", "slurm")
    assert result.exit_code == 2
    assert "threads, dask or ray" in result.stderr


@pytest.mark.parametrize(("runner", "name"), [("dask", "DaskTaskRunner"), ("ray", "RayTaskRunner")])
def test_other_runners_are_those_of_their_extras(runner: Any, name: str) -> None:
    pytest.importorskip(f"prefect_{runner}")
    assert type(task_runner(runner, 2)).__name__ == name


def started(place: ComparisonFolder, content: dict[str, Any]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli.main", "compare", str(write(place.root, content))],
        cwd=place.root,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # where tests run in the background
    )


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_comparison_keeps_what_is_finished_and_goes_on(
    server: str, place: ComparisonFolder, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """One of its trials would go on for hours, and nobody waits for its end."""
    content = quick() | {"seeds": 3, "epsilons": [1.0]}
    del content["methods"]["plain"]
    long = json.loads(json.dumps(content["methods"]["dp_sgd"]))
    long["algorithm"]["steps"] = 1_000_000
    monkeypatch.setenv("PREFECT_API_URL", server)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    process = started(place, content | {"methods": {**content["methods"], "long": long}})
    while len(place.finished_digests()) < 3 and process.poll() is None:
        time.sleep(0.01)
    try:
        process.send_signal(number)
        complaints = process.communicate(timeout=HANG_SECONDS)[1]
    finally:
        process.kill()
    assert process.returncode == 128 + number, complaints
    assert complaints.splitlines()[-1].startswith("stopped: finished runs are kept")
    assert len(place.finished_digests()) == 3
    content["seeds"] = 4
    assert call(str(write(place.root, content))).exit_code == 0
    assert len(table(place)) == 4


def test_comparisons_are_run_one_after_the_other_and_dvc_does_not_look_at_them(
    place: ComparisonFolder,
) -> None:
    """Their results are files of their own, which know what is finished; DVC's status and graph are the pipeline's."""
    first = write(place.root, quick())
    second = place.root / "comparisons" / "other.yaml"
    second.write_text(first.read_text().replace('"tiny"', '"other"'))
    assert call(str(first), str(second)).exit_code == 0
    assert len(table(place)) == len(table(ComparisonFolder(place.root, "other"))) == 3
    tracked = subprocess.run(
        ["git", "ls-files", "*dvc.yaml"], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert "comparisons/dvc.yaml" not in tracked.stdout


def test_runs_without_a_sign_of_life_are_ended_and_a_retraining_is_begun_again(
    server: str, served: Checkout
) -> None:
    """Those whose worker or process died; a flow without our tag may be silent for as long as it likes.

    All are waited for at once. A worker that dies while a run is pending, and is really killed, is in `make soak`.
    """
    deployment = _deployed_with_an_active_schedule(server, served.root)
    body = {"parameters": {"file": "weekly.yaml"}, "state": {"type": "SCHEDULED"}}
    pending = post(f"{server}/deployments/{deployment}/create_flow_run", body)["id"]
    install_automations(timedelta(seconds=10), None, max_wait=timedelta(seconds=10))
    # as a worker does before it starts the run's process; this one says no more
    begun = {"state": {"type": "PENDING", "name": "Pending"}}
    assert post(f"{server}/flow_runs/{pending}/set_state", begun)["status"] == "ACCEPT"
    silent = SilentRuns.of(server)
    assert before_long(lambda: silent.waits_no_longer(server))
    assert before_long(lambda: _state(server, pending)["type"] == "CRASHED")
    assert "no sign of life" in _state(server, pending)["message"]
    _tell_again(server, pending, "Stuck")  # within the minute in which it counts once
    assert before_long(lambda: _state(server, silent.dead)["type"] == "CRASHED")
    assert before_long(lambda: _state(server, silent.cancelled)["type"] == "CANCELLED")
    assert _state(server, silent.dead)["name"] == "Stuck"
    assert _state(server, silent.waiting)["name"] == "WaitedTooLong"
    assert [_state(server, run)["type"] for run in (silent.ended, silent.other)] == ["RUNNING", "RUNNING"]
    again = body["parameters"] | {"accept_recipe": False}  # the schedule's own runs have other parameters
    scheduled = {"state": {"type": {"any_": ["SCHEDULED"]}}}
    runs = _filter(
        server,
        "flow_runs",
        flow_runs=scheduled,
        wanted=lambda runs: again in [run["parameters"] for run in runs],
    )
    (fresh,) = [run for run in runs if run["parameters"] == again]
    # The fresh run may be silent for longer, however slow this machine is. Others stay as they are: a trigger that is
    # replaced does not know of what it has fired for, and the event that was told again may still be on its way to it.
    for name in ("a run that never began", "a run whose process died"):
        prefect("automation", "pause", f"epsilonflow: {name}")
    prefect("worker", "start", "--pool", "local-pool", "--type", "process", "--run-once")
    state = _state(server, fresh["id"])
    assert (state["name"], "there is no block yet" in state["message"]) == ("Completed", True)
    runs = _filter(server, "flow_runs", flow_runs={"deployment_id": {"any_": [deployment]}})
    assert [each["parameters"] for each in runs].count(again) == 1  # also where the server hears of it twice


def _deployed_with_an_active_schedule(server: str, root: Path) -> str:
    """The deployment of a retraining whose schedule was switched on, and is so after the next `deploy`."""
    recipe = {name: PARAMS[name] for name in ("privacy", "algorithm", "model")}
    weekly = CARD | {"name": "weekly", "blocks": {"kind": "folder", "path": "weeks"}}
    yaml = YAML(typ="safe", pure=True)
    yaml.dump(weekly, root / "data/cards/weekly.yaml")
    (root / "weeks").mkdir()
    yaml.dump(SETTINGS | {"dataset": "weekly", "recipe": recipe}, root / "weekly.yaml")
    HTTP.post(f"{server}/work_pools/", json={"name": "local-pool", "type": "process"})
    prefect("--no-prompt", "deploy", "--name", "retrain/retrain")
    deployment, weekly_schedule = _deployment_with_schedule(server)
    assert weekly_schedule["active"] is False
    url = f"{server}/deployments/{deployment}/schedules/{weekly_schedule['id']}"
    # A server whose database is busy says 503.
    assert before_long(lambda: HTTP.patch(url, json={"active": True}).is_success)
    with keep_schedules():
        prefect("--no-prompt", "deploy", "--name", "retrain/retrain")
        assert _deployment_with_schedule(server)[1]["active"] is False  # what deploying does by itself
    assert _deployment_with_schedule(server)[1]["active"] is True
    return deployment


def test_status_says_whether_a_worker_takes_runs(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", server)
    monkeypatch.setattr("flows.server.POOL", "pool-of-status")
    said = [CliRunner().invoke(app, ["server", "status"])]
    with temporary_settings({PREFECT_API_URL: server}):
        prefect("work-pool", "create", "pool-of-status", "--type", "process")
        said.append(CliRunner().invoke(app, ["server", "status"]))
        with get_client(sync_client=True) as client:
            heartbeat = {"name": "a worker", "heartbeat_interval_seconds": 60}
            client.request(
                "POST",
                "/work_pools/{name}/workers/heartbeat",
                path_params={"name": "pool-of-status"},
                json=heartbeat,
            )
        said.append(CliRunner().invoke(app, ["server", "status"]))
    assert [one.exit_code for one in said] == [2, 2, 0]
    assert all(f"A Prefect server answers at {server}." in one.output for one in said)
    assert "prefect worker start --pool pool-of-status" in said[1].output
    assert "Workers that take runs: 1." in said[2].output


def _deployment_with_schedule(server: str) -> tuple[str, dict[str, Any]]:
    deployment = get(f"{server}/deployments/name/retrain/retrain")
    (schedule,) = deployment["schedules"]
    return deployment["id"], schedule


_TAGGED = {"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}


def _state(server: str, run: str) -> dict[str, Any]:
    state: dict[str, Any] = get(f"{server}/flow_runs/{run}")["state"]
    return state


def _tell(
    server: str, name: str, run: str, related: list[dict[str, str]], *, follows: str | None = None
) -> str:
    """Send the server an event of a run; it takes up events in any order, but none before the one it follows."""
    event = {
        "id": str(uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": f"prefect.flow-run.{name}",
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
        "related": related,
        "follows": follows,
    }
    post(f"{server}/events", [event])
    return str(event["id"])


def _tell_again(server: str, run: str, name: str) -> None:
    """Send the server an event of a run a second time, as a new one."""
    about = {"resource": {"id": [f"prefect.flow-run.{run}"]}, "event": {"name": [f"prefect.flow-run.{name}"]}}
    found = list[dict[str, Any]]()

    def is_there() -> bool:
        found[:] = post(f"{server}/events/filter", {"filter": about})["events"]
        return bool(found)

    assert before_long(is_there)
    (event,) = found
    again = [event | {"id": str(uuid4())}]
    post(f"{server}/events", again)


@dataclass(frozen=True)
class SilentRuns:
    """Runs by their ids, of which nothing is heard any more, but for what waits for its turn."""

    dead: str
    ended: str
    other: str
    cancelled: str
    waiting: str

    @classmethod
    def of(cls, server: str) -> "SilentRuns":
        """All give a sign of life; that of `other` has not our tag, and that of `ended` is followed by its end."""
        flow = post(f"{server}/flows/", {"name": "nightly"})["id"]
        running = {"flow_id": flow, "state": {"type": "RUNNING"}}
        cancelled, dead, ended, other = (
            post(f"{server}/flow_runs/", running | {"tags": tags})["id"] for tags in ([TAG], [TAG], [TAG], [])
        )
        _tell(
            server, "heartbeat", cancelled, [_TAGGED]
        )  # first, as what its state says later follows nothing
        _tell(server, "heartbeat", dead, [_TAGGED])
        _tell(server, "heartbeat", other, [])
        _tell(server, "Refused", ended, [_TAGGED], follows=_tell(server, "heartbeat", ended, [_TAGGED]))
        scheduled = {"flow_id": flow, "state": {"type": "SCHEDULED", "name": "AwaitingConcurrencySlot"}}
        waiting = post(f"{server}/flow_runs/", scheduled | {"tags": [TAG]})["id"]
        # as its page does; nobody is there to end it
        body = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
        post(f"{server}/flow_runs/{cancelled}/set_state", body)
        return cls(dead, ended, other, cancelled, waiting)

    def waits_no_longer(self, server: str) -> bool:
        """Prefect tries for the slot again and again, and says so each time."""
        time.sleep(1.0)
        for name in ("Pending", "AwaitingConcurrencySlot"):
            _tell(server, name, self.waiting, [_TAGGED])
        return bool(_state(server, self.waiting)["type"] == "CANCELLED")


def test_a_server_shows_what_a_cancelled_run_holds_and_not_what_others_do(
    server: str,
    retrained: Retrained,  # noqa: F811
) -> None:
    cards = retrained.root / "data/cards"
    other = (cards / "tiny.yaml").read_text().replace("tiny", "other")
    (cards / "other.yaml").write_text(other)
    quiet = PATIENTLY | {PREFECT_API_URL: server, PREFECT_LOGGING_TO_API_ENABLED: False}
    with temporary_settings(quiet), get_client(sync_client=True) as client:

        def begin(*tags: str) -> FlowRun:
            return client.create_flow_run(retrain, tags=[TAG, *tags], state=Running())

        retrained.deliver()
        retrained.arrive("w3")
        runs = [begin("tiny"), begin(), begin("other")]  # the second was stopped before it began to train
        with killed_in(train, "run_training"):
            retrained.deliver(1)
        runs = [*runs, begin("tiny"), client.create_flow_run(retrain, tags=[TAG, "tiny"])]
        for flow_run in runs:
            report_reservations(retrain, flow_run, Cancelled())
    artifacts = [
        post(
            f"{server}/artifacts/filter",
            {
                "artifacts": {
                    "key": {"any_": ["reservation"]},
                    "flow_run_id": {"any_": [str(flow_run.id)]},
                }
            },
        )
        for flow_run in runs
    ]
    assert [len(each) for each in artifacts] == [1, 0, 0, 0, 0]
    run, (artifact,) = retrained.rows("reserve")[-1], artifacts[0]
    assert f"`epsilonflow ledger forfeit {run}`" in artifact["data"] and artifact["type"] == "markdown"

"""What `epsilonflow server deploy` installs on a Prefect server; how it works there, see test_prefect."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import psutil
import pytest
from jinja2 import Environment
from prefect.automations import Automation
from prefect.client.schemas.objects import FlowRun
from prefect.events.actions import SendNotification
from prefect.logging import disable_run_logger
from prefect.settings import PREFECT_HOME, temporary_settings
from prefect.states import Failed
from typer.testing import CliRunner

from algorithms.errors import RefusedError
from flows import deployed, scheduled, server
from flows import tune as tune_module
from flows.cli.main import app
from flows.deployed import pipeline, report_reservations
from flows.scheduled import retrain
from flows.tune import tune
from tasks import train
from tasks.config.params import ParamsRefusedError
from tasks.retraining.delivery import DeliveryWork
from tasks.runs import reservations
from tasks.runs.dvc_stages import StageFailedError
from tests.flows.conftest import ended, free_port
from tests.support.refusals import refused_as
from tests.support.retraining import Place
from tests.support.retraining import place as place
from tests.support.workspace import killed_in

ID = UUID(int=7)
GOLDEN = Path(__file__).parents[1] / "golden"
TEN = timedelta(minutes=10)
MESSAGE = SendNotification(block_document_id=ID, subject="", body="")


def _all() -> list[Automation]:
    return [*server.recovery(TEN), *server.notifications(TEN, MESSAGE)]


def test_automations_leave_other_flows_of_the_server_alone() -> None:
    for automation in _all():
        assert "prefect.tag.epsilonflow" in str(automation.trigger.match_related)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "state",
    [
        "Failed",
        "Crashed",
        "Stuck",
        "WaitedTooLong",
        "TimedOut",
        "Refused",
        "LedgerBroken",
        "FewRetrainingsLeft",
        "Late",
        "Cancelled",
    ],
)
def test_a_person_is_told_of_each_state_that_needs_one(state: str) -> None:
    seen = [
        automation.trigger
        for automation in server.notifications(TEN, MESSAGE)
        if f"prefect.flow-run.{state}" in automation.trigger.expect | automation.trigger.after  # type: ignore[union-attr]
        and (
            automation.trigger.posture.value == "Reactive"
            or f"prefect.flow-run.{state}" in automation.trigger.after
        )  # type: ignore[union-attr]
    ]
    assert len(seen) == 1
    if state != "Late":
        assert seen[0].within == timedelta(minutes=1)  # type: ignore[union-attr] # a busy server delivers some twice
    limited = "prefect.state-message" in seen[0].match.root  # type: ignore[union-attr]
    assert limited == (state == "Cancelled")


@pytest.mark.parametrize(
    "ends", ["Completed", "Refused", "LedgerBroken", "FewRetrainingsLeft", "Failed", "Cancelled"]
)
def test_a_run_that_has_ended_is_not_stuck(ends: str) -> None:
    for automation in server.recovery(TEN)[:2]:
        assert f"prefect.flow-run.{ends}" in automation.trigger.expect  # type: ignore[union-attr]


@pytest.mark.parametrize("index", [0, 1, 4])
def test_a_run_whose_worker_died_says_where_its_reservation_is_shown(index: int) -> None:
    (action,) = server.recovery(TEN)[index].actions
    assert "`epsilonflow doctor` says what stays reserved for it." in str(action.message)  # type: ignore[union-attr]


def test_a_stuck_retraining_is_begun_again_with_its_parameters() -> None:
    again = server.recovery(TEN)[2]
    assert again.trigger.expect == {"prefect.flow-run.Stuck"}  # type: ignore[union-attr]
    (action,) = again.actions
    assert set(action.parameters) == set(retrain.parameters.properties)  # type: ignore[union-attr]


def _sent(state: str, message: str | None, url: str | None = "http://127.0.0.1/runs") -> str:
    templates = Environment()
    templates.filters["ui_url"] = lambda run: url
    run = SimpleNamespace(name="train adult epsilon 0.5", state=SimpleNamespace(name=state, message=message))
    return str(json.loads(templates.from_string(server.PAYLOAD).render(flow_run=run))["text"])


def test_the_text_for_a_url_is_json_whatever_the_message_holds() -> None:
    message = 'set "delta" lower.\nThen run it again.'
    said = f"epsilonflow: train adult epsilon 0.5 is Refused: {message} http://127.0.0.1/runs"
    assert _sent("Refused", message) == said
    assert _sent("Refused", message, url=None) == said.removesuffix(" http://127.0.0.1/runs")


def test_text_about_a_late_run_without_message_says_what_to_do() -> None:
    assert "resume the work pool or the deployment if it is paused" in _sent("Late", None)
    assert "Failed: it has no message." in _sent("Failed", None)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with refused_as("missing_file", ParamsRefusedError):
        server.deploy(tmp_path / "prefect.yaml", tmp_path, "http://127.0.0.1:9/api")


def test_a_port_of_another_program_is_refused_at_once() -> None:
    other = HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    with closing(other.socket):
        Thread(target=other.handle_request, daemon=True).start()
        with refused_as("other_server", ParamsRefusedError):
            server.start_server(other.server_port)


def test_why_no_server_started_is_in_a_file_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    (tmp_path / "prefect.py").write_text("raise ImportError('as it is half installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = tmp_path / "server.log"
    with temporary_settings({PREFECT_HOME: tmp_path}), free_port() as port:
        with pytest.raises(StageFailedError, match=re.escape(f"{log} says why in its last lines")):
            server.start_server(port)
        assert (
            "ImportError: as it is half installed" in log.read_text()
            and not (tmp_path / "server.pid").exists()
        )


@contextmanager
def running_server(home: Path, on_end: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that Prefect's home says is its server, with what it does when it is asked to end, in Python."""
    program = (
        "import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, {on_end})\n"
        "print('ready', flush=True)\n"
        "time.sleep(300)"
    )
    command = [sys.executable, "-c", program, "prefect.server.api.server:create_app"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            (home / "server.pid").write_text(str(process.pid))
            with temporary_settings({PREFECT_HOME: home}):
                yield process
        finally:
            process.kill()


def test_stop_waits_for_the_end_of_the_server(tmp_path: Path) -> None:
    """It takes a moment, as a real one does; a server that starts meanwhile would find the port in use."""
    with running_server(tmp_path, "lambda *_: (time.sleep(1), sys.exit())") as process:
        assert server.stop_server()
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        assert not server.stop_server() and not (tmp_path / "server.pid").exists()


def test_a_server_that_does_not_end_is_named(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, "signal.SIG_IGN") as process,
        pytest.raises(StageFailedError, match=f"0 s ago .*`kill -9 {process.pid}`"),
    ):
        server.stop_server(patience_seconds=0)


def test_stop_leaves_another_process_alone_that_has_the_number_of_a_dead_server(tmp_path: Path) -> None:
    with ended([sys.executable, "-c", "import time; time.sleep(300)"]) as other:
        with temporary_settings({PREFECT_HOME: tmp_path}):
            (tmp_path / "server.pid").write_text(str(other.pid))
            assert not server.stop_server() and not (tmp_path / "server.pid").exists()
        assert other.poll() is None


@pytest.mark.parametrize("answers", [True, False])
def test_stop_says_where_a_server_answers_that_it_does_not_end(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.prefect_api.answers_at", lambda url: answers)
    with temporary_settings({PREFECT_HOME: tmp_path}):
        said = CliRunner().invoke(app, ["server", "stop"]).output
    assert said.startswith("No Prefect server runs in the background.\n")
    assert ("Another one still answers at" in said) == answers


@pytest.mark.parametrize("flow", [pipeline, retrain, tune])
def test_flows_that_spend_say_what_a_run_holds_that_was_stopped(flow: Any) -> None:
    for hooks in (flow.on_cancellation_hooks, flow.on_crashed_hooks, flow.on_failure_hooks):
        assert hooks == [report_reservations]


def test_a_stopped_run_is_named_with_the_commands_that_resume_it_and_give_it_up(place: Place) -> None:
    assert place.deliver().kind == "promoted"
    assert reservations.open_reservations(place.root) == []
    place.arrive("w3")
    with killed_in(train, "run_training"):
        place.deliver(1)
    (held,) = reservations.open_reservations(place.root)
    population, sentence = held.population, held.sentence()
    assert population == "tiny"
    run = place.rows("reserve")[-1]
    assert (
        run in sentence
        and "`epsilonflow retrain`" in sentence
        and f"`epsilonflow ledger forfeit {run}`" in sentence
    )
    place.ledger.forfeit(run)
    assert reservations.open_reservations(place.root) == []


def test_a_search_is_named_and_shows_its_card_and_the_winners_settings(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, shown, folder = list[tuple[Any, ...]](), dict[str, Any](), place.root / "tuned"
    folder.mkdir()
    (folder / "winner.yaml").write_text("algorithm: {name: dp_sgd, clip_norm: 0.3, steps: 4}\n")
    (folder / "privacy_card.json").write_text((GOLDEN / "card-00-dp_sgd.json").read_text())
    (place.root / "tune.yaml").write_text("space: {algorithm.clip_norm: [0.3, 1.0]}\nepsilon: 0.4\n")
    monkeypatch.setattr(tune_module, "label_run", lambda *words, tags=(): labels.append((*words, tags)))

    def deliver(*_: object, publish: Callable[[str], object], **__: object) -> str:
        publish("the winner is in tuned.")
        return "the winner is in tuned."

    monkeypatch.setattr(tune_module, "deliver_search", deliver)
    for module, name in ((tune_module, "create_table_artifact"), (deployed, "create_markdown_artifact")):
        monkeypatch.setattr(
            module, name, lambda content, key, description: shown.update({key: (content, description)})
        )
    with disable_run_logger():
        state: Any = tune.fn("tune.yaml")
    assert state.message == "the winner is in tuned."
    assert labels[-1] == ("tune", "tiny", "epsilon 0.4", ("tiny", "dp_sgd"))
    assert shown["winner"] == (
        [{"setting": "algorithm.clip\\_norm", "winner": "0.3"}],
        "the winner is in tuned.",
    )
    assert "## Accounting" in shown["privacy-card"][0]


def test_a_ledger_that_is_away_gives_no_traceback_about_what_is_reserved(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPSILONFLOW_LEDGER_URL", "postgresql+psycopg://runner@127.0.0.1:1/ledger")
    with pytest.raises(RefusedError):
        reservations.open_reservations(place.root)
    begun = FlowRun(flow_id=ID, start_time=datetime.now(UTC))
    client = nullcontext(SimpleNamespace(read_flow_run=lambda _: begun))
    monkeypatch.setattr(deployed, "get_client", lambda **_: client)
    report_reservations(pipeline, begun, Failed(message="the ledger is away"))


def test_a_retraining_shows_both_models_and_each_blocks_budget(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = dict[str, Any]()
    monkeypatch.setattr(scheduled, "publish", lambda root: shown.update(published=place.stages[-1]))
    monkeypatch.setattr(
        scheduled, "create_table_artifact", lambda rows, key, description: shown.update({key: rows})
    )
    place.deliver()
    place.arrive("w3")
    monkeypatch.setattr(scheduled, "stage_task", place.run_stage)
    second = place.deliver(1, run_stage=scheduled.retraining_task)
    scheduled.publish_retraining(
        DeliveryWork(place.settings, place.root, place.run_stage, place.said.append), second
    )
    assert shown["published"] == "report"  # while the checkout is still locked
    new, old = (run.replace("_", "\\_") for run in reversed(place.rows("settle")))
    assert [row["model"] for row in shown["models"]] == [f"new: {new}", f"in use before: {old}"]
    assert all("accuracy" in row["held out"] for row in shown["models"])
    assert [row["block"] for row in shown["budget"]] == ["w1", "w2", "w3"]
    assert [float(row["spent"]) > float(shown["budget"][2]["spent"]) for row in shown["budget"]] == [
        True,
        True,
        False,
    ]

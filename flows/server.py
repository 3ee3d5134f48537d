"""A Prefect server for the flows of a project: its deployments, and automations that look after their runs.

Prefect itself leaves a run as it is when the worker that began it dies. An automation marks such a run as crashed, in a
state named Stuck, which frees its place; another begins a stuck retraining again, which costs nothing extra, as a
period is charged once. Further automations tell a person, if it was said how. All of them are about runs with the tag
TAG alone, so that other flows of the same server are left in peace.
"""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import httpx
import psutil
from prefect.automations import Automation, EventTrigger, Posture, ResourceSpecification
from prefect.blocks.core import Block
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType, WorkerStatus
from prefect.events.actions import CallWebhook, ChangeFlowRunState, RunDeployment, SendNotification
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_HOME

from flows.deployed import BROKEN, REFUSED, STUCK, TAG, WORKER_DIED
from flows.prefect_api import is_prefect
from flows.scheduled import FEW_LEFT
from tasks.config.params import ParamsRefusedError
from tasks.runs.dvc_stages import StageFailedError

POOL, WAITED = "local-pool", "WaitedTooLong"
MAX_WAIT = timedelta(hours=24)
"""How long a run may wait for another one of its deployment to end."""
Notify = SendNotification | CallWebhook

_PATIENCE_SECONDS = 60.0
_START_SECONDS = 120.0
_SERVER = re.compile(r"\bprefect[ .]server\b")
"""In the command line of a server, whether `prefect server start` runs it in the background or not."""
_LEASES, _LEASES_IN_FILES = (
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE",
    "prefect.server.concurrency.lease_storage.filesystem",
)
"""Where leases on the slots of deployments are kept; in memory they are lost, and Prefect then ends the runs."""
_OUR_TAG = ResourceSpecification(
    {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
)
_ENDS = ("Completed", "Failed", "Crashed", "TimedOut", "Cancelled", STUCK, WAITED, REFUSED, BROKEN, FEW_LEFT)
_ALARMS = ("Failed", "Crashed", "TimedOut", STUCK, WAITED, REFUSED, BROKEN, FEW_LEFT)
_MINUTE = timedelta(minutes=1)
_SUBJECT = "'epsilonflow: ' ~ flow_run.name ~ ' is ' ~ flow_run.state.name"
_LATE_REASON = "no worker took it. Start one, or resume the work pool or the deployment if it is paused."
_NO_MESSAGE = f"('{_LATE_REASON}' if flow_run.state.name == 'Late' else 'it has no message.')"
"""Prefect gives a late run no message."""
_URL = "((flow_run | ui_url) or '')"  # a server that was not told its own URL has none
_TEXT = f"((flow_run.state.message or {_NO_MESSAGE}) ~ ' ' ~ {_URL}) | trim"
PAYLOAD = f"{{{{ {{'text': {_SUBJECT} ~ ': ' ~ ({_TEXT})}} | tojson }}}}"
"""What a URL is sent, as a template of Prefect's."""


def prefect(*arguments: str, url: str, root: Path | None = None) -> None:
    """Run a command of Prefect in `root` against the server at `url`; raises StageFailedError with its last line."""
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        cwd=root,
        env=os.environ | {"PREFECT_API_URL": url, "COLUMNS": "1000"},  # no line break within a message
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise StageFailedError(f"prefect {' '.join(arguments)}: {lines[-1].strip() if lines else 'failed'}")


def start_server(port: int, patience_seconds: float = _START_SECONDS) -> str:
    """Start a server in the background, if none runs there, and wait until it answers; returns the URL of its API.

    Raises ParamsRefusedError if another program has the port or the home's server has another one, and StageFailedError
    if no server starts.
    """
    url = f"http://127.0.0.1:{port}/api"
    health = _health(url)
    if health is None:
        _start(port, url, patience_seconds)
    elif not is_prefect(health):
        raise ParamsRefusedError(
            "another program than Prefect answers at {url}; name another port by --port.",
            code="other_server",
            url=url,
        )
    return url


def _health(url: str) -> httpx.Response | None:
    try:
        # without TLS on this machine; certificates would be read anew at each of many requests
        return httpx.get(f"{url}/health", timeout=5, verify=False)
    except httpx.HTTPError:
        return None


def _start(port: int, url: str, patience_seconds: float) -> None:
    """Start a server whose words go to a file, and wait until it answers.

    `prefect server start --background` leaves it pipes that nobody reads. Its next warning ends it, once they are full
    or closed.
    """
    if (other := _background_server()) is not None:
        raise ParamsRefusedError(
            "a Prefect server of {folder} runs already, process {process}; end it by `epsilonflow"
            " server stop`, or name its port by --port.",
            code="server_runs",
            folder=PREFECT_HOME.value(),
            process=other.pid,
        )
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    note, log = _note(), Path(PREFECT_HOME.value()) / "server.log"
    note.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as words:
        process = subprocess.Popen(
            command,
            env={_LEASES: _LEASES_IN_FILES} | os.environ | {"PREFECT_API_URL": url},
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            start_new_session=True,
        )
    note.write_text(str(process.pid), encoding="utf-8")
    deadline = time.monotonic() + patience_seconds
    while (health := _health(url)) is None or not health.is_success:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            note.unlink(missing_ok=True)
            raise StageFailedError(f"no Prefect server started at {url}; {log} says why in its last lines.")
        time.sleep(0.2)


def stop_server(patience_seconds: float = _PATIENCE_SECONDS) -> bool:
    """End the server that runs in the background, and wait until it has ended; returns whether there was one.

    Prefect's own command does not wait, and ends any process that has the number of a server that died long ago.
    """
    process = _background_server()
    if process is None:
        return False
    process.terminate()
    deadline = time.monotonic() + patience_seconds
    while _is_alive(process):
        if time.monotonic() > deadline:
            raise StageFailedError(
                f"the Prefect server, process {process.pid}, was asked to end {patience_seconds:g} s ago and has not;"
                f" it may still be writing. Ask again, or end it by `kill -9 {process.pid}`."
            )
        time.sleep(0.1)
    _note().unlink(missing_ok=True)
    return True


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _note() -> Path:
    """The note of the background server's process, where Prefect's own commands look for it."""
    return Path(PREFECT_HOME.value()) / "server.pid"


def _background_server() -> psutil.Process | None:
    """The server that the note names; the note of one that died is deleted."""
    note = _note()
    if not note.is_file():
        return None
    with suppress(psutil.Error, ValueError):
        process = psutil.Process(int(note.read_text(encoding="utf-8")))
        if _SERVER.search(" ".join(process.cmdline())):  # the number may be another process's by now
            return process
    note.unlink()
    return None


def count_workers() -> int:
    """How many workers of the pool on this machine are online."""

    async def count() -> int:
        async with get_client() as client:
            try:
                workers = await client.read_workers_for_work_pool(POOL)
            except PrefectHTTPStatusError as error:
                if error.response.status_code == httpx.codes.NOT_FOUND:  # no flow was deployed yet
                    return 0
                raise
            return sum(worker.status == WorkerStatus.ONLINE for worker in workers)

    return asyncio.run(count())


def deploy(file: Path, root: Path, url: str) -> None:
    """Deploy what a file such as prefect.yaml lists, to run in `root`; makes the pool that it may name."""
    if not file.is_file():
        raise ParamsRefusedError(
            "{path} is not there; name the file of deployments by --file.", code="missing_file", path=file
        )
    if POOL in file.read_text(encoding="utf-8"):
        prefect("work-pool", "create", POOL, "--type", "process", "--overwrite", url=url)
    prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(file), url=url, root=root)


@contextmanager
def keep_schedules() -> Iterator[None]:
    """Schedules that are active stay so within the block, where deploying would switch them off."""
    active = {key for key, *_, is_active in asyncio.run(_schedules()) if is_active}
    yield
    asyncio.run(_resume(active))


async def _schedules() -> list[tuple[tuple[UUID, str | None], UUID, bool]]:
    """For each schedule: its deployment and name, which deploying keeps, its id, and whether it is active."""
    async with get_client() as client:
        return [
            ((deployment.id, schedule.slug), schedule.id, schedule.active)
            for deployment in await client.read_deployments()
            for schedule in deployment.schedules
        ]


async def _resume(wanted: set[tuple[UUID, str | None]]) -> None:
    off = [
        (key[0], schedule)
        for key, schedule, is_active in await _schedules()
        if key in wanted and not is_active
    ]
    async with get_client() as client:
        for deployment, schedule in off:
            await client.update_deployment_schedule(deployment, schedule, active=True)


def install_automations(
    stuck_after: timedelta, notify: str | None, *, max_wait: timedelta = MAX_WAIT
) -> list[str]:
    """Create the automations, or replace those that are there; returns their names.

    stuck_after: how long a run that was begun may give no sign of life; a run in progress gives one every three
    minutes. notify: a notification block of Prefect, such as slack-webhook/oncall, or a URL that messages are sent to;
    None leaves notifications as they are. max_wait: how long a run may wait for its turn.
    """
    wanted = recovery(stuck_after, max_wait)
    if notify is not None:
        wanted += notifications(stuck_after, notifier(notify))
    asyncio.run(_install(wanted))
    return [automation.name for automation in wanted]


async def _install(wanted: list[Automation]) -> None:
    for automation in wanted:
        try:
            automation.id = (await Automation.aread(name=automation.name)).id
        except ValueError:  # there is none of this name
            await automation.acreate()
        else:
            await automation.aupdate()


def recovery(stuck_after: timedelta, max_wait: timedelta = MAX_WAIT) -> list[Automation]:
    """What ends runs whose worker died or that wait for too long, and begins stuck retrainings again."""
    minutes = stuck_after.total_seconds() / 60
    crash = ChangeFlowRunState(
        name=STUCK,
        state=StateType.CRASHED,
        force=False,
        message=f"no sign of life for {minutes:g} minutes: {WORKER_DIED}",
    )
    hours = max_wait.total_seconds() / 3600
    cancel = ChangeFlowRunState(
        name=WAITED,
        state=StateType.CANCELLED,
        force=False,
        message=f"waited {hours:g} hours for another run of this deployment to end. Nothing was spent for this one;"
        " end or cancel the other one, then start this one again.",
    )
    cancelled = ChangeFlowRunState(
        name="Cancelled",
        state=StateType.CANCELLED,
        force=False,
        message=f"cancelled {minutes:g} minutes ago, and ended here as its worker or machine has died."
        " `epsilonflow doctor` says what stays reserved for it.",
    )
    waiting = _absence(["AwaitingConcurrencySlot"], ["Running", "Cancelling", *_ENDS], max_wait)
    begun = _absence(["Pending"], ["Running", "Scheduled", "Cancelling", *_ENDS], stuck_after)
    running = _absence(["heartbeat"], ["heartbeat", "Cancelling", *_ENDS], stuck_after)
    cancelling = _absence(["Cancelling"], ["heartbeat", *_ENDS], stuck_after)
    retraining = ResourceSpecification({"prefect.resource.role": "flow", "prefect.resource.name": "retrain"})
    parameters = {
        "file": "{{ flow_run.parameters.file }}",
        "accept_recipe": "{{ flow_run.parameters.accept_recipe | default(false) }}",
    }
    restart = RunDeployment(source="inferred", deployment_id=None, parameters=parameters, job_variables=None)
    return [
        Automation(name="epsilonflow: a run that never began", trigger=begun, actions=[crash]),
        Automation(name="epsilonflow: a run whose process died", trigger=running, actions=[crash]),
        Automation(
            name="epsilonflow: begin a stuck retraining again",
            trigger=_presence([STUCK], also=retraining, once_in=_MINUTE),
            actions=[restart],
        ),
        Automation(name="epsilonflow: a run that waited too long", trigger=waiting, actions=[cancel]),
        Automation(
            name="epsilonflow: a cancelled run whose worker died", trigger=cancelling, actions=[cancelled]
        ),
    ]


def notifications(late_after: timedelta, notify: Notify) -> list[Automation]:
    """What tells a person of runs that need one."""
    by_limit = _presence(["Cancelled"], message="Deployment concurrency*", once_in=_MINUTE)
    late = _absence(["Late"], ["Pending", "Running", "Scheduled", *_ENDS], late_after)
    return [
        Automation(name=f"epsilonflow: tell of {what}", trigger=trigger, actions=[notify])
        for what, trigger in (
            ("runs that ended badly", _presence(_ALARMS, once_in=_MINUTE)),
            ("runs cancelled by a limit", by_limit),
            ("late runs", late),
        )
    ]


def notifier(target: str) -> Notify:
    """The action that tells a person by a block of Prefect, or by a URL, for which a block is made."""
    if target.startswith(("https://", "http://")):
        block: Block = Webhook(method="POST", url=target)  # type: ignore[arg-type]
        block.save("epsilonflow-notify", overwrite=True)
    else:
        try:
            loaded = Block.load(target)
        except ValueError as error:
            raise ParamsRefusedError(
                "{target!r} is no block of this Prefect server, nor a URL; `prefect block ls` shows the blocks, such"
                " as slack-webhook/oncall.",
                code="bad_option",
                target=target,
                options=("--notify",),
            ) from error
        assert isinstance(loaded, Block)
        block = loaded
    document = block._block_document_id
    assert document is not None
    if isinstance(block, Webhook):
        return CallWebhook(block_document_id=document, payload=PAYLOAD)
    subject, text = f"{{{{ {_SUBJECT} }}}}", f"{{{{ {_TEXT} }}}}"
    return SendNotification(block_document_id=document, subject=subject, body=text)


def _presence(
    states: Iterable[str],
    *,
    message: str | None = None,
    also: ResourceSpecification | None = None,
    once_in: timedelta = timedelta(0),
) -> EventTrigger:
    """once_in: for how long more events of the same run trigger nothing; a busy server delivers some twice."""
    about = {} if message is None else {"prefect.state-message": message}
    return EventTrigger(
        expect={f"prefect.flow-run.{name}" for name in states},
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*", **about}),
        match_related=[_OUR_TAG] if also is None else [_OUR_TAG, also],
        for_each={"prefect.resource.id"},
        within=once_in,
    )


def _absence(after: list[str], expect: list[str], within: timedelta) -> EventTrigger:
    return EventTrigger(
        posture=Posture.Proactive,
        after={f"prefect.flow-run.{name}" for name in after},
        expect={f"prefect.flow-run.{name}" for name in expect},
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        match_related=_OUR_TAG,
        for_each={"prefect.resource.id"},
        within=within,
    )

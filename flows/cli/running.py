"""Run stages for a command, in this process or in a Prefect flow, until they end or a signal ends them."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, cast

import typer

from flows.cli.steps import Steps, has_prefect_api, quieten_prefect, stage_here
from flows.cli.terminal import say

if TYPE_CHECKING:
    from types import FrameType

    from prefect.client.schemas.objects import State

    from tasks.config.overrides import Request
    from tasks.runs.quality import RunSummary

_SECONDS_TO_END = 3.0
T = TypeVar("T")

Verbose = Annotated[bool, typer.Option("--verbose", help="Show all output of DVC and Prefect.")]


def deliver(request: "Request", root: Path, *, verbose: bool) -> "RunSummary":
    """Run the pipeline; as a Prefect flow if there is a server."""
    steps = Steps(verbose)
    if has_prefect_api():
        with listening(steps):
            from flows.pipeline import pipeline

            state = stoppable(lambda: pipeline(**asdict(request), return_state=True), root)
            return cast("RunSummary", completed(state).result())
    from tasks.runs.quality import run_summary
    from tasks.runs.stages import run_all

    here = stage_here(steps)
    return alone(
        lambda: run_all(root, request, run_stage=here, finish=run_summary, say=steps.line), root, steps
    )


def alone(work: Callable[[], T], root: Path, steps: Steps) -> T:
    """Call `work`, which runs stages here, and return its result; a failed stage ends the command."""
    from tasks.runs.stages import StageFailedError

    try:
        return stoppable(work, root)
    except StageFailedError as failure:
        steps.end()
        say(str(failure), error=True)
        raise typer.Exit(1) from None
    finally:
        steps.end()


@contextmanager
def listening(steps: Steps) -> Iterator[None]:
    """Within the block, show what the stages of a flow write, without Prefect's own lines."""
    if not steps.verbose:
        quieten_prefect()
    from flows.pipeline import LISTENERS

    def listen(stage: str, text: str | None) -> None:
        steps.begin(stage) if text is None else steps.line(text)

    LISTENERS.append(listen)
    try:
        yield
    finally:
        LISTENERS.remove(listen)
        steps.end()


def completed(state: "State[Any]") -> "State[Any]":
    """Return the state if the flow completed; otherwise print why not, and end the command."""
    if state.is_completed():
        return state
    from flows.pipeline import REFUSED

    say(f"{'refused: ' if state.name == REFUSED else ''}{state.message}", error=True)
    raise typer.Exit(2 if state.name == REFUSED else 1)


class _Stopped(BaseException):
    """A signal asked this process to end."""


def stoppable(work: Callable[[], T], root: Path, stays: Callable[[], str] | None = None) -> T:
    """Call `work`, which runs stages in the checkout at `root`, and return its result.

    Ctrl-C or SIGTERM ends this process. `work` runs in another thread, where Prefect leaves signals alone. SIGINT is
    blocked in that thread and therefore in the processes that it starts. Otherwise Ctrl-C would also end Prefect's
    temporary server, which would print a page of errors.

    stays: describes what remains after a stop, if that is not a run of the checkout.
    """
    from tasks.config import home
    from tasks.runs.store import begun

    before = {} if stays else begun(home(), root)
    signals = (signal.SIGINT, signal.SIGTERM)

    def blocked() -> T:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        return work()

    def stop(number: int, _frame: "FrameType | None") -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(number)

    handlers = {each: signal.signal(each, stop) for each in signals}
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(copy_context().run, blocked).result()
        except _Stopped as stopped:
            _end(stopped.args[0], stays or (lambda: _what_stays(root, before)))
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)


def _end(number: int, stays: Callable[[], str]) -> NoReturn:
    """End all child processes, say what remains of the run, and exit without any output of Prefect."""
    import psutil

    terminal, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    started = psutil.Process().children(recursive=True)
    for process in started:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            is_dvc = os.getpgid(process.pid) == process.pid  # DVC releases its locks when the stage has ended
            process.send_signal(signal.SIGINT if is_dvc else signal.SIGKILL)
    for process in psutil.wait_procs(started, timeout=_SECONDS_TO_END)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    shown = "\x1b[?25h" if os.isatty(terminal) else ""  # show the cursor again, which a progress bar hides
    os.write(terminal, f"{shown}stopped: {stays()}\n".encode())
    os._exit(128 + number)


def _what_stays(root: Path, before: Mapping[str, int]) -> str:
    """Describe what remains of the run that the command began. before: the runs when it started, see `store.begun`."""
    from tasks.config import home
    from tasks.runs.ledger import open_ledger
    from tasks.runs.store import begun

    # By no clock, which may be set meanwhile, or be that of the machine that has the disk.
    run_id = next((run for run, mark in begun(home(), root).items() if before.get(run) != mark), None)
    status = None if run_id is None else open_ledger(root).status(run_id)
    if status == "open":
        return f"run {run_id} stays reserved; the same command resumes it at no extra cost."
    if status == "settled":
        return f"run {run_id} is trained and paid for; the same command finishes it at no extra cost."
    return "nothing was reserved; the same command continues from here."

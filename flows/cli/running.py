"""How a command does its work: stages here or in Prefect's flow, until they end or a signal ends them."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, cast

import typer

from flows.cli.steps import Steps, has_prefect_api, quieten_prefect, run_here
from flows.cli.terminal import say

if TYPE_CHECKING:
    from types import FrameType

    from prefect.client.schemas.objects import State

    from tasks.config.overrides import Request
    from tasks.runs.summary import RunSummary

_SECONDS_TO_END = 3.0
T = TypeVar("T")

Verbose = Annotated[bool, typer.Option("--verbose", help="Show all output of DVC and Prefect.")]


def deliver(request: "Request", root: Path, *, verbose: bool) -> "RunSummary":
    """The run, by the Prefect flow where there is a server for it."""
    steps = Steps(verbose)
    if has_prefect_api():
        with listening(steps):
            return _flow(request, root)
    return alone(lambda: run_here(request, root, steps), root)


def alone(work: Callable[[], T], root: Path) -> T:
    """What work returns that runs stages here; a stage that failed ends the command with its last line."""
    from tasks.runs.stages import StageFailedError

    try:
        return stoppable(work, root)
    except StageFailedError as failure:
        say(str(failure), error=True)
        raise typer.Exit(1) from None


@contextmanager
def listening(steps: Steps) -> Iterator[None]:
    """Until the end of the block, what the stages of a flow write is shown here; Prefect's own lines are not."""
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


def _flow(request: "Request", root: Path) -> "RunSummary":
    def flow() -> "State[Any]":
        from dataclasses import asdict

        from flows.pipeline import pipeline

        return pipeline(**asdict(request), return_state=True)

    return cast("RunSummary", completed(stoppable(flow, root)).result())


def completed(state: "State[Any]") -> "State[Any]":
    """The state, where the flow completed; else why it did not is said, and the command ends."""
    if not state.is_completed():
        _say_why(state)
    return state


def _say_why(state: "State[Any]") -> NoReturn:
    """Of a flow that did not complete."""
    from flows.pipeline import REFUSED

    say(f"{'refused: ' if state.name == REFUSED else ''}{state.message}", error=True)
    raise typer.Exit(2 if state.name == REFUSED else 1)


class _Stopped(BaseException):
    """A signal asked this process to end."""


def stoppable(work: Callable[[], T], root: Path, stays: Callable[[], str] | None = None) -> T:
    """What `work`, which runs stages in the checkout at `root`, returns; on Ctrl-C or SIGTERM this process ends.

    stays: what is left then, in words, where that is no run of the checkout.
    The work is done in another thread, where Prefect leaves signals alone. The interrupt is blocked there and so in
    what is started there, else Ctrl-C would end Prefect's temporary server, too, with a page of its own about it.
    """
    began, signals = time.time(), (signal.SIGINT, signal.SIGTERM)

    def blocked() -> T:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        return work()

    def stop(number: int, _frame: "FrameType | None") -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(number)

    before = {each: signal.signal(each, stop) for each in signals}
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(copy_context().run, blocked).result()
        except _Stopped as stopped:
            _end(stopped.args[0], stays or (lambda: _what_stays(root, began)))
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def _end(number: int, stays: Callable[[], str]) -> NoReturn:
    """End all processes that this one started, say what stays of the run, and end without a word of Prefect's."""
    import psutil

    terminal, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    started = psutil.Process().children(recursive=True)
    for process in started:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            is_dvc = (
                os.getpgid(process.pid) == process.pid
            )  # which gives its locks back when the stage has ended
            process.send_signal(signal.SIGINT if is_dvc else signal.SIGKILL)
    for process in psutil.wait_procs(started, timeout=_SECONDS_TO_END)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    shown = "\x1b[?25h" if os.isatty(terminal) else ""  # the cursor, which a progress bar hides
    os.write(terminal, f"{shown}stopped: {stays()}\n".encode())
    os._exit(128 + number)


def _what_stays(root: Path, began: float) -> str:
    """What a command, which began at a moment, leaves of its run, in words."""
    from tasks.config.environment import home
    from tasks.runs.ledger import open_ledger
    from tasks.runs.store import begun_since

    run_id = begun_since(home(), began, root)
    status = None if run_id is None else open_ledger(root).status(run_id)
    if status == "open":
        return f"run {run_id} stays reserved; the same command resumes it at no extra cost."
    if status == "settled":
        return f"run {run_id} is trained and paid for; the same command finishes it at no extra cost."
    return "nothing was reserved; the same command continues from here."

"""Run stages for a command, in this process or in a Prefect flow, and show them: until they end or a signal ends them.

On the screen is one line per stage, and a progress bar for training if there is a terminal. Without a Prefect API the
stages run here, in the flow's order, since Prefect would start a server for this one run. Either way, DVC decides what
has to run. A refusal is one sentence and exit status 2.
"""

import errno
import logging
import os
import re
import signal
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, get_type_hints

import typer
from rich.console import RenderableType
from typer.core import TyperGroup

from algorithms.plain_text import for_terminal
from tasks.refusals import PIPELINE
from tasks.runs.checkout import find_checkout
from tasks.terminal import PlainConsole

if TYPE_CHECKING:
    from types import FrameType

    from prefect.client.schemas.objects import State
    from rich.progress import Progress, TaskID

    from flows.pipeline import RunStage
    from tasks.runs.metrics import TextRows


SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,
}
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
Options = TypeVar("Options")


def takes_options(kind: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Make a command of a function of one dataclass; Typer reads an option from each of its annotated fields."""

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        def call(**values: Any) -> None:
            command(kind(**values))

        call.__name__, call.__doc__, call.__module__ = command.__name__, command.__doc__, command.__module__
        # Typer takes names and defaults from the signature, and help and types from the annotations.
        vars(call)["__signature__"] = signature(kind)
        call.__annotations__ = get_type_hints(kind, include_extras=True)
        return call

    return decorate


def say(text: str, *, error: bool = False) -> None:
    """Print a line to stdout or stderr."""
    typer.echo(for_terminal(text), err=error)


def show(content: RenderableType) -> None:
    """Print a table to stdout."""
    PlainConsole().print(content)


def in_checkout(path: Path) -> Path:
    """The path as it is given, if something is there; otherwise the same path in the checkout around this folder."""
    return path if path.exists() else (find_checkout() or Path()) / path


class OneSentence(TyperGroup):
    """Commands that a refusal, a denied permission or a full disk ends by one sentence on stderr and exit status 2.

    A stage that failed ends them by its last line and exit status 1.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            with PIPELINE.wording_errors():
                return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            from tasks.runs.dvc_stages import StageFailedError
            from tasks.runs.stage_main import refusals, shortage

            if isinstance(error, StageFailedError):
                say(str(error), error=True)
                raise typer.Exit(1) from None
            if isinstance(error, refusals()):
                words: str | None = str(error)
            elif (trouble := server_trouble(error)) is not None:
                words = f"{trouble} A run that has begun is resumed by the same command."
            elif isinstance(error, OSError) and error.errno in _DENIED:
                why = os.strerror(error.errno).lower()
                words = f"{error.filename or 'a file'}: {why}; use another place, or change its permissions."
            else:
                words = shortage(error)
            if words is None:
                raise
            say(f"refused: {' '.join(words.split())}", error=True)
            raise typer.Exit(2) from None


STAGE_WORDS = {
    "prepare": "preparing the data",
    "calibrate": "calibrating the noise",
    "evaluate": "evaluating on the held-out records",
    "report": "writing card and report",
}
# The line by which a stage reports its progress, behind the date and level of the log where it has them.
_STEP = re.compile(
    r"(?:.* - )?(?P<what>step|encoded) (?P<step>\d+) of (?P<steps>\d+)(?: records)?, (?P<rest>.*)"
)
_DVC_LINES = re.compile(
    r"(Running stage |> python (-P )?-m |Stage '|(Updating|Generating) lock file|To (track|enable) "
    r"|\s*(git add|dvc config) |Use `dvc |Verifying data sources|Data and pipelines are up"
    r"|(ERROR: )?failed to (reproduce|run) )"
)
"""Lines of DVC's own, which are not shown."""


@dataclass
class StageOutput:
    """Prints what the stages of a run write, in a readable form.

    verbose: show everything unchanged. is_reused: whether training handed out an existing result.
    """

    verbose: bool = False
    is_reused: bool = False
    console: PlainConsole = field(
        default_factory=lambda: PlainConsole(stderr=True, highlight=False, soft_wrap=True)
    )
    _bar: "Progress | None" = None
    _task: "TaskID | None" = None

    def begin(self, stage: str) -> None:
        """A stage begins. That it trains, and does not hand out an existing result, the train stage says itself."""
        self.end()
        if stage in STAGE_WORDS:
            self.console.print(f"{STAGE_WORDS[stage]} ...")

    @contextmanager
    def stages(self, root: Path) -> "Iterator[RunStage]":
        """What runs a stage in the checkout at `root`, without Prefect, all by one process of DVC."""
        from flows.missing_runs import log_missing_run
        from tasks.runs.dvc_stages import DvcProcess

        def run(stage: str) -> None:
            self.begin(stage)
            ran = dvc.reproduce(stage)
            if stage == "report" and not ran:
                log_missing_run(root, self.line)

        with DvcProcess(root, say=self.line) as dvc:
            yield run

    def run(self, stage: str, root: Path) -> None:
        """Run one stage in the checkout at `root`; raises StageRefusedError or StageFailedError."""
        with self.stages(root) as run:
            run(stage)

    def line(self, text: str) -> None:
        """Show a line that a stage or DVC wrote."""
        from tasks.runs.dvc_stages import EXISTING_RESULT, TRAINING_LINE

        step = _STEP.fullmatch(text)
        self.is_reused |= text.startswith(EXISTING_RESULT)
        if text == TRAINING_LINE or text.startswith(EXISTING_RESULT):
            self.console.print(text)
        elif self.verbose or (
            step is None and not _DVC_LINES.match(text) and not text.startswith("refused: ")
        ):
            self.end()
            self.console.print(f"  {text}")
        elif step and self.console.is_terminal:
            words = {"step": "steps", "encoded": "encoded records"}[step["what"]]
            self._advance(words, int(step["step"]), int(step["steps"]), step["rest"])
        elif step:
            self.console.print(f"  {text}")

    def result(self, root: Path) -> "TextRows":
        """The result of the run in `root`, which the command shows."""
        from tasks.runs.summary import run_summary

        return run_summary(root)

    def end(self) -> None:
        """Remove the bar: something else is shown, or the last stage has ended."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def _advance(self, words: str, step: int, steps: int, rest: str) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (
                TextColumn(f"  {words}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=steps)
        if self._task is not None:
            self._bar.update(self._task, completed=step, description=for_terminal(rest))


def prefect_api_url() -> str | None:
    """The URL of the Prefect server, from PREFECT_API_URL or Prefect's profile; None if none is configured."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    folder = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect")
    try:
        profiles = tomllib.loads((folder / "profiles.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    chosen = profiles.get("profiles", {}).get(os.environ.get("PREFECT_PROFILE") or profiles.get("active"), {})
    return chosen.get("PREFECT_API_URL") or None


def has_prefect_api() -> bool:
    """Whether a Prefect server is configured.

    Raises ParamsRefusedError if nobody listens there, which Prefect's client would hope for a minute to change.
    """
    url = prefect_api_url()
    if url is None:
        return False
    from flows.prefect_api import is_nobody_at, no_server_at
    from tasks.config.params import ParamsRefusedError

    if is_nobody_at(url):
        raise ParamsRefusedError("{problem}", code="no_server", problem=no_server_at(url), url=url)
    return True


def server_trouble(error: BaseException) -> str | None:
    """What to type where the error, or one that led to it, is that the configured Prefect server serves nobody."""
    import httpx

    from flows.prefect_api import answers_at, no_server_at

    # Prefect wraps what its client raised, once or several times, so that all that led to the error is looked through.
    url, causes, seen = prefect_api_url(), [error], list[BaseException]()
    while causes:
        cause = causes.pop()
        if cause not in seen:
            seen.append(cause)
            causes += [each for each in (cause.__cause__, cause.__context__) if each is not None]
    codes = {each.response.status_code for each in seen if isinstance(each, httpx.HTTPStatusError)}
    is_away = any(isinstance(each, httpx.TransportError) for each in seen)
    if url is None or not (is_away or codes or any(str(each).startswith(_API_UNREACHED) for each in seen)):
        return None
    if httpx.codes.UNAUTHORIZED in codes:
        return f"the Prefect server at {url} asks for a password; set PREFECT_API_AUTH_STRING or PREFECT_API_KEY."
    return no_server_at(url) if is_away or not answers_at(url) else None


def quieten_prefect() -> None:
    """Send Prefect's own log lines only to its server; call this before Prefect is imported."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")


_SECONDS_TO_END = 3.0
_API_UNREACHED = "Failed to reach API"
"""How Prefect's error begins where what answers is no API of its own."""
T = TypeVar("T")

Verbose = Annotated[bool, typer.Option("--verbose", help="Show all output of DVC and Prefect.")]
AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE:FACTORY",
        help="Code of your own that the file may name, besides what params.yaml and your data cards name.",
    ),
]


@contextmanager
def listening(steps: StageOutput) -> Iterator[None]:
    """Within the block, show what the stages of a flow write, without Prefect's own lines."""
    if not steps.verbose:
        quieten_prefect()
    from flows.deployed import STAGE_LINES

    handler = _StepsHandler(steps)
    STAGE_LINES.addHandler(handler)
    try:
        yield
    finally:
        STAGE_LINES.removeHandler(handler)
        steps.end()


class _StepsHandler(logging.Handler):
    """Shows what the stages of a flow write."""

    def __init__(self, steps: StageOutput) -> None:
        super().__init__()
        self._steps = steps

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text:
            self._steps.line(text)
        else:
            self._steps.begin(str(record.__dict__["stage"]))


def require_completed(state: "State[Any]") -> "State[Any]":
    """Return the state if the flow completed; otherwise print why not, and end the command."""
    if state.is_completed():
        return state
    from flows.deployed import REFUSED

    say(f"{'refused: ' if state.name == REFUSED else ''}{state.message}", error=True)
    raise typer.Exit(2 if state.name == REFUSED else 1)


class _Stopped(BaseException):
    """A signal asked this process to end."""


def stoppable(
    work: Callable[[], T], root: Path, stays: str | None = None, *, steps: StageOutput | None = None
) -> T:
    """Call `work`, which runs stages in the checkout at `root` and shows them by `steps`, and return its result.

    Ctrl-C or SIGTERM ends this process. `work` runs in another thread, where Prefect leaves signals alone. SIGINT is
    blocked in that thread and therefore in the processes that it starts. Otherwise Ctrl-C would also end Prefect's
    temporary server, which would print a page of errors.

    stays: describes what remains after a stop, if that is not a run of the checkout.
    """
    from tasks.config import home
    from tasks.runs.store import begun_runs

    before = {} if stays else begun_runs(home(), root)
    signals = (signal.SIGINT, signal.SIGTERM)

    def work_without_sigint() -> T:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        return work()

    def stop(number: int, _frame: "FrameType | None") -> None:
        for each in signals:  # a second Ctrl-C would interrupt what ends the stages
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(number)

    handlers = {each: signal.signal(each, stop) for each in signals}
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(copy_context().run, work_without_sigint).result()
        except _Stopped as stopped:
            _end(stopped.args[0], lambda: stays or _what_stays(root, before))
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)
            if steps is not None:
                steps.end()


def _end(number: int, stays: Callable[[], str]) -> NoReturn:
    """End all child processes, say what remains of the run, and exit without any output of Prefect."""
    import psutil

    # Threads of Prefect go on until the process ends, and would print errors about the stages that end under them.
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
    os._exit(128 + number)  # at once: the usual end of Python would wait for the thread with the stages


def _what_stays(root: Path, before: Mapping[str, int]) -> str:
    """Describe what remains of the run that the command began. before: the runs when it started, see `store.begun`."""
    from tasks.runs.reservations import begun_since

    run_id, status = begun_since(before, root) or (None, None)
    if status == "open":
        return f"run {run_id} stays reserved; the same command resumes it at no extra cost."
    if status == "settled":
        return f"run {run_id} is trained and paid for; the same command finishes it at no extra cost."
    return "nothing was reserved; the same command continues from here."

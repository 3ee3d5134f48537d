"""The command `epsilonflow`; it works in the checkout it is called from.

What a command needs is imported when it runs, so that `--help` is quick.
"""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, cast

import typer

from flows.cli import ledger
from flows.cli.terminal import SETTINGS, say, sentences, show

if TYPE_CHECKING:
    from types import FrameType

    from prefect.client.schemas.objects import State

    from tasks.config.overrides import Request
    from tasks.runs.summary import RunSummary

_SECONDS_TO_END = 3.0
T = TypeVar("T")

app = typer.Typer(**SETTINGS, help="Train models under differential privacy, and prove what it spent.")
card_app = typer.Typer(**SETTINGS, help="Privacy cards.")
app.add_typer(ledger.app, name="ledger")
app.add_typer(card_app, name="card")
CARD = Path("artifacts/privacy_card.json")

Dataset = Annotated[
    str | None, typer.Option(help="Name of a data card; model and settings then follow its recipe.")
]
Algorithm = Annotated[
    str | None, typer.Option(help="Name of an algorithm; settings then follow the data set's recipe.")
]
Epsilon = Annotated[float | None, typer.Option(help="The privacy budget of the run.")]
Delta = Annotated[float | None, typer.Option(help="How likely the guarantee may fail; at most 1/n.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the model's start.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any value of params.yaml, such as algorithm.steps=500."),
]


@app.command()
def run(
    dataset: Dataset = None,
    algorithm: Algorithm = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    seed: Seed = None,
    assignments: Assignments = None,
) -> None:
    """Run the pipeline: prepare, calibrate, train, evaluate, report. What is asked for is kept in params.yaml."""
    with sentences():
        from tasks.config.overrides import revise
        from tasks.runs.sanity import ask_first
        from tasks.runs.stage import checkout

        root = checkout()
        request = _request(dataset, algorithm, epsilon, delta, seed, assignments)
        result = _already_there(root, request)
        if result:
            say("Nothing to do: this run is done, and its results are here. Nothing was spent.")
        else:
            ask_first(root, revise(root, request).params)
            result = _flow(request, root)
        show(result.table())


def _request(
    dataset: str | None,
    algorithm: str | None,
    epsilon: float | None,
    delta: float | None,
    seed: int | None,
    assignments: list[str] | None,
) -> "Request":
    from tasks.config.overrides import Request, settings_of

    return Request(dataset, algorithm, epsilon, delta, seed, settings_of(assignments or ()))


def _already_there(root: Path, request: "Request") -> "RunSummary | None":
    """The results of just this run where they are here, so that not even Prefect needs to start."""
    from tasks.config.overrides import revise
    from tasks.runs.reproduce import checkout_lock, up_to_date
    from tasks.runs.summary import run_summary

    with checkout_lock(root, say=say):
        done = not revise(root, request).changes and up_to_date(root, say=say)
        return run_summary(root) if done else None


def _flow(request: "Request", root: Path) -> "RunSummary":
    def flow() -> "State[Any]":
        from dataclasses import asdict

        from flows.pipeline import pipeline

        return pipeline(**asdict(request), return_state=True)

    state = _stoppable(flow, root)
    if not state.is_completed():
        _say_why(state)
    return cast("RunSummary", state.result())


def _say_why(state: "State[Any]") -> NoReturn:
    """Of a flow that did not complete."""
    from flows.pipeline import REFUSED

    say(f"{'refused: ' if state.name == REFUSED else ''}{state.message}", error=True)
    raise typer.Exit(2 if state.name == REFUSED else 1)


class _Stopped(BaseException):
    """A signal asked this process to end."""


def _stoppable(work: Callable[[], T], root: Path) -> T:
    """What `work`, which runs stages in the checkout at `root`, returns; on Ctrl-C or SIGTERM this process ends.

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
            _end(stopped.args[0], root, began)
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def _end(number: int, root: Path, began: float) -> NoReturn:
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
    os.write(terminal, f"stopped: {_what_stays(root, began)}\n".encode())
    os._exit(128 + number)


def _what_stays(root: Path, began: float) -> str:
    """What a command, which began at a moment, leaves of its run, in words."""
    from tasks.config.environment import home
    from tasks.runs.store import begun_since
    from tasks.runs.summary import open_ledger

    run_id = begun_since(home(), began, root)
    status = None if run_id is None else open_ledger(root).status(run_id)
    if status == "open":
        return f"run {run_id} stays reserved, and the same command goes on with it for nothing more."
    if status == "settled":
        return f"run {run_id} is trained and paid for, and the same command goes on with it for nothing more."
    return "nothing was reserved; the same command goes on with what is done."


@app.command()
def plan(
    dataset: Dataset = None,
    algorithm: Algorithm = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    seed: Seed = None,
    assignments: Assignments = None,
) -> None:
    """Say what such a run would cost and what the ledger has left; nothing is spent and nothing changed."""
    with sentences():
        pass
        from tasks.config.overrides import revise
        from tasks.runs.stage import checkout

        root = checkout()
        revision = revise(root, _request(dataset, algorithm, epsilon, delta, seed, assignments))
        from flows.cli.costs import cost_table

        show(cost_table(root, revision.params))


@app.command()
def advise(
    dataset: Annotated[str, typer.Option(help="Name of a data card.")],
    epsilon: Annotated[float, typer.Option(help="The privacy budget of the run.")],
    delta: Delta = None,
) -> None:
    """Propose settings from public values alone, say why, and what they would cost; nothing is spent or changed."""
    with sentences():
        from flows.cli.costs import advice_table
        from tasks.runs.stage import checkout

        for table in advice_table(checkout(), dataset, epsilon, delta):
            show(table)


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="The comparison, such as comparisons/example.yaml.")],
    runner: Annotated[str, typer.Option(help="What runs the cells: threads, dask or ray.")] = "threads",
    workers: Annotated[int, typer.Option(min=1, help="How many cells at once.")] = 2,
    renew: Annotated[
        bool, typer.Option("--renew", help="Run cells again that other code of the algorithms made.")
    ] = False,
) -> None:
    """Compare algorithms on public data sets as a YAML file says; a finished cell is not run again."""
    with sentences():
        from flows.compare import compare as run_comparison
        from flows.compare import runner_named

        state = run_comparison(file, runner=runner_named(runner), workers=workers, renew=renew)
        if not state.is_completed():
            _say_why(state)
        say(str(state.message))


@app.command()
def retrain(
    file: Annotated[Path, typer.Argument(help="The settings of the retraining.")] = Path("retrain.yaml"),
) -> None:
    """Train again on new blocks if a retraining is due; a second time in the same period costs nothing."""
    with sentences():
        from tasks.runs.stage import checkout

        def flow() -> "State[Any]":
            from flows.retrain import retrain as retraining

            return retraining(str(file), return_state=True)

        state = _stoppable(flow, checkout())
        if not state.is_completed():
            _say_why(state)
        say(str(state.message))


@app.command()
def tune(
    file: Annotated[Path, typer.Argument(help="The search, such as examples/tune.yaml.")] = Path("tune.yaml"),
    runner: Annotated[str, typer.Option(help="What runs the trials: threads, dask or ray.")] = "threads",
    workers: Annotated[int, typer.Option(min=1, help="How many trials at once.")] = 2,
    only_plan: Annotated[
        bool, typer.Option("--plan", help="Say what it would cost; nothing is spent.")
    ] = False,
) -> None:
    """Search for settings privately: only the winner leaves, for one price that its card states."""
    with sentences():
        from tasks.runs.stage import checkout

        root = checkout()
        if only_plan:
            from flows.cli.costs import search_table

            show(search_table(root, root / file))
            return

        def flow() -> "State[Any]":
            from flows.compare import runner_named
            from flows.tune import search

            return search(file, runner=runner_named(runner), workers=workers)

        state = _stoppable(flow, root)
        if not state.is_completed():
            _say_why(state)
        say(str(state.message))


@app.command()
def audit(
    method: Annotated[
        str | None, typer.Option(help="A registered method, or package.module:factory; all by default.")
    ] = None,
    epsilon: Annotated[float, typer.Option(help="The claim.")] = 4.0,
    delta: Annotated[float, typer.Option(help="The claim.")] = 1e-5,
    runs: Annotated[int, typer.Option(min=1, help="Pairs of runs with and without the worst record.")] = 1000,
    canaries: Annotated[int, typer.Option(min=8, help="Records that the run with many asks about.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Of the audit.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes side by side; all cores.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as steps=8.")
    ] = None,
) -> None:
    """Look for more leakage than a method claims, in the code that is installed; spends nothing.

    Exit status 1 if a claim is violated.
    """
    with sentences():
        from tasks.config.overrides import settings_of
        from tasks.runs.stage import checkout

        root = checkout()
        settings = {
            key.removeprefix("algorithm."): value for key, value in settings_of(assignments or ()).items()
        }

        def flow() -> "State[Any]":
            from flows.audit import audit as auditing

            return auditing(
                method, epsilon, delta, settings, runs, canaries, seed, workers, return_state=True
            )

        state = _stoppable(flow, root)
        if not state.is_completed():
            _say_why(state)
        say(str(state.message))


@card_app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A privacy_card.json, its files beside it.")] = CARD,
    key: Annotated[
        str | None,
        typer.Option(help="The owner's public key, in owner.pub of the owner's data folder; that here."),
    ] = None,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="A card that nobody signed may hold.")] = False,
) -> None:
    """Check a card's signature, recompute its epsilon from its recorded events and compare the files beside it.

    Exit status 1 if it does not hold.
    """
    with sentences():
        from algorithms.privacy import card
        from tasks.config.environment import home
        from tasks.runs.signing import public_key

        verification = card.verify(
            card.load(file), file.parent, key=key or public_key(home()), unsigned=unsigned
        )
    words = {True: "holds", False: "FAILS", None: "not checked"}
    for check in verification.checks:
        say(f"{words[check.passed]}: {check.name} ({check.detail})")
    if not verification.passed:
        raise typer.Exit(1)


@card_app.command("show")
def show_card(file: Annotated[Path, typer.Argument(help="A privacy_card.json.")] = CARD) -> None:
    """Say in sentences what a card states; whether it holds, `verify` finds out."""
    with sentences():
        from algorithms.privacy.card import load
        from algorithms.privacy.card.text import markdown

        say(markdown(load(file)))


def run_only() -> None:
    """`python -m flows.pipeline`: the command `run` by itself."""
    alone = typer.Typer(**{**SETTINGS, "no_args_is_help": False})
    alone.command()(run)
    alone()


def compare_only() -> None:
    """`python -m flows.compare`: the command `compare` by itself."""
    alone = typer.Typer(**SETTINGS)
    alone.command()(compare)
    alone()


if __name__ == "__main__":
    app()

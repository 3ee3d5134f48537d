"""The command `epsilonflow`; it works in the checkout it is called from.

What a command needs is imported when it runs, so that `--help` is quick.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, cast

import typer

from flows.cli import ledger
from flows.cli.steps import Steps, has_prefect_api, quieten_prefect, run_here, stage_here
from flows.cli.terminal import SETTINGS, say, sentences, show

if TYPE_CHECKING:
    from types import FrameType

    from prefect.client.schemas.objects import State

    from tasks.config.overrides import Request
    from tasks.config.params import Params
    from tasks.runs.summary import RunSummary

_SECONDS_TO_END = 3.0
T = TypeVar("T")

app = typer.Typer(
    **{**SETTINGS, "add_completion": True},
    help="Train models under differential privacy, and prove what it spent.",
)
card_app = typer.Typer(**SETTINGS, help="Privacy cards.")
app.add_typer(ledger.app, name="ledger")
app.add_typer(card_app, name="card")
data_app = typer.Typer(**SETTINGS, help="Data cards.")
app.add_typer(data_app, name="data")


@data_app.callback()
def data_main() -> None:
    """Data cards."""


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
Encoder = Annotated[
    str | None,
    typer.Option(
        help="A frozen public encoder, such as efficientnet-lite0 or wordllama, under a private head."
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show all that DVC and Prefect say.")]


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        say(f"epsilonflow {version('epsilonflow')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    """Train models under differential privacy, and prove what it spent."""


@app.command()
def run(
    dataset: Dataset = None,
    algorithm: Algorithm = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    seed: Seed = None,
    assignments: Assignments = None,
    encoder: Encoder = None,
    verbose: Verbose = False,
) -> None:
    """Run the pipeline: prepare, calibrate, train, evaluate, report. What is asked for is kept in params.yaml."""
    with sentences():
        from tasks.config.overrides import revise
        from tasks.runs.stages import checkout

        root = checkout()
        request = _request(dataset, algorithm, epsilon, delta, seed, assignments, encoder)
        revision = revise(root, request)
        say(_what(revision.params), error=True)
        result = _already_there(root, request)
        if result:
            say("Nothing to do: this run is done, and its results are here. Nothing was spent.")
        else:
            _look_ahead(root, revision.params)
            result = _deliver(request, root, verbose=verbose)
        show(result.table())


def _what(settings: "Params") -> str:
    """What is trained, in a line."""
    privacy = settings.privacy
    target = f"epsilon {privacy.epsilon:g}" if privacy.epsilon is not None else "the attack in privacy.target"
    return (
        f"{settings.data.dataset}: {settings.algorithm_settings['name']} with the model {settings.model.name}, at"
        f" {target} and delta {privacy.delta:g}, as params.yaml will say"
    )


def _look_ahead(root: Path, settings: "Params") -> None:
    """Raises what refuses the run, and asks about settings that look wrong, before anything starts."""
    from tasks.runs.preflight import ask_first, outlook

    found = outlook(root, settings)
    found.check()
    if not found.is_begun or sys.stdin.isatty():
        ask_first(found.doubts, found.public, epsilon=found.plan.target.budget.epsilon)


def _deliver(request: "Request", root: Path, *, verbose: bool) -> "RunSummary":
    """The run, by the Prefect flow where there is a server for it."""
    steps = Steps(verbose)
    if has_prefect_api():
        with _listening(steps):
            return _flow(request, root)
    return _alone(lambda: run_here(request, root, steps), root)


def _alone(work: Callable[[], T], root: Path) -> T:
    """What work returns that runs stages here; a stage that failed ends the command with its last line."""
    from tasks.runs.stages import StageFailedError

    try:
        return _stoppable(work, root)
    except StageFailedError as failure:
        say(str(failure), error=True)
        raise typer.Exit(1) from None


@contextmanager
def _listening(steps: Steps) -> Iterator[None]:
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


def _request(
    dataset: str | None,
    algorithm: str | None,
    epsilon: float | None,
    delta: float | None,
    seed: int | None,
    assignments: list[str] | None,
    encoder: str | None,
) -> "Request":
    from tasks.config.overrides import Request, settings_of

    return Request(dataset, algorithm, epsilon, delta, seed, settings_of(assignments or ()), encoder)


def _already_there(root: Path, request: "Request") -> "RunSummary | None":
    """The results of just this run where they are here, so that not even Prefect needs to start."""
    from tasks.config.overrides import revise
    from tasks.runs.stages import checkout_lock, up_to_date
    from tasks.runs.summary import run_summary

    with checkout_lock(root, say=say):
        done = not revise(root, request).changes and up_to_date(root, say=say)
        return run_summary(root) if done else None


def _flow(request: "Request", root: Path) -> "RunSummary":
    def flow() -> "State[Any]":
        from dataclasses import asdict

        from flows.pipeline import pipeline

        return pipeline(**asdict(request), return_state=True)

    return cast("RunSummary", _completed(_stoppable(flow, root)).result())


def _completed(state: "State[Any]") -> "State[Any]":
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


def _stoppable(work: Callable[[], T], root: Path, stays: Callable[[], str] | None = None) -> T:
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
    encoder: Encoder = None,
) -> None:
    """Say what such a run would cost and what the ledger has left; nothing is spent and nothing changed.

    Exit status 2 where the run would be refused, also for a file that is not there or not the declared one.
    """
    with sentences():
        from tasks.config.overrides import revise
        from tasks.runs.stages import checkout

        root = checkout()
        revision = revise(root, _request(dataset, algorithm, epsilon, delta, seed, assignments, encoder))
        from flows.cli.costs import cost_table
        from tasks.runs.preflight import outlook

        found = outlook(root, revision.params)
        show(cost_table(found, revision.params))
        found.check()


@app.command()
def advise(
    dataset: Annotated[str, typer.Option(help="Name of a data card.")],
    epsilon: Annotated[float, typer.Option(help="The privacy budget of the run.")],
    delta: Delta = None,
) -> None:
    """Propose settings from public values alone, say why, and what they would cost; nothing is spent or changed."""
    with sentences():
        from flows.cli.costs import advice_table
        from tasks.runs.stages import checkout

        for table in advice_table(checkout(), dataset, epsilon, delta):
            show(table)


@app.command()
def compare(
    files: Annotated[
        list[Path],
        typer.Argument(help="The comparisons, such as comparisons/example.yaml; one after the other."),
    ],
    runner: Annotated[str, typer.Option(help="What runs the cells: threads, dask or ray.")] = "threads",
    workers: Annotated[int, typer.Option(min=1, help="How many cells at once.")] = 2,
    renew: Annotated[
        bool, typer.Option("--renew", help="Run cells again that other code of the algorithms made.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Compare algorithms on public data sets as YAML files say; a finished cell is not run again."""
    with sentences():
        if not verbose:
            quieten_prefect()
        from flows.compare import compare as run_comparison
        from flows.compare import runner_named

        said = "cells that are finished stay, and the same command goes on with the rest."
        for file in files:
            run_one = partial(run_comparison, file, runner=runner_named(runner), workers=workers, renew=renew)
            say(str(_completed(_stoppable(run_one, Path.cwd(), lambda: said)).message))


@app.command()
def retrain(
    file: Annotated[Path, typer.Argument(help="The settings of the retraining.")] = Path("retrain.yaml"),
    give_up: Annotated[
        bool,
        typer.Option("--give-up", help="End the one that a fault keeps from its end; it counts as spent."),
    ] = False,
    yes: ledger.Yes = False,
    verbose: Verbose = False,
) -> None:
    """Train again on new blocks if a retraining is due; a second time in the same period costs nothing."""
    with sentences():
        from tasks.runs.stages import checkout

        root, steps = checkout(), Steps(verbose)
        if give_up:
            message = _given_up(root, file, yes=yes)
        elif not has_prefect_api():
            message = _alone(lambda: _retrain_here(root, file, steps), root)
        else:
            with _listening(steps):
                message = str(_completed(_stoppable(lambda: _retrain_flow(file), root)).message)
        say(message)


def _retrain_here(root: Path, file: Path, steps: Steps) -> str:
    """What `flows.retrain` does, without Prefect; returns what became of it."""
    from datetime import UTC, datetime

    from tasks.retraining import settings
    from tasks.retraining.delivery import Work
    from tasks.retraining.delivery import retrain as deliver
    from tasks.runs.stages import StageFailedError, StageRefusedError, checkout_lock

    work = Work(settings.load(root / file), root, stage_here(steps), steps.line)
    try:
        with checkout_lock(root, say=steps.line):
            outcome = deliver(work, now=datetime.now(UTC))
    finally:
        steps.end()
    if outcome.kind == "refused":
        raise StageRefusedError(outcome.message)
    if outcome.kind == "failed":
        raise StageFailedError(outcome.message)
    return outcome.message


def _given_up(root: Path, file: Path, *, yes: bool) -> str:
    from tasks.retraining import delivery, settings

    work = delivery.Work(settings.load(root / file), root, lambda *_: None, lambda _: None)
    with work.states.held() as free:
        state = work.states.open() if free else None
        if state is None:
            return "No retraining waits to be taken up." if free else "Another process is at the retraining."
        ledger.ask(
            f"The retraining of {state.period} is given up, and what it was charged counts as spent.", yes=yes
        )
        return delivery.give_up(work, state)


def _retrain_flow(file: Path) -> "State[Any]":
    from flows.retrain import retrain as retraining

    return retraining(str(file), return_state=True)


@app.command()
def doctor() -> None:
    """Look at this machine and checkout, and say in a sentence each what is off; exit status 1 where something is."""
    from flows.cli.doctor import findings

    is_ill = False
    for found in findings(Path.cwd()):
        mark = {True: "well", False: "OFF ", None: "-   "}[found.is_well]
        say(f"{mark}  {found.name}: {found.text}")
        is_ill |= found.is_well is False
    if is_ill:
        raise typer.Exit(1)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    schema: Annotated[
        Path | None,
        typer.Option("--from", help="A Frictionless table schema (JSON); else columns are asked for."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="The table, CSV or Parquet, which is copied; no row of it is read.")
    ] = None,
    label: Annotated[
        str,
        typer.Option(
            help="The column that holds the class or the number; several, with commas, hold a label each."
        ),
    ] = "",
    at_most: Annotated[
        int | None, typer.Option(min=1, help="More records than that there never are.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="What one record is, and so what is protected; one person without it.")
    ] = None,
    cap: Annotated[
        float | None, typer.Option(help="Epsilon that all runs together may spend; 10 without it.")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="In place of a table: a folder with a folder of images a class, which is copied."),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=8, help="Pixels of a side that images are cut and resized to; 64 without it."),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="In place of a table: rows with texts, CSV, JSON lines or Parquet; copied, not read."
        ),
    ] = None,
    columns: Annotated[str, typer.Option(help="Columns of the texts, with commas.")] = "text",
    classes: Annotated[str, typer.Option(help="Of images and texts, with commas.")] = "",
    bounds: Annotated[
        str, typer.Option(help="Of a number that is predicted of texts, in place of classes: LOW,HIGH.")
    ] = "",
    tags: Annotated[
        str,
        typer.Option(help="That the words of texts have, in place of classes, with commas: O,B-PER,I-PER."),
    ] = "",
    next_token: Annotated[
        bool,
        typer.Option("--next-token", help="Predict the token that follows in texts, in place of classes."),
    ] = False,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="Of images and texts: a public model, or tokenizer/NAME of one that is fine-tuned."
        ),
    ] = None,
) -> None:
    """Make a project of your own, under git and DVC.

    It has params.yaml, dvc.yaml, prefect.yaml and a data card of what you declare.
    """
    with sentences():
        from flows.cli.asking import columns_asked, listed, number_asked, two_numbers
        from tasks.config.new_project import (
            Declared,
            absolute,
            make,
            of_images,
            of_schema,
            of_texts,
            predicted,
            table_of,
        )

        name = re.sub(r"[^a-z0-9_-]+", "-", folder.resolve().name.lower()).strip("-_") or "table"
        own: dict[str, Any] = {"unit": unit or "one person", "cap": 10.0 if cap is None else cap}
        seen = None if encoder is None else absolute(encoder)
        if images is not None:
            most = at_most or number_asked()
            declared = of_images(name, images, listed(classes), most, size or 64, encoder=seen, **own)
        elif texts is not None:
            most, named = at_most or number_asked(), listed(columns)
            held = listed(label) or ([] if next_token else ["tags" if tags else "label"])
            told = predicted(
                classes=listed(classes),
                labels=held if len(held) > 1 else [],
                bounds=two_numbers(bounds),
                tags=listed(tags),
                next_token=next_token,
            )
            declared = of_texts(name, texts, named, held, told, most, encoder=seen, **own)
        else:
            if schema is not None:
                found, told = of_schema(schema, listed(label))
            else:
                found, values = columns_asked()
                told = predicted(classes=values)
            most = at_most or number_asked()
            declared = Declared(name, table_of(found, file), told, most, file=file, **own)
        make(folder, declared)
    say(
        f"{folder} is a project. Nobody said these numbers; change them in data/cards/{name}.yaml before the first run:"
    )
    given = {"cap": cap, "unit": unit, "size": size}
    for words in declared.assumed(*(key for key, value in given.items() if value is not None)):
        say(f"  {words}")
    say(
        f"and in params.yaml epsilon 1, delta {declared.delta:g} and the usual settings for that. Then, in {folder}:"
    )
    if declared.file is None:
        say(f"  put the table at datasets/raw/{name}.csv; `data check` says its checksum for the card")
    say(f"  epsilonflow data check {name}\n  epsilonflow plan\n  epsilonflow run")
    say(f'  git add --all && git commit --message "{name}", for `dvc exp run` and `dvc metrics diff`')


@data_app.command("check")
def check_data(
    card: Annotated[str, typer.Argument(help="Name of a data set, or the path of its card.")],
    counts: Annotated[
        bool, typer.Option("--counts", help="Count in private records, for the owner's eyes alone.")
    ] = False,
) -> None:
    """Say whether a data set can be used: its card, the checksums of its files, whether every record can be read.

    Nothing is spent. Counts of what would be clamped, replaced or refused are shown for public records, and for
    private ones with --counts; they are exact and protect nobody, so keep them to yourself.
    """
    with sentences():
        from data.schema.errors import DataRefusedError
        from tasks.check_data import look

        found = look(card, Path.cwd(), counted=counts)
        for path, line in found.checksums.items():
            say(f"{path}: if this file is right, its card should have  {line}")
        if found.counts is not None:
            for problem, count in found.counts.items():
                say(f"{count:>12,}  {problem}")
        if found.refused is not None:
            raise DataRefusedError(found.refused)
        kind = "public" if found.card.public else "private"
        said = (
            "is valid; its blocks are read by a run"
            if found.card.blocks
            else "can be read as its card declares"
        )
        say(f"the data set {found.card.name}, of {kind} records, {said}.")
        if not found.card.public and not counts and found.card.blocks is None:
            say("--counts shows the owner what would be clamped, replaced or refused.")


Model = Annotated[
    Path, typer.Option("--model", help="A folder with model.safetensors, such as a release, or that file.")
]
ARTIFACTS = Path("artifacts")


@app.command()
def predict(
    file: Annotated[
        Path, typer.Argument(help="CSV, Parquet, an image or a folder of them, texts, or features as .npy.")
    ],
    model: Model = ARTIFACTS,
    to: Annotated[
        Path | None, typer.Option(help="Where to write, .csv or .parquet; the terminal without it.")
    ] = None,
) -> None:
    """Predict the classes of records that the model has not seen, prepared by the data card that it carries."""
    with sentences():
        from algorithms.models.saved import load
        from tasks.predict import predict as predictions
        from tasks.predict import write

        trained, count = load(model), 0
        for count in write(predictions(trained, file), trained.classes, to or sys.stdout):
            if to is not None and sys.stderr.isatty():
                typer.echo(f"\r{count:,} records", nl=False, err=True)
        if to is not None:
            say(f"{count:,} predictions are in {to}.")


@app.command()
def export(
    form: Annotated[str, typer.Option("--to", help="onnx, torchscript, huggingface or library.")],
    output: Annotated[
        Path | None,
        typer.Option(help="What to write; model.onnx, model.pt, or a folder named like the form."),
    ] = None,
    model: Model = ARTIFACTS,
) -> None:
    """Write the model in another form, load it there and compare what both say of made-up records."""
    with sentences():
        from tasks.config.params import ParamsRefusedError
        from tasks.export import FORMS
        from tasks.export import export as write

        usual = {
            "onnx": "model.onnx",
            "torchscript": "model.pt",
            "huggingface": "huggingface",
            "library": "library",
        }
        for known in FORMS:
            if known == form:
                place = output or Path(usual[form])
                far = write(model, known, place)
                say(f"{place} is written; its scores differ from the model's by at most {far:.1g}.")
                return
        raise ParamsRefusedError(f"there is no form {form!r}; choose {', '.join(FORMS)}.")


@app.command()
def release(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    model: Annotated[Path, typer.Option("--model", help="The folder of the run.")] = ARTIFACTS,
) -> None:
    """Make a folder for strangers: the model, its signed card, what verifies it, a model card; nothing else."""
    with sentences():
        from tasks.config.environment import home
        from tasks.export import release as make
        from tasks.runs.signing import public_key

        names = make(model, folder, key=public_key(home()))
    say(
        f"{folder} holds {', '.join(names)}. Whoever has it verifies the card with `epsilonflow card verify`."
    )


@app.command()
def tune(
    file: Annotated[Path, typer.Argument(help="The search, such as examples/tune.yaml.")] = Path("tune.yaml"),
    runner: Annotated[str, typer.Option(help="What runs the trials: threads, dask or ray.")] = "threads",
    workers: Annotated[int, typer.Option(min=1, help="How many trials at once.")] = 2,
    only_plan: Annotated[
        bool, typer.Option("--plan", help="Say what it would cost; nothing is spent.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Search for settings privately: only the winner leaves, for one price that its card states."""
    with sentences():
        from tasks.runs.stages import checkout

        root = checkout()
        if only_plan:
            from flows.cli.costs import search_table

            show(search_table(root, root / file))
            return

        from tasks import tuning

        asked = tuning.load(root / file)
        if runner == "threads" and not has_prefect_api():
            steps = Steps(verbose)
            say(f"searching: at most epsilon {asked.epsilon:g} for all trials together ...", error=True)
            say(_alone(lambda: tuning.deliver(asked, root, say=steps.line, workers=workers), root))
            return
        if not verbose:
            quieten_prefect()
        from flows.compare import runner_named
        from flows.tune import search

        chosen = runner_named(runner)
        state = _stoppable(lambda: search(file, runner=chosen, workers=workers), root)
        say(str(_completed(state).message))


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
        from tasks.runs.stages import checkout

        root = checkout()
        settings = {
            key.removeprefix("algorithm."): value for key, value in settings_of(assignments or ()).items()
        }

        from functools import partial

        from tasks.auditing import Asked, audit_all, audit_one, auditable, check

        cores = workers or os.cpu_count() or 1
        names = [method] if method else auditable()
        every = [Asked(name, settings, epsilon, delta, runs, canaries, seed) for name in names]
        for asked in every:
            check(asked)
        if has_prefect_api():
            quieten_prefect()
            from flows.audit import audit as auditing

            given = (method, epsilon, delta, settings, runs, canaries, seed, workers)
            said = str(_completed(_stoppable(lambda: auditing(*given, return_state=True), root)).message)
        else:
            say(f"auditing {', '.join(names)} on {cores} cores ...", error=True)
            one = partial(audit_one, root=root, workers=cores)
            each: Callable[[str], object] = partial(say, error=True) if len(every) > 1 else str
            is_violated, said = _stoppable(lambda: audit_all(every, one, say=each), root)
            if is_violated:
                say(said, error=True)
                raise typer.Exit(1)
        say(said)


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

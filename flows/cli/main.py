"""The command `epsilonflow`; it works in the checkout it is called from.

What a command needs is imported when it runs, so that `--help` is quick.
"""

import gc
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

# What imports make stays, so looking for garbage after every 700 objects is an eighth of what a short command takes.
gc.set_threshold(50_000, 20, 50)

_SECONDS_TO_END = 3.0
T = TypeVar("T")

app = typer.Typer(
    **{**SETTINGS, "add_completion": True},
    help="Train models with differential privacy, and prove what it cost.",
)
card_app = typer.Typer(**SETTINGS, help="Verify or print a privacy card.")
app.add_typer(ledger.app, name="ledger")
app.add_typer(card_app, name="card")
data_app = typer.Typer(**SETTINGS, help="Check a data card and its files.")
app.add_typer(data_app, name="data")


@data_app.callback()
def data_main() -> None:
    """Check a data card and its files."""


CARD = Path("artifacts/privacy_card.json")

Dataset = Annotated[
    str | None, typer.Option(help="Name of a data card. The model and settings follow its recipe.")
]
Algorithm = Annotated[
    str | None, typer.Option(help="Name of an algorithm. Its settings follow the recipe of the data set.")
]
Epsilon = Annotated[float | None, typer.Option(help="Privacy budget of the run.")]
Delta = Annotated[float | None, typer.Option(help="Probability that the guarantee fails; at most 1/n.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the initial model.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of params.yaml, such as algorithm.steps=500."),
]
Encoder = Annotated[
    str | None,
    typer.Option(
        help="Train a private head on a frozen public encoder, such as efficientnet-lite0 or wordllama."
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show all output of DVC and Prefect.")]


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        say(f"epsilonflow {version('epsilonflow')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train models with differential privacy, and prove what it cost."""


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
    """Run the pipeline: prepare, calibrate, train, evaluate, report. Your choices are saved in params.yaml."""
    with sentences():
        from tasks.config.overrides import revise
        from tasks.runs.stages import checkout

        root = checkout()
        request = _request(dataset, algorithm, epsilon, delta, seed, assignments, encoder)
        revision = revise(root, request)
        say(_what(revision.params), error=True)
        result = _already_there(root, request)
        if result:
            say("This run is already done. Nothing was spent. Its results:")
        else:
            _look_ahead(root, revision.params)
            result = _deliver(request, root, verbose=verbose)
        show(result.table())


def _what(settings: "Params") -> str:
    """What is trained, in a line."""
    privacy = settings.privacy
    target = f"epsilon {privacy.epsilon:g}" if privacy.epsilon is not None else "the attack in privacy.target"
    return (
        f"{settings.data.dataset}: {settings.algorithm_settings['name']} with model {settings.model.name},"
        f" {target}, delta {privacy.delta:g} (saved in params.yaml)"
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
        return f"run {run_id} stays reserved; the same command resumes it at no extra cost."
    if status == "settled":
        return f"run {run_id} is trained and paid for; the same command finishes it at no extra cost."
    return "nothing was reserved; the same command continues from here."


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
    """Show what a run would cost and what the ledger has left. Spends and changes nothing.

    Exit status 2 if the run would be refused, also because a file is missing or is not the declared one.
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
    epsilon: Annotated[float, typer.Option(help="Privacy budget of the run.")],
    delta: Delta = None,
) -> None:
    """Suggest settings from public values only, with reasons and their cost. Spends and changes nothing."""
    with sentences():
        from flows.cli.costs import advice_table
        from tasks.runs.stages import checkout

        for table in advice_table(checkout(), dataset, epsilon, delta):
            show(table)


@app.command()
def compare(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files such as comparisons/example.yaml, run one after the other."),
    ],
    runner: Annotated[str, typer.Option(help="What runs the cells: threads, dask or ray.")] = "threads",
    workers: Annotated[int, typer.Option(min=1, help="How many cells run at once.")] = 2,
    renew: Annotated[
        bool, typer.Option("--renew", help="Repeat cells that an earlier version of the code made.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Compare algorithms on public data sets, as YAML files describe. Finished cells are not repeated."""
    with sentences():
        if not verbose:
            quieten_prefect()
        from flows.compare import compare as run_comparison
        from flows.compare import runner_named

        said = "finished cells are kept; the same command continues with the rest."
        for file in files:
            run_one = partial(run_comparison, file, runner=runner_named(runner), workers=workers, renew=renew)
            say(str(_completed(_stoppable(run_one, Path.cwd(), lambda: said)).message))


@app.command()
def retrain(
    file: Annotated[Path, typer.Argument(help="Settings of the retraining.")] = Path("retrain.yaml"),
    give_up: Annotated[
        bool,
        typer.Option(
            "--give-up", help="Give up a retraining that a fault keeps from finishing; it counts as spent."
        ),
    ] = False,
    yes: ledger.Yes = False,
    verbose: Verbose = False,
) -> None:
    """Train again on new blocks of data if a retraining is due. Repeating it in the same period costs nothing."""
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
            return (
                "No retraining is waiting to be resumed."
                if free
                else "Another process is running the retraining."
            )
        ledger.ask(
            f"This gives up the retraining of {state.period}; what it was charged counts as spent.", yes=yes
        )
        return delivery.give_up(work, state)


def _retrain_flow(file: Path) -> "State[Any]":
    from flows.retrain import retrain as retraining

    return retraining(str(file), return_state=True)


@app.command()
def doctor() -> None:
    """Check this machine and checkout, and say what is wrong. Exit status 1 if anything is."""
    from flows.cli.doctor import findings

    is_ill = False
    for found in findings(Path.cwd()):
        mark = {True: "ok   ", False: "WRONG", None: "-    "}[found.is_well]
        say(f"{mark}  {found.name}: {found.text}")
        is_ill |= found.is_well is False
    if is_ill:
        raise typer.Exit(1)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    schema: Annotated[
        Path | None,
        typer.Option(
            "--from", help="A Frictionless table schema (JSON). Without it you are asked for the columns."
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="The table, CSV or Parquet. It is copied; no row is read.")
    ] = None,
    label: Annotated[
        str,
        typer.Option(
            help="Column of the class or number to predict; several columns, separated by commas, are a label each."
        ),
    ] = "",
    at_most: Annotated[int | None, typer.Option(min=1, help="Upper bound on the number of records.")] = None,
    unit: Annotated[
        str | None,
        typer.Option(help="What one record is, and so what is protected.", show_default="one person"),
    ] = None,
    cap: Annotated[
        float | None, typer.Option(help="Epsilon that all runs together may spend.", show_default="10")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a table: a folder with one subfolder of images per class. It is copied."
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            min=8, help="Side in pixels to which images are cropped and resized.", show_default="64"
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a table: rows of texts, CSV, JSON lines or Parquet. It is copied; no row is read."
        ),
    ] = None,
    columns: Annotated[str, typer.Option(help="Columns of the texts, separated by commas.")] = "text",
    classes: Annotated[str, typer.Option(help="Classes of images or texts, separated by commas.")] = "",
    bounds: Annotated[
        str, typer.Option(help="Predict a number from texts, between LOW,HIGH, instead of classes.")
    ] = "",
    tags: Annotated[
        str,
        typer.Option(help="Predict a tag for each word of a text, instead of classes: O,B-PER,I-PER."),
    ] = "",
    next_token: Annotated[
        bool,
        typer.Option("--next-token", help="Predict the next token of texts, instead of classes."),
    ] = False,
    encoder: Annotated[
        str | None,
        typer.Option(help="A public encoder, or tokenizer/NAME of a model of texts to fine-tune."),
    ] = None,
) -> None:
    """Create a project for your own data, under git and DVC.

    It contains params.yaml, dvc.yaml, prefect.yaml and a data card of what you declare.
    """
    with sentences():
        from flows.cli.asking import columns_asked, listed, number_asked, two_numbers
        from tasks.config.new_project import (
            Declared,
            absolute,
            check,
            make,
            of_images,
            of_schema,
            of_texts,
            predicted,
            table_of,
        )

        check(folder, images or texts or file)  # before anybody is asked for columns
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
        f"Created {folder} with these defaults; to change them, edit its data/cards/{name}.yaml before the first run:"
    )
    given = {"cap": cap, "unit": unit, "size": size}
    for words in declared.assumed(*(key for key, value in given.items() if value is not None)):
        say(f"  {words}")
    say(f"params.yaml has epsilon 1, delta {declared.delta:g} and suitable settings. Next, in {folder}:")
    if declared.file is None:
        say(f"  put the table at datasets/raw/{name}.csv; `data check` prints the checksum for the card")
    say(f"  epsilonflow data check {name}\n  epsilonflow plan\n  epsilonflow run")
    say(f'  git add --all && git commit --message "{name}"  # before `dvc exp run` or `dvc metrics diff`')


@data_app.command("check")
def check_data(
    card: Annotated[str, typer.Argument(help="Name of a data set, or the path of its card.")],
    counts: Annotated[
        bool, typer.Option("--counts", help="Show counts for private records; for the owner only.")
    ] = False,
) -> None:
    """Check a data card, the checksums of its files, and that every record can be read. Spends nothing.

    Shows how many values would be clamped, replaced or refused: always for public records, with --counts for private
    ones. These counts are exact and protect nobody, so keep them to yourself.
    """
    with sentences():
        from data.schema.errors import DataRefusedError
        from tasks.check_data import look

        found = look(card, Path.cwd(), counted=counts)
        for path, line in found.checksums.items():
            say(f"{path}: if this is the right file, its card needs  {line}")
        if found.counts is not None:
            for problem, count in found.counts.items():
                say(f"{count:>12,}  {problem}")
        if found.refused is not None:
            raise DataRefusedError(found.refused)
        kind = "public" if found.card.public else "private"
        said = (
            "is valid; its blocks are read when it is used"
            if found.card.blocks
            else "can be read as its card declares"
        )
        say(f"The {kind} data set {found.card.name} {said}.")
        if not found.card.public and not counts and found.card.blocks is None:
            say("Use --counts to see how many values would be clamped, replaced or refused.")


Model = Annotated[
    Path, typer.Option("--model", help="A model.safetensors, or a folder with one, such as a release.")
]
ARTIFACTS = Path("artifacts")


@app.command()
def predict(
    file: Annotated[
        Path, typer.Argument(help="CSV, Parquet, an image or a folder of images, texts, or features as .npy.")
    ],
    model: Model = ARTIFACTS,
    to: Annotated[
        Path | None, typer.Option(help="Where to write, .csv or .parquet.", show_default="the terminal")
    ] = None,
) -> None:
    """Predict new records, which are prepared as the model's training records were."""
    with sentences():
        from algorithms.models.saved import load
        from tasks.predict import predict as predictions
        from tasks.predict import write

        trained, count = load(model), 0
        for count in write(predictions(trained, file), trained.classes, to or sys.stdout):
            if to is not None and sys.stderr.isatty():
                typer.echo(f"{count:,} records\r", nl=False, err=True)
        if to is not None:
            say(f"Wrote {count:,} prediction{'' if count == 1 else 's'} to {to}.")


@app.command()
def export(
    form: Annotated[str, typer.Option("--to", help="onnx, torchscript, huggingface or library.")],
    output: Annotated[
        Path | None,
        typer.Option(
            help="What to write.", show_default="model.onnx, model.pt, or a folder named after the format"
        ),
    ] = None,
    model: Model = ARTIFACTS,
) -> None:
    """Export the model to another format, load it again and compare its predictions on synthetic records."""
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
                say(f"Wrote {place}. Its scores differ from the model's by at most {far:.1g}.")
                return
        raise ParamsRefusedError(f"there is no format {form!r}; choose {', '.join(FORMS)}.")


@app.command()
def release(
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    model: Annotated[Path, typer.Option("--model", help="Folder of the run.")] = ARTIFACTS,
) -> None:
    """Create a folder to publish: the model, its signed card, the files that verify it, a model card."""
    with sentences():
        from tasks.config.environment import home
        from tasks.export import release as make
        from tasks.runs.signing import public_key

        names = make(model, folder, key=public_key(home()))
    say(f"Wrote {folder}: {', '.join(names)}. Others can verify it with `epsilonflow card verify`.")


@app.command()
def tune(
    file: Annotated[Path, typer.Argument(help="Settings of the search, such as examples/tune.yaml.")] = Path(
        "tune.yaml"
    ),
    runner: Annotated[str, typer.Option(help="What runs the trials: threads, dask or ray.")] = "threads",
    workers: Annotated[int, typer.Option(min=1, help="How many trials run at once.")] = 2,
    only_plan: Annotated[
        bool, typer.Option("--plan", help="Show what it would cost; spends nothing.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Search for settings privately. Only the best trial is released, for one price that its card states."""
    with sentences():
        from tasks.runs.stages import checkout

        root = checkout()
        if only_plan:
            from flows.cli.costs import search_table

            show(search_table(root, root / file))
            return

        from tasks.tuning.pricing import load
        from tasks.tuning.search import deliver

        asked = load(root / file)
        if runner == "threads" and not has_prefect_api():
            steps = Steps(verbose)
            say(f"searching: at most epsilon {asked.epsilon:g} for all trials together ...", error=True)
            say(_alone(lambda: deliver(asked, root, say=steps.line, workers=workers), root))
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
        str | None,
        typer.Option(help="A built-in method, or package.module:factory.", show_default="all methods"),
    ] = None,
    epsilon: Annotated[float, typer.Option(help="The claimed epsilon.")] = 4.0,
    delta: Annotated[float, typer.Option(help="The claimed delta.")] = 1e-5,
    runs: Annotated[
        int, typer.Option(min=1, help="Pairs of runs with and without the worst-case record.")
    ] = 1000,
    canaries: Annotated[int, typer.Option(min=8, help="Canary records of the one-run attack.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the audit.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes.", show_default="all cores")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the method, such as steps=8."),
    ] = None,
) -> None:
    """Attack the installed code to look for more leakage than a method claims. Spends nothing.

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
    file: Annotated[Path, typer.Argument(help="A privacy_card.json, with its files next to it.")] = CARD,
    key: Annotated[
        str | None,
        typer.Option(help="The owner's public key.", show_default="owner.pub of this data folder"),
    ] = None,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Accept a card without a signature.")] = False,
) -> None:
    """Check a card's signature, recompute its epsilon from its events and compare the files next to it.

    Exit status 1 if any check fails.
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
    """Print a card as text, without verifying it."""
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

"""Commands that train, and those that say beforehand what that would cost.

Of one run `run`, `plan` and `advise`; over time `retrain`; of many runs `compare`, `tune` and `audit`.
"""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from flows.cli import ledger
from flows.cli.running import (
    AllowCode,
    StageOutput,
    Verbose,
    has_prefect_api,
    in_checkout,
    listening,
    quieten_prefect,
    require_completed,
    say,
    show,
    stoppable,
)

if TYPE_CHECKING:
    from tasks.config.overrides import ParamOverrides, ParamsEdit
    from tasks.config.params import Params
    from tasks.runs.metrics import TextRows

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
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of params.yaml, such as algorithm.steps=500; may be repeated.",
    ),
]
Encoder = Annotated[
    str | None,
    typer.Option(
        help="Train a private head on a frozen public encoder, such as efficientnet-lite0 or wordllama."
    ),
]


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
    from tasks.config import params
    from tasks.config.overrides import ParamOverrides, params_edit, settings_of
    from tasks.runs.dvc_stages import EXISTING_RESULT, checkout
    from tasks.runs.software import reuse_note_of
    from tasks.runs.summary import two_columns

    root, settings = checkout(), settings_of(assignments or ())
    overrides = ParamOverrides(dataset, algorithm, epsilon, delta, seed, settings, encoder)
    if overrides.are_none:  # a result that is there is shown without an import of torch, which takes a second
        params.load(root / "params.yaml", reads=tuple(name for name in params.GROUPS if name != "algorithm"))
    else:
        params_edit(root, overrides)
    result = _identical_result(root, overrides)
    if result:
        note = reuse_note_of(root)
        say(f"{EXISTING_RESULT}{f'; {note}' if note else ''}:")
    else:
        edit = params_edit(root, overrides)
        say(_describe_run(edit.params), error=True)
        steps = StageOutput(verbose)
        with _check_before_run(root, edit):
            result = _run_pipeline(overrides, root, steps)
        if steps.is_reused:
            say(f"{EXISTING_RESULT}:")
    show(two_columns(result))


def _describe_run(settings: "Params") -> str:
    """Describe what is trained in one line."""
    privacy = settings.privacy
    target = f"epsilon {privacy.epsilon:g}" if privacy.epsilon is not None else "the attack in privacy.target"
    return (
        f"{settings.data.dataset}: {settings.algorithm_settings['name']} with model {settings.model.name},"
        f" {target}, delta {privacy.delta:g} (goes into params.yaml)"
    )


def _run_pipeline(overrides: "ParamOverrides", root: Path, steps: StageOutput) -> "TextRows":
    """Run the pipeline; as a Prefect flow if there is a server."""
    if has_prefect_api():
        with listening(steps):
            from flows.deployed import pipeline

            state = stoppable(lambda: pipeline(**asdict(overrides), return_state=True), root)
            return cast("TextRows", require_completed(state).result())
    from flows.pipeline import run_pipeline

    return stoppable(lambda: run_pipeline(root, overrides, steps, keeps_overrides=True), root, steps=steps)


def _check_before_run(root: Path, edit: "ParamsEdit") -> AbstractContextManager[None]:
    """Refuse the run if it cannot succeed, and ask about settings that look wrong, before anything starts.

    In what it returns, the calibrate stage may take over the plan.
    """
    from tasks.calibrate import document_of
    from tasks.preflight.consent import confirm_before_stages
    from tasks.preflight.preview import preview_run
    from tasks.runs.plan_ahead import offering

    preview = preview_run(root, edit.params)
    preview.check()
    if not preview.is_begun or sys.stdin.isatty():
        confirm_before_stages(preview.warnings, preview.info, epsilon=preview.plan.target.budget.epsilon)
    document = document_of(preview.plan, edit.params, preview.info)
    return offering(root, document, preview.info, edit.after)


def _identical_result(root: Path, overrides: "ParamOverrides") -> "TextRows | None":
    """The results of an identical run if they are in the checkout, so that not even Prefect has to start."""
    from flows.missing_runs import log_missing_run
    from tasks.config.overrides import params_edit
    from tasks.runs.dvc_stages import checkout_lock, up_to_date
    from tasks.runs.summary import run_summary

    with checkout_lock(root, say=say):
        is_changed = not overrides.are_none and params_edit(root, overrides).changes
        done = not is_changed and up_to_date(root, say=say)
        if done:
            log_missing_run(root, say)
        return run_summary(root) if done else None


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
    from tasks.config.overrides import ParamOverrides, params_edit, settings_of
    from tasks.runs.dvc_stages import checkout

    root, settings = checkout(), settings_of(assignments or ())
    edit = params_edit(root, ParamOverrides(dataset, algorithm, epsilon, delta, seed, settings, encoder))
    from flows.cli.costs import cost_table
    from tasks.preflight.preview import preview_run

    preview = preview_run(root, edit.params)
    show(cost_table(preview, edit.params))
    preview.check()


def advise(
    dataset: Annotated[str, typer.Option(help="Name of a data card.")],
    epsilon: Annotated[float, typer.Option(help="Privacy budget of the run.")],
    delta: Delta = None,
    encoder: Encoder = None,
) -> None:
    """Suggest settings from public values only, with reasons and their cost. Spends and changes nothing."""
    from flows.cli.costs import advice_table
    from tasks.runs.dvc_stages import checkout

    for table in advice_table(checkout(), dataset, epsilon, delta, encoder):
        show(table)


def track() -> None:
    """Log the run in this project at W&B if it is missing there, as after an outage; exit status 1 if that fails."""
    from tasks.report import track as log_run
    from tasks.runs.dvc_stages import checkout, checkout_lock
    from tasks.tracking import has_run_to_log

    root = checkout()
    with checkout_lock(root, say=say):
        say(log_run(root))
        if has_run_to_log(root):
            raise typer.Exit(1)


def retrain(
    file: Annotated[Path, typer.Argument(help="Settings of the retraining.")] = Path("retrain.yaml"),
    give_up: Annotated[
        bool,
        typer.Option(
            "--give-up", help="Give up a retraining that a fault keeps from finishing; it counts as spent."
        ),
    ] = False,
    accept_recipe: Annotated[
        bool,
        typer.Option("--accept-recipe", help="Accept a recipe that differs from that of the model in use."),
    ] = False,
    yes: ledger.Yes = False,
    verbose: Verbose = False,
) -> None:
    """Train again on new blocks of data if a retraining is due. Repeating it in the same period costs nothing."""
    from tasks.runs.dvc_stages import checkout

    root, steps, file = checkout(), StageOutput(verbose), in_checkout(file).absolute()
    if give_up:
        message = _give_up(root, file, yes=yes)
    elif not has_prefect_api():
        from tasks.retraining import load
        from tasks.retraining.delivery import DeliveryWork, deliver

        work = DeliveryWork(load(file), root, steps.run, steps.line, file, accept_recipe)
        message = stoppable(lambda: deliver(work).message_or_raise(), root, steps=steps)
    else:
        with listening(steps):
            from flows.scheduled import retrain as flow

            state = stoppable(lambda: flow(str(file), accept_recipe, return_state=True), root)
            message = str(require_completed(state).message)
    say(message)


def _give_up(root: Path, file: Path, *, yes: bool) -> str:
    from tasks.retraining import delivery, load

    work = delivery.DeliveryWork(load(file), root, lambda *_: None, lambda _: None)
    with work.states.try_lock() as free:
        state = work.states.open() if free else None
        if state is None:
            return (
                "No retraining is waiting to be resumed."
                if free
                else "Another process is running the retraining."
            )
        ledger.require_consent(
            f"This gives up the retraining of {state.period}; what it was charged counts as spent.", yes=yes
        )
        return delivery.give_up(work, state)


def compare(
    files: Annotated[
        list[Path], typer.Argument(help="Files such as comparisons/example.yaml, run one after the other.")
    ],
    runner: Annotated[str, typer.Option(help="What distributes the runs: threads, dask or ray.")] = "threads",
    workers: Annotated[int, typer.Option(min=1, help="How many of them run at once.")] = 2,
    renew: Annotated[
        bool, typer.Option("--renew", help="Repeat runs that an earlier version of the code made.")
    ] = False,
    allow_code: AllowCode = None,
    verbose: Verbose = False,
) -> None:
    """Compare algorithms on public data sets, as YAML files describe. Finished runs are not repeated."""
    if not verbose:
        quieten_prefect()
    from flows.compare import compare as run_comparison
    from flows.task_runners import runner_named

    remaining = "finished runs are kept; the same command continues with the rest."
    for file in files:
        run_one = partial(
            run_comparison,
            file,
            runner=runner_named(runner),
            workers=workers,
            renew=renew,
            allow_code=allow_code or (),
        )
        say(str(require_completed(stoppable(run_one, Path.cwd(), remaining)).message))


def tune(
    file: Annotated[Path, typer.Argument(help="Settings of the search, such as examples/tune.yaml.")] = Path(
        "tune.yaml"
    ),
    runner: Annotated[str, typer.Option(help="What runs the trials: threads, dask or ray.")] = "threads",
    workers: Annotated[int, typer.Option(min=1, help="How many trials run at once.")] = 2,
    only_plan: Annotated[
        bool, typer.Option("--plan", help="Show what it would cost; spends nothing.")
    ] = False,
    allow_code: AllowCode = None,
    verbose: Verbose = False,
) -> None:
    """Search for settings privately. Only the best trial is released, for one price that its card states."""
    from tasks.runs.dvc_stages import checkout

    root, file = checkout(), in_checkout(file).absolute()
    if only_plan:
        from flows.cli.costs import search_table

        table, preview = search_table(root, file, allow_code=allow_code or ())
        show(table)
        if preview is not None:
            preview.check()
        return

    from tasks.tuning.search import deliver_search, in_threads
    from tasks.tuning.settings import load_here

    settings = load_here(root, file, allow_code=allow_code or ())
    if runner == "threads" and not has_prefect_api():
        steps = StageOutput(verbose)
        say(f"searching: at most epsilon {settings.epsilon:g} for all trials together ...", error=True)
        work = partial(deliver_search, settings, root, say=steps.line, run_all=partial(in_threads, workers))
        say(stoppable(work, root, steps=steps))
        return
    if not verbose:
        quieten_prefect()
    from flows.task_runners import runner_named
    from flows.tune import search

    chosen = runner_named(runner)
    state = stoppable(lambda: search(file, runner=chosen, workers=workers, allow_code=allow_code or ()), root)
    say(str(require_completed(state).message))


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
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set a key of the method, such as steps=8; may be repeated."
        ),
    ] = None,
    predicts: Annotated[
        Literal["class", "number", "count"],
        typer.Option(help="With number or count, what is released of the target is attacked, too."),
    ] = "class",
) -> None:
    """Attack the installed code to look for more leakage than a method claims. Spends nothing.

    Exit status 1 if a claim is violated.
    """
    from tasks.config.overrides import settings_of
    from tasks.runs.dvc_stages import checkout

    root = checkout()
    settings = {
        key.removeprefix("algorithm."): value for key, value in settings_of(assignments or ()).items()
    }

    from tasks.auditing import audit_all, audit_one, checked_requests

    cores = workers or os.cpu_count() or 1
    stays = "an audit that is stopped leaves nothing; the same command begins it again."
    requests = checked_requests(method, settings, epsilon, delta, runs, canaries, seed, predicts)
    if has_prefect_api():
        quieten_prefect()
        from flows.scheduled import audit as auditing

        arguments = (method, epsilon, delta, settings, runs, canaries, seed, workers, predicts)
        message = str(
            require_completed(stoppable(lambda: auditing(*arguments, return_state=True), root, stays)).message
        )
    else:
        say(f"auditing {', '.join(request.method for request in requests)} on {cores} cores ...", error=True)
        audit_method = partial(audit_one, root=root, workers=cores)
        each: Callable[[str], object] = partial(say, error=True) if len(requests) > 1 else str
        is_violated, message = stoppable(lambda: audit_all(requests, audit_method, say=each), root, stays)
        if is_violated:
            say(message, error=True)
            raise typer.Exit(1)
    say(message)

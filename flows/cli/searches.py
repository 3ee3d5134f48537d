"""Commands that make many runs: `compare`, `tune` and `audit`."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.running import Verbose, alone, completed, stoppable
from flows.cli.steps import Steps, has_prefect_api, quieten_prefect
from flows.cli.terminal import say, sentences, show


def compare(
    files: Annotated[
        list[Path], typer.Argument(help="Files such as comparisons/example.yaml, run one after the other.")
    ],
    runner: Annotated[str, typer.Option(help="What distributes the runs: threads, dask or ray.")] = "threads",
    workers: Annotated[int, typer.Option(min=1, help="How many of them run at once.")] = 2,
    renew: Annotated[
        bool, typer.Option("--renew", help="Repeat runs that an earlier version of the code made.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Compare algorithms on public data sets, as YAML files describe. Finished runs are not repeated."""
    with sentences():
        if not verbose:
            quieten_prefect()
        from flows.compare import compare as run_comparison
        from flows.compare import runner_named

        said = "finished runs are kept; the same command continues with the rest."
        for file in files:
            run_one = partial(run_comparison, file, runner=runner_named(runner), workers=workers, renew=renew)
            say(str(completed(stoppable(run_one, Path.cwd(), lambda: said)).message))


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

            table, outlook = search_table(root, root / file)
            show(table)
            if outlook is not None:
                outlook.check()
            return

        from tasks.tuning import load
        from tasks.tuning.search import deliver, in_threads

        asked = load(root / file)
        if runner == "threads" and not has_prefect_api():
            steps = Steps(verbose)
            say(f"searching: at most epsilon {asked.epsilon:g} for all trials together ...", error=True)
            say(
                alone(
                    lambda: deliver(asked, root, say=steps.line, run_all=partial(in_threads, workers)),
                    root,
                    steps,
                )
            )
            return
        if not verbose:
            quieten_prefect()
        from flows.compare import runner_named
        from flows.tune import search

        chosen = runner_named(runner)
        state = stoppable(lambda: search(file, runner=chosen, workers=workers), root)
        say(str(completed(state).message))


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

        from tasks.auditing import Asked, audit_all, audit_one, auditable, check

        cores = workers or os.cpu_count() or 1
        stays = "an audit that is stopped leaves nothing; the same command begins it again."
        names = [method] if method else auditable()
        every = [Asked(name, settings, epsilon, delta, runs, canaries, seed) for name in names]
        for asked in every:
            check(asked)
        if has_prefect_api():
            quieten_prefect()
            from flows.audit import audit as auditing

            given = (method, epsilon, delta, settings, runs, canaries, seed, workers)
            said = str(
                completed(stoppable(lambda: auditing(*given, return_state=True), root, lambda: stays)).message
            )
        else:
            say(f"auditing {', '.join(names)} on {cores} cores ...", error=True)
            one = partial(audit_one, root=root, workers=cores)
            each: Callable[[str], object] = partial(say, error=True) if len(every) > 1 else str
            is_violated, said = stoppable(lambda: audit_all(every, one, say=each), root, lambda: stays)
            if is_violated:
                say(said, error=True)
                raise typer.Exit(1)
        say(said)

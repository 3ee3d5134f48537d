"""A comparison on public records as a Prefect flow: it plans every trial, runs those without a result, and reports.

Each task runs a group of trials, since a task costs about a tenth of a second; none is retried. A trial that fails
stops no other.
"""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.deployed import RUN_ONCE, RUN_TASK_ONCE, flow_result, label_run
from flows.task_runners import RunnerName, one_server, task_runner
from tasks.comparing.definition import TrialGroup, groups
from tasks.comparing.report import PAGE, log_comparison, report
from tasks.comparing.trial import TrialContext, build_models
from tasks.comparing.work import (
    ComparisonWork,
    SkippedTrial,
    lock_comparison,
    plan_group,
    prepare_data,
    progress,
    run_group,
    work_of,
)
from tasks.config.params import ParamsRefusedError
from tasks.runs.dvc_stages import checkout

_MAX_NAMED = 3


@task(name="plan", **RUN_TASK_ONCE)
def plan(context: TrialContext, group: TrialGroup) -> list[SkippedTrial]:
    """Make the plans of a group of trials."""
    return plan_group(context, group)


@task(name="run", **RUN_TASK_ONCE)
def run(context: TrialContext, group: TrialGroup) -> list[SkippedTrial]:
    """Run a group of trials."""
    return run_group(context, group)


def compare(
    file: Path,
    *,
    runner: RunnerName = "threads",
    workers: int = 2,
    renew: bool = False,
    allow_code: Collection[str] = (),
) -> State[Any]:
    """Run the comparison that `file` describes on a task runner with this number of workers; see `comparison`."""
    work_of(file, checkout(), allow_code=allow_code)  # report errors before a server starts
    chosen = task_runner(runner, workers)
    logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)  # one line per group hides the progress
    # Accounting sets this level, but threads can reset it for each other.
    logging.getLogger("absl").setLevel(logging.ERROR)
    with one_server(runner):
        state: State[Any] = comparison.with_options(task_runner=chosen)(
            str(file), renew, [*allow_code], return_state=True
        )
    return state


@flow(name="compare", **RUN_ONCE)
def comparison(file: str, renew: bool = False, allow_code: Sequence[str] = ()) -> State[Any]:
    """Compare algorithms as a YAML file describes; finished trials are not run again.

    Args:
        file: the comparison, such as comparisons/example.yaml.
        renew: rerun trials whose results come from another version of the algorithms' code.
        allow_code: code of your own that the file may name, besides what params.yaml and your data cards name.
    """

    def run_comparison() -> State[Any]:
        label_run("compare", Path(file).stem)
        work = work_of(Path(file), checkout(), allow_code=allow_code)
        with lock_comparison(work.workspace):
            return _run_trials(work, renew=renew)

    return flow_result(run_comparison)


def _run_trials(work: ComparisonWork, *, renew: bool) -> State[Any]:
    prepare_data(work)
    wanted = work.unfinished_trials(renew=renew)
    refused = _each(plan, work, list(groups(wanted)))
    if refused and not work.comparison.skip_refused:
        raise ParamsRefusedError("{problems}", code="trials_refused", problems=_first_problems(refused))
    left_out = {problem.trial.digest for problem in refused}
    left = [trial for trial in wanted if trial.digest not in left_out]
    build_models(work.context, left)  # before trials run in threads of this process
    parts = list(groups(left))
    with progress(work.workspace, parts):
        failed = _each(run, work, parts)
    finished = report(work, refused=_in_words(refused))
    if parts:
        log_comparison(work, finished)
    if failed:
        return Failed(message=f"{len(failed)} of {len(wanted)} runs failed: {_first_problems(failed)}")
    return Completed(message=f"The {len(finished.table)} runs are in {work.workspace.folder / PAGE}")


def _each(action: Any, work: ComparisonWork, parts: Sequence[TrialGroup]) -> list[SkippedTrial]:
    """Submit a task for each group and return the problems. On an interrupt, running trials end and no others start."""
    futures = [action.submit(work.context, group) for group in parts]
    try:
        return [problem for future in futures for problem in future.result()]
    except BaseException:
        work.workspace.stop.touch()
        raise


def _first_problems(problems: Sequence[SkippedTrial]) -> str:
    sentences = _in_words(problems)
    more = f"; and {len(sentences) - _MAX_NAMED} more" if len(sentences) > _MAX_NAMED else ""
    return "; ".join(sentences[:_MAX_NAMED]) + more


def _in_words(problems: Sequence[SkippedTrial]) -> list[str]:
    """Describe the problems, each once for all seeds and folds."""
    return list(dict.fromkeys(problem.in_words() for problem in problems))

"""Many trials on a task runner, as Prefect flows: a comparison on public records, and the private search for settings.

A comparison plans every trial, runs those without a result and writes the results. Each task runs a group of trials,
since a task costs about a tenth of a second; none is retried. A trial that fails stops no other.

A search makes one reservation, and only the winner is released. One that was stopped is resumed by the same command,
at no extra cost.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings
from prefect.states import Completed, Failed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from pydantic import Field

from algorithms.plain_text import for_markdown
from data.documents import load_yaml
from flows.deployed import IF_STOPPED, flow_result, label_run, publish_card
from tasks.comparing import TrialGroup, groups
from tasks.comparing.report import PAGE, log_comparison, report
from tasks.comparing.trial import Context, build_models
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
from tasks.config import params
from tasks.config.overrides import value_at
from tasks.config.params import ParamsRefusedError
from tasks.runs.stages import checkout, checkout_lock
from tasks.tuning import READS, Tuning, load_here
from tasks.tuning.search import FOLDER, SearchTrial, deliver, one_by_one, shares

Runner = Literal["threads", "dask", "ray"]
_MAX_NAMED = 3
_QUIET = {
    "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "warning",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}
"""Environment of Dask's worker processes."""


@task(name="plan", retries=0, cache_policy=NO_CACHE, persist_result=False)
def plan(context: Context, group: TrialGroup) -> list[SkippedTrial]:
    """Make the plans of a group of trials."""
    return plan_group(context, group)


@task(name="run", retries=0, cache_policy=NO_CACHE, persist_result=False)
def run(context: Context, group: TrialGroup) -> list[SkippedTrial]:
    """Run a group of trials."""
    return run_group(context, group)


def compare(
    file: Path,
    *,
    runner: Runner = "threads",
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


@flow(name="compare", retries=0, persist_result=False)
def comparison(file: str, renew: bool = False, allow_code: Sequence[str] = ()) -> State[Any]:
    """Compare algorithms as a YAML file describes; finished trials are not run again.

    Args:
        file: the comparison, such as comparisons/example.yaml.
        renew: rerun trials whose results come from another version of the algorithms' code.
        allow_code: code of your own that the file may name, besides what params.yaml and your data cards name.
    """

    def compared() -> State[Any]:
        label_run("compare", Path(file).stem)
        work = work_of(Path(file), checkout(), allow_code=allow_code)
        with lock_comparison(work.place):
            return _run_trials(work, renew=renew)

    return flow_result(compared)


def _run_trials(work: ComparisonWork, *, renew: bool) -> State[Any]:
    prepare_data(work)
    wanted = work.unfinished_trials(renew=renew)
    refused = _each(plan, work, list(groups(wanted)))
    if refused and not work.comparison.skip_refused:
        raise ParamsRefusedError(_first_problems(refused))
    left_out = {problem.trial.digest for problem in refused}
    left = [trial for trial in wanted if trial.digest not in left_out]
    build_models(work.context, left)  # before trials run in threads of this process
    parts = list(groups(left))
    with progress(work.place, parts):
        failed = _each(run, work, parts)
    finished = report(work, refused=_in_words(refused))
    if parts:
        log_comparison(work, finished)
    if failed:
        return Failed(message=f"{len(failed)} of {len(wanted)} runs failed: {_first_problems(failed)}")
    return Completed(message=f"The {len(finished.table)} runs are in {work.place.folder / PAGE}")


def _each(action: Any, work: ComparisonWork, parts: Sequence[TrialGroup]) -> list[SkippedTrial]:
    """Submit a task for each group and return the problems. On an interrupt, running trials end and no others start."""
    futures = [action.submit(work.context, group) for group in parts]
    try:
        return [problem for future in futures for problem in future.result()]
    except BaseException:
        work.place.stop.touch()
        raise


def _first_problems(problems: Sequence[SkippedTrial]) -> str:
    sentences = _in_words(problems)
    more = f"; and {len(sentences) - _MAX_NAMED} more" if len(sentences) > _MAX_NAMED else ""
    return "; ".join(sentences[:_MAX_NAMED]) + more


def _in_words(problems: Sequence[SkippedTrial]) -> list[str]:
    """Describe the problems, each once for all seeds and folds."""
    return list(dict.fromkeys(problem.in_words() for problem in problems))


@task(name="trials", retries=0, cache_policy=NO_CACHE, persist_result=False)
def run_share(trials: Sequence[SearchTrial]) -> None:
    """Train and score a share of the trials."""
    one_by_one(trials)


def run_side_by_side(trials: Sequence[SearchTrial], *, workers: int) -> None:
    """Run all trials on the flow's task runner."""
    for future in [run_share.submit(share) for share in shares(trials, workers)]:
        future.result()


def search(
    file: Path, *, runner: Runner = "threads", workers: int = 2, allow_code: Collection[str] = ()
) -> State[Any]:
    """Run the search that `file` describes on a task runner with this number of workers; see `tune`."""
    chosen = task_runner(runner, workers)
    with one_server(runner):
        state: State[Any] = tune.with_options(task_runner=chosen)(
            str(file), workers, [*allow_code], return_state=True
        )
    return state


@flow(name="tune", retries=0, persist_result=False, **IF_STOPPED)
def tune(
    file: str = "tune.yaml", workers: Annotated[int, Field(ge=1)] = 2, allow_code: Sequence[str] = ()
) -> State[Any]:
    """Search for settings privately: only the winner is released, for one price that its card states.

    Args:
        file: settings of the search, such as examples/tune.yaml; everything else about a trial is in params.yaml.
        workers: how many tasks share the trials.
        allow_code: code of your own that the file may name, besides what params.yaml and your data cards name.
    """

    def work() -> State[Any]:
        root, run_all = checkout(), partial(run_side_by_side, workers=workers)
        label_run("tune", Path(file).stem)  # also if it is refused
        say = get_run_logger().info
        with checkout_lock(root, say=say):  # a retraining has params.yaml while it trains
            settings = load_here(root, Path(file), allow_code=allow_code)
            trial = params.load(root / "params.yaml", reads=READS)
        names = trial.data.dataset, trial.algorithm_name
        label_run("tune", names[0], f"epsilon {settings.epsilon:g}", tags=names)
        message = deliver(settings, root, say=say, run_all=run_all)
        publish_search(settings, root / FOLDER, message)
        return Completed(message=message)

    return flow_result(work)


def publish_search(settings: Tuning, folder: Path, message: str) -> None:
    """Make the Prefect artifacts of a search whose result is in `folder`: its card, and the winner's settings."""
    publish_card(folder)
    winner = load_yaml((folder / "winner.yaml").read_text("utf-8"))
    rows = [
        {"setting": for_markdown(key), "winner": for_markdown(str(value_at(winner, key)))}
        for key in settings.space
    ]
    create_table_artifact(rows, key="winner", description=for_markdown(message))


def runner_named(name: str) -> Runner:
    """The runner with this name; raises ParamsRefusedError if there is none."""
    if name not in get_args(Runner):
        raise ParamsRefusedError(f"there is no runner {name!r}; choose threads, dask or ray.")
    return cast("Runner", name)


def task_runner(runner: Runner, workers: int) -> TaskRunner[Any]:
    """The task runner; raises ParamsRefusedError if its extra is not installed."""
    if runner == "threads":
        return ThreadPoolTaskRunner(max_workers=workers)
    try:
        package: Any = import_module(f"prefect_{runner}")
    except ImportError:
        raise ParamsRefusedError(
            f"the runner {runner!r} needs the extra {runner!r}: pip install 'epsilonflow[{runner}]'."
        ) from None
    if runner == "dask":
        logging.getLogger("distributed").setLevel(logging.WARNING)
        cluster = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None, "env": _QUIET}
        made: TaskRunner[Any] = package.DaskTaskRunner(cluster_kwargs=cluster)
    else:
        ray = {"num_cpus": workers, "include_dashboard": False, "log_to_driver": False}
        made = package.RayTaskRunner(init_kwargs=ray)
    return made


@contextmanager
def one_server(runner: Runner) -> Iterator[None]:
    """Start one temporary Prefect server for all processes of the runner; otherwise each would start its own."""
    if runner == "threads" or get_current_settings().api.url:
        yield
        return
    from prefect.server.api.server import SubprocessASGIServer  # here, since it takes seconds to import

    server = SubprocessASGIServer()
    server.start()
    with temporary_settings({PREFECT_API_URL: server.api_url}):
        yield

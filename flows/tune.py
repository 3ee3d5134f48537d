"""The search for settings as a Prefect flow: one reservation, trials on a task runner, and only the winner is released.

Prefect retries no trial. A search that was stopped is resumed by the same command, at no extra cost.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import Field

from flows.compare import Runner, one_server, task_runner
from flows.pipeline import REFUSED, be_quiet_where_nothing_was_raised
from tasks.runs.stages import checkout, refusals
from tasks.tuning import load
from tasks.tuning.search import Trial, deliver, one_by_one, shares


@task(name="trials", retries=0, cache_policy=NO_CACHE, persist_result=False)
def run_share(trials: Sequence[Trial]) -> None:
    """Train and score a share of the trials."""
    one_by_one(trials)


def run_side_by_side(trials: Sequence[Trial], *, workers: int) -> None:
    """Run all trials on the flow's task runner."""
    for future in [run_share.submit(share) for share in shares(trials, workers)]:
        future.result()


def search(file: Path, *, runner: Runner = "threads", workers: int = 2) -> State[Any]:
    """Run the search that `file` describes on a task runner with this number of workers; see `tune`."""
    try:
        chosen = task_runner(runner, workers)
    except refusals() as refusal:
        return Failed(name=REFUSED, message=str(refusal))
    with one_server(runner):
        state: State[Any] = tune.with_options(task_runner=chosen)(str(file), workers, return_state=True)
    return state


@flow(name="tune", retries=0, persist_result=False)
def tune(file: str = "tune.yaml", workers: Annotated[int, Field(ge=1)] = 2) -> State[Any]:
    """Search for settings privately: only the winner is released, for one price that its card states.

    Args:
        file: settings of the search, such as examples/tune.yaml; everything else about a trial is in params.yaml.
        workers: how many tasks share the trials.
    """
    be_quiet_where_nothing_was_raised()
    try:
        root = checkout()
        asked = load(root / file)
        run_all = partial(run_side_by_side, workers=workers)
        said = deliver(asked, root, say=get_run_logger().info, run_all=run_all)
    except refusals() as refusal:
        return Failed(name=REFUSED, message=str(refusal))
    return Completed(message=said)

"""The private search for settings as a Prefect flow: one reservation, and only the winner is released.

A search that was stopped is resumed by the same command, at no extra cost.
"""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from algorithms.plain_text import for_markdown
from data.documents import load_yaml
from flows.deployed import IF_STOPPED, RUN_ONCE, RUN_TASK_ONCE, flow_result, label_run, publish_card
from flows.task_runners import RunnerName, one_server, task_runner
from tasks.config import params
from tasks.config.overrides import value_at
from tasks.runs.dvc_stages import checkout, checkout_lock
from tasks.tuning.search import FOLDER, SearchTrial, deliver_search, one_by_one, shares
from tasks.tuning.settings import READS, Tuning, load_here


@task(name="trials", **RUN_TASK_ONCE)
def run_share(trials: Sequence[SearchTrial]) -> None:
    """Train and score a share of the trials."""
    one_by_one(trials)


def run_side_by_side(trials: Sequence[SearchTrial], *, workers: int) -> None:
    """Run all trials on the flow's task runner."""
    for future in [run_share.submit(share) for share in shares(trials, workers)]:
        future.result()


def search(
    file: Path, *, runner: RunnerName = "threads", workers: int = 2, allow_code: Collection[str] = ()
) -> State[Any]:
    """Run the search that `file` describes on a task runner with this number of workers; see `tune`."""
    chosen = task_runner(runner, workers)
    with one_server(runner):
        state: State[Any] = tune.with_options(task_runner=chosen)(
            str(file), workers, [*allow_code], return_state=True
        )
    return state


@flow(name="tune", **RUN_ONCE, **IF_STOPPED)
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
        publish = partial(publish_search, settings, root / FOLDER)
        message = deliver_search(settings, root, say=say, run_all=run_all, publish=publish)
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

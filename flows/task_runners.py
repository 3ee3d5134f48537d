"""What runs the tasks of a flow with many trials: threads, or processes of Dask or Ray."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal, cast, get_args

from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from tasks.config.params import ParamsRefusedError

RunnerName = Literal["threads", "dask", "ray"]

_WORKER_ENVIRONMENT = {
    "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "warning",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}
"""Environment of Dask's worker processes."""


def runner_named(name: str) -> RunnerName:
    """The runner with this name; raises ParamsRefusedError if there is none."""
    if name not in get_args(RunnerName):
        raise ParamsRefusedError(
            "there is no runner {name!r}; choose threads, dask or ray.",
            code="bad_option",
            name=name,
            options=("--runner",),
        )
    return cast("RunnerName", name)


def task_runner(runner: RunnerName, workers: int) -> TaskRunner[Any]:
    """The task runner; raises ParamsRefusedError if its extra is not installed."""
    if runner == "threads":
        return ThreadPoolTaskRunner(max_workers=workers)
    try:
        package: Any = import_module(f"prefect_{runner}")
    except ImportError:
        raise ParamsRefusedError(
            "the runner {runner!r} needs the extra {runner!r}: pip install 'epsilonflow[{runner}]'.",
            code="library_missing",
            runner=runner,
        ) from None
    if runner == "dask":
        logging.getLogger("distributed").setLevel(logging.WARNING)
        cluster = {
            "n_workers": workers,
            "threads_per_worker": 1,
            "dashboard_address": None,
            "env": _WORKER_ENVIRONMENT,
        }
        prefect_runner: TaskRunner[Any] = package.DaskTaskRunner(cluster_kwargs=cluster)
    else:
        ray = {"num_cpus": workers, "include_dashboard": False, "log_to_driver": False}
        prefect_runner = package.RayTaskRunner(init_kwargs=ray)
    return prefect_runner


@contextmanager
def one_server(runner: RunnerName) -> Iterator[None]:
    """Start one temporary Prefect server for all processes of the runner; otherwise each would start its own."""
    if runner == "threads" or get_current_settings().api.url:
        yield
        return
    from prefect.server.api.server import SubprocessASGIServer  # here, since it takes seconds to import

    server = SubprocessASGIServer()
    server.start()
    with temporary_settings({PREFECT_API_URL: server.api_url}):
        yield

"""The pipeline: its five steps in order, for the plain command and for Prefect alike.

Each step is a DVC stage, and DVC is the only cache: a stage runs if something that it depends on has changed. The plain
command runs the stages one after the other; under Prefect each is a task of a flow, see `flows.deployed`. That is the
one difference, and it is a `Runner`. A scheduled retraining, which goes on where an earlier one stopped, runs the same
five in `tasks.retraining.delivery`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from algorithms.errors import RefusedError
from tasks.config.overrides import ParamOverrides, params_edit
from tasks.config.params import ParamsRefusedError
from tasks.config.temporary_params import check_params, override_params, restore_params
from tasks.runs.dvc_stages import StageRefusedError, checkout_lock
from tasks.runs.metrics import TextRows
from tasks.runs.reservations import noting_what_was_spent

RunStage = Callable[[str], object]
"""Runs a stage; raises StageRefusedError or StageFailedError."""


class Runner(Protocol):
    """How steps are run and shown."""

    def stages(self, root: Path) -> AbstractContextManager[RunStage]:
        """What runs the stages of one run in the checkout at `root`."""

    def line(self, text: str) -> None:
        """Show a line, as where the run waits for another one."""

    def result(self, root: Path) -> TextRows:
        """Show what came out, and return it."""


def run_pipeline(root: Path, overrides: ParamOverrides, runner: Runner, *, keeps_overrides: bool) -> TextRows:
    """Run the five steps in the checkout at `root`, with `overrides` in params.yaml, and return the result.

    keeps_overrides: whether the overrides stay in params.yaml after a run that no stage refused.
    """
    with (
        checkout_lock(root, say=runner.line),
        noting_what_was_spent(root),
        with_overrides(root, overrides, keeps=keeps_overrides) as written,
        runner.stages(root) as run,
    ):
        run("prepare")  # data card, files of records -> datasets/prepared
        run("calibrate")  # params.yaml, public facts -> plan.json
        check_params(root, written)  # which somebody may have edited while the records were prepared
        run("train")  # plan.json, records, budget -> model, trace, evaluation.json, receipt.json
        run("evaluate")  # model, held-out records or evaluation.json -> metrics.json, plots
        run("report")  # all of these -> privacy_card.json, report.html
        return runner.result(root)


def run_report(root: Path, runner: Runner) -> TextRows:
    """Run the last two steps of the pipeline for the model that is in the checkout, and return the result.

    Raises RefusedError if there is none.
    """
    with checkout_lock(root, say=runner.line), runner.stages(root) as run:
        if not (root / "artifacts" / "model.safetensors").is_file():
            raise RefusedError(
                "no model is in this checkout, as while a run that was stopped is not resumed; resume it, or train one"
                " by `epsilonflow run`.",
                code="no_run",
            )
        run("evaluate")
        run("report")
        return runner.result(root)


@contextmanager
def with_overrides(root: Path, overrides: ParamOverrides, *, keeps: bool) -> Iterator[str]:
    """Within the block, params.yaml has the overrides; they do not stay if the run is refused. Yields its text.

    keeps: whether they stay otherwise, also where the process is killed.
    """
    edit = params_edit(root, overrides)
    if not keeps:
        override_params(root, edit.before, edit.after)
        try:
            yield edit.after
        finally:
            restore_params(root)
        return
    edit.write()
    try:
        yield edit.after
    except (StageRefusedError, ParamsRefusedError):
        edit.undo()
        raise

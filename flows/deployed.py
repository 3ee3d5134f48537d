"""The pipeline as a Prefect flow whose tasks are its steps, and the last two steps as another: see `flows.pipeline`.

No task is cached or retried: reusing what DVC has is free, while running a stage again may spend.
Prefect shows the privacy card as a page and the metrics as a table.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from prefect import Flow, flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.exceptions import CrashedRun, FailedRun
from prefect.logging.loggers import flow_run_logger
from prefect.runtime import deployment
from prefect.states import Completed, Crashed, Failed
from pydantic import Field, JsonValue

from algorithms.errors import EmptySearchError, LedgerBrokenError
from algorithms.plain_text import for_markdown
from algorithms.privacy.accounting import MAX_EPSILON
from algorithms.privacy.card import load
from algorithms.privacy.card.text import markdown
from data.card import card_names, data_card
from flows.missing_runs import log_missing_run
from flows.pipeline import RunStage, run_pipeline, run_report
from tasks.config.overrides import ParamOverrides, params_edit
from tasks.preflight.preview import preview_run
from tasks.refusals import PIPELINE
from tasks.runs.dvc_stages import (
    EXISTING_RESULT,
    StageFailedError,
    StageRefusedError,
    checkout,
    checkout_lock,
    reproduce,
)
from tasks.runs.metrics import TextRows
from tasks.runs.reservations import Reservation, open_reservations
from tasks.runs.software import reuse_note_of
from tasks.runs.stage_main import refusals
from tasks.runs.summary import outcome_sentence, run_summary

REFUSED, BROKEN, STUCK, TAG = "Refused", "LedgerBroken", "Stuck", "epsilonflow"
WORKER_DIED = (
    "the worker or its machine has died. Start the worker again, as by `prefect worker start --pool local-pool`; a"
    " retraining is begun again by itself, and any other run is resumed by starting it with the same parameters."
    " `epsilonflow doctor` says what stays reserved for it."
)
"""The message of a state named STUCK."""
UNREAD = (
    "nobody reads the output of the command any more, as after `| head`; the same command resumes the run."
)
T = TypeVar("T")
Epsilon = Annotated[float, Field(gt=0, le=MAX_EPSILON)]
Delta = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
STAGE_LINES = logging.getLogger("epsilonflow.stages")
"""Gets each line that a stage writes, and an empty one when it begins; `stage` in a record is its name."""
STAGE_LINES.setLevel(logging.INFO)
STAGE_LINES.propagate = False  # Prefect has the lines already, in the log of the task


def publish(root: Path) -> TextRows:
    """Make the Prefect artifacts `privacy-card` and `metrics` from the results in `root`, log and return them."""
    result, note = run_summary(root), reuse_note_of(root)
    if note is not None:
        get_run_logger().warning("%s; %s", EXISTING_RESULT, note)
        result = [("existing result", note), *result]
    publish_card(root / "artifacts")
    # Prefect's page renders cells as Markdown.
    table = [{"what": name, "value": for_markdown(text)} for name, text in result]
    create_table_artifact(table, key="metrics", description="result and budget")
    for name, text in result:
        get_run_logger().info("%s: %s", name, text)
    return result


def publish_card(folder: Path) -> None:
    """Make the Prefect artifact `privacy-card` from the card in `folder`."""
    text = markdown(load(folder / "privacy_card.json"))
    create_markdown_artifact(text, key="privacy-card", description="what the guarantee is")


def label_run(*words: str, tags: Iterable[str] = ()) -> None:
    """Name the current flow run by `words` and give it tags, so that lists of runs say what ran."""
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        with get_client(sync_client=True) as client:
            all_tags = {*context.flow_run.tags, TAG, *tags}
            client.update_flow_run(context.flow_run.id, name=" ".join(words), tags=all_tags)


@task(retries=0, cache_policy=NO_CACHE)
def run_stage(stage: str, root: Path) -> State[Any]:
    """Let DVC run one stage if something it depends on has changed."""
    log, reused, of_stage = get_run_logger().info, list[str](), {"stage": stage}

    def say(text: str) -> None:
        log(text)
        if text.startswith(EXISTING_RESULT):
            reused.append(text)
        STAGE_LINES.info(text, extra=of_stage)

    STAGE_LINES.info("", extra=of_stage)
    try:
        ran = reproduce(stage, root=root, say=say)
        if stage == "report" and not ran:
            log_missing_run(root, log)
    except StageRefusedError as refusal:
        return Failed(name=REFUSED, message=str(refusal))
    except StageFailedError as failure:
        return Failed(message=str(failure))
    outcome = "done" if ran else f"nothing to do: {EXISTING_RESULT}"
    return Completed(message=reused[-1] if reused else outcome)


def stage_task(stage: str, root: Path) -> str:
    """Run a stage as a task of the current flow that has its name, and return how it ended.

    Raises StageRefusedError or StageFailedError.
    """
    state = run_stage.with_options(name=stage, task_run_name=stage)(stage, root, return_state=True)
    if state.name == REFUSED:
        raise StageRefusedError(str(state.message))
    if not state.is_completed():
        raise StageFailedError(str(state.message))
    return str(state.message)


@dataclass
class PrefectSteps:
    """Runs the steps as tasks of the current flow.

    is_reused: whether training handed out an existing result. outcome: of what the result is, as a sentence.
    """

    is_reused: bool = False
    outcome: str = ""

    @contextmanager
    def stages(self, root: Path) -> Iterator[RunStage]:
        """What runs a stage as a task."""

        def run(stage: str) -> None:
            how = stage_task(stage, root)
            self.is_reused |= stage == "train" and EXISTING_RESULT in how

        yield run

    def line(self, text: str) -> None:
        """Write a line into the log of the flow."""
        get_run_logger().info(text)

    def result(self, root: Path) -> TextRows:
        """Publish the result, while no other run changes it."""
        self.outcome = outcome_sentence(root)
        return publish(root)


def report_reservations(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Say in the log and in an artifact of a run that was stopped what stays reserved for it; a hook.

    Not in its state, whose message Prefect writes last. A refused run was not stopped, nor were earlier ones, whose
    reservations `epsilonflow doctor` names.
    """
    if state.name == REFUSED:
        return
    with get_client(sync_client=True) as client:
        begun = client.read_flow_run(flow_run.id)
        reservations = list[Reservation]()
        with suppress(*refusals()):  # as where the ledger is away, which the state says
            if begun.start_time is not None:
                populations = _populations(begun.tags)
                held = open_reservations(checkout(), since=begun.start_time)
                reservations = [reservation for reservation in held if reservation.population in populations]
        if not reservations:
            return
        flow_run_logger(flow_run).warning(" ".join(reservation.sentence() for reservation in reservations))
        remedy = "In Prefect, a new run of its deployment with the same parameters resumes it, too."
        client.create_artifact(
            ArtifactCreate(
                key="reservation",
                type="markdown",
                description="what stays reserved for runs that were stopped",
                data="\n\n".join(
                    [*(reservation.sentence(for_markdown) for reservation in reservations), remedy]
                ),
                flow_run_id=flow_run.id,
            )
        )


def _populations(tags: Iterable[str]) -> set[str]:
    """The populations of the data sets that a run has as tags, which it gets before it reserves anything."""
    cards = checkout() / "data" / "cards"
    return {data_card(tag, cards).population for tag in tags if tag in card_names(cards)}


RUN_ONCE: dict[str, Any] = {"retries": 0, "persist_result": False}
"""Arguments of a flow's or a task's decorator: it is never run again by itself, and Prefect stores no result."""

RUN_TASK_ONCE: dict[str, Any] = {**RUN_ONCE, "cache_policy": NO_CACHE}
"""Those of a task, whose result is also never taken from another run."""

IF_STOPPED: dict[str, Any] = {
    hook: [report_reservations] for hook in ("on_cancellation", "on_crashed", "on_failure")
}
"""The hooks of flows that can spend, as arguments of their decorator."""


@flow(name="pipeline", retries=0, **IF_STOPPED)
def pipeline(
    dataset: str | None = None,
    algorithm: str | None = None,
    epsilon: Epsilon | None = None,
    delta: Delta | None = None,
    seed: Seed | None = None,
    settings: dict[str, JsonValue] | None = None,
    encoder: str | None = None,
) -> State[TextRows]:
    """Train a model under differential privacy in this checkout and report what it spent.

    Args:
        dataset: name of a data card; the model and the algorithm's settings then follow its recipe.
        algorithm: name of an algorithm; its settings then follow the recipe of the data set.
        epsilon: the privacy budget of the run.
        delta: the probability with which the guarantee may fail; at most 1/n.
        seed: of the model's start.
        settings: values for params.yaml by dotted key, such as {"algorithm.steps": 500}; set last.
        encoder: a frozen public encoder, such as efficientnet-lite0, whose features a private head is trained on.
    """
    overrides = ParamOverrides(dataset, algorithm, epsilon, delta, seed, settings or {}, encoder)

    def run_here() -> State[TextRows]:
        labels = [dataset, None if epsilon is None else f"epsilon {epsilon:g}"]
        label_run("train", *(word for word in labels if word is not None))  # also if it is refused
        root, runner = checkout(), PrefectSteps()
        with checkout_lock(root, say=runner.line):  # a retraining has params.yaml while it trains
            settings = params_edit(root, overrides).params
            budget = settings.privacy.epsilon
            words = "for an attack" if budget is None else f"epsilon {budget:g}"
            trained = settings.data.dataset, settings.algorithm_name
            label_run("train", trained[0], words, tags=trained)
            # Before a stage starts, since DVC removes what it gave before.
            preview_run(root, settings).check()
        # What a deployment is started with is for that run; at the command line it is the user's choice, and stays.
        rows = run_pipeline(root, overrides, runner, keeps_overrides=deployment.id is None)
        what = f"{EXISTING_RESULT}; it is" if runner.is_reused else "trained"
        return Completed(data=rows, message=f"{what} {runner.outcome}")

    return flow_result(run_here)


@flow(name="report", retries=0)
def report() -> State[TextRows]:
    """Evaluate the model in this checkout and write its report and privacy card, if they are not up to date."""

    def report_here() -> State[TextRows]:
        label_run("report")
        runner = PrefectSteps()
        rows = run_report(checkout(), runner)
        return Completed(data=rows, message=f"the report is that of {runner.outcome}")

    return flow_result(report_here)


def flow_result(work: Callable[[], T]) -> T | State[Any]:
    """Call `work`, the body of a flow, and return its result; a refusal or a failed stage becomes a state that says so.

    What a refused run has spent is a note of its refusal, see `noting_what_was_spent`; without one it is nothing.

    Also drops the tracebacks that Prefect logs for flows and tasks that return a failed state, as ours do.
    """
    logging.getLogger("prefect.task_runs").addFilter(_without_empty_traceback)
    for name in ("prefect.flow_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_is_not_a_returned_state)
    try:
        with PIPELINE.wording_errors():
            return work()
    except LedgerBrokenError as broken:
        return Failed(name=BROKEN, message=str(broken))
    except EmptySearchError as empty:
        return Failed(message=str(empty))
    except refusals() as refusal:
        spent = " ".join(getattr(refusal, "__notes__", ())) or "Nothing was spent."
        return Failed(name=REFUSED, message=f"{str(refusal).rstrip('.')}. {spent}")
    except StageFailedError as failure:
        return Failed(message=str(failure))
    except SystemExit as end:
        # The console ends a process whose output nobody reads any more: of a deployment, the worker is gone.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return Crashed(message=UNREAD) if deployment.id is None else Crashed(name=STUCK, message=WORKER_DIED)


def _is_not_a_returned_state(record: logging.LogRecord) -> bool:
    """Whether a line is about anything but a failed state that a flow returned, whose message the log has already."""
    return not (record.exc_info and isinstance(record.exc_info[1], FailedRun | CrashedRun))


def _without_empty_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and record.exc_info[0] is None:
        record.exc_info = None
    return True

"""What a schedule starts, as Prefect flows: retraining, and the nightly checks of the ledger and of the methods.

Late, repeated and simultaneous deliveries of a retraining cost nothing extra: a period is retrained once. The audit
gives lower bounds on epsilon from the installed code, on synthetic records.
"""

import os
import shlex
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import Field, JsonValue

from algorithms.plain_text import for_markdown
from data.card import data_card
from flows.deployed import (
    BROKEN,
    IF_STOPPED,
    REFUSED,
    RUN_ONCE,
    RUN_TASK_ONCE,
    Delta,
    Epsilon,
    Seed,
    flow_result,
    label_run,
    publish,
    stage_task,
)
from tasks.auditing import AuditRequest, audit_all, audit_one, checked_requests
from tasks.retraining import load
from tasks.retraining.delivery import DeliveryWork, Outcome, deliver
from tasks.runs.dvc_stages import STAGES, checkout
from tasks.runs.ledger import keep_checkpoint, open_ledger, stored_checkpoint

FEW_LEFT = "FewRetrainingsLeft"


@flow(name="retrain", **RUN_ONCE, **IF_STOPPED)
def retrain(file: str = "retrain.yaml", accept_recipe: bool = False) -> State[Any]:
    """Train again on new blocks of data if a retraining is due, and promote the new model if it is no worse.

    Args:
        file: the settings, such as examples/retraining/retrain.yaml.
        accept_recipe: accept a recipe that differs from that of the model in use.
    """

    def work() -> State[Any]:
        label_run("retrain")
        root, say = checkout(), get_run_logger().info
        work = DeliveryWork(load(root / file), root, retraining_task, say, root / file, accept_recipe)
        settings = work.settings
        label_run("retrain", settings.name, settings.period(datetime.now(UTC)), tags=[settings.dataset])
        outcome = deliver(work)
        if outcome.models:
            publish_retraining(work, outcome)
        name = {"refused": REFUSED, "broken": BROKEN, "failed": "Failed"}.get(outcome.kind)
        if name is not None:
            return Failed(name=name, message=outcome.message)
        if outcome.left is not None and outcome.left < work.settings.warn_below:
            return Completed(name=FEW_LEFT, message=f"{outcome.message} {_few_left(work, outcome.left)}")
        return Completed(message=outcome.message)

    return flow_result(work)


def _few_left(work: DeliveryWork, left: int) -> str:
    """How few retrainings the caps allow, and what to do before there is none."""
    settings, population = (
        work.settings,
        data_card(work.settings.dataset, work.root / "data" / "cards").population,
    )
    file = shlex.quote("retrain.yaml" if work.file is None else os.path.relpath(work.file, work.root))
    return (
        f"Without new blocks the caps allow {left} more retraining{'' if left == 1 else 's'} of {settings.name}, fewer"
        f" than the {settings.warn_below} of warn_below. `epsilonflow ledger forecast {population} --from {file}`"
        f" says when each block ends. Bring new blocks, or let the owner raise the caps by `epsilonflow ledger cap"
        f" {population} --epsilon E --delta D`; after the last one the model in use stays, and nothing is spent."
    )


def retraining_task(stage: str, root: Path) -> None:
    """Run a stage as a task; after the last one publish card and metrics, while no other run changes them."""
    stage_task(stage, root)
    if stage == STAGES[-1]:
        publish(root)


def publish_retraining(work: DeliveryWork, outcome: Outcome) -> None:
    """Make the artifacts of a retraining about more than its run: the models compared and the blocks' budgets."""
    compared = [
        {"model": for_markdown(name), "held out": for_markdown(text)} for name, text in outcome.models
    ]
    create_table_artifact(compared, key="models", description=for_markdown(outcome.message))
    card = data_card(work.settings.dataset, work.root / "data" / "cards")
    balances = work.ledger.balances(card.population)
    rows = [
        {"block": for_markdown(row.block), "retired": "yes" if row.retired else ""}
        | {name: f"{getattr(row, name).epsilon:,.6g}" for name in ("cap", "spent", "reserved", "remaining")}
        for row in balances
    ]
    words = "epsilon of each block, for one person; `remaining` is for one more run"
    if balances[0].composition.kind != "basic":
        words = f"{words}, as {balances[0].composition} adds up the runs, not their epsilons"
    create_table_artifact(rows, key="budget", description=words)


@flow(name="verify", **RUN_ONCE)
def verify(from_the_first_row: bool = False) -> State[Any]:
    """Recompute the ledger's chain, balances and prices, and sign its last row as a checkpoint; spends nothing.

    Args:
        from_the_first_row: verify all rows, not only those since the last checkpoint of this home.
    """

    def work() -> State[Any]:
        label_run("verify")
        ledger = open_ledger(checkout())
        verification = ledger.verify(
            since=None if from_the_first_row else stored_checkpoint(ledger), prices=True
        )
        keep_checkpoint(verification.checkpoint)
        return Completed(
            message=f"the chain holds, {verification.head.seq} rows, {verification.read} of them read now."
        )

    return flow_result(work)


@task(name="audit", **RUN_TASK_ONCE)
def audit_task(request: AuditRequest, workers: int) -> tuple[bool, str]:
    """Audit one method; returns whether its claim is violated, and the findings as a sentence."""
    return audit_one(request, checkout(), workers=workers)


@flow(name="audit", **RUN_ONCE)
def audit(
    method: str | None = None,
    epsilon: Epsilon = 4.0,
    delta: Delta = 1e-5,
    settings: dict[str, JsonValue] | None = None,
    runs: Annotated[int, Field(ge=1)] = 1000,
    canaries: Annotated[int, Field(ge=8)] = 400,
    seed: Seed = 0,
    workers: Annotated[int, Field(ge=1)] | None = None,
    predicts: Literal["class", "number", "count"] = "class",
) -> State[Any]:
    """Attack the installed code to look for more leakage than a method claims; spends nothing.

    Args:
        method: a registered method, or package.module:factory; if empty, all methods that claim privacy.
        epsilon: the claimed epsilon.
        delta: the claimed delta.
        settings: settings of the method; those left out get small defaults.
        runs: pairs of runs with and without the worst record.
        canaries: number of canaries in the single run.
        seed: seed of the audit; the same seed gives the same findings.
        workers: number of parallel processes; if empty, the number of cores.
        predicts: with number or count, what is released of the target is attacked, too.
    """

    def work() -> State[Any]:
        label_run("audit", method or "all methods", f"epsilon {epsilon:g}")
        requests = checked_requests(method, settings or {}, epsilon, delta, runs, canaries, seed, predicts)
        audit_method = partial(audit_task, workers=workers or os.cpu_count() or 1)
        is_violated, message = audit_all(requests, audit_method, say=get_run_logger().info)
        return Failed(message=message) if is_violated else Completed(message=message)

    return flow_result(work)

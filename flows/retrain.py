"""The scheduled retraining as a Prefect flow; its logic is in `tasks.retraining.delivery`.

Late, repeated and simultaneous deliveries cost nothing extra: a period is retrained once. No task is retried.
"""

from datetime import UTC, datetime
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.pipeline import REFUSED, be_quiet_where_nothing_was_raised, stage_task
from flows.verify import BROKEN
from tasks.retraining import load
from tasks.retraining.delivery import Work
from tasks.retraining.delivery import retrain as deliver
from tasks.runs.stages import checkout, checkout_lock, refusals

FEW_LEFT = "FewRetrainingsLeft"


@flow(name="retrain", retries=0, persist_result=False)
def retrain(file: str = "retrain.yaml") -> State[Any]:
    """Train again on new blocks of data if a retraining is due, and promote the new model if it is no worse.

    Args:
        file: the settings, such as examples/retraining/retrain.yaml.
    """
    be_quiet_where_nothing_was_raised()
    root, say = checkout(), get_run_logger().info
    try:
        work = Work(load(root / file), root, stage_task, say)
    except refusals() as refusal:
        return Failed(name=REFUSED, message=str(refusal))
    with checkout_lock(root, say=say):
        outcome = deliver(work, now=datetime.now(UTC))
    name = {"refused": REFUSED, "broken": BROKEN, "failed": "Failed"}.get(outcome.kind)
    if name is not None:
        return Failed(name=name, message=outcome.message)
    if outcome.left is not None and outcome.left < work.settings.warn_below:
        words = f"The caps allow {outcome.left} more retrainings of {work.settings.name}."
        return Completed(name=FEW_LEFT, message=f"{outcome.message} {words}")
    return Completed(message=outcome.message)

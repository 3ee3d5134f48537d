"""The report on the model in the checkout, as a separate Prefect flow; it trains nothing."""

from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Failed

from flows.pipeline import REFUSED, be_quiet_where_nothing_was_raised, publish, stage_task
from tasks.runs.quality import RunSummary
from tasks.runs.stages import StageFailedError, checkout, checkout_lock, refusals


@flow(name="report", retries=0)
def report() -> RunSummary | State[Any]:
    """Evaluate the model in this checkout and write its report and privacy card, if they are not up to date."""
    be_quiet_where_nothing_was_raised()
    root = checkout()
    with checkout_lock(root, say=get_run_logger().info):
        try:
            stage_task("evaluate", root)
            stage_task("report", root)
        except refusals() as refusal:
            return Failed(name=REFUSED, message=str(refusal))
        except StageFailedError as failure:
            return Failed(message=str(failure))
        return publish(root)

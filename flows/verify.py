"""The nightly verification of the ledger, as a Prefect flow: chain, balances and prices; it spends nothing."""

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from algorithms.errors import LedgerBrokenError
from flows.pipeline import REFUSED, be_quiet_where_nothing_was_raised
from tasks.runs.ledger import keep_checkpoint, kept_checkpoint, open_ledger
from tasks.runs.stages import checkout, refusals

BROKEN = "LedgerBroken"


@flow(name="verify", retries=0, persist_result=False)
def verify(from_the_first_row: bool = False) -> State[Any]:
    """Recompute what the ledger says, and sign its last row as a checkpoint.

    Args:
        from_the_first_row: verify all rows, not only those since the last checkpoint of this home.
    """
    be_quiet_where_nothing_was_raised()
    try:
        ledger = open_ledger(checkout())
        found = ledger.verify(since=None if from_the_first_row else kept_checkpoint(ledger), prices=True)
        keep_checkpoint(found.checkpoint)
    except LedgerBrokenError as broken:
        return Failed(name=BROKEN, message=str(broken))
    except refusals() as refusal:
        return Failed(name=REFUSED, message=str(refusal))
    return Completed(message=f"the chain holds, {found.head.seq} rows, {found.read} of them read now.")

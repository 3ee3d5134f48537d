"""A rehearsal of a run right before its charge: its card and its page are made with made-up results.

Whatever is charged ends with a card, so a card that cannot be made has to refuse the run.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from algorithms.core.plan import Plan
from algorithms.core.rehearsal import made_up, rehearsal
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.documents import PlanDocument, RunIdentity
from data import DatasetInfo
from tasks.runs.ledger import composition_for, plan_composition

if TYPE_CHECKING:
    from tasks.report import RunResults

_NO_HEAD = "0" * 64


def rehearse(
    document: PlanDocument,
    info: DatasetInfo,
    known: RunIdentity,
    *,
    trial: Schedule | None = None,
    report: Callable[["RunResults"], object] | None = None,
) -> None:
    """Make the card and the page of a run that is not charged yet.

    known: the part of its receipt that is known. trial: for a search, the releases of the winner, which are in its
    trace. report: makes card and page, by default those of a run, whose figures are drawn. Everything else is made up:
    the releases of an adaptive plan, the population's account, the metrics. Raises RefusedError if the card, a figure
    or the page cannot be made, or the card would not verify.
    """
    from tasks.report import compose  # plans do without, and without pandas
    from tasks.reporting import nothing
    from tasks.reporting.figures import rehearse_picture

    run = _rehearsal_run(document, info, known, trial)
    with rehearsal():
        if report is not None:
            report(run)
        else:
            compose(run, nothing(), folder=None, draw=rehearse_picture, key=None)


def _rehearsal_run(
    document: PlanDocument, info: DatasetInfo, known: RunIdentity, trial: Schedule | None
) -> "RunResults":
    import pandas as pd

    from tasks.report import RunResults
    from tasks.runs import metrics

    planned = Plan.from_document(document)
    receipt, columns = made_up(
        planned,
        known,
        cap=Budget(info.cap_epsilon, info.cap_delta),
        head=_NO_HEAD,
        composition=composition_for(info, plan_composition(info, planned)),
        blocks_per_person=info.blocks_per_person,
        trial=trial,
    )
    names = list(info.label_type.names) or ["all"]
    return RunResults(
        plan=document,
        receipt=receipt,
        metrics=metrics.placeholder_metrics(
            info.label_type.kind,
            evaluation_epsilon=receipt.evaluation_epsilon,
        ),
        info=info,
        trace=pd.DataFrame(columns),
        pairs=pd.DataFrame({"actual": names, "predicted": names}),
        classes=pd.DataFrame({"class": names, "accuracy": 1.0, "records": 1}),
    )

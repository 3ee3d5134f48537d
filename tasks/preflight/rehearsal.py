"""A rehearsal of a run right before its charge: its card and its page are made with made-up results.

Whatever is charged ends with a card, so a card that cannot be made has to refuse the run. Its figures are drawn where
classes have unusual names, or there are many of them, since importing and drawing takes as long as a small training.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from algorithms.core.plan import Plan
from algorithms.core.rehearsal import made_up_result, rehearsal
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.documents import PlanDocument, RunIdentity
from data import DatasetInfo
from tasks.runs.ledger import composition_for, plan_composition

if TYPE_CHECKING:
    from tasks.report import RunResults

_PLAIN = re.compile(r"[A-Za-z0-9 .,:;<>=+_/()%-]*")
_NO_HEAD = "0" * 64
_MAX_UNDRAWN = 100
"""With as many classes as this, a figure has a usual size."""


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
    trace. report: makes card and page, by default those of a run, with its figures if they are unusual. Everything
    else is made up: the releases of an adaptive plan, the population's account, the metrics. Raises RefusedError if the
    card, a figure or the page cannot be made, or the card would not verify.
    """
    from tasks.report import compose  # plans do without, and without pandas
    from tasks.reporting import figures, nothing

    run = _rehearsal_run(document, info, known, trial)
    with rehearsal():
        if report is not None:
            report(run)
        else:
            draw = figures.undrawn if has_usual_figures(info) else figures.rehearse_picture
            compose(run, nothing(), folder=None, draw=draw, key=None)


def has_usual_figures(info: DatasetInfo) -> bool:
    """Whether nothing of the data set can make its figures fail: few classes, whose names are in plain characters.

    All else in the figures of a first report are numbers and texts of our own.
    """
    names = info.label_type.names
    return len(names) <= _MAX_UNDRAWN and all(_PLAIN.fullmatch(name) for name in names)


def _rehearsal_run(
    document: PlanDocument, info: DatasetInfo, known: RunIdentity, trial: Schedule | None
) -> "RunResults":
    import pandas as pd

    from tasks.report import RunResults
    from tasks.runs import metrics

    planned = Plan.from_document(document)
    receipt, columns = made_up_result(
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

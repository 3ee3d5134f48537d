"""A rehearsal of a run right before its charge: its card and its page are made with made-up results.

Whatever is charged ends with a card, so a card that cannot be made has to refuse the run.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from algorithms.core.plan import Plan
from algorithms.core.rehearsal import made_up, rehearsal
from algorithms.privacy.accounting.events import Schedule
from data import DatasetInfo
from tasks.runs.ledger import composition_for, plan_composition

if TYPE_CHECKING:
    from tasks.report import RunResults

_NO_HEAD = "0" * 64
_SOFTWARE = {
    "recorded": "training",
    "version": "0",
    "code": _NO_HEAD,
    "python": "3",
    "packages": {"torch": "2"},
    "git": None,
}


def rehearse(
    plan: Mapping[str, Any],
    public: DatasetInfo,
    receipt: Mapping[str, Any],
    *,
    trial: Schedule | None = None,
    report: Callable[["RunResults"], object] | None = None,
) -> None:
    """Make the card and the page of a run that is not charged yet.

    plan: its document. receipt: the known part of its receipt. trial: for a search, the releases of the winner, which
    are in its trace. report: makes card and page, by default those of a run, whose figures are drawn. Everything else
    is made up: the releases of an adaptive plan, the population's account, the metrics. Raises RefusedError if the
    card, a figure or the page cannot be made, or the card would not verify.
    """
    from tasks.report import compose  # plans do without, and without pandas
    from tasks.reporting import nothing
    from tasks.reporting.figures import rehearse_picture

    run = _rehearsal_run(plan, public, receipt, trial)
    with rehearsal():
        if report is not None:
            report(run)
        else:
            compose(run, nothing(), folder=None, draw=rehearse_picture, key=None)


def _rehearsal_run(
    document: Mapping[str, Any], public: DatasetInfo, receipt: Mapping[str, Any], trial: Schedule | None
) -> "RunResults":
    import pandas as pd

    from tasks.report import RunResults
    from tasks.runs import metrics

    cap = {"epsilon": public.cap_epsilon, "delta": public.cap_delta}
    planned = Plan.from_json(document)
    entries, columns = made_up(planned, cap=cap, trial=trial)
    trace, account = pd.DataFrame(columns), entries["ledger"]
    composition = composition_for(public, plan_composition(public, planned))
    entries["ledger"] = account | {"head": _NO_HEAD, "composition": composition.to_json()}
    if blocks := public.blocks:
        entries["ledger"] |= {
            "blocks_per_person": public.blocks_per_person,
            "blocks": [{"name": name} | account for name in blocks],
        }
    names = list(public.label_type.names) or ["all"]
    return RunResults(
        plan=document,
        receipt={**receipt, **entries, "software": _SOFTWARE, "releases": len(trace)},
        metrics=metrics.placeholder_metrics(
            public.label_type.kind,
            evaluation_epsilon=None if planned.evaluation is None else planned.evaluation.epsilon,
        ),
        public=public,
        trace=trace,
        pairs=pd.DataFrame({"actual": names, "predicted": names}),
        classes=pd.DataFrame({"class": names, "accuracy": 1.0, "records": 1}),
    )

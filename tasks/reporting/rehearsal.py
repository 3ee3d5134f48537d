"""Check before a run is charged that it can be reported, by making its card and page with made-up results."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from algorithms.core.method import Plan
from algorithms.core.rehearsal import made_up, rehearsal
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.ledger.composition import Composition
from data import PublicDescription
from tasks.report import Run, compose
from tasks.reporting.figures import Picture
from tasks.reporting.history import nothing
from tasks.runs import quality

_NO_HEAD = "0" * 64
_SOFTWARE = {"recorded": "training", "python": "3", "packages": {"torch": "2"}, "git": None}


def _composed(run: Run) -> None:
    compose(run, nothing(), folder=None, draw=lambda _, words: Picture(b"", b"", words), key=None)


def rehearse(
    plan: Mapping[str, Any],
    public: PublicDescription,
    receipt: Mapping[str, Any],
    *,
    trial: Schedule | None = None,
    report: Callable[[Run], object] = _composed,
) -> None:
    """Make the card and the page of a run that is not charged yet.

    plan: its document. receipt: the known part of its receipt. trial: for a search, the releases of the winner, which
    are in its trace. report: makes card and page. Everything else is made up: the releases of an adaptive plan, the
    population's account, the metrics. Figures are not drawn. Raises RefusedError if the card or the page cannot be
    made, or the card would not verify.
    """
    run = _made_up(plan, public, receipt, trial)
    with rehearsal():
        report(run)


def _made_up(
    document: Mapping[str, Any], public: PublicDescription, receipt: Mapping[str, Any], trial: Schedule | None
) -> Run:
    cap = {"epsilon": public.cap_epsilon, "delta": public.cap_delta}
    entries, columns = made_up(Plan.from_json(document), cap=cap, trial=trial)
    trace, account = pd.DataFrame(columns), entries["ledger"]
    composition = Composition(public.composition, public.composition_order).to_json()
    entries["ledger"] = account | {"head": _NO_HEAD, "composition": composition}
    if blocks := public.blocks:
        entries["ledger"] |= {
            "blocks_per_person": public.blocks_per_person,
            "blocks": [{"name": name} | account for name in blocks],
        }
    names = list(public.known.names) or ["all"]
    return Run(
        plan=document,
        receipt={**receipt, **entries, "software": _SOFTWARE, "releases": len(trace)},
        metrics=quality.made_up(public.known.kind),
        public=public,
        trace=trace,
        pairs=pd.DataFrame({"actual": names, "predicted": names}),
        classes=pd.DataFrame({"class": names, "accuracy": 1.0, "records": 1}),
    )

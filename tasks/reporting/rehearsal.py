"""Check before a run is charged that it can be reported, by making its card and page with made-up results."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from dp_accounting import GaussianDpEvent

from algorithms.core.method import Plan
from algorithms.core.receipt import cost_of
from algorithms.errors import RefusedError
from algorithms.privacy.accounting.events import Schedule, schedule_to_json
from algorithms.privacy.card import RELEASED, made_up_trace
from algorithms.privacy.ledger.composition import Composition
from data import PublicDescription
from tasks.report import Run, compose
from tasks.reporting.figures import Picture
from tasks.reporting.history import nothing
from tasks.runs import quality

_NO_SUM = "0" * 64
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
    try:
        report(run)
    except Exception as error:  # of any kind, since it would occur again after the charge
        raise RefusedError(
            f"this run could not be reported, so it is not charged ({type(error).__name__}: {error}); choose other"
            " settings, and report this as a defect of epsilonflow."
        ) from error


def _made_up(
    document: Mapping[str, Any], public: PublicDescription, receipt: Mapping[str, Any], trial: Schedule | None
) -> Run:
    plan = Plan.from_json(document)
    chosen_on_the_way = [(GaussianDpEvent(1000.0), 1)]
    schedule = (
        plan.schedule if plan.fixed_noise is not None else [*plan.target.prior_events, *chosen_on_the_way]
    )
    events, blocks = schedule_to_json(schedule), public.blocks
    composition = Composition(public.composition, public.composition_order)
    cap = {"epsilon": public.cap_epsilon, "delta": public.cap_delta}
    account: dict[str, Any] = dict.fromkeys(("cap", "spent", "remaining"), cap)
    ledger = account | {"head": _NO_SUM, "composition": composition.to_json()}
    if blocks:
        ledger |= {
            "blocks_per_person": public.blocks_per_person,
            "blocks": [{"name": name} | account for name in blocks],
        }
    trace = pd.DataFrame(made_up_trace(schedule if trial is None else trial))
    made_up = {
        "ledger": ledger,
        "sha256": dict.fromkeys(RELEASED, _NO_SUM),
        "software": _SOFTWARE,
        "releases": len(trace),
    }
    names = list(public.known.names) or ["all"]
    return Run(
        plan=document,
        receipt={**receipt, **cost_of(plan, events), **made_up},
        metrics=quality.made_up(public.known.kind),
        public=public,
        trace=trace,
        pairs=pd.DataFrame({"actual": names, "predicted": names}),
        classes=pd.DataFrame({"class": names, "accuracy": 1.0, "records": 1}),
    )

"""The card of one run of a comparison: what it promises, which is nothing, and what was made of its records."""

import math
from typing import Any

from algorithms.algorithm import Plan
from algorithms.models import Model
from algorithms.privacy import card_words
from algorithms.privacy.card_start import is_started
from algorithms.privacy.card_words import Guarantee
from data import PublicDescription
from tasks.comparing.cells import Cell


def card_of(
    cell: Cell, plan: Plan, public: PublicDescription, model: Model, *, name: str, runs: int
) -> dict[str, Any]:
    """What the run promises, and what it does not. name, runs: of the comparison, and how many runs it has."""
    epsilon = plan.cost.epsilon if math.isfinite(plan.cost.epsilon) else None
    notes = card_words.notes(model.notes)
    guarantee: Guarantee = "none" if epsilon is None else "seeded"
    return {
        "private": False,
        "statement": card_words.statement(
            guarantee,
            epsilon=epsilon,
            delta=plan.cost.delta,
            unit=public.unit,
            adjacency=plan.adjacency,
            caveat=plan.own.get("not_private"),
            diagnosed=cell.is_diagnosed,
            started=is_started(notes),
        ),
        "sweep": sweep(name, runs),
        "runs": runs,
        "transform": card_words.TRANSFORMS[public.transform],
        "features": card_words.features(cell.features or {"name": "none"}),
        "notes": notes,
        "adjacency": plan.adjacency,
        "accountant": plan.accountant,
        "filter": dict(plan.filter),
        "unit": public.unit,
        "dataset": public.dataset,
        "population": public.population,
        "source": public.source,
        "licence": public.licence,
    }


def sweep(name: str, runs: int) -> str:
    """What a card says about the comparison that its run belongs to."""
    return (
        f"This is one of {runs:,} runs of the comparison {name!r} on public records. The comparison as a whole is not"
        " charged to anybody: its ledger records each run by itself, and choosing a method or a setting by these"
        " results is in no epsilon."
    )

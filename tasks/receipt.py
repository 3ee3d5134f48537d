"""What a run leaves in writing about its cost, its noise and the ledger it was charged to."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from algorithms.algorithm import Plan
from algorithms.privacy.ledger import Ledger


def cost_of(plan: Plan, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was released and what it cost; an epsilon is null for a run that is not private.

    events: the recorded releases, as {"event", "count"}.
    """
    return {
        "steps": plan.steps,
        "releases": sum(row["count"] for row in events),
        "epsilon": {name: cost if math.isfinite(cost) else None for name, cost in plan.epsilon.items()},
        "accountant": plan.accountant,
        "delta": plan.target.budget.delta,
        "events": list(events),
    }


def account_of(ledger: Ledger, population: str) -> dict[str, Any]:
    """How the population stands after the run, and the head of the ledger's chain."""
    balance = ledger.balance(population)
    sums = {name: asdict(getattr(balance, name)) for name in ("cap", "spent", "remaining")}
    return {"ledger": {"head": ledger.head()} | sums}


def noise_source(*, private: bool) -> str:
    """In words, where the noise came from."""
    source = "key from the operating system" if private else "seeded key, known to anyone: NOT private"
    return f"AES-256 in counter mode, {source}"

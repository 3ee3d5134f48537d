"""The receipt of a run: its cost, its noise, and the ledger that it was charged to."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from algorithms.core.plan import Plan
from algorithms.core.planning_facts import to_finite
from algorithms.privacy.accounting.events import schedule_to_json
from algorithms.privacy.ledger import Balance, Ledger, identity, settlement


def reserved_events(plan: Plan) -> list[dict[str, Any]]:
    """The events that a run reserves: its schedule, or everything that its filter allows."""
    return schedule_to_json(plan.reserved_schedule)


def cost_of(plan: Plan, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The releases and their cost; an epsilon is null for a run that is not private.

    events: the recorded releases, as {"event", "count"}.
    """
    return {
        "steps": plan.steps,
        "releases": sum(row["count"] for row in events),
        "epsilon": to_finite(plan.epsilon),
        "accountant": plan.accountant,
        "delta": plan.target.budget.delta,
        "events": list(events),
    }


def account_of(ledger: Ledger, population: str, run_id: str) -> dict[str, Any]:
    """The balances of the population and of each block of the run after its settlement, and the kind of composition.

    ten_more: what will be spent after ten more runs like this. Also the first and the latest hash of the ledger's
    chain.
    """
    past = settlement(ledger, population, run_id)
    account = _sums(past.balance) | {"composition": past.balance.composition.to_json()}
    account |= {"ten_more": asdict(past.spent_after(10))}
    if past.charged:
        blocks = [{"name": balance.block} | _sums(balance) for balance in past.charged]
        account |= {"blocks_per_person": past.balance.blocks_per_person, "blocks": blocks}
    return {"ledger": {"first": identity(ledger), "head": ledger.head()} | account}


def _sums(balance: Balance) -> dict[str, Any]:
    return {name: asdict(getattr(balance, name)) for name in ("cap", "spent", "remaining")}

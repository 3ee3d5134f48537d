"""The receipt of a run: its cost, its noise, and the ledger that it was charged to."""

from collections.abc import Mapping, Sequence

from algorithms.core.plan import Plan
from algorithms.core.planning_facts import to_finite
from algorithms.privacy.accounting import EventRow
from algorithms.privacy.accounting.events import schedule_to_json
from algorithms.privacy.documents import (
    Account,
    Amount,
    BlockSection,
    Receipt,
    RunAccount,
    RunIdentity,
    SoftwareFacts,
)
from algorithms.privacy.ledger import Balance, Ledger, identity, settlement


def reserved_events(plan: Plan) -> list[EventRow]:
    """The events that a run reserves: its schedule, or everything that its filter allows."""
    return schedule_to_json(plan.reserved_schedule)


def receipt_of(
    known: RunIdentity,
    plan: Plan,
    events: Sequence[EventRow],
    *,
    releases: int,
    account: RunAccount,
    software: SoftwareFacts,
    sha256: Mapping[str, str],
) -> Receipt:
    """The receipt of a run that is settled at the cost of `plan`.

    Args:
        known: What was known before the charge.
        plan: The plan, without its evaluation where that was not released.
        events: The recorded releases.
        releases: The number of rows of the noise trace.
        account: The balances after the settlement.
        software: What trained.
        sha256: Checksums of the files of the result, by name.
    """
    return Receipt(
        **dict(known),
        steps=plan.steps,
        releases=releases,
        epsilon=to_finite(plan.epsilon),
        accountant=plan.accountant,
        delta=plan.target.budget.delta,
        events=tuple(events),
        ledger=account,
        evaluation_epsilon=None if plan.evaluation is None else plan.evaluation.epsilon,
        software=software,
        sha256=dict(sha256),
    )


def account_of(ledger: Ledger, population: str, run_id: str) -> RunAccount:
    """The balances of the population and of each block of the run after its settlement.

    With the first and the latest hash of the ledger's chain. Raises RefusedError for a run that is not settled.
    """
    past, first = settlement(ledger, population, run_id), identity(ledger)
    return RunAccount(
        **dict(_account(past.balance)),
        first=first,
        head=ledger.verified_head.hash,  # of the snapshot in which the first was read
        composition=past.balance.composition,
        ten_more=Amount(**vars(past.spent_after(10))),
        blocks_per_person=past.balance.blocks_per_person if past.charged_balances else None,
        blocks=tuple(
            BlockSection(**dict(_account(balance)), name=balance.block) for balance in past.charged_balances
        ),
    )


def _account(balance: Balance) -> Account:
    sums = {name: Amount(**vars(getattr(balance, name))) for name in ("cap", "spent", "remaining")}
    return Account(**sums)

"""Checks before a run is charged that its card can be made, with a made-up result."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dp_accounting.dp_event import GaussianDpEvent

from algorithms.core.plan import Plan
from algorithms.core.receipt import receipt_of
from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.events import Schedule, releases_in_order, schedule_to_json
from algorithms.privacy.card import EVALUATION, RELEASED, placeholder_trace
from algorithms.privacy.documents import (
    Account,
    Amount,
    BlockSection,
    Receipt,
    RunAccount,
    RunIdentity,
    SoftwareFacts,
)
from algorithms.privacy.ledger import WHOLE_POPULATION, Composition

_SHA256, _BASIC = "0" * 64, Composition()
_SOFTWARE = SoftwareFacts(
    recorded="training", version="0", code=_SHA256, python="3", packages={"torch": "2"}, git=None
)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Turn any exception into a RefusedError, since it would occur again after the charge."""
    try:
        yield
    except Exception as error:
        raise RefusedError(
            "this run could not be reported, so it is not charged ({kind}: {error}); choose other settings,"
            " and report this as a defect of epsilonflow.",
            code="card_rehearsal_failed",
            kind=type(error).__name__,
            error=error,
        ) from error


def made_up_result(
    plan: Plan,
    known: RunIdentity,
    *,
    cap: Budget,
    head: str | None,
    composition: Composition = _BASIC,
    blocks_per_person: int = 1,
    trial: Schedule | None = None,
) -> tuple[Receipt, dict[str, list[Any]]]:
    """The receipt of a run that is not charged yet, and a trace.

    Releases of an adaptive plan are made up, as are the balances, from the cap, and the checksums.

    Args:
        plan: The plan of the run.
        known: What is known of the run already.
        cap: The population's.
        head: Of the ledger; None where none is kept.
        composition: How the population's runs add up.
        blocks_per_person: In how many of the run's blocks a person may have records.
        trial: For a search, the releases of the winner, which are in its trace.

    Raises:
        RefusedError: For releases that a card cannot state.
    """
    adaptive = [*plan.target.prior_events, (GaussianDpEvent(1000.0), 1)]
    schedule = plan.with_evaluation(plan.schedule if plan.fixed_noise is not None else adaptive)
    releases = releases_in_order(schedule) if trial is None else trial
    amount = Amount(epsilon=cap.epsilon, delta=cap.delta)
    account = Account(cap=amount, spent=amount, remaining=amount)
    blocks = [name for name in known.blocks if name != WHOLE_POPULATION]
    receipt = receipt_of(
        known,
        plan,
        schedule_to_json(schedule),
        releases=sum(count for _, count in releases),
        account=RunAccount(
            **dict(account),
            head=head,
            composition=composition,
            blocks_per_person=blocks_per_person if blocks else None,
            blocks=tuple(BlockSection(**dict(account), name=name) for name in blocks),
        ),
        software=_SOFTWARE,
        sha256=dict.fromkeys(RELEASED if plan.evaluation is None else (*RELEASED, EVALUATION), _SHA256),
    )
    trace = placeholder_trace(releases)
    if plan.evaluation is not None:
        trace["kind"][-1] = "evaluation"
    return receipt, trace

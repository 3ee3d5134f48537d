"""Checks before a run is charged that its card can be made, with a made-up result."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dp_accounting import GaussianDpEvent

from algorithms.core.plan import Plan
from algorithms.core.receipt import cost_of
from algorithms.errors import RefusedError
from algorithms.privacy.accounting.events import Schedule, releases_in_order, schedule_to_json
from algorithms.privacy.card import EVALUATION, RELEASED, made_up_trace


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


def made_up(
    plan: Plan, *, cap: Mapping[str, float], trial: Schedule | None = None
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The entries of a receipt that are known after the run, and a trace.

    Releases of an adaptive plan are made up, as is the population's account, from its cap. trial: for a search, the
    releases of the winner, which are in its trace. Raises RefusedError for releases that a card cannot state.
    """
    adaptive = [*plan.target.prior_events, (GaussianDpEvent(1000.0), 1)]
    schedule = plan.with_evaluation(plan.schedule if plan.fixed_noise is not None else adaptive)
    entries = {
        **cost_of(plan, schedule_to_json(schedule)),
        "ledger": dict.fromkeys(("cap", "spent", "remaining"), cap),
        "sha256": dict.fromkeys(RELEASED, "0" * 64),
    }
    if plan.evaluation is not None:
        entries["sha256"][EVALUATION] = "0" * 64
        entries["evaluation_epsilon"] = plan.evaluation.epsilon
    return entries, made_up_trace(releases_in_order(schedule) if trial is None else trial)

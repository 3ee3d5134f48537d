"""The receipt of a run: its cost, its noise, the ledger that it was charged to, and the software that ran."""

import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dp_accounting.dp_event import ZCDpEvent

from algorithms.core.method import Plan, to_finite
from algorithms.privacy.accounting.events import RenyiDpEvent, schedule_to_json
from algorithms.privacy.accounting.filters import FixedSchedule, RenyiBudget, ZCDPBudget
from algorithms.privacy.ledger import Balance, Ledger, identity, settlement


def reserved_events(plan: Plan) -> list[dict[str, Any]]:
    """The events that a run reserves: its schedule, or everything that its filter allows."""
    match plan.filter:
        case RenyiBudget(order, limit):
            return schedule_to_json([(RenyiDpEvent(order, limit), 1)])
        case ZCDPBudget(rho):
            return schedule_to_json([(ZCDpEvent(rho), 1)])
        case FixedSchedule():
            return schedule_to_json(plan.schedule)


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


PACKAGES = ("dp-accounting", "torch", "numpy", "scipy", "cryptography", "pandas", "scikit-learn")
_STATED_ELSEWHERE = (":!dvc.lock", ":!params.yaml")


def software(root: Path) -> dict[str, Any]:
    """Python, packages that decide a result, and commit of the checkout at `root`, as of now, during training.

    git is None outside a checkout. dirty: files differ from the commit, except for dvc.lock, which DVC writes during a
    run, and params.yaml, whose content is in the plan.
    """
    commit = _output(root, "rev-parse", "--verify", "HEAD")
    changes = _output(root, "status", "--porcelain", "--", ".", *_STATED_ELSEWHERE)
    git = None if not commit or changes is None else {"commit": commit, "dirty": bool(changes)}
    return {
        "recorded": "training",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "git": git,
    }


def _output(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

"""What a run would cost and whether its population can pay, as a table."""

import math
from pathlib import Path

from rich.table import Table

from algorithms.core.method import Plan
from algorithms.core.receipt import reserved_events
from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.accounting.risk import caught, risk_profile
from data import PublicDescription, public_description
from data.schema import registry
from tasks.calibrate import plan_for
from tasks.config.params import Params
from tasks.runs.sanity import doubts, records_of
from tasks.runs.summary import open_ledger


def cost_table(root: Path, settings: Params) -> Table:
    """The plan of the run that `settings` describe, and what the ledger says to it; nothing is spent.

    Raises what `plan_for` raises, and DataRefusedError for an unknown data set.
    """
    card = registry.card(settings.data.dataset, root / "data" / "cards")
    public = public_description(card, settings.data.transform)
    plan = plan_for(settings, public)
    table = Table(show_header=False)
    found = doubts(settings, plan, records_of(public, root / "data" / "cards"))
    questioned = [("these settings look wrong", doubt) for doubt in found]
    rows = [*_plan_rows(settings, plan), *questioned, *_ledger_rows(root, plan, public, settings)]
    for name, text in rows:
        table.add_row(name, text)
    return table


def _plan_rows(settings: Params, plan: Plan) -> list[tuple[str, str]]:
    costs = ", ".join(f"{_text(cost)} by {name}" for name, cost in plan.epsilon.items())
    return [
        ("data set", settings.data.dataset),
        ("algorithm", str(settings.algorithm_settings["name"])),
        ("steps", f"{plan.steps:,}"),
        ("sampling rate", f"{plan.sampling_rate:.4g}"),
        ("noise multiplier", _noise(plan)),
        ("epsilon", costs),
        ("delta", f"{plan.target.budget.delta:g}"),
        *_attack_rows(settings, plan),
    ]


def _attack_rows(settings: Params, plan: Plan) -> list[tuple[str, str]]:
    """What the attack that is the target achieves against the planned run, beside what it may achieve."""
    attack = settings.privacy.target
    if attack is None:
        return []
    found = float(caught(risk_profile(plan.filter, plan.schedule, plan.adjacency), attack.false_alarms))
    said = f"recognises at most {found:.2%} at {attack.false_alarms:g} false alarms; {attack.caught:.2%} is allowed"
    return [("an attacker", said)]


def _noise(plan: Plan) -> str:
    """In words where it is chosen on the way, since a number would say that it is known."""
    if plan.fixed_noise is not None:
        return f"{plan.fixed_noise:.4g}"
    most = plan.method_params.get("most_noise")
    return "chosen on the way" if most is None else f"at most {most:.4g}, chosen by epoch"


def _ledger_rows(
    root: Path, plan: Plan, public: PublicDescription, settings: Params
) -> list[tuple[str, str]]:
    population, ledger = public.population, open_ledger(root)
    if population not in ledger.populations():
        cap = Budget(public.cap_epsilon, public.cap_delta)
        return [(f"cap of population {population}, not charged so far", _pair(cap))]
    balance = ledger.balance(population)
    counts = _pair(balance.cap)
    if balance.cap != Budget(public.cap_epsilon, public.cap_delta):
        counts += "; that of the data card no longer counts, `epsilonflow ledger cap` changes it"
    named = [block.name for block in ledger.blocks(population) if block.name in settings.data.blocks]
    how_many = ledger.affordable(
        population, plan.cost, events=reserved_events(plan), adjacency=plan.adjacency, blocks=named
    )
    return [
        ("cap", counts),
        (f"spent by population {population}", _pair(balance.spent)),
        ("reserved by open runs", _pair(balance.reserved)),
        ("remaining", _pair(balance.remaining)),
        ("runs like this that fit", "as many as you like" if how_many is None else f"{how_many:,}"),
    ]


def _pair(budget: Budget) -> str:
    return f"epsilon {_text(budget.epsilon)}, delta {budget.delta:g}"


def _text(value: float) -> str:
    return f"{value:,.6g}" if math.isfinite(value) else "infinite"

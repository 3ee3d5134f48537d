"""The command `epsilonflow ledger`: what each population may spend, has spent, and by which runs."""

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flows.terminal import SETTINGS, say, sentences, show, show_json

if TYPE_CHECKING:
    from algorithms.privacy.budget import Budget
    from algorithms.privacy.ledger import Balance, Ledger

app = typer.Typer(**SETTINGS, help="The durable budget of each population.")

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


@app.command("show")
def show_balances(as_json: AsJson = False) -> None:
    """Cap, spent, reserved and remaining of every population."""
    with sentences():
        ledger = _ledger()
        balances = [ledger.balance(population) for population in ledger.populations()]
    _show_balances(balances, as_json=as_json)


@app.command()
def cap(
    population: Annotated[str, typer.Argument(help="Whose cap.")],
    epsilon: Annotated[float, typer.Option(help="What all its runs together may spend.")],
    delta: Annotated[float, typer.Option(help="The same for delta.")],
    as_json: AsJson = False,
) -> None:
    """Change the cap of a population, as the owner of its data; the change is a row of the ledger."""
    with sentences():
        from algorithms.privacy.budget import Budget

        ledger = _ledger()
        ledger.set_cap(population, Budget(epsilon, delta))
        balance = ledger.balance(population)
    _show_balances([balance], as_json=as_json)


@app.command()
def history(
    population: Annotated[str | None, typer.Option(help="Only this population.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every row of the ledger, in order."""
    with sentences():
        rows = _ledger().history(population)
    if as_json:
        show_json([row.to_json() for row in rows])
        return
    table = Table("row", "when", "what", "population", "run", "epsilon", "delta")
    for row in rows:
        budget = row.budget
        cells = (row.written_at, row.kind, row.population, row.run_id or "", _text(budget.epsilon))
        table.add_row(str(row.seq), *cells, _text(budget.delta))
    show(table)


@app.command()
def forfeit(run_id: Annotated[str, typer.Argument(help="A run that will not be resumed.")]) -> None:
    """Give up an open run: its whole reservation counts as spent for ever, and its folder is deleted."""
    with sentences():
        from tasks import runs
        from tasks.environment import home

        _ledger().forfeit(run_id)
        runs.abandon(home(), run_id)
    say(f"The whole reservation of {run_id} counts as spent for ever.")


def _ledger() -> "Ledger":
    from tasks.closing import open_ledger
    from tasks.stage import checkout

    return open_ledger(checkout())


def _show_balances(balances: "list[Balance]", *, as_json: bool) -> None:
    if as_json:
        show_json([_document(balance) for balance in balances])
        return
    table = Table("population", "", "epsilon", "delta")
    for balance in balances:
        for kind in ("cap", "spent", "reserved", "remaining"):
            budget: Budget = getattr(balance, kind)
            name = balance.population if kind == "cap" else ""
            table.add_row(name, kind, _text(budget.epsilon), _text(budget.delta))
        table.add_section()
    show(table)


def _document(balance: "Balance") -> dict[str, Any]:
    budgets = {kind: _pair(getattr(balance, kind)) for kind in ("cap", "spent", "reserved", "remaining")}
    return {"population": balance.population, "public": balance.public, **budgets}


def _pair(budget: "Budget") -> dict[str, float | None]:
    return {"epsilon": budget.epsilon if math.isfinite(budget.epsilon) else None, "delta": budget.delta}


def _text(value: float) -> str:
    return f"{value:,.6g}"

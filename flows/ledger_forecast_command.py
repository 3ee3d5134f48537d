"""The command `epsilonflow ledger forecast`: how many more retrainings the caps allow, and when blocks retire."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from flows.terminal import say, sentences, show, show_json

if TYPE_CHECKING:
    from algorithms.privacy.ledger import Forecast, Ledger, Price, Spread

_SMALLEST_SHARE = 0.01


def forecast(
    population: Annotated[str, typer.Argument(help="Whose retrainings.")],
    policy: Annotated[
        Literal["last", "all", "newest"], typer.Option(help="Which blocks a retraining uses.")
    ] = "all",
    window: Annotated[
        int | None, typer.Option(help="How many of the newest blocks, for --policy last.")
    ] = None,
    at_least: Annotated[int, typer.Option(help="With fewer blocks a retraining is skipped.")] = 1,
    spread: Annotated[
        Literal["equal", "front-loaded", "geometric"], typer.Option(help="How a block's budget is spread.")
    ] = "equal",
    planned: Annotated[int | None, typer.Option(help="Retrainings a block's budget is to last for.")] = None,
    fraction: Annotated[float | None, typer.Option(help="Of what is left, for --spread geometric.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="What each retraining costs, instead of a spread.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Its delta; under basic sums it is added up.")] = None,
    smallest: Annotated[
        float | None,
        typer.Option(help="Least useful price, as a share of a block's cap; 0.01 for geometric."),
    ] = None,
    new_blocks: Annotated[bool, typer.Option("--new-blocks", help="A new block comes with each.")] = False,
    every: Annotated[float, typer.Option(help="Days between retrainings.")] = 7.0,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Say how many more retrainings the caps allow and when blocks retire; nothing is spent."""
    with sentences():
        from algorithms.privacy.ledger import Choice
        from algorithms.privacy.ledger import forecast as play
        from tasks.closing import open_ledger
        from tasks.stage import checkout

        ledger = open_ledger(checkout())
        pricing = _pricing(ledger, population, (spread, planned, fraction), (epsilon, delta))
        limit = _limit(ledger, population)
        share = smallest if smallest is not None else _SMALLEST_SHARE if fraction else 0.0
        least = pricing if isinstance(pricing, tuple) else tuple(share * part for part in limit)
        found = play(
            ledger.blocks(population),
            Choice(policy, window, at_least),
            pricing,
            smallest=least,
            arriving=limit if new_blocks else None,
        )
        document = _document(ledger, population, found, every)
    if as_json:
        show_json(document)
        return
    _show(document)


def _pricing(
    ledger: "Ledger",
    population: str,
    spreading: tuple[Any, int | None, float | None],
    each: tuple[float | None, float | None],
) -> "Spread | Price":
    """How budgets are spread, or the price of an (epsilon, delta), as it counts for a person."""
    from algorithms.privacy.budget import Budget
    from algorithms.privacy.ledger import Spread

    epsilon, delta = each
    if epsilon is None:
        return Spread(*spreading)
    balance = ledger.balance(population)
    cost = Budget(epsilon, balance.cap.delta if delta is None else delta)
    count = balance.blocks_per_person
    return tuple(float(part) * count for part in balance.composition.amount_of(cost))


def _limit(ledger: "Ledger", population: str) -> "Price":
    """What a new block begins with."""
    balance = ledger.balance(population, "all")
    return tuple(map(float, balance.composition.amount_of(balance.cap)))


def _document(ledger: "Ledger", population: str, found: "Forecast", every: float) -> dict[str, Any]:
    from fractions import Fraction

    balance = ledger.balance(population, "all")

    def epsilon(price: "Price") -> float:
        return balance.composition.shown(tuple(map(Fraction, price)), balance.cap.delta).epsilon

    rows = [
        {
            "retraining": row.number,
            "day": every * row.number,
            "blocks": list(row.blocks),
            "epsilon": epsilon(row.price),
            "price": list(row.price),
            "retires": list(row.retires),
        }
        for row in found.retrainings
    ]
    unit = {"composition": str(balance.composition), "delta": balance.cap.delta}
    return {"population": population, **unit, "fit": len(rows), "end": found.end, "retrainings": rows}


def _show(document: dict[str, Any]) -> None:
    table = Table("retraining", "day", "blocks", "epsilon", "retires")
    for row in document["retrainings"]:
        names = (", ".join(row["blocks"]), f"{row['epsilon']:.4g}", ", ".join(row["retires"]))
        table.add_row(str(row["retraining"]), f"{row['day']:g}", *names)
    show(table)
    more = "at least " if document["end"] is None else ""
    say(f"The caps allow {more}{document['fit']} more retrainings of population {document['population']}.")
    if document["end"]:
        say(f"Then {document['end']}")

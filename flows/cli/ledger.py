"""The command `epsilonflow ledger`: what each population may spend, has spent, by which runs, and how long it lasts."""

import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Column, Table
from typer.core import TyperGroup

from algorithms.plain_text import for_terminal
from flows.cli.running import SETTINGS, say, show, takes_options

if TYPE_CHECKING:
    from algorithms.privacy.accounting import Budget
    from algorithms.privacy.ledger import Balance, Forecast, Ledger, Price

_SMALLEST_SHARE = 0.01
_USUAL_RETRAININGS = 52
"""How many retrainings a budget should last for by default: a year of weeks."""
_DAYS = {"hour": 1 / 24, "day": 1.0, "week": 7.0, "month": 30.0}
_SHOWN_ROWS = 6
"""Rows shown at each end of a long forecast."""
_BLOCKS = (
    "A block is a part of the population's records with a cap of its own. A run charges every block that it reads, so"
    " nobody's loss is above that of the most charged block: blocks do not add up."
)


_BY_USE = (
    *(
        "show",
        "history",
        "report",
        "forecast",
        "verify",
        "forfeit",
        "register",
        "cap",
        "block",
        "retire",
        "overrule",
    ),
    *("backup", "restore", "init"),
)


class _ByUse(TyperGroup):
    """Lists the commands that are used most first."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands' names in the order of the help."""
        return sorted(super().list_commands(ctx), key=_BY_USE.index)


app = typer.Typer(**SETTINGS, cls=_ByUse, help="The durable budget of each population.")

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it without asking.")]


@dataclass(frozen=True)
class _ForecastOptions:
    """What `forecast` was called with."""

    population: Annotated[str, typer.Argument(help="Population whose retrainings to forecast.")]
    policy: Annotated[
        Literal["last", "all", "newest"], typer.Option(help="Which blocks a retraining uses.")
    ] = "all"
    window: Annotated[int | None, typer.Option(help="Number of newest blocks, for --policy last.")] = None
    at_least: Annotated[int, typer.Option(help="With fewer blocks a retraining is skipped.")] = 1
    spread: Annotated[
        Literal["equal", "front-loaded", "geometric"], typer.Option(help="How a block's budget is spread.")
    ] = "equal"
    planned: Annotated[
        int | None,
        typer.Option(help="Number of retrainings that a block's budget should last for.", show_default="52"),
    ] = None
    fraction: Annotated[
        float | None,
        typer.Option(help="Share of what is left that each retraining may spend, for --spread geometric."),
    ] = None
    epsilon: Annotated[
        float | None, typer.Option(help="Epsilon of each retraining, instead of a spread.")
    ] = None
    delta: Annotated[
        float | None,
        typer.Option(
            help="Delta of each retraining; basic composition adds it up.",
            show_default="as much of the cap's as epsilon is",
        ),
    ] = None
    smallest: Annotated[
        float | None,
        typer.Option(
            help="Smallest useful payment, as a share of a block's cap.",
            show_default="0.01, or 0.01 / planned^2",
        ),
    ] = None
    new_blocks: Annotated[bool, typer.Option("--new-blocks", help="Each retraining brings a new block.")] = (
        False
    )
    every: Annotated[float, typer.Option(min=0.01, help="Days between retrainings.")] = 7.0
    file: Annotated[
        Path | None, typer.Option("--from", help="Take all of these from retrain.yaml, named here.")
    ] = None
    as_json: AsJson = False

    def from_file(self) -> "_ForecastOptions":
        """With the settings of retrain.yaml, if it is named."""
        if self.file is None:
            return self
        from tasks.retraining import load

        settings = load(self.file)
        blocks, spread = settings.blocks, settings.spread
        return replace(
            self,
            policy=blocks.policy,
            window=blocks.window,
            at_least=blocks.at_least,
            spread=spread.policy,
            planned=spread.planned,
            fraction=spread.fraction,
            smallest=settings.smallest,
            every=_DAYS[settings.every],
            epsilon=None,
        )

    def price(self, ledger: "Ledger") -> "Price":
        """The price of each retraining at `epsilon`, for all blocks of a person."""
        from fractions import Fraction

        from algorithms.privacy.accounting import Budget
        from tasks.config.params import ParamsRefusedError

        assert self.epsilon is not None
        whole, delta = ledger.balance(self.population), self.delta
        if delta is None:
            # Basic sums use up both parts at once; rounded down, since the last payment has to fit.
            share = min(1.0, self.epsilon / whole.cap.epsilon) if whole.composition.kind == "basic" else 1.0
            delta = whole.cap.delta if share == 1.0 else math.nextafter(share * whole.cap.delta, 0.0)
        cost = whole.composition.amount_of(Budget(self.epsilon, delta))
        if not any(cost):
            minimum = whole.composition.as_budget((Fraction(1, 10**9),), delta).epsilon
            raise ParamsRefusedError(
                "{composition} counts at least epsilon {least:.4g} for a retraining at delta {delta:g}, so no"
                " forecast is one of epsilon {epsilon:g}; give a larger --epsilon, or --planned instead.",
                code="bad_option",
                composition=whole.composition,
                least=minimum,
                delta=delta,
                epsilon=self.epsilon,
                options=("--epsilon",),
            )
        return tuple(float(part) * whole.blocks_per_person for part in cost)


@app.command()
@takes_options(_ForecastOptions)
def forecast(options: _ForecastOptions) -> None:
    """Show how many more retrainings the caps allow and when blocks retire. Spends nothing."""
    from algorithms.privacy.ledger import Choice, Spread
    from algorithms.privacy.ledger import forecast as play

    options = options.from_file()
    ledger = _ledger()
    balance = ledger.balance(options.population, "all")
    limit = tuple(map(float, balance.composition.amount_of(balance.cap)))  # of a new block, as a price
    is_open = options.planned is None and options.fraction is None and options.epsilon is None
    if is_open and options.spread != "geometric":
        options = replace(options, planned=_USUAL_RETRAININGS)
        if not options.as_json:
            say(
                f"Each block's budget is spread over {_USUAL_RETRAININGS} retrainings; see --planned and --epsilon."
            )
    pricing: Spread | Price
    if options.epsilon is None:
        pricing = Spread(options.spread, options.planned, options.fraction)
        # The last of the planned payments is that small a part, too, where they fall.
        share = (
            _SMALLEST_SHARE / (options.planned or 1) ** 2 if options.smallest is None else options.smallest
        )
        smallest = tuple(share * part for part in limit)
    else:
        pricing = smallest = options.price(ledger)
    outcome = play(
        ledger.blocks(options.population),
        Choice(options.policy, options.window, options.at_least),
        pricing,
        smallest=smallest,
        arriving=limit if options.new_blocks else None,
    )
    rows = _retrainings(balance, outcome, options.every)
    if not options.as_json:
        if rows and balance.composition.kind != "basic":
            say(
                f"Epsilon is what the caps are charged for one retraining alone, as {balance.composition} counts it at"
                f" delta {balance.cap.delta:g}. Its card claims no more and mostly less, as it adds up the releases of"
                " that run alone."
            )
        _show_forecast(options.population, rows, outcome.end)
        return
    document = {
        "population": options.population,
        "composition": str(balance.composition),
        "delta": balance.cap.delta,
        "fit": len(rows),
        "end": outcome.end,
        "retrainings": [asdict(row) for row in rows],
    }
    say(json.dumps(document, indent=2))


@dataclass(frozen=True)
class _ForecastRetraining:
    """A forecast retraining; its fields are keys of the JSON."""

    retraining: int
    day: float
    blocks: list[str]
    epsilon: float
    price: list[float]
    retires: list[str]


def _retrainings(balance: "Balance", forecast: "Forecast", every: float) -> list[_ForecastRetraining]:
    """The retrainings of a forecast, so many days apart, with their epsilon at the delta of the cap."""
    from fractions import Fraction

    def epsilon(price: "Price") -> float:
        return balance.composition.as_budget(tuple(map(Fraction, price)), balance.cap.delta).epsilon

    return [
        _ForecastRetraining(
            row.number,
            every * row.number,
            list(row.blocks),
            epsilon(row.price),
            list(row.price),
            list(row.retires),
        )
        for row in forecast.retrainings
    ]


def _show_forecast(population: str, rows: list[_ForecastRetraining], end: str | None) -> None:
    if not rows:
        say(f"The caps allow no more retrainings of population {population}: {end}")
        return
    # By the hour where days would be fractions, as for hourly retrainings.
    unit, each = ("day", 1) if all(float(row.day).is_integer() for row in rows) else ("hour", 24)
    table = Table("retraining", unit, "blocks", "epsilon", "retires")
    left_out = max(0, len(rows) - 2 * _SHOWN_ROWS)
    for index, row in enumerate(rows):
        if left_out and _SHOWN_ROWS <= index < _SHOWN_ROWS + left_out:
            if index == _SHOWN_ROWS:
                table.add_row("...", "", f"{left_out:,} more; --json has all", "", "")
            continue
        names = (_few(row.blocks), f"{row.epsilon:.4g}", _few(row.retires))
        table.add_row(str(row.retraining), f"{each * row.day:.6g}", *names)
    show(table)
    say(
        f"The caps allow {'' if end else 'at least '}{len(rows)} more retrainings of population {population}."
    )
    if end:
        say(f"Then {end}")


def _few(names: list[str]) -> str:
    """Names in one cell: up to three are listed, more are shown as the first, the last and their number."""
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]} ({len(names)})"


def require_consent(what: str, *, yes: bool) -> None:
    """Ask for consent to what cannot be undone; raises ParamsRefusedError unless it is given, here or by --yes."""
    from tasks.config.params import ParamsRefusedError

    if not yes and not (sys.stdin.isatty() and typer.confirm(for_terminal(f"{what} Do it?"), err=True)):
        raise ParamsRefusedError(
            "{what}; this needs consent: answer y at a terminal, or give --yes.",
            code="consent_needed",
            what=what.rstrip("."),
            options=("--yes",),
        )


@app.command("show")
def show_balances(
    population: Annotated[str | None, typer.Argument(help="Only this population.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show cap, spent, reserved and remaining budget of each population or block."""
    ledger = _ledger()
    balances = ledger.balances(population)
    _show_balances(balances, as_json=as_json)
    if not as_json:
        for name in dict.fromkeys(balance.population for balance in balances if not balance.public):
            repeat, ten = (ledger.spent_if_repeated(name, runs) for runs in (1, 10))
            if repeat is not None and ten is not None:
                cap = ledger.balance(name).cap
                is_within = ten.epsilon <= cap.epsilon and ten.delta <= cap.delta
                later = f"would make it {_text(ten.epsilon)}" if is_within else "would exceed the cap"
                say(
                    f"{name}: with one more run like the last one epsilon {_text(repeat.epsilon)} would be spent, and"
                    f" ten more {later}."
                )


@app.command()
def init(
    url: Annotated[
        str | None, typer.Argument(help="URL without a password.", show_default="EPSILONFLOW_LEDGER_URL")
    ] = None,
    owner: Annotated[
        list[str] | None, typer.Option(help="Database user who registers populations and sets caps.")
    ] = None,
    runner: Annotated[
        list[str] | None, typer.Option(help="Database user who reserves, settles and forfeits.")
    ] = None,
    auditor: Annotated[list[str] | None, typer.Option(help="Database user who reads and verifies.")] = None,
) -> None:
    """Create a ledger. On PostgreSQL it has the roles owner, runner and auditor, which the database enforces.

    Run it again to give a role to more users.

    PostgreSQL takes the password of the URL's user from PGPASSWORD or from a password file (PGPASSFILE).
    """
    from algorithms.privacy.ledger import init as make
    from tasks.config import checked_url, ledger_url

    named = ledger_url(None) if url is None else checked_url(url)
    roles = make(named, {"owner": owner or [], "runner": runner or [], "auditor": auditor or []})
    if roles:
        say(f"The ledger exists, with the roles {', '.join(roles)}; GRANT one to each database user.")
        return
    say(
        "The ledger exists. An SQLite file has no roles: whoever can write the file can do everything, including"
        " raising caps and deleting it. Only the permissions of its folder keep others out."
    )


@app.command()
def register(
    dataset: Annotated[
        str | None,
        typer.Argument(help="Data set whose card to register.", show_default="that of params.yaml"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Register the population of a data card, with its cap and its blocks, before the first run. Spends nothing."""
    from tasks.preflight.registration import register_card
    from tasks.runs.dvc_stages import checkout

    ledger = _ledger()
    population = register_card(ledger, checkout(), dataset)
    balances = ledger.balances(population)
    _show_balances(balances, as_json=as_json)


@app.command()
def cap(
    population: Annotated[str, typer.Argument(help="Population whose cap to change.")],
    epsilon: Annotated[float, typer.Option(help="Epsilon that all its runs together may spend.")],
    delta: Annotated[float, typer.Option(help="Delta that all its runs together may spend.")],
    block: Annotated[str | None, typer.Option(help="Change only the cap of this block.")] = None,
    as_json: AsJson = False,
) -> None:
    """Change the cap of a population or block, as the owner of its data. The ledger records the change."""
    from algorithms.privacy.accounting import Budget

    ledger = _ledger()
    block = block or "all"
    ledger.set_cap(population, Budget(epsilon, delta), block=block)
    balance = ledger.balance(population, block)
    _show_balances([balance], as_json=as_json)


@app.command()
def history(
    population: Annotated[str | None, typer.Argument(help="Only this population.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show every row of the ledger, in order."""
    rows = _ledger().history(population)
    if as_json:
        say(json.dumps([row.to_json() for row in rows], indent=2))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("row", "when", "what", "population", "run"):
        table.add_column(name, no_wrap=name != "population", overflow="fold", min_width=len(name))
    table.add_column("epsilon", justify="right", no_wrap=True)
    table.add_column("delta", justify="right", no_wrap=True)
    for row in rows:
        budget, notes = row.budget, json.loads(row.about)
        what = next((word for word in ("retired", "overruled") if notes.get(word)), row.kind)
        cells = (row.written_at[:16].replace("T", " "), what, _account_name(row.population, row.block))
        numbers = (f"{budget.epsilon:.4g}", f"{budget.delta:.3g}")
        table.add_row(str(row.seq), *cells, row.run_id or "", *numbers)
    show(table)


@app.command()
def forfeit(
    run_id: Annotated[str, typer.Argument(help="Id of a run that will not be resumed.")], yes: Yes = False
) -> None:
    """Give up an open run. Its whole reservation counts as spent forever, and its folder is deleted."""
    from tasks.config import home
    from tasks.runs import store

    ledger = _ledger()
    if ledger.status(run_id) == "open":
        require_consent(
            f"Run {run_id} is given up, and its whole reservation counts as spent forever.", yes=yes
        )
    ledger.forfeit(run_id)
    store.abandon(home(), run_id)
    say(f"The whole reservation of {run_id} counts as spent forever.")


@app.command()
def block(
    population: Annotated[str, typer.Argument(help="Whose data.")],
    name: Annotated[str, typer.Argument(help="A part of the data that shares no record with another block.")],
    epsilon: Annotated[float | None, typer.Option(help="The block's own cap on epsilon.")] = None,
    delta: Annotated[float | None, typer.Option(help="The block's own cap on delta.")] = None,
) -> None:
    """Declare a block. Its cap is that of the population unless you give it its own."""
    from algorithms.privacy.accounting import Budget

    ledger = _ledger()
    usual = ledger.balance(population, "all").cap
    caps = (usual.epsilon if epsilon is None else epsilon, usual.delta if delta is None else delta)
    ledger.declare_block(population, name, Budget(*caps))
    balance = ledger.balance(population, name)
    _show_balances([balance], as_json=False)


@app.command()
def retire(
    population: Annotated[str, typer.Argument(help="Whose data.")],
    name: Annotated[str, typer.Argument(help="A block that no run may use again.")],
    yes: Yes = False,
) -> None:
    """Retire a block forever."""
    ledger = _ledger()
    ledger.balance(population, name)
    require_consent(f"Block {name} of population {population} retires forever.", yes=yes)
    ledger.retire_block(population, name)
    say(f"No run will use block {name} of population {population} again.")


@app.command()
def overrule(
    population: Annotated[str, typer.Argument(help="Whose data.")],
    name: Annotated[
        str,
        typer.Argument(
            help="A block that was refused because of its content, which changed or is another's."
        ),
    ],
    other: Annotated[
        str | None, typer.Argument(help="The other block with the same content; none if the content changed.")
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="Who says so.", show_default="the user who is logged in")
    ] = None,
) -> None:
    """Declare, as the owner of the data, who is in a block that was refused.

    With two blocks: they have the same content, but hold different people.

    With one: its content may change after a charge, but everybody in it stays in it.

    The ledger records who declared it.
    """
    from algorithms.privacy.ledger import system_user

    who = by or system_user()
    ledger = _ledger()
    ledger.overrule(population, name, other, by=who)
    declared = {balance.block for balance in ledger.balances(population)}
    for unknown in sorted({name, other or name} - declared):
        say(f"Note: there is no block {unknown!r} yet; this will hold for a block of exactly that name.")
    what = (
        f"Block {name} of population {population} may change its content"
        if other is None
        else f"Blocks {name} and {other} of population {population} may have the same content"
    )
    say(f"{what}; the ledger records that {who} says so.")


@app.command()
def verify(
    head: Annotated[str | None, typer.Option(help="A head of the chain that you kept elsewhere.")] = None,
    card: Annotated[Path | None, typer.Option(help="A privacy_card.json to compare with the ledger.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint signed in this home folder.")
    ] = False,
) -> None:
    """Recompute chain, balances and prices, compare a card, and sign a checkpoint.

    Exit status 2 if anything differs.
    """
    from algorithms.privacy.card import check_charged, load
    from tasks.runs.ledger import keep_checkpoint, stored_checkpoint

    ledger = _ledger()
    shown = None if card is None else load(card)
    for containing in [head] if shown is None else [head, shown.evidence.ledger_head]:
        if containing is not None:
            ledger.check_contains(containing)
    verification = ledger.verify(since=stored_checkpoint(ledger) if resume else None, prices=True)
    if shown is not None:
        check_charged(shown, ledger)
    keep_checkpoint(verification.checkpoint)
    prices = "one price is" if verification.priced == 1 else f"{verification.priced} prices are"
    recomputed = f"; {prices} recomputed from the events of runs" if verification.priced else ""
    after = f", {verification.read} of them read now" if resume else ""
    say(
        f"The chain holds, {verification.head.seq} rows{after}{recomputed}. Its head is {verification.head.hash}"
    )
    if card is not None:
        say("The card has the same events, cost, model and key as the settlement of its run.")


@app.command()
def report(to: Annotated[Path, typer.Argument(help="File to write.")] = Path("ledger.html")) -> None:
    """Write an HTML page of all populations and blocks: spent, reserved, left, forecast, and the runs."""
    from tasks.ledger_page import page

    text = page(_ledger())
    to.write_text(text, encoding="utf-8")
    say(f"Wrote {to}: one file, which contains nothing about a record.")


@app.command("backup")
def back_up(file: Annotated[Path, typer.Argument(help="File to create.")]) -> None:
    """Back up every row with its hashes to a file that only you can read. Runs may continue meanwhile."""
    from algorithms.privacy.ledger import export as write

    rows = write(_ledger(), file)
    say(f"Wrote {rows} rows to {file}.")


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(help="A file that `ledger backup` wrote.")],
    to: Annotated[str, typer.Option(help="URL of an empty ledger.")],
) -> None:
    """Restore a backup into an empty ledger, hash for hash."""
    from algorithms.privacy.ledger import restore as write

    rows = write(file, to)
    say(f"Restored {rows} rows; the chain holds.")


def _ledger() -> "Ledger":
    """The ledger of the checkout; outside of any checkout, as after a notebook, the ledger of the home."""
    from tasks.runs.dvc_stages import checkout
    from tasks.runs.ledger import open_ledger

    current = Path.cwd()
    is_outside = not any((folder / ".dvc").exists() for folder in (current, *current.parents))
    return open_ledger(current if is_outside else checkout())


def _show_balances(balances: "list[Balance]", *, as_json: bool) -> None:
    if as_json:
        say(json.dumps([_entry_document(balance) for balance in balances], indent=2))
        return
    if not balances:
        say("The ledger has no population yet; the first run on one declares it.")
        return
    table = Table(Column("population", overflow="fold"), "", "epsilon", "delta", caption=_units(balances))
    for balance in balances:
        for kind in ("cap", "spent", "reserved", "remaining"):
            budget: Budget = getattr(balance, kind)
            name = (
                f"{_account_name(balance.population, balance.block)}{' (retired)' if balance.retired else ''}"
            )
            name = name if kind == "cap" else ""
            table.add_row(name, kind, _text(budget.epsilon), _text(budget.delta))
        table.add_section()
    show(table)


def _entry_document(balance: "Balance") -> dict[str, object]:
    budgets = {kind: _pair(getattr(balance, kind)) for kind in ("cap", "spent", "reserved", "remaining")}
    terms = {"composition": balance.composition.to_json(), "blocks_per_person": balance.blocks_per_person}
    block = {"block": balance.block, "retired": balance.retired}
    return {"population": balance.population, "public": balance.public, **block, **terms, **budgets}


def _account_name(population: str, block: str) -> str:
    return population if block == "all" else f"{population}, block {block}"


def _units(balances: "list[Balance]") -> str:
    """A note on whom the numbers protect and how they were added up, unless it is one record and basic composition."""
    notes = {}
    for balance in balances:
        count, composition = balance.blocks_per_person, balance.composition
        one_record = "" if balance.block == "all" else "for one record in one block"
        unit = one_record if count == 1 else f"for one person with at most {count} records"
        sums = "" if composition.kind == "basic" else f"composed by {composition}, so epsilons do not add up"
        if unit or sums:
            notes[balance.population] = f"{balance.population}: {'; '.join(filter(None, (unit, sums)))}"
    has_blocks = any(balance.block != "all" for balance in balances)
    return "\n".join([*notes.values(), *([_BLOCKS] if has_blocks else [])])


def _pair(budget: "Budget") -> dict[str, float | None]:
    return {"epsilon": budget.epsilon if math.isfinite(budget.epsilon) else None, "delta": budget.delta}


def _text(value: float) -> str:
    return f"{value:,.6g}"

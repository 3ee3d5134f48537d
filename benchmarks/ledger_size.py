"""Benchmark of waiting times on an old ledger of a million runs: `python -m benchmarks.ledger_size`.

It has a thousand populations of ten blocks each; every run is reserved in a block and settled. The rows are generated
and sealed here, since a million reservations one by one would take hours. Then a home that has verified them reserves,
shows and forecasts. Everything is verified once, and the memory for it is measured.
"""

import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Choice, Entry, Head, Ledger, Spread, forecast
from algorithms.privacy.ledger.composition import RowNotes
from algorithms.privacy.ledger.rows import EMPTY_HEAD, Draft, seal
from algorithms.privacy.ledger.store import open_store
from benchmarks.postgres import server

_COST = Budget(0.001, 1e-12)
_TERMS: RowNotes = {"public": False, "composition": {"kind": "basic"}, "blocks_per_person": 1, "bound": {}}
_TRIES = 200


def main(
    runs: Annotated[int, typer.Option(help="In the ledger.")] = 1_000_000,
    populations: Annotated[int, typer.Option(help="Of ten blocks each.")] = 1_000,
    sqlite: Annotated[bool, typer.Option("--sqlite", help="A file in place of a server.")] = False,
) -> None:
    """Measure a ledger of this size."""
    with tempfile.TemporaryDirectory() as folder, server() as postgres:
        url = f"sqlite:///{folder}/ledger.sqlite" if sqlite or postgres is None else postgres
        rows, seconds = _time(lambda: open_store(url).fill(lambda: _rows(runs, populations)))
        table = Table(
            "what", "seconds", "", title=f"{url.split(':')[0]}, {rows} rows, {populations} populations"
        )
        table.add_row("restore", f"{seconds:.0f}", f"{rows / seconds:.0f} rows a second")
        ledger, seconds = _time(lambda: Ledger.open(url))
        table.add_row(
            "first opening, all rows verified", f"{seconds:.0f}", f"{rows / seconds:.0f} rows a second"
        )
        head = ledger.last_verified()
        for name, waits in _waits(url, head).items():
            table.add_row(name, f"{statistics.median(waits):.4f}", f"{max(waits):.4f} at most")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        verified, seconds = _time(ledger.verify)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        words = f"{verified.read / seconds:.0f} rows a second, {grown:.0f} MB more"
        table.add_row("verify: chain and balances", f"{seconds:.0f}", words)
        _, seconds = _time(lambda: ledger.verify(since=verified.checkpoint))
        table.add_row("verify from a checkpoint", f"{seconds:.1f}", "")
        Console(width=110).print(table)


def _waits(url: str, head: Head) -> dict[str, list[float]]:
    ledger = Ledger.open(url, verified=head)
    blocks: list[float] = []
    for number in range(_TRIES):
        where = f"population {number % 7}"
        blocks.append(
            _time(
                lambda n=number, p=where: ledger.reserve(
                    f"new {n}", p, _COST, events=[], notes={}, blocks=["block 3"]
                )
            )[1]
        )
    opened = [_time(lambda: Ledger.open(url, verified=head))[1] for _ in range(20)]
    shown = [_time(lambda: ledger.balances("population 5"))[1] for _ in range(20)]
    spread, least = Spread("equal", planned=52), (0.0, 0.0)
    played = [
        _time(lambda: forecast(ledger.blocks("population 5"), Choice("all"), spread, smallest=least))[1]
        for _ in range(5)
    ]
    return {
        "opening it again": opened,
        "reserve": blocks,
        "show a population": shown,
        "forecast for a population": played,
    }


def _rows(runs: int, populations: int) -> Iterator[Entry]:
    head = EMPTY_HEAD
    for draft in _drafts(runs, populations):
        entry = seal(draft, after=head, written_at="2026-01-01T00:00:00+00:00", written_by="benchmark")
        head = entry.head
        yield entry


def _drafts(runs: int, populations: int) -> Iterator[Draft]:
    cap = Budget(1e6, 1e-3)
    for number in range(populations):
        name = f"population {number}"
        yield Draft("population", name, cap, notes=_TERMS)
        for block in range(10):
            yield Draft("cap", name, cap, notes={"declared": True}, block=f"block {block}")
    for number in range(runs):
        where: dict[str, Any] = {"block": f"block {number // populations % 10}"}
        population = f"population {number % populations}"
        yield Draft("reserve", population, _COST, f"run {number}", **where)
        yield Draft("settle", population, _COST, f"run {number}", **where)


def _time(act: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    result = act()
    return result, time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)

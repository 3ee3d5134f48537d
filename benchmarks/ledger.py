"""Benchmark of a ledger under contention: `python -m benchmarks.ledger`.

Eight processes share one ledger for two minutes, in SQLite and in PostgreSQL. First all race for a small population,
whose cap must be spent exactly. Then each reserves runs for a minute on one or two of four blocks of a population that
can pay for all of them. For another minute it reserves runs and settles or forfeits each.
"""

import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from algorithms.errors import BudgetRefusedError
from algorithms.privacy.accounting import Budget, EventRow
from algorithms.privacy.ledger import Ledger
from benchmarks.postgres import server

PROCESSES, SMALL = 8, 40
_COST, _CHEAPER = Budget(0.1, 1e-9), Budget(0.05, 1e-9)
_BLOCKS = ("first", "second", "third", "fourth")
_EVENTS: list[EventRow] = [{"event": {"type": "GaussianDpEvent", "noise_multiplier": 20.0}, "count": 1}]


@dataclass(frozen=True)
class Work:
    """What a process did. won: runs on the small population. On the large one, reserved: runs that it only reserved;
    ended: runs that it also ended; rows: rows that it wrote. longest: its longest wait.
    """

    won: int
    reserved: int
    ended: int
    rows: int
    longest: float


def main(
    seconds: Annotated[
        float, typer.Option(help="How long the processes reserve, and reserve and end.")
    ] = 60.0,
    processes: Annotated[int, typer.Option(help="How many.")] = PROCESSES,
) -> None:
    """Measure runs per second under contention; the exit status is 1 if a budget or a row was lost."""
    rates = ("reserved/s", "reserved and ended/s")
    table = Table("ledger", "processes", *rates, "longest wait, s", "rows", "small cap", "sound")
    sound = True
    with tempfile.TemporaryDirectory() as folder, server() as postgres:
        urls = {"SQLite": f"sqlite:///{folder}/ledger.sqlite", "PostgreSQL": postgres}
        for name, url in urls.items():
            if url is None:
                continue
            works = _measure(url, processes, seconds)
            problems = _problems(url, works)
            sound = sound and not problems
            reserved, ended = (
                sum(counts) / seconds for counts in zip(*((w.reserved, w.ended) for w in works), strict=True)
            )
            longest = max(work.longest for work in works)
            row = (f"{reserved:.1f}", f"{ended:.1f}", f"{longest:.2f}", str(len(Ledger.open(url).history())))
            won = f"{sum(work.won for work in works)} of {SMALL}"
            table.add_row(name, str(processes), *row, won, "; ".join(problems) or "yes")
    Console(width=110).print(table)
    raise typer.Exit(0 if sound else 1)


def _measure(url: str, processes: int, seconds: float) -> list[Work]:
    ledger = Ledger.open(url)
    ledger.declare("small", Budget(SMALL * _COST.epsilon, 1.0), public=False)
    ledger.declare("large", Budget(1e9, 1.0), public=False)
    for block in _BLOCKS:
        ledger.declare_block("large", block)
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=_work, args=(url, number, seconds, start, results.put))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    works = [results.get(timeout=2 * seconds + 300) for _ in workers]
    for worker in workers:
        worker.join()
    return works


def _work(url: str, number: int, seconds: float, start: Barrier, report: Callable[[Work], None]) -> None:
    draw, ledger = random.Random(number), Ledger.open(url)
    start.wait()
    won = _race(ledger, number)
    counts, rows, longest = [0, 0], 0, 0.0
    for phase in range(2):
        start.wait()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            run_id, blocks = f"{number}-{phase}-{counts[phase]}", draw.sample(_BLOCKS, draw.choice((1, 2)))
            began = time.monotonic()
            ledger.reserve(run_id, "large", _COST, events=_EVENTS, notes={}, blocks=blocks)
            longest = max(longest, time.monotonic() - began)
            if phase and draw.random() < 0.9:
                ledger.settle(run_id, _CHEAPER, events=_EVENTS)
            elif phase:
                ledger.forfeit(run_id)
            counts[phase] += 1
            rows += (phase + 1) * len(blocks)
    report(Work(won, counts[0], counts[1], rows, longest))


def _race(ledger: Ledger, number: int) -> int:
    """How many runs this process reserves before the small population refuses."""
    won = 0
    while True:
        try:
            ledger.reserve(f"small-{number}-{won}", "small", _COST, events=_EVENTS, notes={})
        except BudgetRefusedError:
            return won
        won += 1


def _problems(url: str, works: list[Work]) -> list[str]:
    """The problems found: a cap not spent exactly, or missing rows. Raises LedgerBrokenError for a broken chain."""
    ledger, problems = Ledger.open(url), []
    won = sum(work.won for work in works)
    if won != SMALL or ledger.balance("small").remaining.epsilon > 0:
        problems.append(f"{won} runs were let in where {SMALL} fit")
    written = 2 + len(_BLOCKS) + won + sum(work.rows for work in works)
    if len(ledger.history()) != written:
        problems.append(f"{len(ledger.history())} rows are there of {written} that were written")
    return problems


if __name__ == "__main__":
    typer.run(main)

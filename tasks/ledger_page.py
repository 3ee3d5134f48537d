"""The page of the ledger: caps, what was spent when and by which runs, and what is left.

All of it comes from the ledger, so nothing on the page is about a record. The page is self-contained.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import WHOLE_POPULATION, Balance, Entry, Ledger, settlement
from tasks.reporting import environment

_MAX_POINTS, _MAX_RUNS = 60, 200
_WIDTH, _HEIGHT, _MARGIN = 640.0, 180.0, 8.0


@dataclass(frozen=True)
class _AccountRow:
    """A population on the page.

    whole, blocks: the balances. runs: the newest, by what is said of them. more_runs: how many others there are. line:
    see `_line`. forecast: see `_forecast`.
    """

    name: str
    whole: Balance
    blocks: Sequence[Balance]
    runs: Sequence[Mapping[str, str]]
    more_runs: int
    line: Mapping[str, object] | None
    forecast: str


def page(ledger: Ledger) -> str:
    """Make the page; raises LedgerBrokenError if the ledger's chain does not hold."""
    ledger.verify()
    history = ledger.history()
    accounts = [
        _account(ledger, name, [row for row in history if row.population == name])
        for name in ledger.populations()
    ]
    accounts.sort(key=lambda account: account.whole.public)  # private populations first
    templates = environment(below=Path(__file__).parent)
    templates.filters |= {"epsilon": _number, "share": _share}
    as_of = history[-1].written_at[:16].replace("T", " ") if history else None
    return templates.get_template("ledger_page.html.j2").render(
        accounts=accounts, as_of=as_of, rows=len(history), head=ledger.head()
    )


def _account(ledger: Ledger, name: str, rows: Sequence[Entry]) -> _AccountRow:
    reserved: dict[str, list[Entry]] = {}
    for row in rows:
        if row.kind == "reserve" and row.run_id is not None:
            reserved.setdefault(row.run_id, []).append(row)
    newest = list(reversed(reserved.items()))
    return _AccountRow(
        name=name,
        whole=ledger.balance(name),
        blocks=[
            ledger.balance(name, block.name)
            for block in ledger.blocks(name)
            if block.name != WHOLE_POPULATION
        ],
        runs=[_past(ledger, run_id, of_run) for run_id, of_run in newest[:_MAX_RUNS]],
        more_runs=max(0, len(newest) - _MAX_RUNS),
        line=_line(ledger, name, rows),
        forecast=_forecast(ledger, name, list(reserved.values())),
    )


def _past(ledger: Ledger, run_id: str, rows: Sequence[Entry]) -> dict[str, str]:
    """A run on the page: when it was reserved, what it was, its status and its cost."""
    first, notes = rows[0], json.loads(rows[0].about)
    blocks = [row.block for row in rows if row.block != WHOLE_POPULATION]
    what = ", ".join(str(notes[key]) for key in ("algorithm", "dataset", "retraining") if notes.get(key))
    return {
        "when": first.written_at[:16].replace("T", " "),
        "run_id": run_id,
        "what": what or "unnamed",
        "blocks": ", ".join(blocks) if len(blocks) <= 3 else f"{blocks[0]} ... {blocks[-1]} ({len(blocks)})",
        "status": ledger.status(run_id) or "",
        "cost": _number(first.budget.epsilon),
        "signer": str(notes.get("card_key", ""))[:8],
    }


def _forecast(ledger: Ledger, name: str, runs: Sequence[Sequence[Entry]]) -> str:
    if not runs:
        return "There has been no run yet."
    last = runs[-1][0]
    cost, events = Budget(last.budget.epsilon, last.delta), json.loads(last.events)
    adjacency = json.loads(last.about).get("adjacency", "ADD_OR_REMOVE_ONE")
    fits = ledger.affordable_runs(name, cost, events=events, adjacency=adjacency)
    if fits is None:
        return "Any number of runs like the last one fit, because it cost nothing."
    after = ledger.spent_if_repeated(name, 10)
    assert after is not None  # there was a run
    where = " into every block that is not retired" if last.block != WHOLE_POPULATION else ""
    later = f" After ten more like it, epsilon {_number(after.epsilon)} would be spent." if fits >= 10 else ""
    return f"{fits:,} more {'run' if fits == 1 else 'runs'} like the last one fit{where}.{later}"


def _line(ledger: Ledger, name: str, rows: Sequence[Entry]) -> dict[str, object] | None:
    """Spending over time, as the points of an SVG line; None for fewer than two runs.

    cap: height of the cap, or None if it is too far above the line. top: label of the top of the axis. first, last:
    dates of the first and the last point.
    """
    settled = list(
        dict.fromkeys(row.run_id for row in rows if row.kind == "settle" and row.run_id is not None)
    )
    if len(settled) < 2:
        return None
    chosen = settled[:: math.ceil(len(settled) / _MAX_POINTS)]
    chosen += [settled[-1]] if chosen[-1] != settled[-1] else []
    pasts = [settlement(ledger, name, run_id) for run_id in chosen]
    spent = [
        max([past.balance, *past.charged_balances], key=lambda entry: entry.spent.epsilon).spent.epsilon
        for past in pasts
    ]
    cap = ledger.balance(name).cap.epsilon
    is_near = cap <= 4 * max(spent)  # below a cap that is far away the line would lie flat
    top = cap if is_near else 1.1 * max(spent)
    if not math.isfinite(top) or top <= 0:
        return None
    wide, high = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN

    def point_at(number: int, value: float) -> tuple[float, float]:
        return _MARGIN + wide * number / max(1, len(spent) - 1), _MARGIN + high * (1 - value / top)

    # Stairs: what is spent stays the same until the next run.
    points: list[tuple[float, float]] = []
    for number, value in enumerate(spent):
        across, down = point_at(number, value)
        points += [(across, points[-1][1])] if points else []
        points.append((across, down))
    when = {row.run_id: row.written_at[:10] for row in rows if row.kind == "settle"}
    return {
        "points": " ".join(f"{across:.1f},{down:.1f}" for across, down in points),
        "cap": point_at(0, cap)[1] if is_near else None,
        "top": _number(top),
        "first": when[chosen[0]],
        "last": when[chosen[-1]],
    }


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "infinite"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _share(balance: Balance) -> float:
    """The spent and reserved share of the cap, from 0 to 100."""
    cap = balance.cap.epsilon
    gone = balance.spent.epsilon + balance.reserved.epsilon
    return min(100.0, 100 * gone / cap) if cap and math.isfinite(gone) else 100.0

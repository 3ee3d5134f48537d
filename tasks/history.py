"""What was before a run: its population's blocks by the ledger, and the earlier periods of its retraining.

Everything is as it was when the run had settled, so that a report made later says the same. Nothing here is about
private records but numbers that were released and paid for; held-out records are public.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from algorithms.privacy.ledger import WHOLE_POPULATION, Ledger, Settlement, settlement
from tasks.retraining.registry import Registry
from tasks.retraining.state import State, States

BLOCKS = ("block", "spent_epsilon", "spent_delta", "cap_epsilon", "cap_delta", "retired")
RETRAININGS = ("period", "outcome", "run_id", "epsilon", "accuracy", "blocks")
THIS_RUN = "this run"
"""The outcome of the run itself: it is compared with the model that serves after its report is made."""


@dataclass(frozen=True)
class History:
    """blocks: columns block, spent_epsilon, spent_delta, cap_epsilon, cap_delta, retired; a population's, in order.

    retrainings: columns period, outcome, run_id, epsilon, accuracy, blocks (a text); the oldest first, this run last.
    epsilon is what a run counts for, accuracy held-out and NaN where there is no model. Either may be empty.
    """

    blocks: pd.DataFrame
    retrainings: pd.DataFrame


def nothing() -> History:
    """The history of a run on a whole population."""
    return History(_frame([], BLOCKS), _frame([], RETRAININGS))


def is_on_blocks(receipt: Mapping[str, Any]) -> bool:
    """Whether a run was charged to blocks; all others have no history, and need no ledger to say so."""
    return bool(receipt.get("blocks", [WHOLE_POPULATION]) != [WHOLE_POPULATION])


def history(
    receipt: Mapping[str, Any], metrics: Mapping[str, Any], *, ledger: Ledger, home: Path, root: Path
) -> History:
    """The history of a finished run on blocks.

    receipt, metrics: the run's. home: where states of retrainings are kept. root: the checkout, with its models. A
    ledger that does not know the run leaves the blocks that the receipt names, and no retrainings.
    """
    if ledger.status(receipt["run_id"]) != "settled":
        return History(_blocks_of_receipt(receipt), nothing().retrainings)
    past = settlement(ledger, receipt["population"], receipt["run_id"])
    rows = [
        (b.block, b.spent.epsilon, b.spent.delta, b.cap.epsilon, b.cap.delta, b.retired) for b in past.blocks
    ]
    return History(_frame(rows, BLOCKS), _retrainings(receipt, metrics, past, home, root))


def _blocks_of_receipt(receipt: Mapping[str, Any]) -> pd.DataFrame:
    rows = [
        (row["name"], *(row[part][name] for part in ("spent", "cap") for name in ("epsilon", "delta")), False)
        for row in receipt["ledger"].get("blocks", ())
    ]
    return _frame(rows, BLOCKS)


def _retrainings(
    receipt: Mapping[str, Any], metrics: Mapping[str, Any], past: Settlement, home: Path, root: Path
) -> pd.DataFrame:
    if past.run.retraining is None:
        return nothing().retrainings
    name, _, period = past.run.retraining.rpartition(" ")
    registry = Registry(root / "models" / name)
    # In the order in which they began: names of periods of several lengths do not sort by time.
    earlier = itertools.takewhile(
        lambda state: state.period != period, States(home / "retrainings" / name).all()
    )
    rows = [_row(state, past, registry) for state in earlier]
    this = (receipt["run_id"], metrics["epsilon"], metrics["test_accuracy"], _words(receipt["blocks"]))
    return _frame([*rows, (period, THIS_RUN, *this)], RETRAININGS)


def _row(state: State, past: Settlement, registry: Registry) -> tuple[Any, ...]:
    """An earlier period. A run without a model counts for what the ledger charged; without a run nothing was."""
    found = registry.metrics(state.run_id) if state.run_id else {}
    run = past.books.runs.get(state.run_id or "")
    epsilon = found.get("epsilon", run.charged.epsilon if run else 0.0)
    accuracy = found.get("test_accuracy")
    return state.period, state.kind, state.run_id, epsilon, accuracy, _words(state.blocks)


def _words(blocks: Sequence[str]) -> str:
    """Blocks as a table shows them: all of a few, else the first, the last and how many."""
    return ", ".join(blocks) if len(blocks) < 4 else f"{blocks[0]} to {blocks[-1]} ({len(blocks)})"


def _frame(rows: Sequence[tuple[Any, ...]], columns: Sequence[str]) -> pd.DataFrame:
    """A table; a number that there is not, or that is infinite, is NaN."""
    table = pd.DataFrame(rows, columns=list(columns))
    numbers = [name for name in columns if name.endswith(("epsilon", "delta", "accuracy"))]
    return table.assign(**{name: pd.to_numeric(table[name]).replace(math.inf, math.nan) for name in numbers})

"""A ledger in a folder, and runs that are reserved in it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Ledger

CAP, ONE = Budget(3.0, 1e-4), Budget(1.0, 1e-5)


def opened(folder: Path | str) -> Ledger:
    return Ledger.open(f"sqlite:///{folder}/ledger.sqlite")


def declared(folder: Path | str, *blocks: str, cap: Budget = CAP, **terms: Any) -> Ledger:
    """A ledger with the private population `patients`, in these blocks."""
    ledger = opened(folder)
    ledger.declare("patients", cap, public=False, **terms)
    for block in blocks:
        ledger.declare_block("patients", block)
    return ledger


def reserve(
    ledger: Ledger,
    run_id: str,
    *blocks: str,
    cost: Budget = ONE,
    population: str = "patients",
    events: Sequence[Mapping[str, Any]] = (),
    **notes: str,
) -> None:
    """Reserves a run, by default of the whole population."""
    ledger.reserve(run_id, population, cost, events=events, notes=notes, blocks=blocks or ("all",))

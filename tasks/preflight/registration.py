"""Registering a population in the ledger before its first run, and the plan of that run, which may decide its terms."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.errors import RefusedError
from algorithms.privacy.ledger import Ledger
from data import dataset_info
from data.card import DataCard, data_card
from tasks.config import database_url, params
from tasks.runs.ledger import declare

if TYPE_CHECKING:
    from algorithms.core.plan import Plan


def register_card(ledger: Ledger, root: Path, dataset: str | None = None) -> str:
    """Register the population of a data card before its first run, as that run would do; returns the population's name.

    dataset: the name of the card; None for that of params.yaml. Raises RefusedError, DataRefusedError or
    ParamsRefusedError if the card, the blocks or the ledger cannot be read, and for a population of another kind.
    """
    from data.reading import block_names  # pyarrow, which `check_terms` does without

    settings = params.load(root / "params.yaml", reads=("data",))
    name = dataset or settings.data.dataset
    card = data_card(name, root / "data" / "cards")
    transform = settings.data.transform if name == settings.data.dataset else "none"
    there_are = () if card.blocks is None else block_names(card, root=root, url=database_url(card.blocks))
    info = replace(dataset_info(card, transform), blocks=there_are)
    declare(ledger, info, plan=lambda: planned_run(root, card))
    return card.population


def planned_run(root: Path, card: DataCard) -> "Plan":
    """The plan of the run that params.yaml describes; raises RefusedError if it is about another data set."""
    from tasks.calibrate import READS, plan_for  # imports PyTorch, which the ledger's commands do without
    from tasks.prepare import info_of

    settings = params.load(root / "params.yaml", reads=("data", *READS))
    if settings.data.dataset != card.name:
        raise RefusedError(
            "the card of {dataset!r} plans {runs} runs, and how they add up follows from the first,"
            " but params.yaml is about {other!r}; plan a run on {dataset!r} there, or set"
            " composition.order in the card.",
            code="bad_keys",
            dataset=card.name,
            runs=card.composition.runs,
            other=settings.data.dataset,
            keys=("composition.runs", "data.dataset"),
        )
    return plan_for(settings, info_of(card, settings.data))

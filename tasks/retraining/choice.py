"""Decide the next retraining: which blocks exist, which it uses, and the epsilon that all of them can pay.

A block's payment is in the units of its composition, and is converted to an epsilon for the plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import takewhile
from math import exp, inf, log
from pathlib import Path
from typing import Any

from algorithms.core.method import Plan
from algorithms.core.receipt import reserved_events
from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import (
    Balance,
    Block,
    Ledger,
    NotAllowedError,
    Price,
    exhausted,
    forecast,
    next_retraining,
)
from algorithms.privacy.ledger.books import floored
from data import public_description
from data.card import DataCard, data_card
from data.reading import block_names
from tasks.calibrate import plan_for
from tasks.config.environment import database_url
from tasks.config.overrides import Request, Revision, revise
from tasks.config.params import ParamsRefusedError
from tasks.retraining.registry import Registry
from tasks.retraining.settings import Retraining
from tasks.runs.encoders import public_of
from tasks.runs.ledger import declare

_CLOSE, _MOST_PLANS = 0.01, 12


def epsilon_for(
    price: Price, balance: Balance, blocks: int, delta: float, plan: Callable[[float], Plan]
) -> tuple[float, float]:
    """The epsilon and delta of the run that costs each of its blocks at most a price; under zCDP and Rényi within 1 %.

    price: in the units of the population's composition. blocks: how many blocks the run reads. delta: the requested
    delta. plan: makes the plan for an epsilon. Raises RefusedError if no run is that cheap.
    """
    together = min(balance.blocks_per_person, blocks)
    each = price[0] / balance.blocks_per_person
    if balance.composition.kind == "basic":
        epsilon = floored(each)
        cost = balance.composition.cost(Budget(epsilon, delta), together, balance.blocks_per_person)
        if epsilon <= 0 or cost[1] > Fraction(price[1]):
            raise RefusedError(
                f"a retraining may cost epsilon={price[0]:g}, delta={price[1]:g}, which a delta of {delta:g} exceeds;"
                " set delta in retrain.yaml lower."
            )
        return epsilon, delta

    def share(epsilon: float) -> float:
        made = plan(epsilon)
        cost = balance.composition.price(made.cost, reserved_events(made), made.adjacency, together)
        return inf if cost is None else cost / each

    highest = balance.composition.shown((Fraction(each),), delta).epsilon
    return _largest(share, highest), delta


def _largest(share: Callable[[float], float], highest: float) -> float:
    """An epsilon whose share is at most 1 and, if possible, at least 0.99; the share increases with epsilon.

    Found by interpolation between the logarithms of an epsilon that fits and one that does not.
    """
    fits, exceeds = (0.0, 0.0), (0.0, 0.0)
    epsilon = floored(highest)
    for _ in range(_MOST_PLANS):
        found = share(epsilon)
        if 1 - _CLOSE <= found <= 1:
            return epsilon
        if found > 1:
            exceeds = epsilon, found
        else:
            fits = epsilon, found
        epsilon = floored(_between(fits, exceeds))
    if fits[0] <= 0:
        raise RefusedError("no run is as cheap as the blocks can pay; raise smallest in retrain.yaml.")
    return fits[0]


def _between(fits: tuple[float, float], exceeds: tuple[float, float]) -> float:
    """The next epsilon to try. fits, exceeds: an epsilon and its share, or zeros if none is known yet."""
    if not fits[0]:
        return exceeds[0] * max(0.1, min(0.95, 1 / exceeds[1]))
    if not exceeds[0]:
        return fits[0] * max(1.05, 1 / max(fits[1], 0.1))
    slope = (log(exceeds[0]) - log(fits[0])) / (log(exceeds[1]) - log(fits[1]))
    return fits[0] * exp(slope * (log(1 - _CLOSE / 2) - log(fits[1])))


class TooFewBlocksError(RefusedError):
    """No retraining is due: too few blocks can pay for one, or none of them is new."""


@dataclass(frozen=True)
class Next:
    """The next retraining: its blocks, its epsilon, and the change to params.yaml."""

    blocks: tuple[str, ...]
    epsilon: float
    revision: Revision


def blocks_here(settings: Retraining, ledger: Ledger, root: Path) -> tuple[DataCard, list[Block]]:
    """The data card, and the ledger's state of the blocks that can be read now; a new population is declared.

    A new block is declared by the first run that reads it, unless it holds what another does. Raises DataRefusedError
    if the source cannot be read, RefusedError if the population is of another kind.
    """
    card = data_card(settings.dataset, root / "data" / "cards")
    there_are = block_names(card, root=root, url=database_url(card.blocks))
    declare(ledger, public_description(card))
    return card, [block for block in ledger.blocks(card.population, there_are) if block.name in there_are]


def retire(settings: Retraining, ledger: Ledger, card: DataCard, standing: list[Block]) -> tuple[str, ...]:
    """Retire the blocks that were used and whose next payment would be too small to be useful; returns their names.

    If the database allows only the owner to retire, nothing is retired; such a block pays for no retraining anyway.
    """
    used = [block for block in standing if block.runs]
    names = exhausted(used, _smallest(settings, standing), settings.spread) if used else ()
    try:
        for name in names:
            ledger.retire_block(card.population, name)
    except NotAllowedError:
        return ()
    return names


def how_many_left(settings: Retraining, standing: list[Block]) -> int:
    """How many more retrainings the caps of these blocks allow without new blocks; at most `warn_below`."""
    if not standing or not settings.warn_below:
        return 0
    play = forecast(
        standing,
        settings.blocks,
        settings.spread,
        smallest=_smallest(settings, standing),
        horizon=settings.warn_below,
    )
    return len(play.retrainings)


def next_of(
    settings: Retraining, ledger: Ledger, *, root: Path, registry: Registry, last: tuple[str, ...] | None
) -> Next:
    """Decide the retraining of a period that is due; nothing is charged.

    last: the blocks of the last retraining. Raises TooFewBlocksError if nothing is due, and what `revise`, `declare`
    and `plan_for` raise.
    """
    card, standing = blocks_here(settings, ledger, root)
    retire(settings, ledger, card, standing)
    _, standing = blocks_here(settings, ledger, root)
    if not standing:
        raise TooFewBlocksError("there is no block yet, so nothing is trained.")
    try:
        used, price = next_retraining(
            settings.blocks, settings.spread, standing, smallest=_smallest(settings, standing)
        )
    except RefusedError as refusal:
        raise TooFewBlocksError(str(refusal)) from None
    if last is not None and set(used) <= set(last):
        raise TooFewBlocksError("none of the blocks that can pay is new, so the model that serves stays.")
    older = takewhile(lambda block: block.name not in used, standing)  # before those that the run declares
    declare(ledger, replace(public_description(card), blocks=tuple(block.name for block in older)))
    own: dict[str, Any] = {"data.blocks": list(used)}
    if settings.warm_start and registry.serving is not None:
        own["model.start"] = str((registry.serving / "model.safetensors").relative_to(root))
    asked = revise(root, Request(delta=settings.delta, settings=own)).params  # before epsilon is known
    if asked.data.dataset != settings.dataset:
        raise ParamsRefusedError(
            f"params.yaml is about {asked.data.dataset!r} and the retraining about {settings.dataset!r}; use a checkout"
            f" for each, or `epsilonflow run --dataset {settings.dataset}` first."
        )
    public, privacy = replace(public_of(card, asked.data), blocks=used), asked.privacy

    def plan(epsilon: float) -> Plan:
        return plan_for(asked.with_epsilon(epsilon), public)

    balance = ledger.balance(public.population, "all")
    epsilon, delta = epsilon_for(price, balance, len(used), privacy.delta, plan)
    return Next(used, epsilon, revise(root, Request(epsilon=epsilon, delta=delta, settings=own)))


def _smallest(settings: Retraining, standing: list[Block]) -> Price:
    return tuple(settings.smallest * min(parts) for parts in zip(*(b.limit for b in standing), strict=True))

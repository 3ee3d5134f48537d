"""How many more retrainings the caps allow, by playing the policies against where the blocks stand now."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from algorithms.privacy.errors import Refused
from algorithms.privacy.ledger_policy import (
    Block,
    Choice,
    Price,
    Spread,
    choose_blocks,
    exhausted,
    next_retraining,
)

HORIZON = 1000
"""Retrainings after which a forecast that has no end is cut off."""


@dataclass(frozen=True)
class Retraining:
    """One that the caps allow. number: 1 is the next one. retires: the blocks that are exhausted after it."""

    number: int
    blocks: tuple[str, ...]
    price: Price
    retires: tuple[str, ...]


@dataclass(frozen=True)
class Forecast:
    """What the caps allow. end: why there is no further retraining; None where the forecast was cut off."""

    retrainings: tuple[Retraining, ...]
    end: str | None


def forecast(
    blocks: Sequence[Block],
    choice: Choice,
    pricing: Spread | Price,
    *,
    smallest: Price,
    arriving: Price | None = None,
    horizon: int = HORIZON,
) -> Forecast:
    """The retrainings to come, each charged in full.

    pricing: how budgets are spread, or the price of every retraining. smallest: the least price that is of use; a
    block that cannot pay it retires. arriving: the limit of the new block that comes before each further retraining,
    None where none comes. horizon: where to stop.
    """
    standing = list(blocks)
    done: list[Retraining] = []
    for number in range(1, horizon + 1):
        if arriving is not None and number > 1:
            standing.append(Block(f"new {number - 1}", arriving, arriving))
        try:
            used, price = _next(choice, pricing, standing, smallest)
        except Refused as end:
            return Forecast(tuple(done), str(end))
        standing = [_charged(block, price) if block.name in used else block for block in standing]
        retired = exhausted(standing, smallest, pricing if isinstance(pricing, Spread) else None)
        standing = [replace(block, retired=block.retired or block.name in retired) for block in standing]
        done.append(Retraining(number, used, price, retired))
    return Forecast(tuple(done), None)


def _next(
    choice: Choice, pricing: Spread | Price, blocks: Sequence[Block], smallest: Price
) -> tuple[tuple[str, ...], Price]:
    if isinstance(pricing, Spread):
        return next_retraining(choice, pricing, blocks, smallest=smallest)
    return choose_blocks(choice, blocks, pricing), pricing


def _charged(block: Block, price: Price) -> Block:
    left = tuple(max(0.0, have - part) for have, part in zip(block.left, price, strict=True))
    return replace(block, left=left, runs=block.runs + 1)

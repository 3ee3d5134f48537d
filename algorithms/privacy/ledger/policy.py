"""Which blocks a retraining uses and what it may cost: pure functions of where the blocks stand.

A price is a share of what a block has left, so a policy asks the books and remembers nothing: after a run that cost
less than planned, or a cap that was changed, the next price follows from what is there. A forecast plays the policies
against where the blocks stand now.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from algorithms.errors import RefusedError

Price: TypeAlias = tuple[float, ...]
Choosing = Literal["last", "all", "newest"]
Spreading = Literal["equal", "front-loaded", "geometric"]
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Block:
    """Where a block stands, in the units of its population's composition.

    limit, left: what its cap allows, and what of that is not charged. runs: how many were ever reserved in it.
    """

    name: str
    limit: Price
    left: Price
    runs: int = 0
    retired: bool = False

    def affords(self, price: Price) -> bool:
        """Whether the price fits, by the ledger's own rounding."""
        rows = zip(price, self.left, self.limit, strict=True)
        return not self.retired and all(part <= left + limit * _ROUNDING for part, left, limit in rows)


@dataclass(frozen=True)
class Choice:
    """Which of the blocks, in the order of their declaration, a retraining uses.

    "last": those of the newest `window` that can pay. "all": all that can pay. "newest": the newest that can pay and
    no other, so that a block is emptied before an older one is taken. at_least: fewer blocks are too few.
    Raises RefusedError for a window of another policy, and for numbers below 1.
    """

    policy: Choosing
    window: int | None = None
    at_least: int = 1

    def __post_init__(self) -> None:
        if (self.policy == "last") != (self.window is not None):
            raise RefusedError(
                f"the policy {self.policy!r} with the window {self.window}: only 'last' has one."
            )
        if self.at_least < 1 or (self.window is not None and self.window < self.at_least):
            raise RefusedError(
                f"at least {self.at_least} of the last {self.window or 'blocks'} cannot be had; at least 1 block is"
                " needed, and the window must hold as many as are needed."
            )


@dataclass(frozen=True)
class Spread:
    """How a block's budget is spread over the retrainings that use it.

    "equal": the same price `planned` times. "front-loaded": prices that fall in equal steps to the last of `planned`,
    which pays one step. "geometric": for ever, each time the `fraction` of what is left, so the budget never ends.
    Raises RefusedError where the number that the policy needs is missing or out of range, or another one is given.
    """

    policy: Spreading
    planned: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        for_ever = self.policy == "geometric"
        given = (self.planned is None, self.fraction is None)
        if given != (for_ever, not for_ever):
            raise RefusedError(
                f"the spread {self.policy!r} needs {'a fraction' if for_ever else 'planned'} alone."
            )
        is_share = self.fraction is not None and 0 < self.fraction < 1
        if not (is_share if for_ever else (self.planned or 0) >= 1):
            raise RefusedError("planned retrainings are at least 1, and a fraction lies above 0 and below 1.")

    def price(self, left: Price, *, done: int) -> Price:
        """What the next retraining may cost; nothing once all that were planned are done.

        left: what is not spent. done: how many retrainings are behind.
        """
        share = self.fraction or self._share((self.planned or 0) - done)
        return tuple(share * part for part in left)

    def _share(self, coming: int) -> float:
        if coming < 1:
            return 0.0
        return 1 / coming if self.policy == "equal" else 2 / (coming + 1)


def choose_blocks(choice: Choice, blocks: Sequence[Block], price: Price) -> tuple[str, ...]:
    """The names of the blocks that a retraining of this price uses, in order.

    blocks: in the order of their declaration. Raises RefusedError, and nothing is reserved, where too few can pay.
    """
    return _chosen(choice, blocks, lambda block: block.affords(price))


def next_retraining(
    choice: Choice, spread: Spread, blocks: Sequence[Block], *, smallest: Price
) -> tuple[tuple[str, ...], Price]:
    """The blocks that the next retraining uses, and its price: the least that one of them has planned for it.

    A block whose own share is below `smallest` takes no part. Raises RefusedError where too few blocks are left.
    """
    shares = {block.name: spread.price(block.left, done=block.runs) for block in blocks}
    used = _chosen(choice, blocks, lambda block: _covers(shares[block.name], smallest))
    return used, tuple(map(min, zip(*(shares[name] for name in used), strict=True)))


def exhausted(blocks: Sequence[Block], smallest: Price, spread: Spread | None = None) -> tuple[str, ...]:
    """The blocks to retire: those that cannot pay the smallest price that is of use.

    spread: where prices are shares of what is left, a block retires when its next share is below the smallest.
    """

    def can_pay(block: Block) -> bool:
        if spread is None:
            return block.affords(smallest)
        return _covers(spread.price(block.left, done=block.runs), smallest)

    return tuple(block.name for block in blocks if not block.retired and not can_pay(block))


def _chosen(choice: Choice, blocks: Sequence[Block], pays: Callable[[Block], bool]) -> tuple[str, ...]:
    living = [block for block in blocks if not block.retired]
    seen = living[-choice.window :] if choice.window else living
    able = [block.name for block in seen if pays(block)]
    if not living:
        raise RefusedError(
            "every block has retired, so this retraining is skipped and the model of the last one stays; add blocks."
        )
    if len(able) < choice.at_least:
        raise RefusedError(
            f"{len(able)} of {len(living)} blocks can pay for this retraining and {choice.at_least} are needed, so it"
            " is skipped and the model of the last one stays; wait for new blocks or plan a cheaper retraining."
        )
    return tuple(able[-choice.at_least :] if choice.policy == "newest" else able)


def _covers(share: Price, smallest: Price) -> bool:
    enough = all(part >= least * (1 - _ROUNDING) for part, least in zip(share, smallest, strict=True))
    return enough and any(part > 0 and math.isfinite(part) for part in share)


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
        except RefusedError as end:
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

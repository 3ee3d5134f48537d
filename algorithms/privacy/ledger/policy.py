"""Which blocks a retraining uses and what it may cost: pure functions of the blocks' balances.

A price is a share of what a block has left, so a policy has no state: after a run that cost less than planned, or a
changed cap, the next price follows from the present balance. A forecast applies the policies to the present balances.
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
class BlockBalance:
    """The balance of a block, in the units of its population's composition.

    Attributes:
        name: Of the block.
        limit: What its cap allows: (epsilon, delta) for basic sums, otherwise one number.
        left: What is not charged yet.
        runs: The number ever reserved in it.
        retired: Whether no run can use it again.

    Example:
        >>> BlockBalance("2025", limit=(1.0, 1e-5), left=(0.4, 1e-5)).affords((0.5, 1e-6))
        False
    """

    name: str
    limit: Price
    left: Price
    runs: int = 0
    retired: bool = False

    def affords(self, price: Price) -> bool:
        """Whether the block can pay; 1e-12 of its cap is left to rounding.

        Args:
            price: In the units of the composition, as `limit` and `left`.
        """
        rows = zip(price, self.left, self.limit, strict=True)
        return not self.retired and all(part <= left + limit * _ROUNDING for part, left, limit in rows)


@dataclass(frozen=True)
class Choice:
    """Which blocks, in the order of declaration, a retraining uses.

    "last": of the newest `window` blocks those that can pay. "all": all that can pay. "newest": only the newest that
    can pay, so that a block is used up before an older one.

    Args:
        policy: One of these.
        window: How many of the newest blocks, for "last" alone.
        at_least: The smallest number of blocks; with fewer a retraining is skipped.

    Raises:
        RefusedError: For a window with another policy, and for numbers below 1.

    Example:
        >>> week = [BlockBalance(name, (1.0,), (left,)) for name, left in (("mon", 1.0), ("tue", 0.2), ("wed", 1.0))]
        >>> choose_blocks(Choice("last", window=2), week, (0.5,))
        ('wed',)
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

    "equal": the same price `planned` times. "front-loaded": prices that fall in equal steps over `planned` retrainings,
    of which the last pays one step. "geometric": a `fraction` of the rest each time, without end.

    Args:
        policy: One of these.
        planned: The number of retrainings, from 1; not for "geometric".
        fraction: Of what is left, above 0 and below 1; for "geometric" alone.

    Raises:
        RefusedError: If the policy's number is missing or out of range, or the other one is given.

    Example:
        >>> Spread("equal", planned=4).price((2.0,), done=0)
        (0.5,)
        >>> Spread("geometric", fraction=0.25).price((2.0,), done=7)
        (0.5,)
    """

    policy: Spreading
    planned: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        for_ever = self.policy == "geometric"
        is_missing = (self.planned is None, self.fraction is None)
        if is_missing != (for_ever, not for_ever):
            raise RefusedError(
                f"the spread {self.policy!r} needs {'a fraction' if for_ever else 'planned'} alone."
            )
        is_share = self.fraction is not None and 0 < self.fraction < 1
        if not (is_share if for_ever else (self.planned or 0) >= 1):
            raise RefusedError("planned retrainings are at least 1, and a fraction lies above 0 and below 1.")

    def price(self, left: Price, *, done: int) -> Price:
        """The price of the next retraining; nothing after the last planned one.

        Args:
            left: What is not spent, in the units of the composition.
            done: The number of past retrainings.
        """
        coming = (self.planned or 0) - done
        # Falling prices of c, c - 1, .. 1 steps: c of their sum c (c + 1) / 2 is a share of 2 / (c + 1).
        by_number = 0.0 if coming < 1 else 1 / coming if self.policy == "equal" else 2 / (coming + 1)
        share = self.fraction or by_number
        return tuple(share * part for part in left)


def choose_blocks(choice: Choice, blocks: Sequence[BlockBalance], price: Price) -> tuple[str, ...]:
    """The names of the blocks that a retraining of this price uses, in order; nothing is reserved.

    Args:
        choice: Which blocks a retraining uses.
        blocks: In the order of declaration.
        price: In the units of the composition.

    Raises:
        RefusedError: If too few can pay.
    """
    return _choose(choice, blocks, lambda block: block.affords(price))


def next_retraining(
    choice: Choice, spread: Spread, blocks: Sequence[BlockBalance], *, smallest: Price
) -> tuple[tuple[str, ...], Price]:
    """The blocks of the next retraining and its price, the smallest planned price of these blocks.

    Args:
        choice: Which blocks a retraining uses.
        spread: How a block's budget is spread.
        blocks: In the order of declaration.
        smallest: The smallest useful price; blocks with a smaller share are left out.

    Raises:
        RefusedError: If too few blocks are left; nothing is reserved then.

    Example:
        >>> blocks = [BlockBalance("2024", (1.0,), (0.2,)), BlockBalance("2025", (1.0,), (1.0,))]
        >>> next_retraining(Choice("all"), Spread("equal", planned=2), blocks, smallest=(0.3,))
        (('2025',), (0.5,))
    """
    shares = {block.name: spread.price(block.left, done=block.runs) for block in blocks}
    used = _choose(choice, blocks, lambda block: _covers(shares[block.name], smallest))
    return used, tuple(map(min, zip(*(shares[name] for name in used), strict=True)))


def exhausted_blocks(
    blocks: Sequence[BlockBalance], smallest: Price, spread: Spread | None = None
) -> tuple[str, ...]:
    """The blocks to retire: those that cannot pay the smallest useful price.

    Args:
        blocks: In the order of declaration.
        smallest: The smallest useful price.
        spread: If prices are shares of the rest, a block retires when its next share is below the smallest.

    Example:
        >>> exhausted_blocks([BlockBalance("2024", (1.0,), (0.2,)), BlockBalance("2025", (1.0,), (1.0,))], (0.3,))
        ('2024',)
    """

    def can_pay(block: BlockBalance) -> bool:
        if spread is None:
            return block.affords(smallest)
        return _covers(spread.price(block.left, done=block.runs), smallest)

    return tuple(block.name for block in blocks if not block.retired and not can_pay(block))


def _choose(
    choice: Choice, blocks: Sequence[BlockBalance], pays: Callable[[BlockBalance], bool]
) -> tuple[str, ...]:
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
    """Whether a share reaches the smallest price, and is above 0 in epsilon, rho or divergence, which comes first."""
    enough = all(part >= minimum * (1 - _ROUNDING) for part, minimum in zip(share, smallest, strict=True))
    return enough and 0 < share[0] < math.inf


HORIZON = 1000
"""The number of retrainings after which a forecast without end is cut off."""


@dataclass(frozen=True)
class PlannedRetraining:
    """A retraining that the caps allow. number: 1 is the next. retires: the blocks that are exhausted after it."""

    number: int
    blocks: tuple[str, ...]
    price: Price
    retires: tuple[str, ...]


@dataclass(frozen=True)
class Forecast:
    """The retrainings that the caps allow.

    Attributes:
        retrainings: In their order.
        end: Why there are no more; None if the forecast was cut off.
    """

    retrainings: tuple[PlannedRetraining, ...]
    end: str | None


def forecast(
    blocks: Sequence[BlockBalance],
    choice: Choice,
    pricing: Spread | Price,
    *,
    smallest: Price,
    arriving: Price | None = None,
    horizon: int = HORIZON,
) -> Forecast:
    """Forecast the retrainings to come, each charged in full.

    Args:
        blocks: In the order of declaration; they are not changed.
        choice: Which of them a retraining uses.
        pricing: How budgets are spread, or the price of every retraining, in the units of the composition.
        smallest: The smallest useful price; a block that cannot pay it retires.
        arriving: The limit of a new block before each further retraining; None if no blocks arrive.
        horizon: The largest number of retrainings.

    Returns:
        The retrainings in order, and why there are no more.

    Example:
        >>> year = forecast([BlockBalance("2025", (1.0,), (1.0,))], Choice("all"), (0.4,), smallest=(0.1,))
        >>> [row.number for row in year.retrainings]
        [1, 2]
    """
    current = list(blocks)
    done: list[PlannedRetraining] = []
    for number in range(1, horizon + 1):
        if arriving is not None and number > 1:
            current.append(BlockBalance(f"new {number - 1}", arriving, arriving))
        try:
            if isinstance(pricing, Spread):
                used, price = next_retraining(choice, pricing, current, smallest=smallest)
            else:
                used, price = choose_blocks(choice, current, pricing), pricing
        except RefusedError as end:
            return Forecast(tuple(done), str(end))
        for index, block in enumerate(current):
            if block.name in used:
                left = tuple(max(0.0, have - part) for have, part in zip(block.left, price, strict=True))
                current[index] = replace(block, left=left, runs=block.runs + 1)
        retired = exhausted_blocks(current, smallest, pricing if isinstance(pricing, Spread) else None)
        current = [replace(block, retired=True) if block.name in retired else block for block in current]
        done.append(PlannedRetraining(number, used, price, retired))
    return Forecast(tuple(done), None)

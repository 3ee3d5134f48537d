"""What populations and blocks have spent and have left, and how many more runs they can pay, from a ledger's state."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger.composition import (
    BASIC,
    WHOLE_POPULATION,
    Amount,
    Composition,
    Events,
    plus,
    times,
)
from algorithms.privacy.ledger.policy import BlockBalance
from algorithms.privacy.ledger.state import ROUNDING, STATES, LedgerState


@dataclass(frozen=True)
class Balance:
    """Balance of a population or block for the worst-case person, who is in as many blocks as one may be.

    Runs without noise on public records are in none of the amounts. Under zCDP and Rényi each is the epsilon that its
    amount alone has at the cap's delta, so spent, reserved and remaining do not add up to the cap.

    Attributes:
        population: Its name.
        cap: What all runs together may spend.
        public: Whether the records are.
        spent: By settled and forfeited runs.
        reserved: By open runs.
        remaining: What the cap leaves, at least 0.
        block: Its name, or `WHOLE_POPULATION`.
        composition: How runs add up.
        blocks_per_person: In how many blocks a person may have records; every charge counts so often.
        retired: Whether no run can use the block again.
    """

    population: str
    cap: Budget
    public: bool
    spent: Budget
    reserved: Budget
    remaining: Budget
    block: str = WHOLE_POPULATION
    composition: Composition = BASIC
    blocks_per_person: int = 1
    retired: bool = False


def balance_of(state: LedgerState, population: str, block: str) -> Balance:
    """The balance of a block, or of a population without blocks; raises RefusedError for an unknown one."""
    terms, cap = state.term(population), state.cap(population, block)
    spent = state.charged_amount(population, block, "settled", "forfeited")
    reserved = state.charged_amount(population, block, "open")
    rest = left_of(state.limit(population, block), plus(spent, reserved))
    untouched = not any(plus(spent, reserved))
    return Balance(
        population=population,
        cap=cap,
        public=terms.public,
        spent=terms.composition.as_budget(spent, cap.delta),
        reserved=terms.composition.as_budget(reserved, cap.delta),
        remaining=cap if untouched else terms.composition.as_budget(rest, cap.delta),
        block=block,
        composition=terms.composition,
        blocks_per_person=terms.blocks_per_person,
        retired=(population, block) in state.retired,
    )


def find_fullest_block(state: LedgerState, population: str) -> str:
    """The block of which the greatest share is charged: no person has lost more than its balance says."""

    def share(block: str) -> tuple[bool, Fraction]:
        charged = state.charged_amount(population, block, *STATES)
        pairs = list(zip(charged, state.limit(population, block), strict=True))
        beyond = any(part and not whole for part, whole in pairs)  # charged where the cap is 0
        return beyond, max(part / whole if whole else Fraction(0) for part, whole in pairs)

    return max(state.blocks(population) or [WHOLE_POPULATION], key=share)


def block_views(state: LedgerState, population: str, also: Sequence[str] = ()) -> list[BlockBalance]:
    """The blocks for a policy, in the order of their declaration; the whole population where it has none.

    also: blocks that come last, as they would be declared now, unless they are already.
    """
    blocks, declared = [], state.blocks(population)
    for name in [*declared, *(name for name in also if name not in declared)] or [WHOLE_POPULATION]:
        account = name if name in declared else WHOLE_POPULATION
        limit, charged = state.limit(population, account), state.charged_amount(population, account, *STATES)
        left = _floats(left_of(limit, charged))
        is_retired = (population, name) in state.retired
        blocks.append(
            BlockBalance(name, _floats(limit), left, state.charges.get((population, name), 0), is_retired)
        )
    return blocks


def affordable_runs(
    state: LedgerState, population: str, cost: Budget, events: Events, adjacency: str, blocks: Sequence[str]
) -> int | None:
    """How many more runs of this cost fit into all of the blocks, every living one when none are named.

    None when there is no limit. Raises RefusedError for an unknown population or block, and for events without a bound.
    """
    terms = state.term(population)
    if math.isinf(cost.epsilon) and not terms.public:
        return 0
    named = blocks or _living(state, population)
    charge = terms.planned_charge(cost, events, adjacency, named)
    counts = [state.how_many(population, block, charge) for block in named]
    return min((count for count in counts if count is not None), default=None if counts else 0)


def spent_after(
    state: LedgerState,
    population: str,
    cost: Budget,
    events: Events,
    adjacency: str,
    blocks: Sequence[str],
    runs: Sequence[int],
) -> tuple[Budget, ...]:
    """What is spent or reserved after these numbers of further runs, in the most charged of the blocks.

    blocks: those that each run reads; none for all that are not retired. Raises what `affordable_runs` raises, and
    RefusedError if no block is left.
    """
    terms, named = state.term(population), blocks or _living(state, population)
    if not named:
        raise RefusedError(f"every block of population {population!r} is retired; add blocks.")
    charges = dict.fromkeys(named, terms.planned_charge(cost, events, adjacency, named))
    return tuple(spent_with(state, population, charges, count) for count in runs)


def spent_with(state: LedgerState, population: str, charges: Mapping[str, Amount], runs: int) -> Budget:
    """What is spent or reserved, in the most charged of some blocks, after runs that each charge them these amounts."""
    composition = state.term(population).composition

    def after(block: str, charge: Amount) -> Budget:
        total = plus(state.charged_amount(population, block, *STATES), times(charge, runs))
        return composition.as_budget(total, state.cap(population, block).delta)

    return max((after(*pair) for pair in charges.items()), key=lambda spent: spent.epsilon)


def _living(state: LedgerState, population: str) -> list[str]:
    return [block.name for block in block_views(state, population) if not block.retired]


def left_of(limit: Amount, charged: Amount) -> Amount:
    """What a limit leaves; less than its rounding is nothing."""
    rest = plus(limit, charged, sign=-1)
    return tuple(
        part if part > whole * ROUNDING else Fraction(0) for part, whole in zip(rest, limit, strict=True)
    )


def _floats(amount: Amount) -> tuple[float, ...]:
    return tuple(map(float, amount))

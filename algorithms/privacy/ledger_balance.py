"""Where a population stands, in epsilon and delta, and why a run does not fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context
from fractions import Fraction

from algorithms.privacy.budget import Budget
from algorithms.privacy.errors import BudgetRefused
from algorithms.privacy.ledger_books import ROUNDING, Books, Status, blocks_in_words
from algorithms.privacy.ledger_composition import BASIC, Amount, Composition, Events, plus, times
from algorithms.privacy.ledger_entry import WHOLE_POPULATION, Draft
from algorithms.privacy.ledger_policy import Block

_ALL: tuple[Status, ...] = ("open", "settled", "forfeited")
_RAISED = "unless the owner of the data raises the cap."


@dataclass(frozen=True)
class Balance:
    """Where a population or one of its blocks stands, for a person who is in as many blocks as one may be.

    spent: settled and forfeited runs. reserved: open runs. remaining: what the cap leaves, at least 0.
    Runs without noise on public records are in none of these. Under zCDP and Rényi each is the epsilon that its
    amount alone has at the cap's delta, so spent, reserved and remaining do not add up to the cap.
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


def balance_of(books: Books, population: str, block: str) -> Balance:
    """The balance of a block, or of a population without blocks; raises Refused for an unknown one."""
    terms, cap = books.term(population), books.cap(population, block)
    spent = books.charged(population, block, "settled", "forfeited")
    reserved = books.charged(population, block, "open")
    rest = _rest(books.limit(population, block), plus(spent, reserved))
    untouched = not any(plus(spent, reserved))
    return Balance(
        population=population,
        cap=cap,
        public=terms.public,
        spent=terms.composition.shown(spent, cap.delta),
        reserved=terms.composition.shown(reserved, cap.delta),
        remaining=cap if untouched else terms.composition.shown(rest, cap.delta),
        block=block,
        composition=terms.composition,
        blocks_per_person=terms.blocks_per_person,
        retired=(population, block) in books.retired,
    )


def most_charged(books: Books, population: str) -> str:
    """The block of which the greatest share is charged: no person has lost more than its balance says."""

    def share(block: str) -> tuple[bool, Fraction]:
        charged = books.charged(population, block, *_ALL)
        pairs = list(zip(charged, books.limit(population, block), strict=True))
        beyond = any(part and not whole for part, whole in pairs)
        return beyond, max(part / whole if whole else Fraction(0) for part, whole in pairs)

    return max(books.blocks(population) or [WHOLE_POPULATION], key=share)


def standing(books: Books, population: str) -> list[Block]:
    """The blocks for a policy, in the order of their declaration; the whole population where it has none."""
    blocks = []
    for name in books.blocks(population) or [WHOLE_POPULATION]:
        limit, charged = books.limit(population, name), books.charged(population, name, *_ALL)
        left = _floats(_rest(limit, charged))
        is_retired = (population, name) in books.retired
        blocks.append(Block(name, _floats(limit), left, books.charges(population, name), is_retired))
    return blocks


def affordable(
    books: Books, population: str, cost: Budget, events: Events, adjacency: str, blocks: Sequence[str]
) -> int | None:
    """How many more runs of this cost fit into all of the blocks, every living one when none are named.

    None when there is no limit. Raises Refused for an unknown population or block, and for events without a bound.
    """
    terms = books.term(population)
    if math.isinf(cost.epsilon) and not terms.public:
        return 0
    named = blocks or [block.name for block in standing(books, population) if not block.retired]
    together = terms.together(named)
    price = terms.composition.price(cost, events, adjacency, together)
    charge = terms.charge(cost, {"price": price, "together": together})
    counts = [books.how_many(population, block, charge) for block in named]
    return min((count for count in counts if count is not None), default=None if counts else 0)


def refusal(books: Books, account: tuple[str, str], draft: Draft, charge: Amount) -> BudgetRefused:
    """Why a run does not fit a block: requested, remaining, and what would fit."""
    run_id, cost = draft.run_id, draft.budget
    population, block = account
    where = f"population {population!r}"
    where = where if block == WHOLE_POPULATION else f"block {block!r} of {where}"
    if math.isinf(cost.epsilon):
        return BudgetRefused(
            f"run {run_id!r} adds no noise (infinite epsilon), which the private {where}"
            " never allows; choose a private algorithm or public records."
        )
    if account in books.retired:
        return BudgetRefused(
            f"run {run_id!r} asks for {where}, which is retired for ever; choose other blocks."
        )
    words = _basic if books.term(population).composition.kind == "basic" else _by_events
    return BudgetRefused(words(books, account, f"run {run_id!r}", where, draft, charge))


def _basic(books: Books, account: tuple[str, str], run: str, where: str, draft: Draft, charge: Amount) -> str:
    balance, terms, cost = balance_of(books, *account), books.term(account[0]), draft.budget
    count = terms.blocks_per_person
    left = Budget(_floor(balance.remaining.epsilon), _floor(balance.remaining.delta))
    each = Budget(_floor(left.epsilon / count), _floor(left.delta / count)) if count > 1 else left
    fitting = Budget(min(cost.epsilon, each.epsilon), _share(min(cost.delta, each.delta), draft))
    fits = left.epsilon > 0 and books.how_many(*account, terms.charge(fitting, draft.about)) != 0
    return (
        f"{run} asks for {in_words(cost)}{_counted(count)}, but {where} has {in_words(left)} left"
        f" of its cap {in_words(balance.cap)}, with {in_words(balance.spent)} spent and"
        f" {in_words(balance.reserved)} reserved{_held(books, account)}; "
        + (f"at most {in_words(fitting)} would fit" if fits else "nothing more fits")
        + f", {_RAISED}"
    )


def _by_events(
    books: Books, account: tuple[str, str], run: str, where: str, draft: Draft, charge: Amount
) -> str:
    terms, limit = books.term(account[0]), books.limit(*account)
    say, balance = terms.composition.in_words, balance_of(books, *account)
    rest = _rest(limit, books.charged(*account, *_ALL))
    asked = times(charge, Fraction(1, terms.blocks_per_person))
    return (
        f"{run} of {in_words(draft.budget)} asks for {say(asked)}{_counted(terms.blocks_per_person)}, but {where} has"
        f" {say(rest)} left of the {say(limit)} of its cap {in_words(balance.cap)}, with {in_words(balance.spent)}"
        f" spent and {in_words(balance.reserved)} reserved{_held(books, account)}; ask for less, {_RAISED}"
    )


def _share(delta: float, draft: Draft) -> float:
    """Of a delta that fits, what a run may state that reads several records of a person."""
    together = draft.about.get("together", 1)
    if not isinstance(together, int) or together == 1:
        return delta
    grows = math.fsum(math.exp(min(700.0, i * draft.budget.epsilon)) for i in range(together)) / together
    return _floor(delta / grows)


def in_words(budget: Budget) -> str:
    """A budget as messages write it, to 12 digits."""
    return f"epsilon={budget.epsilon:.12g}, delta={budget.delta:.12g}"


def _counted(count: int) -> str:
    return f", counted {count} times since a person may be in {count} blocks" if count > 1 else ""


def _held(books: Books, account: tuple[str, str]) -> str:
    holders = books.open_runs(*account)
    return f" by open runs ({blocks_in_words(holders)})" if holders else ""


def _rest(limit: Amount, charged: Amount) -> Amount:
    """What a limit leaves; less than its rounding is nothing."""
    rest = plus(limit, charged, sign=-1)
    return tuple(
        part if part > whole * ROUNDING else Fraction(0) for part, whole in zip(rest, limit, strict=True)
    )


def _floats(amount: Amount) -> tuple[float, ...]:
    return tuple(map(float, amount))


def _floor(number: float) -> float:
    """The number to 6 digits, never above it."""
    return float(Context(prec=6, rounding=ROUND_FLOOR).create_decimal(repr(number)))

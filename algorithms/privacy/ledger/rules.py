"""What the ledger refuses before a row is written, one sentence each."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from decimal import ROUND_FLOOR, Context
from fractions import Fraction

from algorithms.errors import BudgetRefusedError, NoiseElsewhereError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger.balances import balance_of, left_of
from algorithms.privacy.ledger.composition import WHOLE_POPULATION, Amount, Composition, RowNotes, times
from algorithms.privacy.ledger.rows import Draft
from algorithms.privacy.ledger.state import (
    NOISE_KEY,
    STATES,
    LedgerState,
    ReservedRun,
    adjacency_of,
    contents,
    digest_schemes,
)


def find(state: LedgerState, run_id: str) -> ReservedRun:
    """A reserved run; raises RefusedError for an unknown one."""
    if run_id not in state.runs:
        raise RefusedError(
            "the ledger has no reservation of run {run_id!r}; its history lists those it has.",
            code="run_unknown",
            run_id=run_id,
        )
    return state.runs[run_id]


def check_blocks(state: LedgerState, population: str, blocks: Sequence[str]) -> None:
    """Raises RefusedError for an unknown block, for none at all, and for the whole of a population that has blocks."""
    for block in blocks:
        state.cap(population, block)
    declared = state.blocks(population)
    if not blocks or (declared and WHOLE_POPULATION in blocks):
        raise RefusedError(
            f"population {population!r} is charged by blocks ({blocks_in_words(declared)}); name those that the run"
            " reads."
        )


def check_repeats(state: LedgerState, population: str, content_digests: Mapping[str, Sequence[str]]) -> None:
    """Raises BudgetRefusedError where a block holds exactly what too many others hold, which would be one cap each."""
    count = state.term(population).blocks_per_person
    for block, others in state.repeats(population, content_digests).items():
        if len(others) >= count:
            other, order = others[0], [*state.blocks(population), *content_digests]
            # Whichever was asked about first: the newer of the two is to be left out.
            if other in content_digests and order.index(other) > order.index(block):
                block, other = other, block
            allowed = "one block alone" if count == 1 else f"{count} blocks at most"
            raise BudgetRefusedError(
                "the blocks {other!r} and {block!r} of population {population!r} hold exactly the same records,"
                " and a record is in {allowed}; leave {block!r} out, or let the owner of the data say that these are"
                " other people.",
                code="block_repeated",
                other=other,
                block=block,
                population=population,
                allowed=allowed,
            )


def check_changes(state: LedgerState, population: str, content_digests: Mapping[str, Sequence[str]]) -> None:
    """Raises BudgetRefusedError where a block was charged, but never with this content, unless the owner allowed it."""
    for block, digests in content_digests.items():
        charged = state.content_digests.get((population, block), frozenset())
        is_comparable = not digest_schemes(charged).isdisjoint(digest_schemes(digests))
        is_allowed = (population, frozenset((block,))) in state.exemptions
        if is_comparable and contents(charged).isdisjoint(contents(digests)) and not is_allowed:
            raise BudgetRefusedError(
                "the block {block!r} of population {population!r} does not hold the records that were charged: some"
                " were changed, added or removed since. A person who came from another block would have a second cap"
                " here. Bring the charged records back and give new ones a block of their own; or let the owner of"
                " the data say that everybody in it stays in it.",
                code="block_changed",
                block=block,
                population=population,
            )


def check_fits(state: LedgerState, drafts: Sequence[Draft]) -> None:
    """Raises BudgetRefusedError where a block's cap does not allow its draft, RefusedError for another adjacency."""
    for draft in drafts:
        population, cost = draft.population, draft.budget
        terms = state.term(population)
        charge = terms.charge(cost, draft.notes)
        # A run without noise is charged nothing, so that any number of them would fit.
        forbidden = math.isinf(cost.epsilon) and not terms.public
        if forbidden or state.how_many(population, draft.block, charge) == 0:
            raise _refusal(state, (population, draft.block), draft, charge)
        if not terms.public:
            _check_adjacency(state, draft)


def check_resumes(run: ReservedRun, drafts: Sequence[Draft]) -> None:
    """Raises RefusedError where a run that is reserved again is not the same one, or has ended."""
    draft = drafts[0]
    if (run.population, run.reserved) != (draft.population, draft.budget):
        raise RefusedError(
            f"run {draft.run_id!r} has reserved {run.reserved} of population {run.population!r},"
            f" not {draft.budget} of {draft.population!r}; resume it so or use a new run_id."
        )
    if set(run.amounts) != {draft.block for draft in drafts}:
        raise RefusedError(
            f"run {draft.run_id!r} has reserved the blocks {blocks_in_words([*run.amounts])}, not"
            f" {blocks_in_words([draft.block for draft in drafts])}; resume it so or use a new run_id."
        )
    if run.status != "open":
        raise RefusedError(f"run {draft.run_id!r} is {run.status} already; to train again, use a new run_id.")
    noise_keys = draft.notes.get(NOISE_KEY), run.noise_key
    if None not in noise_keys and len({*noise_keys}) > 1:
        raise NoiseElsewhereError(
            "run {run_id!r} is reserved by another home with the same owner key, which has its noise; wait for its"
            " end there, or forfeit it where that home is gone.",
            code="noise_elsewhere",
            run_id=draft.run_id,
        )


def check_once(state: LedgerState, population: str, notes: RowNotes) -> None:
    """Raises BudgetRefusedError for a scheduled retraining that was charged before, however that run ended."""
    retraining = notes.get("retraining")
    charged = state.run_of(population, retraining) if isinstance(retraining, str) else None
    if charged is not None:
        raise BudgetRefusedError(
            f"the retraining {retraining!r} of population {population!r} is charged already, for run {charged!r};"
            " wait for the next period."
        )


def check_same_model(run_id: str, run: ReservedRun, model: str | None) -> None:
    """Raises RefusedError for a second model of a run: two with the same noise reveal more than one was charged for."""
    if None not in (run.model, model) and run.model != model:
        raise RefusedError(
            f"run {run_id!r} was settled with another model, and training it again with other code, hardware or"
            " `performance` gave a second one with the same noise, which is not given out; keep the first, go back to"
            " what gave it, or change a setting and train anew."
        )


def check_settles(run_id: str, run: ReservedRun, spent: Budget) -> None:
    """Raises RefusedError for a run that has ended, BudgetRefusedError for one that spent more than it reserved."""
    if run.status == "forfeited":
        raise RefusedError(
            f"run {run_id!r} is forfeited, so its {run.reserved} count as spent for ever;"
            " it cannot be settled any more."
        )
    if run.status == "settled":
        raise RefusedError(
            f"run {run_id!r} is settled at {run.charged} already, not at {spent}; a run settles once."
        )
    if spent.epsilon > run.reserved.epsilon or spent.delta > run.reserved.delta:
        raise BudgetRefusedError(
            f"run {run_id!r} cannot settle at {spent}, more than the {run.reserved} it"
            " reserved; find out why it spent more than it planned."
        )
    if math.isinf(run.reserved.epsilon) and math.isfinite(spent.epsilon):
        raise RefusedError(f"run {run_id!r} was reserved without noise; settle it at an infinite epsilon.")


def check_cap(composition: Composition, cap: Budget) -> None:
    """Raises RefusedError for an infinite cap, and for one without a delta where the composition needs one."""
    if math.isinf(cap.epsilon):
        raise RefusedError(
            "the cap of a population must be finite, not epsilon=inf; set {population.cap} to a number.",
            code="cap_infinite",
        )
    composition.amount_of(cap)


def check_new(composition: Composition, cap: Budget, blocks_per_person: int) -> None:
    """Raises RefusedError where a new population's cap leaves nothing, and where a person is in no block."""
    check_cap(composition, cap)
    if cap.epsilon > 0 and not any(composition.amount_of(cap)):
        raise RefusedError(
            "a cap of {cap} leaves nothing to {composition}; set {population.cap} to more, or"
            " {population.composition} to another order or kind.",
            code="cap_leaves_nothing",
            cap=cap,
            composition=composition,
        )
    if blocks_per_person < 1:
        raise RefusedError(
            f"a person is in at least 1 block, not in {blocks_per_person}; declare how many at most."
        )


def check_new_population(state: LedgerState, population: str) -> None:
    """Raises RefusedError for a name that differs from another in case or spaces alone. Two that are there stay."""
    alike = [name for name in state.terms if _fold_name(name) == _fold_name(population)]
    if alike:
        raise RefusedError(
            f"the ledger has a population {alike[0]!r}, and {population!r} differs in case or spaces alone, so"
            " the same people would have two budgets; write its name as it is there, or choose another for other"
            " people."
        )


def check_name(name: str, what: str) -> None:
    """Raises RefusedError for a name that no message could show."""
    if not name.strip() or not name.isprintable():
        raise RefusedError(f"a {what} must be printable text, not empty, unlike {name!r}; choose another.")


def check_block_name(block: str) -> None:
    """Raises RefusedError for a name that no block can have."""
    check_name(block, "block")
    if block == WHOLE_POPULATION:
        raise RefusedError(
            f"{block!r} stands for a whole population without blocks; choose another name for the block."
        )


def check_new_block(state: LedgerState, population: str, block: str, cap: Budget) -> None:
    """Raises RefusedError for a cap that no block can have, and for the name of a block in another spelling."""
    check_cap(state.term(population).composition, cap)
    alike = [
        name for name in state.blocks(population) if name != block and _fold_name(name) == _fold_name(block)
    ]
    if alike:
        raise RefusedError(
            f"population {population!r} has a block {alike[0]!r}, and {block!r} differs in case or spaces alone,"
            " as a file does that was renamed; a block keeps its name for ever."
        )


def _fold_name(name: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def _check_adjacency(state: LedgerState, draft: Draft) -> None:
    planned = adjacency_of(draft.notes)
    recorded = state.adjacencies.get(draft.population, planned)
    if recorded != planned:
        raise RefusedError(
            "population {population!r} was charged under {recorded}, this run is accounted under {planned}, and the"
            " two do not add up; set {method.adjacency} to {recorded}, or {method.kind} to one with it.",
            code="adjacency_differs",
            population=draft.population,
            recorded=recorded,
            planned=planned,
        )


def blocks_in_words(blocks: Sequence[str]) -> str:
    """Some blocks as messages name them: the first three."""
    shown = ", ".join(map(repr, blocks[:3])) + (f" and {len(blocks) - 3} more" if blocks[3:] else "")
    return shown or "none"


def _refusal(
    state: LedgerState, account: tuple[str, str], draft: Draft, charge: Amount
) -> BudgetRefusedError:
    """Why a run does not fit a block: requested, remaining, and what would fit."""
    run_id, cost = draft.run_id, draft.budget
    population, block = account
    where = "population {population!r}"
    where = where if block == WHOLE_POPULATION else f"block {{block!r}} of {where}"
    if math.isinf(cost.epsilon):
        return BudgetRefusedError(
            f"run {{run_id!r}} adds no noise (infinite epsilon), which the private {where} never allows; choose a"
            " private algorithm or public records.",
            code="no_noise_on_private",
            run_id=run_id,
            population=population,
            block=block,
        )
    if account in state.retired:
        return BudgetRefusedError(
            f"run {{run_id!r}} asks for {where}, which is retired for ever; choose other blocks.",
            code="block_retired",
            run_id=run_id,
            population=population,
            block=block,
        )
    is_basic = state.term(population).composition.kind == "basic"
    return (_above_budget if is_basic else _above_price)(state, account, where, draft, charge)


def _above_budget(
    state: LedgerState, account: tuple[str, str], where: str, draft: Draft, charge: Amount
) -> BudgetRefusedError:
    """The refusal under basic sums. where: the block in a template."""
    balance, terms, cost = balance_of(state, *account), state.term(account[0]), draft.budget
    count = terms.blocks_per_person
    left = Budget(floor_to_6_digits(balance.remaining.epsilon), floor_to_6_digits(balance.remaining.delta))
    each = (
        Budget(floor_to_6_digits(left.epsilon / count), floor_to_6_digits(left.delta / count))
        if count > 1
        else left
    )
    # What is offered must be affordable, so that it is rounded down at each step, and then counted like a run: by its
    # own cost, as the price by events is of the run that does not fit.
    fitting = Budget(min(cost.epsilon, each.epsilon), _share(min(cost.delta, each.delta), draft))
    fits = (
        left.epsilon > 0
        and state.how_many(*account, terms.charge(fitting, {**draft.notes, "price": None})) != 0
    )
    open_runs = _open_runs(state, account)
    return BudgetRefusedError(
        f"run {{run_id!r}} asks for {{asked}}{_times_counted_text(count)}, but {where} has {{left}} left of its cap"
        f" {{cap}}, with {{spent}} spent and {{reserved}} reserved{_open_runs_text(open_runs)}; "
        + ("at most {fitting} would fit" if fits else "nothing more fits")
        + ", unless the owner of the data {population.raise_cap}.",
        code="budget_exceeded",
        run_id=draft.run_id,
        population=account[0],
        block=account[1],
        asked=cost,
        count=count,
        left=left,
        cap=balance.cap,
        spent=balance.spent,
        reserved=balance.reserved,
        open_runs=open_runs,
        fitting=fitting if fits else None,
    )


def _above_price(
    state: LedgerState, account: tuple[str, str], where: str, draft: Draft, charge: Amount
) -> BudgetRefusedError:
    """The refusal under zCDP or Rényi, where runs are priced by their events. where: the block in a template."""
    terms, limit = state.term(account[0]), state.limit(*account)
    show, balance = terms.composition.in_words, balance_of(state, *account)
    open_runs = _open_runs(state, account)
    return BudgetRefusedError(
        f"run {{run_id!r}} of {{asked}} asks for {{price}}{_times_counted_text(terms.blocks_per_person)}, but {where}"
        " has {left} left of the {limit} of its cap {cap}, with {spent} spent and {reserved} reserved"
        f"{_open_runs_text(open_runs)}; ask for less, unless the owner of the data {{population.raise_cap}}.",
        code="price_above_rest",
        run_id=draft.run_id,
        population=account[0],
        block=account[1],
        asked=draft.budget,
        count=terms.blocks_per_person,
        price=show(times(charge, Fraction(1, terms.blocks_per_person))),
        left=show(left_of(limit, state.charged_amount(*account, *STATES))),
        limit=show(limit),
        cap=balance.cap,
        spent=balance.spent,
        reserved=balance.reserved,
        open_runs=open_runs,
    )


def _share(delta: float, draft: Draft) -> float:
    """The delta that a run on several records of a person may state, if its blocks have room for `delta` each.

    The delta of k records is the sum of exp(i epsilon) delta for i below k (Dwork and Roth 2014, Theorem 2.2), and the
    ledger charges each of them a k-th of it. exp overflows above 709.
    """
    group_size = draft.notes.get("together", 1)
    if not isinstance(group_size, int) or group_size == 1:
        return delta
    grows = math.fsum(math.exp(min(700.0, i * draft.budget.epsilon)) for i in range(group_size)) / group_size
    return floor_to_6_digits(delta / grows)


def _times_counted_text(count: int) -> str:
    return ", counted {count} times since a person may be in {count} blocks" if count > 1 else ""


def _open_runs(state: LedgerState, account: tuple[str, str]) -> str:
    """The open runs that hold a part of the block, as messages name them; empty if there are none."""
    population, block_names = account[0], {account[1], WHOLE_POPULATION}
    holders = [
        name
        for name, run in state.runs.items()
        if run.status == "open" and run.population == population and block_names & set(run.amounts)
    ]
    return blocks_in_words(holders) if holders else ""


def _open_runs_text(open_runs: str) -> str:
    return " by open runs ({open_runs})" if open_runs else ""


def floor_to_6_digits(number: float) -> float:
    """The number to 6 digits, never above it.

    Example:
        >>> floor_to_6_digits(0.12345678)
        0.123456
    """
    return float(Context(prec=6, rounding=ROUND_FLOOR).create_decimal(repr(number)))

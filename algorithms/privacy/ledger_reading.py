"""What an open ledger says: balances, blocks, what is affordable, and its rows; nothing here changes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from algorithms.privacy import ledger_balance as balances
from algorithms.privacy import ledger_rules as rules
from algorithms.privacy.budget import Budget
from algorithms.privacy.ledger_balance import Balance
from algorithms.privacy.ledger_books import Books, Status
from algorithms.privacy.ledger_composition import Events
from algorithms.privacy.ledger_drafts import Memory
from algorithms.privacy.ledger_entry import Entry, head
from algorithms.privacy.ledger_policy import Block
from algorithms.privacy.ledger_store import Store
from algorithms.privacy.ledger_terms import Terms


@dataclass(frozen=True)
class LedgerReading:
    """The questions that a ledger answers."""

    _store: Store = field(repr=False)
    _memory: Memory = field(default_factory=Memory, repr=False, compare=False)

    def terms(self, population: str) -> Terms:
        """What a population was declared with; raises Refused for an unknown one."""
        return self._books().term(population)

    def balance(self, population: str, block: str | None = None) -> Balance:
        """Where a block stands; when None, the whole population, or of its blocks the one that is charged most.

        Raises Refused for an unknown population or block.
        """
        books = self._books()
        name = balances.most_charged(books, population) if block is None else block
        return balances.balance_of(books, population, name)

    def blocks(self, population: str) -> list[Block]:
        """The blocks as the policies take them, the whole population where it has none; Refused for an unknown one."""
        return balances.standing(self._books(), population)

    def affordable(
        self,
        population: str,
        cost: Budget,
        *,
        events: Events = (),
        adjacency: str = rules.ADJACENCY,
        blocks: Sequence[str] = (),
    ) -> int | None:
        """How many more runs like this the caps allow, on these blocks or all living ones; None for no limit.

        Raises Refused for an unknown population or block, and for events without a bound.
        """
        return balances.affordable(self._books(), population, cost, events, adjacency, blocks)

    def held(self, population: str) -> dict[str, frozenset[str]]:
        """The digests of what each block held when runs were reserved on it; see `Ledger.reserve`."""
        return {block: found for (name, block), found in self._books().held.items() if name == population}

    def check_repeats(self, population: str, held: Mapping[str, Sequence[str]]) -> None:
        """Raises BudgetRefused where `reserve` would, for blocks that hold exactly what others hold."""
        rules.check_repeats(self._books(), population, held)

    def status(self, run_id: str) -> Status | None:
        """What became of a run; None when the ledger does not know it."""
        run = self._books().runs.get(run_id)
        return run.status if run else None

    def populations(self) -> list[str]:
        """The populations, in the order of their declaration."""
        return list(self._books().terms)

    def history(self, population: str | None = None) -> list[Entry]:
        """The rows of a population, or all of them, in order; raises Refused for an unknown population."""
        rows = self._store.read()
        if population is not None:
            self._memory.books(rows).term(population)
        return [row for row in rows if population in (None, row.population)]

    def head(self) -> str:
        """The hash of the last row: it stands for the whole history, so keep it outside the ledger."""
        return head(self._store.read())

    def verify(self, *, containing: str | None = None) -> None:
        """Recomputes the chain; raises LedgerBroken when it does not hold.

        containing: a head() kept elsewhere; LedgerBroken when the chain does not contain it, which means
        that rows were cut off or that an older copy was put back.
        """
        rows = self._store.read(afresh=True)
        if containing is not None:
            rules.check_contains(rows, containing)

    def _books(self) -> Books:
        return self._memory.books(self._store.read())

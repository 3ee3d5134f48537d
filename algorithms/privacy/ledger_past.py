"""A population as it stood when a run had settled, from the rows up to that one: the same however late one asks."""

from dataclasses import dataclass

from algorithms.privacy.errors import Refused
from algorithms.privacy.ledger import WHOLE_POPULATION, Balance, Ledger
from algorithms.privacy.ledger_balance import balance_of, most_charged
from algorithms.privacy.ledger_books import Books, Run, replay


@dataclass(frozen=True)
class Settlement:
    """A population right after a run's settlement, which is among the books."""

    books: Books
    population: str
    run_id: str

    @property
    def balance(self) -> Balance:
        """Where the population stood, or of its blocks the one that was charged most."""
        return balance_of(self.books, self.population, most_charged(self.books, self.population))

    @property
    def blocks(self) -> list[Balance]:
        """Where each block of the population stood, in the order of declaration; none where it has none."""
        return self._balances(self.books.blocks(self.population))

    @property
    def charged(self) -> list[Balance]:
        """Where each block of the run stood; none for a run on the whole population."""
        return self._balances([name for name in self.run.amounts if name != WHOLE_POPULATION])

    @property
    def run(self) -> Run:
        """What the ledger has of the run."""
        return self.books.runs[self.run_id]

    def _balances(self, names: list[str]) -> list[Balance]:
        return [balance_of(self.books, self.population, name) for name in names]


def settlement(ledger: Ledger, population: str, run_id: str) -> Settlement:
    """The settlement of a run on a population; raises Refused for an unknown population and a run not settled."""
    rows = ledger.history(population)
    ends = [place for place, row in enumerate(rows) if (row.kind, row.run_id) == ("settle", run_id)]
    if not ends:
        raise Refused(f"the ledger has no settlement of run {run_id!r} on {population!r}; settle it first.")
    return Settlement(replay(rows[: ends[-1] + 1]), population, run_id)

"""The durable privacy budget of each population: reserve before the records are opened, settle after.

Guaranteed: the runs charged to a population compose to at most its cap (basic composition, which holds for
runs chosen adaptively: Dwork and Roth 2014, Theorem 3.16 and Appendix B; Rogers et al. 2016). Charged are
what each settled run really spent, and the whole reservation of each forfeited and each open run. A killed
run's reservation stays charged until the run is resumed and settled; forfeited, it is charged for ever.

A row changed, removed or inserted outside the ledger breaks its hash chain, and every further use is refused.
Rows cut off at the end, an old copy put back and a deleted file leave a chain that holds: only a `head()`
kept elsewhere shows these, through `verify(containing=...)`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from algorithms.privacy.budget import Budget
from algorithms.privacy.errors import BudgetRefused, LedgerBroken, Refused
from algorithms.privacy.ledger_books import Balance, Books, Run, Status, in_words, refusal, replay
from algorithms.privacy.ledger_entry import GENESIS, Draft, Entry, head
from algorithms.privacy.ledger_store import Store, open_store

__all__ = ["Balance", "Entry", "Ledger", "Status"]

Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Ledger:
    """An open ledger; threads may share it, and any number of processes may open the same one.

    Every method raises LedgerBroken when the hash chain does not hold, and Refused when the database fails.
    """

    _store: Store = field(repr=False)

    @classmethod
    def open(cls, url: str) -> "Ledger":
        """The ledger at sqlite:///PATH or postgresql+psycopg://..., created when missing, its chain verified.

        A new SQLite file, and its folder when that is new too, can be read and written by the owner only.
        Raises Refused when it cannot be opened; no message holds a password of the URL.
        """
        ledger = cls(open_store(url))
        ledger.verify()
        return ledger

    def declare(self, population: str, cap: Budget, *, public: bool) -> None:
        """Enters a population with its cap at first sight; does nothing when the ledger has it already.

        public: the records themselves are public, so that runs without noise are allowed.
        Raises Refused for an infinite cap.
        """
        _check_name(population, "population")
        draft = Draft("population", population, _finite(cap), about={"public": bool(public)})
        self._store.append(lambda rows: None if population in replay(rows).caps else draft)

    def set_cap(self, population: str, cap: Budget) -> None:
        """The owner of the data changes a cap; below what is charged it is allowed, and nothing more fits.

        Raises Refused for an unknown population and for an infinite cap.
        """
        draft = Draft("cap", population, _finite(cap))

        def decide(rows: list[Entry]) -> Draft:
            replay(rows).cap(population)
            return draft

        self._store.append(decide)

    def reserve(
        self, run_id: str, population: str, cost: Budget, *, events: Events, about: Mapping[str, str]
    ) -> None:
        """Charges a run before it sees a record; does nothing when the same run is open already (it resumes).

        cost: the most that the run can spend; infinite epsilon for a run without noise.
        events: the planned releases. about: notes for people, and "adjacency" where it is not add-or-remove-one.
        Raises Refused where a private population was charged under another adjacency: their epsilons do not add up.
        Raises BudgetRefused when the cap does not allow it; Refused for an unknown population, and for a
        run_id that is taken: by another cost or population, or by a run that is settled or forfeited.
        """
        _check_name(run_id, "run_id")
        draft = Draft("reserve", population, cost, run_id, events, about)

        def decide(rows: list[Entry]) -> Draft | None:
            books = replay(rows)
            books.cap(population)
            if run_id in books.runs:
                _check_resumes(books.runs[run_id], draft)
                return None
            if books.how_many(population, cost) == 0:
                raise refusal(books, population, run_id=run_id, cost=cost)
            if not books.public[population]:
                _check_adjacency(rows, draft)
            return draft

        self._store.append(decide)

    def settle(self, run_id: str, spent: Budget, *, events: Events) -> None:
        """Ends a run at what it really spent; does nothing when it is settled so already.

        events: the releases that happened.
        Raises BudgetRefused when it spent more than it reserved; Refused for an unknown or forfeited run, and
        for one settled at another spend.
        """

        def decide(rows: list[Entry]) -> Draft | None:
            run = _find(replay(rows), run_id)
            if run.status == "settled" and run.charged == spent:
                return None
            _check_settles(run_id, run, spent)
            return Draft("settle", run.population, spent, run_id, events)

        self._store.append(decide)

    def forfeit(self, run_id: str) -> None:
        """Gives a run up: its whole reservation counts as spent for ever; does nothing the second time.

        Raises Refused for an unknown and for a settled run.
        """

        def decide(rows: list[Entry]) -> Draft | None:
            run = _find(replay(rows), run_id)
            if run.status == "forfeited":
                return None
            if run.status == "settled":
                raise Refused(f"run {run_id!r} is settled at {in_words(run.charged)}; leave it at that.")
            return Draft("forfeit", run.population, run.reserved, run_id)

        self._store.append(decide)

    def balance(self, population: str) -> Balance:
        """Cap, spent, reserved and remaining of a population; raises Refused for an unknown one."""
        return self._books().balance(population)

    def affordable(self, population: str, cost: Budget) -> int | None:
        """How many more runs of this cost the cap allows; None when it sets no limit.

        Raises Refused for an unknown population.
        """
        return self._books().how_many(population, cost)

    def status(self, run_id: str) -> Status | None:
        """What became of a run; None when the ledger does not know it."""
        run = self._books().runs.get(run_id)
        return run.status if run else None

    def populations(self) -> list[str]:
        """The populations, in the order of their declaration."""
        return list(self._books().caps)

    def history(self, population: str | None = None) -> list[Entry]:
        """The rows of a population, or all of them, in order; raises Refused for an unknown population."""
        rows = self._store.read()
        if population is not None:
            replay(rows).cap(population)
        return [row for row in rows if population in (None, row.population)]

    def head(self) -> str:
        """The hash of the last row: it stands for the whole history, so keep it outside the ledger."""
        return head(self._store.read())

    def verify(self, *, containing: str | None = None) -> None:
        """Recomputes the chain; raises LedgerBroken when it does not hold.

        containing: a head() kept elsewhere; LedgerBroken when the chain does not contain it, which means
        that rows were cut off or that an older copy was put back.
        """
        hashes = {GENESIS, *(row.hash for row in self._store.read())}
        if containing is not None and containing not in hashes:
            raise LedgerBroken(
                f"the ledger has no row with the hash {containing[:16]}...: rows were cut off or an older"
                " copy was put back; restore the newest copy."
            )

    def _books(self) -> Books:
        return replay(self._store.read())


def _find(books: Books, run_id: str) -> Run:
    if run_id not in books.runs:
        raise Refused(f"the ledger has no reservation of run {run_id!r}; reserve its budget first.")
    return books.runs[run_id]


def _check_resumes(run: Run, again: Draft) -> None:
    if (run.population, run.reserved) != (again.population, again.budget):
        raise Refused(
            f"run {again.run_id!r} has reserved {in_words(run.reserved)} of population {run.population!r},"
            f" not {in_words(again.budget)} of {again.population!r}; resume it so or use a new run_id."
        )
    if run.status != "open":
        raise Refused(f"run {again.run_id!r} is {run.status} already; to train again, use a new run_id.")


def _check_adjacency(rows: list[Entry], draft: Draft) -> None:
    asked = _adjacency(draft.about)
    for row in rows:
        if row.kind != "reserve" or row.population != draft.population:
            continue
        found = _adjacency(row.to_json()["about"])
        if found != asked:
            raise Refused(
                f"population {draft.population!r} was charged under {found}, this run is accounted under {asked}, and"
                " the two do not add up; take a method of the same adjacency."
            )


def _adjacency(about: Mapping[str, object]) -> str:
    return str(about.get("adjacency", "ADD_OR_REMOVE_ONE"))


def _check_settles(run_id: str, run: Run, spent: Budget) -> None:
    if run.status == "forfeited":
        raise Refused(
            f"run {run_id!r} is forfeited, so its {in_words(run.reserved)} count as spent for ever;"
            " it cannot be settled any more."
        )
    if run.status == "settled":
        raise Refused(
            f"run {run_id!r} is settled at {in_words(run.charged)} already, not at {in_words(spent)};"
            " a run settles once."
        )
    if spent.epsilon > run.reserved.epsilon or spent.delta > run.reserved.delta:
        raise BudgetRefused(
            f"run {run_id!r} cannot settle at {in_words(spent)}, more than the {in_words(run.reserved)} it"
            " reserved; find out why it spent more than it planned."
        )
    if math.isinf(run.reserved.epsilon) and math.isfinite(spent.epsilon):
        raise Refused(f"run {run_id!r} was reserved without noise; settle it at an infinite epsilon.")


def _finite(cap: Budget) -> Budget:
    if math.isinf(cap.epsilon):
        raise Refused("the cap of a population must be finite, not epsilon=inf; give a number.")
    return cap


def _check_name(name: str, what: str) -> None:
    if not name.strip() or not name.isprintable():
        raise Refused(f"a {what} must be printable text, not empty, unlike {name!r}; choose another.")

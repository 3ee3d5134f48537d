"""The durable privacy budget of each population: reserve before the records are opened, settle after.

Guaranteed: the runs charged to a population, or to one of its disjoint blocks, compose to at most the cap at every
moment, also when a run is chosen after the results of earlier ones were seen (see `ledger_composition`). A record
lies in one block, so blocks compose in parallel; where a person may have a record in each of k blocks, every charge
counts k times, and a run on several blocks is priced for all of a person's records in it. Charged are what each
settled run really spent, and the whole reservation of each forfeited and each open run. A killed run's reservation
stays charged until the run is resumed and settled; forfeited, it is charged for ever.

A row changed, removed or inserted outside the ledger breaks its hash chain, and every further use is refused.
Rows cut off at the end, an old copy put back and a deleted file leave a chain that holds: only a `head()`
kept elsewhere shows these, through `verify(containing=...)`. No clock decides anything: `written_at` is for people.
"""

from collections.abc import Callable, Mapping, Sequence

from algorithms.privacy import ledger_rules as rules
from algorithms.privacy.budget import Budget
from algorithms.privacy.errors import Refused
from algorithms.privacy.ledger_balance import Balance, in_words
from algorithms.privacy.ledger_books import Books, Status
from algorithms.privacy.ledger_composition import BASIC, Composition, Events
from algorithms.privacy.ledger_drafts import Blocks, declaration, reservation, settlement
from algorithms.privacy.ledger_entry import WHOLE_POPULATION, Draft, Entry
from algorithms.privacy.ledger_policy import Block
from algorithms.privacy.ledger_reading import LedgerReading
from algorithms.privacy.ledger_store import open_store
from algorithms.privacy.ledger_terms import Terms

__all__ = ["WHOLE_POPULATION", "Balance", "Block", "Composition", "Entry", "Ledger", "Status"]

_Decision = Callable[[Books], Sequence[Draft]]


class Ledger(LedgerReading):
    """An open ledger; threads may share it, and any number of processes may open the same one.

    Every method raises LedgerBroken when the hash chain does not hold, and Refused when the database fails.
    """

    @classmethod
    def open(cls, url: str) -> "Ledger":
        """The ledger at sqlite:///PATH or postgresql+psycopg://..., created when missing, its chain verified.

        A new SQLite file, and its folder when that is new too, can be read and written by the owner only.
        Raises Refused when it cannot be opened; no message holds a password of the URL.
        """
        ledger = cls(open_store(url))
        ledger.verify()
        return ledger

    def declare(
        self,
        population: str,
        cap: Budget,
        *,
        public: bool,
        composition: Composition = BASIC,
        blocks_per_person: int = 1,
        bound: Mapping[str, str] | None = None,
    ) -> None:
        """Enters a population with its cap at first sight; one that the ledger has already keeps what it has.

        public: the records are public, so that runs without noise are allowed. composition: how its runs add up.
        blocks_per_person: in how many blocks a person may have records; 1 where a record is the unit.
        bound: what else its runs are held to, by name; the values at the first reservation, and the first one of a name
        that comes later, stay, and terms that contradict those there are bind nothing: see `terms`.
        Raises Refused for an infinite cap, and for one of which the composition leaves nothing.
        """
        rules.check_name(population, "population")
        rules.check_new(composition, cap, blocks_per_person)
        terms = Terms(bool(public), composition, blocks_per_person, dict(bound or {}))
        self._append(lambda books: declaration(books, population, cap, terms))

    def declare_block(self, population: str, block: str, cap: Budget | None = None) -> None:
        """Enters a block at first sight; does nothing when the ledger has it already.

        cap: the population's, as it is now, when None. What was charged to the whole population before it had blocks
        counts in each of them. Raises Refused for an unknown population and for a name that differs in case alone.
        """
        rules.check_block_name(block)

        def decide(books: Books) -> list[Draft]:
            limit = cap or books.cap(population)
            rules.check_new_block(books, population, block, limit)
            draft = Draft("cap", population, limit, about={"declared": True}, block=block)
            return [] if block in books.blocks(population) else [draft]

        self._append(decide)

    def retire_block(self, population: str, block: str) -> None:
        """Lets no run use a block ever again; does nothing the second time. Raises Refused for an unknown block."""
        rules.check_block_name(block)

        def decide(books: Books) -> list[Draft]:
            cap = books.cap(population, block)
            draft = Draft("cap", population, cap, about={"retired": True}, block=block)
            return [] if (population, block) in books.retired else [draft]

        self._append(decide)

    def overrule(self, population: str, block: str, other: str, *, by: str) -> None:
        """The owner of the data lets two blocks hold exactly the same; does nothing the second time.

        by: who says so, which the row keeps. Raises Refused for an unknown population and for one block twice.
        """
        for name in (block, other):
            rules.check_block_name(name)
        rules.check_name(by, "name of who overrules")
        if block == other:
            raise Refused(f"block {block!r} holds what it holds; name another block that may hold the same.")

        def decide(books: Books) -> list[Draft]:
            cap, about = books.cap(population), {"overruled": sorted((block, other)), "by": by}
            is_known = (population, frozenset((block, other))) in books.allowed
            return [] if is_known else [Draft("cap", population, cap, about=about)]

        self._append(decide)

    def set_cap(self, population: str, cap: Budget, *, block: str = WHOLE_POPULATION) -> None:
        """The owner of the data changes a cap; below what is charged it is allowed, and nothing more fits.

        The cap of a population that has blocks is the one that its next blocks begin with.
        Raises Refused for an unknown population or block, and for an infinite cap.
        """

        def decide(books: Books) -> list[Draft]:
            books.cap(population, block)
            rules.check_cap(books.term(population).composition, cap)
            return [Draft("cap", population, cap, block=block)]

        self._append(decide)

    def reserve(
        self,
        run_id: str,
        population: str,
        cost: Budget,
        *,
        events: Events,
        about: Mapping[str, str],
        blocks: Blocks = (WHOLE_POPULATION,),
        held: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Charges a run before it sees a record; does nothing when the same run is open already (it resumes).

        cost: the most that the run can spend; infinite epsilon for a run without noise.
        events: the planned releases. about: notes for people, "adjacency" where it is not add-or-remove-one, and
        "retraining" where it is a scheduled one, which is charged only once.
        blocks: those that the run reads, all charged or none; a mapping gives each block events of its own.
        held: digests that only the owner's key makes of what each block holds; blocks with one in common hold the same.
        Raises BudgetRefused when a cap does not allow it, and where a block holds exactly what a block of another name
        holds or held, unless the owner overruled that; Refused for what is unknown, for events without a bound
        under the population's composition, for another adjacency than the one a private population was charged
        under, and for a run_id that is taken: by another reservation, or by a run that has ended.
        """
        rules.check_name(run_id, "run_id")
        run = Draft("reserve", population, cost, run_id, events, about)
        # Priced before the database is locked: accountants take their time.
        drafts = reservation(self._books().term(population), run, blocks, held or {})

        def decide(books: Books) -> list[Draft]:
            rules.check_blocks(books, population, [draft.block for draft in drafts])
            if run_id in books.runs:
                rules.check_resumes(books.runs[run_id], drafts)
                return []
            rules.check_once(books, population, about)
            rules.check_repeats(books, population, held or {})
            rules.check_fits(books, drafts)
            return drafts

        self._append(decide)

    def settle(
        self,
        run_id: str,
        spent: Budget,
        *,
        events: Events,
        blocks: Mapping[str, Events] | None = None,
        model: str | None = None,
    ) -> None:
        """Ends a run at what it really spent; does nothing when it is settled so already.

        events: the releases that happened. blocks: the same for each block, where these differ. model: its SHA-256.
        Raises BudgetRefused when it spent more than it reserved, Refused for a run that is unknown or ended otherwise.
        """
        drafts = settlement(self._books(), run_id, spent, events, blocks or {}, model)

        def decide(books: Books) -> list[Draft]:
            run = rules.find(books, run_id)
            rules.check_same_model(run_id, run, model)
            if run.status == "settled" and run.charged == spent:
                return []
            rules.check_settles(run_id, run, spent)
            return drafts

        self._append(decide)

    def forfeit(self, run_id: str) -> None:
        """Gives a run up: its whole reservation counts as spent for ever; does nothing the second time.

        Raises Refused for an unknown and for a settled run.
        """

        def decide(books: Books) -> list[Draft]:
            run = rules.find(books, run_id)
            if run.status == "settled":
                raise Refused(f"run {run_id!r} is settled at {in_words(run.charged)}; leave it at that.")
            blocks = run.amounts if run.status == "open" else ()
            return [Draft("forfeit", run.population, run.reserved, run_id, block=block) for block in blocks]

        self._append(decide)

    def _append(self, decide: _Decision) -> None:
        self._store.append(lambda entries: decide(self._memory.books(entries)))

"""What a run will be refused for, found before anything starts: by its settings, its plan, its files and the ledger.

The stages find all of it again, each for itself; this is for the person who waits.
"""

from dataclasses import dataclass
from pathlib import Path

from algorithms.core.method import Plan
from algorithms.core.receipt import reserved_events
from algorithms.errors import BudgetRefusedError
from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.ledger import Balance
from data import PublicDescription
from data.prepare.fetch import check_local
from data.prepare.secret_key import OWNER_KEY, owner_key
from data.schema import registry
from tasks.calibrate import plan_for
from tasks.config.environment import home
from tasks.config.params import Params
from tasks.runs.encoders import public_of
from tasks.runs.sanity import doubts, records_of
from tasks.runs.summary import open_ledger


@dataclass(frozen=True)
class Outlook:
    """What there is to know of a run before it starts.

    doubts: why it promises no useful model. cap: of the population. balance: None where it was never charged. fits: how
    many runs like this the caps allow; None for as many as you like. is_begun: whether a run of just this cost was
    reserved before, which this one may be: it then goes on, or is handed out, for nothing.
    """

    public: PublicDescription
    plan: Plan
    doubts: tuple[str, ...]
    cap: Budget
    balance: Balance | None
    fits: int | None
    is_begun: bool

    def check(self) -> None:
        """Raises BudgetRefusedError where the population cannot pay for the run."""
        if self.fits != 0 or self.is_begun:
            return
        cost, left = self.plan.cost, self.cap if self.balance is None else self.balance.remaining
        raise BudgetRefusedError(
            f"the run costs epsilon {cost.epsilon:g} at delta {cost.delta:g}, and population {self.public.population!r}"
            f" has epsilon {left.epsilon:.4g} and delta {left.delta:.4g} left of its cap; ask for a smaller epsilon, or"
            f" let the owner raise the cap: epsilonflow ledger cap {self.public.population} --epsilon E --delta D"
        )


def outlook(root: Path, settings: Params) -> Outlook:
    """The outlook of the run that `settings` describe in the checkout at `root`; nothing is spent, no record is used.

    Raises what `plan_for` raises, and DataRefusedError for an unknown data set and for a file that is not there or not
    the declared one.
    """
    cards = root / "data" / "cards"
    card = registry.card(settings.data.dataset, cards)
    public = public_of(card, settings.data)
    plan = plan_for(settings, public)
    folder = home()
    check_local(card, root, key=owner_key(folder) if (folder / OWNER_KEY).exists() else None)
    ledger, population = open_ledger(root), public.population
    cap, balance, fits, begun = Budget(public.cap_epsilon, public.cap_delta), None, None, False
    if population in ledger.populations():
        balance = ledger.balance(population)
        cap = balance.cap
        named = [block.name for block in ledger.blocks(population) if block.name in settings.data.blocks]
        events = reserved_events(plan)
        fits = ledger.affordable(population, plan.cost, events=events, adjacency=plan.adjacency, blocks=named)
        rows = ledger.history(population)
        begun = any(row.kind == "reserve" and row.budget == plan.cost for row in rows)
    elif public.composition == "basic":
        cost, most = plan.cost, public.blocks_per_person
        too_much = cost.epsilon * most > cap.epsilon or cost.delta * most > cap.delta
        fits = 0 if too_much and not public.public else None
    found = doubts(settings, plan, records_of(public, cards))
    return Outlook(public, plan, tuple(found), cap, balance, fits, begun)

"""How a data card's population is entered into the ledger, and what of it can never change."""

from pathlib import Path

from algorithms.privacy.budget import Budget
from algorithms.privacy.errors import Refused
from algorithms.privacy.ledger import Composition, Ledger
from data import PublicDescription
from tasks.ledger_heads import check_usual, keep_usual


def enter(ledger: Ledger, public: PublicDescription, *, home: Path) -> None:
    """`declare`, in the ledger where these people are charged always; raises Refused for another one."""
    if not public.public:
        check_usual(ledger, public.population, home=home)
    declare(ledger, public)
    if not public.public:
        keep_usual(ledger, public.population, home=home)


def declare(ledger: Ledger, public: PublicDescription) -> None:
    """Enters the population and its blocks at first sight; raises Refused where one of that name is of another kind."""
    cap = Budget(public.cap_epsilon, public.cap_delta)
    composition = Composition(public.composition, public.composition_order)
    count = public.blocks_per_person
    ledger.declare(
        public.population, cap, public=public.public, composition=composition, blocks_per_person=count
    )
    balance, name = ledger.balance(public.population), public.population
    if balance.public != public.public:
        kinds = ("private", "public")
        raise Refused(
            f"the population {name!r} is {kinds[not public.public]} in the ledger, but the card of"
            f" {public.dataset!r} says {kinds[public.public]}; give the card a population of its own."
        )
    if (balance.composition, balance.blocks_per_person) != (composition, count):
        raise Refused(
            f"the population {name!r} was declared under {balance.composition} with a person in at most"
            f" {balance.blocks_per_person} blocks, but the card of {public.dataset!r} says {composition} and {count};"
            " neither ever changes, so set the card back or give it a population of its own."
        )
    for block in public.blocks:
        ledger.declare_block(public.population, block)

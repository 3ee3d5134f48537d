"""How a data card's population is entered into the ledger, and what of it can never change."""

from pathlib import Path

from algorithms.privacy.budget import Budget
from algorithms.privacy.errors import Refused
from algorithms.privacy.ledger import Composition, Ledger
from data import PublicDescription
from tasks.ledger_heads import check_usual, keep_usual

_HOLDOUT = "holdout"


def enter(ledger: Ledger, public: PublicDescription, *, home: Path) -> None:
    """`declare`, in the ledger where these people are charged always; raises Refused for another one."""
    if not public.public:
        check_usual(ledger, public.population, home=home)
    declare(ledger, public)
    if not public.public:
        keep_usual(ledger, public.population, home=home)


def declare(ledger: Ledger, public: PublicDescription) -> None:
    """Enters the population and its blocks at first sight; raises Refused where one of that name is of another kind.

    Of another kind is also a private one of which other records were held out: those trained on would be published.
    """
    cap = Budget(public.cap_epsilon, public.cap_delta)
    ledger.declare(
        public.population,
        cap,
        public=public.public,
        composition=Composition(public.composition, public.composition_order),
        blocks_per_person=public.blocks_per_person,
        bound=_bound(public),
    )
    _check_kind(ledger, public)
    _check_bound(ledger, public)
    for block in public.blocks:
        ledger.declare_block(public.population, block)


def _bound(public: PublicDescription) -> dict[str, str]:
    return {} if public.holdout_rule is None else {_HOLDOUT: public.holdout_rule}


def _check_kind(ledger: Ledger, public: PublicDescription) -> None:
    balance, name = ledger.balance(public.population), public.population
    if balance.public != public.public:
        kinds = ("private", "public")
        raise Refused(
            f"the population {name!r} is {kinds[not public.public]} in the ledger, but the card of"
            f" {public.dataset!r} says {kinds[public.public]}; give the card a population of its own."
        )
    composition, count = (
        Composition(public.composition, public.composition_order),
        public.blocks_per_person,
    )
    if (balance.composition, balance.blocks_per_person) != (composition, count):
        raise Refused(
            f"the population {name!r} was declared under {balance.composition} with a person in at most"
            f" {balance.blocks_per_person} blocks, but the card of {public.dataset!r} says {composition} and {count};"
            " neither ever changes, so set the card back or give it a population of its own."
        )


def _check_bound(ledger: Ledger, public: PublicDescription) -> None:
    terms, asked = ledger.terms(public.population), _bound(public)
    if asked.get(_HOLDOUT) != terms.bound.get(_HOLDOUT) and not public.public:
        raise Refused(
            f"the population {public.population!r} holds out other records than the card of {public.dataset!r}, whose"
            " split, columns, classes or test file have changed or are those of another card, so that records trained"
            " on could be published as held out; set them back or, for other people only, give the card a population"
            " of its own."
        )

"""Checking the sentences of a privacy card: each is written again from the card's own fields, and compared.

Words that were changed by themselves are found so; what stands in a field of its own, such as the unit, is the owner's.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from algorithms.privacy.card import words as card_words
from algorithms.privacy.card.model import PrivacyCard
from algorithms.privacy.card.start import is_started, without_start
from algorithms.privacy.card.verdict import Check
from algorithms.privacy.card.words import DIAGNOSED, Guarantee
from algorithms.privacy.ledger.composition import BASIC, Composition

_NUMBER = re.compile(r"The number of training records, ([0-9]+), which")
_ORDER = re.compile(r" of order ([0-9.e+-]+) ")
_NOT_PRIVATE = "NOT PRIVATE: "


def check_sentences(
    card: PrivacyCard, guarantee: Guarantee, plan: Mapping[str, Any] | None
) -> Iterator[Check]:
    """Whether the card's sentences are those of its numbers.

    guarantee: what its events allow. plan: the one beside it, or None, where the card's own words are taken for what
    the plan knows.
    """
    expected = _statement(card, guarantee, plan)
    same = card.setting.statement == expected
    yield Check("statement", same, "of the card's numbers" if same else f"the card's numbers say: {expected}")
    differing = [name for name, stated, expected in _pairs(card, guarantee, plan) if stated != expected]
    words = (
        f"not those of the card's other fields: {', '.join(differing)}"
        if differing
        else "those of its fields"
    )
    yield Check("words", not differing, words)


def rule_across_runs(card: PrivacyCard) -> Composition | None:
    """How the runs on the card's population add up; None where its sentence names no way."""
    accounting = card.accounting
    if accounting.blocks is not None:
        return Composition(accounting.blocks.composition.kind, accounting.blocks.composition.order)
    stated = accounting.population.statement
    if stated == card_words.UNKEPT:
        return BASIC
    rules = [BASIC, Composition("zcdp"), *_renyi(stated)]
    return next((rule for rule in rules if _across_runs(rule, on_blocks=False) == stated), None)


def _renyi(sentence: str) -> list[Composition]:
    found = _ORDER.search(sentence)
    try:
        return [] if found is None else [Composition("renyi", float(found[1]))]
    except ValueError:
        return []


def _across_runs(rule: Composition, *, on_blocks: bool) -> str:
    return card_words.across_runs({"composition": rule.to_json(), "blocks": on_blocks})


def _statement(card: PrivacyCard, guarantee: Guarantee, plan: Mapping[str, Any] | None) -> str:
    accounting, setting = card.accounting, card.setting
    return card_words.statement(
        guarantee,
        epsilon=getattr(accounting.epsilon, accounting.accountant),
        delta=accounting.delta,
        unit=setting.unit,
        caveat=_caveat(card, guarantee, plan),
        **_circumstances(card),
    )


def _circumstances(card: PrivacyCard) -> dict[str, Any]:
    """What the words about a run depend on, beside what it promises."""
    started = is_started(card.mechanism.model.notes)
    return {
        "adjacency": card.setting.adjacency,
        "diagnosed": card.mechanism.diagnostics,
        "started": started,
    }


def _caveat(card: PrivacyCard, guarantee: Guarantee, plan: Mapping[str, Any] | None) -> str | None:
    """Why the plan says that its epsilon does not hold; without a plan in the words of a card that promises nothing."""
    if plan is not None:
        own = plan.get("own")
        return own.get("not_private") if isinstance(own, Mapping) else None
    stated = without_start(card.setting.statement)
    usual = card_words.statement(guarantee, epsilon=1.0, delta=0.5, unit="", diagnosed=False)
    if guarantee != "seeded" or stated.startswith(usual.split(";")[0]) or not stated.startswith(_NOT_PRIVATE):
        return None
    return stated.removeprefix(_NOT_PRIVATE).removesuffix(f" {DIAGNOSED}")


def _pairs(
    card: PrivacyCard, guarantee: Guarantee, plan: Mapping[str, Any] | None
) -> Iterator[tuple[str, object, object]]:
    """The name, the words and the expected words of each field that follows from others."""
    public = _public(card, plan)
    circumstances = _circumstances(card)
    scope = card_words.scope(guarantee, public, **circumstances)
    for name in type(scope).model_fields:
        yield f"scope.{name}", getattr(card.scope, name), getattr(scope, name)
    duties = card_words.responsibility(guarantee, public, started=circumstances["started"])
    for name in type(duties).model_fields:
        yield f"responsibility.{name}", getattr(card.responsibility, name), getattr(duties, name)
    transforms = card_words.TRANSFORMS.values()
    stated = card.mechanism.transform
    yield "mechanism.transform", stated, stated if stated in transforms else transforms
    within, accounting = card.accounting.composition, card.accounting
    yield "accounting.composition", within.statement, card_words.COMPOSITION[within.kind]
    rounding = card_words.NO_FLOATING_POINT if guarantee == "none" else card_words.FLOATING_POINT
    yield "implementation.floating_point", card.implementation.floating_point, rounding
    rule, blocks = rule_across_runs(card), accounting.blocks
    if rule is not None:
        is_kept = card.evidence.ledger_head != card_words.NO_LEDGER
        across = _across_runs(rule, on_blocks=blocks is not None) if is_kept else card_words.UNKEPT
        yield "accounting.population", accounting.population.statement, across
    if rule is not None and blocks is not None:
        unit = card_words.block_unit(card.setting.unit, blocks.blocks_per_person)
        yield "accounting.blocks.unit", blocks.unit, unit
        yield "accounting.blocks", blocks.composition.statement, card_words.across_runs_of(rule)


def _public(card: PrivacyCard, plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the sentences take from the description of the data set."""
    setting = card.setting
    return {
        "unit": setting.unit,
        "source": setting.source,
        "public": setting.public_records,
        "holdout": "none" if card.scope.holdout == card_words.NOT_MEASURED else "public",
        "records": _records(card, plan),
    }


def _records(card: PrivacyCard, plan: Mapping[str, Any] | None) -> object:
    """The number of training records, None where it is private; without a plan as the card's own words have it."""
    known = None if plan is None else plan.get("public")
    if isinstance(known, Mapping):
        return known.get("records")
    found = _NUMBER.search(card.scope.not_protected[-1])
    return None if found is None else int(found[1])

"""Checking what a privacy card says against itself: promise, releases, and what each account had to be charged."""

import math
from collections.abc import Iterator, Mapping

import dp_accounting as dp

from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.card.blocks import Blocks, is_left, least_spent
from algorithms.privacy.card.model import GENERATORS, PrivacyCard, Query, Span
from algorithms.privacy.card.parts import Amount
from algorithms.privacy.card.sentences import rule_across_runs
from algorithms.privacy.card.terms import Between, fits
from algorithms.privacy.card.verdict import BELOW, Check, covers, in_words
from algorithms.privacy.card.words import Guarantee
from algorithms.privacy.ledger.composition import Composition


def guarantee_of(card: PrivacyCard, recomputed: Mapping[str, float | None]) -> Guarantee:
    """What the events, the noise and the diagnostics of a card allow it to promise."""
    if recomputed[card.accounting.accountant] is None:
        return "none"
    if not card.implementation.noise.private:
        return "seeded"
    return "diagnosed" if card.mechanism.diagnostics else "private"


def check_claims(
    card: PrivacyCard, recomputed: Mapping[str, float | None], schedule: Schedule
) -> Iterator[Check]:
    """The claims that follow from the card's events; recomputed: their epsilon by accountant."""
    yield from _promise(card, private=guarantee_of(card, recomputed) == "private")
    yield from _releases(card, schedule)
    cost = recomputed[card.accounting.accountant]
    budget = Budget(math.inf if cost is None else cost, card.accounting.delta)
    yield (
        _population(card, budget)
        if card.accounting.blocks is None
        else _blocks(card.accounting.blocks, card, budget)
    )


def _promise(card: PrivacyCard, *, private: bool) -> Iterator[Check]:
    setting, stated = card.setting, card.accounting
    cost: float | None = getattr(stated.epsilon, stated.accountant)
    same = setting.private == private and setting.epsilon == (cost if private else None)
    same = same and setting.delta == stated.delta
    words = f"private: {setting.private}, epsilon {in_words(setting.epsilon)}, delta {setting.delta:g}"
    yield Check("promise", same, words)
    if private:
        limit = stated.target.epsilon
        within = limit is None or (cost is not None and cost <= limit * (1 + BELOW))
        within = within and stated.delta <= stated.target.delta
        words = f"epsilon {in_words(cost)} of {in_words(limit)} at delta {stated.delta:g}"
        yield Check("target", within, words)
    noise = card.implementation.noise
    agrees = noise.generator == GENERATORS[noise.private]
    words = (
        f"{noise.kind}: {noise.generator}"
        if agrees
        else f"{noise.kind} noise is of {GENERATORS[noise.private]}"
    )
    yield Check("noise", agrees, words)


def _releases(card: PrivacyCard, schedule: Schedule) -> Iterator[Check]:
    asked, stated = card.mechanism.queries, card.mechanism.releases
    releases = sum(row.count for row in card.events)
    counted = stated == releases == sum(query.count for query in asked)
    yield Check("releases", counted, f"{releases} events, {stated} releases stated")
    events = [event for event, _ in schedule]
    same = all(any(_is_of(event, query) for query in asked) for event in events)
    same = same and all(_is_reached(query, events) for query in asked)
    words = "the terms of the events" if same else "other sampling or noise than that of the events"
    yield Check("queries", same, words)


def _is_of(event: dp.DpEvent, query: Query) -> bool:
    return _fits(event, query, _between(query.sampling_rate), _between(query.noise_multiplier))


def _is_reached(query: Query, events: list[dp.DpEvent]) -> bool:
    """Whether the least and the most noise multiplier and rate of a query are those of some event."""
    rate, multiplier = _between(query.sampling_rate), _between(query.noise_multiplier)
    ends = [(rate, Between(end, end)) for end in (multiplier.least, multiplier.most)]
    ends += [(Between(end, end), multiplier) for end in (rate.least, rate.most)]
    return all(any(_fits(event, query, *end) for event in events) for end in ends)


def _fits(event: dp.DpEvent, query: Query, rate: Between, multiplier: Between) -> bool:
    return fits(event, sampling=query.sampling, noise=query.noise, rate=rate, multiplier=multiplier)


def _between(span: Span) -> Between:
    return Between(*(math.inf if end is None else end for end in (span.least, span.most)))


def _population(card: PrivacyCard, cost: Budget) -> Check:
    """Whether this run is in what the population had spent; of one with blocks, another block may be charged most."""
    rule, spent, cap = (
        rule_across_runs(card),
        card.accounting.population.spent,
        card.accounting.population.cap,
    )
    if rule is None:
        return Check("population", False, "says nothing known of how its runs add up")
    left = card.accounting.population.remaining
    least = least_spent(rule, cost, _events(card), card.setting.adjacency, delta=cap.delta)
    words = f"spent {_pair(spent)}, this run alone {least.epsilon:.10g} at delta {least.delta:g}"
    if not is_left(rule, cap, spent, left):
        return Check("population", False, f"{words}; {_pair(left)} left of {_pair(cap)} is too much")
    return Check("population", _holds(spent, least), words)


def _blocks(blocks: Blocks, card: PrivacyCard, cost: Budget) -> Check:
    """Whether each block had at least this run's cost charged to it."""
    least = blocks.least_spent(cost, _events(card), card.setting.adjacency)
    too_little = [
        f"{block.name}: spent {_pair(block.spent)}, this run alone {least[block.name].epsilon:.10g} at delta"
        f" {least[block.name].delta:g}"
        for block in blocks.charged
        if not _holds(block.spent, least[block.name])
    ]
    rule = Composition(blocks.composition.kind, blocks.composition.order)
    too_little += [
        f"{block.name}: {_pair(block.remaining)} left of {_pair(block.cap)} is too much"
        for block in blocks.charged
        if not is_left(rule, block.cap, block.spent, block.remaining)
    ]
    detail = "; ".join(too_little[:3]) or f"the cost of this run is in each of {len(blocks.charged)}"
    return Check("blocks", not too_little, detail)


def _events(card: PrivacyCard) -> list[dict[str, object]]:
    return [row.model_dump() for row in card.events]


def _holds(spent: Amount, least: Budget) -> bool:
    return covers(spent.epsilon, least.epsilon) and spent.delta >= least.delta * (1 - BELOW)


def _pair(amount: Amount) -> str:
    return f"{in_words(amount.epsilon)} at delta {amount.delta:g}"

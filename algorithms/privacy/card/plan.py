"""Checking a privacy card against the plan beside it: its releases, how they are counted, and the settings."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from algorithms.privacy.accounting.events import Schedule, schedule_from_json
from algorithms.privacy.card import words as card_words
from algorithms.privacy.card.model import PrivacyCard
from algorithms.privacy.card.trace import merged, same_events
from algorithms.privacy.card.verdict import Check

COMPOSITION, RELEASES, MECHANISM = "composition", "releases of the plan", "mechanism"
NAMES = (COMPOSITION, RELEASES, MECHANISM)
_FIXED = {"kind": "schedule"}


def mechanism_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a card says of the mechanism that a plan has decided."""
    copied = ("algorithm", "settings", "steps", "noise_multiplier", "sampling_rate", "divisor")
    model = plan["model"]
    return {
        **{name: plan[name] for name in copied},
        "features": card_words.features(plan["features"]),
        "model": {
            **{name: model[name] for name in ("name", "seed", "parameters")},
            "notes": card_words.notes(model["notes"]),
        },
    }


def read_plan(path: Path) -> dict[str, Any] | None:
    """The plan's document; None where there is none, and an empty one where it cannot be read."""
    if not path.is_file():
        return None
    try:
        plan = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return plan if isinstance(plan, dict) else {}


def check_plan(plan: Mapping[str, Any] | None, card: PrivacyCard, schedule: Schedule) -> Iterator[Check]:
    """Whether the card is one of a run of this plan; schedule: the card's events."""
    if plan is None:
        yield from (Check(name, None, "no plan lies beside the card") for name in NAMES)
        return
    try:
        yield from [_composition(plan, card), _releases(plan, schedule), _mechanism(plan, card)]
    except (KeyError, TypeError, ValueError, AttributeError):
        yield from (Check(name, False, "the plan cannot be read") for name in NAMES)


def _composition(plan: Mapping[str, Any], card: PrivacyCard) -> Check:
    planned = plan.get("filter", _FIXED), plan["adjacency"]
    chosen = card.accounting.composition.model_dump(
        include={"kind", "rho", "order", "limit"}, exclude_none=True
    )
    same = planned == (chosen, card.setting.adjacency)
    return Check(COMPOSITION, same, "as the plan has it" if same else f"the plan has {json.dumps(planned)}")


def _releases(plan: Mapping[str, Any], schedule: Schedule) -> Check:
    """A fixed schedule is released to its end, or the run has failed; under a filter its beginning alone is fixed."""
    if plan.get("filter", _FIXED) == _FIXED:
        same = same_events(schedule_from_json(plan["schedule"]), schedule)
        return Check(RELEASES, same, "the card's events" if same else "other events than the card's")
    before = merged(schedule_from_json(plan.get("before", [])))
    begins = not before or same_events(before, merged(_first(schedule, sum(count for _, count in before))))
    words = "the events before those that are chosen on the way"
    return Check(RELEASES, begins, words if begins else f"{words} are others than the card's")


def _first(schedule: Schedule, count: int) -> Schedule:
    """The first so many releases of a schedule."""
    first = []
    for event, times in schedule:
        first += [(event, min(times, count))] if count > 0 else []
        count -= times
    return first


def _mechanism(plan: Mapping[str, Any], card: PrivacyCard) -> Check:
    mechanism, setting, accounting = card.mechanism.model_dump(), card.setting, card.accounting
    is_fixed = plan.get("filter", _FIXED) == _FIXED
    planned = mechanism_of(plan) | {
        "noise": plan["noise"],
        "diagnostics": plan.get("diagnostics", card.mechanism.diagnostics),
        "dataset": plan["dataset"],
        "target": plan["target"],
        "delta": plan["delta"],
        "accountant": plan["accountant"] if is_fixed else "rdp",
    }
    stated = mechanism | {
        "noise": card.implementation.noise.kind,
        "dataset": setting.dataset,
        "target": accounting.target.model_dump(),
        "delta": accounting.delta,
        "accountant": accounting.accountant,
    }
    differing = [name for name, value in planned.items() if stated[name] != value]
    words = f"the plan has another {', '.join(differing)}" if differing else "as the plan has it"
    return Check(MECHANISM, not differing, words)

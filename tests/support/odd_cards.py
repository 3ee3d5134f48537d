"""Cards of events that no run has, signed anew: nested at random, with numbers at the ends of their ranges and beyond.

Some state what `card verify` computes, so that they could hold.
"""

import copy
import random
from typing import Any

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.epsilon import adjacency_named
from algorithms.privacy.accounting.events import schedule_from_json
from algorithms.privacy.card import recompute, verify_card
from algorithms.privacy.card.schema import CompositionSection

Document = dict[str, Any]
_BEYOND = (0, 0.0, -1, 1e-320, 1e308, 10**400, "1", None, True, 1.5, [], {})
_NOISE, _RATE = (0.3, 0.7, 1.0, 2, 50.0, 1e-6, 1e12), (0, 0.0, 1, 0.01, 0.3, 0.999999, 1e-300)
_COUNT, _GROUP, _STEPS = (0, 1, 2, 7, 1000, 10**6, 10**9), (1, 2, 10, 1000), (1, 2, 50, 1000, 10**6)
_LEAVES: dict[str, dict[str, tuple[Any, ...]]] = {
    "GaussianDpEvent": {"noise_multiplier": _NOISE},
    "LaplaceDpEvent": {"noise_multiplier": _NOISE},
    "PureDpEvent": {"epsilon": (0, 0.1, 1, 1e-9, 1e3, 1e308)},
    "ZCDpEvent": {"rho": (0.01,), "xi": (0, 0.1)},
    "RenyiDpEvent": {"order": (2.0, 6, 1e5), "bound": (0.1,)},
    "ObjectivePerturbationDpEvent": {"noise_multiplier": _NOISE, "curvature_ratio": (0, 0.1, 10.0, 1e300)},
    "SampledGroupDpEvent": {"noise_multiplier": _NOISE, "sampling_probability": _RATE, "count": _GROUP},
    "RandomAllocationDpEvent": {"noise_multiplier": _NOISE, "parts": _GROUP, "steps": (1, 2, 10)},
    "CorrelatedDpEvent": {"noise_multiplier": _NOISE, "coefficients": ([1.0], [1.0, 0.5], [1e-6, 1e6], []),
                          "weights": ([], [], [0.3]), "decays": ([], [], [0.9]), "leaves": (0, 0, 8, 10**6),
                          "parts": (1, 10, 10**4), "rate": (1.0, 0.2), "steps": _STEPS},
    "CorrelatedStepDpEvent": {"noise_multiplier": (1.0,), "parts": (10,), "rate": (1.0,)},
    "NoOpDpEvent": {},
    "NonPrivateDpEvent": {},
    "X": {},
}  # fmt: skip
_HOLDERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "PoissonSampledDpEvent": {"sampling_probability": _RATE},
    "SampledWithoutReplacementDpEvent": {
        "source_dataset_size": (1000,),
        "sample_size": (0, 1, 50, 1000, 1001),
    },
    "SelfComposedDpEvent": {"count": _COUNT},
    "RepeatAndSelectDpEvent": {"mean": (1, 1.0, 10.0, 1e6), "shape": (0, 0.0, 1.0, 2.0, None, 1e300, 1e-9)},
    "ComposedDpEvent": {},
    "EitherDpEvent": {},
    "DisjointPartsDpEvent": {},
}
_HOLDS_ONE = 4
"""Of these, how many hold one event; the others hold some."""


def odd_card(cards: list[Document], draw: random.Random) -> Document:
    """One of these cards, with other events; in half of the cases with the numbers that follow from them."""
    card = copy.deepcopy(draw.choice(cards))
    events = [
        {"event": _tree(draw, 5), "count": draw.choice(_COUNT)} for _ in range(draw.choice((1, 1, 2, 3)))
    ]
    card["events"] = events
    card["accounting"]["composition"] = {"kind": "schedule", "rho": None, "order": None, "limit": None}
    delta = draw.choice((card["accounting"]["delta"], 1e-5, 0.0, 5e-324, 0.5))
    card["accounting"]["delta"] = card["setting"]["delta"] = card["accounting"]["target"]["delta"] = delta
    if draw.random() < 0.5:
        try:
            _state_what_follows(card)
        except (RefusedError, ArithmeticError, ValueError, TypeError, IndexError):
            return card
    return card


def _tree(draw: random.Random, depth: int) -> Document:
    kinds = _LEAVES if depth == 0 or draw.random() < 0.4 else _HOLDERS
    kind = draw.choice([*kinds])
    fields = {name: draw.choice(values) for name, values in kinds[kind].items()}
    if fields and draw.random() < 0.05:
        fields[draw.choice([*fields])] = draw.choice(_BEYOND)
    if kind in [*_HOLDERS][:_HOLDS_ONE]:
        fields["event"] = _tree(draw, depth - 1)
    elif kind in _HOLDERS:
        fields["events"] = [_tree(draw, depth - 1) for _ in range(draw.choice((0, 1, 2, 3)))]
    return {"type": kind, **fields}


def _state_what_follows(card: Document) -> None:
    accounting, setting, mechanism = card["accounting"], card["setting"], card["mechanism"]
    prices = recompute(
        schedule_from_json(card["events"]),
        accounting["delta"],
        CompositionSection(**accounting["composition"]),
        adjacency_named(setting["adjacency"]),
    )
    held_to = next((name for name, price in prices.items() if price is not None), "pld")
    accounting |= {"epsilon": prices, "accountant": held_to}
    accounting["target"]["epsilon"] = None
    setting |= {"guarantee": "none" if prices[held_to] is None else "private", "epsilon": prices[held_to]}
    if prices[held_to] is None:
        card["implementation"]["rounding"] = None
    count = min(sum(n for _, n in one) for one in verify_card.shown_events(verify_card.rows_of(card)))
    mechanism |= {"releases": count, "queries": [mechanism["queries"][0] | {"count": count}]}

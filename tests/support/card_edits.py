"""Edits of a privacy card that its owner signs anew, and what the two verifiers say of the result.

An edit that understates a cost does so by at least 5 %: what is less may be a sharper price, which the verifier of one
file has to accept within the bounds of its numerics.
"""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from algorithms.errors import RefusedError
from algorithms.privacy.card import load, public_key_of, verify, verify_card

Document = dict[str, Any]


def sign(document: Document, key: Ed25519PrivateKey) -> bytes:
    """The bytes of a card with these facts, signed, whatever the facts are."""
    bare = _bytes(document | {"signature": None})
    signature = {"public_key": public_key_of(key), "value": key.sign(bare).hex()}
    return _bytes(document | {"signature": signature})


def _bytes(document: Document) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def both_verdicts(path: Path, key: str) -> tuple[bool, bool]:
    """Whether a card holds: by `card verify`, and by the verifier of one file."""
    try:
        ours = verify(load(path), path.parent, key=key).passed
    except RefusedError:
        ours = False
    try:
        theirs = all(passed is not False for _, passed, _ in verify_card.verify(path, key=key))
    except verify_card.BadCardError:
        theirs = False
    return ours, theirs


def edited(document: Document, draw: random.Random) -> tuple[str, Document]:
    """The name of an edit, and a copy of the card with it."""
    document = copy.deepcopy(document)
    edit = draw.choice(EDITS)
    edit(document, draw)
    return edit.__name__.strip("_"), document


def _understate(card: Document, draw: random.Random) -> None:
    accounting, factor = card["accounting"], draw.uniform(0.2, 0.55)
    held_to = accounting["accountant"]
    for name in {held_to, draw.choice(("pld", "rdp"))}:
        if accounting["epsilon"][name] is not None:
            accounting["epsilon"][name] *= factor
    if card["setting"]["epsilon"] is not None:
        card["setting"]["epsilon"] = accounting["epsilon"][held_to]


def _state_more(card: Document, draw: random.Random) -> None:
    costs = card["accounting"]["epsilon"]
    name = draw.choice([name for name in costs if costs[name] is not None] or ["pld"])
    costs[name] = (costs[name] or 1.0) * draw.choice((1.005, 1.5, 3.0))


def _leave_a_cost_out(card: Document, draw: random.Random) -> None:
    card["accounting"]["epsilon"][draw.choice(("pld", "rdp", "pure"))] = None


def _promise_other(card: Document, draw: random.Random) -> None:
    card["setting"]["epsilon"] = draw.choice((None, 0.1, 50.0))


def _change_noise(card: Document, draw: random.Random) -> None:
    _leaf(card, draw, "noise_multiplier", lambda z: z * draw.choice((0.3, 0.7, 0.9, 1.2, 3.0)))


def _change_rate(card: Document, draw: random.Random) -> None:
    _leaf(card, draw, "sampling_probability", lambda q: min(1.0, q * draw.choice((0.5, 1.2, 2.0, 20.0))))


def _leaf(card: Document, draw: random.Random, name: str, change: Callable[[float], float]) -> None:
    event = draw.choice(card["events"])["event"]
    while name not in event and (inner := event.get("event") or (event.get("events") or [None])[0]):
        event = inner
    if name in event:
        event[name] = change(event[name])


def _repeat(card: Document, draw: random.Random) -> None:
    row = draw.choice(card["events"])
    row["count"] *= draw.choice((2, 5, 100))


def _drop_an_event(card: Document, draw: random.Random) -> None:
    card["events"].pop(draw.randrange(len(card["events"])))


def _add_a_search(card: Document, draw: random.Random) -> None:
    inner = {"type": "GaussianDpEvent", "noise_multiplier": draw.choice((5.0, 50.0))}
    event = {"type": "RepeatAndSelectDpEvent", "event": inner, "mean": 10.0, "shape": draw.choice((0.0, 1.0))}
    card["events"].append({"event": event, "count": 1})


def _lower_delta(card: Document, draw: random.Random) -> None:
    delta = card["accounting"]["delta"] * draw.choice((0.01, 0.5))
    card["accounting"]["delta"] = card["setting"]["delta"] = delta


def _other_relation(card: Document, draw: random.Random) -> None:
    names = ("ADD_OR_REMOVE_ONE", "REPLACE_ONE", "REPLACE_SPECIAL")
    card["setting"]["adjacency"] = draw.choice(names)


def _other_composition(card: Document, draw: random.Random) -> None:
    card["accounting"]["composition"] = draw.choice(
        (
            {"kind": "schedule", "rho": None, "order": None, "limit": None},
            {"kind": "zcdp", "rho": 0.1, "order": None, "limit": None},
            {"kind": "renyi", "rho": None, "order": 6.0, "limit": 0.1},
            {"kind": "zcdp", "rho": None, "order": None, "limit": None},
        )
    )


def _other_fact(card: Document, draw: random.Random) -> None:
    """Of what decides the guarantee, the target and the rounding, and of what decides nothing."""
    section, name, value = draw.choice(_FACTS)
    card[section][name] = value


_FACTS: list[tuple[str, str, Any]] = [
    ("setting", "guarantee", "private"),
    ("setting", "guarantee", "seeded"),
    ("setting", "guarantee", "none"),
    ("setting", "title", "Another title"),
    ("setting", "dataset", "others"),
    ("setting", "records", 7),
    ("mechanism", "diagnostics", True),
    ("mechanism", "settings_from_records", True),
    ("mechanism", "releases", 10**6),
    ("mechanism", "algorithm", "another"),
    ("mechanism", "steps", 3),
    ("accounting", "accountant", "pld"),
    ("accounting", "accountant", "rdp"),
    ("accounting", "accountant", "pure"),
    ("accounting", "target", {"epsilon": 0.1, "delta": 1e-5}),
    ("accounting", "target", {"epsilon": None, "delta": 1e-5}),
    ("accounting", "target", {"epsilon": 1e6, "delta": 1e-9}),
    ("implementation", "noise", "seeded"),
    ("implementation", "rounding", None),
    ("implementation", "device", "another device"),
]


def _spoil(card: Document, draw: random.Random) -> None:
    """Makes it no card: another type, a field less or more, fields in another order."""
    section = card[draw.choice([name for name in card if isinstance(card[name], dict)])]
    name = draw.choice([*section])
    match draw.randrange(4):
        case 0:
            section[name] = draw.choice(("", [], {}, -1, 10**400, True, "1" * 63))
        case 1:
            del section[name]
        case 2:
            section["more"] = 1
        case 3:
            section[name] = section.pop(name)


def _spoil_an_event(card: Document, draw: random.Random) -> None:
    row = draw.choice(card["events"])
    row["event"] = draw.choice(
        (
            {"type": "NonPrivateDpEvent"},
            {"type": "NoOpDpEvent"},
            {"type": "os.system"},
            {"type": "GaussianDpEvent", "noise_multiplier": -1.0},
            {"type": "GaussianDpEvent", "noise_multiplier": "1"},
            {"type": "GaussianDpEvent"},
            {"type": "PoissonSampledDpEvent", "sampling_probability": 2.0, "event": row["event"]},
            {"type": "CorrelatedStepDpEvent", "noise_multiplier": 1.0, "parts": 2, "rate": 1.0},
            {"type": "ComposedDpEvent", "events": [7]},
        )
    )


def _other_checksum(card: Document, draw: random.Random) -> None:
    files = card["evidence"]["files"]
    files[draw.choice(sorted(files))] = "0" * 64


EDITS: tuple[Callable[[Document, random.Random], None], ...] = (
    _understate,
    _state_more,
    _leave_a_cost_out,
    _promise_other,
    _change_noise,
    _change_rate,
    _repeat,
    _drop_an_event,
    _add_a_search,
    _lower_delta,
    _other_relation,
    _other_composition,
    _other_fact,
    _other_fact,
    _spoil,
    _spoil_an_event,
    _other_checksum,
)

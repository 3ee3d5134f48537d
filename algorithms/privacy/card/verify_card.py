"""Check a privacy card without epsilonflow: python verify_card.py FOLDER [--key owner.pub] [--unsigned]

This file is all that is needed, with numpy, cryptography and dp-accounting (pip install numpy cryptography
dp-accounting). FOLDER is a release, or the path of a privacy_card.json. It checks, in this order:

1. the form of the card, and that its bytes are those that its facts are written as;
2. the owner's Ed25519 signature over all facts; with --key, that the owner is who you expect;
3. epsilon, computed again from the recorded events by code that shares nothing with the code that made the card;
4. that the promise (guarantee, target, number of releases, rounding) is what events and noise allow;
5. the SHA-256 of the files beside the card, and that plan.json plans these releases.

It exits with 0 if nothing failed, with 1 if something failed, with 2 if there is no card that can be read. It does not
read the trace (it has no reader of Parquet), which the checksum ties to the card; nor the ledger, which the owner has.
A card may state any epsilon from the lower bound of this computation on: whoever states more misleads nobody,
and a price by sharper numerics than these must pass.

How epsilon is computed. A release is a pair (P, Q) of output distributions, with a record and without it. All that is
needed are its two privacy profiles, delta(e) = sup_S P(S) - exp(e) Q(S), removing a record, and the same with P and Q
exchanged, adding one. Below, a mechanism is a function that gives both, and three steps follow.

- A profile becomes a privacy loss on a grid by "connect the dots" (Doroshenko et al. 2022, arXiv:2207.04380), which
  never lowers a delta: a loss inside a cell of width h goes to one of the cell's ends, at random.
- Losses of n releases add up: Fourier transforms, of losses tilted so that a tail of 1e-12 is as exact as the middle.
- A lower bound follows by coupling: n steps of at most h, each with a mean of at most h^2 / 8, move the sum by more
  than eta = n h^2 / 8 + h sqrt(n log(1/s) / 2) with probability s at most (Hoeffding), so that
  epsilon >= epsilon_of_the_grid(delta + s) - eta. Here s = delta / 1000 and eta is about a thousandth of epsilon; if
  eta is more than 3 % of epsilon, the claim is refused rather than passed.
"""

import argparse
import hashlib
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import (
    DEFAULT_RDP_ORDERS,
    _compute_rdp_repeat_and_select,
    _gamma_truncated_negative_binomial,
)
from numpy.typing import NDArray

Array = NDArray[np.float64]
Card = dict[str, Any]
"""A card, or a part of one, as it was parsed."""
Event = Card
Profile = Callable[[Array], Array]
"""delta at epsilons of at least 0."""
Mechanism = tuple[Profile, Profile]
"""The profiles of removing and of adding a record."""

MAX_BYTES, MAX_DEPTH, MAX_EVENTS, MAX_KINDS, MAX_COUNT = 2**26, 12, 200_000, 2_000, 10**9
MAX_POINTS, FIRST_POINTS, MAX_STEPS = 2**21, 2**12, 10**6
BELOW, ABOVE, ABSOLUTE, MAX_GAP = 1e-6, 1e-2, 1e-9, 0.03
ROUNDING = {"grid_bits": 24, "sum_bits": 64, "laplace_scales": 64, "laplace_error_bits": 18}
FILES = ("model.safetensors", "plan.json", "trace.parquet")
EVALUATION = "evaluation.json"
"""Beside them where private held-out records were evaluated."""
ORDERS = tuple(map(float, DEFAULT_RDP_ORDERS))


class BadCardError(Exception):
    """What is no card: one sentence for whoever asked."""


class NoBoundError(Exception):
    """No theorem that is used here bounds these events in this way."""


# ---------------------------------------------------------------- The form of a card.


def load(path: Path) -> Card:
    """The facts of a card whose bytes are those that they are written as."""
    content = _read(path)
    card: Card = _parse(content, path)
    _check_section(card, "CARD", "the card")
    if card["schema_version"] != 2 or {*card["evidence"]["files"]} - {EVALUATION} != {*FILES}:
        raise BadCardError("the card is of another version than this program, or names other files.")
    if _canonical_bytes(card) != content:
        raise BadCardError(f"{path} was edited: its bytes are not those that its facts are written as.")
    return card


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadCardError(f"{path} cannot be read ({error.strerror}).") from None
    if len(content) > MAX_BYTES:
        raise BadCardError(f"{path} is larger than {MAX_BYTES} bytes.")
    return content


def _parse(content: bytes, path: Path) -> Any:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError):
        raise BadCardError(f"{path} is no JSON document.") from None


def _canonical_bytes(card: Card) -> bytes:
    try:
        return (json.dumps(card, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except (ValueError, RecursionError):  # a number like 1e999, or a text that is none
        raise BadCardError("the card holds a number that is not finite, or no text.") from None


def _finite_number(value: Any, low: float = -sys.float_info.max, high: float = sys.float_info.max) -> bool:
    return type(value) in (int, float) and low <= value <= high


def _is_text(value: Any, pattern: str = r"\S") -> bool:
    return isinstance(value, str) and re.search(pattern, value) is not None


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


# fmt: off
KINDS: dict[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "flag": lambda value: type(value) is bool,
    "true": lambda value: value is True,
    "name": _is_text,
    "sha256": lambda value: _is_text(value, r"\A[0-9a-f]{64}\Z"),
    "hex128": lambda value: _is_text(value, r"\A[0-9a-f]{128}\Z"),
    "int": lambda value: type(value) is int,
    "count": lambda value: type(value) is int and value >= 1,
    "chance": lambda value: type(value) is float and 0 <= value <= 1,
    "number": lambda value: type(value) is float and _finite_number(value, 0),
    "positive": lambda value: type(value) is float and _finite_number(value, 5e-324),
    "settings": _is_map,
    "events": lambda value: isinstance(value, list) and len(value) > 0,
    "names": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "sums": lambda value: _is_map(value) and all(_is_text(one, r"\A[0-9a-f]{64}\Z") for one in value.values()),
    "versions": lambda value: _is_map(value) and len(value) > 0 and all(map(_is_text, value.values())),
    # of events, in which a whole number may be written as an integer
    "noise": lambda value: _finite_number(value, 1e-6, 1e12),
    "rate": lambda value: _finite_number(value, 0, 1),
    "real": lambda value: _finite_number(value, 0),
    "order": lambda value: _finite_number(value, 1 + 1e-12),
    "mean": lambda value: _finite_number(value, 1, 1e6),
    "times": lambda value: type(value) is int and 0 <= value <= MAX_COUNT,
    "steps": lambda value: type(value) is int and 1 <= value <= MAX_STEPS,
    "leaves": lambda value: type(value) is int and 0 <= value <= MAX_STEPS,
    "group": lambda value: type(value) is int and 1 <= value <= 1000,
    "numbers": lambda value: isinstance(value, list) and all(_finite_number(one, -1e6, 1e6) for one in value),
    "decays": lambda value: isinstance(value, list) and all(_finite_number(one, 0, 1 - 1e-16) for one in value),
    "event": _is_map,
    "parts": lambda value: isinstance(value, list) and all(map(_is_map, value)),
}
"""What a field may hold. Any other kind is its words (a|b), [NAME] a list of sections, NAME a section."""

SECTIONS: dict[str, str] = {
    "CARD": "schema_version:count signature:SIGNATURE? setting:SETTING mechanism:MECHANISM accounting:ACCOUNTING"
            " events:[EVENT] implementation:IMPLEMENTATION evidence:EVIDENCE",
    "SIGNATURE": "public_key:sha256 value:hex128",
    "SETTING": "guarantee:private|seeded|diagnosed|none epsilon:number? delta:chance"
               " adjacency:ADD_OR_REMOVE_ONE|REPLACE_ONE unit:name dataset:name title:name source:name licence:name"
               " population:name public_records:flag records:count? holdout:public|private|none -per_person:count"
               " -pooled:count -unit_is_stated:true -each_record_alone:true -holdout_why:name"
               " -evaluation_epsilon:number",
    "MECHANISM": "transform:none|scattering|encoder encoder:ENCODER? features:FEATURES diagnostics:flag"
                 " settings_from_records:flag algorithm:name settings:settings model:MODEL steps:count releases:count"
                 " noise_multiplier:number? sampling_rate:chance divisor:positive? queries:[QUERY]"
                 " -paper_protocol:PROTOCOL -selection_law:LAW",
    "LAW": "candidates:count noise_scale:positive gain:number? distance:chance?",
    "PROTOCOL": "paper:name settings:settings departures:names",
    "ENCODER": "name:name takes:images|texts width:count sha256:sha256 pretrained_on:name settings:name"
               " -tokens:count -padding:count",
    "FEATURES": "name:name settings:settings",
    "MODEL": "name:name seed:int parameters:count precision:float32|bfloat16 settings:settings start:sha256?"
             " files:sums reinitialize:names frozen:names augmentations:count",
    "QUERY": "kind:name sampling:name clipping:name noise:name count:count sampling_rate:SPAN clip_norm:SPAN"
             " noise_multiplier:SPAN noise_std:SPAN divisor:SPAN",
    "SPAN": "least:number? most:number?",
    "ACCOUNTING": "accountant:pld|rdp|pure epsilon:COSTS delta:chance target:AMOUNT library:dp-accounting"
                  " library_version:name discretisation:GRID composition:COMPOSITION across_runs:ACROSS"
                  " population:ACCOUNT blocks:BLOCKS?",
    "COSTS": "pld:number? rdp:number? pure:number?",
    "AMOUNT": "epsilon:number? delta:chance",
    "GRID": "pld_interval:positive? rdp_lowest_order:positive rdp_highest_order:positive rdp_orders:count",
    "COMPOSITION": "kind:schedule|zcdp|renyi rho:positive? order:order? limit:positive?",
    "ACROSS": "kind:basic|zcdp|renyi order:order?",
    "ACCOUNT": "cap:AMOUNT spent:AMOUNT remaining:AMOUNT",
    "BLOCKS": "charged:[BLOCK] blocks_per_person:count",
    "BLOCK": "cap:AMOUNT spent:AMOUNT remaining:AMOUNT name:name",
    "EVENT": "event:event count:times",
    "IMPLEMENTATION": "recorded:training|report -version:name -code:sha256 python:name packages:versions git:GIT?"
                      " device:name noise:secure|seeded cipher:AES-256-CTR rounding:ROUNDING?",
    "GIT": "commit:name dirty:flag",
    "ROUNDING": "grid_bits:count sum_bits:count laplace_scales:count laplace_error_bits:count",
    "EVIDENCE": "run_id:name ledger_head:sha256? files:sums",
}
"""The fields of each section in their order; ? after a kind also allows null, - before a name its absence."""

EVENTS: dict[str, str] = {
    "NoOpDpEvent": "",
    "NonPrivateDpEvent": "",
    "GaussianDpEvent": "noise_multiplier:noise",
    "LaplaceDpEvent": "noise_multiplier:noise",
    "PureDpEvent": "epsilon:real",
    "ZCDpEvent": "rho:real xi:real",
    "RenyiDpEvent": "order:order bound:real",
    "ObjectivePerturbationDpEvent": "noise_multiplier:noise curvature_ratio:real",
    "PoissonSampledDpEvent": "sampling_probability:rate event:event",
    "SampledWithoutReplacementDpEvent": "source_dataset_size:order sample_size:real event:event",
    "SampledGroupDpEvent": "noise_multiplier:noise sampling_probability:rate count:group",
    "SelfComposedDpEvent": "event:event count:times",
    "ComposedDpEvent": "events:parts",
    "EitherDpEvent": "events:parts",
    "DisjointPartsDpEvent": "events:parts",
    "RepeatAndSelectDpEvent": "event:event mean:mean shape:real?",
    "CorrelatedDpEvent": "noise_multiplier:noise coefficients:numbers weights:numbers decays:decays leaves:leaves"
                         " parts:steps rate:rate steps:steps",
    "CorrelatedStepDpEvent": "noise_multiplier:noise parts:steps rate:rate",
    "RandomAllocationDpEvent": "noise_multiplier:noise parts:steps steps:steps",
    "RandomAllocationStepDpEvent": "noise_multiplier:noise parts:steps",
}
"""The fields of each event, of the names that dp-accounting and epsilonflow give them."""
# fmt: on

WORST_PART = ("EitherDpEvent", "DisjointPartsDpEvent")
"""Events that tell at most as much as the worst of their parts: a mixture of mechanisms, one of which is drawn, and
mechanisms on disjoint people, of whom a record that is added or removed is in one part (McSherry 2009, Theorem 4)."""


def _check_section(value: Any, name: str, where: str) -> None:
    if not isinstance(value, dict):
        raise BadCardError(f"{where} is no object.")
    fields = [field.partition(":")[::2] for field in SECTIONS[name].split()]
    expected = [field.lstrip("-") for field, _ in fields if not (field[0] == "-" and field[1:] not in value)]
    if [*value] != expected:
        raise BadCardError(f"{where} has other fields, or in another order, than it must have.")
    for field, kind in fields:
        if (field := field.lstrip("-")) in value:
            _check_value(value[field], kind, f"{where}: {field}")


def _check_value(value: Any, kind: str, where: str) -> None:
    if kind.endswith("?"):
        if value is None:
            return
        kind = kind[:-1]
    if kind in SECTIONS:
        _check_section(value, kind, where)
    elif kind.strip("[]") in SECTIONS:
        if not isinstance(value, list) or not value:
            raise BadCardError(f"{where} is no list of at least one.")
        for one in value:
            _check_section(one, kind.strip("[]"), where)
    elif not (KINDS[kind](value) if kind in KINDS else value in kind.split("|")):
        raise BadCardError(f"{where} does not hold a value that it may have.")


# ---------------------------------------------------------------- Events.


def check_events(schedule: Sequence[Event]) -> None:
    """Refuse what is no event, and later steps that no event before them has paid for."""
    total = sum(_check_event(row["event"]) for row in schedule)
    if total > MAX_EVENTS:
        raise BadCardError(f"the card has more than {MAX_EVENTS} events.")
    _check_payments(schedule)


def _check_payments(schedule: Sequence[Event]) -> None:
    left, paid = 0, None
    for row in schedule:
        event, terms = row["event"], _terms_of_pass(row["event"])
        inner = [_row_of(one) for one in _parts(event)]
        for rows in [inner] if event["type"] == "ComposedDpEvent" else [[one] for one in inner]:
            _check_payments(rows)
        if event["type"] in ("CorrelatedDpEvent", "RandomAllocationDpEvent"):
            left, paid = event["steps"] - 1, terms
        elif event["type"] in ("CorrelatedStepDpEvent", "RandomAllocationStepDpEvent"):
            left -= row["count"]
            if terms != paid or left < 0:
                raise BadCardError(
                    "later steps stand among the events that no event before them has paid for."
                )


def _row_of(event: Event) -> Event:
    """A part of a composition as a row of a schedule."""
    is_repeated = event["type"] == "SelfComposedDpEvent"
    return {"event": event["event"], "count": event["count"]} if is_repeated else {"event": event, "count": 1}


def _terms_of_pass(event: Event) -> tuple[Any, ...]:
    kind = event["type"].replace("Step", "")
    return kind, event.get("noise_multiplier"), event.get("parts"), event.get("rate")


def _check_event(event: Any, depth: int = 0) -> int:
    form = EVENTS.get(event["type"]) if isinstance(event.get("type"), str) else None
    fields = [field.partition(":")[::2] for field in (form or "").split()]
    if form is None or set(event) != {"type", *(name for name, _ in fields)} or depth > MAX_DEPTH:
        raise BadCardError(
            "an event has an unknown type, other fields than its type, or is nested too deeply."
        )
    for name, test in fields:
        _check_value(event[name], test, f"a {event['type']}: {name}")
    kind = event["type"]
    if kind == "SampledWithoutReplacementDpEvent" and event["sample_size"] > event["source_dataset_size"]:
        raise BadCardError("a sample without replacement is larger than its data set.")
    if kind == "RandomAllocationDpEvent" and event["steps"] > event["parts"]:
        raise BadCardError("a pass has more steps than parts.")
    if kind in WORST_PART and not event["events"]:
        raise BadCardError("a choice of no event is none.")
    if kind == "CorrelatedDpEvent":
        given = [bool(event["coefficients"]), bool(event["weights"]), event["leaves"] > 0]
        is_strategy = sum(given) == 1 and len(event["weights"]) == len(event["decays"]) and event["rate"] > 0
        if not is_strategy or (event["coefficients"] and event["coefficients"][0] <= 0):
            raise BadCardError("a strategy of correlated noise is none.")
        if event["steps"] ** 2 / event["parts"] > 1e10:
            raise BadCardError("a strategy of correlated noise has more steps than this program computes.")
    return 1 + sum(_check_event(inner, depth + 1) for inner in _parts(event))


def _parts(event: Event) -> list[Event]:
    return [event["event"]] if "event" in event else event.get("events", [])


def releases(rows: Iterable[tuple[Event, int]]) -> Iterator[tuple[Event, int]]:
    """The single releases of events that consist of others, each with its count."""
    for event, count in rows:
        kind = event["type"]
        if kind in ("NoOpDpEvent", "CorrelatedStepDpEvent", "RandomAllocationStepDpEvent") or count == 0:
            continue
        if kind == "SelfComposedDpEvent":
            yield from releases([(event["event"], count * event["count"])])
        elif kind == "ComposedDpEvent":
            yield from releases((inner, count) for inner in event["events"])
        elif kind in WORST_PART and all(inner == event["events"][0] for inner in event["events"]):
            yield from releases([(event["events"][0], count)])
        elif kind == "CorrelatedDpEvent":
            inner, times = _of_correlated(event)
            yield inner, times * count
        else:
            yield event, count


def _gaussian_event(noise_multiplier: float) -> Event:
    return {"type": "GaussianDpEvent", "noise_multiplier": noise_multiplier}


def _poisson_event(rate: float, inner: Event) -> Event:
    return {"type": "PoissonSampledDpEvent", "sampling_probability": rate, "event": inner}


def _of_correlated(event: Event) -> tuple[Event, int]:
    """All steps of a run with noise C^-1 W are one Gaussian release of C G (arXiv:2202.08312, Theorem 2.1).

    In a fixed order a record moves it by the sum of C's columns at its steps, every parts-th one; with at most `parts`
    bands and a Poisson sample of each part these columns are samples by themselves (arXiv:2306.08153, Theorem 4).
    """
    steps, parts, coefficients = event["steps"], event["parts"], event["coefficients"]
    if event["rate"] < 1:
        if not 0 < len(coefficients) <= parts:
            raise NoBoundError("a sampled strategy of more bands than parts")
        norm = math.sqrt(math.fsum(c * c for c in coefficients[:steps]))
        inner = _gaussian_event(event["noise_multiplier"] / norm)
        return _poisson_event(event["rate"], inner), math.ceil(steps / parts)
    if event["leaves"]:
        squared = _tree(event["leaves"], steps, parts)
    else:
        column = np.zeros(steps)
        if coefficients:
            column[: len(coefficients)] = coefficients[:steps]
        else:
            powers = np.arange(steps - 1)
            column[0] = 1.0
            for weight, decay in zip(event["weights"], event["decays"], strict=True):
                column[1:] += weight * np.float64(decay) ** powers
        totals = np.zeros(min(parts, steps))
        for lag in range(0, steps, parts):
            # <column at step p - lag, column at step p> for p = lag, ..., steps - 1
            products = np.abs(np.cumsum(column[: steps - lag] * column[lag:]))[::-1]
            step = np.arange(lag, steps) % parts
            totals += np.bincount(step, (1.0 if lag == 0 else 2.0) * products, len(totals))[: len(totals)]
        squared = float(totals.max())
    return _gaussian_event(event["noise_multiplier"] / math.sqrt(squared)), 1


def _tree(leaves: int, steps: int, parts: int) -> float:
    """The squared change of all complete nodes of binary trees over `leaves` steps each, for the worst record."""
    totals = np.zeros(min(parts, steps))
    for first in range(0, steps, leaves):
        length, size = min(leaves, steps - first), 1
        while size <= leaves:
            nodes = length // size
            part, node = np.arange(first, first + nodes * size) % parts, np.arange(nodes * size) // size
            pairs, times = np.unique(node * parts + part, return_counts=True)
            totals += np.bincount(pairs % parts, np.square(times), len(totals))[: len(totals)]
            size *= 2
    return float(totals.max())


def under_replace_one(event: Event, adjacency: str) -> Event:
    """The event that stands for it where a record is replaced: it is removed, and another one is added."""
    kind, is_replaced = event["type"], adjacency == "REPLACE_ONE"
    if kind == "SampledWithoutReplacementDpEvent" and not is_replaced:
        raise NoBoundError("a sample of fixed size is proven under REPLACE_ONE alone")
    if kind == "DisjointPartsDpEvent" and is_replaced:
        raise NoBoundError("releases on disjoint people, between whom a record that is replaced can change")
    if _parts(event) and kind not in ("PoissonSampledDpEvent", "SampledWithoutReplacementDpEvent"):
        every = [under_replace_one(one, adjacency) for one in _parts(event)]
        return event | ({"event": every[0]} if "event" in event else {"events": every})
    if kind == "PoissonSampledDpEvent":
        inner_kind = event["event"]["type"]
        if is_replaced and inner_kind != "GaussianDpEvent":
            raise NoBoundError("a Poisson sample of other than normal noise where a record is replaced")
        if inner_kind == "PureDpEvent":
            return {
                "type": "PureDpEvent",
                "epsilon": _of_sample(event["sampling_probability"], event["event"]["epsilon"]),
            }
        return event
    if kind == "SampledWithoutReplacementDpEvent":
        inner = under_replace_one(event["event"], adjacency)
        if inner["type"] == "GaussianDpEvent":
            return event | {"event": inner}
        share = event["sample_size"] / event["source_dataset_size"]
        return {"type": "PureDpEvent", "epsilon": _of_sample(share, pure_epsilon(inner))}
    if not is_replaced or kind in ("NoOpDpEvent", "NonPrivateDpEvent"):
        return event
    if kind in ("GaussianDpEvent", "LaplaceDpEvent"):
        return event | {"noise_multiplier": event["noise_multiplier"] / 2}
    if kind == "PureDpEvent":
        return event | {"epsilon": 2 * event["epsilon"]}
    if kind == "ZCDpEvent" and event["xi"] == 0:
        return event | {"rho": 4 * event["rho"]}
    if kind == "SampledGroupDpEvent":
        rate = 1 - (1 - event["sampling_probability"]) ** event["count"]
        return _poisson_event(rate, _gaussian_event(event["noise_multiplier"] / event["count"]))
    raise NoBoundError(f"a {kind} where a record is replaced")


def _of_sample(rate: float, epsilon: float) -> float:
    """log(1 + rate (exp(epsilon) - 1)), of a sample of a pure mechanism (Balle, Barthe and Gaboardi 2018)."""
    if rate == 0:
        return 0.0
    return epsilon + math.log(rate) + math.log1p((1 / rate - 1) * math.exp(-epsilon)) if epsilon else 0.0


def pure_epsilon(event: Event) -> float:
    """The epsilon at delta 0 of an event that `under_replace_one` returned."""
    kind = event["type"]
    if kind in ("NoOpDpEvent", "NonPrivateDpEvent"):
        return 0.0 if kind == "NoOpDpEvent" else math.inf
    if kind == "PureDpEvent":
        return float(event["epsilon"])
    if kind == "LaplaceDpEvent":
        return float(1 / event["noise_multiplier"])
    if kind == "PoissonSampledDpEvent":
        return _of_sample(event["sampling_probability"], pure_epsilon(event["event"]))
    if kind == "SelfComposedDpEvent":
        return float(event["count"]) * pure_epsilon(event["event"])
    if kind == "ComposedDpEvent":
        return math.fsum(map(pure_epsilon, event["events"]))
    if kind in WORST_PART:
        return max(map(pure_epsilon, event["events"]))
    raise NoBoundError(f"a {kind} has no pure epsilon")


def rho(event: Event) -> float:
    """The rho of an event under zero-concentrated differential privacy (Bun and Steinke 2016)."""
    kind = event["type"]
    if kind in ("NoOpDpEvent",):
        return 0.0
    if kind in ("GaussianDpEvent", "LaplaceDpEvent"):
        return float(0.5 / event["noise_multiplier"] ** 2)
    if kind == "PureDpEvent":
        return float(0.5 * event["epsilon"] ** 2)
    if kind == "ZCDpEvent" and event["xi"] == 0:
        return float(event["rho"])
    if kind == "SelfComposedDpEvent":
        return float(event["count"]) * rho(event["event"])
    if kind in ("ComposedDpEvent", *WORST_PART):
        each = [rho(inner) for inner in event["events"]]
        return math.fsum(each) if kind == "ComposedDpEvent" else max(each)
    raise NoBoundError(f"a {kind} has no rho")


# ---------------------------------------------------------------- Rényi divergences.


def rdp(event: Event, orders: tuple[float, ...], adjacency: str) -> Array:
    """Rényi bounds of an event that `under_replace_one` returned, at each order."""
    kind, alpha = event["type"], np.array(orders)
    if kind == "NoOpDpEvent":
        return np.zeros(len(alpha))
    if kind == "NonPrivateDpEvent":
        return np.full(len(alpha), math.inf)
    if kind == "PoissonSampledDpEvent" and event["event"]["type"] == "LaplaceDpEvent":
        return _rdp_of_pure(pure_epsilon(event), alpha)
    if kind == "PureDpEvent":
        return _rdp_of_pure(event["epsilon"], alpha)
    if kind == "ObjectivePerturbationDpEvent":  # Redberg, Koskela and Wang 2023
        s = 1 / event["noise_multiplier"]
        log_tail = np.array([math.log(math.erfc(-x / math.sqrt(2))) for x in (alpha - 1) * s])
        return np.asarray(math.log1p(event["curvature_ratio"]) + alpha * s * s / 2 + log_tail / (alpha - 1))
    if kind == "RenyiDpEvent":
        return np.where(alpha <= event["order"], event["bound"], math.inf)
    if kind == "SelfComposedDpEvent":
        return np.asarray(event["count"] * rdp(event["event"], orders, adjacency))
    if kind in ("ComposedDpEvent", *WORST_PART):
        each = [rdp(inner, orders, adjacency) for inner in event["events"]] or [np.zeros(len(alpha))]
        return np.asarray(np.sum(each, axis=0) if kind == "ComposedDpEvent" else np.max(each, axis=0))
    if kind == "RepeatAndSelectDpEvent":  # Papernot and Steinke 2022, Theorems 2 and 6
        every = tuple(sorted({*orders, *ORDERS}))
        shape = math.inf if event["shape"] is None else float(event["shape"])
        once = rdp(event["event"], every, adjacency)
        of_best = _compute_rdp_repeat_and_select(every, once, event["mean"], shape)
        return np.array([of_best[every.index(order)] for order in orders])
    if kind == "CorrelatedDpEvent":
        inner, count = _of_correlated(event)
        return np.asarray(count * rdp(inner, orders, adjacency))
    is_sampled = kind in ("PoissonSampledDpEvent", "SampledWithoutReplacementDpEvent")
    relation = dp.NeighboringRelation[adjacency if is_sampled else "ADD_OR_REMOVE_ONE"]
    accountant = RdpAccountant(orders, relation)
    library_event = _library_event(event)
    if not accountant.supports(library_event):
        raise NoBoundError(f"a {kind} has no Rényi bound in dp-accounting")
    accountant.compose(library_event)
    return np.maximum(np.asarray(accountant._rdp, dtype=np.float64), 0.0)


def _library_event(event: Event) -> Any:
    kind = event["type"]
    inner = [_library_event(one) for one in _parts(event)]
    if kind == "GaussianDpEvent":
        return dp.GaussianDpEvent(event["noise_multiplier"])
    if kind == "LaplaceDpEvent":
        return dp.LaplaceDpEvent(event["noise_multiplier"])
    if kind == "ZCDpEvent":
        return dp.dp_event.ZCDpEvent(event["rho"], event["xi"])
    if kind == "PoissonSampledDpEvent":
        return dp.PoissonSampledDpEvent(event["sampling_probability"], inner[0])
    if kind == "SampledWithoutReplacementDpEvent":
        sizes = event["source_dataset_size"], event["sample_size"]
        return dp.SampledWithoutReplacementDpEvent(*sizes, inner[0])
    raise NoBoundError(f"a {kind} has no Rényi bound here")


def _rdp_of_pure(epsilon: float, alpha: Array) -> Array:
    """Of randomised response (Mironov 2017, Proposition 5), and of zCDP where the former is lost to rounding."""
    truth = -np.logaddexp(0.0, -epsilon)
    lie = truth - epsilon
    moments = np.logaddexp(alpha * truth + (1 - alpha) * lie, alpha * lie + (1 - alpha) * truth)
    bounds = np.where(moments < 1e-9, alpha * epsilon**2 / 2, moments / (alpha - 1))
    return np.asarray(np.clip(bounds, 0.0, epsilon))


def conversion(order: float, delta: float) -> float:
    """From a Rényi bound at an order to epsilon (Canonne, Kamath and Steinke 2020, Proposition 12)."""
    return math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def epsilon_of_zcdp(total: float, delta: float) -> float:
    """The smallest epsilon over real orders, by ternary search in their logarithm."""

    def at(x: float) -> float:
        return (1 + math.exp(x)) * total + conversion(1 + math.exp(x), delta)

    low, high = -12.0, 25.0
    for _ in range(200):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, second) if at(first) < at(second) else (first, high)
    return max(0.0, at((low + high) / 2)) if total else 0.0


# ---------------------------------------------------------------- Privacy profiles of single mechanisms.


def _tail_of_normal(x: Array) -> Array:
    """1 - Phi(x)."""
    return np.asarray(_ERFC(np.asarray(x, dtype=np.float64) / math.sqrt(2)), dtype=np.float64) / 2


_ERFC = np.frompyfunc(math.erfc, 1, 1)


def _gaussian(mu: float, e: Array) -> Array:
    """N(mu, 1) against N(0, 1) (Balle and Wang 2018, Theorem 8)."""
    a = e / mu - mu / 2
    scaled = np.exp(np.minimum(e, 700.0)) * _tail_of_normal(a + mu)
    return np.maximum(_tail_of_normal(a) - np.where(e > 700, 0.0, scaled), 0.0)


def _laplace(epsilon: float, e: Array) -> Array:
    return np.maximum(-np.expm1((e - epsilon) / 2), 0.0)


def _pure(epsilon: float, e: Array) -> Array:
    """Randomised response, which dominates every mechanism with this epsilon (Kairouz et al. 2015)."""
    truth = 1 / (1 + math.exp(-epsilon))
    return np.where(e < epsilon, truth * -np.expm1(np.minimum(e - epsilon, 0.0)), 0.0)


def _subsample(whole: Profile, rate: float) -> Mechanism:
    """(1 - rate) Q + rate P against Q, from the profile of a symmetric pair (P, Q)."""

    def remove(e: Array) -> Array:
        inner = np.where(e < 30, np.log1p(np.expm1(np.minimum(e, 30.0)) / rate), e - math.log(rate))
        return rate * whole(inner)

    def add(e: Array) -> Array:
        share = -np.expm1(np.minimum(e, 700.0) + math.log1p(-rate)) if rate < 1 else np.ones(len(e))
        is_below = share > 1e-300
        logs = e + math.log(rate) - np.log(np.where(is_below, share, 1.0))
        return np.where(is_below, share * whole(np.where(is_below, logs, 1.0)), 0.0)

    return remove, add


def _poisson_replaced(z: float, rate: float, e: Array) -> Array:
    """(1 - rate) N(0, z^2) + rate N(1, z^2) against the same with N(-1, z^2); the loss rises with the output."""
    ratio = math.log((1 - rate) / rate) + 0.5 / z**2
    with np.errstate(divide="ignore"):
        log_sinh = e / 2 + np.log(-np.expm1(-e) / 2)
    inner = ratio + log_sinh
    bend = np.where(inner < 300, np.arcsinh(np.exp(np.minimum(inner, 300.0))), inner + math.log(2))
    cut = z**2 * (e / 2 + bend)
    p = (1 - rate) * _tail_of_normal(cut / z) + rate * _tail_of_normal((cut - 1) / z)
    q = (1 - rate) * _tail_of_normal(cut / z) + rate * _tail_of_normal((cut + 1) / z)
    return np.maximum(p - np.exp(np.minimum(e, 700.0)) * q, 0.0)


def _group(z: float, rate: float, count: int) -> Mechanism:
    """The mixture of N(j, z^2) with binomial chances of j = 0, ..., count against N(0, z^2) (arXiv:2401.10294)."""
    j = np.arange(count + 1)[:, None]
    logs = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(count + 1)
    ]
    log_w = np.array(logs)[:, None] + j * math.log(rate) + (count - j) * math.log1p(-rate)

    def loss(x: Array) -> Array:
        return np.asarray(np.logaddexp.reduce(log_w + j * (x - j / 2) / z**2, axis=0))

    outputs = np.linspace(-40.0 * z, count + 40.0 * z + 800.0 * z**2 / count, 2**15)
    losses = _in_pieces(loss, outputs)

    def cut(e: Array) -> Array:
        """About where the loss, which rises, is e; any other cut gives a lower delta."""
        return np.interp(e, losses, outputs)

    def mixed(x: Array, sign: int) -> Array:
        return np.asarray((np.exp(log_w) * _tail_of_normal(sign * (x - j) / z)).sum(axis=0))

    def remove(e: Array) -> Array:
        x = cut(e)
        return np.maximum(mixed(x, 1) - np.exp(np.minimum(e, 700.0)) * _tail_of_normal(x / z), 0.0)

    def add(e: Array) -> Array:
        x = cut(-e)
        return np.maximum(_tail_of_normal(-x / z) - np.exp(np.minimum(e, 700.0)) * mixed(x, -1), 0.0)

    return partial(_in_pieces, remove), partial(_in_pieces, add)


def _in_pieces(profile: Profile, e: Array) -> Array:
    return np.concatenate([profile(e[i : i + 4096]) for i in range(0, len(e), 4096)])


def _objective(z: float, ratio: float, e: Array) -> Array:
    """The loss log(1 + ratio) + s^2 / 2 + |X|, X ~ N(0, s^2), s = 1 / z, of an exact private minimum."""
    s = 1 / z
    least = math.log1p(ratio) + s * s / 2
    t = np.maximum(e - least, 0.0) / s
    scaled = np.exp(np.minimum(e - least + s * s / 2, 700.0)) * _tail_of_normal(t + s)
    return np.maximum(2 * (_tail_of_normal(t) - scaled), 0.0)


def _random_allocation(z: float, parts: int, steps: int) -> Mechanism:
    """A pass in which a record takes part in one of `parts` steps, of which `steps` took place (arXiv:2412.16802).

    P / Q = S = (Y_1 + ... + Y_steps + parts - steps) / parts for log-normal Y of mean 1 under Q; delta is
    E max(0, S - exp(e)), removing, and E max(0, 1 - exp(e) S), adding. Y is put on a grid with its mean, cut off where
    it is rarer than 1e-14, and S is the sum of independent Y. A cut only lowers delta; the grid adds about 1e-4 of it.
    """
    sd = math.sqrt(math.expm1(z**-2))
    reach = math.sqrt(2 * math.log(parts / 1e-14))
    start, end = math.exp(-9 / z - 0.5 / z**2), math.exp(reach / z - 0.5 / z**2)
    cell = max(sd / 60, (end - start) / 2**20, steps / 2**21)
    points = start + cell * np.arange(math.ceil((end - start) / cell) + 1)
    under_q = z * np.log(points) + 0.5 / z
    q, mean = -np.diff(_tail_of_normal(under_q)), -np.diff(_tail_of_normal(under_q - 1 / z))
    up = np.clip((mean - points[:-1] * q) / cell, 0.0, q)
    masses = np.append(q - up, 0.0)
    masses[1:] += up
    most = steps * (len(points) - 1)
    size = int(min(most, (steps * (1 - start) + 12 * math.sqrt(steps) * sd) / cell + 1.5 * len(points))) + 2
    size = 2 ** math.ceil(math.log2(size))
    power = np.fft.rfft(masses, size) ** steps
    sums = np.fft.irfft(power, size)
    sums[sums < 1e-15 * float(np.linalg.norm(power)) / size] = 0.0
    s = (steps * start + cell * np.arange(size) + parts - steps) / parts
    above, weighted = (np.append(np.cumsum(x[::-1])[::-1], 0.0) for x in (sums, sums * s))
    below, weighted_below = (np.append(0.0, np.cumsum(x)) for x in (sums, sums * s))

    def remove(e: Array) -> Array:
        at = np.searchsorted(s, np.exp(np.minimum(e, 700.0)))
        return np.asarray(np.maximum(weighted[at] - np.exp(np.minimum(e, 700.0)) * above[at], 0.0))

    def add(e: Array) -> Array:
        at = np.searchsorted(s, np.exp(-e))
        return np.asarray(np.maximum(below[at] - np.exp(np.minimum(e, 700.0)) * weighted_below[at], 0.0))

    return remove, add


def mechanism(event: Event, adjacency: str) -> tuple[Mechanism, float]:
    """The profiles of an event of `under_replace_one`, and how far below their formula they may lie, in epsilon."""
    kind, z = event["type"], event.get("noise_multiplier", 1.0)
    slack = 0.0
    if kind == "GaussianDpEvent":
        both: Mechanism = (partial(_gaussian, 1 / z),) * 2
    elif kind == "LaplaceDpEvent":
        both = (partial(_laplace, 1 / z),) * 2
    elif kind == "PureDpEvent":
        both = (partial(_pure, event["epsilon"]),) * 2
    elif kind == "ObjectivePerturbationDpEvent":
        both = (partial(_objective, z, event["curvature_ratio"]),) * 2
    elif kind == "SampledGroupDpEvent":
        rate, count = event["sampling_probability"], event["count"]
        both = (partial(_gaussian, count / z),) * 2 if rate == 1 else _group(z, rate, count)
    elif kind == "RandomAllocationDpEvent":
        is_whole = z < 0.5 or event["parts"] == 1
        both = (
            (partial(_gaussian, 1 / z),) * 2
            if is_whole
            else _random_allocation(z, event["parts"], event["steps"])
        )
    elif kind == "PoissonSampledDpEvent":
        rate, inner = event["sampling_probability"], event["event"]
        if inner["type"] not in ("GaussianDpEvent", "LaplaceDpEvent"):
            raise NoBoundError(f"a Poisson sample of a {inner['type']}")
        noise = inner["noise_multiplier"]
        if adjacency == "REPLACE_ONE":
            whole = partial(_gaussian, 2 / noise)
            both = (whole if rate == 1 else partial(_poisson_replaced, noise, rate),) * 2
        else:
            profile = _gaussian if inner["type"] == "GaussianDpEvent" else _laplace
            both = _subsample(partial(profile, 1 / noise), rate)
    elif kind == "SampledWithoutReplacementDpEvent":
        # Both ways delta is at most that of a sample (Balle, Barthe and Gaboardi 2018, Theorems 2 and 11).
        share = event["sample_size"] / event["source_dataset_size"]
        both = (_subsample(partial(_gaussian, 1 / event["event"]["noise_multiplier"]), share)[0],) * 2
    elif kind in WORST_PART:
        each = [_profiles_of([(inner, 1)], adjacency) for inner in event["events"]]
        pairs, slack = [pair for pair, _ in each], max(lost for _, lost in each)
        both = tuple(_convex(partial(_largest, [pair[side] for pair in pairs])) for side in (0, 1))  # type: ignore[assignment]
    elif kind == "RepeatAndSelectDpEvent":
        both, slack = _selection(event, adjacency)
    else:
        raise NoBoundError(f"a {kind} has no privacy profile")
    return both, slack


def _largest(profiles: Sequence[Profile], e: Array) -> Array:
    return np.asarray(np.max([profile(e) for profile in profiles], axis=0))


def _selection(event: Event, adjacency: str) -> tuple[Mechanism, float]:
    """The best of a random number of trials: delta(e + shift) is at most the mean number times one trial's delta(e).

    The shift bounds the change of the logarithm of f', for the number's generating function f, between neighbours
    (Koskela, Redberg and Wang 2024, arXiv:2402.06701).
    """
    once, lost = _profiles_of([(event["event"], 1)], adjacency)
    mean, tried = event["mean"], np.append(0.0, np.geomspace(1e-6, 10.0, 20_000))
    deltas = _largest(once, tried)
    if event["shape"] is None:
        shift = mean * float(np.min(np.expm1(tried) + deltas))
    elif mean == 1:
        shift = 0.0
    else:
        gamma = float(_gamma_truncated_negative_binomial(float(event["shape"]), mean))
        enough = np.flatnonzero((1 - gamma) * deltas <= gamma * np.expm1(tried))
        if not len(enough):
            raise NoBoundError("a trial tells too much for a profile of the best")
        # The answer may lie anywhere after the last number that was not enough.
        shift = (event["shape"] + 1) * float(tried[max(enough[0] - 1, 0)])

    def best(own: Profile, other: Profile, e: Array) -> Array:
        x = e - shift
        below = 1 - np.exp(np.minimum(x, 0.0)) * (1 - other(np.maximum(-x, 0.0)))
        return np.asarray(np.minimum(mean * np.where(x >= 0, own(np.maximum(x, 0.0)), below), 1.0))

    factor = 2 + (0 if event["shape"] is None else event["shape"])
    both = _convex(partial(best, once[0], once[1])), _convex(partial(best, once[1], once[0]))
    return both, lost * factor + 1e-3 * shift


def _convex(profile: Profile, points: int = 4000) -> Profile:
    """The largest profile below one: true ones are convex in exp(e), and 1 at 0."""
    top = _reach(profile, 1e-13)
    e = np.append(np.linspace(0.0, top, points), top * 1.001 + 1e-9)
    x, y = np.append(0.0, np.exp(e)), np.append(1.0, profile(e))
    hull = [0, 1]
    for k in range(2, len(x)):
        while len(hull) > 1:
            i, j = hull[-2:]
            if (y[j] - y[i]) * (x[k] - x[i]) < (y[k] - y[i]) * (x[j] - x[i]):
                break
            hull.pop()
        hull.append(k)

    def lower(at: Array) -> Array:
        chords = np.interp(np.exp(np.minimum(at, 700.0)), x[hull], y[hull], right=0.0)
        return np.asarray(np.minimum(chords, profile(at)))

    return lower


# ---------------------------------------------------------------- Composition.


class Sum:
    """The sum of independent losses on one grid, each a tuple of its first index, its masses and its count."""

    def __init__(self, losses: Sequence[tuple[int, Array, int]], grid: float) -> None:
        self.grid, self.losses = grid, losses

    def cumulant(self, tilt: float) -> tuple[float, float, float]:
        """log E exp(tilt L), its mean and variance under the tilt."""
        total, mean, variance = 0.0, 0.0, 0.0
        for first, masses, count in self.losses:
            x = self.grid * (first + np.arange(len(masses)))
            with np.errstate(divide="ignore"):
                logs = np.log(masses) + tilt * x
            largest = float(logs.max())
            weights = np.exp(logs - largest)
            whole = float(weights.sum())
            middle = float(weights @ x) / whole
            total += count * (largest + math.log(whole))
            mean += count * middle
            variance += count * float(weights @ (x - middle) ** 2) / whole
        return total, mean, variance

    def tilt_of(self, delta: float) -> float:
        """A tilt that makes a tail of this size usual: tilt K'(tilt) - K(tilt) is about log(1 / delta)."""
        low, high = 0.0, 1.0
        wanted = math.log(1 / delta)

        def rarity(tilt: float) -> float:
            total, mean, _ = self.cumulant(tilt)
            return tilt * mean - total

        while rarity(high) < wanted and high < 1e6:
            low, high = high, 2 * high
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if rarity(middle) < wanted else (low, middle)
        return low

    def window(self, tilt: float) -> tuple[float, float]:
        """Where the tilted sum lies but for 1e-10 of it on each side, by Chernoff's bound."""
        total, _, variance = self.cumulant(tilt)
        ends = [
            math.fsum(
                count * self.grid * (first + at * (len(masses) - 1)) for first, masses, count in self.losses
            )
            for at in (0, 1)
        ]
        for scale in (0.1, 0.2, 0.4, 0.7, 1.0, 1.4):
            if variance <= 0:
                break
            s = scale * math.sqrt(46 / variance)
            ends[1] = min(ends[1], (self.cumulant(tilt + s)[0] - total + 23) / s)
            ends[0] = max(ends[0], (total - self.cumulant(tilt - s)[0] - 23) / s)
        return ends[0], ends[1]

    def tail(self, tilt: float, window: tuple[float, float]) -> tuple[Array, Array, Array]:
        """Ascending losses x; the masses from each on, under P, and the same times exp(x - loss), under Q."""
        low, high = window
        size = 2 ** math.ceil(math.log2((high - low) / self.grid + 8))
        if size > 4 * MAX_POINTS:
            raise NoBoundError("more points than this program computes")
        transform, total, start = np.ones(size // 2 + 1, dtype=complex), 0.0, 0
        for first, masses, count in self.losses:
            with np.errstate(divide="ignore"):
                logs = np.log(masses) + tilt * self.grid * (first + np.arange(len(masses)))
            largest = float(logs.max())
            weights = np.exp(logs - largest)
            whole = float(weights.sum())
            total += count * (largest + math.log(whole))
            centre = int(np.argmax(weights))
            folded = np.zeros(math.ceil(len(weights) / size) * size)
            folded[: len(weights)] = weights / whole
            x = np.fft.rfft(np.roll(folded.reshape(-1, size).sum(axis=0), -(centre % size)))
            transform *= np.exp(count * np.log(np.where(np.abs(x) < 1e-150, 1e-150, x)))
            start += count * (first + centre)
        sums = np.maximum(np.fft.irfft(transform, size), 0.0)
        bottom = math.floor(low / self.grid)
        sums = np.roll(sums, -((bottom - start) % size))
        losses = self.grid * (bottom + np.arange(size))
        is_usual = total - tilt * losses < 600  # what lies below is of no interest at this tilt
        losses, sums = losses[is_usual], sums[is_usual]
        masses = sums * np.exp(total - tilt * losses)
        p = np.cumsum(masses[::-1])[::-1]
        middle = losses[-1]
        q = np.cumsum((masses * np.exp(np.minimum(middle - losses, 600.0)))[::-1])[::-1]
        return losses, p, q * np.exp(np.maximum(losses - middle, -600.0))


def _reach(profile: Profile, tail: float) -> float:
    """An epsilon from which on delta is at most `tail`."""
    low, high = 0.0, 1e-3
    while float(profile(np.array([high]))[0]) > tail:
        low, high = high, 2 * high
        if high > 2000:
            raise NoBoundError("a loss that hardly ever ends")
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if float(profile(np.array([middle]))[0]) > tail else (low, middle)
    return high


def on_grid(own: Profile, other: Profile, top: float, grid: float) -> tuple[int, Array]:
    """Connect the dots: the masses of the loss at -k grid, ..., k grid.

    Above 0 from its own profile. Below 0 there are exp(-loss) times as many as of the reversed pair at the opposite
    loss; they come from the other profile, since differences of numbers near 1 would be lost to rounding.
    """
    k = max(2, math.ceil(top / grid))
    e: Array = grid * np.arange(k + 1, dtype=np.float64)

    def above(profile: Profile) -> Array:
        deltas = np.minimum.accumulate(np.clip(profile(e), 0.0, 1.0))
        steps = np.append(np.diff(deltas), 0.0)
        return np.asarray(np.maximum(steps[1:] - math.exp(grid) * steps[:-1], 0.0) / math.expm1(grid))

    up, down = above(own), above(other) * np.exp(-e[1:])
    left = max(0.0, 1.0 - float(up.sum()))
    down *= min(1.0, left / max(float(down.sum()), 1e-300))
    middle = max(0.0, left - float(down.sum()))
    return -k, np.concatenate([down[::-1], [middle], up])


def _grids(sides: Sequence[tuple[Profile, Profile, int]], delta: float) -> tuple[Sum, Sum, float]:
    """The losses on a coarse grid and on one that is fine enough, and eta of the latter."""
    number = sum(count for _, _, count in sides)
    tail = 1e-7 * delta / number
    tops = [max(_reach(own, tail), _reach(other, tail)) for own, other, _ in sides]

    def at(grid: float) -> Sum:
        rows = zip(sides, tops, strict=True)
        return Sum([(*on_grid(own, other, top, grid), count) for (own, other, count), top in rows], grid)

    coarse = at(max(tops) / FIRST_POINTS)
    about = max(coarse.cumulant(coarse.tilt_of(delta))[1], 1e-6)
    walk = math.sqrt(number * math.log(1000 / delta) / 2)
    finest = max(max(tops) / MAX_POINTS, _width(coarse, delta) / MAX_POINTS)
    grid = min(coarse.grid, max(1e-3 * about / walk, finest))
    fine = at(grid)
    return coarse, fine, number * grid**2 / 8 + grid * walk


def _width(coarse: Sum, delta: float) -> float:
    low, high = coarse.window(coarse.tilt_of(delta))
    return high - low


def _lower_profile(own_and_other: Sequence[tuple[Profile, Profile, int]]) -> tuple[Profile, float]:
    """A lower bound of the profile of releases together, for epsilons from 0 on, and its eta."""
    coarse, fine, eta = _grids(own_and_other, 1e-9)
    tails = []
    for delta in (0.3, 1e-3, 1e-6, 1e-9, 1e-12):
        tilt = coarse.tilt_of(delta)
        tails.append(fine.tail(tilt, coarse.window(tilt)))

    def profile(e: Array) -> Array:
        best = np.ones(len(e))
        for losses, p, q in tails:
            at = np.searchsorted(losses, e + eta)
            is_inside = (at > 0) & (at < len(losses))
            at = np.clip(at, 0, len(losses) - 1)
            deltas = p[at] - np.exp(np.minimum(e + eta - losses[at], 0.0)) * q[at]
            best = np.minimum(best, np.where(is_inside, np.maximum(deltas, 0.0), 1.0))
        highest = max(losses[-1] for losses, _, _ in tails)
        return np.where(e + eta >= highest, 0.0, best * (1 - 1e-3))

    return profile, eta


def _profiles_of(rows: Sequence[tuple[Event, int]], adjacency: str) -> tuple[Mechanism, float]:
    single = _merge(releases(rows))
    if len(single) == 1 and single[0][1] == 1:
        return mechanism(single[0][0], adjacency)
    each = [(*mechanism(event, adjacency), count) for event, count in single]
    if not each:
        return (lambda e: np.zeros(len(e)),) * 2, 0.0
    remove, eta = _lower_profile([(pair[0], pair[1], count) for pair, _, count in each])
    add, other_eta = _lower_profile([(pair[1], pair[0], count) for pair, _, count in each])
    return (remove, add), max(eta, other_eta) + math.fsum(lost * count for _, lost, count in each)


def _merge(rows: Iterable[tuple[Event, int]]) -> list[tuple[Event, int]]:
    """Equal events counted together, and Gaussian ones as one (Dong, Roth and Su 2022, Corollary 3.3)."""
    counts: dict[str, tuple[Event, int]] = {}
    precision = 0.0
    for event, count in rows:
        if event["type"] == "GaussianDpEvent":
            precision += count / event["noise_multiplier"] ** 2
            continue
        key = json.dumps(event, sort_keys=True)
        counts[key] = (event, counts.get(key, (event, 0))[1] + count)
    if len(counts) > MAX_KINDS:
        raise NoBoundError(f"more than {MAX_KINDS} kinds of events")
    gaussian = [(_gaussian_event(precision**-0.5), 1)] if precision else []
    return [*gaussian, *counts.values()]


def pld_bound(rows: Sequence[tuple[Event, int]], delta: float, adjacency: str) -> float:
    """A lower bound on epsilon by privacy profiles, of events that `under_replace_one` returned."""
    single = _merge(releases(rows))
    zero = [e for e, _ in single if e["type"] == "PoissonSampledDpEvent" and not e["sampling_probability"]]
    zero += [e for e, _ in single if e["type"] == "SampledWithoutReplacementDpEvent" and not e["sample_size"]]
    single = [(event, count) for event, count in single if event not in zero]
    if not single:
        return 0.0
    each = [(*mechanism(event, adjacency), count) for event, count in single]
    slack = math.fsum(lost * count for _, lost, count in each)
    best, gap = 0.0, slack
    for side in (0, 1):
        if len(each) == 1 and each[0][2] == 1:
            cost = _inverse(each[0][0][side], delta)
        else:
            cost, eta = _compose([(pair[side], pair[1 - side], count) for pair, _, count in each], delta)
            gap = max(gap, slack + eta)
        best = max(best, cost)
    if gap > MAX_GAP * best + 1e-6:
        raise NoBoundError(
            f"this program knows epsilon up to {gap:.2g} only, which is too little to check a claim"
        )
    return best


def _inverse(profile: Profile, delta: float) -> float:
    """The epsilon at which a profile falls to delta, rounded down by a part in a million."""
    low, high = 0.0, 1.0
    if float(profile(np.zeros(1))[0]) <= delta:
        return 0.0
    while float(profile(np.array([high]))[0]) > delta:
        low, high = high, 2 * high
        if high > 1e6:
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(profile(np.array([middle]))[0]) > delta else (low, middle)
    return low * (1 - BELOW)


def _compose(sides: Sequence[tuple[Profile, Profile, int]], delta: float) -> tuple[float, float]:
    coarse, fine, eta = _grids(sides, delta)
    tilt = coarse.tilt_of(delta)
    losses, p, q = fine.tail(tilt, coarse.window(tilt))
    wanted = delta * (1 + 2e-3)
    deltas = p - q  # at epsilon = losses
    above = np.flatnonzero(deltas > wanted)
    if not len(above):
        return 0.0, eta
    at = min(above[-1] + 1, len(losses) - 1)
    crossing = losses[at] + math.log(max((p[at] - wanted) / q[at], 1e-300)) if q[at] > 0 else losses[at]
    return max(0.0, min(float(crossing), float(losses[at])) - eta), eta


# ---------------------------------------------------------------- The checks.

Check = tuple[str, bool | None, str]
"""A name, whether it passed (None: there was nothing to check it against), and what was seen."""


def lower_bounds(card: Card) -> tuple[dict[str, float | None], str]:
    """By accountant a lower bound on epsilon, None where there is none; and why, of the last one without."""
    accounting, adjacency = card["accounting"], card["setting"]["adjacency"]
    delta, how = accounting["delta"], accounting["composition"]
    parts = _disjoint_parts(card["events"])
    if parts and adjacency == "ADD_OR_REMOVE_ONE" and how["kind"] == "schedule":
        return _worst_of([{**card, "events": part} for part in parts])
    rows = [(row["event"], row["count"]) for row in card["events"]]
    bounds: dict[str, float | None] = dict.fromkeys(("pld", "rdp", "pure"))
    needed: set[str] = {"schedule": set(), "zcdp": {"rho"}, "renyi": {"order", "limit"}}[how["kind"]]
    if {name for name in ("rho", "order", "limit") if how[name] is not None} != needed:
        raise BadCardError("the composition has other numbers than its kind.")
    if '"NonPrivateDpEvent"' in json.dumps(card["events"]):
        return bounds, "an event is without noise"
    attempts: dict[str, Callable[[], float]] = {}
    if how["kind"] == "schedule" and delta == 0:
        attempts["pure"] = lambda: _add(pure_epsilon, _translate_rows(rows, adjacency))
    elif how["kind"] == "schedule" and delta < 1:
        attempts["pld"] = lambda: pld_bound(_translate_rows(rows, adjacency), delta, adjacency)
        attempts["rdp"] = lambda: _rdp_epsilon(_translate_rows(rows, adjacency), delta, adjacency)
        attempts["pure"] = lambda: _add(pure_epsilon, _translate_rows(rows, adjacency))
    elif adjacency == "ADD_OR_REMOVE_ONE" and 0 < delta < 1:
        attempts["rdp"] = partial(_of_filter, rows, how, delta)
    why = "nothing is proven for such events under this adjacency"
    for name, attempt in attempts.items():
        try:
            with np.errstate(all="ignore"):
                bound = attempt()
            bounds[name] = bound if math.isfinite(bound) else None
        except NoBoundError as error:
            why = str(error)
        except (ArithmeticError, ValueError, IndexError, MemoryError):
            why = "numbers are too large or too small to compute with"
    if bounds["rdp"] is None and re.search("SampledGroup|RandomAllocation", json.dumps(card["events"])):
        bounds["rdp"] = bounds[
            "pld"
        ]  # whose Renyi bounds are not computed here: none lies below the exact epsilon
    return bounds, why


def _worst_of(cards: Sequence[Card]) -> tuple[dict[str, float | None], str]:
    """The largest bound by each accountant of cards that have other events, None where one has none."""
    each = [lower_bounds(card) for card in cards]
    names = each[0][0]
    largest = {
        name: max((bounds[name] for bounds, _ in each), key=lambda x: math.inf if x is None else x)
        for name in names
    }
    return largest, each[0][1]


def _disjoint_parts(events: Sequence[Event]) -> list[list[Event]]:
    """The events of each part, if the card's event is one of releases on disjoint people; else none."""
    whole = events[0]["event"]
    if len(events) != 1 or events[0]["count"] != 1 or whole["type"] != "DisjointPartsDpEvent":
        return []
    return [
        [_row_of(one) for one in part["events"]] if part["type"] == "ComposedDpEvent" else [_row_of(part)]
        for part in whole["events"]
    ]


def _translate_rows(rows: Iterable[tuple[Event, int]], adjacency: str) -> list[tuple[Event, int]]:
    rows = [*rows]
    for event, _ in rows:
        under_replace_one(
            event, adjacency
        )  # what is refused as it stands is refused before it is merged with others
    return [(under_replace_one(event, adjacency), count) for event, count in releases(rows)]


def _of_filter(rows: Sequence[tuple[Event, int]], how: Card, delta: float) -> float:
    """What a filter allowed, which the run costs even if its releases, chosen adaptively, came to less."""
    if how["kind"] == "zcdp":
        return epsilon_of_zcdp(max(_add(rho, rows), how["rho"]), delta)
    order, adjacency = (how["order"],), "ADD_OR_REMOVE_ONE"
    total = _add(lambda event: float(rdp(under_replace_one(event, adjacency), order, adjacency)[0]), rows)
    return max(0.0, float(max(total, how["limit"])) + conversion(how["order"], delta))


def _add(cost: Callable[[Event], float], rows: Iterable[tuple[Event, int]]) -> float:
    known: dict[str, float] = {}
    terms = []
    for event, count in rows:
        key = json.dumps(event, sort_keys=True)
        known[key] = cost(event) if key not in known else known[key]
        terms.append(count * known[key])
    return math.fsum(terms)


def _rdp_epsilon(rows: Sequence[tuple[Event, int]], delta: float, adjacency: str) -> float:
    total = np.zeros(len(ORDERS))
    for event, count in _merge(rows):
        total = total + count * rdp(event, ORDERS, adjacency)
    return math.inf if np.isinf(total).all() else float(compute_epsilon(ORDERS, total, delta)[0])


def check_signature(card: Card, key: str | None, *, unsigned: bool) -> Iterator[Check]:
    """Whether the facts are those that were signed, and by whom."""
    signature = card["signature"]
    if signature is None:
        yield "signature", None if unsigned else False, "the card is not signed"
        return
    signer = signature["public_key"]
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer))
        public.verify(bytes.fromhex(signature["value"]), _canonical_bytes({**card, "signature": None}))
        yield "signature", True, f"all facts are as the holder of {signer} signed them"
    except (InvalidSignature, ValueError):
        yield "signature", False, "the facts are others than those that were signed"
    if key is None:
        yield "owner", None, f"ask the owner whether {signer} is theirs, and give their public key (--key)"
    else:
        yield (
            "owner",
            signer == key,
            "the expected key" if signer == key else f"{signer} is not the expected key",
        )


def check_epsilon(card: Card) -> Iterator[Check]:
    """Whether each stated epsilon is at least the lower bound, and what is promised follows from it."""
    accounting, setting = card["accounting"], card["setting"]
    (bounds, why), held_to = lower_bounds(card), accounting["accountant"]
    has_formula = not re.search("SampledGroup|RandomAllocation", json.dumps(card["events"]))
    for name, bound in bounds.items():
        stated, passed = accounting["epsilon"][name], True
        detail = f"stated {_format_number(stated)}, at least {_format_number(bound)}"
        if stated is None:
            passed = bound is None or name != held_to  # not every accountant's has to be stated
        elif bound is None:
            passed, detail = False, f"stated {_format_number(stated)}, which was not computed: {why}"
        else:
            high = bound * (1 + ABOVE) + ABSOLUTE if name != "pld" and has_formula else math.inf
            passed = bound * (1 - BELOW) - ABSOLUTE <= stated <= high
        yield f"epsilon by {name}", passed, detail
    cost, mechanism_ = accounting["epsilon"][held_to], card["mechanism"]
    allowed = "private"
    if bounds[held_to] is None:
        allowed = "none"
    elif card["implementation"]["noise"] != "secure":
        allowed = "seeded"
    elif mechanism_["diagnostics"] or mechanism_["settings_from_records"]:
        allowed = "diagnosed"
    promised = cost if setting["guarantee"] == "private" else None
    holds = (setting["guarantee"], setting["epsilon"], setting["delta"]) == (
        allowed,
        promised,
        accounting["delta"],
    )
    yield "guarantee", holds, f"{setting['guarantee']}; events and noise allow {allowed}"
    if allowed == "private":
        limit, target = accounting["target"]["epsilon"], accounting["target"]["delta"]
        within = limit is None or (cost is not None and cost <= limit * (1 + BELOW))
        yield (
            "target",
            within and accounting["delta"] <= target,
            f"epsilon {_format_number(cost)} of {_format_number(limit)}",
        )
    if EVALUATION in card["evidence"]["files"]:
        least, stated = _least_held_out(card), setting.get("evaluation_epsilon")
        covers = least is not None and stated is not None and least * (1 - BELOW) - ABSOLUTE <= stated
        detail = f"stated {_format_number(stated)}, at least {_format_number(least)}"
        yield "epsilon of the people held out", covers, detail
    expected = None if allowed == "none" else ROUNDING
    yield "rounding", card["implementation"]["rounding"] == expected, "of sums and noise"
    asked = sum(query["count"] for query in mechanism_["queries"])
    shown = _trials(card["events"]) or [_in_order(card["events"])]
    counts = {sum(row["count"] for row in trial) for trial in shown}
    yield "releases", mechanism_["releases"] == asked and asked in counts, f"{asked} in the queries"


def _least_held_out(card: Card) -> float | None:
    """A lower bound on the epsilon of the last release, which is of the people held out; None without one."""
    fixed = {"kind": "schedule", "rho": None, "order": None, "limit": None}
    alone = {
        "events": [_in_order(card["events"])[-1] | {"count": 1}],
        "accounting": card["accounting"] | {"composition": fixed},
    }
    return lower_bounds({**card, **alone})[0]["pld" if card["accounting"]["delta"] else "pure"]


def _in_order(events: Sequence[Event]) -> list[Event]:
    """The events as they were released: those of disjoint people one part after the other."""
    return [row for part in _disjoint_parts(events) or [[*events]] for row in part]


def _trials(events: Sequence[Event]) -> list[list[Event]] | None:
    """The schedules that a trial may have had, where the last event is that of a search, else None.

    Others may have evaluated the winner: the search is then the first of two disjoint parts. Where they evaluated each
    trial, the second is a search, too, of trials that are all alike.
    """
    if parts := _disjoint_parts(events):
        inside = _trials(parts[0])
        after = [row for part in parts[1:] for row in (_trials(part) or [part])[0]]
        return None if inside is None else [[*trial, *after] for trial in inside]
    whole = events[-1]["event"]
    is_best = whole["type"] == "RepeatAndSelectDpEvent"
    inner = whole["event"] if is_best else whole
    is_search = inner["type"] == "EitherDpEvent" or (not is_best and inner["type"] == "ComposedDpEvent")
    if events[-1]["count"] != 1 or not is_search:
        return None
    if not all(
        one["type"] == "ComposedDpEvent"
        and all(part["type"] == "SelfComposedDpEvent" for part in one["events"])
        for one in inner["events"]
    ):
        return None
    return [[*events[:-1], *one["events"]] for one in inner["events"]]


def check_files(card: Card, folder: Path) -> Iterator[Check]:
    """Whether the files beside the card are those that it has checksums of, and its plan plans these releases."""
    for name in (*FILES, *({EVALUATION} & card["evidence"]["files"].keys())):
        path = folder / name
        if not path.is_file():
            yield name, None, "does not lie beside the card"
            continue
        with path.open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == card["evidence"]["files"][name]
        yield name, same, "has the checksum of the card" if same else "is not the file of this card"
    if (folder / "plan.json").is_file():
        plan = _parse(_read(folder / "plan.json"), folder / "plan.json")
        try:
            problem = _plan_problem(plan, card)
        except (KeyError, TypeError, ValueError, AttributeError):
            problem = "the plan cannot be read"
        yield "plan", problem is None, problem or "the card is one of a run of this plan"


def _plan_problem(plan: Any, card: Card) -> str | None:
    setting, accounting, mechanism_ = card["setting"], card["accounting"], card["mechanism"]
    model, features = plan["model"], dict(plan["features"])
    files, is_fixed = dict(model.get("files", {})), plan["filter"]["kind"] == "schedule"
    pairs = {
        "composition": (
            {"rho": None, "order": None, "limit": None} | plan["filter"],
            accounting["composition"],
        ),
        "features": ({"name": features.pop("name"), "settings": features}, mechanism_["features"]),
        "start": (files.pop("start", None), mechanism_["model"]["start"]),
        "files": (files, mechanism_["model"]["files"]),
        "precision": (model.get("precision", "float32"), mechanism_["model"]["precision"]),
        "model settings": (model.get("settings", {}), mechanism_["model"]["settings"]),
        "reinitialize": (model.get("reinitialize", []), mechanism_["model"]["reinitialize"]),
        "freeze": (model.get("freeze", []), mechanism_["model"]["frozen"]),
        "augmentations": (model.get("augmentations", 1), mechanism_["model"]["augmentations"]),
        "settings from records": (plan["not_private"] is not None, mechanism_["settings_from_records"]),
        "diagnostics": (plan.get("diagnostics", mechanism_["diagnostics"]), mechanism_["diagnostics"]),
        "adjacency": (plan["adjacency"], setting["adjacency"]),
        "noise": (plan["noise"], card["implementation"]["noise"]),
        "dataset": (plan["dataset"], setting["dataset"]),
        "records": (plan["public"]["records"], setting["records"]),
        "target": (plan["target"], accounting["target"]),
        "delta": (plan["delta"], accounting["delta"]),
        "accountant": (plan["accountant"] if is_fixed else "rdp", accounting["accountant"]),
        **{
            name.replace("_", " "): (plan.get("method_params", {}).get(name), mechanism_.get(name))
            for name in ("paper_protocol", "selection_law")
        },
        **{name: (model[name], mechanism_["model"][name]) for name in ("name", "seed", "parameters")},
        **{
            name: (plan[name], mechanism_[name])
            for name in ("algorithm", "settings", "steps", "noise_multiplier", "sampling_rate", "divisor")
        },
    }
    if differing := [name for name, (planned, stated) in pairs.items() if planned != stated]:
        return f"the plan has another {', '.join(differing)}"
    trained, *evaluated = _disjoint_parts(card["events"]) or [[*card["events"]]]
    if not evaluated and EVALUATION in card["evidence"]["files"]:  # composed, where a record is replaced
        trained, *evaluated = trained[:-1], trained[-1:]
    if any(_runs(part) != _runs(plan.get("evaluation", {}).get("schedule", [])) for part in evaluated):
        return "the plan has another evaluation"
    if is_fixed:
        same = _runs(plan["schedule"]) == _runs(trained)
        return None if same else "the plan has other events"
    before = [event for event, count in _runs(plan["prior_events"]) for _ in range(min(count, MAX_EVENTS))]
    done = [event for event, count in _runs(trained) for _ in range(min(count, len(before)))]
    return None if done[: len(before)] == before else "the plan has other events before those that are chosen"


def _runs(rows: Iterable[Event]) -> list[tuple[str, int]]:
    """Events as text, equal neighbours counted together."""
    merged: list[tuple[str, int]] = []
    for row in rows:
        text = json.dumps(row["event"], sort_keys=True)
        before = merged.pop()[1] if merged and merged[-1][0] == text else 0
        merged.append((text, before + row["count"]))
    return merged


def verify(
    path: Path, *, key: str | None = None, unsigned: bool = False, with_files: bool = True
) -> list[Check]:
    """All checks of the card in a file, or of the privacy_card.json in a folder; raises BadCardError without one."""
    path = path / "privacy_card.json" if path.is_dir() else path
    card = load(path)
    check_events(card["events"])
    checks = [*check_signature(card, key, unsigned=unsigned), *check_epsilon(card)]
    return checks + ([*check_files(card, path.parent)] if with_files else [])


def _format_number(number: float | None) -> str:
    return "none" if number is None else f"{number:.6g}"


def _key_in(given: str | None) -> str | None:
    """A public key as 64 hexadecimal digits, or a file that holds it."""
    if given is None or re.fullmatch(r"[0-9a-f]{64}", given):
        return given
    text = _read(Path(given)).decode(errors="replace").strip()
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise BadCardError(f"{given} holds no public key of 64 hexadecimal digits.")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Check a privacy card and the files beside it.")
    parser.add_argument("folder", type=Path, help="a release, or a privacy_card.json")
    parser.add_argument("--key", help="the owner's public key, or a file that holds it; from the owner")
    parser.add_argument("--unsigned", action="store_true", help="accept a card that nobody signed")
    given = parser.parse_args(arguments)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # dp-accounting's
    try:
        return _report(given.folder, given.key, unsigned=given.unsigned)
    finally:
        logging.disable(before)


def _report(folder: Path, key: str | None, *, unsigned: bool) -> int:
    """Print what holds; returns the exit status."""
    out = sys.stdout.write
    try:
        checks = verify(folder, key=_key_in(key), unsigned=unsigned)
        setting = load(folder / "privacy_card.json" if folder.is_dir() else folder)["setting"]
    except BadCardError as error:
        out(f"No card was checked: {error}\n".encode("ascii", "replace").decode())
        return 2
    for name, passed, detail in checks:
        mark = {True: "ok", False: "FAILED", None: "not checked"}[passed]
        out(f"{mark:12} {name}: {detail}\n".encode("ascii", "replace").decode())
    if any(passed is False for _, passed, _ in checks):
        out("The card does not hold.\n")
        return 1
    promise = (
        f"epsilon {_format_number(setting['epsilon'])}, delta {setting['delta']:g}, {setting['adjacency']}"
    )
    reasons = {
        "seeded": "no privacy: anyone can compute its noise again",
        "diagnosed": "no privacy: numbers without noise were kept",
        "none": "no privacy: there is no noise that bounds it",
    }
    out(f"The card holds. It promises {reasons.get(setting['guarantee'], promise)}.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

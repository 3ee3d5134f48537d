"""Check a privacy card without epsilonflow: python verify_card.py FOLDER [--key owner.pub] [--unsigned]

This file is all that is needed, with numpy, cryptography and dp-accounting (pip install numpy cryptography
dp-accounting). FOLDER is a release, or the path of a privacy_card.json. The exit status is 0 if nothing failed, 1 if
something failed, 2 if there is no card that can be read. The trace is tied to the card by its checksum alone.

How epsilon is bounded from below. A release is a pair (P, Q) of output distributions, with a record and without it, or
the other way round. Outputs are put into bins, which tells less. The privacy loss log(P / Q) of each bin goes to one of
the ends of its cell on a grid of width h, at random, so that P and Q keep their masses ("connect the dots", Doroshenko
et al. 2022, arXiv:2207.04380); dp-accounting adds up the losses of n releases. This moves a loss by less than h, and by
at most h^2 / 8 in the mean, so that it moves the sum by more than eta = n h^2 / 8 + h sqrt(n log(1/s) / 2) with
probability s at most (Hoeffding), and epsilon >= epsilon_of_the_grid(delta + s) - eta. Here s is delta / 10,000, and h
makes eta 0.8 % of the least epsilon stated (of 0.001 if less is stated, of 10 if more), so that a card passes from
about 1 % below its price on, whatever sharper numerics it was made with. Who states more misleads nobody.
"""

import argparse
import hashlib
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from dp_accounting.pld import common
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.rdp import rdp_privacy_accountant as renyi
from numpy.typing import NDArray

Array = NDArray[np.float64]
Card = dict[str, Any]  # or a part of one, as it was parsed
Event = Card
Rows = list[tuple[Event, int]]  # events in their order, each with how often it took place
Check = tuple[str, bool | None, str]  # a name, whether it passed (None: not checked), and what was seen
Pair = tuple[Array, Array]  # the chances of bins of outputs with a record and without it, or the reverse

FILES, EVALUATION = ("model.safetensors", "plan.json", "trace.parquet"), "evaluation.json"
"""The files beside a card; the last one if private held-out records were evaluated."""
ROUNDING = {"grid_bits": 24, "sum_bits": 64, "laplace_scales": 64, "laplace_error_bits": 18}
FIXED = {"kind": "schedule", "rho": None, "order": None, "limit": None}
ADDED, LARGEST = "ADD_OR_REMOVE_ONE", sys.float_info.max
BELOW, ABOVE, ABSOLUTE, SLACK = 1e-6, 1e-2, 1e-9, 0.008
"""How far a stated epsilon may lie below its bound and above a formula, and eta as a share of it."""
SHARES, MORE = 10_000, 1.002
"""The share of delta that is s above, and delta with the shares of events inside events, fewer than 20 deep."""
MAX_DEPTH, MAX_POINTS = 21, 2**22
"""Limits: depth of nested fields, for which MORE is enough, and points of a grid."""
MAX_RELEASES = 10**9
"""Of more, what rounding takes from each could come to much."""
ENCODER = json.JSONEncoder(indent=2, ensure_ascii=False, allow_nan=False)
"""How the facts of a card are written, with a last line break; the signature is over this, with null in its place."""


class BadCardError(Exception):
    """The file is no card; the message is one sentence for the person who runs the program."""


class NoBoundError(Exception):
    """No theorem used here bounds these events in this way, or only by a grid that is too fine."""


def require(condition: object, problem: str, error: type[Exception] = NoBoundError) -> None:
    if not condition:
        raise error(problem)


# ---------------------------------------------------------------- 1. Claims.

FORMS_TEXT = """
CARD schema_version:version signature:SIGNATURE? setting:SETTING mechanism:MECHANISM accounting:ACCOUNTING events:[ROW]
 implementation:IMPLEMENTATION evidence:EVIDENCE; SIGNATURE public_key:sha256 value:hex128
SETTING guarantee:private|seeded|diagnosed|none epsilon:number? delta:chance adjacency:ADD_OR_REMOVE_ONE|REPLACE_ONE
 unit dataset title source licence population public_records:flag records:count? holdout:public|private|none
 -per_person:count -pooled:count -unit_is_stated:true -each_record_alone:true -holdout_why -evaluation_epsilon:number
MECHANISM transform:none|scattering|encoder encoder:ENCODER? features:FEATURES diagnostics:flag
 settings_from_records:flag algorithm settings:object model:MODEL steps:count releases:count noise_multiplier:number?
 sampling_rate:chance divisor:positive? queries:[QUERY] -paper_protocol:PROTOCOL -selection_law:LAW
ENCODER name takes:images|texts width:count sha256:sha256 pretrained_on settings -tokens:count -padding:count
FEATURES name settings:object; PROTOCOL paper settings:object departures:[name]*
MODEL name seed:int parameters:count precision:float32|bfloat16 settings:object start:sha256? files:{sha256}*
 reinitialize:[name]* frozen:[name]* augmentations:count
QUERY kind sampling clipping noise count:count sampling_rate:SPAN clip_norm:SPAN noise_multiplier:SPAN noise_std:SPAN
 divisor:SPAN; SPAN least:number? most:number?; LAW candidates:count noise_scale:positive gain:number? distance:chance?
ACCOUNTING accountant:pld|rdp|pure epsilon:COSTS delta:chance target:AMOUNT library:dp-accounting library_version
 discretisation:GRID composition:COMPOSITION across_runs:ACROSS population:ACCOUNT blocks:BLOCKS?
COSTS pld:number? rdp:number? pure:number?; AMOUNT epsilon:number? delta:chance
GRID pld_interval:positive? rdp_lowest_order:positive rdp_highest_order:positive rdp_orders:count
COMPOSITION kind:schedule|zcdp|renyi rho:positive? order:filter? limit:positive?
ACROSS kind:basic|zcdp|renyi order:order?; ACCOUNT cap:AMOUNT spent:AMOUNT remaining:AMOUNT
BLOCKS charged:[BLOCK] blocks_per_person:count; BLOCK cap:AMOUNT spent:AMOUNT remaining:AMOUNT name
IMPLEMENTATION recorded:training|report -version -code:sha256 python packages:{name} git:GIT? device
 noise:secure|seeded cipher:AES-256-CTR rounding:ROUNDING?; GIT commit dirty:flag
ROUNDING grid_bits:count sum_bits:count laplace_scales:count laplace_error_bits:count
EVIDENCE run_id ledger_head:sha256? files:{sha256}*; ROW event:event count:row
NoOpDpEvent type; NonPrivateDpEvent type; PureDpEvent type epsilon:real; ZCDpEvent type rho:real xi:real
GaussianDpEvent type noise_multiplier:noise; LaplaceDpEvent type noise_multiplier:noise
RenyiDpEvent type order:real bound:real; ObjectivePerturbationDpEvent type noise_multiplier:noise curvature_ratio:real
PoissonSampledDpEvent type sampling_probability:rate event:event
SampledWithoutReplacementDpEvent type source_dataset_size:row sample_size:times event:event
SampledGroupDpEvent type noise_multiplier:noise sampling_probability:rate count:group
SelfComposedDpEvent type event:event count:times; ComposedDpEvent type events:[event]*
EitherDpEvent type events:[event]; DisjointPartsDpEvent type events:[event]
RepeatAndSelectDpEvent type event:event mean:mean shape:real?
CorrelatedDpEvent type noise_multiplier:noise coefficients:[coordinate]* weights:[coordinate]* decays:[decay]*
 leaves:leaves parts:steps rate:share steps:steps
CorrelatedStepDpEvent type noise_multiplier:noise parts:steps rate:rate
RandomAllocationDpEvent type noise_multiplier:noise parts:row steps:steps
RandomAllocationStepDpEvent type noise_multiplier:noise parts:row
"""
"""The fields of each section, in their order, and of each type of event (dp-accounting's and epsilonflow's), in any,
each with its kind: - before a name allows its absence, ? after a kind null; [x] is a list of x and {x} an object of x,
with * also an empty one; a|b is one of these words; without a kind it is a text. A space first continues a line."""
FORMS = {
    name: [field.partition(":") for field in fields]
    for name, *fields in map(str.split, re.split(r"; |\n(?! )", FORMS_TEXT.strip()))
}
TEXTS = {"name": r"(?s).*\S.*", "sha256": "[0-9a-f]{64}", "hex128": "[0-9a-f]{128}"}
# fmt: off
INTEGERS = {"int": (-LARGEST, LARGEST), "version": (2, 2), "count": (1, LARGEST), "times": (0, 10**9),
            "row": (1, 10**9), "steps": (1, 10**6), "leaves": (0, 10**6), "group": (1, 1000)}
FLOATS = {"chance": (0, 1), "number": (0, LARGEST), "positive": (5e-324, LARGEST),
          "order": (1 + 1e-12, LARGEST), "filter": (1 + 1e-12, 1e5)}
EVENT_NUMBERS = {"noise": (1e-6, 1e12), "rate": (0, 1), "share": (5e-324, 1), "real": (0, 1e100), "mean": (1, 1e6),
                 "decay": (0, 1 - 1e-16), "coordinate": (-1e6, 1e6)}
"""The least and the largest of each kind of number; those of events may be written as integers."""
# fmt: on
RULES: dict[str, Callable[[Card], bool]] = {  # on several values of a section or of an event together
    "EVIDENCE": lambda evidence: {*evidence["files"]} - {EVALUATION} == {*FILES},
    "COMPOSITION": lambda how: (
        [how[name] is not None for name in ("rho", "order", "limit")]
        == [how["kind"] == kind for kind in ("zcdp", "renyi", "renyi")]
    ),
    "SampledWithoutReplacementDpEvent": lambda event: event["sample_size"] <= event["source_dataset_size"],
    "SampledGroupDpEvent": lambda event: event["count"] ** 2 <= 1e4 * event["noise_multiplier"],
    "RandomAllocationDpEvent": lambda event: event["steps"] <= event["parts"],
    "CorrelatedDpEvent": lambda event: (
        [bool(event["coefficients"]), bool(event["weights"]), event["leaves"] > 0].count(True) == 1
        and len(event["weights"]) == len(event["decays"])
        and min(event["coefficients"][:1], default=1) >= 1e-6
        and event["steps"] ** 2 / event["parts"] <= 1e10
    ),
}


def load(path: Path) -> Card:
    """The facts of a card whose form is right, and whose bytes are those that they are written as."""
    path = path / "privacy_card.json" if path.is_dir() else path
    content, card = read(path)
    check(card, "CARD", "the card")
    try:
        is_same = (ENCODER.encode(card) + "\n").encode() == content
    except (ValueError, RecursionError):  # a number like 1e999, or a text that is none
        is_same = False
    require(is_same, f"{path} was edited: its facts are written as other bytes than these.", BadCardError)
    check_payments(rows_of(card))
    return card


def read(path: Path) -> tuple[bytes, Card]:
    """The bytes of a file, and the JSON document in it."""
    try:
        content = path.read_bytes()
        return content, json.loads(content.decode())
    except OSError as error:
        raise BadCardError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError):
        raise BadCardError(f"{path} is no JSON document.") from None


def check(value: Any, kind: str, where: str) -> None:
    """Refuse a value that is not of its kind; `where` names it."""
    inner, form, inside = kind.strip("[]{}*?"), "", list[tuple[Any, str, str]]()
    if value is None and kind.endswith("?"):
        return
    if kind[0] in "[{":
        is_right = type(value) is (list if kind[0] == "[" else dict) and (value or kind.endswith("*"))
        ones = (value if kind[0] == "[" else value.values()) if is_right else ()
        inside = [(part, inner, where) for part in ones]
    elif inner == "event" or inner in FORMS:
        require(type(value) is dict, f"{where} is no object.", BadCardError)
        form = str(value.get("type")) if inner == "event" else inner
        parts = [part for part in FORMS.get(form, []) if part[0][0] != "-" or part[0][1:] in value]
        fields = {name.lstrip("-"): of or "name" for name, _, of in parts}
        is_event = "type" in fields and {*value} == {*fields}
        is_right = is_event if inner == "event" else [*value] == [*fields]
        inside = [(value.get(name), of, f"{where}: {name}") for name, of in fields.items()]
    else:
        is_right = is_of(value, inner)
    require(is_right, f"{where} has other values or fields, or in another order, than it may.", BadCardError)
    require(where.count(": ") <= MAX_DEPTH, "an event is nested too deeply.", BadCardError)
    for part in inside:
        check(*part)
    if form in RULES:
        require(RULES[form](value), f"{where} has values that do not go together.", BadCardError)


def is_of(value: Any, kind: str) -> bool:
    """Whether a single value is of its kind."""
    for types, ranges in (((int,), INTEGERS), ((float,), FLOATS), ((int, float), EVENT_NUMBERS)):
        if kind in ranges:
            return type(value) in types and ranges[kind][0] <= value <= ranges[kind][1]
    if kind in ("flag", "true", "object"):
        return type(value) is (dict if kind == "object" else bool) and (kind != "true" or value is True)
    return type(value) is str and re.fullmatch(TEXTS.get(kind, kind), value) is not None


def rows_of(card: Card) -> Rows:
    return [(row["event"], row["count"]) for row in card["events"]]


def parts_of(event: Event) -> Rows:
    """The events that an event holds, a composition of equal ones as one row."""
    inner = [event["event"]] if "event" in event else event.get("events", [])
    repeated = [
        part if part["type"] == "SelfComposedDpEvent" else {"event": part, "count": 1} for part in inner
    ]
    return rows_of({"events": repeated})


def number_of(event: Event) -> int:
    """How many releases an event holds; those of a search or of a choice once each."""
    inner = [event["event"]] if "event" in event else event.get("events", [])
    times = event["count"] if event["type"] == "SelfComposedDpEvent" else 1
    return int(times * max(1, sum(map(number_of, inner))))


# ---------------------------------------------------------------- 2. Signature and files.


def check_signature(card: Card, key: str | None, *, unsigned: bool) -> Iterator[Check]:
    """Whether the facts are those that were signed, and by whom."""
    if (signature := card["signature"]) is None:
        yield "signature", None if unsigned else False, "the card is not signed"
        return
    signer, facts = signature["public_key"], (ENCODER.encode({**card, "signature": None}) + "\n").encode()
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer))
        public.verify(bytes.fromhex(signature["value"]), facts)
        yield "signature", True, f"all facts are as the holder of {signer} signed them"
    except (InvalidSignature, ValueError):
        yield "signature", False, "the facts are others than those that were signed"
    words = "ask the owner whether it is theirs, and give their public key (--key)" if key is None else key
    yield "owner", None if key is None else signer == key, f"signed by {signer}; expected: {words}"


def check_files(card: Card, folder: Path) -> Iterator[Check]:
    """Whether the files beside the card are those that it has checksums of, and its plan plans this run."""
    for name in (*FILES, *({EVALUATION} & card["evidence"]["files"].keys())):
        if not (folder / name).is_file():
            yield name, None, "does not lie beside the card"
            continue
        with (folder / name).open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == card["evidence"]["files"][name]
        yield name, same, "has the checksum of the card" if same else "is not the file of this card"
    if (folder / "plan.json").is_file():
        try:
            other = differences(read(folder / "plan.json")[1], card)
        except (BadCardError, KeyError, TypeError, ValueError, AttributeError):
            other = ["form"]
        yield "plan", not other, f"has another {', '.join(other)}" if other else "planned this run"


PLANNED = ("adjacency", "dataset", "noise", "target", "delta", "algorithm", "settings", "steps", "noise_multiplier",
           "sampling_rate", "divisor")  # fmt: skip
MODEL = {"precision": "float32", "settings": {}, "reinitialize": [], "freeze": [], "augmentations": 1}
"""What a plan means where it leaves these out."""


def differences(plan: Any, card: Card) -> list[str]:
    """The names of what is another in a plan than on the card of a run."""
    facts = {**card["setting"], **card["mechanism"], **card["accounting"], **card["implementation"]}
    features, files = dict(plan["features"]), dict(plan["model"].get("files", {}))
    model = {**MODEL, **plan["model"], "start": files.pop("start", None), "files": files}
    model["frozen"] = model["freeze"]
    is_fixed = plan["filter"]["kind"] == "schedule"
    before = merge_neighbours(rows_of({"events": plan.get("schedule" if is_fixed else "prior_events", [])}))
    trained, *evaluated = disjoint_parts(rows_of(card)) or [rows_of(card)]
    if not evaluated and EVALUATION in card["evidence"]["files"]:  # composed, where a record is replaced
        trained, *evaluated = trained[:-1], trained[-1:]
    begun, left = [], math.inf if is_fixed else sum(count for _, count in before)
    for event, count in trained:
        begun += [(event, min(count, left))] if left > 0 else []
        left -= count
    facts |= {"evaluation": evaluated, "events": merge_neighbours(begun)}
    planned = {name: plan.get(name) for name in PLANNED} | {
        "records": plan["public"]["records"],
        "settings_from_records": plan["not_private"] is not None,
        "accountant": plan["accountant"] if is_fixed else "rdp",
        "composition": FIXED | plan["filter"],
        "features": {"name": features.pop("name"), "settings": features},
        "model": {name: model[name] for name in facts["model"]},
        "diagnostics": facts["diagnostics"] if plan.get("diagnostics") is None else plan["diagnostics"],
        **{name: plan["method_params"].get(name) for name in ("paper_protocol", "selection_law")},
        "evaluation": [rows_of({"events": plan["evaluation"]["schedule"]})] if evaluated else [],
        "events": before,
    }
    return [name for name, value in planned.items() if value != facts.get(name)]


def merge_neighbours(rows: Iterable[tuple[Event, float]]) -> list[tuple[Event, float]]:
    """Equal neighbours counted together."""
    return [(event, sum(count for _, count in same)) for event, same in groupby(rows, key=itemgetter(0))]


# ---------------------------------------------------------------- 3. Promise.


def check_promise(card: Card) -> Iterator[Check]:
    """Whether each stated epsilon is at least the lower bound, and what is promised follows from it."""
    setting, mechanism, accounting = (card[name] for name in ("setting", "mechanism", "accounting"))
    costs, held_to, made = accounting["epsilon"], accounting["accountant"], card["implementation"]
    bounds = lower_bounds(rows := rows_of(card), setting["adjacency"], accounting)
    for name, bound in bounds.items():
        stated, has_formula = costs[name], name != "pld" and isinstance(bound, float)
        if name == "rdp" and not has_formula:  # no Renyi bound lies below the exact epsilon
            bound = bounds["rdp"] = bounds["pld"]
        if isinstance(bound, str):
            passed = stated is None
        elif stated is None:  # only what has no formula, or costs nothing, may be left out
            passed = name != held_to and (bound == 0 or not has_formula)
        else:
            passed = covers(stated, bound) and (not has_formula or stated <= bound * (1 + ABOVE) + ABSOLUTE)
        yield f"epsilon by {name}", passed, f"stated {stated}; lower bound: {bound}"
    allowed = "diagnosed" if mechanism["diagnostics"] or mechanism["settings_from_records"] else "private"
    allowed = allowed if made["noise"] == "secure" else "seeded"
    allowed = allowed if isinstance(bounds[held_to], float) else "none"
    cost, delta = costs[held_to] if allowed == "private" else None, accounting["delta"]
    follows = [setting["guarantee"], setting["delta"], setting["epsilon"]] == [allowed, delta, cost]
    figures = f"epsilon {cost or 0:.6g}, delta {delta:g}, {setting['adjacency']}"
    promise = figures if allowed == "private" else f"no privacy ({allowed})"
    words = promise if follows else f"{setting['guarantee']}, but events and noise allow {promise}"
    yield "guarantee", follows, words
    if allowed == "private":
        limit = accounting["target"]["epsilon"]
        within = limit is None or (cost is not None and cost <= limit * (1 + BELOW))
        yield "target", within and delta <= accounting["target"]["delta"], f"epsilon {cost} of {limit}"
    yield from check_evaluation(card, rows)
    yield "rounding", made["rounding"] == (None if allowed == "none" else ROUNDING), "of sums and noise"
    stated = sum(query["count"] for query in mechanism["queries"])
    same = stated == mechanism["releases"] and stated in {
        sum(count for _, count in trial) for trial in shown_events(rows)
    }
    yield "releases", same, f"{stated} in the queries"


def check_evaluation(card: Card, rows: Rows) -> Iterator[Check]:
    """Whether one histogram was released of the people held out, and nothing else on people of their own."""
    setting, accounting = card["setting"], card["accounting"]
    is_named, adjacency = EVALUATION in card["evidence"]["files"], setting["adjacency"]
    stated, parts = setting.get("evaluation_epsilon"), json.dumps(rows).count("DisjointParts")
    queries = [query for query in card["mechanism"]["queries"] if query["kind"] == "evaluation"]
    if not (is_named or queries or parts) and stated is None:
        return
    # all releases of the people held out, or the last one where a record is replaced
    evaluated = (disjoint := disjoint_parts(rows) or [[(rows[-1][0], 1)]])[-1]
    expected = (1, 2) if adjacency == ADDED else (0, 1)
    fits = is_named and setting["holdout"] == "private" and (parts, len(disjoint)) == expected
    if fits := fits and [query["count"] for query in queries] == [1]:
        kind, multiplier = f"{queries[0]['noise'].title()}DpEvent", queries[0]["noise_multiplier"]["least"]
        histogram = [({"type": kind, "noise_multiplier": multiplier}, 1)]
        fits = all([row for row in trial if row[1]] == histogram for trial in shown_events(evaluated))
    others = "others than one histogram, or one that the card has in some places alone"
    yield "releases of the people held out", fits, "one histogram" if fits else others
    terms = accounting | {"composition": FIXED, "epsilon": {"pld": stated}}
    bound = lower_bounds(evaluated, adjacency, terms)["pld" if accounting["delta"] else "pure"]
    yield "epsilon of the people held out", covers(stated, bound), f"stated {stated}; lower bound: {bound}"


def disjoint_parts(rows: Rows) -> list[Rows]:
    """The rows of each part, if the only event is one of releases on disjoint people; else none."""
    whole, count = rows[0]
    if len(rows) != 1 or count != 1 or whole["type"] != "DisjointPartsDpEvent":
        return []
    parts = [part if part["type"] == "ComposedDpEvent" else {"event": part} for part in whole["events"]]
    return [parts_of(part) or [({"type": "NoOpDpEvent"}, 0)] for part in parts]


def shown_events(rows: Rows) -> list[Rows]:
    """What a run with these events may have shown: of a search, which is the last of them, one of its trials.

    Where others evaluated each trial, the second of two disjoint parts is a search, too, of trials that are all alike.
    """
    trained, *evaluated = disjoint_parts(rows) or [rows]
    after = [row for part in evaluated for row in shown_events(part)[0]]
    *before, (last, times) = trained
    is_best = last["type"] == "RepeatAndSelectDpEvent"
    search = last["event"] if is_best else last
    is_search = search["type"] == "EitherDpEvent" or (search["type"] == "ComposedDpEvent" and not is_best)
    trials = search["events"] if is_search and times == 1 else []
    parts = [part for trial in trials for part in trial.get("events", [trial])]
    are_trials = trials and all(trial["type"] == "ComposedDpEvent" for trial in trials)
    if are_trials and all(part["type"] == "SelfComposedDpEvent" for part in parts):
        return [[*before, *parts_of(trial), *after] for trial in trials]
    return [[*trained, *after]]


def covers(stated: float | None, bound: float | str) -> bool:
    """Whether a stated epsilon is at least the lower bound of it, but for rounding."""
    return stated is not None and isinstance(bound, float) and stated >= bound * (1 - BELOW) - ABSOLUTE


def lower_bounds(rows: Rows, adjacency: str, accounting: Card) -> dict[str, float | str]:
    """By accountant a lower bound on epsilon, or the reason for having none."""
    delta, how = accounting["delta"], accounting["composition"]
    is_fixed, is_added = how["kind"] == "schedule", adjacency == ADDED
    # By the least that is stated: where there is no formula, losses bound what is stated by Renyi bounds, too.
    stated = min((cost for cost in accounting["epsilon"].values() if cost is not None), default=1.0)
    eta = SLACK * min(max(stated, 1e-3), 10.0)
    prices: dict[str, Callable[[Rows], float]] = {}
    if is_fixed and delta < 1:
        prices["pure"] = pure
    if is_fixed and 0 < delta < 1:
        prices["pld"] = lambda part: pld_epsilon(part, delta, eta)
    if (is_fixed or is_added) and 0 < delta < 1:
        prices["rdp"] = lambda part: renyi.compute_epsilon(*renyi_curve(part, how), delta)[0]
    parts = (is_fixed and is_added and disjoint_parts(rows)) or [rows]
    bounds: dict[str, float | str] = dict.fromkeys(("pld", "rdp", "pure"), "nothing is proven so")
    for name, price in prices.items() if "NonPrivateDpEvent" not in json.dumps(rows) else ():
        try:
            with np.errstate(all="ignore"):
                number = sum(count * number_of(event) for event, count in rows)
                require(name == "pure" or number <= MAX_RELEASES, f"more than {MAX_RELEASES:,} releases")
                bound = max(float(price(simplify(part, adjacency))) for part in parts)
            bounds[name] = bound if math.isfinite(bound) else "it is infinite"
        except NoBoundError as error:
            bounds[name] = str(error)
        except (ArithmeticError, ValueError, TypeError, IndexError, MemoryError):
            bounds[name] = "numbers are too large or too small to compute with"
    return bounds


# ---------------------------------------------------------------- 4. Releases.


def check_payments(rows: Rows) -> None:
    """Refuse later steps of a pass, which cost nothing, that no event before them has paid for."""
    left, paid = 0, None
    for event, count in rows:
        inner = parts_of(event)
        for part in [inner] if event["type"] == "ComposedDpEvent" else [[part] for part in inner]:
            check_payments(part)
        terms = event["type"].replace("Step", ""), *map(event.get, ("noise_multiplier", "parts", "rate"))
        if "steps" in event and count > 0:
            left, paid = event["steps"] - 1, terms
        elif event["type"].endswith("StepDpEvent"):
            left -= count
            is_paid = terms == paid and left >= 0
            require(is_paid, "later steps of a pass follow no event that has paid for them.", BadCardError)


def simplify(rows: Rows, adjacency: str) -> Rows:
    """What is released, equal releases counted together, but for what tells nothing; Gaussian ones are one.

    The last is Corollary 3.3 of Dong, Roth and Su 2022. A search holds the releases of a trial then, and a choice of
    mechanisms those of each.
    """
    counts: dict[str, tuple[Event, int]] = {}
    precision = 0.0
    for event, count in [
        (release, n * many) for row, many in rows for release, n in releases_of(row, adjacency)
    ]:
        if 0 in (count, event.get("sampling_probability"), event.get("share")):
            continue
        if event["type"] == "GaussianDpEvent":
            precision += count / event["noise_multiplier"] ** 2
            continue
        key = json.dumps(event, sort_keys=True)
        counts[key] = (event, counts.get(key, (event, 0))[1] + count)
    number = math.ceil(precision / 100)  # parts of at least a tenth of noise, whose chances are within floats
    together = [(gaussian((number / precision) ** 0.5), number)] if precision else []
    return [*together, *counts.values()]


TIMES = {"GaussianDpEvent": ("noise_multiplier", 0.5), "LaplaceDpEvent": ("noise_multiplier", 0.5)}
TIMES |= {"PureDpEvent": ("epsilon", 2), "ZCDpEvent": ("rho", 4)}
"""A number of an event, and what it is multiplied by where a record is replaced: one is removed, another one added."""


def releases_of(event: Event, adjacency: str) -> Rows:
    """The releases of one event."""
    kind, of = event["type"], event.get("event", {}).get("type")
    inner = simplify([(event["event"], 1)], adjacency) if "event" in event else []
    if kind in ("NoOpDpEvent", "ComposedDpEvent") or kind.endswith("StepDpEvent"):
        return simplify(parts_of(event), adjacency)
    if kind == "SelfComposedDpEvent":
        return [(release, n * event["count"]) for release, n in inner]
    if kind == "RepeatAndSelectDpEvent":
        return [(event | {"event": inner}, 1)]
    if kind == "EitherDpEvent":
        parts = [simplify([(part, 1)], adjacency) for part in event["events"]]
        different = [part for at, part in enumerate(parts) if part not in parts[:at]]
        return parts[0] if len(different) == 1 else [({"type": kind, "events": different}, 1)]
    if kind == "SampledWithoutReplacementDpEvent":
        require(adjacency != ADDED, "a sample of fixed size is proven under REPLACE_ONE alone")
        share = event["sample_size"] / event["source_dataset_size"]
        if [(release["type"], n) for release, n in inner] == [("GaussianDpEvent", 1)]:
            return [(inner[0][0] | {"type": kind, "share": share}, 1)]
        return [({"type": "PureDpEvent", "epsilon": of_sample(share, pure(inner))}, 1)]
    if adjacency == ADDED:
        if kind == "PoissonSampledDpEvent" and of == "PureDpEvent":
            event = {"type": of, "epsilon": pure([(event, 1)])}
        return [as_gaussian(event) if kind == "CorrelatedDpEvent" else (event, 1)]
    if kind == "PoissonSampledDpEvent" and of == "GaussianDpEvent":
        return [(event | {"type": "ReplacedInSample"}, 1)]
    if kind == "SampledGroupDpEvent":  # all of the group are in the sample, or nobody
        z, rate, n = (event[name] for name in ("noise_multiplier", "sampling_probability", "count"))
        return [(gaussian(z / n, 1 - (1 - rate) ** n, "ReplacedInSample"), 1)]
    require(kind in TIMES and not event.get("xi"), f"a {kind} where a record is replaced")
    name, times = TIMES[kind]
    return [(event | {name: event[name] * times}, 1)]


def gaussian(z: float, rate: float = 1.0, kind: str = "PoissonSampledDpEvent") -> Event:
    """Normal noise on all records, or on a sample of this kind."""
    event = {"type": "GaussianDpEvent", "noise_multiplier": z}
    return event if rate == 1 else {"type": kind, "sampling_probability": rate, "event": event}


def as_gaussian(event: Event) -> tuple[Event, int]:
    """All steps of a run with noise C^-1 W are one Gaussian release of C G (arXiv:2202.08312, Theorem 2.1).

    In a fixed order a record moves it by the sum of C's columns at its steps, every parts-th one; with at most `parts`
    bands and a Poisson sample of each part these columns are samples by themselves (arXiv:2306.08153, Theorem 4).
    """
    z, steps, parts, coefficients = (event[k] for k in ("noise_multiplier", "steps", "parts", "coefficients"))
    if event["rate"] < 1:
        require(0 < len(coefficients) <= parts, "a sampled strategy of more bands than parts")
        return gaussian(z / math.hypot(*coefficients[:steps]), event["rate"]), math.ceil(steps / parts)
    totals = np.zeros(min(parts, steps))  # the squared change of C G, by the first step of the record
    if leaves := event["leaves"]:
        # binary trees over so many steps each, of whose nodes only complete ones are released
        step = np.arange(steps)
        leaf = step % leaves
        for size in 2 ** np.arange(min(leaves, steps).bit_length()):
            node = leaf // size
            whole = (node + 1) * size <= np.minimum(leaves, steps - step + leaf)
            pairs, times = np.unique(((step - leaf + node) * parts + step % parts)[whole], return_counts=True)
            totals += np.bincount(pairs % parts, np.square(times), len(totals))[: len(totals)]
    else:
        column = np.append(coefficients[:steps] or 1.0, np.zeros(steps))[:steps]
        for weight, decay in zip(event["weights"], event["decays"], strict=True):
            column[1:] += weight * np.float64(decay) ** np.arange(steps - 1)
        # <column at step p - lag, column at step p> for p = lag, ..., steps - 1, until a column has ended
        for lag in range(0, int(np.flatnonzero(column)[-1]) + 1, parts):
            products = np.abs(np.cumsum(column[: steps - lag] * column[lag:]))[::-1] * (2.0 if lag else 1.0)
            totals += np.bincount(np.arange(lag, steps) % parts, products, len(totals))[: len(totals)]
    return gaussian(z / math.sqrt(totals.max())), 1


# ---------------------------------------------------------------- 5. Formulas.

ORDERS = np.array(renyi.DEFAULT_RDP_ORDERS, dtype=np.float64)
PURE: dict[str, Callable[[Event], float]] = {
    "PureDpEvent": lambda event: float(event["epsilon"]),
    "LaplaceDpEvent": lambda event: float(1 / event["noise_multiplier"]),
    "PoissonSampledDpEvent": lambda event: of_sample(
        event["sampling_probability"], pure(simplify([(event["event"], 1)], ADDED))
    ),
    "EitherDpEvent": lambda event: max(map(pure, event["events"])),
}


def pure(rows: Rows) -> float:
    """The epsilon of releases at delta 0."""
    for event, _ in rows:
        require(event["type"] in PURE, f"a {event['type']} has no pure epsilon")
    return math.fsum(count * PURE[event["type"]](event) for event, count in rows)


def of_sample(rate: float, epsilon: float) -> float:
    """log(1 + rate (exp(epsilon) - 1)), of a sample of a pure mechanism (Balle, Barthe and Gaboardi 2018)."""
    if rate == 0 or epsilon == 0:
        return 0.0
    return epsilon + math.log(rate) + math.log1p((1 / rate - 1) * math.exp(-epsilon))


def rdp(rows: Rows, alpha: Array) -> Array:
    """The Renyi bounds of releases at each order."""
    total = np.zeros(len(alpha))
    for event, count in rows:
        inner, rate = event.get("event", event), event.get("sampling_probability", 1.0)
        z, of = (inner.get("noise_multiplier", 1.0), inner["type"]) if type(inner) is dict else (1.0, "")
        match event["type"]:
            case "GaussianDpEvent" | "PoissonSampledDpEvent" if of == "GaussianDpEvent":
                bounds = renyi._compute_rdp_poisson_subsampled_gaussian(rate, z, alpha)
            case "LaplaceDpEvent":
                bounds = np.minimum([renyi._laplace_rdp(1 / z, order) for order in alpha], alpha / 2 / z**2)
            case "PureDpEvent" | "PoissonSampledDpEvent" if of in ("PureDpEvent", "LaplaceDpEvent"):
                epsilon = pure([(event, 1)])
                lie = 2 * math.exp(-epsilon) / (1 + math.exp(-epsilon))
                randomised = [renyi._randomized_response_rdp_replace_one(lie, 2, order) for order in alpha]
                answers = np.array(randomised)
                is_lost = answers * (alpha - 1) < 1e-9  # to rounding: then they are close to those of zCDP
                bounds = np.minimum(np.where(is_lost, alpha * epsilon**2 / 2, answers), epsilon)
            case "ZCDpEvent":
                bounds = event["xi"] + event["rho"] * alpha
            case "RenyiDpEvent":
                bounds = np.where(alpha <= event["order"], event["bound"], math.inf)
            case "ObjectivePerturbationDpEvent":  # Redberg, Koskela and Wang 2023
                log_tail = np.array([math.log(math.erfc(-x / math.sqrt(2))) for x in (alpha - 1) / z])
                bounds = math.log1p(event["curvature_ratio"]) + alpha / 2 / z**2 + log_tail / (alpha - 1)
            case "EitherDpEvent":
                bounds = np.max([rdp(part, alpha) for part in event["events"]], axis=0)
            case "RepeatAndSelectDpEvent":  # Papernot and Steinke 2022, Theorems 2 and 6
                every = np.union1d(alpha, ORDERS)
                number = event["mean"], math.inf if event["shape"] is None else float(event["shape"])
                best = renyi._compute_rdp_repeat_and_select(every, rdp(inner, every), *number)
                bounds = best[np.searchsorted(every, alpha)]
            case kind:
                raise NoBoundError(f"a {kind} has no Renyi bound here")
        total += count * np.maximum(bounds, 0.0)
    return total


def renyi_curve(rows: Rows, how: Card) -> tuple[Array, Array]:
    """Orders and the bounds at them, or what a filter allowed: adaptive events cost this even if they came to less."""
    if how["kind"] == "schedule":
        return ORDERS, rdp(rows, ORDERS)
    if how["kind"] == "renyi":
        order = np.array([how["order"]])
        return order, np.maximum(rdp(rows, order), how["limit"])
    for event, _ in rows:
        has_rho = event["type"] in ("GaussianDpEvent", "LaplaceDpEvent", "PureDpEvent", "ZCDpEvent")
        require(has_rho and not event.get("xi"), "not every event has a rho")
    alpha = 1 + np.exp(np.linspace(-4.6, 25.0, 30_001))
    rho = max((rdp(rows, ORDERS) / ORDERS).max(), how["rho"])  # a filter of zCDP bounds all orders by it
    return alpha, alpha * rho


# ---------------------------------------------------------------- 6. Losses.


def pld_epsilon(rows: Rows, delta: float, eta: float) -> float:
    """A lower bound on epsilon by privacy losses, which lies below it by about eta."""
    epsilon = 0.0
    for loss in compose(rows, delta, eta):
        is_exact = loss._infinity_mass <= delta
        require(is_exact, "delta is smaller than what this program's numbers are exact to")
        bounds = common.BinarySearchParameters(0.0, losses_of(loss)[-1], tolerance=1e-9)
        crossing = common.inverse_monotone_function(loss.get_delta_for_epsilon, MORE * delta, bounds)
        epsilon = max(epsilon, crossing - 1e-9 - eta)
    return epsilon


def compose(rows: Rows, delta: float, eta: float) -> list[DensePLDPmf]:
    """The losses of all releases together, removing and adding a record, on a grid that adds at most eta to epsilon."""
    number = sum(count for _, count in rows) or 1
    # h of the text at the top; .999 leaves room for n h^2 / 8.
    grid = 0.999 * eta / math.sqrt(number * (math.log(SHARES) - math.log(delta)) / 2)
    tail = 1e-7 * delta / number  # of outputs that are left out
    nothing = DensePLDPmf(grid, 0, np.ones(1), 0.0, pessimistic_estimate=True)
    sums: tuple[list[DensePLDPmf], ...] = ([nothing], [nothing])
    for event, count in rows:
        if event["type"] == "EitherDpEvent":
            pairs = worst_part(event, grid, delta / number, eta / count / 2)
        elif event["type"] == "RepeatAndSelectDpEvent":
            pairs = best_of_trials(event, delta / number, eta / count)
        else:
            pairs = pairs_of(event, tail)
        for losses, pair in zip(sums, pairs, strict=True):
            loss = on_grid(pair, grid, tail)
            if (loss.size - 1) * count > MAX_POINTS:  # else the sum is short without a bound on its tails
                first, last = common.compute_self_convolve_bounds(loss._probs, count, 1e-15)
                require(last - first <= MAX_POINTS, TOO_FINE)
            if count > 1:
                loss = loss.self_compose(count)
            losses.append(loss)
    for losses in sums:  # the first two together become the last, so that few sums are long
        while len(losses) > 1:
            losses.append(losses.pop(0).compose(losses.pop(0), 1e-15))
            require(losses[-1].size <= MAX_POINTS, TOO_FINE)
    return [losses[0] for losses in sums]


TOO_FINE = "the claim needs a finer grid than this program computes"
BEYOND_FLOATS = "the claim needs a finer grid than floats allow: chances of a release are beyond them"


def on_grid(pair: Pair, grid: float, tail: float) -> DensePLDPmf:
    """The losses log(P / Q) under P, each moved to both ends of its cell, so that the masses of P and of Q are kept."""
    known = (pair[0] > 0) & (pair[1] > 0)
    require(pair[0][~known].sum() <= 1000 * tail, BEYOND_FLOATS)
    p, q = pair[0][known], pair[1][known]
    losses = np.log(p / q) / grid
    cells = np.floor(losses)
    require(2**12 + cells.max() - cells.min() <= MAX_POINTS, TOO_FINE)
    first, index = int(cells.min()), (cells - cells.min()).astype(int)
    upper = p * np.expm1(grid * (cells - losses)) / math.expm1(-grid)
    masses = np.append(np.bincount(index, p - upper), 0.0) + np.append(0.0, np.bincount(index, upper))
    used = np.flatnonzero((np.cumsum(masses) > tail) & (np.cumsum(masses[::-1])[::-1] > tail))
    require(len(used), "delta is smaller than what this program's numbers are exact to")
    low, high = int(used[0]), int(used[-1]) + 1
    return DensePLDPmf(grid, first + low, masses[low:high], 0.0, pessimistic_estimate=True)


def losses_of(loss: DensePLDPmf) -> Array:
    """The losses whose chances `_probs` are."""
    return np.asarray(loss._discretization * (loss._lower_loss + np.arange(loss.size)))


def worst_part(event: Event, grid: float, delta: float, slip: float) -> list[Pair]:
    """A choice of mechanisms, whose delta is at most the largest of theirs at each epsilon."""
    each, pairs = [compose(part, delta, slip) for part in event["events"]], []
    for losses in zip(*each, strict=True):
        first = math.floor(min(losses_of(loss)[0] for loss in losses) / grid)
        last = math.ceil(max(losses_of(loss)[-1] for loss in losses) / grid) + 1
        require(last - first <= MAX_POINTS, TOO_FINE)
        require(max(-first, last) * grid < 700, BEYOND_FLOATS)
        ratios, deltas = np.exp(grid * np.arange(first, last + 1)), np.zeros(last - first + 1)
        for loss in losses:
            masses = loss._probs, loss._probs * np.exp(-losses_of(loss))
            p, q = (np.append(np.cumsum(mass[::-1])[::-1], 0.0) for mass in masses)
            above = np.searchsorted(losses_of(loss), np.log(ratios) + slip, side="right")
            deltas = np.maximum(deltas, p[above] - math.exp(slip) * ratios * q[above])
        # delta(e) is the sum of p - exp(e) q over the ratios p / q above exp(e), so that it bends by q at each
        slopes = np.diff(deltas, prepend=1.0) / np.diff(ratios, prepend=0.0)
        q = np.maximum(0.0, np.diff(slopes, append=0.0))
        pairs.append((q * ratios, q))
    return pairs


def best_of_trials(event: Event, delta: float, eta: float) -> list[Pair]:
    """The best of a random number of trials: delta(e + shift) is at most the mean number times one trial's delta(e).

    The shift bounds the change of the logarithm of f', for the number's generating function f, between neighbours
    (Koskela, Redberg and Wang 2024, arXiv:2402.06701). As delta(e) is the sum of p - exp(e) q over the losses above e,
    the bound is that of masses: p by the mean, and q by the mean and exp(-shift).
    """
    mean, shape, tolerance = event["mean"], event["shape"], 1e-11
    slip = eta / max(8.0, mean / 4 if shape is None else 0.0)
    trial = compose(event["event"], delta / mean, slip)

    def once(e: float) -> float:
        """A lower bound on a trial's delta, but for what the grid adds to e."""
        return float(max(loss.get_delta_for_epsilon(e) for loss in trial) - delta / mean * (MORE - 1))

    if shape is None:  # the grid adds less than a quarter of h sqrt(n) to delta at 0
        shift = mean * max(0.0, once(0.0) - slip / 8)
    else:
        gamma = float(renyi._gamma_truncated_negative_binomial(float(shape), mean))
        bounds = common.BinarySearchParameters(0.0, 10.0, tolerance=tolerance)
        minimum = common.inverse_monotone_function(
            lambda e: (1 - gamma) * once(e + slip) - gamma * math.expm1(e), 0.0, bounds
        )
        require(minimum, "a trial tells too much for a privacy profile of the best")
        shift = (shape + 1) * max(0.0, minimum - tolerance) if mean > 1 else 0.0
    sides = []
    for loss in trial:  # the masses of losses above 0, the largest loss first
        levels = losses_of(loss) + shift - slip
        used = np.flatnonzero((levels > tolerance) & (loss._probs > 0))[::-1]
        sides.append((mean * loss._probs[used], mean * loss._probs[used] * np.exp(-levels[used])))

    def pair_of(maximum: float) -> Pair:
        """The largest losses of both sides that have this delta at 0."""
        shares = [np.clip((maximum - np.cumsum(p - q)) / (p - q) + 1.0, 0.0, 1.0) for p, q in sides]
        (remove, other), (add, another) = ((p * s, q * s) for (p, q), s in zip(sides, shares, strict=True))
        return np.append(remove, another), np.append(other, add)

    # The same delta at 0 of both, and chances of 1 at most; the rest is loss 0.
    bounds = common.BinarySearchParameters(0.0, min((p - q).sum() for p, q in sides), tolerance=tolerance)
    maximum = common.inverse_monotone_function(
        lambda maximum: pair_of(maximum)[0].sum(), 1.0, bounds, increasing=True
    )
    p, q = (np.append(masses, max(0.0, 1.0 - masses.sum())) for masses in pair_of(maximum))
    return [(p, q), (q, p)]


# ---------------------------------------------------------------- 7. Single releases.

BINS = np.linspace(0.0, 1.0, 2**13 + 1)
"""The edges of the bins, from the lowest output to the highest; what bins lose falls with the square of their width."""
ERFC = np.frompyfunc(math.erfc, 1, 1)


def pairs_of(event: Event, tail: float) -> list[Pair]:
    """The pairs of a release for removing and for adding a record, but for outputs of no more than this chance."""
    kind, inner = event["type"], event.get("event", event)
    z, rate = inner.get("noise_multiplier", 1.0), event.get("sampling_probability", 1.0)
    match kind, inner["type"]:
        case "GaussianDpEvent" | "PoissonSampledDpEvent", "GaussianDpEvent":
            pair = normals(z, {1: rate, 0: 1 - rate}, {0: 1.0}, tail)
        case "LaplaceDpEvent" | "PoissonSampledDpEvent", "LaplaceDpEvent":
            above = np.exp(-BINS / z) / 2  # outputs below 0 are alike, and so are those above 1
            without = np.concatenate([[0.5], -np.diff(above), above[-1:]])
            pair = rate * without[::-1] + (1 - rate) * without, without
        case "PureDpEvent", _:  # randomised response dominates (Kairouz et al. 2015)
            lie = math.exp(-event["epsilon"]) / (1 + math.exp(-event["epsilon"]))
            pair = np.array([1 - lie, lie]), np.array([lie, 1 - lie])
        case "ObjectivePerturbationDpEvent", _:
            # Both ways the loss log(1 + ratio) + s^2 / 2 + s |X|, for X ~ N(0, 1) and s = 1 / z.
            x = BINS * math.sqrt(-2 * math.log(tail))
            without = 2 * normal_masses(x + 1 / z) / (1 + event["curvature_ratio"])
            return [(2 * normal_masses(x), without)] * 2
        case "ReplacedInSample", _:
            pair = normals(z, {0: 1 - rate, 1: rate}, {0: 1 - rate, -1: rate}, tail)
        case "SampledWithoutReplacementDpEvent", _:
            # Both ways delta is at most that of removing (Balle, Barthe and Gaboardi 2018, Theorems 2 and 11).
            p, q = normals(z, {1: event["share"], 0: 1 - event["share"]}, {0: 1.0}, tail)
            up, down = p[p > q], q[p > q]
            rest = [max(0.0, 1.0 - up.sum() - down.sum())]
            pair = np.concatenate([up, down, rest]), np.concatenate([down, up, rest])
        case "SampledGroupDpEvent", _:  # of whom a binomial number is in the sample (arXiv:2401.10294)
            n = event["count"]
            chances = {j: math.comb(n, j) * rate**j * (1 - rate) ** (n - j) for j in range(n + 1)}
            pair = normals(z, chances, {0: 1.0}, tail)
        case "RandomAllocationDpEvent", _:
            pair = random_allocation(z, event["parts"], event["steps"], tail)
        case _:
            raise NoBoundError(f"a {kind} has no privacy profile")
    return [pair, pair[::-1]]


def normals(z: float, p: dict[int, float], q: dict[int, float], tail: float) -> Pair:
    """N(j, z^2) with chance p[j] against the same with chance q[j]."""
    minimum, maximum, reach = min(*p, *q), max(*p, *q), z * math.sqrt(-2 * math.log(tail))
    x = minimum - reach + BINS * (maximum - minimum + 2 * reach)

    def masses(chances: dict[int, float]) -> Array:
        terms = (chance * normal_masses((x - j) / z) for j, chance in chances.items() if chance > 1e-30)
        return sum(terms, np.zeros(len(x) - 1))

    return masses(p), masses(q)


def normal_masses(x: Array) -> Array:
    """The chances of a normal number to be between ascending edges."""
    below, above = (np.asarray(ERFC(y / math.sqrt(2)), np.float64) / 2 for y in (-x, x))
    # of the nearer tail, since chances near 1 are rounded most
    return np.where(x[:-1] > 0, -np.diff(above), np.diff(below))


def random_allocation(z: float, parts: int, steps: int, tail: float) -> Pair:
    """A pass in which a record takes part in one of `parts` steps, of which `steps` took place (arXiv:2412.16802).

    P / Q = (Y_1 + ... + Y_steps + parts - steps) / parts for independent log-normal Y of mean 1 under Q. The outputs of
    several steps are put into bins of nearly the same sum of Y, which tells less, too: the sum of a bin is its mean.
    """

    def in_bins(q: Array, sums: Array) -> Pair:
        """The chances of bins of outputs, and the same times their sums, from those of single outputs."""
        used = np.maximum(q, sums) > 1e-6 * tail
        levels = np.log(sums[used]) - np.log(np.maximum(q[used], 1e-300))
        bins = ((levels - levels.min()) * (1000 / max(np.ptp(levels), 1e-9))).astype(int)
        q, sums = (np.asarray(np.bincount(bins, masses[used]), np.float64) for masses in (q, sums))
        return q, sums

    def both(first: Pair, other: Pair) -> Pair:
        (q, sums), (r, others) = first, other
        return in_bins(np.outer(q, r).ravel(), (np.outer(sums, r) + np.outer(q, others)).ravel())

    reach = math.sqrt(-2 * math.log(tail))
    x = BINS * (2 * reach + 1 / z) - reach
    total = step = in_bins(normal_masses(x), normal_masses(x - 1 / z))
    for bit in f"{steps:b}"[1:]:
        total = both(total, total)
        total = both(total, step) if bit == "1" else total
    return (total[1] + total[0] * (parts - steps)) / parts, total[0]


# ---------------------------------------------------------------- 8. The command.


def verify(path: Path, *, key: str | None = None, unsigned: bool = False) -> list[Check]:
    """All checks of the card in a file, or of the privacy_card.json in a folder; raises BadCardError without one."""
    card, folder = load(path), path if path.is_dir() else path.parent
    return [*check_signature(card, key, unsigned=unsigned), *check_files(card, folder), *check_promise(card)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints what holds, and returns its exit status."""
    parser = argparse.ArgumentParser(description="Check a privacy card and the files beside it.")
    parser.add_argument("folder", type=Path, help="a release, or a privacy_card.json")
    parser.add_argument("--key", help="the owner's public key, or a file that holds it; from the owner")
    parser.add_argument("--unsigned", action="store_true", help="accept a card that nobody signed")
    options = parser.parse_args(arguments)
    is_file = options.key is not None and Path(options.key).is_file()
    key = Path(options.key).read_text(errors="replace").strip() if is_file else options.key
    logging.getLogger("absl").setLevel(logging.ERROR)  # dp-accounting's warnings
    try:
        checks = verify(options.folder, key=key, unsigned=options.unsigned)
    except BadCardError as error:
        sys.stdout.write(f"No card was checked: {error}\n")
        return 2
    for name, passed, detail in checks:
        word = "not checked" if passed is None else "ok" if passed else "FAILED"
        sys.stdout.write(f"{word:12} {name}: {detail}\n")
    holds = all(passed is not False for _, passed, _ in checks)
    promise = next(detail for name, _, detail in checks if name == "guarantee")
    sys.stdout.write(f"The card holds. It promises {promise}.\n" if holds else "The card does not hold.\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

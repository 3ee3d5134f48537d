"""Check a privacy card without epsilonflow: python verify_card.py FOLDER [--key owner.pub] [--unsigned]

This file is all that is needed, with numpy, cryptography and dp-accounting (pip install numpy cryptography
dp-accounting). FOLDER is a release, or the path of a privacy_card.json. Read it from top to bottom:

1. Claims: the form of the card, whose bytes must be those that its facts are written as.
2. Signature: the owner's Ed25519 signature over all facts; with --key, that the owner is who you expect.
3. Files: the SHA-256 of the files beside the card, and that plan.json plans these releases.
4. Price: epsilon, computed again from the recorded events, and that guarantee, target, number of releases and
   rounding are what events and noise allow.

It exits with 0 if nothing failed, with 1 if something failed, with 2 if there is no card that can be read. It does not
read the trace (it has no reader of Parquet), which the checksum ties to the card; nor the ledger, which the owner has.

How epsilon is computed. A release is a pair (P, Q) of output distributions, with a record and without it. Its privacy
profile delta(e) = sup_S P(S) - exp(e) Q(S) becomes a privacy loss on a grid by "connect the dots" (Doroshenko et al.
2022, arXiv:2207.04380), which never lowers a delta, and dp-accounting adds up the losses of n releases. A lower bound
follows by coupling: a loss inside a cell of width h goes to one of the cell's ends, at random, with a mean of at most
h^2 / 8, so that n of them move the sum by more than eta = n h^2 / 8 + h sqrt(n log(1/s) / 2) with probability s at most
(Hoeffding), and epsilon >= epsilon_of_the_grid(delta + s) - eta. Here s is delta / 1000, and h makes eta 0.4 % of the
epsilon that is stated (of 0.001 if less is stated, of 10 if more), or 2 % where 0.4 % takes more than 2^21 points.

So a card passes from about 0.5 % below its price on, whatever sharper numerics it was made with; whoever states more
misleads nobody. That holds for Gaussian, Laplace and pure releases, Poisson samples, samples of a fixed size, groups,
random allocation, correlated noise, objective perturbation and disjoint parts. A search or a choice of mechanisms is
put on a grid twice, and passes from 1 % below the published bound for it on; a run of a million steps from 2 % on.
What needs a still finer grid is refused. Renyi and pure epsilons are formulas, compared to a part in a million; the
Renyi ones of groups and of random allocation have to be at least the bound above.
"""

import argparse
import hashlib
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from dp_accounting.pld.common import compute_self_convolve_bounds, self_convolve
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, LaplacePrivacyLoss
from dp_accounting.rdp import rdp_privacy_accountant as renyi
from numpy.typing import NDArray

Array = NDArray[np.float64]
Card = dict[str, Any]
"""A card, or a part of one, as it was parsed."""
Event = Card
Rows = list[tuple[Event, int]]
"""Events in their order, each with how often it took place."""
Check = tuple[str, bool | None, str]
"""A name, whether it passed (None: there was nothing to check it against), and what was seen."""
Profile = Callable[[Array], Array]
"""delta at ascending epsilons."""

FILES, EVALUATION = ("model.safetensors", "plan.json", "trace.parquet"), "evaluation.json"
"""Beside a card; the last one where private held-out records were evaluated."""
ROUNDING = {"grid_bits": 24, "sum_bits": 64, "laplace_scales": 64, "laplace_error_bits": 18}
BELOW, ABOVE, ABSOLUTE, SLACKS = 1e-6, 1e-2, 1e-9, (0.004, 0.02)
"""How far a stated epsilon may lie below its bound and above a formula, and eta as a share of it, smallest first."""
MAX_BYTES, MAX_DEPTH, MAX_KINDS, MAX_POINTS = 2**25, 20, 2_000, 2**21
MAX_WORK = 2**31
"""Of what bounds are computed from, in about as many tails of a normal distribution: two or three minutes."""
LARGEST = sys.float_info.max


class BadCardError(Exception):
    """What is no card: one sentence for whoever asked."""


class NoBoundError(Exception):
    """No theorem that is used here bounds these events in this way."""


class FinerGridError(NoBoundError):
    """A grid would have more points than this program computes."""


class Work:
    """What may still be computed for a card, so that nobody can write one that takes for ever."""

    left = MAX_WORK

    @classmethod
    def spend(cls, number: float) -> None:
        """Take off so many; raises NoBoundError where as many are not left."""
        cls.left -= math.ceil(number)
        if cls.left < 0:
            raise NoBoundError("its events take longer than this program computes")


# ---------------------------------------------------------------- 1. Claims.

# fmt: off
TEXTS = {"name": r"\S", "sha256": r"\A[0-9a-f]{64}\Z", "hex128": r"\A[0-9a-f]{128}\Z"}
NUMBERS: dict[str, tuple[tuple[type, ...], float, float]] = {
    "int": ((int,), -LARGEST, LARGEST), "count": ((int,), 1, LARGEST), "chance": ((float,), 0, 1),
    "number": ((float,), 0, LARGEST), "positive": ((float,), 5e-324, LARGEST),
    # of events, in which a whole number may be written as an integer
    "noise": ((int, float), 1e-6, 1e12), "rate": ((int, float), 0, 1), "real": ((int, float), 0, LARGEST),
    "order": ((int, float), 1 + 1e-12, LARGEST), "mean": ((int, float), 1, 1e6),
    "coordinate": ((int, float), -1e6, 1e6), "decay": ((int, float), 0, 1 - 1e-16), "times": ((int,), 0, 10**9),
    "steps": ((int,), 1, 10**6), "leaves": ((int,), 0, 10**6), "group": ((int,), 1, 1000),
}
SECTIONS = {
    "CARD": "schema_version:2 signature:SIGNATURE? setting:SETTING mechanism:MECHANISM accounting:ACCOUNTING"
            " events:[EVENT] implementation:IMPLEMENTATION evidence:EVIDENCE",
    "SIGNATURE": "public_key:sha256 value:hex128",
    "SETTING": "guarantee:private|seeded|diagnosed|none epsilon:number? delta:chance"
               " adjacency:ADD_OR_REMOVE_ONE|REPLACE_ONE unit:name dataset:name title:name source:name licence:name"
               " population:name public_records:flag records:count? holdout:public|private|none -per_person:count"
               " -pooled:count -unit_is_stated:true -each_record_alone:true -holdout_why:name"
               " -evaluation_epsilon:number",
    "MECHANISM": "transform:none|scattering|encoder encoder:ENCODER? features:FEATURES diagnostics:flag"
                 " settings_from_records:flag algorithm:name settings:object model:MODEL steps:count releases:count"
                 " noise_multiplier:number? sampling_rate:chance divisor:positive? queries:[QUERY]"
                 " -paper_protocol:PROTOCOL -selection_law:LAW",
    "LAW": "candidates:count noise_scale:positive gain:number? distance:chance?",
    "PROTOCOL": "paper:name settings:object departures:[name]*",
    "ENCODER": "name:name takes:images|texts width:count sha256:sha256 pretrained_on:name settings:name"
               " -tokens:count -padding:count",
    "FEATURES": "name:name settings:object",
    "MODEL": "name:name seed:int parameters:count precision:float32|bfloat16 settings:object start:sha256?"
             " files:{sha256}* reinitialize:[name]* frozen:[name]* augmentations:count",
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
    "IMPLEMENTATION": "recorded:training|report -version:name -code:sha256 python:name packages:{name} git:GIT?"
                      " device:name noise:secure|seeded cipher:AES-256-CTR rounding:ROUNDING?",
    "GIT": "commit:name dirty:flag",
    "ROUNDING": "grid_bits:count sum_bits:count laplace_scales:count laplace_error_bits:count",
    "EVIDENCE": "run_id:name ledger_head:sha256? files:{sha256}*",
}
"""The fields of each section in their order, each with its kind: - before a name allows its absence, ? after a kind
null; [x] is a list of x and {x} an object of x, with * also an empty one; a|b is one of these words."""

EVENTS = {
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
    "ComposedDpEvent": "events:[event]*",
    "EitherDpEvent": "events:[event]",
    "DisjointPartsDpEvent": "events:[event]",
    "RepeatAndSelectDpEvent": "event:event mean:mean shape:real?",
    "CorrelatedDpEvent": "noise_multiplier:noise coefficients:[coordinate]* weights:[coordinate]* decays:[decay]*"
                         " leaves:leaves parts:steps rate:rate steps:steps",
    "CorrelatedStepDpEvent": "noise_multiplier:noise parts:steps rate:rate",
    "RandomAllocationDpEvent": "noise_multiplier:noise parts:steps steps:steps",
    "RandomAllocationStepDpEvent": "noise_multiplier:noise parts:steps",
}
"""The fields of each type of event, in any order. The names are dp-accounting's and epsilonflow's."""
# fmt: on

RULES: dict[str, Callable[[Event], bool]] = {
    "SampledWithoutReplacementDpEvent": lambda event: event["sample_size"] <= event["source_dataset_size"],
    "RandomAllocationDpEvent": lambda event: event["steps"] <= event["parts"],
    "CorrelatedDpEvent": lambda event: (
        [bool(event["coefficients"]), bool(event["weights"]), event["leaves"] > 0].count(True) == 1
        and len(event["weights"]) == len(event["decays"])
        and event["rate"] > 0
        and (not event["coefficients"] or event["coefficients"][0] > 0)
        and event["steps"] ** 2 / event["parts"] <= 1e10
    ),
}
"""What the numbers of an event must fulfil together."""
PASSES = {
    "CorrelatedDpEvent": "CorrelatedStepDpEvent",
    "RandomAllocationDpEvent": "RandomAllocationStepDpEvent",
}
"""Events that pay for a whole pass, and those of its later steps, which cost nothing then."""
SEARCHES = ("ComposedDpEvent", "EitherDpEvent")
"""What holds the trials of a search: all of them, whose results are shown, or any of them, the best of which is."""
WORST_PART = ("EitherDpEvent", "DisjointPartsDpEvent")
"""Events that tell at most as much as the worst of their parts: a mixture of mechanisms, one of which is drawn, and
mechanisms on disjoint people, of whom a record that is added or removed is in one part (McSherry 2009, Theorem 4)."""


def load(path: Path) -> Card:
    """The facts of a card whose form is right, and whose bytes are those that they are written as."""
    content = read_bytes(path)
    card: Card = parse(content, path)
    check_value(card, "CARD", "the card")
    if {*card["evidence"]["files"]} - {EVALUATION} != {*FILES}:
        raise BadCardError("the card names other files than a run has.")
    if not is_canonical(card, content):
        raise BadCardError(f"{path} was edited: its bytes are not those that its facts are written as.")
    check_payments(rows_of(card))
    return card


def read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadCardError(f"{path} cannot be read ({error.strerror}).") from None
    if len(content) > MAX_BYTES:
        raise BadCardError(f"{path} is larger than {MAX_BYTES} bytes.")
    return content


def parse(content: bytes, path: Path) -> Any:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError):
        raise BadCardError(f"{path} is no JSON document.") from None


def is_canonical(card: Card, content: bytes) -> bool:
    """Whether these are the bytes of the card, up to the first that differs: indented, deep facts can be gigabytes."""
    at = 0
    try:
        for text in json.JSONEncoder(indent=2, ensure_ascii=False, allow_nan=False).iterencode(card):
            if not content.startswith(chunk := text.encode(), at):
                return False
            at += len(chunk)
    except (ValueError, RecursionError):  # a number like 1e999, or a text that is none
        raise BadCardError("the card holds a number that is not finite, or no text.") from None
    return content[at:] == b"\n"


def canonical_bytes(card: Card) -> bytes:
    """How the facts of a card are written; the signature is over these bytes with null in its place."""
    return (json.dumps(card, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def check_value(value: Any, kind: str, where: str) -> None:
    """Refuse a value that is not of its kind; `where` names it."""
    if kind[0] in "[{":
        is_empty_allowed, inner = kind.endswith("*"), kind.strip("[]{}*")
        if type(value) is not (list if kind[0] == "[" else dict) or not (value or is_empty_allowed):
            raise BadCardError(f"{where} is not filled as it must be.")
        for one in value if isinstance(value, list) else value.values():
            check_value(one, inner, where)
    elif kind.endswith("?"):
        if value is not None:
            check_value(value, kind[:-1], where)
    elif kind in SECTIONS or kind == "event":
        check_section(value, kind, where)
    elif not is_of_kind(value, kind):
        raise BadCardError(f"{where} does not hold a value that it may have.")


def is_of_kind(value: Any, kind: str) -> bool:
    if kind in NUMBERS:
        types, least, most = NUMBERS[kind]
        return type(value) in types and least <= value <= most
    if kind in TEXTS:
        return isinstance(value, str) and re.search(TEXTS[kind], value) is not None
    if kind in ("flag", "true", "object"):
        return type(value) is (dict if kind == "object" else bool) and (kind != "true" or value is True)
    return type(value) is (int if kind.isdigit() else str) and str(value) in kind.split("|")


def check_section(value: Any, kind: str, where: str) -> None:
    """Refuse a section or an event that has other fields than it must have, or values that they may not have."""
    if not isinstance(value, dict):
        raise BadCardError(f"{where} is no object.")
    is_event, form = kind == "event", SECTIONS.get(kind)
    if is_event:
        form = EVENTS.get(value["type"]) if isinstance(value.get("type"), str) else None
    fields = [field.partition(":")[::2] for field in (form or "").split()]
    fields = [(name.lstrip("-"), kind) for name, kind in fields if name[0] != "-" or name[1:] in value]
    names = [name for name, _ in fields]
    if form is None or ({*value} != {"type", *names} if is_event else [*value] != names):
        raise BadCardError(f"{where} has other fields, or in another order, than it must have.")
    if where.count(": ") > MAX_DEPTH:
        raise BadCardError("an event is nested too deeply.")
    for name, inner in fields:
        check_value(value[name], inner, f"{where}: {name}")
    if is_event and value["type"] in RULES and not RULES[value["type"]](value):
        raise BadCardError(f"{where} has numbers that do not go together.")


def check_payments(rows: Rows) -> None:
    """Refuse later steps of a pass that no event before them has paid for."""
    left, paid = 0, None
    for event, count in rows:
        inner = parts_of(event)
        for part in [inner] if event["type"] == "ComposedDpEvent" else [[one] for one in inner]:
            check_payments(part)
        terms = [event.get(name) for name in ("noise_multiplier", "parts", "rate")]
        if event["type"] in PASSES:
            left, paid = event["steps"] - 1, [PASSES[event["type"]], *terms]
        elif event["type"] in PASSES.values():
            left -= count
            if [event["type"], *terms] != paid or left < 0:
                raise BadCardError(
                    "later steps stand among the events that no event before them has paid for."
                )


def rows_of(card: Card) -> Rows:
    return [(row["event"], row["count"]) for row in card["events"]]


def parts_of(event: Event) -> Rows:
    """The events that an event holds, a composition of equal ones as one row."""
    inner = [event["event"]] if "event" in event else event.get("events", [])
    repeated = [one if one["type"] == "SelfComposedDpEvent" else {"event": one, "count": 1} for one in inner]
    return rows_of({"events": repeated})


def disjoint_parts(rows: Rows) -> list[Rows]:
    """The rows of each part, if the only event is one of releases on disjoint people; else none."""
    whole, count = rows[0]
    if len(rows) != 1 or count != 1 or whole["type"] != "DisjointPartsDpEvent":
        return []
    parts = [part if part["type"] == "ComposedDpEvent" else {"event": part} for part in whole["events"]]
    return [parts_of(part) or [({"type": "NoOpDpEvent"}, 0)] for part in parts]


def release_counts(rows: Rows) -> set[int]:
    """How many releases the run may have shown: of a search, which is the last event, those of one of its trials.

    Where others evaluated each trial, the second of two disjoint parts is a search, too, of trials that are all alike.
    """
    trained, *evaluated = disjoint_parts(rows) or [rows]
    *before, (last, times) = trained
    others = sum(count for _, count in before) + sum(min(release_counts(part)) for part in evaluated)
    is_best = last["type"] == "RepeatAndSelectDpEvent"
    search = last["event"] if is_best else last
    trials = search["events"] if search["type"] in SEARCHES[is_best:] else []
    are_trials = all(
        trial["type"] == "ComposedDpEvent"
        and all(part["type"] == "SelfComposedDpEvent" for part in trial["events"])
        for trial in trials
    )
    if times != 1 or not trials or not are_trials:
        return {others + times}
    return {others + sum(part["count"] for part in trial["events"]) for trial in trials}


# ---------------------------------------------------------------- 2. Signature.


def check_signature(card: Card, key: str | None, *, unsigned: bool) -> Iterator[Check]:
    """Whether the facts are those that were signed, and by whom."""
    signature = card["signature"]
    if signature is None:
        yield "signature", None if unsigned else False, "the card is not signed"
        return
    signer = signature["public_key"]
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer))
        public.verify(bytes.fromhex(signature["value"]), canonical_bytes({**card, "signature": None}))
        yield "signature", True, f"all facts are as the holder of {signer} signed them"
    except (InvalidSignature, ValueError):
        yield "signature", False, "the facts are others than those that were signed"
    if key is None:
        yield "owner", None, f"ask the owner whether {signer} is theirs, and give their public key (--key)"
    else:
        yield "owner", signer == key, f"{signer} is {'' if signer == key else 'not '}the expected key"


# ---------------------------------------------------------------- 3. Files.


def check_files(card: Card, folder: Path) -> Iterator[Check]:
    """Whether the files beside the card are those that it has checksums of, and its plan plans these releases."""
    for name in (*FILES, *({EVALUATION} & card["evidence"]["files"].keys())):
        if not (folder / name).is_file():
            yield name, None, "does not lie beside the card"
            continue
        with (folder / name).open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == card["evidence"]["files"][name]
        yield name, same, "has the checksum of the card" if same else "is not the file of this card"
    if (folder / "plan.json").is_file():
        plan = parse(read_bytes(folder / "plan.json"), folder / "plan.json")
        try:
            problem = difference_to_plan(plan, card)
        except (KeyError, TypeError, ValueError, AttributeError):
            problem = "the plan cannot be read"
        yield "plan", problem is None, problem or "the card is one of a run of this plan"


# fmt: off
PLANNED = {
    "setting": "adjacency=adjacency dataset=dataset records=public.records",
    "implementation": "noise=noise",
    "accounting": "target=target delta=delta",
    "mechanism": "algorithm=algorithm settings=settings steps=steps noise_multiplier=noise_multiplier"
                 " sampling_rate=sampling_rate divisor=divisor paper_protocol=method_params.paper_protocol"
                 " selection_law=method_params.selection_law",
    "mechanism.model": "name=model.name seed=model.seed parameters=model.parameters precision=model.precision"
                       " settings=model.settings reinitialize=model.reinitialize frozen=model.freeze"
                       " augmentations=model.augmentations",
}
"""What a section of a card has from where in the plan, and what is meant where a plan leaves it out."""
LEFT_OUT = {"model.precision": "float32", "model.settings": {}, "model.reinitialize": [], "model.freeze": [],
            "model.augmentations": 1}
# fmt: on


def difference_to_plan(plan: Any, card: Card) -> str | None:
    """What a plan has otherwise than the card of one of its runs."""
    pairs = {
        f"{section}.{name}": value_at(plan, path, LEFT_OUT.get(path))
        for section, fields in PLANNED.items()
        for name, path in (field.split("=") for field in fields.split())
    }
    features, files = dict(plan["features"]), dict(plan["model"].get("files", {}))
    is_fixed, diagnostics = plan["filter"]["kind"] == "schedule", plan.get("diagnostics")
    pairs["mechanism.features"] = {"name": features.pop("name"), "settings": features}
    pairs["mechanism.model.start"], pairs["mechanism.model.files"] = files.pop("start", None), files
    pairs["mechanism.settings_from_records"] = plan["not_private"] is not None
    pairs["mechanism.diagnostics"] = (
        value_at(card, "mechanism.diagnostics") if diagnostics is None else diagnostics
    )
    pairs["accounting.accountant"] = plan["accountant"] if is_fixed else "rdp"
    pairs["accounting.composition"] = {"rho": None, "order": None, "limit": None} | plan["filter"]
    if differing := [path for path, planned in pairs.items() if planned != value_at(card, path)]:
        return f"the plan has another {', '.join(differing)}"
    trained, *evaluated = disjoint_parts(rows_of(card)) or [rows_of(card)]
    if not evaluated and EVALUATION in card["evidence"]["files"]:  # composed, where a record is replaced
        trained, *evaluated = trained[:-1], trained[-1:]
    if evaluated and [*map(merge_neighbours, evaluated)] != [planned_rows(plan["evaluation"], "schedule")]:
        return "the plan has another evaluation"
    before = planned_rows(plan, "schedule" if is_fixed else "prior_events")
    begun, left = [], math.inf if is_fixed else sum(count for _, count in before)
    for event, count in trained:
        begun += [(event, min(count, left))] if left > 0 else []
        left -= count
    return None if before == merge_neighbours(begun) else "the plan has other events"


def value_at(document: Any, path: str, left_out: Any = None) -> Any:
    """What stands at a path of names."""
    for name in path.split("."):
        document = (document or {}).get(name)
    return left_out if document is None else document


def planned_rows(document: Any, name: str) -> list[tuple[Event, float]]:
    return merge_neighbours(rows_of({"events": document.get(name, [])}))


def merge_neighbours(rows: Iterable[tuple[Event, float]]) -> list[tuple[Event, float]]:
    """Equal neighbours counted together."""
    return [(event, sum(count for _, count in same)) for event, same in groupby(rows, key=itemgetter(0))]


# ---------------------------------------------------------------- 4. Price: what is promised.


def check_promise(card: Card) -> Iterator[Check]:
    """Whether each stated epsilon is at least the lower bound, and what is promised follows from it."""
    accounting, setting, shown = card["accounting"], card["setting"], card["mechanism"]
    (bounds, why), held_to = lower_bounds(card), accounting["accountant"]
    for name, bound in bounds.items():
        stated, passed = accounting["epsilon"][name], True
        detail = f"stated {in_digits(stated)}, at least {in_digits(bound)}"
        if stated is None:
            passed = bound is None or name != held_to  # not every accountant's has to be stated
        elif bound is None:
            passed, detail = False, f"stated {in_digits(stated)}, which was not computed: {why}"
        else:
            has_formula = name != "pld" and not has_profile_alone(card)
            most = bound * (1 + ABOVE) + ABSOLUTE if has_formula else math.inf
            passed = bound * (1 - BELOW) - ABSOLUTE <= stated <= most
        yield f"epsilon by {name}", passed, detail
    cost, allowed = accounting["epsilon"][held_to], "private"
    if bounds[held_to] is None:
        allowed = "none"
    elif card["implementation"]["noise"] != "secure":
        allowed = "seeded"
    elif shown["diagnostics"] or shown["settings_from_records"]:
        allowed = "diagnosed"
    promised = cost if setting["guarantee"] == "private" else None
    follows = setting["guarantee"] == allowed and setting["epsilon"] == promised
    follows = follows and setting["delta"] == accounting["delta"]
    yield "guarantee", follows, f"{setting['guarantee']}; events and noise allow {allowed}"
    if allowed == "private":
        limit, target = accounting["target"]["epsilon"], accounting["target"]["delta"]
        within = limit is None or (cost is not None and cost <= limit * (1 + BELOW))
        detail = f"epsilon {in_digits(cost)} of {in_digits(limit)}"
        yield "target", within and accounting["delta"] <= target, detail
    if EVALUATION in card["evidence"]["files"]:
        least, stated = least_held_out(card), setting.get("evaluation_epsilon")
        covers = least is not None and stated is not None and least * (1 - BELOW) - ABSOLUTE <= stated
        detail = f"stated {in_digits(stated)}, at least {in_digits(least)}"
        yield "epsilon of the people held out", covers, detail
    expected = None if allowed == "none" else ROUNDING
    yield "rounding", card["implementation"]["rounding"] == expected, "of sums and noise"
    asked = sum(query["count"] for query in shown["queries"])
    same = shown["releases"] == asked and asked in release_counts(rows_of(card))
    yield "releases", same, f"{asked} in the queries"


def lower_bounds(card: Card) -> tuple[dict[str, float | None], str]:
    """By accountant a lower bound on epsilon, None where there is none; and why, of the last one without."""
    Work.left = MAX_WORK
    accounting, adjacency, rows = card["accounting"], card["setting"]["adjacency"], rows_of(card)
    delta, how = accounting["delta"], accounting["composition"]
    needed: set[str] = {"schedule": set(), "zcdp": {"rho"}, "renyi": {"order", "limit"}}[how["kind"]]
    if {name for name in ("rho", "order", "limit") if how[name] is not None} != needed:
        raise BadCardError("the composition has other numbers than its kind.")
    parts = disjoint_parts(rows) if adjacency == "ADD_OR_REMOVE_ONE" and how["kind"] == "schedule" else []
    bounds: dict[str, float | None] = dict.fromkeys(("pld", "rdp", "pure"))
    if "NonPrivateDpEvent" in json.dumps(card["events"]):
        return bounds, "an event is without noise"
    attempts: dict[str, Callable[[Rows], float]] = {}
    if how["kind"] == "schedule" and 0 < delta < 1:
        attempts["pld"] = lambda part: pld_bound(part, delta, adjacency, accounting["epsilon"]["pld"])
        attempts["rdp"] = lambda part: rdp_epsilon(part, delta, adjacency)
    if how["kind"] == "schedule" and delta < 1:
        attempts["pure"] = lambda part: add_up(pure_epsilon, translate(part, adjacency))
    elif adjacency == "ADD_OR_REMOVE_ONE" and 0 < delta < 1:
        attempts["rdp"] = lambda part: epsilon_of_filter(part, how, delta)
    why = "nothing is proven for such events under this adjacency"
    for name, attempt in attempts.items():
        try:
            with np.errstate(all="ignore"):
                bound = max(map(attempt, parts or [rows]))
            bounds[name] = bound if math.isfinite(bound) else None
        except NoBoundError as error:
            why = str(error)
        except (ArithmeticError, ValueError, IndexError, MemoryError):
            why = "numbers are too large or too small to compute with"
    if bounds["rdp"] is None and has_profile_alone(card):
        bounds["rdp"] = bounds["pld"]  # no Renyi bound lies below the exact epsilon
    return bounds, why


def has_profile_alone(card: Card) -> bool:
    """Whether there are events whose Renyi bounds are not computed here."""
    return re.search("SampledGroup|RandomAllocation", json.dumps(card["events"])) is not None


def least_held_out(card: Card) -> float | None:
    """A lower bound on the epsilon of the people held out; None without one.

    Of all releases of their part, or of the last one where a record is replaced.
    """
    evaluated = (disjoint_parts(rows_of(card)) or [[(rows_of(card)[-1][0], 1)]])[-1]
    fixed = {"kind": "schedule", "rho": None, "order": None, "limit": None}
    stated = dict.fromkeys(("pld", "rdp", "pure"), card["setting"].get("evaluation_epsilon"))
    accounting = card["accounting"] | {"composition": fixed, "epsilon": stated}
    events = [{"event": event, "count": count} for event, count in evaluated]
    alone = {**card, "events": events, "accounting": accounting}
    return lower_bounds(alone)[0]["pld" if accounting["delta"] else "pure"]


def epsilon_of_filter(rows: Rows, how: Card, delta: float) -> float:
    """What a filter allowed, which the run costs even if its releases, chosen adaptively, came to less."""
    if how["kind"] == "zcdp":
        total, alphas = max(add_up(rho, rows), how["rho"]), 1 + np.exp(np.linspace(-12.0, 25.0, 400_001))
        return max(0.0, float(np.min(alphas * total + conversion(alphas, delta))))
    adjacency = "ADD_OR_REMOVE_ONE"
    total = add_up(
        lambda event: float(rdp(under_replace_one(event, adjacency), (how["order"],), adjacency)[0]), rows
    )
    return max(0.0, float(max(total, how["limit"]) + conversion(np.array(how["order"]), delta)))


def conversion(alphas: Array, delta: float) -> Array:
    """From a Renyi bound at an order to epsilon (Canonne, Kamath and Steinke 2020, Proposition 12)."""
    return np.asarray(np.log1p(-1 / alphas) - np.log(delta * alphas) / (alphas - 1))


def rdp_epsilon(rows: Rows, delta: float, adjacency: str) -> float:
    total = np.zeros(len(ORDERS))
    for event, count in merge(translate(rows, adjacency)):
        total = total + count * rdp(event, ORDERS, adjacency)
    return math.inf if np.isinf(total).all() else float(renyi.compute_epsilon(ORDERS, total, delta)[0])


def add_up(cost: Callable[[Event], float], rows: Rows) -> float:
    counts = merge(rows, gaussian_together=False)
    return float(sum(count * cost(event) for event, count in counts))


# ---------------------------------------------------------------- 4. Price: events in fewer kinds.


def translate(rows: Rows, adjacency: str) -> Rows:
    """The single releases of rows under an adjacency."""
    for event, _ in rows:
        under_replace_one(
            event, adjacency
        )  # what is refused as it stands is refused before it is merged with others
    return [(under_replace_one(event, adjacency), count) for event, count in releases(rows)]


def releases(rows: Iterable[tuple[Event, int]]) -> Iterator[tuple[Event, int]]:
    """The single releases of events that consist of others, each with its count, but for those that tell nothing."""
    for event, count in rows:
        kind = event["type"]
        if kind in ("NoOpDpEvent", *PASSES.values()) or 0 in (
            count,
            event.get("sampling_probability"),
            event.get("sample_size"),
        ):
            continue
        if kind in ("SelfComposedDpEvent", "ComposedDpEvent"):
            times = count * event.get("count", 1)
            yield from releases((inner, times * repeats) for inner, repeats in parts_of(event))
        elif kind in WORST_PART and all(inner == event["events"][0] for inner in event["events"]):
            yield from releases([(event["events"][0], count)])
        elif kind == "CorrelatedDpEvent":
            inner, repeats = of_correlated(event)
            yield inner, repeats * count
        else:
            yield event, count


def merge(rows: Iterable[tuple[Event, int]], *, gaussian_together: bool = True) -> Rows:
    """Equal events counted together, and Gaussian ones as one (Dong, Roth and Su 2022, Corollary 3.3)."""
    counts: dict[str, tuple[Event, int]] = {}
    precision = 0.0
    for event, count in rows:
        if gaussian_together and event["type"] == "GaussianDpEvent":
            precision += count / event["noise_multiplier"] ** 2
            continue
        key = json.dumps(event, sort_keys=True)
        counts[key] = (event, counts.get(key, (event, 0))[1] + count)
    if len(counts) > MAX_KINDS:
        raise NoBoundError(f"more than {MAX_KINDS} kinds of events")
    return [
        *([(event_of("GaussianDpEvent", noise_multiplier=precision**-0.5), 1)] if precision else []),
        *counts.values(),
    ]


def event_of(kind: str, **fields: Any) -> Event:
    return {"type": kind, **fields}


def of_correlated(event: Event) -> tuple[Event, int]:
    """All steps of a run with noise C^-1 W are one Gaussian release of C G (arXiv:2202.08312, Theorem 2.1).

    In a fixed order a record moves it by the sum of C's columns at its steps, every parts-th one; with at most `parts`
    bands and a Poisson sample of each part these columns are samples by themselves (arXiv:2306.08153, Theorem 4).
    """
    steps, parts, coefficients = event["steps"], event["parts"], event["coefficients"]
    if event["rate"] < 1:
        if not 0 < len(coefficients) <= parts:
            raise NoBoundError("a sampled strategy of more bands than parts")
        norm = math.sqrt(math.fsum(c * c for c in coefficients[:steps]))
        inner = event_of("GaussianDpEvent", noise_multiplier=event["noise_multiplier"] / norm)
        sample = event_of("PoissonSampledDpEvent", sampling_probability=event["rate"], event=inner)
        return sample, math.ceil(steps / parts)
    totals = np.zeros(min(parts, steps))  # the squared change of C G, by the first step of the record
    if event[
        "leaves"
    ]:  # binary trees over so many steps each, of whose nodes only complete ones are released
        for first in range(0, steps, event["leaves"]):
            length, size = min(event["leaves"], steps - first), 1
            while size <= length:
                at = np.arange(length // size * size)
                pairs, times = np.unique(at // size * parts + (first + at) % parts, return_counts=True)
                totals += np.bincount(pairs % parts, np.square(times), len(totals))[: len(totals)]
                size *= 2
    else:
        column = np.zeros(steps)
        column[: len(coefficients)] = coefficients[:steps]
        if event["weights"]:
            column[0] = 1.0
        for weight, decay in zip(event["weights"], event["decays"], strict=True):
            column[1:] += weight * np.float64(decay) ** np.arange(steps - 1)
        # <column at step p - lag, column at step p> for p = lag, ..., steps - 1, until a column has ended
        for lag in range(0, int(np.flatnonzero(column)[-1]) + 1, parts):
            Work.spend((steps - lag) / 8)
            products = np.abs(np.cumsum(column[: steps - lag] * column[lag:]))[::-1] * (2.0 if lag else 1.0)
            totals += np.bincount(np.arange(lag, steps) % parts, products, len(totals))[: len(totals)]
    noise_multiplier = event["noise_multiplier"] / math.sqrt(totals.max())
    return event_of("GaussianDpEvent", noise_multiplier=noise_multiplier), 1


def under_replace_one(event: Event, adjacency: str) -> Event:
    """The event that stands for it where a record is replaced: it is removed, and another one is added."""
    kind, is_replaced = event["type"], adjacency == "REPLACE_ONE"
    if kind == "SampledWithoutReplacementDpEvent":
        if not is_replaced:
            raise NoBoundError("a sample of fixed size is proven under REPLACE_ONE alone")
        inner = under_replace_one(event["event"], adjacency)
        if inner["type"] == "GaussianDpEvent":
            return event | {"event": inner}
        epsilon = of_sample(event["sample_size"] / event["source_dataset_size"], pure_epsilon(inner))
        return event_of("PureDpEvent", epsilon=epsilon)
    if kind == "PoissonSampledDpEvent":
        if is_replaced and event["event"]["type"] != "GaussianDpEvent":
            raise NoBoundError("a Poisson sample of other than normal noise where a record is replaced")
        is_pure = event["event"]["type"] == "PureDpEvent"
        return event_of("PureDpEvent", epsilon=pure_epsilon(event)) if is_pure else event
    if kind == "DisjointPartsDpEvent" and is_replaced:
        raise NoBoundError("releases on disjoint people, between whom a record that is replaced can change")
    if "event" in event:
        return event | {"event": under_replace_one(event["event"], adjacency)}
    if "events" in event:
        return event | {"events": [under_replace_one(one, adjacency) for one in event["events"]]}
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
        inner = event_of("GaussianDpEvent", noise_multiplier=event["noise_multiplier"] / event["count"])
        return event_of("PoissonSampledDpEvent", sampling_probability=rate, event=inner)
    raise NoBoundError(f"a {kind} where a record is replaced")


# ---------------------------------------------------------------- 4. Price: formulas.

ORDERS = tuple(map(float, renyi.DEFAULT_RDP_ORDERS))


def total(event: Event, cost: Callable[[Event], Any]) -> Any:
    """What an event costs, if costs add up, and only the worst part of some events counts."""
    if event["type"] in ("SelfComposedDpEvent", "ComposedDpEvent"):
        return event.get("count", 1) * sum(count * total(inner, cost) for inner, count in parts_of(event))
    if event["type"] in WORST_PART:
        return reduce(np.maximum, [total(inner, cost) for inner in event["events"]])
    return 0.0 if event["type"] in ("NoOpDpEvent", *PASSES.values()) else cost(event)


def pure_epsilon(event: Event) -> float:
    """The epsilon at delta 0 of an event that `under_replace_one` returned."""

    def cost(event: Event) -> float:
        if event["type"] == "PoissonSampledDpEvent":
            return of_sample(event["sampling_probability"], pure_epsilon(event["event"]))
        if event["type"] not in ("PureDpEvent", "LaplaceDpEvent"):
            raise NoBoundError(f"a {event['type']} has no pure epsilon")
        return float(event["epsilon"] if event["type"] == "PureDpEvent" else 1 / event["noise_multiplier"])

    return float(total(event, cost))


def of_sample(rate: float, epsilon: float) -> float:
    """log(1 + rate (exp(epsilon) - 1)), of a sample of a pure mechanism (Balle, Barthe and Gaboardi 2018)."""
    if rate == 0 or epsilon == 0:
        return 0.0
    return epsilon + math.log(rate) + math.log1p((1 / rate - 1) * math.exp(-epsilon))


def rho(event: Event) -> float:
    """The rho of an event under zero-concentrated differential privacy (Bun and Steinke 2016)."""

    def cost(event: Event) -> float:
        kind = event["type"]
        if kind == "ZCDpEvent" and event["xi"] == 0:
            return float(event["rho"])
        if kind not in ("GaussianDpEvent", "LaplaceDpEvent", "PureDpEvent"):
            raise NoBoundError(f"a {kind} has no rho")
        return float(
            0.5 * (event["epsilon"] if kind == "PureDpEvent" else 1 / event["noise_multiplier"]) ** 2
        )

    return float(total(event, cost))


def rdp(event: Event, orders: tuple[float, ...], adjacency: str) -> Array:
    """Renyi bounds of an event that `under_replace_one` returned, at each order."""
    alpha = np.array(orders)

    def cost(event: Event) -> Array:
        kind = event["type"]
        if kind == "PureDpEvent" or (
            kind == "PoissonSampledDpEvent" and event["event"]["type"] == "LaplaceDpEvent"
        ):
            return rdp_of_pure(pure_epsilon(event), alpha)
        if kind == "ObjectivePerturbationDpEvent":  # Redberg, Koskela and Wang 2023
            s = 1 / event["noise_multiplier"]
            log_tail = np.array([math.log(math.erfc(-x / math.sqrt(2))) for x in (alpha - 1) * s])
            return np.asarray(
                math.log1p(event["curvature_ratio"]) + alpha * s * s / 2 + log_tail / (alpha - 1)
            )
        if kind == "RenyiDpEvent":
            return np.where(alpha <= event["order"], event["bound"], math.inf)
        if kind == "RepeatAndSelectDpEvent":  # Papernot and Steinke 2022, Theorems 2 and 6
            every, mean = tuple(sorted({*orders, *ORDERS})), event["mean"]
            once, shape = rdp(event["event"], every, adjacency), event["shape"]
            best = renyi._compute_rdp_repeat_and_select(
                every, once, mean, math.inf if shape is None else float(shape)
            )
            return np.array([best[every.index(order)] for order in orders])
        if kind == "CorrelatedDpEvent":
            inner, count = of_correlated(event)
            return np.asarray(count * rdp(inner, orders, adjacency))
        is_sampled = kind in ("PoissonSampledDpEvent", "SampledWithoutReplacementDpEvent")
        relation = dp.NeighboringRelation[adjacency if is_sampled else "ADD_OR_REMOVE_ONE"]
        accountant = renyi.RdpAccountant(orders, relation)
        if not accountant.supports(library_event(event)):
            raise NoBoundError(f"a {kind} has no Renyi bound in dp-accounting")
        Work.spend(2**18)
        accountant.compose(library_event(event))
        return np.maximum(np.asarray(accountant._rdp, dtype=np.float64), 0.0)

    return np.asarray(total(event, cost) + np.zeros(len(alpha)))


def library_event(event: Event) -> Any:
    """The event of dp-accounting, whose fields have the same names."""
    if not hasattr(dp.dp_event, event["type"]):
        raise NoBoundError(f"a {event['type']} has no Renyi bound here")
    fields = {name: library_event(value) if name == "event" else value for name, value in event.items()}
    return getattr(dp.dp_event, fields.pop("type"))(**fields)


def rdp_of_pure(epsilon: float, alpha: Array) -> Array:
    """Of randomised response (Mironov 2017, Proposition 5), and of zCDP where the former is lost to rounding."""
    truth = -np.logaddexp(0.0, -epsilon)
    lie = truth - epsilon
    moments = np.logaddexp(alpha * truth + (1 - alpha) * lie, alpha * lie + (1 - alpha) * truth)
    bounds = np.where(moments < 1e-9, alpha * epsilon**2 / 2, moments / (alpha - 1))
    return np.asarray(np.clip(bounds, 0.0, epsilon))


# ---------------------------------------------------------------- 4. Price: privacy profiles.


def pld_bound(rows: Rows, delta: float, adjacency: str, stated: float | None) -> float:
    """A lower bound on epsilon by privacy profiles, as near as what is stated needs."""
    rows = translate(rows, adjacency)
    for slack in SLACKS:
        eta = slack * min(max(1.0 if stated is None else stated, 1e-3), 10.0)
        try:
            losses = compose(rows, adjacency, delta, eta)
            return max(0.0, *(float(loss.get_epsilon_for_delta(delta * 1.001)) - eta for loss in losses))
        except FinerGridError:
            continue
    raise NoBoundError("the claim needs a finer grid than this program computes")


def compose(rows: Rows, adjacency: str, delta: float, eta: float) -> list[DensePLDPmf]:
    """The losses of all releases together, removing and adding a record, on a grid that adds at most eta to epsilon."""
    single = merge(releases(rows))
    number = sum(count for _, count in single) or 1
    walk = math.sqrt(number * (math.log(2000) - math.log(delta)) / 2)
    grid = 0.999 * eta / walk
    totals = [DensePLDPmf(grid, 0, np.ones(1), 0.0, pessimistic_estimate=True)] * 2
    for event, count in single:
        profiles = mechanism(event, adjacency, delta, eta / count)
        for side, loss in enumerate(on_grid(profiles, grid, 1e-7 * delta / number)):
            if count > 1:
                Work.spend(6 * loss.size)
                first, last = compute_self_convolve_bounds(loss._probs, count, 1e-15)
                if last - first > 4 * MAX_POINTS:
                    raise FinerGridError
                Work.spend(4 * (last - first))
                loss = loss.self_compose(count)
            Work.spend(4 * (loss.size + totals[side].size))
            totals[side] = totals[side].compose(loss, 1e-15)
    return totals


def on_grid(profiles: Sequence[Profile], grid: float, tail: float) -> Iterator[DensePLDPmf]:
    """Connect the dots: the masses of each loss of a pair at -k grid, ..., k grid, but for a tail.

    Above 0 from its own profile. Below 0 there are exp(-loss) times as many as of the reversed pair at the opposite
    loss; they come from the other profile, since differences of numbers near 1 would be lost to rounding.
    """
    top = 2 * grid
    while max(float(profile(np.array([top]))[0]) for profile in profiles) > tail:
        top *= 1.2
        if top > grid * MAX_POINTS:
            raise FinerGridError
    e = grid * np.arange(math.ceil(top / grid) + 1, dtype=np.float64)
    Work.spend(2**14 + 4 * len(e))
    masses = []
    for profile in profiles:
        steps = np.append(np.diff(np.minimum.accumulate(np.clip(profile(e), 0.0, 1.0))), 0.0)
        masses.append(np.maximum(steps[1:] - math.exp(grid) * steps[:-1], 0.0) / math.expm1(grid))
    for up, reversed_up in (masses, masses[::-1]):
        down = reversed_up * np.exp(-e[1:])
        down *= min(1.0, (left := max(0.0, 1.0 - float(up.sum()))) / max(float(down.sum()), 1e-300))
        probabilities = np.concatenate([down[::-1], [max(0.0, left - float(down.sum()))], up])
        yield DensePLDPmf(grid, -len(up), probabilities, 0.0, pessimistic_estimate=True)


def mechanism(event: Event, adjacency: str, delta: float, eta: float) -> tuple[Profile, Profile]:
    """The profiles of removing and of adding a record to an event of `under_replace_one`; eta: of what lies inside."""
    kind, z, rate = event["type"], event.get("noise_multiplier", 1.0), event.get("sampling_probability", 1.0)
    if kind == "PoissonSampledDpEvent":
        kind, z = f"sampled {event['event']['type']}", event["event"].get("noise_multiplier", 1.0)
    if kind in ("LaplaceDpEvent", "sampled LaplaceDpEvent"):
        ways = (AdjacencyType.REMOVE, AdjacencyType.ADD)
        remove, add = (LaplacePrivacyLoss(z, 1, rate, way).get_delta_for_epsilon for way in ways)
        return remove, add
    if kind == "sampled GaussianDpEvent" and adjacency == "REPLACE_ONE":
        return (mixture(z, {0: 1 - rate, 1: rate}, {0: 1 - rate, -1: rate}),) * 2
    if kind in ("GaussianDpEvent", "sampled GaussianDpEvent"):
        return mixture(z, {0: 1 - rate, 1: rate}, {0: 1.0}), mixture(z, {0: 1.0}, {0: 1 - rate, -1: rate})
    if kind == "SampledWithoutReplacementDpEvent":
        # Both ways delta is at most that of a sample (Balle, Barthe and Gaboardi 2018, Theorems 2 and 11).
        share = event["sample_size"] / event["source_dataset_size"]
        return (mixture(event["event"]["noise_multiplier"], {0: 1 - share, 1: share}, {0: 1.0}),) * 2
    if kind == "SampledGroupDpEvent":  # of whom a binomial number is in the sample (arXiv:2401.10294)
        n = event["count"]
        chances = {j: math.comb(n, j) * rate**j * (1 - rate) ** (n - j) for j in range(n + 1)}
        return mixture(z, chances, {0: 1.0}), mixture(
            z, {0: 1.0}, {-j: chance for j, chance in chances.items()}
        )
    if kind == "RandomAllocationDpEvent":
        is_whole = z < 0.5 or event["parts"] == 1
        return (
            mechanism(event_of("GaussianDpEvent", noise_multiplier=z), adjacency, delta, eta)
            if is_whole
            else random_allocation(**event)
        )
    if (
        kind == "PureDpEvent"
    ):  # randomised response, which dominates every mechanism with this epsilon (Kairouz et al. 2015)
        truth = 1 / (1 + math.exp(-event["epsilon"]))
        return (lambda e: truth * np.maximum(-np.expm1(np.minimum(e - event["epsilon"], 0.0)), 0.0),) * 2
    if kind == "ObjectivePerturbationDpEvent":
        return (partial(objective_perturbation, 1 / z, math.log1p(event["curvature_ratio"])),) * 2
    if kind in WORST_PART:
        different = {json.dumps(inner, sort_keys=True): inner for inner in event["events"]}.values()
        each = [lower_profiles(inner, adjacency, delta, eta / 2) for inner in different]
        remove, add = (partial(largest, side) for side in zip(*each, strict=True))
        return remove, add
    if kind == "RepeatAndSelectDpEvent":
        return best_of_trials(
            event, lower_profiles(event["event"], adjacency, delta / event["mean"], eta / 8)
        )
    raise NoBoundError(f"a {kind} has no privacy profile")


def mixture(z: float, p: dict[int, float], q: dict[int, float]) -> Profile:
    """N(j, z^2) with chance p[j] against the same with chance q[j], where the loss rises with the output.

    delta is P - exp(e) Q of all outputs above the one whose loss is e; any other cut gives less.
    """
    p, q = ({j: chance for j, chance in chances.items() if chance > 1e-30} for chances in (p, q))
    far = max(map(abs, (*p, *q))) + 40.0 * z + 800.0 * z**2
    outputs = np.unique(np.concatenate([np.linspace(-50.0 * z, 50.0 * z + max(p), 2**15), [-far, far]]))
    losses = log_density(outputs, z, p) - log_density(outputs, z, q)

    def profile(e: Array) -> Array:
        cut = np.interp(e, losses, outputs)
        above_p, above_q = (
            sum(c * tail_of_normal((cut - j) / z) for j, c in chances.items()) for chances in (p, q)
        )
        return np.maximum(above_p - np.exp(np.minimum(e, 700.0)) * above_q, 0.0)

    return profile


def log_density(x: Array, z: float, chances: dict[int, float]) -> Array:
    """Of a mixture of N(j, z^2), relative to N(0, z^2)."""
    Work.spend(len(x) / 8 * len(chances))
    logs = (math.log(chance) + j * (x - j / 2) / z**2 for j, chance in chances.items())
    return reduce(np.logaddexp, logs) + np.zeros(len(x))


def tail_of_normal(x: Array) -> Array:
    """1 - Phi(x)."""
    Work.spend(100 + len(x))
    return np.asarray(_ERFC(x / math.sqrt(2)), dtype=np.float64) / 2


_ERFC = np.frompyfunc(math.erfc, 1, 1)


def objective_perturbation(s: float, log_ratio: float, e: Array) -> Array:
    """The loss log(1 + ratio) + s^2 / 2 + |X|, X ~ N(0, s^2), of an exact private minimum."""
    above = e - log_ratio - s * s / 2
    t = np.maximum(above, 0.0) / s
    return np.maximum(
        2 * (tail_of_normal(t) - np.exp(np.minimum(above + s * s / 2, 700.0)) * tail_of_normal(t + s)), 0.0
    )


def random_allocation(
    *, noise_multiplier: float, parts: int, steps: int, **_: Any
) -> tuple[Profile, Profile]:
    """A pass in which a record takes part in one of `parts` steps, of which `steps` took place (arXiv:2412.16802).

    P / Q = S = (Y_1 + ... + Y_steps + parts - steps) / parts for log-normal Y of mean 1 under Q; delta is
    E max(0, S - exp(e)), removing, and E max(0, 1 - exp(e) S), adding. Y is put on a grid with its mean, cut off where
    it is rarer than 1e-14, and S is the sum of independent Y. A cut only lowers delta; the grid adds about 1e-4 of it.
    """
    z, sd = noise_multiplier, math.sqrt(math.expm1(noise_multiplier**-2))
    reach = math.sqrt(2 * math.log(parts / 1e-14))
    start, end = math.exp(-9 / z - 0.5 / z**2), math.exp(reach / z - 0.5 / z**2)
    cell = max(sd / 60, (end - start) / 2**20, steps / 2**21)
    points = start + cell * np.arange(math.ceil((end - start) / cell) + 1)
    under_q = z * np.log(points) + 0.5 / z
    q, mean = -np.diff(tail_of_normal(under_q)), -np.diff(tail_of_normal(under_q - 1 / z))
    up = np.clip((mean - points[:-1] * q) / cell, 0.0, q)
    Work.spend(2**22)
    first, sums = self_convolve(np.append(q - up, 0.0) + np.append(0.0, up), steps, 1e-15)
    sums = np.where(np.asarray(sums) < 1e-17, 0.0, sums)
    s = (steps * start + cell * (first + np.arange(len(sums))) + parts - steps) / parts
    above, weighted = (np.append(np.cumsum(x[::-1])[::-1], 0.0) for x in (sums, sums * s))

    def remove(e: Array) -> Array:
        at = np.searchsorted(s, np.exp(e))
        return np.asarray(np.maximum(weighted[at] - np.exp(e) * above[at], 0.0))

    def add(e: Array) -> Array:
        at = np.searchsorted(s, np.exp(-e))
        return np.asarray(np.maximum(above[0] - above[at] - np.exp(e) * (weighted[0] - weighted[at]), 0.0))

    return remove, add


def lower_profiles(event: Event, adjacency: str, delta: float, eta: float) -> list[Profile]:
    """Lower bounds of the profiles of what is composed, which are convex in exp(e)."""

    def profile_of(loss: DensePLDPmf) -> Profile:
        losses = loss._discretization * (loss._lower_loss + np.arange(loss.size))
        under_q = loss._probs * np.exp(-np.maximum(losses, -30.0))
        p, q = (np.append(np.cumsum(masses[::-1])[::-1], 0.0) for masses in (loss._probs, under_q))

        def profile(e: Array) -> Array:
            at = np.searchsorted(losses, e + eta, side="right")
            return np.asarray(np.maximum(p[at] - np.exp(e + eta) * q[at] - delta / 1000, 0.0))

        return profile

    return [profile_of(loss) for loss in compose([(event, 1)], adjacency, delta, eta)]


def largest(profiles: Sequence[Profile], e: Array) -> Array:
    return np.asarray(np.max([profile(e) for profile in profiles], axis=0))


def best_of_trials(event: Event, once: Sequence[Profile]) -> tuple[Profile, Profile]:
    """The best of a random number of trials: delta(e + shift) is at most the mean number times one trial's delta(e).

    The shift bounds the change of the logarithm of f', for the number's generating function f, between neighbours
    (Koskela, Redberg and Wang 2024, arXiv:2402.06701).
    """
    mean, tried, shift = event["mean"], np.append(0.0, np.geomspace(1e-6, 10.0, 20_000)), 0.0
    deltas = np.maximum(once[0](tried), once[1](tried))
    if event["shape"] is None:
        shift = mean * float(np.min(np.expm1(tried) + deltas))
    elif mean > 1:
        gamma = float(renyi._gamma_truncated_negative_binomial(float(event["shape"]), mean))
        enough = np.flatnonzero((1 - gamma) * deltas <= gamma * np.expm1(tried))
        if not len(enough):
            raise NoBoundError("a trial tells too much for a profile of the best")
        shift = (event["shape"] + 1) * float(tried[max(enough[0] - 1, 0)])

    def best(
        once: Profile,
    ) -> Profile:  # cut off by a chord from 1 at 0, since the true profile is convex in exp(e)
        e = np.linspace(1e-6, 30.0, 20_000)
        slopes = (mean * once(e - shift) - 1) / np.expm1(e)
        at, slope = e[np.argmin(slopes)], np.min(slopes)
        return lambda e: np.where(e < at, 1 + slope * np.expm1(np.minimum(e, at)), mean * once(e - shift))

    return best(once[0]), best(once[1])


# ---------------------------------------------------------------- The command.


def verify(
    path: Path, *, key: str | None = None, unsigned: bool = False, with_files: bool = True
) -> list[Check]:
    """All checks of the card in a file, or of the privacy_card.json in a folder; raises BadCardError without one."""
    path = path / "privacy_card.json" if path.is_dir() else path
    card = load(path)
    checks = [*check_signature(card, key, unsigned=unsigned)]
    checks += [*check_files(card, path.parent)] if with_files else []
    return [*checks, *check_promise(card)]


def in_digits(number: float | None) -> str:
    return "none" if number is None else f"{number:.6g}"


def key_in(given: str | None) -> str | None:
    """A public key as 64 hexadecimal digits, or a file that holds it."""
    if given is None or re.fullmatch(r"[0-9a-f]{64}", given):
        return given
    text = read_bytes(Path(given)).decode(errors="replace").strip()
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
        return report(given.folder, given.key, unsigned=given.unsigned)
    finally:
        logging.disable(before)


def report(folder: Path, key: str | None, *, unsigned: bool) -> int:
    """Print what holds; returns the exit status."""

    def out(line: str) -> None:
        sys.stdout.write(line.encode("ascii", "replace").decode() + "\n")

    try:
        checks = verify(folder, key=key_in(key), unsigned=unsigned)
        setting = load(folder / "privacy_card.json" if folder.is_dir() else folder)["setting"]
    except BadCardError as error:
        out(f"No card was checked: {error}")
        return 2
    for name, passed, detail in checks:
        out(f"{ {True: 'ok', False: 'FAILED', None: 'not checked'}[passed]:12} {name}: {detail}")
    if any(passed is False for _, passed, _ in checks):
        out("The card does not hold.")
        return 1
    promise = f"epsilon {in_digits(setting['epsilon'])}, delta {setting['delta']:g}, {setting['adjacency']}"
    reasons = {
        "seeded": "no privacy: anyone can compute its noise again",
        "diagnosed": "no privacy: numbers without noise were kept",
        "none": "no privacy: there is no noise that bounds it",
    }
    out(f"The card holds. It promises {reasons.get(setting['guarantee'], promise)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

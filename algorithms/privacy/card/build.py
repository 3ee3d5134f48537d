"""The privacy card: what the guarantee of a run is, how it came about, and how to recompute it.

A card promises no more than its events: `verify` computes epsilon from them alone. Its checksums tie it to the files
of the run; its ledger_head ties it to the population's ledger. It holds no checksum of private records, since such a
number would let anyone test a guess of them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import epsilon
from algorithms.privacy.accounting.adjacency import named
from algorithms.privacy.accounting.events import schedule_from_json
from algorithms.privacy.accounting.rdp import ORDERS
from algorithms.privacy.card import words
from algorithms.privacy.card.check import check_all, digest, recompute
from algorithms.privacy.card.model import GENERATORS, PrivacyCard
from algorithms.privacy.card.plan import mechanism_of
from algorithms.privacy.card.start import is_started
from algorithms.privacy.card.trace import queries
from algorithms.privacy.card.verdict import Check, Verification
from algorithms.privacy.ledger.composition import Composition

__all__ = [
    "Check",
    "PrivacyCard",
    "RunRecord",
    "Verification",
    "build",
    "load",
    "read",
    "recompute",
    "verify",
]

_LIBRARY = "dp-accounting"


@dataclass(frozen=True)
class RunRecord:
    """What a finished run left.

    plan, receipt: the documents of these names. public: the description of the data set. trace: the noise trace.
    software: "recorded" ("training" or "report"), "python", "packages" and "git" (or None).
    """

    plan: Mapping[str, Any]
    receipt: Mapping[str, Any]
    public: Mapping[str, Any]
    trace: pd.DataFrame
    software: Mapping[str, Any]


def build(run: RunRecord) -> PrivacyCard:
    """The card of a run; raises RefusedError where something that the card must state is missing or empty."""
    try:
        document = _document(run)
    except KeyError as error:
        raise RefusedError(
            f"the privacy card needs {error.args[0]!r}, which the run did not record; use one version for all stages."
        ) from None
    document["evidence"]["card_sha256"] = "0" * 64
    document = _validated(document).to_json()
    document["evidence"]["card_sha256"] = digest(document)
    return _validated(document)


def read(path: Path) -> dict[str, Any]:
    """The card in a file as JSON values; raises RefusedError when it is no JSON object or names a key twice."""
    try:
        document = json.loads(path.read_bytes(), object_pairs_hook=_without_repetition)
    except OSError:
        raise RefusedError(f"there is no file {path}; give the path of a privacy_card.json.") from None
    except ValueError:
        raise RefusedError(
            f"{path} is no JSON object with each key once; give the path of a privacy_card.json."
        ) from None
    if not isinstance(document, dict):
        raise RefusedError(f"{path} is no JSON object; give the path of a privacy_card.json.")
    return document


def load(path: Path) -> PrivacyCard:
    """The card in a file, which says nothing of whether it holds; raises RefusedError where it is not complete."""
    return _validated(read(path))


def verify(card: PrivacyCard | Mapping[str, Any], folder: Path | None = None) -> Verification:
    """Recomputes a card's epsilon from its events alone, and checks its checksum and the files beside it.

    card: as `build` made it, or as `read` read it. folder: where the run's files lie; what is not there is not
    checked, and the verification says so. Raises RefusedError where the card is incomplete or its events are unknown.
    """
    document = card.to_json() if isinstance(card, PrivacyCard) else card
    return check_all(document, _validated(document), folder)


def _validated(document: Mapping[str, Any]) -> PrivacyCard:
    try:
        return PrivacyCard.model_validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "a field"
        problem = "is missing" if first["type"] == "missing" else f"does not hold: {first['msg']}"
        raise RefusedError(
            f"the privacy card is not complete and correct: {field} {problem}; run the stages again."
        ) from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a key occurs twice")
    return document


def _document(run: RunRecord) -> dict[str, Any]:
    receipt, public, guarantee = run.receipt, run.public, _guarantee(run.receipt)
    circumstances = _circumstances(run)
    duties = words.responsibility(guarantee, public, started=circumstances["started"])
    return {
        "setting": _setting(run, guarantee),
        "scope": words.scope(guarantee, public, **circumstances).model_dump(),
        "mechanism": _mechanism(run),
        "accounting": _accounting(run),
        "events": receipt["events"],
        "implementation": _implementation(run, guarantee),
        "evidence": {
            "run_id": receipt["run_id"],
            "ledger_head": receipt["ledger"]["head"],
            "files": receipt["sha256"],
        },
        "responsibility": duties.model_dump(),
    }


def _guarantee(receipt: Mapping[str, Any]) -> words.Guarantee:
    if receipt["epsilon"][receipt["accountant"]] is None:
        return "none"
    if receipt["private_noise"] is not True:
        return "seeded"
    return "private" if receipt["diagnostics"] is False else "diagnosed"


def _circumstances(run: RunRecord) -> dict[str, Any]:
    """What the words about a run depend on, beside what it promises."""
    started = is_started(words.notes(run.plan["model"]["notes"]))
    adjacency, diagnosed = run.plan["adjacency"], run.receipt["diagnostics"]
    return {"adjacency": adjacency, "diagnosed": diagnosed, "started": started}


def _setting(run: RunRecord, guarantee: words.Guarantee) -> dict[str, Any]:
    receipt, public = run.receipt, run.public
    cost, delta = receipt["epsilon"][receipt["accountant"]], receipt["delta"]
    copied = ("unit", "dataset", "title", "source", "licence")
    return {
        "statement": words.statement(
            guarantee,
            epsilon=cost,
            delta=delta,
            unit=public["unit"],
            caveat=run.plan["own"].get("not_private"),
            **_circumstances(run),
        ),
        "private": guarantee == "private",
        "epsilon": cost if guarantee == "private" else None,
        "delta": delta,
        "adjacency": run.plan["adjacency"],
        **{name: public[name] for name in copied},
        "population": receipt["population"],
        "public_records": public["public"],
    }


def _mechanism(run: RunRecord) -> dict[str, Any]:
    return {
        **mechanism_of(run.plan),
        "transform": words.TRANSFORMS[run.public["transform"]],
        "diagnostics": run.receipt["diagnostics"],
        "releases": run.receipt["releases"],
        "queries": list(queries(run.trace)),
    }


def _accounting(run: RunRecord) -> dict[str, Any]:
    receipt, composition = run.receipt, _composition(run.plan)
    schedule, delta = schedule_from_json(receipt["events"]), receipt["delta"]
    grid = epsilon.discretisation_of(schedule, delta, named(run.plan["adjacency"])) if delta > 0 else None
    ledger = {name: receipt["ledger"][name] for name in ("cap", "spent", "remaining")}
    return {
        "accountant": receipt["accountant"],
        "epsilon": {name: receipt["epsilon"].get(name) for name in epsilon.ACCOUNTANTS},
        "delta": delta,
        "target": run.plan["target"],
        "library": _LIBRARY,
        "library_version": version(_LIBRARY),
        "discretisation": {
            "pld_interval": grid,
            "rdp_lowest_order": min(ORDERS),
            "rdp_highest_order": max(ORDERS),
            "rdp_orders": len(ORDERS),
        },
        "composition": composition,
        "population": ledger | {"statement": words.across_runs(receipt["ledger"])},
        **_blocks(receipt["ledger"], run.public["unit"]),
    }


def _composition(plan: Mapping[str, Any]) -> dict[str, Any]:
    chosen = plan.get("filter", {"kind": "schedule"})
    statement = words.COMPOSITION.get(chosen["kind"], "")
    return {"rho": None, "order": None, "limit": None, **chosen, "statement": statement}


def _blocks(ledger: Mapping[str, Any], unit: str) -> dict[str, Any]:
    """The blocks of a run, empty where it is on a whole population; ledger: the receipt's part about it."""
    if not ledger.get("blocks"):
        return {}
    composition, count = Composition.from_json(ledger["composition"]), ledger["blocks_per_person"]
    rule = {"kind": composition.kind, "order": composition.order}
    return {
        "blocks": {
            "charged": ledger["blocks"],
            "blocks_per_person": count,
            "unit": words.block_unit(unit, count),
            "composition": rule | {"statement": words.across_runs_of(composition)},
        }
    }


def _implementation(run: RunRecord, guarantee: words.Guarantee) -> dict[str, Any]:
    rounding = words.NO_FLOATING_POINT if guarantee == "none" else words.FLOATING_POINT
    receipt, private = run.receipt, run.receipt["private_noise"] is True
    return {
        **{name: run.software[name] for name in ("recorded", "python", "packages", "git")},
        "device": receipt["device"],
        "noise": {"generator": GENERATORS[private], "private": private},
        "floating_point": rounding,
    }

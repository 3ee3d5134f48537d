"""From what a run left to its card."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import epsilon
from algorithms.privacy.accounting.epsilon import ORDERS, adjacency_named
from algorithms.privacy.accounting.events import schedule_from_json
from algorithms.privacy.card.schema import ROUNDING, SCHEMA_VERSION, Guarantee, PrivacyCard
from algorithms.privacy.card.trace import Columns, queries
from algorithms.privacy.ledger.composition import Composition

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
    trace: Columns
    software: Mapping[str, Any]


def build(run: RunRecord, key: Ed25519PrivateKey | None = None) -> PrivacyCard:
    """The card of a run, signed with the owner's key where there is one.

    Raises RefusedError where something that the card must state is missing or empty.
    """
    try:
        document = _document(run)
    except KeyError as error:
        raise RefusedError(
            f"the privacy card needs {error.args[0]!r}, which the run did not record; use one version for all stages."
        ) from None
    return _validated(json.dumps(document)).signed(key)


def load(path: Path) -> PrivacyCard:
    """The card in a file; whether it holds, `verify` says.

    Raises RefusedError where the file is not there, is no complete card, or is not written as cards are, to the byte.
    """
    try:
        content = path.read_bytes()
    except OSError:
        raise RefusedError(f"there is no file {path}; give the path of a privacy_card.json.") from None
    card = _validated(content, where=f" {path}")
    try:
        is_as_written = card.to_bytes() == content
    except ValueError:  # a number like 1e999 among the settings or events
        is_as_written = False
    if not is_as_written:
        raise RefusedError(
            f"the privacy card {path} was edited: its bytes are not those that its facts are written as; ask for"
            " the file that the run wrote."
        )
    return card


def guarantee(*, cost: float | None, private_noise: bool, is_covered: bool) -> Guarantee:
    """What a run can promise. cost: its epsilon, or None without a bound. is_covered: all that was shown is noisy."""
    if cost is None:
        return "none"
    if not private_noise:
        return "seeded"
    return "private" if is_covered else "diagnosed"


def mechanism_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a card says of the mechanism that a plan has decided."""
    copied = ("algorithm", "settings", "steps", "noise_multiplier", "sampling_rate", "divisor")
    return {
        **{name: plan[name] for name in copied},
        "features": features_of(plan["features"]),
        "model": model_of(plan["model"]),
        "settings_from_records": plan["not_private"] is not None,
    }


def features_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The features on a card, from that group of params.yaml."""
    return {"name": group["name"], "settings": {name: group[name] for name in group if name != "name"}}


def model_of(described: Mapping[str, Any]) -> dict[str, Any]:
    """The model on a card, from that part of a plan; what is not named there is as usual."""
    files = dict(described.get("files", {}))
    return {
        **{name: described[name] for name in ("name", "seed", "parameters")},
        "precision": described.get("precision", "float32"),
        "settings": described.get("settings", {}),
        "start": files.pop("start", None),
        "files": files,
        "reinitialize": described.get("reinitialize", []),
        "frozen": described.get("freeze", []),
        "augmentations": described.get("augmentations", 1),
    }


def composition_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """How a plan's releases add up."""
    return {"rho": None, "order": None, "limit": None, **plan["filter"]}


def _validated(content: str | bytes, where: str = "") -> PrivacyCard:
    try:
        return PrivacyCard.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            raise RefusedError(
                f"{where.strip()} is no privacy card; give the path of a privacy_card.json."
            ) from None
        field = ".".join(map(str, first["loc"])) or "the whole"
        problem = "is missing" if first["type"] == "missing" else f"does not hold: {first['msg']}"
        raise RefusedError(
            f"the privacy card{where} is not complete and correct: {field} {problem}; run the stages again."
        ) from None


def _document(run: RunRecord) -> dict[str, Any]:
    plan, receipt, public, software = run.plan, run.receipt, run.public, run.software
    cost, delta = receipt["epsilon"][receipt["accountant"]], receipt["delta"]
    mechanism = mechanism_of(plan) | {
        "transform": public["transform"],
        "encoder": public.get("encoder"),
        "diagnostics": receipt["diagnostics"],
        "releases": receipt["releases"],
        "queries": list(queries(run.trace)),
    }
    private_noise = receipt["private_noise"] is True
    is_covered = receipt["diagnostics"] is False and not mechanism["settings_from_records"]
    promised = guarantee(cost=cost, private_noise=private_noise, is_covered=is_covered)
    copied = ("unit", "dataset", "title", "source", "licence", "records", "holdout")
    return {
        "schema_version": SCHEMA_VERSION,
        "signature": None,
        "setting": {
            "guarantee": promised,
            "epsilon": cost if promised == "private" else None,
            "delta": delta,
            "adjacency": plan["adjacency"],
            **{name: public[name] for name in copied},
            "per_person": public.get("per_person"),
            "pooled": public.get("pooled"),
            "population": receipt["population"],
            "public_records": public["public"],
        },
        "mechanism": mechanism,
        "accounting": _accounting(run),
        "events": receipt["events"],
        "implementation": {
            **{name: software[name] for name in ("recorded", "python", "packages", "git")},
            "device": receipt["device"],
            "noise": "secure" if private_noise else "seeded",
            "cipher": "AES-256-CTR",
            "rounding": None if promised == "none" else ROUNDING.model_dump(),
        },
        "evidence": {
            "run_id": receipt["run_id"],
            "ledger_head": receipt["ledger"]["head"],
            "files": receipt["sha256"],
        },
    }


def _accounting(run: RunRecord) -> dict[str, Any]:
    receipt, ledger, delta = run.receipt, run.receipt["ledger"], run.receipt["delta"]
    schedule = schedule_from_json(receipt["events"])
    rule = Composition.from_json(ledger.get("composition"))
    blocks = None
    if ledger.get("blocks"):
        blocks = {"charged": ledger["blocks"], "blocks_per_person": ledger["blocks_per_person"]}
    return {
        "accountant": receipt["accountant"],
        "epsilon": {name: receipt["epsilon"].get(name) for name in epsilon.ACCOUNTANTS},
        "delta": delta,
        "target": run.plan["target"],
        "library": _LIBRARY,
        "library_version": version(_LIBRARY),
        "discretisation": {
            "pld_interval": epsilon.discretisation_of(schedule, delta, adjacency_named(run.plan["adjacency"]))
            if delta > 0
            else None,
            "rdp_lowest_order": min(ORDERS),
            "rdp_highest_order": max(ORDERS),
            "rdp_orders": len(ORDERS),
        },
        "composition": composition_of(run.plan),
        "across_runs": {"kind": rule.kind, "order": rule.order},
        "population": {name: ledger[name] for name in ("cap", "spent", "remaining")},
        "blocks": blocks,
    }

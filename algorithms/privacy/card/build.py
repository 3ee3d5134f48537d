"""From what a run left to its card; and what the noise trace beside a card says.

Events are what a cost is computed from; a trace that tells of less noise, or of another sample, tells of another
release. An event has no clip norm of its own: noise is compared as a multiple of it.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import dp_accounting as dp
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from pydantic import ValidationError

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import epsilon
from algorithms.privacy.accounting.epsilon import ORDERS, adjacency_named
from algorithms.privacy.accounting.event_rules import rule_of
from algorithms.privacy.accounting.events import (
    Schedule,
    event_from_json,
    event_to_json,
    merge_neighbours,
    schedule_from_json,
    schedule_to_json,
)
from algorithms.privacy.card.schema import ROUNDING, SCHEMA_VERSION, Guarantee, PrivacyCard
from algorithms.privacy.ledger import Composition

_LIBRARY = "dp-accounting"
_METHOD_FACTS = ("paper_protocol", "selection_law")
"""What a method may have planned that a card states."""
_KINDS = ["kind", "sampling", "clipping", "noise"]
_SPANS = ["sampling_rate", "clip_norm", "noise_multiplier", "noise_std", "divisor"]
_CHECKED = ["event", *_KINDS, "sampling_rate", "noise_multiplier"]
_CLOSE = 1e-3
"""How closely the cost that a run kept count of ends at that of its schedule, which is accounted as a whole."""
_ROUNDING = 1e-9


class Columns(Protocol):
    """A table by its columns: a mapping of arrays, or a DataFrame, which `card verify` does without for its time."""

    def __getitem__(self, name: str, /) -> Any:
        """The values of a column, in order."""


@dataclass(frozen=True)
class RunRecord:
    """What a finished run left.

    plan, receipt: the documents of these names. public: the description of the data set. trace: the noise trace.
    software: "recorded" ("training" or "report"), "python", "packages" and "git" (or None); since 0.2 also "version"
    and "code".
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
            f"the privacy card needs {error.args[0]!r}, which the run did not record; use one version for the whole"
            " run."
        ) from None
    return _validate(json.dumps(document)).sign(key)


def load(path: Path) -> PrivacyCard:
    """The card in a file; whether it holds, `verify` says.

    Raises RefusedError where the file is not there, is no complete card, or is not written as cards are, to the byte.
    """
    try:
        content = path.read_bytes()
    except OSError:
        raise RefusedError(f"there is no file {path}; give the path of a privacy_card.json.") from None
    card = _validate(content, where=f" {path}")
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
    features = dict(plan["features"])
    return {
        **{name: plan[name] for name in copied},
        "features": {"name": features.pop("name"), "settings": features},
        "model": model_of(plan["model"]),
        "settings_from_records": plan["not_private"] is not None,
        **{name: plan.get("method_params", {}).get(name) for name in _METHOD_FACTS},
    }


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


def _validate(content: str | bytes, where: str = "") -> PrivacyCard:
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
            "the privacy card{where} is not complete and correct: {field} {problem}; {run.remedy}.",
            code="card_incomplete",
            where=where,
            field=field,
            problem=problem,
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
            "unit_is_stated": public.get("unit_is_stated", False),
            "each_record_alone": public.get("each_record_alone"),
            "holdout_why": public.get("holdout_why"),
            "evaluation_epsilon": receipt.get("evaluation_epsilon"),
            "population": receipt["population"],
            "public_records": public["public"],
        },
        "mechanism": mechanism,
        "accounting": _accounting(run),
        "events": receipt["events"],
        "implementation": {
            **{name: software[name] for name in ("recorded", "python", "packages", "git")},
            **{name: software.get(name) for name in ("version", "code")},
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


def row_fits(row: Mapping[str, Any], event: dp.DpEvent) -> bool:
    """Whether a row of the trace has the sampling and the noise multiplier of its event.

    Without noise any sample does. Of pure noise in an objective the event has a bound alone, since the curvature is in
    it, too.
    """
    terms, noise = rule_of(event).trace_fields(event), row["noise"]
    if noise not in terms.multipliers or row["sampling"] not in terms.sampling:
        return False
    known, multiplier = terms.multipliers[noise], row["noise_multiplier"]
    same = multiplier >= known if noise == "pureobjectivenoise" else False
    same = same or math.isclose(multiplier, known, rel_tol=_ROUNDING)
    return same and (noise == "nonoise" or math.isclose(row["sampling_rate"], terms.rate, rel_tol=_ROUNDING))


def queries(trace: Columns) -> Iterator[dict[str, Any]]:
    """The releases of a trace by kind, with the least and the most that each of their numbers was."""
    groups: dict[tuple[Any, ...], int] = {}
    group_of_row = np.array([groups.setdefault(names, len(groups)) for names in _rows(trace, _KINDS)])
    for names, number in groups.items():
        rows = {name: np.asarray(trace[name], float)[group_of_row == number] for name in _SPANS}
        spans = {name: _span(np.fmin.reduce(some), np.fmax.reduce(some)) for name, some in rows.items()}
        count = int((group_of_row == number).sum())
        yield {**dict(zip(_KINDS, names, strict=True)), "count": count, **spans}


def trace_schedule(trace: Columns) -> list[tuple[dp.DpEvent, int]]:
    """The events of a noise trace in their order, equal neighbours counted together."""
    return merge_neighbours([(_event(str(text)), len([*run])) for text, run in groupby(trace["event"])])


def _rows(trace: Columns, names: list[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(np.asarray(trace[name]).tolist() for name in names), strict=True)


def made_up_trace(schedule: Schedule) -> dict[str, list[Any]]:
    """A trace that the releases of a schedule could have left, with bounds of 1 and no other facts than their events.

    Raises RefusedError where an event is of no release that a trace can name.
    """
    rows = []
    for event, count in schedule:
        terms = rule_of(event).trace_fields(event)
        if not terms.multipliers:
            raise RefusedError(
                f"{event} is the event of no release that a card can state; use another method."
            )
        noise, multiplier = next(iter(terms.multipliers.items()))
        own = {"noise": noise, "noise_multiplier": multiplier, "noise_std": multiplier}
        own |= {
            "sampling": terms.sampling[0],
            "sampling_rate": terms.rate,
            "event": json.dumps(event_to_json(event)),
        }
        same = {"kind": "release", "clipping": "bound", "clip_norm": 1.0, "divisor": 1.0}
        rows += [same | own | {"step": 0, "epsilon": 0.0}] * count
    return {name: [row[name] for row in rows] for name in rows[0]}


def same_events(one: Schedule, other: Schedule) -> bool:
    """Whether two schedules are the same releases in the same order."""
    return schedule_to_json(merge_neighbours(one)) == schedule_to_json(merge_neighbours(other))


def column_problem(trace: Columns, card: PrivacyCard, *, is_whole: bool = True) -> str | None:
    """What a trace has otherwise than its own events or the card's sums; None where nothing.

    is_whole: whether it is of all that was charged, and not of the winner of a search.
    """
    for values in dict.fromkeys(_rows(trace, _CHECKED)):
        row = dict(zip(_CHECKED, values, strict=True))
        if not row_fits(row, _event(row["event"])):
            return f"a {row['kind']} has other sampling or noise than its event"
    if list(queries(trace)) != [query.model_dump() for query in card.mechanism.queries]:
        return "mechanism.queries sums up other columns"
    return (
        None
        if _ends_at(np.asarray(trace["epsilon"], float), card, is_whole=is_whole)
        else "it counts another epsilon"
    )


def _ends_at(kept: NDArray[np.float64], card: PrivacyCard, *, is_whole: bool) -> bool:
    """Whether the cost so far rises to that of the run, or under a filter to no more than it allowed.

    Earlier versions kept it by Rényi divergences, which may end below what PLD gives for the whole.
    """
    cost, rdp = card.cost, card.accounting.epsilon.rdp
    if cost is None:
        return True
    within = bool((kept[1:] >= kept[:-1]).all()) and kept[-1] <= cost * (1 + _CLOSE)
    is_fixed = is_whole and card.accounting.composition.kind == "schedule"
    lower = cost if rdp is None else min(cost, rdp)
    return bool(within and (not is_fixed or kept[-1] >= lower * (1 - _CLOSE)))


@lru_cache(maxsize=4096)
def _event(text: str) -> dp.DpEvent:
    return event_from_json(json.loads(text))


def _span(lower: float, upper: float) -> dict[str, float | None]:
    ends = {"least": float(lower), "most": float(upper)}
    return {name: end if math.isfinite(end) else None for name, end in ends.items()}

"""Checking a privacy card: epsilon again from the recorded events alone, and the files against their checksums."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import epsilon
from algorithms.privacy.accounting.adjacency import ADD_OR_REMOVE_ONE, Adjacency, named
from algorithms.privacy.accounting.events import Schedule, schedule_from_json
from algorithms.privacy.accounting.filters import conversion, epsilon_of_zcdp, rho_of
from algorithms.privacy.accounting.rdp import rdp
from algorithms.privacy.card.claims import check_claims, guarantee_of
from algorithms.privacy.card.model import RELEASED, Composition, PrivacyCard
from algorithms.privacy.card.plan import check_plan, read_plan
from algorithms.privacy.card.sentences import check_sentences
from algorithms.privacy.card.trace import check_trace
from algorithms.privacy.card.verdict import Check, Verification, agrees, finite, in_words


def canonical(document: Mapping[str, Any]) -> bytes:
    """A card as the bytes that card_sha256 covers: sorted keys, no spaces, UTF-8, without that field."""
    evidence = {key: value for key, value in document["evidence"].items() if key != "card_sha256"}
    content = {**document, "evidence": evidence}
    return json.dumps(
        content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest(document: Mapping[str, Any]) -> str:
    """The card_sha256 of a card. It shows a change by accident; whoever changes a card can compute it again."""
    return hashlib.sha256(canonical(document)).hexdigest()


def recompute(
    schedule: Schedule, delta: float, composition: Composition, adjacency: Adjacency = ADD_OR_REMOVE_ONE
) -> dict[str, float | None]:
    """Epsilon of recorded events by accountant, None where it has no finite bound or does not apply.

    PLD and the choice of the best order afterwards are proved only for releases fixed in advance. Releases chosen on
    the way are added up as their filter did, and cost what the filter allowed even where they came to less: when they
    ended was chosen on the way too; filters count under add-or-remove-one alone. Raises RefusedError for an event
    that no
    accountant takes.
    """

    def by(accountant: epsilon.Accountant) -> float:
        return epsilon.epsilon(schedule, delta, accountant=accountant, adjacency=adjacency)

    if composition.kind != "schedule" and adjacency is not ADD_OR_REMOVE_ONE:
        return {"pld": None, "rdp": None, "pure": None}
    if composition.kind == "schedule" and delta == 0:
        return {"pld": None, "rdp": None, "pure": finite(by("pure"))}
    if composition.kind == "schedule":
        return {name: _or_none(partial(by, name)) for name in epsilon.ACCOUNTANTS}
    if composition.order is not None and composition.limit is not None:
        order = composition.order
        total = float(rdp(schedule, orders=(order,), adjacency=adjacency)[0])
        held = max(total, composition.limit)
        return {"pld": None, "rdp": finite(max(0.0, held + conversion(order, delta))), "pure": None}
    rho = math.fsum(count * rho_of(event) for event, count in schedule)
    return {
        "pld": None,
        "rdp": finite(epsilon_of_zcdp(max(rho, composition.rho or 0.0), delta)),
        "pure": None,
    }


def check_all(document: Mapping[str, Any], card: PrivacyCard, folder: Path | None) -> Verification:
    """Every check of a card; `document` is the card as it was read, and `folder` where its files lie."""
    schedule = schedule_from_json([row.model_dump() for row in card.events])
    composition, adjacency = card.accounting.composition, named(card.setting.adjacency)
    recomputed = recompute(schedule, card.accounting.delta, composition, adjacency)
    plan = None if folder is None else read_plan(folder / "plan.json")
    checks = [*_epsilons(card, recomputed), *check_claims(card, recomputed, schedule)]
    checks += [*check_sentences(card, guarantee_of(card, recomputed), plan), _own_hash(document, card)]
    if folder is not None:
        checks += [_file(folder / name, card) for name in RELEASED]
        checks += [*check_trace(folder / "trace.parquet", card, schedule), *check_plan(plan, card, schedule)]
    return Verification(recomputed, tuple(checks))


def _epsilons(card: PrivacyCard, recomputed: Mapping[str, float | None]) -> Iterator[Check]:
    for name, value in recomputed.items():
        stated: float | None = getattr(card.accounting.epsilon, name)
        detail = f"stated {in_words(stated)}, recomputed {in_words(value)}"
        yield Check(f"epsilon by {name.upper()}", agrees(stated, value), detail)


def _own_hash(document: Mapping[str, Any], card: PrivacyCard) -> Check:
    return Check("card_sha256", digest(document) == card.evidence.card_sha256, "of the card's other fields")


def _file(path: Path, card: PrivacyCard) -> Check:
    if not path.is_file():
        return Check(path.name, None, "does not lie beside the card")
    with path.open("rb") as file:
        same = hashlib.file_digest(file, "sha256").hexdigest() == card.evidence.files[path.name]  # type: ignore[index]
    return Check(path.name, same, "has the checksum of the card" if same else "is not the file of this card")


def _or_none(compute: Callable[[], float]) -> float | None:
    try:
        return finite(compute())
    except RefusedError:
        return None

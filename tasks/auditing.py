"""Audits of registered methods: made on all cores, kept as JSON and as a page, the newest one of each method."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from algorithms.auditing.audit import Array, Audit, audit
from algorithms.auditing.game import Game
from algorithms.auditing.mechanisms import Tested, tested
from algorithms.core.software import software
from algorithms.methods.registry import CATALOGUE
from data.prepare.files import write_whole
from tasks.config import params
from tasks.reporting.figures import DARK, LIGHT, Theme, empty, legend, png
from tasks.reporting.page import AUDIT, AUDIT_PAGE, Picture, audit_folder, environment

_WORDS = "What the claim lets any test reach, and what the attack reached"


@dataclass(frozen=True)
class Asked:
    """What is to be audited.

    method: a registered name or "package.module:factory". settings: of the method. runs: pairs of runs with and without
    the worst record. canaries: of the one run. seed: audits are of made-up records and can be repeated.
    """

    method: str
    settings: Mapping[str, Any]
    epsilon: float = 4.0
    delta: float = 1e-5
    runs: int = 1000
    canaries: int = 400
    seed: int = 0


def check(asked: Asked) -> None:
    """Raises ParamsRefusedError or RefusedError for settings that do not fit, and for a method that claims nothing."""
    game = Game(asked.method, dict(asked.settings), asked.epsilon, asked.delta, 8)
    params.parse({"algorithm": {"name": asked.method, **game.all_settings()}}, reads=("algorithm",))
    game.plan()


def audit_all(every: Sequence[Asked], one: "One", *, say: Callable[[str], object]) -> tuple[bool, str]:
    """Audits one after the other, each by `one`.

    Returns whether a claim is violated, and the outcome in a sentence. say: gets what was found of each.
    """
    violated, said = [], ""
    for asked in every:
        is_violated, said = one(asked)
        say(said)
        violated += [said] if is_violated else []
    if violated:
        return True, "; ".join(violated)
    return False, said if len(every) == 1 else "no claim is violated"


One = Callable[[Asked], tuple[bool, str]]
"""Audits a method: whether its claim is violated, and what was found in a sentence."""


def audit_one(asked: Asked, root: Path, *, workers: int) -> tuple[bool, str]:
    """The audit of one method, kept below `root`; see `One`."""
    found, page = run_audit(asked, root, workers=workers)
    verdict = "the claim is VIOLATED" if found["is_violated"] else "nothing speaks against the claim"
    numbers = f"claimed {found['claimed']:.4g}, found {found['found']:.4g}"
    return found["is_violated"], f"{asked.method}: {numbers}; {verdict} ({page})"


def run_audit(asked: Asked, root: Path, *, workers: int = 1) -> tuple[dict[str, Any], Path]:
    """Audits a method, and the mechanisms alone; returns what audit.json says and where the page is.

    Raises RefusedError or ParamsRefusedError for a method that claims nothing, an unknown one, and settings that do
    not fit.
    """
    check(asked)
    game = Game(asked.method, dict(asked.settings), asked.epsilon, asked.delta, 1)
    several = partial(_side_by_side, workers=workers) if workers > 1 else None
    found = audit(game, runs=asked.runs, canaries=asked.canaries, seed=asked.seed, several=several)
    alone = tested(draws=4 * asked.runs, seed=asked.seed)
    return write(found, alone, root / audit_folder(asked.method), software(root, recorded="training"))


def _side_by_side(share: Callable[[Sequence[int]], Array], seeds: Sequence[int], *, workers: int) -> Array:
    size = max(1, len(seeds) // (4 * workers))
    shares = [seeds[start : start + size] for start in range(0, len(seeds), size)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return np.concatenate(list(pool.map(share, shares)))


def write(
    found: Audit, alone: Sequence[Tested], folder: Path, ran: Mapping[str, Any]
) -> tuple[dict[str, Any], Path]:
    """Writes audit.json and audit.html of an audit; returns what the first says and where the other is."""
    folder.mkdir(parents=True, exist_ok=True)
    mechanisms = [
        {
            "name": row.name,
            "claimed": row.claimed,
            "found": row.attack.found,
            "is_violated": row.attack.is_violated,
        }
        for row in alone
    ]
    document: dict[str, Any] = json.loads(json.dumps(found.to_json())) | {
        "mechanisms": mechanisms,
        "is_violated": found.is_violated or any(row["is_violated"] for row in mechanisms),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "software": dict(ran),
    }
    pictures = Picture(png(_figure(found, LIGHT)), png(_figure(found, DARK)), _WORDS)
    page = environment().get_template("audit.html.j2").render(audit=document, picture=pictures)
    text = json.dumps(document, indent=2) + "\n"
    write_whole(folder / AUDIT, lambda new: new.write_text(text, encoding="utf-8"))
    write_whole(folder / AUDIT_PAGE, lambda new: new.write_text(page, encoding="utf-8"))
    return document, folder / AUDIT_PAGE


def _figure(found: Audit, theme: Theme) -> Figure:
    figure, axes = empty(theme)
    axes.set(xlabel="false alarms", ylabel="misses", xlim=(0, 1), ylim=(0, 1))
    if found.curve is not None:
        axes.plot(found.curve.alarms, found.curve.claimed, color=theme.accent, label="claimed: nothing below")
        seen = np.array(found.curve.seen)
        axes.plot(seen[:, 0], seen[:, 1], ".", color=theme.second, label="what the attack reached")
    legend(axes, theme)
    return figure


def auditable() -> list[str]:
    """The registered methods that claim privacy."""
    return [name for name in CATALOGUE if name not in ("lbfgs", "non_private")]

"""Audit registered methods on all cores, and keep the newest audit of each method as JSON and as a page."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pydantic import JsonValue

from algorithms.auditing.audit import Audit, audit
from algorithms.auditing.game import Game, Predicts
from algorithms.auditing.mechanism_audit import audit_mechanisms
from algorithms.auditing.private_evaluation import audit_evaluation_release
from algorithms.core.software import software_facts, software_here
from algorithms.errors import RefusedError
from algorithms.methods import CATALOGUE
from data.files import write_text
from tasks.audit_processes import run_in_processes
from tasks.config import params
from tasks.refusals import AUDITS
from tasks.reporting import AUDIT, AUDIT_PAGE, AuditSummary, audit_folder, environment
from tasks.reporting.figures import Theme, empty, legend, picture

_WORDS = "What the claim lets any test reach, and what the attack reached"


@dataclass(frozen=True)
class AuditRequest:
    """A request for an audit.

    method: a registered name or "package.module:factory". settings: settings of the method. runs: pairs of runs with
    and without the worst record. canaries: number of canaries in the single run. seed: makes an audit repeatable, as
    its records are synthetic. predicts: of a number or a count its centre and mean are released, too.
    """

    method: str
    settings: Mapping[str, JsonValue]
    epsilon: float = 4.0
    delta: float = 1e-5
    runs: int = 1000
    canaries: int = 400
    seed: int = 0
    predicts: Predicts = "class"


def check(request: AuditRequest) -> None:
    """Raise RefusedError if the settings do not fit or the method claims no privacy."""
    game = _smallest_game(request)
    params.parse({"algorithm": {"name": request.method, **game.all_settings()}}, reads=("algorithm",))
    try:
        game.plan()
    except RefusedError as error:
        raise RefusedError(AUDITS.sentence(error)) from None


def _smallest_game(request: AuditRequest) -> Game:
    """The game of one canary, with the fewest records of an audit, so that its batches fit the others, too."""
    settings, predicts = dict(request.settings), request.predicts
    return Game(request.method, settings, request.epsilon, request.delta, canaries=1, predicts=predicts)


def checked_requests(
    method: str | None,
    settings: Mapping[str, JsonValue],
    epsilon: float,
    delta: float,
    runs: int,
    canaries: int,
    seed: int,
    predicts: Predicts = "class",
) -> list[AuditRequest]:
    """The request for a method, or one for each registered method that claims privacy, after `check` of each."""
    methods = [method] if method else auditable()
    requests = [
        AuditRequest(name, settings, epsilon, delta, runs, canaries, seed, predicts) for name in methods
    ]
    for request in requests:
        check(request)
    return requests


def audit_all(
    requests: Sequence[AuditRequest], audit_method: "AuditMethod", *, say: Callable[[str], object]
) -> tuple[bool, str]:
    """Run audits one after the other, each by `audit_method`.

    say: called with the findings of each audit. Returns whether a claim is violated, and the outcome as a sentence.
    """
    violated, message = [], ""
    for request in requests:
        is_violated, message = audit_method(request)
        say(message)
        violated += [message] if is_violated else []
    if violated:
        return True, "; ".join(violated)
    return False, message if len(requests) == 1 else "no claim is violated"


AuditMethod = Callable[[AuditRequest], tuple[bool, str]]
"""Audits a method; returns whether its claim is violated, and the findings as a sentence."""


def audit_one(request: AuditRequest, root: Path, *, workers: int) -> tuple[bool, str]:
    """Audit one method and keep the result below `root`; see `AuditMethod`."""
    summary, page = run_audit(request, root, workers=workers)
    verdict = "the claim is VIOLATED" if summary.is_violated else "nothing speaks against the claim"
    if summary.epsilon_lower_bound > summary.claimed and not summary.is_violated:
        verdict = f"{verdict}, since chance explains the difference"
    numbers = f"claimed {summary.claimed:.4g}, found {summary.epsilon_lower_bound:.4g}"
    return summary.is_violated, f"{request.method}: {numbers}; {verdict} ({page})"


def run_audit(request: AuditRequest, root: Path, *, workers: int = 1) -> tuple[AuditSummary, Path]:
    """Audit a method, and each mechanism alone; write audit.json and audit.html, and return verdict and page.

    Raises RefusedError if the method is unknown or claims no privacy, or its settings do not fit.
    """
    check(request)
    game = _smallest_game(request)
    several = partial(run_in_processes, workers=workers) if workers > 1 else None
    result = audit(game, runs=request.runs, canaries=request.canaries, seed=request.seed, several=several)
    mechanisms = [
        {
            "name": row.name,
            "claimed": row.claimed,
            "found": row.attack.epsilon_lower_bound,
            "is_violated": row.attack.is_violated,
        }
        for row in (
            *audit_mechanisms(draws=4 * request.runs, seed=request.seed),
            *audit_evaluation_release(draws=request.runs, seed=request.seed),
        )
    ]
    document: dict[str, object] = json.loads(json.dumps(result.to_json())) | {
        "mechanisms": mechanisms,
        "is_violated": result.is_violated or any(row["is_violated"] for row in mechanisms),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "software": software_facts(root, software_here()).model_dump(),
    }
    shown = picture(lambda theme: _figure(result, theme), _WORDS)
    page = environment().get_template("audit.html.j2").render(audit=document, picture=shown)
    folder = root / audit_folder(request.method)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / AUDIT, json.dumps(document, indent=2) + "\n")
    write_text(folder / AUDIT_PAGE, page)
    return AuditSummary.model_validate(document), folder / AUDIT_PAGE


def _figure(audit_result: Audit, theme: Theme) -> Figure:
    figure, axes = empty(theme)
    axes.set(xlabel="false alarms", ylabel="misses", xlim=(0, 1), ylim=(0, 1))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    if audit_result.curve is not None:
        axes.plot(
            audit_result.curve.alarms,
            audit_result.curve.claimed,
            color=theme.accent,
            label="claimed: nothing below",
        )
        seen = np.array(audit_result.curve.seen)
        axes.plot(seen[:, 0], seen[:, 1], ".", color=theme.second, label="what the attack reached")
    legend(axes, theme)
    return figure


def auditable() -> list[str]:
    """The registered methods that claim privacy."""
    return [name for name in CATALOGUE if name not in ("lbfgs", "non_private")]

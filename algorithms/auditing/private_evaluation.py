"""An audit of the release of held-out records: the claim is its event, the records are the worst that can be.

Direct checks see the amount of noise in cells where nobody is, how far one record moves them, and whether the noise of
two models' releases is independent, without which their difference is exact. The attack is the likelihood ratio of
releases with and without the worst record, as for every mechanism.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from algorithms.auditing.bounds import Attack, family_of, many_runs
from algorithms.auditing.checks import ROUNDING_ROOM, AuditCheck, charged_multiplier, dependence
from algorithms.auditing.mechanism_audit import MechanismAudit
from algorithms.core.private_evaluation import EvaluationPlan, release_evaluation
from algorithms.evaluation import HistogramSpec, count, histogram_for
from algorithms.evaluation.histogram import BINARY
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian

Cells: TypeAlias = NDArray[np.float64]
EvaluationRelease: TypeAlias = Callable[[EvaluationPlan, Cells, int], Cells]
"""(plan, exact cells, number of the model) -> what leaves."""

DELTA = 1e-5
_MODELS, _RECORDS = 8, 200


@dataclass(frozen=True)
class EvaluationAudit:
    """What attacks and checks found. claimed: epsilon of the release's event at delta 1e-5."""

    claimed: float
    attack: Attack
    checks: tuple[AuditCheck, ...]

    @property
    def is_violated(self) -> bool:
        """Whether the claim is refuted."""
        return self.attack.is_violated or any(check.is_violated for check in self.checks)


def released_values(planned: EvaluationPlan, cells: Cells, model: int) -> Cells:
    """What a run releases, [cells]; every model has a run of its own, with a key of its own.

    Args:
        planned: The histogram and its noise.
        cells: The exact sums, [cells].
        model: Its number, from which the key follows.
    """
    key = seeded_generator(model)
    return release_evaluation(planned, cells, generator=key, trace=Trace(), step=0).values


def audit_evaluation(
    spec: HistogramSpec, releases: EvaluationRelease = released_values, *, draws: int = 400, seed: int = 0
) -> EvaluationAudit:
    """Audit the release of a histogram with Gaussian noise at a noise multiplier of 1.

    Args:
        spec: The histogram.
        releases: What is audited.
        draws: Releases with and without the record.
        seed: Of all random numbers; the records are made up.

    Example:
        >>> from algorithms.evaluation import histogram_for
        >>> audit_evaluation(histogram_for("score", 1), draws=50).is_violated
        False
    """
    planned = EvaluationPlan(spec, "gaussian", 1.0, 1.0)
    records = worst_records(spec, np.random.default_rng(seed))
    worst = max(records, key=lambda cells: float(np.linalg.norm(cells)))
    schedule = [(planned.release.event(), 1)]
    claimed, cost = family_of(schedule, DELTA, accountant="pld")
    # The event states the noise for a record that moves the cells by the sensitivity.
    multiplier = charged_multiplier(planned.release.event(), Gaussian)
    assert multiplier is not None
    std, nobody = multiplier * spec.sensitivity, np.zeros(spec.cells)

    def score(is_in: bool, model: int) -> float:
        seen = releases(planned, worst * is_in, model)
        return float(seen @ worst - worst @ worst / 2) / std**2

    first = 2 * draws * seed
    pairs = np.array([[score(False, first + 2 * i), score(True, first + 2 * i + 1)] for i in range(draws)])
    noise = [releases(planned, nobody, first + model) / std for model in range(_MODELS)]
    squares, amount = float(np.square(noise).sum()), sum(map(len, noise))
    moved = [
        float(np.linalg.norm(releases(planned, cells, first) - releases(planned, nobody, first)))
        for cells in records
    ]
    reach = max(moved) / spec.sensitivity
    checks = (
        AuditCheck(
            "noise",
            1.0,
            float(np.sqrt(squares / amount)),
            float(chi2(amount).cdf(squares)),
            f"{amount} cells without people, over what the charged event says",
        ),
        AuditCheck(
            "reach of a record",
            1.0,
            reach,
            0.0 if reach > 1 + ROUNDING_ROOM else 1.0,
            f"bounds by which one of {len(records)} records moved the cells, at most",
        ),
        dependence("noise of two models", noise, "cells without people"),
    )
    return EvaluationAudit(cost(1.0), many_runs(pairs, claimed, cost, DELTA), checks)


def audit_evaluation_release(*, draws: int, seed: int) -> list[MechanismAudit]:
    """The audits of the histograms of two classes and of a number, as those of mechanisms.

    A check that fails refutes the claim as an attack does, and is what the row's detail then says.

    Args:
        draws: Releases with and without the record, of each histogram.
        seed: Of all random numbers.
    """
    rows = []
    for name, spec in (
        ("two classes", histogram_for(BINARY, 2)),
        ("a number", histogram_for("number", 1)),
    ):
        result = audit_evaluation(spec, draws=draws, seed=seed)
        failed = ", ".join(check.name for check in result.checks if check.is_violated)
        attack = replace(result.attack, is_violated=result.is_violated, detail=failed or result.attack.detail)
        rows.append(MechanismAudit(f"histogram of held-out records, {name}", result.claimed, attack))
    return rows


def worst_records(spec: HistogramSpec, draw: np.random.Generator) -> list[Cells]:
    """The cells of single records with extreme, impossible and ordinary scores and labels."""
    extremes = [np.nan, np.inf, -np.inf, -1e300, 1e300, -1.0, 0.0, 1e-300, 0.5, 1.0, 2.0]
    wild = draw.choice(extremes, (_RECORDS // 2, spec.outputs))
    fair = draw.dirichlet(np.full(max(2, spec.outputs), 0.3), _RECORDS // 2)[:, : spec.outputs]
    scores = np.concatenate([wild, fair])
    labels = draw.integers(-1, spec.outputs + 1, _RECORDS).astype(np.float64)
    groups = np.stack(
        [np.zeros(_RECORDS, np.int64), *(draw.integers(-1, len(of) + 1, _RECORDS) for _, of in spec.groups)]
    )
    halves = draw.integers(0, 2, _RECORDS)
    differences = draw.choice(extremes, _RECORDS)
    return [
        count(
            spec,
            scores[[i]],
            labels[[i]],
            groups[1:, [i]].T,
            halves=halves[[i]],
            differences=differences[[i]] if spec.compared else None,
        )
        for i in range(_RECORDS)
    ]

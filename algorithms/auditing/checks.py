"""Direct checks of the parts of a claim: the amount of noise, how far one record moves a sum, how often it takes part.

They find small faults that no attack would, also whether coins and noise of different releases are independent.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import dp_accounting as dp
import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, gamma, norm

from algorithms.auditing.bounds import (
    ALARM,
)
from algorithms.auditing.game import Answer, Game, GameTranscript, key_of, play
from algorithms.auditing.likelihood import contribution, length_of, whitening
from algorithms.core.plan import Plan
from algorithms.gradients import Affine
from algorithms.privacy.accounting.epsilon import REPLACE_ONE
from algorithms.privacy.accounting.event_classes import ObjectivePerturbationDpEvent, parts
from algorithms.privacy.accounting.events import CorrelatedDpEvent, CorrelatedStepDpEvent
from algorithms.privacy.mechanisms.correlated import Correlated
from algorithms.privacy.mechanisms.release import (
    Gaussian,
    Laplace,
    Minimum,
    ObjectiveNoise,
)
from algorithms.privacy.mechanisms.sampling import (
    Cyclic,
    FullBatch,
    RandomAllocation,
    WithoutReplacement,
)

Array = NDArray[np.float64]
ROUNDING_ROOM = 1e-3
"""How far a record may move a sum beyond its bound, relative to the bound, because of rounding."""


@dataclass(frozen=True)
class AuditCheck:
    """One direct check of a part of the claim.

    Attributes:
        name: What is checked.
        claimed, seen: In the same unit.
        chance: The probability of such a value, or one that speaks more against the claim, if the claim is true.
        detail: What was counted, in words.
    """

    name: str
    claimed: float
    seen: float
    chance: float
    detail: str

    @property
    def is_violated(self) -> bool:
        """Whether this refutes the claim."""
        return self.chance < ALARM


LAWS: dict[type, tuple[tuple[type[dp.DpEvent], ...], Callable[[int], Any], int]] = {
    Gaussian: ((dp.GaussianDpEvent,), chi2, 2),
    Correlated: ((CorrelatedDpEvent, CorrelatedStepDpEvent), chi2, 2),
    ObjectiveNoise: ((ObjectivePerturbationDpEvent,), chi2, 2),
    Laplace: ((dp.LaplaceDpEvent,), gamma, 1),
}
"""By mechanism: its events, the law of the sum of its draws' powers, and which power."""


def noise_checks(game: Game, played: GameTranscript) -> list[AuditCheck]:
    """Check the amount of noise, in coordinates that no record moves.

    Args:
        game: Whose silent coordinates are looked at.
        played: A run, with the events that were charged.
    """
    checks = []
    for kind, (_event, law, power) in LAWS.items():
        values = noise_of(game, played, kind)
        if not len(values):
            continue
        total = float((np.abs(values) ** power).sum())
        detail = f"{len(values)} draws of {kind.__name__} noise, over what the charged event says"
        # Only too little noise violates the claim, so the chance is that of a smaller sum of powers.
        seen = (total / len(values)) ** (1 / power)
        checks.append(AuditCheck("noise", 1.0, seen, float(law(len(values)).cdf(total)), detail))
    return checks


def noise_of(game: Game, played: GameTranscript, kind: type) -> Array:
    """All noise of one kind that is observed without contributions, in units of the charged noise; shape [draws]."""
    rows = []
    for answer, event in [pair for pair in _seen_alone(played) if type(pair[0].noise) is kind]:
        charged = charged_multiplier(event, kind)
        ratio = 1.0 if charged is None else answer.noise.multiplier / charged
        # In units of the scale that was charged, which may be another than the noise has.
        rows.append(answer.value[game.silent] / answer.scale * ratio)
    return np.concatenate(rows) if rows else np.zeros(0)


def _seen_alone(played: GameTranscript) -> list[tuple[Answer, dp.DpEvent]]:
    """The answers in coordinates that no record moves, with their events; correlated noise is whitened."""
    pairs = zip(played.answers, played.events, strict=True)
    observed = [(answer, event) for answer, event in pairs if answer.kind in ("gradient", "minimum")]
    if not observed or not isinstance(observed[0][1], CorrelatedDpEvent):
        return observed
    through = whitening(observed[0][1], len(observed))
    values = through @ np.stack([answer.value for answer, _ in observed])
    return [
        (replace(answer, value=value), event) for (answer, event), value in zip(observed, values, strict=True)
    ]


def charged_multiplier(event: dp.DpEvent, kind: type) -> float | None:
    """The noise multiplier that an event states; None for events without one."""
    if kind not in LAWS:
        return None
    if isinstance(event, LAWS[kind][0]):
        return float(event.noise_multiplier)
    multipliers = (charged_multiplier(inner, kind) for inner in parts(event))
    return next((number for number in multipliers if number is not None), None)


def reach_checks(game: Game, plan: Plan, seeds: Sequence[int]) -> list[AuditCheck]:
    """Check how far one record moves a sum, in units of the bound, and after how many steps it takes part again.

    From runs with and without the record, with the same coins and noise, so that answers differ by the record alone. As
    soon as two runs make different queries, which follow from different answers, they are no longer compared.

    Args:
        game: Of one canary.
        plan: Of the game.
        seeds: One for each pair of runs.
    """
    max_reach, seen_at, nearest, parts = 0.0, 0, math.inf, 0
    moving: list[int]
    for seed in seeds:
        key = key_of("reach", game.algorithm, seed)
        with_it = play(game, plan, np.array([True]), key)
        is_sampled = any(not isinstance(answer.sampling, FullBatch) for answer in with_it.answers)
        without = play(game, plan, np.array([False]), key, blank=is_sampled)
        moving = []
        for position, (answer, other) in enumerate(zip(with_it.answers, without.answers, strict=False)):
            if answer.kind == "argmin" or not _same_question(answer, other):
                break
            moves_zeros = isinstance(answer.bound, Affine) and answer.bound.offset > 0
            # The record is replaced by zeros here, which move these sums as well, so that nothing can be concluded.
            if is_sampled and (moves_zeros or answer.kind in ("total", "norm count")):
                continue
            # Both runs have the same coins and noise, so what is left is the record.
            moved = answer.value - other.value
            limit = answer.bound.sensitivity
            if isinstance(answer.bound, Minimum):
                limit = min(answer.bound.clip_norm, answer.bound.input_norm) * (1 + ROUNDING_ROOM)
            distance = (
                length_of(moved, answer.bound) if answer.kind != "norms" else float(np.abs(moved).max())
            )
            max_reach, seen_at = max(max_reach, distance / limit), seen_at + bool(distance > 0)
            if isinstance(answer.sampling, Cyclic):
                parts, moving = answer.sampling.parts, [*moving, *([position] if distance > 0 else [])]
        nearest = min(nearest, *np.diff(moving).tolist(), math.inf)
    allowed = 2.0 if plan.adjacency == REPLACE_ONE.name else 1.0
    detail = f"bounds by which the record moved a sum, at most, in {seen_at} answers that it was in"
    checks = [
        AuditCheck(
            "reach of a record",
            allowed,
            max_reach,
            0.0 if max_reach > allowed * (1 + ROUNDING_ROOM) else 1.0,
            detail,
        )
    ]
    if parts and math.isfinite(nearest):
        detail = "steps from one in which the record moved the sum to the next, at least"
        checks.append(AuditCheck("steps between", parts, nearest, 0.0 if nearest < parts else 1.0, detail))
    return checks


def _same_question(first: Answer, other: Answer) -> bool:
    if isinstance(first.bound, Affine) and isinstance(other.bound, Affine):
        same = (first.bound.shift == other.bound.shift).all() and (
            first.bound.scale == other.bound.scale
        ).all()
        return bool(same) and first.noise == other.noise
    return bool(
        (first.kind, first.sampling, first.bound, first.noise)
        == (other.kind, other.sampling, other.bound, other.noise)
    )


def coin_checks(game: Game, plan: Plan, run: GameTranscript) -> list[AuditCheck]:
    """Check how often canaries take part, and whether the coins and noise of two answers are independent.

    Args:
        game: With many canaries, at an epsilon at which their coins show through the noise.
        plan: Of the game.
        run: A run of it.
    """
    inside = np.flatnonzero(run.coins)
    rows, rates, are_independent = [], [], True
    for answer in run.answers:
        if answer.kind not in ("gradient", "minimum"):
            continue
        are_independent = are_independent and not isinstance(answer.sampling, Cyclic | RandomAllocation)
        if isinstance(answer.sampling, FullBatch | WithoutReplacement) or isinstance(answer.bound, Minimum):
            continue
        projected = [_part(game, answer, int(i)) for i in inside]
        rows.append(np.array(projected))
        rates.append(answer.sampling.rate)
    noise = [answer.value[game.silent] / answer.scale for answer, _ in _seen_alone(run)]
    checks: list[AuditCheck] = []
    if rows:
        # Each canary's estimate is its coin plus noise of mean 0. One-sided: taking part more often than claimed costs
        # more privacy than was charged.
        seen, claimed = np.concatenate(rows), np.repeat(rates, len(inside))
        # A mean over its standard error.
        score = float((seen - claimed).mean() / (seen - claimed).std() * math.sqrt(len(seen)))
        detail = "how often a canary is in a sum; the noise averages out"
        checks.append(
            AuditCheck(
                "sampling rate", float(np.mean(rates)), float(seen.mean()), float(norm.sf(score)), detail
            )
        )
        if are_independent:
            centred = [row - rate for row, rate in zip(rows, rates, strict=True)]
            checks.append(
                dependence("coins of two releases", centred, "canaries that are in both or in neither")
            )
    if len(noise) > 1:
        checks.append(dependence("noise of two releases", noise, "noise where nothing else is"))
    return checks


def _part(game: Game, answer: Answer, canary: int) -> float:
    """A noisy estimate of whether a canary is in a sum: 1 or 0, plus noise of mean 0.

    It projects the sum on what the canary would add, in the coordinates that no other record moves.
    """
    whole = contribution(game, answer, game.canary(canary))
    support = np.abs(game.canary(canary)) > 0
    return float(answer.value[support] @ whole[support] / (whole[support] @ whole[support]))


def dependence(name: str, rows: Sequence[Array], detail: str) -> AuditCheck:
    """The most dependent pair of releases.

    Args:
        name: Of the check.
        rows: For each release independent values of mean 0, shape [n] each, of the same n.
        detail: What they are, in words.

    Returns:
        The largest correlation. Its chance is that of any pair, by a bound on the sum of all (Bonferroni).
    """
    strongest, pairs = 0.0, list(combinations(range(len(rows)), 2))
    for first, other in pairs:
        products = (rows[first] - rows[first].mean()) * (rows[other] - rows[other].mean())
        spread = float(rows[first].std() * rows[other].std())
        if spread > 0:
            strongest = max(strongest, float(products.mean()) / spread, key=abs)
    inside = max(-1 + 1e-15, min(1 - 1e-15, strongest))  # so that the transform is finite
    score = abs(math.atanh(inside)) * math.sqrt(max(1, len(rows[0]) - 3))  # Fisher's transform
    chance = min(1.0, 2 * float(norm.sf(score)) * max(1, len(pairs)))  # two sides, and any of the pairs
    return AuditCheck(name, 0.0, strongest, chance, f"correlation over {detail}")

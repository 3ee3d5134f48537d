"""An audit of one method: what it claims, what attacks found, whether the claim is violated; and of each mechanism.

Two kinds of evidence. Attacks give a lower bound on epsilon at 95 %: many short runs with and without the worst record,
and one run with many canaries. Direct checks of the claim's parts find small faults that no attack would: the amount of
noise, how far one record moves a sum, how often it takes part, and whether coins and noise of different releases are
independent.

A claim is violated if one of these tests fails at a level of 1e-6, so that an honest method is accused about once in
ten thousand audits, for any seed.

Each mechanism is tested alone on its two worst neighbours: many draws, no training, no records. The sum is zero for one
neighbour and as far away as one record can move it for the other. In a selection the candidates tie, or one loses by
the whole bound. The score is the likelihood ratio, which gives the best test, and its result is compared with the
mechanism's event.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import dp_accounting as dp
import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue
from scipy.stats import chi2, gamma, norm

from algorithms.auditing.bounds import (
    ALARM,
    Attack,
    Power,
    TradeOffCurve,
    by_guesses,
    claim_of,
    curve_of,
    family,
    family_of,
    many_runs,
    power_of,
)
from algorithms.auditing.game import (
    Answer,
    Game,
    GameTranscript,
    contribution,
    key_of,
    length_of,
    log_likelihood,
    play,
    whitening,
)
from algorithms.core.plan import Plan
from algorithms.errors import RefusedError
from algorithms.gradients import L1, L2, Affine, Box
from algorithms.privacy.accounting.epsilon import REPLACE_ONE, Accountant, epsilon
from algorithms.privacy.accounting.event_classes import ObjectivePerturbationDpEvent, parts
from algorithms.privacy.accounting.events import CorrelatedDpEvent, CorrelatedStepDpEvent
from algorithms.privacy.accounting.risk import Profile
from algorithms.privacy.mechanisms.correlated import Correlated, Toeplitz
from algorithms.privacy.mechanisms.noise import Stream
from algorithms.privacy.mechanisms.release import (
    Gaussian,
    Gumbel,
    KNorm,
    Laplace,
    Minimum,
    NoiseAhead,
    ObjectiveNoise,
    Release,
    add_noise,
    argmin_release,
    gradient_release,
    noisy_argmin,
)
from algorithms.privacy.mechanisms.sampling import (
    Cyclic,
    FixedOrder,
    FullBatch,
    Poisson,
    RandomAllocation,
    WithoutReplacement,
    draw_sample,
)

Array = NDArray[np.float64]
_COIN_CHECK_EPSILON = 20.0
"""The epsilon at which coins are checked: noise is then so small that it shows which canaries are in a sum."""
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


@dataclass(frozen=True)
class Audit:
    """The result of an audit; `to_json` is the content of its file.

    Attributes:
        method, settings: What was audited.
        claimed: The epsilon of the claim, at `delta`.
        delta: Of the claim.
        attacks: Each with a lower bound on epsilon.
        checks: Of the parts of the claim.
        curve: The trade-off that is claimed, and what was seen.
        power: What this audit would find with half of the noise.
        runs: Pairs of runs with and without the worst record.
        canaries: In the single run.
    """

    method: str
    settings: dict[str, JsonValue]
    claimed: float
    delta: float
    attacks: tuple[Attack, ...]
    checks: tuple[AuditCheck, ...]
    curve: TradeOffCurve
    power: Power
    runs: int
    canaries: int

    @property
    def epsilon_lower_bound(self) -> float:
        """The largest lower bound on epsilon."""
        return max((attack.epsilon_lower_bound for attack in self.attacks), default=0.0)

    @property
    def is_violated(self) -> bool:
        """Whether the claim is refuted."""
        return any(row.is_violated for row in self.attacks) or any(row.is_violated for row in self.checks)

    def to_json(self) -> dict[str, JsonValue]:
        """The audit as JSON values, with the verdict beside the evidence; `found` is a lower bound on epsilon."""
        return asdict(self) | {
            "attacks": [
                {
                    "name": row.name,
                    "found": row.epsilon_lower_bound,
                    "is_violated": row.is_violated,
                    "detail": row.detail,
                }
                for row in self.attacks
            ],
            "checks": [asdict(row) | {"is_violated": row.is_violated} for row in self.checks],
            "power": {"caught": self.power.caught, "found": self.power.epsilon_lower_bound},
            "found": self.epsilon_lower_bound,
            "is_violated": self.is_violated,
        }


def scores(game: Game, plan: Plan, seeds: Iterable[int]) -> Array:
    """Scores of pairs of runs without and with the record.

    Args:
        game: Of one canary.
        plan: Of the game.
        seeds: One for each pair.

    Returns:
        Log likelihood ratios, shape [pairs, 2].
    """

    def score(seed: int, is_in: bool) -> float:
        coins, key = np.full(game.canaries, is_in), key_of(game.algorithm, "pairs", seed, is_in)
        return log_likelihood(game, plan, play(game, plan, coins, key).answers, 0, alone=True)

    pairs = [[score(seed, False), score(seed, True)] for seed in seeds]
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


def one_run(game: Game, plan: Plan, seed: int) -> GameTranscript:
    """Play a run in which each canary is included by a fair coin."""
    coins = key_of("who is in", game.algorithm, seed).stream(0).coins(game.canaries, 0.5)
    return play(game, plan, coins, key_of("one run", game.algorithm, seed))


def attacks_of(game: Game, plan: Plan, run: GameTranscript, claimed: Profile) -> list[Attack]:
    """The attacks on one run: by all answers, and by the released parameters alone."""
    canaries = range(game.canaries)
    white = np.array([log_likelihood(game, plan, run.answers, i, alone=False) for i in canaries])
    black = np.array([-float(run.released @ game.canary(i)) for i in canaries])  # [canaries]
    return [
        by_guesses(f"one run, {box} box", scored, run.coins, claimed, game.delta)
        for box, scored in (("white", white), ("black", black))
    ]


_LAWS: dict[type, tuple[tuple[type[dp.DpEvent], ...], Callable[[int], Any], int]] = {
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
    for kind, (_event, law, power) in _LAWS.items():
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
    if kind not in _LAWS:
        return None
    if isinstance(event, _LAWS[kind][0]):
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


def audit(
    game: Game,
    *,
    runs: int = 400,
    canaries: int = 200,
    seed: int = 0,
    several: Callable[[Callable[[Sequence[int]], Array], Sequence[int]], Array] | None = None,
) -> Audit:
    """Audit a method.

    Args:
        game: The method and its claim; a game of one canary.
        runs: Pairs of runs with and without the worst record.
        canaries: In the single run.
        seed: Of all random numbers: audits use made-up records and can be repeated.
        several: Maps a function over seeds and joins the results; by default sequentially.

    Raises:
        RefusedError: For a method without a claim, and for settings that do not fit.
    """
    plan = game.plan()
    claimed, cost = family(plan)
    seeds = range(seed * runs, (seed + 1) * runs)
    share = partial(scores, game, plan)
    pairs = several(share, seeds) if several else share(seeds)
    attacks = [many_runs(pairs, claimed, cost, game.delta)]
    wide = replace(game, canaries=canaries, zeros=max(game.zeros, canaries // 2))
    wide_plan = wide.plan()
    run = one_run(wide, wide_plan, seed)
    attacks += attacks_of(wide, wide_plan, run, claim_of(wide_plan))
    checks = noise_checks(wide, run)
    draws = sum(len(noise_of(wide, run, kind)) for kind in _LAWS)
    checks += reach_checks(game, plan, range(seed * 8, seed * 8 + 8))
    clear, clear_plan = wide, wide_plan
    # The coins are checked at an epsilon so large that they show through the noise, if the method allows it.
    with suppress(RefusedError):
        larger = replace(wide, epsilon=max(wide.epsilon, _COIN_CHECK_EPSILON), accountant="rdp")
        clear, clear_plan = larger, larger.plan()
    checks += coin_checks(clear, clear_plan, one_run(clear, clear_plan, seed))
    return Audit(
        method=game.algorithm,
        settings=dict(game.settings),
        claimed=plan.epsilon[plan.accountant],
        delta=game.delta,
        attacks=tuple(attacks),
        checks=tuple(checks),
        curve=curve_of(pairs, claimed(1.0)),
        power=power_of(draws, runs, claimed, cost),
        runs=runs,
        canaries=canaries,
    )


DELTA = 1e-5
_DIMENSION = 3
_STEPS, _PARTS, _WORDS = 4, 2, 8
"""For a run with correlated noise: steps, parts of the records, and the largest number of stream words for a draw."""


@dataclass(frozen=True)
class MechanismAudit:
    """A mechanism's audit. claimed: epsilon of its event at delta 1e-5."""

    name: str
    claimed: float
    attack: Attack


@dataclass(frozen=True)
class _Neighbours:
    """scores: (release, stream, whether the record is in, draws) -> log likelihood ratios, shape [draws]."""

    release: Release
    scores: Callable[[Release, Stream, bool, int], Array]


def audit_mechanisms(*, draws: int = 4000, seed: int = 0, only: Sequence[str] = ()) -> list[MechanismAudit]:
    """The audit of every mechanism at a noise multiplier of 1, of correlated noise at 1.5.

    Args:
        draws: For each neighbour; draws in several dimensions are made one after the other.
        seed: Of the draws.
        only: Names of mechanisms; empty for all.

    Example:
        >>> any(found.attack.is_violated for found in audit_mechanisms(draws=200))
        False
    """
    rows = []
    for name, pair in ((name, _NEIGHBOURS[name]) for name in only or _NEIGHBOURS):
        sides = [
            pair.scores(pair.release, key_of("mechanism", name, seed).stream(side), bool(side), draws)
            for side in (0, 1)
        ]
        schedule = [(pair.release.event(), 1)]
        accountant: Accountant = "rdp" if isinstance(schedule[0][0], dp.dp_event.ZCDpEvent) else "pld"
        claimed, cost = family_of(schedule, DELTA, accountant=accountant)
        attack = many_runs(np.stack(sides, axis=1), claimed, cost, DELTA)
        rows.append(MechanismAudit(name, epsilon(schedule, DELTA, accountant=accountant), attack))
    return rows


def _on_a_line(release: Release, stream: Stream, is_in: bool, draws: int) -> Array:
    """Many draws of one coordinate, as the coordinates of one noise vector."""
    rate, scale = release.sampling.rate, release.noise_scale
    reached = is_in * np.ones(draws)
    if not isinstance(release.sampling, FullBatch):
        reached = np.zeros(draws)
        reached[draw_sample(release.sampling, draws, stream, step=0)] = float(is_in)
    total = torch.from_numpy(reached * release.clipping.sensitivity)
    seen = add_noise(total, release, stream).numpy() / scale
    shift = release.clipping.sensitivity / scale
    is_laplace = isinstance(release.noise, Laplace)
    # Log p_1 / p_0 at scale 1: |x| - |x - shift| for Laplace noise, x shift - shift^2 / 2 for normal noise.
    ratio = np.abs(seen) - np.abs(seen - shift) if is_laplace else seen * shift - shift**2 / 2
    if rate == 1:
        return np.asarray(ratio)
    return np.asarray(np.logaddexp(np.log1p(-rate), np.log(rate) + ratio))  # log(1 - q + q e^ratio)


def _in_space(release: Release, stream: Stream, is_in: bool, draws: int) -> Array:
    far = np.zeros(_DIMENSION)
    far[0] = release.clipping.sensitivity
    columns = []
    for _ in range(draws):
        seen = add_noise(torch.from_numpy(is_in * far), release, stream).numpy()
        # Log p_1 / p_0 of the density exp(-|x| / scale).
        nearer = length_of(seen, release.clipping) - length_of(seen - far, release.clipping)
        columns.append(nearer / release.noise_scale)
    return np.array(columns)


def _play_selection(release: Release, stream: Stream, is_in: bool, draws: int) -> Array:
    """Two candidates; with the record the first loses by the bound, so choosing it is evidence against the record."""
    bound = release.clipping.sensitivity
    picks = np.array(
        [
            noisy_argmin(torch.tensor([is_in * bound, 0.0], dtype=torch.float64), release, stream)
            for _ in range(draws)
        ]
    )
    # Exact for Gumbel noise, whose difference is logistic; without the record both are as likely.
    loses = 1 / (1 + np.exp(bound / release.noise_scale))
    log_ratios: Array = np.where(picks == 0, np.log(2 * loses), np.log(2 * (1 - loses)))
    return log_ratios


def _over_steps(release: Release, stream: Stream, is_in: bool, draws: int) -> Array:
    """A record in every second step of a run; each coordinate is a separate run, whitened by the strategy."""
    noise = release.noise
    assert isinstance(noise, Correlated)
    assert isinstance(noise.strategy, Toeplitz)
    column = noise.strategy.column(noise.steps)
    correlator, released, means = noise.strategy.correlator(draws), [], []
    for step in range(noise.steps):
        step_release = replace(release, noise=replace(noise, step=step))
        takes_part = float(step % _PARTS == 0)
        ahead = NoiseAhead.of(step_release, stream.later(step * _WORDS * draws), draws, correlator=correlator)
        sums = torch.full((draws,), is_in * takes_part * release.clipping.sensitivity, dtype=torch.float64)
        released.append(ahead.add_noise(sums).numpy() / release.noise_scale)
        means.append(takes_part * release.clipping.sensitivity / release.noise_scale)
    rows = range(noise.steps)
    # C [steps, steps], lower triangular
    through = np.array([[column[i - j] if 0 <= i - j < len(column) else 0.0 for j in rows] for i in rows])
    shift = through @ np.array(means)
    # Released is means + C^-1 z, so C times it is shift + z with independent z.
    return np.asarray(shift @ (through @ np.array(released)) - shift @ shift / 2)


_NEIGHBOURS = {
    "Gaussian": _Neighbours(gradient_release(FullBatch(), L2(1.0), Gaussian(1.0), 1.0), _on_a_line),
    "Gaussian on a Poisson sample": _Neighbours(
        gradient_release(Poisson(0.5), L2(1.0), Gaussian(1.0), 1.0), _on_a_line
    ),
    "Gaussian, correlated over four steps": _Neighbours(
        gradient_release(
            FixedOrder(_PARTS), L2(1.0), Correlated(1.5, Toeplitz((0.7, 0.5, 0.3)), _STEPS), 1.0
        ),
        _over_steps,
    ),
    "Laplace": _Neighbours(gradient_release(FullBatch(), L1(1.0), Laplace(1.0), 1.0), _on_a_line),
    "K-norm of the box": _Neighbours(gradient_release(FullBatch(), Box(1.0), KNorm(1.0), 1.0), _in_space),
    "Gumbel selection": _Neighbours(argmin_release(1.0, Gumbel(1.0)), _play_selection),
    "Laplace selection": _Neighbours(argmin_release(1.0, Laplace(1.0)), _play_selection),
}

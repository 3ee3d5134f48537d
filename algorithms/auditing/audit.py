"""An audit of one method: what it claims, what attacks found, and whether the claim is violated.

Two kinds of evidence. Attacks give a lower bound on epsilon at 95 %: many short runs with and without the worst record,
and one run with many canaries. Direct checks of the claim's parts find small faults that no attack would: the amount of
noise, how far one record moves a sum, how often it takes part, and whether coins and noise of different releases are
independent.

A claim is violated if one of these tests fails at a level of 1e-6, so that an honest method is accused about once in
ten thousand audits, for any seed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import attrs
import dp_accounting as dp
import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, chi2, gamma, norm

from algorithms.auditing import bounds
from algorithms.auditing.bounds import Guesses, Rates
from algorithms.auditing.game import (
    Answer,
    Game,
    Played,
    contribution,
    key_of,
    length_of,
    log_likelihood,
    play,
    whitening,
)
from algorithms.core.method import Plan
from algorithms.core.receipt import reserved_events
from algorithms.errors import RefusedError
from algorithms.gradients import Affine
from algorithms.privacy.accounting.epsilon import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    Accountant,
    Adjacency,
    adjacency_named,
    composed,
    epsilon,
    in_few_kinds,
)
from algorithms.privacy.accounting.event_rules import (
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    RenyiDpEvent,
    parts,
)
from algorithms.privacy.accounting.events import (
    CorrelatedDpEvent,
    CorrelatedStepDpEvent,
    Schedule,
    schedule_from_json,
)
from algorithms.privacy.accounting.risk import Profile, misses, profile, risk_profile
from algorithms.privacy.mechanisms.correlated import Correlated
from algorithms.privacy.mechanisms.mechanisms import (
    Cyclic,
    FullBatch,
    Gaussian,
    Laplace,
    Minimum,
    ObjectiveNoise,
    WithoutReplacement,
)

Array = NDArray[np.float64]
CONFIDENCE, ALARM = 0.95, 1e-6
_GRID, _CLEAR = 1e-3, 20.0
_ROOM = 1e-3
"""How far a record may move a sum beyond its bound, relative to the bound, because of rounding."""
_THRESHOLDS = np.linspace(0.02, 0.98, 49)


@dataclass(frozen=True)
class Check:
    """One direct check. claimed, seen: in the same unit. chance: probability of such a value if the claim is true."""

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
class Attack:
    """A lower bound on epsilon. found: at 95 %. chance: below 1e-6 if it refutes the claim, otherwise 1."""

    name: str
    found: float
    is_violated: bool
    detail: str


@dataclass(frozen=True)
class Curve:
    """The trade-off curve of the claim, and the attack's rates at thresholds that were not chosen from its scores."""

    alarms: tuple[float, ...]
    claimed: tuple[float, ...]
    seen: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Power:
    """What this audit would find with half of the claimed noise. caught: probability that it is detected. found: the
    epsilon that attacks would find.
    """

    caught: float
    found: float


@dataclass(frozen=True)
class Audit:
    """The result of an audit; `to_json` is the content of its file."""

    method: str
    settings: dict[str, Any]
    claimed: float
    delta: float
    attacks: tuple[Attack, ...]
    checks: tuple[Check, ...]
    curve: Curve
    power: Power
    runs: int
    canaries: int

    @property
    def found(self) -> float:
        """The largest lower bound on epsilon."""
        return max((attack.found for attack in self.attacks), default=0.0)

    @property
    def is_violated(self) -> bool:
        """Whether the claim is refuted."""
        return any(row.is_violated for row in self.attacks) or any(row.is_violated for row in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The audit as JSON values, with the verdict beside the evidence."""
        document = asdict(self)
        for name, rows in (("attacks", self.attacks), ("checks", self.checks)):
            document[name] = [asdict(row) | {"is_violated": row.is_violated} for row in rows]
        return document | {"found": self.found, "is_violated": self.is_violated}


def claim_of(plan: Plan) -> Profile:
    """The privacy profile that a plan claims."""
    return risk_profile(plan.filter, plan.schedule, plan.adjacency)


# The attacks.


def scores(game: Game, plan: Plan, seeds: Iterable[int]) -> Array:
    """Scores of pairs of runs without and with the record, shape [pairs, 2]; a game of one canary."""

    def score(seed: int, is_in: bool) -> float:
        coins, key = np.full(game.canaries, is_in), key_of(game.algorithm, "pairs", seed, is_in)
        return log_likelihood(game, plan, play(game, plan, coins, key).answers, 0, alone=True)

    found = [[score(seed, False), score(seed, True)] for seed in seeds]
    return np.array(found, dtype=np.float64).reshape(-1, 2)


def many_runs(
    found: Array, claimed: Callable[[float], Profile], cost: Callable[[float], float], delta: float
) -> Attack:
    """Evaluate pairs of scores, shape [pairs, 2], at two thresholds that were fixed in advance (0, half of epsilon).

    Args:
        found: Scores without and with the record.
        claimed: The profile as a function of a divisor of the noise; at 1 the claim.
        cost: Epsilon at `delta`, as a function of the same divisor.
        delta: Of the claim.

    The bound is that of the least leaky mechanism of the claim's own form, with its noise divided by some number, that
    is consistent with the errors (as in Nasr et al. 2023 for Gaussians); or that of any mechanism if it is larger.
    """

    def at(threshold: float, confidence: float) -> Rates:
        return bounds.rates(found[:, 0], found[:, 1], threshold, confidence=confidence)

    thresholds = (0.0, cost(1.0) / 2)
    seen, sure = (
        max((at(t, 1 - alarm / len(thresholds)) for t in thresholds), key=bounds.mu_of)
        for alarm in (1 - CONFIDENCE, ALARM)
    )
    leak = _least_leak(seen, claimed)
    least = max(bounds.epsilon_of(seen, delta), cost(leak) if leak > 0 else 0.0)
    is_violated = sure.misses < float(misses(claimed(1.0), sure.alarms))
    detail = f"{len(found)} pairs of runs: false alarms at most {seen.alarms:.3g}, misses at most {seen.misses:.3g}"
    return Attack("worst record, many runs", least, is_violated, detail)


@dataclass(frozen=True)
class OneRun:
    """A run in which each canary was included by a fair coin."""

    coins: NDArray[np.bool_]
    played: Played


def one_run(game: Game, plan: Plan, seed: int) -> OneRun:
    """Play the run with a seed."""
    coins = key_of("who is in", game.algorithm, seed).stream(0).coins(game.canaries, 0.5)
    return OneRun(coins, play(game, plan, coins, key_of("one run", game.algorithm, seed)))


def attacks_of(game: Game, plan: Plan, run: OneRun, claimed: Profile) -> list[Attack]:
    """The attacks on one run: by all answers, and by the released parameters alone."""
    canaries = range(game.canaries)
    white = np.array([log_likelihood(game, plan, run.played.answers, i, alone=False) for i in canaries])
    black = np.array([-float(run.played.released @ game.canary(i)) for i in canaries])
    return [
        _of_guesses(f"one run, {box} box", scored, run.coins, claimed, game.delta)
        for box, scored in (("white", white), ("black", black))
    ]


def _of_guesses(name: str, scored: Array, coins: NDArray[np.bool_], claimed: Profile, delta: float) -> Attack:
    """Guess heads for the highest quarter of scores and tails for the lowest; abstain on the rest."""
    quarter = max(1, len(scored) // 4)
    order = np.argsort(scored)
    right = int(coins[order[-quarter:]].sum() + (~coins[order[:quarter]]).sum())
    seen = Guesses(len(scored), 2 * quarter, right)
    plain = bounds.one_run_epsilon(seen, delta, confidence=CONFIDENCE)
    curved = bounds.one_run_gaussian_epsilon(seen, max(delta, 1e-12), confidence=CONFIDENCE)
    refuted = bounds.is_refuted(seen, bounds.inverse_of(claimed), confidence=1 - ALARM)
    detail = (
        f"{right} of {seen.made} guesses about {seen.canaries} canaries were right; epsilon {plain:.3g} for any"
        f" mechanism, {curved:.3g} for a trade-off like a Gaussian's"
    )
    return Attack(name, max(plain, curved), refuted, detail)


# The parts of the claim.


_LAWS: dict[type, tuple[tuple[type[dp.DpEvent], ...], Callable[[int], Any], int]] = {
    Gaussian: ((dp.GaussianDpEvent,), chi2, 2),
    Correlated: ((CorrelatedDpEvent, CorrelatedStepDpEvent), chi2, 2),
    ObjectiveNoise: ((ObjectivePerturbationDpEvent,), chi2, 2),
    Laplace: ((dp.LaplaceDpEvent,), gamma, 1),
}
"""By mechanism: its events, the law of the sum of its draws' powers, and which power."""


def noise_checks(game: Game, played: Played) -> list[Check]:
    """Check the amount of noise, in answers without contributions."""
    found = []
    for kind, (_event, law, power) in _LAWS.items():
        values = noise_of(game, played, kind)
        if not len(values):
            continue
        total = float((np.abs(values) ** power).sum())
        detail = f"{len(values)} draws of {kind.__name__} noise, over what the charged event says"
        seen = (total / len(values)) ** (1 / power)
        found.append(Check("noise", 1.0, seen, float(law(len(values)).cdf(total)), detail))
    return found


def noise_of(game: Game, played: Played, kind: type) -> Array:
    """All noise of one kind that is observed without contributions, in units of the charged noise; shape [draws]."""
    rows = [_residuals(game, *pair) for pair in _seen_alone(played) if type(pair[0].noise) is kind]
    return np.concatenate(rows) if rows else np.zeros(0)


def _seen_alone(played: Played) -> list[tuple[Answer, dp.DpEvent]]:
    """The answers in coordinates that no record moves, with their events; correlated noise is whitened."""
    pairs = zip(played.answers, played.events, strict=True)
    found = [(answer, event) for answer, event in pairs if answer.kind in ("gradient", "minimum")]
    if not found or not isinstance(found[0][1], CorrelatedDpEvent):
        return found
    through = whitening(found[0][1], len(found))
    values = through @ np.stack([answer.value for answer, _ in found])
    return [
        (replace(answer, value=value), event) for (answer, event), value in zip(found, values, strict=True)
    ]


def _residuals(game: Game, answer: Answer, event: dp.DpEvent) -> Array:
    charged, asked = charged_multiplier(event, type(answer.noise)), answer.noise.multiplier
    return answer.value[game.silent] / answer.scale * (1.0 if charged is None else asked / charged)


def charged_multiplier(event: dp.DpEvent, kind: type) -> float | None:
    """The noise multiplier that an event states; None for events without one."""
    if kind not in _LAWS:
        return None
    if isinstance(event, _LAWS[kind][0]):
        return float(event.noise_multiplier)
    found = (charged_multiplier(inner, kind) for inner in parts(event))
    return next((number for number in found if number is not None), None)


def reach_checks(game: Game, plan: Plan, seeds: Sequence[int]) -> list[Check]:
    """Check how far one record moves a sum, in units of the bound, and after how many steps it takes part again.

    From runs with and without the record, with the same coins and noise.
    """
    most, seen_at, nearest, parts = 0.0, 0, math.inf, 0
    moving: list[int]
    for seed in seeds:
        key = key_of("reach", game.algorithm, seed)
        with_it = play(game, plan, np.array([True]), key)
        is_sampled = any(not isinstance(answer.sampling, FullBatch) for answer in with_it.answers)
        without = play(game, plan, np.array([False]), key, blank=is_sampled)
        moving = []
        for place, (answer, other) in enumerate(zip(with_it.answers, without.answers, strict=False)):
            if answer.kind == "argmin" or not _same_question(answer, other):
                break
            moves_zeros = isinstance(answer.bound, Affine) and answer.bound.offset > 0
            if is_sampled and (moves_zeros or answer.kind in ("total", "norm count")):  # zeros count as well
                continue
            moved = answer.value - other.value
            limit = answer.bound.sensitivity
            if isinstance(answer.bound, Minimum):
                limit = min(answer.bound.clip_norm, answer.bound.input_norm) * (1 + _ROOM)
            distance = (
                length_of(moved, answer.bound) if answer.kind != "norms" else float(np.abs(moved).max())
            )
            most, seen_at = max(most, distance / limit), seen_at + bool(distance > 0)
            if isinstance(answer.sampling, Cyclic):
                parts, moving = answer.sampling.parts, [*moving, *([place] if distance > 0 else [])]
        nearest = min(nearest, *np.diff(moving).tolist(), math.inf)
    allowed = 2.0 if plan.adjacency == REPLACE_ONE.name else 1.0
    detail = f"bounds by which the record moved a sum, at most, in {seen_at} answers that it was in"
    found = [Check("reach of a record", allowed, most, 0.0 if most > allowed * (1 + _ROOM) else 1.0, detail)]
    if parts and math.isfinite(nearest):
        detail = "steps from one in which the record moved the sum to the next, at least"
        found.append(Check("steps between", parts, nearest, 0.0 if nearest < parts else 1.0, detail))
    return found


def _same_question(one: Answer, other: Answer) -> bool:
    if isinstance(one.bound, Affine) and isinstance(other.bound, Affine):
        same = (one.bound.shift == other.bound.shift).all() and (one.bound.scale == other.bound.scale).all()
        return bool(same) and one.noise == other.noise
    return bool(
        (one.kind, one.sampling, one.bound, one.noise)
        == (other.kind, other.sampling, other.bound, other.noise)
    )


def coin_checks(game: Game, plan: Plan, run: OneRun) -> list[Check]:
    """Check how often canaries take part, and whether the coins and noise of two answers are independent."""
    inside = np.flatnonzero(run.coins)
    rows, rates, are_independent = [], [], True
    for answer in run.played.answers:
        if answer.kind not in ("gradient", "minimum"):
            continue
        are_independent = are_independent and not isinstance(answer.sampling, Cyclic)
        if isinstance(answer.sampling, FullBatch | WithoutReplacement) or isinstance(answer.bound, Minimum):
            continue
        projected = [_part(game, answer, int(i)) for i in inside]
        rows.append(np.array(projected))
        rates.append(answer.sampling.rate)
    noise = [answer.value[game.silent] / answer.scale for answer, _ in _seen_alone(run.played)]
    found: list[Check] = []
    if rows:
        seen, claimed = np.concatenate(rows), np.repeat(rates, len(inside))
        score = float((seen - claimed).mean() / (seen - claimed).std() * math.sqrt(len(seen)))
        detail = "how often a canary is in a sum; the noise averages out"
        found.append(
            Check("sampling rate", float(np.mean(rates)), float(seen.mean()), float(norm.sf(score)), detail)
        )
        if are_independent:
            centred = [row - rate for row, rate in zip(rows, rates, strict=True)]
            found.append(
                _dependence("coins of two releases", centred, "canaries that are in both or in neither")
            )
    if len(noise) > 1:
        found.append(_dependence("noise of two releases", noise, "noise where nothing else is"))
    return found


def _part(game: Game, answer: Answer, canary: int) -> float:
    """A noisy estimate of whether a canary is in a sum."""
    whole = contribution(game, answer, game.canary(canary))
    assert whole is not None
    support = np.abs(game.canary(canary)) > 0
    return float(answer.value[support] @ whole[support] / (whole[support] @ whole[support]))


def _dependence(name: str, rows: Sequence[Array], detail: str) -> Check:
    """The most dependent pair of releases; the probability is corrected for the number of pairs."""
    strongest, pairs = 0.0, list(combinations(range(len(rows)), 2))
    for one, other in pairs:
        products = (rows[one] - rows[one].mean()) * (rows[other] - rows[other].mean())
        spread = float(rows[one].std() * rows[other].std())
        if spread > 0:
            strongest = max(strongest, float(products.mean()) / spread, key=abs)
    inside = max(-1 + 1e-15, min(1 - 1e-15, strongest))
    score = abs(math.atanh(inside)) * math.sqrt(max(1, len(rows[0]) - 3))  # Fisher's transform
    chance = min(1.0, 2 * float(norm.sf(score)) * max(1, len(pairs)))
    return Check(name, 0.0, strongest, chance, f"correlation over {detail}")


# What a bug would have shown.


def leaking(schedule: Schedule, leak: float) -> list[tuple[dp.DpEvent, int]]:
    """The events with their noise divided by `leak`."""
    return [(_leaking(event, leak), count) for event, count in schedule]


def _leaking(event: dp.DpEvent, leak: float) -> dp.DpEvent:
    match event:
        case dp.GaussianDpEvent() | dp.LaplaceDpEvent():
            return type(event)(event.noise_multiplier / leak)
        case ObjectivePerturbationDpEvent() | CorrelatedDpEvent() | CorrelatedStepDpEvent():
            return attrs.evolve(event, noise_multiplier=event.noise_multiplier / leak)
        case PureDpEvent():
            return PureDpEvent(event.epsilon * leak)
        case dp.dp_event.ZCDpEvent():
            return dp.dp_event.ZCDpEvent(event.rho * leak**2, event.xi)
        case RenyiDpEvent():
            return RenyiDpEvent(event.order, event.bound * leak**2)
        case dp.ComposedDpEvent():
            return dp.ComposedDpEvent([_leaking(inner, leak) for inner in event.events])
    if parts(event):
        return attrs.evolve(event, event=_leaking(event.event, leak))
    raise RefusedError(f"the noise of {event} cannot be divided; audit another method.")


Family = tuple[Callable[[float], Profile], Callable[[float], float]]
"""The profile and the epsilon of a claim, as functions of a divisor of its noise."""


def family(plan: Plan) -> Family:
    """The family of a plan; at 1 it is the plan's claim."""
    schedule, relation = schedule_from_json(reserved_events(plan)), adjacency_named(plan.adjacency)
    delta = plan.target.budget.delta
    return family_of(schedule, delta, accountant=plan.accountant, relation=relation, claimed=claim_of(plan))


def family_of(
    schedule: Schedule,
    delta: float,
    *,
    accountant: Accountant,
    relation: Adjacency = ADD_OR_REMOVE_ONE,
    claimed: Profile | None = None,
) -> Family:
    """The family of a schedule. claimed: its profile, if it is known."""
    known = {1.0: claimed or profile(schedule, adjacency=relation)}

    def at(leak: float) -> Profile:
        if leak not in known:
            known[leak] = _coarse_profile(leaking(schedule, leak), relation)
        return known[leak]

    def cost(leak: float) -> float:
        coarse = _GRID if accountant == "pld" else None
        of = in_few_kinds(leaking(schedule, leak))
        return epsilon(of, delta, accountant=accountant, adjacency=relation, discretisation=coarse)

    return at, cost


def _coarse_profile(schedule: Schedule, relation: Adjacency) -> Profile:
    """`profile` on a coarser grid: faster, and still an upper bound on delta, which lowers the attack's bound."""
    few = in_few_kinds(schedule)
    try:
        found = composed(few, _GRID, relation)
    except RefusedError:
        return profile(schedule, adjacency=relation)
    epsilons = np.linspace(0.0, min(max(float(found.get_epsilon_for_delta(1e-9)), 1e-6), 100.0), 300)
    return Profile(epsilons, np.clip(np.asarray(found.get_delta_for_epsilon(epsilons)), 0.0, 1.0))


def power_of(
    draws: int, pairs: int, claimed: Callable[[float], Profile], cost: Callable[[float], float]
) -> Power:
    """What the audit would find with half of the noise, by its trade-off curve.

    draws: number of observed noise values. pairs: number of counted pairs of runs.
    """
    caught = float(chi2(draws).cdf(4 * chi2(draws).ppf(ALARM))) if draws else 0.0
    best = Rates(1.0, 1.0)
    for alarms in np.geomspace(1e-3, 0.5, 25):
        missed = float(misses(claimed(2.0), alarms))
        best = max(best, _expected(alarms, missed, pairs, CONFIDENCE), key=bounds.mu_of)
        sure = _expected(alarms, missed, pairs, 1 - ALARM)
        if sure.misses < float(misses(claimed(1.0), sure.alarms)):
            caught = max(caught, 0.5)  # of what is usual: as often more is seen as less
    leak = _least_leak(best, claimed)
    return Power(caught, cost(leak) if leak > 0 else 0.0)


def _expected(alarms: float, missed: float, pairs: int, confidence: float) -> Rates:
    each = 1 - (1 - confidence) / 2
    high = [
        bounds.upper_rate(int(binom.median(pairs, rate)), pairs, confidence=each) for rate in (alarms, missed)
    ]
    return Rates(*high)


def _least_leak(seen: Rates, claimed: Callable[[float], Profile]) -> float:
    """The smallest divisor of the noise with which a claim is consistent with the errors."""
    low, high = 0.0, 4.0
    while high - low > 0.01 and seen.alarms + seen.misses < 1:
        middle = (low + high) / 2
        agrees = seen.misses >= float(misses(claimed(middle), seen.alarms))
        low, high = (low, middle) if agrees else (middle, high)
    return low


def curve_of(found: Array, claimed: Profile) -> Curve:
    """The claimed trade-off curve, and the observed rates at all thresholds."""
    alarms = np.linspace(0.0, 1.0, 101)
    thresholds = np.quantile(found, _THRESHOLDS)
    seen = tuple((float((found[:, 0] >= t).mean()), float((found[:, 1] < t).mean())) for t in thresholds)
    return Curve(tuple(alarms.tolist()), tuple(misses(claimed, alarms).tolist()), seen)


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
    checks = noise_checks(wide, run.played)
    draws = sum(len(noise_of(wide, run.played, kind)) for kind in _LAWS)
    checks += reach_checks(game, plan, range(seed * 8, seed * 8 + 8))
    clear, clear_plan = _with_little_noise(wide, wide_plan)
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


def _with_little_noise(game: Game, plan: Plan) -> tuple[Game, Plan]:
    """The same game at an epsilon so large that coins are visible through the noise; unchanged if that is refused."""
    clear = replace(game, epsilon=max(game.epsilon, _CLEAR), accountant="rdp")
    try:
        return clear, clear.plan()
    except RefusedError:
        return game, plan

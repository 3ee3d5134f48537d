"""An audit of one method: what it claims, what attacks found, whether the claim is violated.

Two kinds of evidence. Attacks give a lower bound on epsilon at 95 %: many short runs with and without the worst record,
and one run with many canaries. The direct checks of `checks` find small faults that no attack would.

A claim is violated if one of these tests fails at a level of 1e-6, so that an honest method is accused about once in
ten thousand audits, for any seed.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from algorithms.auditing.bounds import (
    Attack,
    Power,
    TradeOffCurve,
    by_guesses,
    claim_of,
    curve_of,
    family,
    many_runs,
    power_of,
)
from algorithms.auditing.checks import LAWS, AuditCheck, coin_checks, noise_checks, noise_of, reach_checks
from algorithms.auditing.game import Game, GameTranscript, key_of, play
from algorithms.auditing.likelihood import log_likelihood
from algorithms.core.plan import Plan
from algorithms.errors import RefusedError
from algorithms.privacy.accounting.risk import Profile

Array = NDArray[np.float64]
_COIN_CHECK_EPSILON = 20.0
"""The epsilon at which coins are checked: noise is then so small that it shows which canaries are in a sum."""


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
    draws = sum(len(noise_of(wide, run, kind)) for kind in LAWS)
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

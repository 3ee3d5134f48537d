"""python -m tests.soak.accounting: thousands of random settings, their epsilons against exact ones and bounds.

Each setting is a rate from 1e-7 to 1, up to a million steps, an epsilon from 0.001 to 100 and a delta from 1e-11 (1e-15
without sampling), for one record or for several of a person; every fourth has 2 to 24 kinds of rare samples. Noise is
calibrated to the epsilon, and what the noise costs is compared with the exact epsilon of `tests.support.exact_losses`
where two lines of its integral agree, and else with what one test of the outputs tells, or with
`tests.support.rare_losses`. Nothing may be below; nothing may be above the exact one by more than a thousandth or 1e-4,
whichever is larger.
"""

import random
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import dp_accounting as dp
import numpy as np
import typer
from scipy.stats import binom, norm

from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import epsilon, group_privacy
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.accounting.noise_search import calibrate
from tests.support.exact_losses import exact_epsilon
from tests.support.rare_losses import rare_lower_bound

_ROUNDING = 1e-7


@dataclass(frozen=True)
class Setting:
    """One run: `count` records of a person, sampled at `rate` in each of `steps`."""

    rate: float
    steps: int
    target: float
    delta: float
    count: int

    @classmethod
    def draw(cls, chance: random.Random) -> "Setting":
        rate = 1.0 if chance.random() < 0.1 else 10 ** chance.uniform(-7, 0)
        return cls(
            rate,
            round(10 ** chance.uniform(0, 6)),
            10 ** chance.uniform(-3, 2),
            10 ** chance.uniform(-15 if rate == 1 else -11, -3),
            chance.choice([1, 1, 1, 1, 2, 4, 16]) if rate < 1 else 1,
        )

    def schedule(self, multiplier: float) -> Schedule:
        noise = dp.GaussianDpEvent(multiplier)
        event = noise if self.rate == 1 else dp.PoissonSampledDpEvent(self.rate, noise)
        return [(group_privacy(event, self.count), self.steps)]


@dataclass(frozen=True)
class Mixture:
    """One run of rare samples: rates, noise in shares of the run's multiplier, and counts of its kinds of steps."""

    kinds: tuple[tuple[float, float, int], ...]
    target: float
    delta: float

    @classmethod
    def draw(cls, chance: random.Random) -> "Mixture":
        kinds = [
            (10 ** chance.uniform(-7, -3), 10 ** chance.uniform(-0.7, 0.7), round(10 ** chance.uniform(0, 5)))
            for _ in range(chance.choice([2, 3, 4, 8, 24]))
        ]
        often = sum(rate * count for rate, _, count in kinds)
        delta = min(1e-3, max(1e-11, often * 10 ** chance.uniform(-4, -0.3)))
        return cls(tuple(kinds), 10 ** chance.uniform(-3, 1), delta)

    def schedule(self, multiplier: float) -> Schedule:
        return [
            (dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(share * multiplier)), count)
            for rate, share, count in self.kinds
        ]


def exact_or_none(setting: Setting | Mixture, multiplier: float) -> float | None:
    """The exact epsilon, or None where the integral cannot be trusted, as where rare samples decide."""
    if (
        isinstance(setting, Mixture)
        or setting.steps < 100
        or (multiplier < 0.8 and setting.rate < 1e-3)
        or setting.rate < 3e-4
    ):
        return None
    try:
        return exact_epsilon(setting.rate, multiplier, setting.steps, setting.delta, count=setting.count)
    except (ValueError, RuntimeError, FloatingPointError, OverflowError, MemoryError):
        return None


def lower_bound(setting: Setting | Mixture, multiplier: float) -> float:
    """What one test of the outputs tells: whether at least k of the steps' sums along the record exceed a threshold.

    Of any event, P <= exp(epsilon) Q + delta. Of a mixture, what the steps that stand out tell.
    """
    if isinstance(setting, Mixture):
        kinds = [(rate, share * multiplier, count) for rate, share, count in setting.kinds]
        return rare_lower_bound(kinds, setting.delta, setting.target)
    thresholds = np.linspace(-2.0, setting.count / multiplier + 40.0, 4000)
    numbers = np.arange(setting.count + 1)
    chances = binom.pmf(numbers, setting.count, setting.rate)
    under_q = norm.sf(thresholds)
    under_p = norm.sf(thresholds - numbers[:, None] / multiplier).T @ chances
    best = 0.0
    for k in (1, 2, 3, 5, 8, 13):
        for first, second in ((under_p, under_q), (under_q, under_p)):
            p = binom.sf(k - 1, setting.steps, first) - setting.delta
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = np.log(p / binom.sf(k - 1, setting.steps, second))
            best = max(best, float(np.max(ratios[np.isfinite(ratios) & (p > 1e-300)], initial=0.0)))
    return best


def main(
    count: Annotated[int, typer.Option(help="How many settings.")] = 3000,
    seed: Annotated[int, typer.Option()] = 1,
    minutes: Annotated[float, typer.Option(help="Of processor time, at most.")] = 60.0,
) -> None:
    """Try random settings, and say what is wrong with any."""
    warnings.simplefilter("ignore")
    chance, tally, seconds, above, begun = (
        random.Random(seed),
        Counter[str](),
        [0.0],
        0.0,
        time.process_time(),
    )
    for number in range(count):
        if time.process_time() - begun > 60 * minutes:
            break
        setting = Mixture.draw(chance) if number % 4 == 3 else Setting.draw(chance)
        start = time.process_time()
        multiplier = calibrate(setting.schedule, Budget(setting.target, setting.delta))
        seconds.append(time.process_time() - start)
        if seconds[-1] > 1:
            typer.echo(f"{number}: {setting}, noise {multiplier!r} took {seconds[-1]:.1f} s")
        stated = epsilon(setting.schedule(multiplier), setting.delta)
        exact = exact_or_none(setting, multiplier)
        wrong = []
        if stated > setting.target:
            wrong.append("costs more than was asked for")
        if stated < 0.999 * setting.target - 1e-4 and multiplier > 2e-6:
            tally["with less than the target"] += 1
        if exact is not None:
            tally["beside an exact one"] += 1
            if stated < exact * (1 - _ROUNDING) - 1e-9:
                wrong.append(f"below the exact {exact:.9g}")
            if stated > max(exact * 1.001, exact + 1e-4):
                wrong.append(f"above the exact {exact:.9g}")
            above = max(above, min(stated / max(exact, 1e-300) - 1, (stated - exact) * 10))
        else:
            bound = lower_bound(setting, multiplier)
            tally["beside a lower bound"] += 1
            tally["of these within a tenth"] += bound > 0.9 * stated
            if stated < bound * (1 - _ROUNDING) - 1e-9:
                wrong.append(f"below the bound {bound:.9g}")
        if wrong:
            tally["wrong"] += 1
            typer.echo(f"{number}: {setting}, noise {multiplier!r}, stated {stated:.9g}: {', '.join(wrong)}")
    slow = sum(one > 1 for one in seconds)
    typer.echo(f"{len(seconds) - 1} settings by seed {seed}: {dict(tally)}; at most {above:.1e} above")
    typer.echo(f"noise took {max(seconds):.1f} s at most, and more than a second for {slow}")
    if tally["wrong"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

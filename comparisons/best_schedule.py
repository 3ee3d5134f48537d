"""Which public schedule disturbs the parameters least at equal epsilon: `python -m comparisons.best_schedule FOLDER`.

Step t of length l_t = eta_t C_t, learning rate times clip norm, at sampling rate q_t and noise multiplier z_t, puts
noise of variance (l_t z_t / (q_t n))^2 into each parameter. If it cost q_t^2 (exp(c / z_t^2) - 1), the sums of both
would be least where 1 / z_t^2 = (2 / c) W(s l_t / q_t^2), with Lambert's W and one s for all steps: for much noise that
is the paper's z_t^2 ~ 1 / l_t, for little noise it is flatter. So schedules of noise, clip norms and batch sizes are
one problem. By PLD a step costs otherwise: each schedule is calibrated to epsilon by PLD, and the better of two c is
taken. Nothing is trained and no record is read.

Batch sizes: for as many gradients in all, q_t ~ l_t^(2/3) is where the cost above is stationary for much noise. The
variance of sampling is left out.
"""

from pathlib import Path
from typing import Annotated

import dp_accounting as dp
import numpy as np
import pandas as pd
import typer
from scipy.special import lambertw

from algorithms.methods.noise_schedules import Decay
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import Array
from algorithms.privacy.accounting.noise_search import calibrate, in_levels
from comparisons.noise_power import BATCH, DELTA, EPSILONS, STEPS

RATE = BATCH / 50_000
SHARPNESS = (1.0, 3.0)
"""c: how fast the cost of a step is taken to grow as its noise falls."""
ROUNDS = 3
"""How often s follows what the last schedule has cost."""
SCHEDULES = ("constant", "paper", "best", "best, batches too")


def best_multipliers(lengths: Array, rates: Array, scale: float, *, sharpness: float = 1.0) -> Array:
    """z_t for each step, from s = `scale` and c = `sharpness`; shape [steps]."""
    return np.asarray((2.0 / sharpness * lambertw(scale * lengths / rates**2).real) ** -0.5)


def factor_at(multipliers: Array, rates: Array, epsilon: float) -> float:
    """What `multipliers` have to be multiplied by to cost epsilon, where both change in at most 24 levels."""
    values, counts = in_levels(multipliers)
    ends = np.cumsum(counts)
    means = [float(part.mean()) for part in np.split(rates, ends[:-1])]

    def schedule(factor: float) -> list[tuple[dp.DpEvent, int]]:
        return [
            (dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(factor * value)), int(count))
            for rate, value, count in zip(means, values, counts, strict=True)
        ]

    return calibrate(schedule, Budget(epsilon, DELTA))


def disturbance(schedule: str, epsilon: float, *, steps: int = STEPS) -> float:
    """The root of sum (l_t z_t / q_t)^2 for steps 1 / sqrt(20 + t), with the noise that costs epsilon."""
    lengths = Decay().factors(steps)
    rates = np.full(steps, RATE)
    if schedule == "best, batches too":
        rates = RATE * lengths ** (2 / 3) / (lengths ** (2 / 3)).mean()
    if schedule in ("constant", "paper"):
        candidates = [np.ones(steps) if schedule == "constant" else lengths**-0.5]
    else:
        candidates = [best_at(lengths, rates, epsilon, sharpness) for sharpness in SHARPNESS]
    noises = [multipliers * factor_at(multipliers, rates, epsilon) for multipliers in candidates]
    return min(float(np.sqrt(np.sum((lengths * noise / rates) ** 2))) for noise in noises)


def best_at(lengths: Array, rates: Array, epsilon: float, sharpness: float) -> Array:
    """The multipliers of `best_multipliers` at about the s that costs epsilon."""
    scale = 0.5 * RATE**2 / float(lengths.mean())
    for _ in range(ROUNDS):
        multipliers = best_multipliers(lengths, rates, scale, sharpness=sharpness)
        scale /= factor_at(multipliers, rates, epsilon) ** 2
    return best_multipliers(lengths, rates, scale, sharpness=sharpness)


def main(
    folder: Annotated[Path, typer.Argument(help="Where best-schedule.csv goes; made if it is not there.")],
    steps: Annotated[int, typer.Option(help="How many steps; the paper has 11,760.")] = STEPS,
) -> None:
    """Compare the best schedules of noise and batch sizes with constant and the paper's noise."""
    rows = []
    for epsilon in EPSILONS:
        disturbances = {schedule: disturbance(schedule, epsilon, steps=steps) for schedule in SCHEDULES}
        rows += [
            {"epsilon": epsilon, "schedule": name, "relative": round(value / disturbances["constant"], 4)}
            for name, value in disturbances.items()
        ]
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / "best-schedule.csv", index=False)


if __name__ == "__main__":
    typer.run(main)

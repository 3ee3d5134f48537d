"""Which noise schedule disturbs the parameters least at equal epsilon: `python -m comparisons.noise_power FOLDER`.

ADP-SGD's alpha_t^2 ~ 1 / eta_t minimises the noise that steps put into the parameters, sum eta_t^2 alpha_t^2, where the
cost of privacy is sum 1 / alpha_t^2. With sampling it is not. Here alpha_t^2 ~ eta_t^(-p), each schedule calibrated to
the same epsilon by PLD: p = 0 is DP-SGD's constant noise, p = 1 the paper's. Nothing is trained and no record is read.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from algorithms.core.minibatch import batches, plan_noise_schedule
from algorithms.core.plan import Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.methods.noise_schedules import Decay
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.noise_search import in_levels

FACTS = PlanningFacts(50_000, 1, 1, 10)
BATCH, STEPS, DELTA = 256, 11_760, 1e-5
EPSILONS = (0.176, 0.379, 0.838, 2.09)
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)


def disturbance(power: float, epsilon: float, *, steps: int = STEPS) -> float:
    """The root of sum eta_t^2 z_t^2 for steps 1 / sqrt(20 + t), with the noise multipliers z_t that are planned."""
    factors = Decay().factors(steps)
    plan = plan_noise_schedule(
        factors ** (-power / 2.0),
        sampled=batches(FACTS, expected_batch_size=BATCH, sampling_rate=None),
        clip_norm=1.0,
        target=Target(Budget(epsilon, DELTA)),
        facts=FACTS,
    )
    values, counts = in_levels(factors ** (-power / 2.0))
    noise = plan.noise_multiplier * np.repeat(values, counts.astype(np.int64))
    return float(np.sqrt(np.sum((factors * noise) ** 2)))


def main(
    folder: Annotated[Path, typer.Argument(help="Where noise-power.csv goes; made if it is not there.")],
    steps: Annotated[int, typer.Option(help="How many steps; the paper has 11,760.")] = STEPS,
) -> None:
    """Compare noise schedules at equal epsilon."""
    rows = []
    for epsilon in EPSILONS:
        constant = disturbance(0.0, epsilon, steps=steps)
        for power in POWERS:
            relative = 1.0 if power == 0.0 else disturbance(power, epsilon, steps=steps) / constant
            rows.append({"epsilon": epsilon, "power": power, "relative": round(relative, 4)})
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / "noise-power.csv", index=False)


if __name__ == "__main__":
    typer.run(main)

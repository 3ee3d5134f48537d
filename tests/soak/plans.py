"""python -m tests.soak.plans: random plans of methods, and what they cost beside exact epsilons and lower bounds.

Methods with their own settings, a rate from 1e-7 to 1, up to a million steps, an epsilon from 0.001 to 100 and a delta
from 1e-11 to 1e-5; half of them count their records first. Of what is planned, normal noise without sampling has a
closed form, and samples have `tests.support.exact_losses` where two lines of its integral agree, else what one test of
the outputs tells. Nothing may be below, nor above an exact epsilon by more than a thousandth or 1e-4.
"""

import math
import random
import time
import warnings
from collections import Counter
from typing import Annotated, Any

import dp_accounting as dp
import numpy as np
import typer
from scipy.optimize import brentq
from scipy.stats import binom, norm

from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import Inputs, PlanningFacts
from algorithms.errors import RefusedError
from algorithms.methods import from_settings
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.events import unroll
from tests.support.bench import small_model
from tests.support.exact_losses import exact_epsilon_of_kinds

_METHODS = (
    *("dp_sgd", "adaclip", "dp_sgd_decay", "adp_sgd", "norm_bound_sgd", "matrix_factorisation"),
    *("dp_ftrl", "dpis", "heavy_ball", "nesterov", "dp_gd"),
)
_MAX_CORRELATED_STEPS, _MAX_KINDS, _ROUNDING = 50_000, 3, 1e-7

Kinds = list[tuple[float, float, int]]
"""Rates, multipliers and numbers of steps."""


def draw(chance: random.Random) -> tuple[dict[str, Any], PlanningFacts, Budget]:
    """Settings of a method, what is public, and a target."""
    name, rate, steps = (
        chance.choice(_METHODS),
        10 ** chance.uniform(-7, 0),
        round(10 ** chance.uniform(0, 6)),
    )
    settings: dict[str, Any] = {"name": name, "steps": steps, "sampling_rate": rate}
    records = None
    if name in ("heavy_ball", "nesterov", "dp_gd") or chance.random() < 0.5:
        batch = round(10 ** chance.uniform(0, 3))
        records = max(batch, round(batch / rate))
        del settings["sampling_rate"]
        settings["expected_batch_size"] = batch
    if name in ("heavy_ball", "nesterov", "dp_gd"):
        del settings["expected_batch_size"]
    if name in ("heavy_ball", "nesterov"):
        settings["adjacency"] = chance.choice(["REPLACE_ONE", "ADD_OR_REMOVE_ONE"])
    elif name == "dp_sgd_decay":
        settings |= {"form": chance.choice(["exponential", "time", "step"]), "rate": chance.uniform(0, 0.2)}
    elif name == "adp_sgd":
        settings["decay"] = {"form": chance.choice(["polynomial", "linear_in_sqrt", "constant"])}
    elif name == "dpis":
        del settings["steps"]
        settings |= {
            "epochs": round(10 ** chance.uniform(0, 2)),
            "public_norms": [1.0, 0.5],
            "oversampling": 1,
        }
    elif name in ("matrix_factorisation", "dp_ftrl"):
        settings["steps"] = min(steps, _MAX_CORRELATED_STEPS)
        if name == "matrix_factorisation":
            settings["participation"] = chance.choice(["cyclic_poisson", "fixed_order"])
    model = small_model("softmax")
    facts = PlanningFacts(
        records, model.parameter_count, len(model.layers), 3, Inputs(17.0, math.sqrt(17.0)), model.bounds
    )
    return settings, facts, Budget(10 ** chance.uniform(-3, 2), 10 ** chance.uniform(-11, -5))


def kinds_of(plan: Plan, moves: float) -> Kinds:
    """What is planned, in units of how far neighbouring sums lie apart; raises KeyError for other events."""
    counts = Counter[tuple[float, float]]()
    for event, count in unroll(plan.schedule):
        if isinstance(event, dp.GaussianDpEvent):
            counts[1.0, event.noise_multiplier / moves] += count
        elif isinstance(event, dp.PoissonSampledDpEvent) and moves == 1:
            counts[event.sampling_probability, event.event.noise_multiplier] += count
        elif not isinstance(event, dp.NoOpDpEvent):
            raise KeyError(type(event).__name__)
    return [(rate, multiplier, count) for (rate, multiplier), count in counts.items()]


def exact_or_none(kinds: Kinds, delta: float) -> float | None:
    """The exact epsilon; None where the integral cannot be trusted, and of too many kinds."""
    if all(rate == 1 for rate, _, _ in kinds):
        mu = math.sqrt(math.fsum(count / z**2 for _, z, count in kinds))

        def excess(epsilon: float) -> float:
            far = norm.logsf(mu / 2 + epsilon / mu) + epsilon
            return float(
                norm.logsf(epsilon / mu - mu / 2) + np.log1p(-np.exp(far - norm.logsf(epsilon / mu - mu / 2)))
            ) - math.log(delta)

        return float(brentq(excess, 1e-12, mu * mu / 2 + 40 * mu, xtol=1e-15)) if excess(1e-12) > 0 else 0.0
    if any(rate == 1 for rate, _, _ in kinds) or len(kinds) > _MAX_KINDS or sum(n for *_, n in kinds) < 100:
        return None
    try:
        return exact_epsilon_of_kinds(kinds, delta)
    except (ValueError, RuntimeError, FloatingPointError, OverflowError, MemoryError):
        return None


def lower_bound(kinds: Kinds, delta: float) -> float:
    """What one test of the outputs of one kind tells: whether at least k steps are above a threshold."""
    best = 0.0
    for rate, z, count in kinds:
        thresholds = np.linspace(-2.0, 1 / z + 40.0, 4000)
        under_q = norm.sf(thresholds)
        under_p = (1 - rate) * under_q + rate * norm.sf(thresholds - 1 / z)
        for k in (1, 2, 3, 5, 8, 13):
            for first, second in ((under_p, under_q), (under_q, under_p)):
                p = binom.sf(k - 1, count, first) - delta
                with np.errstate(divide="ignore", invalid="ignore"):
                    ratios = np.log(p / binom.sf(k - 1, count, second))
                best = max(best, float(np.max(ratios[np.isfinite(ratios) & (p > 1e-300)], initial=0.0)))
    return best


def main(
    count: Annotated[int, typer.Option(help="How many plans.")] = 1000,
    seed: Annotated[int, typer.Option()] = 1,
    minutes: Annotated[float, typer.Option(help="Of processor time, at most.")] = 30.0,
) -> None:
    """Plan random runs, and say what is wrong with any."""
    warnings.simplefilter("ignore")
    chance, tally, slowest, above = random.Random(seed), Counter[str](), 0.0, 0.0
    begun = time.process_time()
    for number in range(count):
        if time.process_time() - begun > 60 * minutes:
            break
        settings, facts, target = draw(chance)
        start = time.process_time()
        try:
            method = from_settings(settings)
            plan = method.plan(Target(target, count_noise=max(100.0, 100.0 / target.epsilon)), facts)
        except RefusedError as refusal:
            tally[f"refused: {refusal.code}"] += 1
            continue
        slowest = max(slowest, time.process_time() - start)
        stated = plan.epsilon["pld"]
        kinds = kinds_of(plan, 2.0 if settings.get("adjacency") == "REPLACE_ONE" else 1.0)
        exact = exact_or_none(kinds, target.delta)
        bound = lower_bound(kinds, target.delta) if exact is None else exact
        tally["beside a lower bound" if exact is None else "beside an exact one"] += 1
        if exact is not None:
            above = max(above, min(stated / max(exact, 1e-300) - 1, (stated - exact) * 10))
        is_above = exact is not None and stated > max(exact * 1.001, exact + 1e-4)
        if stated < bound * (1 - _ROUNDING) - 1e-9 or stated > target.epsilon or is_above:
            tally["wrong"] += 1
            typer.echo(
                f"{number}: {settings}, {facts.records} records, {target}: {stated!r} beside {bound!r}"
            )
    typer.echo(f"seed {seed}: {dict(tally)}; at most {above:.1e} above; a plan took {slowest:.1f} s at most")
    if tally["wrong"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

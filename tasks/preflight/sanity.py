"""Warnings about settings with which a run will hardly give a useful model; a budget that buys only noise is spent.

They are judged only by public values: the plan, the settings, and the number of records or its bound on the data card.
The limits are far beyond useful settings; the numbers behind them are in docs/results/defaults.md.
"""

import math
from pathlib import Path

from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.plan import Plan
from algorithms.privacy.accounting.epsilon import adjacency_named, rare_reading_chance
from data import DatasetInfo
from data.card import card_names, data_card
from tasks.config.params import Params

MIN_SIGNAL = 1.0
"""The required ratio of the sum of all clipped gradients, if all are equal, to the total noise on it."""
MAX_STEP = 1000.0
"""How far one step may move the parameters, including momentum. The usual settings: 3 by noise, 80 by gradients."""
MIN_DISTANCE = 0.01
"""How far all steps together must be able to move the parameters. The usual settings can go 10 to 10,000."""


def sanity_warnings(settings: Params, plan: Plan, records: int | None) -> list[str]:
    """Reasons why the run will hardly give a useful model, each as a clause that says what to change.

    records: the number of records, or a bound on it; None if nothing is known.
    """
    update = getattr(settings.algorithm, "update", None)
    warnings = [_epsilon_warning(plan, records, update), _delta_warning(plan)]
    if isinstance(update, OptimizerConfig):
        warnings += _learning_rate_warnings(
            update, plan, getattr(settings.algorithm, "clip_norm", 1.0), records
        )
    return [warning for warning in warnings if warning]


def _epsilon_warning(plan: Plan, records: int | None, update: object) -> str | None:
    """Doubt a run whose noise exceeds its signal.

    A Gaussian release with noise multiplier sqrt(2 log(1.25 / delta)) / epsilon costs about (epsilon, delta), however
    it is divided into steps. If parameters are released, the noise has a component for each parameter; under a noise
    limit, which is for records of a known length, what a model says of a record has one for each output.
    """
    budget, (count, of_what) = plan.target.budget, _what_has_noise(plan, update)
    if records is None or math.isinf(plan.cost.epsilon):
        return None
    noise = math.sqrt(2 * math.log(1.25 / budget.delta)) if budget.delta else 1.0
    signal = records * budget.epsilon / (noise * math.sqrt(count))
    if signal >= MIN_SIGNAL:
        return None
    return (
        f"at epsilon {budget.epsilon:.3g} the noise is {1 / signal:,.3g} times as large as all that {records:,} records"
        f" can say about {count:,} {of_what}{'s' * (count > 1)} (raise privacy.epsilon, or take a smaller model)"
    )


def _delta_warning(plan: Plan) -> str | None:
    """Doubt a run that keeps its promise mostly because it hardly reads a record."""
    delta = plan.target.budget.delta
    chance = rare_reading_chance(plan.reserved_schedule, delta, adjacency_named(plan.adjacency))
    if chance is None:
        return None
    return (
        f"delta, {delta:g}, is not negligible beside the chance that a record is read at all, {chance:.2g}, so that"
        " noise hardly protects a record that is read (lower privacy.delta, or take more steps or larger batches)"
    )


def _what_has_noise(plan: Plan, update: object) -> tuple[int, str]:
    if isinstance(update, OptimizerConfig) and update.noise_limit is not None:
        return plan.facts.classes, "output"
    return (1 if update is None else plan.facts.parameters), "parameter"


def _learning_rate_warnings(
    update: OptimizerConfig, plan: Plan, clip_norm: float, records: int | None
) -> list[str]:
    parameters = plan.facts.parameters
    batch = plan.divisor or plan.sampling_rate * (records or math.inf)
    if update.optimizer == "adam":  # a step of about the learning rate in each coordinate, for any gradient
        gradient = longest = update.learning_rate * math.sqrt(parameters)
    else:
        lowered = update.factor_for((plan.fixed_noise or 0.0) * clip_norm / batch, plan.steps)
        rate = lowered * update.learning_rate / (1 - update.momentum)
        gradient = rate * clip_norm
        longest = gradient * max(1.0, (plan.fixed_noise or 0.0) * math.sqrt(parameters) / batch)
    distance = gradient * plan.steps * (1.0 if update.schedule == "constant" else 0.5)
    warnings = []
    if longest > MAX_STEP:
        warnings.append(
            f"at a learning rate of {update.learning_rate:g} one step moves the parameters by up to {longest:,.3g},"
            " far beyond where those of a model lie (lower algorithm.update.learning_rate)"
        )
    if distance < MIN_DISTANCE:
        warnings.append(
            f"{plan.steps:,} steps at a learning rate of {update.learning_rate:g} move the parameters by at most"
            f" {distance:.3g}, so that the model stays where it starts (raise algorithm.update.learning_rate or"
            " algorithm.steps)"
        )
    return warnings


def records_of(info: DatasetInfo, cards: Path) -> int | None:
    """The number of training records, or the bound that the card in `cards` declares; None without either."""
    if info.records is not None or info.dataset not in card_names(cards):
        return info.records
    return data_card(info.dataset, cards).records.at_most

"""Settings that look wrong are questioned before anything is reserved: a budget that buys noise is gone all the same.

All of it is judged by public values: the plan, the settings, and the number of records or its bound by the data card.
A person at a terminal is asked, and elsewhere the run is refused, unless TRAIN_ANYWAY says that it is meant. Public
records have nothing to lose, so that a line of the log is enough. The limits are far beyond what may be of use; the
numbers behind them are in docs/results/defaults.md.
"""

import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from algorithms.core.method import Plan
from algorithms.core.optimizers import OptimizerConfig
from algorithms.errors import RefusedError
from data import PublicDescription
from data.schema import registry
from tasks.calibrate import plan_for
from tasks.config.environment import TRAIN_ANYWAY, may_train_anyway, train_anyway
from tasks.config.params import Params
from tasks.runs.encoders import public_of

LEAST_SIGNAL = 1.0
"""How large the sum of all records' clipped gradients, if all were alike, has to be over the noise on it, all told."""
LONGEST_STEP = 1000.0
"""How far one step may move the parameters, momentum counted. The usual settings take 3 by noise, 80 by gradients."""
SHORTEST_WAY = 0.01
"""How far all steps together must be able to move the parameters. The usual settings can go 10 to 10,000."""

_LOG = logging.getLogger(__name__)


def doubts(settings: Params, plan: Plan, records: int | None) -> list[str]:
    """Why the run promises no useful model, each a clause with what to change; none where nothing speaks against it.

    records: how many there are, or a bound on it; None where nothing is known of it.
    """
    update = getattr(settings.algorithm, "update", None)
    found = [_doubt_of_epsilon(plan, records, descends=update is not None)]
    if isinstance(update, OptimizerConfig):
        found += _doubts_of_rate(update, plan, getattr(settings.algorithm, "clip_norm", 1.0), records)
    return [doubt for doubt in found if doubt]


def _doubt_of_epsilon(plan: Plan, records: int | None, *, descends: bool) -> str | None:
    """A Gaussian release of noise multiplier sqrt(2 log(1.25 / delta)) / epsilon costs about (epsilon, delta), however
    it is divided into steps. The noise has a part in the direction of each parameter where these are what is released.
    """
    budget, parameters = plan.target.budget, plan.public.parameters if descends else 1
    if records is None or math.isinf(plan.cost.epsilon):
        return None
    noise = math.sqrt(2 * math.log(1.25 / budget.delta)) if budget.delta else 1.0
    signal = records * budget.epsilon / (noise * math.sqrt(parameters))
    if signal >= LEAST_SIGNAL:
        return None
    return (
        f"at epsilon {budget.epsilon:.3g} the noise is {1 / signal:,.3g} times as large as all that {records:,} records"
        f" can say about {parameters:,} parameters (raise privacy.epsilon, or take a smaller model)"
    )


def _doubts_of_rate(update: OptimizerConfig, plan: Plan, clip_norm: float, records: int | None) -> list[str]:
    parameters = plan.public.parameters
    batch = plan.divisor or plan.sampling_rate * (records or math.inf)
    if (
        update.optimizer == "adam"
    ):  # a step of about the learning rate in each coordinate, whatever the gradient
        gradient = longest = update.learning_rate * math.sqrt(parameters)
    else:
        rate = update.learning_rate / (1 - update.momentum)
        gradient = rate * clip_norm
        longest = gradient * max(1.0, (plan.fixed_noise or 0.0) * math.sqrt(parameters) / batch)
    way = gradient * plan.steps * (1.0 if update.schedule == "constant" else 0.5)
    found = []
    if longest > LONGEST_STEP:
        found.append(
            f"at a learning rate of {update.learning_rate:g} one step moves the parameters by up to {longest:,.3g},"
            " far beyond where those of a model lie (lower algorithm.update.learning_rate)"
        )
    if way < SHORTEST_WAY:
        found.append(
            f"{plan.steps:,} steps at a learning rate of {update.learning_rate:g} move the parameters by at most"
            f" {way:.3g}, so that the model stays where it starts (raise algorithm.update.learning_rate or"
            " algorithm.steps)"
        )
    return found


def records_of(public: PublicDescription, cards: Path) -> int | None:
    """How many training records there are, or the bound that the card in `cards` declares; None without either."""
    if public.records is not None or public.dataset not in registry.names(cards):
        return public.records
    return registry.card(public.dataset, cards).records.at_most


def question(found: Sequence[str], public: PublicDescription, *, epsilon: float) -> None:
    """Ask a person whether a run that looks wrong is meant; raises RefusedError where nobody says so.

    Of public records the doubts are logged, and nobody is asked.
    """
    if public.public:
        for doubt in found:
            _LOG.warning("these settings look wrong: %s.", doubt)
    elif found and not may_train_anyway():
        doubt = "; and ".join(found)
        if not agrees(f"these settings look wrong: {doubt}. Spend epsilon {epsilon:g} all the same? [y/N] "):
            raise RefusedError(
                f"these settings look wrong, and would spend epsilon {epsilon:g}: {doubt}; or set {TRAIN_ANYWAY}=yes to"
                " train all the same."
            )


def agrees(question: str) -> bool:
    """Whether a person at this terminal says yes; False where there is none."""
    if not sys.stdin.isatty():
        return False
    sys.stderr.write(question)
    sys.stderr.flush()
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except OSError:  # a terminal of another session
        return False


def ask_first(root: Path, settings: Params) -> None:
    """At a terminal, the question of a run in the checkout `root` before its stages start, which cannot ask there.

    Who agrees is not asked again by this process and those it starts. Raises what `plan_for` and `question` raise.
    """
    if not sys.stdin.isatty() or may_train_anyway():
        return
    cards = root / "data" / "cards"
    public = public_of(registry.card(settings.data.dataset, cards), settings.data)
    plan = plan_for(settings, public)
    found = doubts(settings, plan, records_of(public, cards))
    if found and not public.public:
        question(found, public, epsilon=plan.target.budget.epsilon)
        train_anyway()

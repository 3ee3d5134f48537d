"""A year of comparisons with the model in use, where held-out people are private: its price and its error, beforehand.

Each comparison is a part of the one release of its retraining, and is charged with it. So a year has as many as it has
periods, and the policy of the blocks decides beforehand what one person pays for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from algorithms.core.private_evaluation import EvaluationPlan
from algorithms.evaluation import expected_errors
from algorithms.privacy.ledger import Balance, BlockBalance, Price, forecast
from tasks.retraining import Every, Retraining

PERIODS: dict[Every, int] = {"hour": 8760, "day": 365, "week": 52, "month": 12}
"""How many retrainings there are in a year at most."""
_NORMAL_95 = 1.96


@dataclass(frozen=True)
class Year:
    """The comparisons of a year.

    periods: their largest number. of_a_person: in how many a person of one block is. epsilon, delta: what all of these
    retrainings cost that person at most, training included. people: how many are held out at most. standard_error: of a
    difference of the mean score, by noise and by who was held out; None where noise drowns it.
    """

    periods: int
    of_a_person: int
    epsilon: float
    delta: float
    people: int
    standard_error: float | None

    def __str__(self) -> str:
        price = (
            f"At most {self.periods} comparisons with the model in use a year, each charged with its retraining; a"
            f" person of one block is in at most {self.of_a_person}, which cost epsilon {self.epsilon:.4g} at delta"
            f" {self.delta:g} together."
        )
        people = f"With at most {self.people:,} people held out,"
        if self.standard_error is None:
            return f"{price} {people} noise drowns a difference, so that no model takes the place of the one in use."
        minimum = _NORMAL_95 * self.standard_error
        return (
            f"{price} {people} a difference of the mean score has a standard error of {self.standard_error:.2g}, and a"
            f" gain that is less than {minimum:.2g} above minimal_gain is taken for noise."
        )


def year_ahead(
    settings: Retraining,
    blocks: Sequence[BlockBalance],
    balance: Balance,
    *,
    smallest: Price,
    evaluation: EvaluationPlan,
    people: int,
) -> Year:
    """The year from now on.

    blocks: of the population, as they stand. balance: of the population. smallest: as in `forecast`. evaluation: of a
    retraining. people: how many are held out at most. A block that arrives takes the place of an older one, or stands
    beside it, so no block is used more often than without new ones.
    """
    periods = PERIODS[settings.every]
    coming = forecast(blocks, settings.blocks, settings.spread, smallest=smallest, horizon=periods)
    prices = {
        block.name: [each.price for each in coming.retrainings if block.name in each.blocks]
        for block in blocks
    }
    delta = balance.cap.delta
    costs = [
        balance.composition.as_budget(
            tuple(sum(map(Fraction, part), Fraction(0)) for part in zip(*of_block, strict=True)), delta
        )
        for of_block in prices.values()
        if of_block
    ]
    comparison = replace(evaluation, spec=replace(evaluation.spec, compared=True))
    errors = expected_errors(comparison.spec, people, comparison.noise_std)
    return Year(
        periods,
        max(map(len, prices.values()), default=0),
        max((cost.epsilon for cost in costs), default=0.0),
        max((cost.delta for cost in costs), default=delta),
        people,
        errors["difference"],
    )

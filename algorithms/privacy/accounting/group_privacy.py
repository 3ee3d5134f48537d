"""What an event is worth for a group of records that a person has in one run, one record in each of several blocks."""

import math

import dp_accounting as dp

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.events import PureDpEvent


def group_privacy(event: dp.DpEvent, count: int) -> dp.DpEvent:
    """An event whose loss bounds that of `event` when `count` records come or go together.

    A sum moves by at most `count` bounds. A Poisson sample holds one of the records or more with probability
    1 - (1 - rate)^count, and moves by at most all of them then: divergences are convex in the moved output, so the
    largest move at that rate is the worst. zCDP grows by the square (Bun and Steinke 2016, Proposition 1.9).
    Raises RefusedError where nothing is known of groups.
    """
    if count == 1:
        return event
    match event:
        case dp.NoOpDpEvent() | dp.NonPrivateDpEvent():
            return event
        case dp.GaussianDpEvent(noise_multiplier=multiplier):
            return dp.GaussianDpEvent(multiplier / count)
        case dp.LaplaceDpEvent(noise_multiplier=multiplier):
            return dp.LaplaceDpEvent(multiplier / count)
        case PureDpEvent(epsilon=epsilon):
            return PureDpEvent(count * epsilon)
        case dp.dp_event.ZCDpEvent(rho=rho, xi=0.0):
            return dp.dp_event.ZCDpEvent(count**2 * rho)
        case dp.PoissonSampledDpEvent(
            sampling_probability=rate,
            event=(dp.GaussianDpEvent() | dp.LaplaceDpEvent() | PureDpEvent()) as inner,
        ):
            return dp.PoissonSampledDpEvent(_any_of(count, rate), group_privacy(inner, count))
        case dp.SelfComposedDpEvent(event=inner, count=times):
            return dp.SelfComposedDpEvent(group_privacy(inner, count), times)
        case dp.ComposedDpEvent(events=inners):
            return dp.ComposedDpEvent([group_privacy(inner, count) for inner in inners])
    raise RefusedError(
        f"{event} has no bound for {count} records of one person; let the run read one block, or take another method."
    )


def _any_of(count: int, rate: float) -> float:
    return 1.0 if rate == 1 else -math.expm1(count * math.log1p(-rate))

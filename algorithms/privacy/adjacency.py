"""What an event under replace-one is worth under add-or-remove-one, where the accountants have their bounds.

Events carry noise over the bound C of one record, whatever the adjacency. Replacing a record takes one out and puts one
in, so a sum over all records moves by twice the bound. Events of samples are not translated here unless a theorem says
how: the accountants have bounds of their own for them.
"""

import math
from typing import TypeAlias

import dp_accounting as dp

from algorithms.privacy.errors import Refused
from algorithms.privacy.events import PureDpEvent

Adjacency: TypeAlias = dp.NeighboringRelation
ADD_OR_REMOVE_ONE = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = dp.NeighboringRelation.REPLACE_ONE


def named(name: str) -> Adjacency:
    """The adjacency of a name; raises Refused where nothing is accounted under it."""
    known = {adjacency.name: adjacency for adjacency in (ADD_OR_REMOVE_ONE, REPLACE_ONE)}
    if name not in known:
        raise Refused(f"the adjacency {name!r} is not known; choose {' or '.join(known)}.")
    return known[name]


def under(adjacency: Adjacency, event: dp.DpEvent) -> dp.DpEvent:
    """An event as the accountants are to take it; raises Refused where no theorem covers it under this adjacency."""
    _check_sampling(adjacency, event)
    plain = event if adjacency is ADD_OR_REMOVE_ONE else _replacing(event)
    return _amplified(plain)


def pure_epsilon(event: dp.DpEvent) -> float:
    """The epsilon of an event that is purely private, as `under` gives it; infinite for one that is not private.

    Raises Refused where the event is not pure.
    """
    match event:
        case dp.NoOpDpEvent():
            return 0.0
        case dp.NonPrivateDpEvent():
            return math.inf
        case PureDpEvent(epsilon=epsilon):
            return epsilon
        case dp.LaplaceDpEvent(noise_multiplier=multiplier):
            return float(1.0 / multiplier)
        case dp.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
            return _of_sample(rate, pure_epsilon(inner))
        case dp.SelfComposedDpEvent(event=inner, count=count):
            return float(count * pure_epsilon(inner))
        case dp.ComposedDpEvent(events=inners):
            return math.fsum(map(pure_epsilon, inners))
    raise Refused(f"{event} is not purely private; use Laplace noise, or a delta above 0 with PLD or RDP.")


def _check_sampling(adjacency: Adjacency, event: dp.DpEvent) -> None:
    is_fixed_size = isinstance(event, dp.SampledWithoutReplacementDpEvent)
    if is_fixed_size and adjacency is not REPLACE_ONE:
        raise Refused(
            "sampling without replacement is proven under replace-one alone, not under add-or-remove-one;"
            " take a full batch or a Poisson sample."
        )


def _replacing(event: dp.DpEvent) -> dp.DpEvent:
    match event:
        case dp.NoOpDpEvent() | dp.NonPrivateDpEvent():
            return event
        case dp.GaussianDpEvent(noise_multiplier=multiplier):
            return dp.GaussianDpEvent(multiplier / 2)
        case dp.LaplaceDpEvent(noise_multiplier=multiplier):
            return dp.LaplaceDpEvent(multiplier / 2)
        case PureDpEvent(epsilon=epsilon):
            return PureDpEvent(2 * epsilon)
        case dp.dp_event.ZCDpEvent(rho=rho, xi=0.0):
            return dp.dp_event.ZCDpEvent(4 * rho)  # Bun and Steinke 2016, Proposition 1.9
        case dp.SelfComposedDpEvent(event=inner, count=count):
            return dp.SelfComposedDpEvent(_replacing(inner), count)
        case dp.ComposedDpEvent(events=inners):
            return dp.ComposedDpEvent([_replacing(inner) for inner in inners])
        case dp.SampledWithoutReplacementDpEvent(source_dataset_size=n, sample_size=m, event=inner):
            if isinstance(inner, dp.GaussianDpEvent):
                return dp.SampledWithoutReplacementDpEvent(n, m, _replacing(inner))
            return PureDpEvent(_of_sample(m / n, pure_epsilon(_replacing(inner))))
        case dp.PoissonSampledDpEvent(event=dp.GaussianDpEvent()):
            return event
    raise Refused(f"{event} has no bound under replace-one; keep to add-or-remove-one.")


def _amplified(event: dp.DpEvent) -> dp.DpEvent:
    match event:
        case dp.PoissonSampledDpEvent(event=PureDpEvent()):
            return PureDpEvent(pure_epsilon(event))
    return event


def _of_sample(rate: float, epsilon: float) -> float:
    """Amplification of pure privacy by sampling (Balle, Barthe and Gaboardi 2018, Theorems 8 and 9)."""
    return math.log1p(rate * math.expm1(epsilon))

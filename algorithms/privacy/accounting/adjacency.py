"""What an event under replace-one is worth under add-or-remove-one, where the accountants have their bounds.

Events carry noise over the bound C of one record, whatever the adjacency. Replacing a record takes one out and puts one
in, so a sum over all records moves by twice the bound. Events of samples are not translated here unless a theorem says
how: the accountants have bounds of their own for them.
"""

import math
from typing import TypeAlias

import dp_accounting as dp
import numpy as np

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.events import ObjectivePerturbationDpEvent, PureDpEvent, RenyiDpEvent

Adjacency: TypeAlias = dp.NeighboringRelation
ADD_OR_REMOVE_ONE = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = dp.NeighboringRelation.REPLACE_ONE


def named(name: str) -> Adjacency:
    """The adjacency of a name; raises RefusedError where nothing is accounted under it."""
    known = {adjacency.name: adjacency for adjacency in (ADD_OR_REMOVE_ONE, REPLACE_ONE)}
    if name not in known:
        raise RefusedError(f"the adjacency {name!r} is not known; choose {' or '.join(known)}.")
    return known[name]


def as_add_remove(adjacency: Adjacency, event: dp.DpEvent) -> dp.DpEvent:
    """An event as the accountants are to take it; raises RefusedError where no theorem covers it under this adjacency.

    An event with an impossible number, as in a document that was edited, is refused too.
    """
    _check(adjacency, event)
    plain = event if adjacency is ADD_OR_REMOVE_ONE else _replacing(event)
    return _amplified(plain)


def pure_epsilon(event: dp.DpEvent) -> float:
    """The epsilon of an event that is purely private, as `under` gives it; infinite for one that is not private.

    Raises RefusedError where the event is not pure.
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
    raise RefusedError(
        f"{event} is not purely private; use Laplace noise, or a delta above 0 with PLD or RDP."
    )


def _check(adjacency: Adjacency, event: dp.DpEvent) -> None:
    """Raises RefusedError for what no theorem covers, however deep it is nested."""
    if not _is_possible(event):
        raise RefusedError(
            f"{event} is no mechanism: a number in it is out of its range; check the document."
        )
    is_fixed_size = isinstance(event, dp.SampledWithoutReplacementDpEvent)
    if is_fixed_size and adjacency is not REPLACE_ONE:
        raise RefusedError(
            "sampling without replacement is proven under replace-one alone, not under add-or-remove-one;"
            " take a full batch or a Poisson sample."
        )
    for inner in parts(event):
        _check(adjacency, inner)


def _is_possible(event: dp.DpEvent) -> bool:
    """Whether the numbers of an event, not those of its parts, lie where its theorems hold."""
    match event:
        case dp.GaussianDpEvent(noise_multiplier=multiplier) | dp.LaplaceDpEvent(noise_multiplier=multiplier):
            return bool(0 < multiplier < math.inf)
        case ObjectivePerturbationDpEvent(noise_multiplier=multiplier, curvature_ratio=ratio):
            return 0 < multiplier < math.inf and 0 <= ratio < math.inf
        case PureDpEvent(epsilon=epsilon):
            return epsilon >= 0
        case RenyiDpEvent(order=order, bound=bound):
            return 1 < order < math.inf and bound >= 0
        case dp.dp_event.ZCDpEvent(rho=rho, xi=xi):
            return bool(rho >= 0 and xi >= 0)
        case dp.PoissonSampledDpEvent(sampling_probability=rate):
            return bool(0 <= rate <= 1)
        case dp.SampledWithoutReplacementDpEvent(source_dataset_size=n, sample_size=m):
            return bool(0 <= m <= n and n > 0)
        case dp.SelfComposedDpEvent(count=count):
            return bool(count >= 0)
    return True


def parts(event: dp.DpEvent) -> list[dp.DpEvent]:
    """The events that an event is made of."""
    inner = getattr(event, "event", None)
    return [*([] if inner is None else [inner]), *getattr(event, "events", ())]


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
    raise RefusedError(f"{event} has no bound under replace-one; keep to add-or-remove-one.")


def _amplified(event: dp.DpEvent) -> dp.DpEvent:
    match event:
        case dp.PoissonSampledDpEvent(event=PureDpEvent()):
            return PureDpEvent(pure_epsilon(event))
        case dp.SelfComposedDpEvent(event=inner, count=count):
            return dp.SelfComposedDpEvent(_amplified(inner), count)
        case dp.ComposedDpEvent(events=inners):
            return dp.ComposedDpEvent([_amplified(inner) for inner in inners])
    return event


def _of_sample(rate: float, epsilon: float) -> float:
    """ln(1 + rate (e^epsilon - 1)), without overflow (Balle, Barthe and Gaboardi 2018, Theorems 8 and 9)."""
    if epsilon < 1.0:
        return math.log1p(rate * math.expm1(epsilon))
    with np.errstate(divide="ignore"):  # of a rate of 0 or 1
        return float(np.logaddexp(np.log1p(-rate), np.log(rate) + epsilon))

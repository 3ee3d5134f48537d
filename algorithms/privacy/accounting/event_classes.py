"""Events that dp_accounting does not have, and what events consist of."""

from collections.abc import Callable
from typing import Any

import attrs
import dp_accounting.dp_event as dp


@attrs.frozen
class PureDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A mechanism of pure differential privacy, known only by its epsilon under add-or-remove-one."""

    epsilon: float


@attrs.frozen
class ObjectivePerturbationDpEvent(dp.DpEvent):  # type: ignore[misc]
    """The exact minimum of a convex objective with a random linear term, for a linear model with one output.

    Attributes:
        noise_multiplier: Standard deviation of the term over the bound on a record's gradient.
        curvature_ratio: Bound on a record's curvature over the strong convexity of the objective. See Redberg, Koskela
            and Wang 2023.
    """

    noise_multiplier: float
    curvature_ratio: float


@attrs.frozen
class RenyiDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A mechanism known only by its Rényi divergence at one order, under add-or-remove-one.

    Attributes:
        order: Above 1.
        bound: The divergence there. The releases of a run under a Rényi filter are one such event.
    """

    order: float
    bound: float


@attrs.frozen
class SampledGroupDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A Poisson sample of a Gaussian sum, for `count` records that are all added or all removed together.

    Attributes:
        noise_multiplier: Of one record's bound.
        sampling_probability: Of each record by itself.
        count: The number of records.
    """

    noise_multiplier: float
    sampling_probability: float
    count: int


@attrs.frozen
class EitherDpEvent(dp.DpEvent):  # type: ignore[misc]
    """One of several mechanisms, chosen independently of the records, like the settings of a trial in a search.

    Attributes:
        events: The mechanisms. At each Rényi order the one with the largest divergence is charged, as a mixture
            diverges no more than its worst part.
    """

    events: list[dp.DpEvent]


@attrs.frozen
class DisjointPartsDpEvent(dp.DpEvent):  # type: ignore[misc]
    """Several mechanisms on disjoint people, each of whom is in one part alone, whoever else is there.

    One record more or less changes one part. The other parts have the same records, and at most see what was released
    of that part, so that the whole costs as much as the worst of the events (parallel composition: McSherry 2009,
    Theorem 4). A record that is replaced may change parts, so nothing is claimed under replace-one.

    Attributes:
        events: One for each part, in the order of the releases; a later one may depend on what earlier ones released.
    """

    events: list[dp.DpEvent]


@attrs.frozen
class RandomAllocationDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A pass in which each record takes part in one of `parts` Gaussian sums, charged with the first of them.

    Attributes:
        noise_multiplier: Of each sum, relative to the bound on a record.
        parts: Steps of a whole pass.
        steps: Steps of this pass; fewer than `parts` only for a run's last one.
    """

    noise_multiplier: float
    parts: int
    steps: int


@attrs.frozen
class RandomAllocationStepDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A later step of a pass that a `RandomAllocationDpEvent` before it has paid for."""

    noise_multiplier: float
    parts: int


def parts(event: dp.DpEvent) -> list[dp.DpEvent]:
    """The events that an event consists of."""
    inner = getattr(event, "event", None)
    return [*([] if inner is None else [inner]), *getattr(event, "events", ())]


def alternatives_of(event: dp.DpEvent) -> list[dp.DpEvent]:
    """The events one of which is the release; one that is no choice is its only alternative."""
    return list(event.events) if isinstance(event, EitherDpEvent) else [event]


def with_parts(event: Any, change: Callable[[dp.DpEvent], dp.DpEvent]) -> dp.DpEvent:
    """The event with a function applied to each of its parts."""
    if hasattr(event, "events"):
        return attrs.evolve(event, events=[change(inner) for inner in event.events])
    return attrs.evolve(event, event=change(event.event))

"""Random allocation: in each pass over the data a record takes part in exactly one step, drawn at random.

A pass is one event, which its first step is charged, and costs what `allocation_losses` computes. Neighbours differ by
adding or removing a record. Nothing is proven here for correlated noise, whose rows tie steps of different passes, or
for a record that is replaced.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import dp_accounting.dp_event as dp
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.allocation_losses import divergences_of_pass, pair_of_pass
from algorithms.privacy.accounting.event_classes import RandomAllocationDpEvent, RandomAllocationStepDpEvent
from algorithms.privacy.accounting.event_rules import CUSTOMARY_GRID, EventRule, Orders, TraceFields, register
from algorithms.privacy.accounting.pld import PLDPair


class _RandomAllocation(EventRule):
    def is_possible(self, event: Any) -> bool:
        return bool(0 < event.noise_multiplier < math.inf and 1 <= event.steps <= event.parts)

    def losses(self, event: Any, grid: float, adjacency: NeighboringRelation) -> PLDPair:
        return pair_of_pass(event, finer=float(np.clip(math.sqrt(CUSTOMARY_GRID / grid), 0.1, 2.0)))

    def rdp(self, event: Any, orders: Orders, adjacency: NeighboringRelation) -> np.ndarray:
        return np.array(divergences_of_pass(event, orders), dtype=np.float64)

    def without_subsampling(self, event: Any, adjacency: NeighboringRelation) -> dp.DpEvent:
        return dp.GaussianDpEvent(event.noise_multiplier)

    def group_privacy(self, event: Any, count: int) -> dp.DpEvent:
        raise RefusedError(
            "random allocation has no bound for {count} records of one person; set {method.sampling} to poisson, or"
            " {records.blocks} to one block.",
            code="no_bound_of_allocated_group",
            count=count,
        )

    def trace_fields(self, event: Any) -> TraceFields:
        return TraceFields({"gaussian": event.noise_multiplier}, ("random allocation",), 1.0 / event.parts)


class _RandomAllocationStep(_RandomAllocation):
    def is_possible(self, event: Any) -> bool:
        return bool(0 < event.noise_multiplier < math.inf and event.parts >= 1)

    def releases(self, event: Any) -> Iterator[tuple[dp.DpEvent, int]]:
        return iter(())

    def with_amplification(self, event: Any) -> dp.DpEvent:
        return dp.NoOpDpEvent()


register(RandomAllocationDpEvent, _RandomAllocation(), "random allocation")
register(RandomAllocationStepDpEvent, _RandomAllocationStep(), "random allocation")


class PaidSteps:
    """The later steps of a pass that its first one has paid for, as events come one after the other."""

    def __init__(self) -> None:
        self._paid: tuple[float, int] | None = None
        self._left = 0

    def take(self, event: dp.DpEvent, count: int = 1) -> None:
        """Take an event, `count` times; raises RefusedError for a later step that is not paid for."""
        if isinstance(event, RandomAllocationDpEvent) and count > 0:
            self._paid, self._left = (event.noise_multiplier, event.parts), event.steps - 1
        elif isinstance(event, RandomAllocationStepDpEvent):
            if (event.noise_multiplier, event.parts) != self._paid or count > self._left:
                raise RefusedError(
                    f"{count} later steps of a pass are among the events, and none before them has paid for as many;"
                    " check the document, or the noise of each step."
                )
            self._left -= count


def check_passes(schedule: Iterable[tuple[dp.DpEvent, int]]) -> None:
    """Raises RefusedError for later steps of a pass that no event before them has paid for."""
    paid = PaidSteps()
    for event, count in schedule:
        paid.take(event, count)

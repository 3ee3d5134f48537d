"""Metrics by declared groups, and differences between groups."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import TypeAlias

from algorithms.evaluation.estimates import outcomes_of_view
from algorithms.evaluation.histogram import HistogramSpec
from algorithms.evaluation.intervals import Estimate, difference, estimate_in
from algorithms.evaluation.released_histogram import NoisyTables, ReleasedHistogram

MIN_SIZE = 8.0
"""A group whose released size is below so many standard deviations of its noise is too small for metrics of its own."""


@dataclass(frozen=True)
class GroupMetrics:
    """The metrics of one group.

    Attributes:
        members: the declared groups in it; several where small ones are merged.
        size: its number of people.
        metrics: by name; None where noise drowns them, and all where even the merged group is too small.
    """

    members: tuple[str, ...]
    size: Estimate
    metrics: Mapping[str, Estimate | None]

    @property
    def name(self) -> str:
        """The names of its groups."""
        return ", ".join(self.members)


@dataclass(frozen=True)
class GroupDifference:
    """How the metrics of two groups differ.

    Attributes:
        first, second: The names of the groups.
        metrics: `first` minus `second`, by metric, where both have it.
    """

    first: str
    second: str
    metrics: Mapping[str, Estimate]


def groups_of(released: ReleasedHistogram) -> Mapping[str, tuple[GroupMetrics, ...]]:
    """The groups of each column, and those of all columns crossed, in their declared order; merged ones last.

    Groups that are too small are merged with each other. Which ones are is decided by their released sizes, so it is
    post-processing, too, and reveals nothing more.
    """
    return {
        name: _groups(released, part, members) for name, (part, members) in _groupings(released.spec).items()
    }


def group_differences(groups: tuple[GroupMetrics, ...]) -> tuple[GroupDifference, ...]:
    """The differences of all pairs of groups of a column; each interval holds its own difference in 95 % of releases.

    The groups are different people in different cells, so both their samples and their noise are independent.
    """
    return tuple(
        GroupDifference(
            first.name,
            second.name,
            {
                name: difference(estimate, other)
                for name, estimate in first.metrics.items()
                if estimate is not None and (other := second.metrics[name]) is not None
            },
        )
        for first, second in combinations(groups, 2)
    )


_Members: TypeAlias = dict[str, tuple[int, ...]]


def _groupings(spec: HistogramSpec) -> dict[str, tuple[str, _Members]]:
    """By name the part of the histogram, and the indices of the groups in it that are added up by member's name."""
    by_part: dict[str, tuple[str, _Members]] = {
        part: (part, {name: (at,) for at, name in enumerate(names)}) for part, names in spec.parts.items()
    }
    if not spec.cross or len(spec.groups) < 2:
        return by_part
    (crossed,) = by_part
    cells = list(product(*(range(len(values)) for _, values in spec.groups)))
    by_column = {
        column: (
            crossed,
            {
                name: tuple(i for i, cell in enumerate(cells) if cell[at] == value)
                for value, name in enumerate(names)
            },
        )
        for at, (column, names) in enumerate(spec.groups)
    }
    return {**by_column, **by_part}


def _groups(released: ReleasedHistogram, part: str, members: _Members) -> tuple[GroupMetrics, ...]:
    sizes = {name: size_of(released.view(part, indices)) for name, indices in members.items()}
    small = tuple(name for name, size in sizes.items() if _is_small(size))
    groups = [
        GroupMetrics((name,), sizes[name], _metrics(released, released.view(part, indices)))
        for name, indices in members.items()
        if name not in small
    ]
    if small:
        merged = released.view(part, tuple(index for name in small for index in members[name]))
        size, metrics = size_of(merged), _metrics(released, merged)
        groups.append(GroupMetrics(small, size, dict.fromkeys(metrics) if _is_small(size) else metrics))
    return tuple(groups)


def _metrics(released: ReleasedHistogram, view: NoisyTables) -> dict[str, Estimate | None]:
    outcomes = outcomes_of_view(view)
    return {
        name: None if released.has_invalid else estimate_in(outcome) for name, outcome in outcomes.items()
    }


def size_of(view: NoisyTables) -> Estimate:
    """The number of people of a view, whose interval counts the noise alone."""
    smallest = min(view.tables.values(), key=lambda table: table.size)
    value, reach = float(smallest.sum()), 1.959964 * view.noise_std * math.sqrt(smallest.size)
    return Estimate(max(value, 0.0), max(value - reach, 0.0), max(value + reach, 0.0))


def _is_small(size: Estimate) -> bool:
    noise = (size.high - size.value) / 1.959964
    return size.value < MIN_SIZE * noise or size.value <= 0

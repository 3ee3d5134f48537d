"""Two blocks share many records or do not, by a few digests; equal records of different people are no sign of it."""

import hashlib
from collections.abc import Hashable, Iterable

import numpy as np
import pytest

from data.sketch import SIZE, Sketch


def sketch(records: Iterable[Hashable]) -> Sketch:
    """A sketch of records that their text tells apart."""
    made = Sketch()
    for record in records:
        made.add(hashlib.blake2b(repr(record).encode(), digest_size=8).hexdigest())
    return made


@pytest.mark.parametrize("size", [20, 500, 30_000])
def test_many_records_in_common_are_seen_and_few_are_not(size: int) -> None:
    """For the largest size a sketch has a fifteenth of the records: six standard deviations of what is sampled."""
    first = sketch(range(size))
    for shared, expected in ((1.0, True), (0.95, True), (0.25, size > 100), (0.05, False), (0.0, False)):
        start = round(size * (1 - shared))
        assert first.shares_many(sketch(range(start, start + size))) == expected
    assert first.shares_many(sketch(reversed(range(size))))
    assert first.shares_many(sketch([*range(size), *range(size // 10)]))


def test_a_small_block_within_a_larger_one_is_seen_from_both_sides() -> None:
    small, large = sketch(range(300)), sketch(range(10_000))
    assert small.shares_many(large) and large.shares_many(small)
    assert not sketch(range(-300, 0)).shares_many(large)


@pytest.mark.parametrize(("values", "size"), [(2, 400), (100, 60), (100, 3000), (1000, 200), (5000, 1500)])
@pytest.mark.parametrize("skewed", [False, True])
def test_equal_records_of_different_people_are_none_in_common(values: int, size: int, skewed: bool) -> None:
    """Of 60 pairs of independent blocks none is taken for the same people; with half in common most are.

    Four standard deviations are exceeded once in 30,000 pairs, so one of these cases fails at one seed in 25.
    """
    generator = np.random.default_rng(values + size)
    weights = 1 / np.arange(1, values + 1) if skewed else np.ones(values)

    def people(count: int) -> list[int]:
        drawn: list[int] = generator.choice(values, count, p=weights / weights.sum()).tolist()
        return drawn

    def seen(shared: int, other: int) -> int:
        pairs = []
        for _ in range(60):
            common = people(shared)
            pairs.append([sketch([*common, *people(count - shared)]) for count in (size, other)])
        return sum(one.shares_many(two) for one, two in pairs)

    assert seen(0, size) == seen(0, size // 3) == 0
    if values >= 1000:
        assert seen(size // 2, size) >= 55


@pytest.mark.parametrize("size", [60, 3000])
def test_records_that_come_from_many_blocks_are_seen_in_all_together(size: int) -> None:
    """A twentieth of the block is in each of twenty others, which no pair shows."""
    blocks = [sketch(range(size * part, size * (part + 1))) for part in range(20)]
    again = sketch(range(7, 20 * size, 20))
    assert not any(again.shares_many(block) for block in blocks)
    assert again.shares_many(*blocks)
    assert not sketch(range(-size, 0)).shares_many(*blocks)
    assert not sketch([*range(-size, 0), *range(0, 20 * size, 400)]).shares_many(*blocks)


@pytest.mark.parametrize(("values", "size"), [(2, 400), (100, 60), (1000, 200), (5000, 500)])
@pytest.mark.parametrize("drifts", [False, True])
def test_equal_records_of_different_people_are_none_in_common_with_many(
    values: int, size: int, drifts: bool
) -> None:
    """Of 40 blocks none is taken for the people of the 20 before it, also where what is common changes over time."""
    generator = np.random.default_rng(values + size)

    def people(time: int) -> list[int]:
        weights = 1 / (1 + (np.arange(values) - time * values / 40 * drifts) % values)
        drawn: list[int] = generator.choice(values, size, p=weights / weights.sum()).tolist()
        return drawn

    blocks = [sketch(people(time)) for time in range(60)]
    assert not any(blocks[now].shares_many(*blocks[now - 20 : now]) for now in range(20, 60))


def test_a_sketch_stays_small_and_whole_where_it_counts() -> None:
    records = [number % 20_000 for number in range(60_000)]
    made, other = sketch(records), sketch(reversed(records))
    assert made.kept == other.kept
    assert len(made.kept) == SIZE and set(made.kept.values()) == {3}
    assert len(made.counts) < 4 * SIZE
    both = sketch(range(20_000)).joined(sketch(range(10_000, 30_000)))
    assert both.kept == sketch(range(30_000)).kept

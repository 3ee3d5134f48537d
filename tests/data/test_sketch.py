"""Two blocks share many records or do not, by a few digests; equal records of different people are no sign of it."""

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable

import numpy as np
import pytest
from scipy.stats import chi2

from data.sketch import SIZE, Sketch, _chi_squared


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


@pytest.mark.parametrize(("values", "size"), [(8, 5000), (12, 400), (20, 1000), (31, 600)])
def test_a_block_of_few_kinds_of_records_is_seen_again_where_some_are_left_out(
    values: int, size: int
) -> None:
    """Too few kinds for those in common to stand out, but blocks drawn apart never agree so well."""
    drawn = np.random.default_rng(values).integers(0, values, size).tolist()
    first = sketch(drawn)
    assert first.shares_many(sketch(drawn[1:])) and sketch(drawn[1:]).shares_many(first)
    assert first.shares_many(sketch(drawn[size // 200 :]))
    assert first.shares_many(sketch(drawn * 2))


@pytest.mark.parametrize("values", [2, 3, 5, 8, 16, 31, 60])
@pytest.mark.parametrize("times", [1, 3, 20])
def test_blocks_of_few_kinds_that_are_drawn_apart_agree_by_chance_alone(values: int, times: int) -> None:
    """Of 600 pairs none is taken for the same; by chance one of all these cases would fail at two seeds in five."""
    generator = np.random.default_rng(100 * values + times)
    for skewed in (False, True):
        weights = 1 / np.arange(1, values + 1) if skewed else np.ones(values)
        for size in (40, 300, 5000):
            drawn = [
                generator.multinomial(count, weights / weights.sum(), 100) for count in (size, size * times)
            ]
            for pair in zip(*(side.tolist() for side in drawn), strict=True):
                one, other = (
                    Sketch(Counter({f"{kind:02}": n for kind, n in enumerate(side) if n})) for side in pair
                )
                assert not one.shares_many(other)


@pytest.mark.parametrize("freedom", [1, 2, 7, 40, 1000])
def test_the_lower_tail_is_that_of_the_chi_squared_distribution(freedom: int) -> None:
    for share in (0.01, 0.1, 0.5, 0.9):
        expected = chi2.cdf(share * freedom, freedom)
        assert _chi_squared(share * freedom, freedom=freedom) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [60, 3000])
def test_records_that_come_from_many_blocks_are_seen_in_all_together(size: int) -> None:
    """A twentieth of the block is in each of twenty others, which no pair shows."""
    blocks = [sketch(range(size * part, size * (part + 1))) for part in range(20)]
    again = sketch(range(7, 20 * size, 20))
    assert not any(again.shares_many(block) for block in blocks)
    assert again.shares_many(*blocks)
    assert not sketch(range(-size, 0)).shares_many(*blocks)
    assert not sketch([*range(-size, 0), *range(0, 20 * size, 400)]).shares_many(*blocks)


@pytest.mark.parametrize(("parts", "twice"), [(8, 0.2), (12, 0.2), (20, 0.1), (52, 0.02)])
def test_parts_of_a_block_are_seen_where_some_records_come_twice(parts: int, twice: float) -> None:
    generator = np.random.default_rng(parts)
    people = [(person, 1 + int(generator.random() < twice)) for person in range(2000)]
    whole = sketch(person for person, times in people for _ in range(times))
    for part in range(parts):
        own = sketch(person for person, times in people[part::parts] for _ in range(times))
        assert own.shares_many(whole) and whole.shares_many(own)


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

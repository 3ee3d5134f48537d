"""Numbers of heads against the binomial law and against exact rational arithmetic. False-alarm rates of 1e-6 each."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from algorithms.privacy.mechanisms.binomial import draw_binomial
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.sampling import Poisson, draw_sample

FALSE_ALARM = 1e-6


class Given:
    """Words in the order that they are given."""

    def __init__(self, *words: int) -> None:
        self.left = list(words)

    def words(self, count: int) -> NDArray[np.uint64]:
        taken, self.left = self.left[:count], self.left[count:]
        assert len(taken) == count
        return np.array(taken, dtype=np.uint64)


@pytest.mark.parametrize(
    ("count", "chance"), [(1, 0.25), (5, 0.5), (40, 0.01), (3000, 0.02), (10**9, 3e-8), (50, 0.97)]
)
def test_numbers_follow_the_binomial_law(count: int, chance: float) -> None:
    draws = [
        draw_binomial(count, int(chance * 2**64), seeded_generator(3).stream(release))
        for release in range(4000)
    ]
    law = stats.binom(count, chance)
    edges = np.unique(law.ppf(np.linspace(0.05, 0.95, 19)))
    edges = edges[law.sf(edges) > 0.01]
    cells = np.searchsorted(edges, draws)
    expected = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]]))
    assert min(expected) * 4000 > 5
    counts = np.bincount(cells, minlength=len(expected))
    assert stats.chisquare(counts, expected * 4000).pvalue > FALSE_ALARM


def exact_number(count: int, chance: Fraction, uniform: Fraction) -> int:
    """The number at a point of the distribution function, by rational arithmetic."""
    total, number = Fraction(0), 0
    while True:
        total += comb(count, number) * chance**number * (1 - chance) ** (count - number)
        if uniform < total:
            return number
        number += 1


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_numbers_are_exact_at_the_limits_of_their_intervals(count: int) -> None:
    """Just below and above each step of the distribution function, to 128 bits, which decide nothing by themselves."""
    word = 3**40 % 2**64
    chance = Fraction(word, 2**64)
    total = Fraction(0)
    for number in range(count):
        total += comb(count, number) * chance**number * (1 - chance) ** (count - number)
        limit = int(total * 2**128)
        for uniform in (limit - 1, limit, limit + 1):
            more = 2**127 + 12345  # the bits after those, of which the last decide at the limit itself
            words = [part >> shift & (2**64 - 1) for part in (uniform, more) for shift in (64, 0)]
            whole = Fraction(uniform * 2**128 + more, 2**256)
            assert draw_binomial(count, word, Given(*words)) == exact_number(count, chance, whole)


def test_more_bits_are_drawn_where_two_numbers_are_possible() -> None:
    """Half of one fair coin: zeros up to a bit far behind leave open on which side of one half the point is."""
    half, zeros = 2**63, [0] * 5
    source = Given(half, *zeros, 1, 0)
    assert draw_binomial(1, 2**63, source) == 1
    assert source.left == []
    ones = [2**64 - 1] * 5
    assert draw_binomial(1, 2**63, Given(half - 1, *ones, 2**64 - 2, 0)) == 0


@pytest.mark.parametrize(("chance", "number"), [(0, 0), (2**64, 9), (2**65, 9)])
def test_certain_coins_take_no_words(chance: int, number: int) -> None:
    assert draw_binomial(9, chance, Given()) == number


def test_samples_are_those_of_independent_coins() -> None:
    """Every subset of few records, at a rate below that from which coins are tossed one by one."""
    count, rate, releases = 60, 0.03, 12_000
    took_part = np.zeros((releases, count), dtype=bool)
    for release in range(releases):
        took_part[release, draw_sample(Poisson(rate), count, seeded_generator(4).stream(release), step=0)] = (
            True
        )
    each = [stats.binomtest(int(hits), releases, rate).pvalue for hits in took_part.sum(axis=0)]
    assert min(each) > FALSE_ALARM / count
    sizes = np.bincount(took_part.sum(axis=1).clip(max=6), minlength=7)
    law = stats.binom(count, rate)
    expected = np.append(law.pmf(range(6)), law.sf(5)) * releases
    assert stats.chisquare(sizes, expected).pvalue > FALSE_ALARM
    alone = took_part[took_part.sum(axis=1) == 2]
    pairs = np.bincount(
        [int(i * count + j) for i, j in (np.flatnonzero(row) for row in alone)], minlength=count**2
    )
    likely = len(alone) / (count * (count - 1) / 2)
    statistic = sum(
        (pairs[i * count + j] - likely) ** 2 / likely for i in range(count) for j in range(i + 1, count)
    )
    assert stats.chi2(count * (count - 1) / 2 - 1).sf(statistic) > FALSE_ALARM


def test_samples_of_millions_have_distinct_indices_in_order() -> None:
    drawn = draw_sample(Poisson(1e-4), 8_000_000, seeded_generator(5).stream(0), step=0)
    assert (np.diff(drawn) > 0).all() and drawn[0] >= 0 and drawn[-1] < 8_000_000
    assert abs(len(drawn) - 800) < 6 * 800**0.5

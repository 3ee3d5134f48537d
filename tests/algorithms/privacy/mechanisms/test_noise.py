"""The generator: replay, independence of streams, the laws of its draws; thresholds are false-alarm rates of 1e-6."""

from unittest.mock import Mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from algorithms.privacy.mechanisms import noise as noise_module
from algorithms.privacy.mechanisms.noise import (
    Stream,
    grid_step,
    is_below,
    secure_generator,
    seeded_generator,
    std_on_grid,
)
from tests.support.bench import add_on_grid
from tests.support.chosen_words import ChosenWords

FALSE_ALARM = 1e-6
DRAWS = 200_001


def stream(release: int = 0) -> Stream:
    return seeded_generator(11).stream(release)


@pytest.mark.parametrize(
    ("draw", "law"),
    [
        ("normal", stats.norm()),
        ("laplace", stats.laplace()),
        ("gumbel", stats.gumbel_r()),
        ("uniform", stats.uniform()),
    ],
)
def test_draws_follow_their_law(draw: str, law: stats.rv_continuous) -> None:
    sample = getattr(stream(), draw)(DRAWS)
    assert sample.shape == (DRAWS,)
    assert stats.kstest(sample, law.cdf).pvalue > FALSE_ALARM


@pytest.mark.parametrize("rate", [0.001, 0.3, 0.999])
def test_coins_fall_at_their_rate(rate: float) -> None:
    hits = int(stream().coins(DRAWS, rate).sum())
    assert stats.binomtest(hits, DRAWS, rate).pvalue > FALSE_ALARM


LIMITS = {
    0.0: 0,
    2.0**-64: 1,
    0.3: int(0.3 * 2.0**64),
    0.5: 2**63,
    float(np.nextafter(1.0, 0.0)): 2**64 - 2**11,
}


@pytest.mark.parametrize(("rate", "limit"), LIMITS.items())
def test_a_coin_falls_for_exactly_as_many_words_as_its_rate_says(rate: float, limit: int) -> None:
    """Below the limit, which is not a word more; at a rate of 1 or more for every word."""
    words = sorted({0, max(limit - 1, 0), limit, limit + 1, 2**64 - 1})
    expected = [word < limit for word in words]
    assert ChosenWords(*words).coins(len(words), rate).tolist() == expected
    assert is_below(np.array(words, dtype=np.uint64), np.full(len(words), rate)).tolist() == expected


@pytest.mark.parametrize("rate", [1.0, 5.0])
def test_a_coin_of_rate_one_always_falls(rate: float) -> None:
    words = [0, 2**63, 2**64 - 1]
    assert ChosenWords(*words).coins(3, rate).all()
    assert is_below(np.array(words, dtype=np.uint64), np.full(3, rate)).all()


def test_a_release_is_replayed_bit_for_bit() -> None:
    assert np.array_equal(stream(3).normal(100), stream(3).normal(100))


def test_streams_of_releases_and_of_generators_are_unrelated() -> None:
    draws = [stream(0).normal(DRAWS), stream(1).normal(DRAWS), secure_generator().stream(0).normal(DRAWS)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert stats.pearsonr(draws[one], draws[other]).pvalue > FALSE_ALARM


def test_box_muller_pairs_are_unrelated() -> None:
    draws = stream().normal(DRAWS - 1)
    half = len(draws) // 2
    assert stats.pearsonr(draws[:half], draws[half:]).pvalue > FALSE_ALARM
    assert stats.pearsonr(np.abs(draws[:half]), np.abs(draws[half:])).pvalue > FALSE_ALARM


def test_secure_generators_differ_and_say_so() -> None:
    one, other = secure_generator(), secure_generator()
    assert one.key != other.key
    assert len(one.key) == 32
    assert one.private
    assert not seeded_generator(0).private
    assert str(one.key) not in repr(one)


@given(total=st.floats(-1e6, 1e6), std=st.floats(1e-3, 1e3), seed=st.integers(0, 2**32))
def test_every_answer_is_a_whole_number_of_steps_whatever_the_sum(
    total: float, std: float, seed: int
) -> None:
    noise = std * seeded_generator(seed).stream(0).normal(8)
    answer = add_on_grid(np.full(8, total), noise, std=std) / grid_step(std)
    assert np.array_equal(answer, np.rint(answer))


@given(st.floats(-1e5, 1e5), st.floats(1e-3, 1e3))
def test_the_grid_moves_an_answer_by_at_most_a_step(stds: float, std: float) -> None:
    noise, total = std * stream().normal(8), stds * std
    assert np.abs(add_on_grid(np.full(8, total), noise, std=std) - (total + noise)).max() <= grid_step(std)


def test_a_sum_beyond_the_grid_is_clamped() -> None:
    largest = 2.0**52 * grid_step(1.0)
    assert (add_on_grid(np.array([1e12, -1e12]), np.zeros(2), std=1.0) == [largest, -largest]).all()


def test_small_uniforms_keep_their_random_bits() -> None:
    """Without them the tail of Laplace noise has holes, and which outputs can occur depends on the sum."""
    sample = stream().uniform(1_000_000)
    small = sample[sample < 2.0**-12]
    assert len(small) > 100
    assert (np.frexp(small)[0] * 2.0**53 % 64 != 0).any()


class Unlikely(Stream):
    """A stream that begins with some words of zeros, or of ones."""

    def __init__(self, *first: int) -> None:
        super().__init__(seeded_generator(0).key, 0)
        self._first = list(first)

    def words(self, count: int) -> NDArray[np.uint64]:
        drawn = super().words(count)
        return np.full(count, self._first.pop(0), np.uint64) if self._first else drawn


def test_no_tail_of_the_noise_ends() -> None:
    """Noise that cannot be beyond 37 scales tells two sums apart for certain, which no pure epsilon allows."""
    ones = 2**64 - 1
    assert -np.log(Unlikely(0, 0, 0, 0).uniform(1)) > 73
    assert abs(Unlikely(0, 0, 0, 0, 0).laplace(1)) > 73
    assert Unlikely(0, 0).uniform(4).max() < 2.0**-53
    gumbel = [Unlikely(coin, 0, 0, 0, 0).gumbel(1) for coin in (0, ones)]
    assert max(gumbel) > 73
    assert min(gumbel) < -np.log(73)


def test_two_noises_cancel_exactly_in_steps() -> None:
    noise = 2.0 * stream().normal(1000)
    shifted = add_on_grid(np.full(1000, 1.0), noise, std=2.0) - add_on_grid(np.zeros(1000), noise, std=2.0)
    assert (shifted == 1.0).all()


def test_the_noise_is_raised_by_what_rounding_adds_to_the_sensitivity() -> None:
    std, dimension = 3.0, 10_000
    neighbours_differ_by = 1.0 + np.sqrt(dimension) * grid_step(std)
    assert std_on_grid(std, sensitivity=1.0, dimension=dimension) / neighbours_differ_by >= std


class Exhausted(Stream):
    """A stream in which one uniform number uses up its random bits and goes on with more."""

    at = 0

    def words(self, count: int) -> NDArray[np.uint64]:
        place, found = self.at - self.position, super().words(count).copy()
        if 0 <= place < count:
            found[place] = 0
        return found


def drawn_in_parts(
    drawn: Stream, count: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
    """Normal draws after seven words, in parts of a size, and the words that come next."""
    monkeypatch.setattr(noise_module, "DRAWS_AT_ONCE", size)
    drawn.words(7)
    return drawn.normal(count), drawn.words(5)


@pytest.mark.parametrize("at", [-1, 7 + 500 + 100, 7 + 3 * 500 + 450])
@pytest.mark.parametrize("count", [999, 1000])
def test_draws_in_parts_are_those_of_the_stream(count: int, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exhausted, "at", at)
    key = seeded_generator(11).key
    whole = drawn_in_parts(Exhausted(key, 4), count, 10**9, monkeypatch)
    parts = drawn_in_parts(Exhausted(key, 4), count, 64, monkeypatch)
    assert np.array_equal(parts[0], whole[0]) and np.array_equal(parts[1], whole[1])


@pytest.mark.parametrize("skip", [0, 1, 6, 7])
def test_a_later_place_of_a_stream_has_the_words_that_come_there(skip: int) -> None:
    first = stream().words(3 + skip + 5)[-5:]
    (begun := stream()).words(3)
    assert np.array_equal(begun.later(skip).words(5), first)


def test_stream_makes_its_cipher_for_its_first_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release opens several streams, of which not all draw."""
    ciphers = Mock(side_effect=Cipher)
    monkeypatch.setattr("algorithms.privacy.mechanisms.noise.Cipher", ciphers)
    stream = seeded_generator(0).stream(3).later(3)
    assert not ciphers.called
    words = stream.words(2)
    assert ciphers.call_count == 1
    assert np.array_equal(words, seeded_generator(0).stream(3).words(5)[3:])

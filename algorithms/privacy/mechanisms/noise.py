"""Noise and coins from a cryptographic generator: AES-256 in counter mode.

The generator's state is a key and the number of a release. Every release opens its own stream, so its draws do not
depend on how much earlier releases consumed, and a run that is resumed after a crash draws the same noise and coins bit
for bit. The key comes from the operating system. A seeded key exists for tests and comparisons, and gives no privacy.

Floating point: a noisy sum lies on a grid whose step is a power of two far below the noise. The sum and the noise are
both rounded to whole steps and added exactly. So the set of possible outputs does not depend on the sum, which is the
hole that Mironov 2012 found in plain floating-point noise. The standard deviation is increased by what rounding can add
to the sum's sensitivity. Tails are not cut off at 53 random bits: a draw that uses them up continues with more. Not
covered: timing, and the floating-point error of a draw. A Laplace draw below 64 scales is correct to 4 units in its
last place, 2^-45 scales, and its 52 random bits are finer than that. A cell of the grid is at least 2^-25 scales wide,
so its probability changes by less than one part in 2^18.
"""

import hashlib
import math
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

if TYPE_CHECKING:  # it takes seconds to import, and who verifies a card has no use for it
    from torch import Tensor

GRID_BITS = 24
DRAWS_AT_ONCE = 2**16
"""Draws that fit into a core's cache; a multiple of all SIMD lengths, so that splitting changes no bit."""

_MAX_STEPS = 2.0**52
_OF_SAMPLES = 2**62
"""Added to a release's number, which is below, for the stream of its sample."""
_OF_EVALUATION = 2**63
"""The number of the stream for the evaluation of held-out records, which no release and no sample has."""
_OF_RUN = 2**64 - 1
"""The number of the stream for a whole run; no release has this number."""
_OF_PASSES = 2**64 - 2
"""The number of the stream for the pass that begins with a run's first step; those of later ones are smaller."""


@dataclass(frozen=True, repr=False)
class Generator:
    """The secret source of a run's noise and coins.

    key: 32 bytes. private: whether the key is secret and unpredictable; False for a seeded generator.
    """

    key: bytes
    private: bool

    def stream(self, release: int) -> "Stream":
        """The stream of one release, numbered from 0."""
        return Stream(self.key, release)

    def evaluation(self) -> "Stream":
        """The stream of the one release of the run's held-out records."""
        return Stream(self.key, _OF_EVALUATION)


def secure_generator() -> Generator:
    """A generator with a fresh key from the operating system."""
    return Generator(secrets.token_bytes(32), private=True)


def seeded_generator(seed: int) -> Generator:
    """A reproducible generator for tests and comparisons; it gives no privacy, since the seed reveals the noise."""
    return Generator(hashlib.sha256(f"seeded noise {seed}".encode()).digest(), private=False)


def generator_of(noise: str, seed: int) -> Generator:
    """A new generator: secret where `noise` is "secure", otherwise the one of the seed."""
    return secure_generator() if noise == "secure" else seeded_generator(seed)


class Stream:
    """Uniform, normal, Laplace and Gumbel draws of one release, and independent coins."""

    def __init__(self, key: bytes, release: int, position: int = 0) -> None:
        self._key, self._release, self.position = key, release, position

    @cached_property
    def _cipher(self) -> CipherContext:
        """What encrypts the words from the position on; made for the first ones, as many streams draw none."""
        # A block of the cipher is two words; it is encrypted by its number, so that a stream can start at any. The
        # first half of the counter is the release, so that no block of two releases is the same.
        nonce = self._release.to_bytes(8, "big") + (self.position // 2).to_bytes(8, "big")
        # 16 bytes: release and block, big-endian, as CTR counts
        cipher = Cipher(algorithms.AES(self._key), modes.CTR(nonce)).encryptor()
        cipher.update(bytes(8 * (self.position % 2)))  # an odd position begins in the middle of a block
        return cipher

    def later(self, words: int) -> "Stream":
        """An independent copy of this stream after `words` more words."""
        return type(self)(self._key, self._release, self.position + words)

    def of_sample(self) -> "Stream":
        """The stream of this release's sample, apart from its noise, since it takes no fixed number of words."""
        return Stream(self._key, _OF_SAMPLES + self._release)

    def words(self, count: int) -> NDArray[np.uint64]:
        """Uniform 64-bit words, shape [count]."""
        encrypted = self._cipher.update(bytes(8 * count))  # encrypted zeros are the key stream
        self.position += count
        return np.frombuffer(encrypted, dtype=np.uint64)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Uniform on (0, 1), shape [count], each with 52 random bits below a random exponent.

        The resolution stays relative towards 0, so the tail of a logarithm has no gaps wider than its rounding, and no
        end: numbers below 2^-53 are drawn again with more bits.
        """
        fraction, exponent = self.words(count), self.words(count)
        numbers = _join_words(fraction, exponent)
        # No bit of the exponent is set (once in 2^53): the number is below 2^-53, and its bits are drawn anew at that
        # scale.
        below = np.flatnonzero(exponent >> np.uint64(11) == 0)  # 53 bits are used, the lowest 11 are not
        if len(below):
            numbers[below] = 2.0**-53 * self.uniform(len(below))
        return numbers

    def coins(self, count: int, rate: float) -> NDArray[np.bool_]:
        """Independent coins, shape [count], each True with probability `rate` rounded down to a multiple of 2^-64."""
        if rate >= 1:
            return np.ones(count, dtype=np.bool_)
        # A rate that is rounded down samples less, and so costs no more than what is charged.
        return self.words(count) < np.uint64(floor_rate(rate))

    def pairs(self, count: int) -> NDArray[np.uint64]:
        """Two words for each of `count` records, shape [count, 2]; they do not depend on later records."""
        return self.words(2 * count).reshape(count, 2)

    def parts(self, count: int, parts: int) -> NDArray[np.int64]:
        """The part, of `parts`, of each of `count` records, shape [count]; the same in all releases of a run."""
        words = Stream(self._key, _OF_RUN).words(count)
        assigned: NDArray[np.int64] = (words % np.uint64(parts)).astype(np.int64)
        return assigned

    def allocation(self, count: int, parts: int, first_step: int) -> NDArray[np.int64]:
        """The step, of `parts`, of each of `count` records in the pass that begins with a step, shape [count].

        It is the same in all releases of the pass, and independent of other passes, also of another number of parts.
        """
        words = Stream(self._key, _OF_PASSES - first_step).words(count)
        # A step has a chance of floor or ceil(2^64 / parts) times 2^-64: less than 2^-64 from 1 / parts.
        assigned: NDArray[np.int64] = (words % np.uint64(parts)).astype(np.int64)
        return assigned

    def below(self, count: int, bound: int) -> NDArray[np.int64]:
        """Whole numbers from 0 to below `bound`, at most 2^63, all equally likely, shape [count]."""
        limit = 2**64 // bound * bound  # words from here on would make the first numbers likelier
        words = self.words(count)
        while not (is_fair := words <= np.uint64(limit - 1)).all():
            words = np.concatenate([words[is_fair], self.words(count - int(is_fair.sum()))])
        return (words % np.uint64(bound)).astype(np.int64)

    def subset(self, count: int, size: int) -> NDArray[np.intp]:
        """A random subset of `size` of `count` indices, ascending; all are equally likely.

        It is the first `size` different ones of a sequence of independent indices, or what these leave.
        """
        if size > count // 2:
            # Of more than half, it is quicker to draw who is left out; the complement of a uniform subset is one, too.
            is_in = np.ones(count, dtype=np.bool_)
            is_in[self.subset(count, count - size)] = False
            return np.flatnonzero(is_in)
        chosen = np.empty(0, dtype=np.int64)
        while len(chosen) < size:
            # Keep the first of equal indices, in the order drawn: in the order of values, small ones would be likelier.
            drawn = np.concatenate([chosen, self.below(2 * (size - len(chosen)), count)])
            _, first = np.unique(drawn, return_index=True)
            chosen = drawn[np.sort(first)]
        return np.sort(chosen[:size]).astype(np.intp)

    def normal(self, count: int) -> NDArray[np.float64]:
        """Standard normal draws, shape [count], by Box and Muller 1958; large numbers use all cores."""
        half = (count + 1) // 2
        numbers = self._normal_in_parts(half) if half > DRAWS_AT_ONCE else None
        if numbers is None:
            numbers = np.concatenate(_box_muller(self.uniform(half), self.uniform(half)))
        return numbers[:count]

    def _normal_in_parts(self, half: int) -> NDArray[np.float64] | None:
        """The same draws, bit for bit, computed in parts from their positions in this stream.

        None, with nothing drawn, if a uniform draw needs more words (once in 2^53), since later positions then change.
        """
        numbers = np.empty((2, half))

        def draw(start: int) -> bool:
            size = min(DRAWS_AT_ONCE, half - start)
            # Drawn at once, the stream has four runs of `half` words: fraction and exponent of radii, then those of
            # angles.
            words = [self.later(number * half + start).words(size) for number in range(4)]
            if min(int(words[1].min()), int(words[3].min())) >> 11 == 0:
                return False
            numbers[:, start : start + size] = _box_muller(_join_words(*words[:2]), _join_words(*words[2:]))
            return True

        if not all(_drawers().map(draw, range(0, half, DRAWS_AT_ONCE))):
            return None
        after = self.later(4 * half)
        self._cipher, self.position = after._cipher, after.position
        return numbers.reshape(-1)

    def laplace(self, count: int) -> NDArray[np.float64]:
        """Laplace draws of scale 1, shape [count]: a random sign times a standard exponential."""
        sign = np.where(self.coins(count, 0.5), 1.0, -1.0)
        return -sign * np.log(self.uniform(count))

    def k_norm(self, count: int, *, box: bool) -> NDArray[np.float64]:
        """A draw x, shape [count], with density proportional to exp(-|x|), for the L2 norm or that of `Box`.

        Its length is a Gamma(count) draw. Its direction is that of any point whose density depends on its norm alone.
        For a box such a point is u - s 1 with u uniform in [0, 1]^count and s in [0, 1], since the values of s that
        lead to x have measure 1 - |x|.
        """
        length = -float(np.log(self.uniform(count)).sum())  # a sum of `count` exponential draws
        if not box:
            direction = self.normal(count)
            return length / float(np.linalg.norm(direction)) * direction
        direction = self.uniform(count) - self.uniform(1)
        width = max(float(direction.max()), 0.0) - min(float(direction.min()), 0.0)
        return length / width * direction

    def gumbel(self, count: int) -> NDArray[np.float64]:
        """Standard Gumbel draws, shape [count]: minus the logarithm of a standard exponential."""
        near_one = self.coins(count, 0.5)
        # The distance of a uniform number from 0 or from 1, since both its tails count.
        distance = 0.5 * self.uniform(count)  # in (0, 1/2)
        return -np.log(np.where(near_one, -np.log1p(-distance), -np.log(distance)))


def _join_words(fraction: NDArray[np.uint64], exponent: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers from two words each."""
    # The bit length of 53 random bits is geometric: each length is half as likely as the next, as the exponent of a
    # uniform number is. The fraction lies in [1/2, 1).
    bits = np.frexp((exponent >> np.uint64(11)).astype(np.float64))[1]  # the bit length of a whole number
    numbers: NDArray[np.float64] = np.ldexp(
        0.5 + (fraction >> np.uint64(12)).astype(np.float64) * 2.0**-53, bits.astype(np.int64) - 53
    )
    return numbers


def _box_muller(
    first: NDArray[np.float64], other: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    radius, angle = np.sqrt(-2.0 * np.log(first)), 2.0 * math.pi * other
    return radius * np.cos(angle), radius * np.sin(angle)


@cache
def _drawers() -> ThreadPoolExecutor:
    """Threads for large draws: the cipher and numpy release the interpreter's lock."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="noise")


def floor_rate(rate: float) -> int:
    """A probability as a multiple of 2^-64, rounded down."""
    return math.floor(rate * 2.0**64)


def is_below(words: NDArray[np.uint64], rates: NDArray[np.float64]) -> NDArray[np.bool_]:
    """A coin for each word, True with its own rate, rounded down to a multiple of 2^-64."""
    certain = rates >= 1
    limits = np.floor(np.where(certain, 0.0, rates) * 2.0**64).astype(np.uint64)
    below: NDArray[np.bool_] = certain | (words < limits)
    return below


def steps_of(noise: NDArray[np.float64], *, std: float) -> "Tensor":
    """Noise in whole steps of the grid of `std`, float64."""
    import torch

    return torch.from_numpy(np.rint(noise / grid_step(std)))  # to the nearest step


def add_steps(total: "Tensor", noise: "Tensor", *, std: float) -> "Tensor":
    """A sum plus noise in steps, both on the grid of `std` and added exactly, on the sum's device.

    total: shape [d], float64. noise: as `steps_of` gives it, [d], on any device. std: scale of the noise, above 0,
    public. Coordinates of the sum are clamped to 2^28 times `std`, which does not increase the sensitivity.
    """
    import torch

    step = grid_step(std)
    # Noise rounded to whole steps, added to a sum in whole steps, is their exact sum rounded: post-processing.
    # At most 2^52 steps, and noise of far fewer: float64 adds such whole numbers exactly.
    # 2^52 steps are at most 2^28 times `std`
    steps = torch.round(total / step).clamp_(-_MAX_STEPS, _MAX_STEPS)
    return steps.add_(noise.to(total.device)).mul_(step)


def grid_step(std: float) -> float:
    """The grid's step: `std` times 2^-24, rounded down to a power of two."""
    return 2.0 ** (math.floor(math.log2(std)) - GRID_BITS)  # 2^-25 to 2^-24 of `std`


def std_on_grid(std: float, *, sensitivity: float, dimension: int) -> float:
    """The standard deviation that compensates for rounding a sum of `dimension` coordinates to the grid.

    Rounding moves each coordinate by at most half a step, so two rounded neighbouring sums differ by at most
    sensitivity + sqrt(dimension) * step in L2 norm.
    """
    return std * (1.0 + math.sqrt(dimension) * grid_step(std) / sensitivity)


def scale_on_grid(scale: float, *, sensitivity: float, dimension: int) -> float:
    """`std_on_grid` for Laplace noise, with the L1 norm: at most sensitivity + dimension * step."""
    return scale * (1.0 + dimension * grid_step(scale) / sensitivity)

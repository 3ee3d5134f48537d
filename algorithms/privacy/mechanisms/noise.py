"""Noise and coins from a cryptographic generator: AES-256 in counter mode.

The generator's state is a key and the index of the release it serves. Every release opens its own stream, so what a
release draws does not depend on how much an earlier one consumed, and a run that is taken up again after a crash
draws the same noise and coins bit for bit. The key comes from the operating system; a seeded key exists for tests
and comparisons and gives no privacy.

Floating point: a noised sum is rounded to a grid whose step is a power of two far below the noise, and both the sum
and the noise are whole numbers of steps, added exactly. Which outputs are reachable then does not depend on the sum,
the hole that Mironov 2012 found in plain floating-point noise. The standard deviation is raised by what rounding the
sum can add to its sensitivity. No tail ends where 53 random bits do: a draw that uses them up
goes on with more. Left open: timing; and that a draw is computed in floating point. A Laplace draw below 64 scales is
right to 4 units in its last place, 2^-45 scales, and its 52 random bits lie closer than that; a cell of the grid is at
least 2^-25 scales wide, so that the probability of each is changed by less than one part in 2^18.
"""

import hashlib
import math
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

if TYPE_CHECKING:  # it takes seconds to import, and who verifies a card has no use for it
    from torch import Tensor

GRID_BITS = 24
_PART = 2**16
"""Draws of a part, as many as stay in a core's cache; a multiple of all vectors' lengths, so that no bit changes."""

_MAX_STEPS = 2.0**52
_OF_RUN = 2**64 - 1
"""The number of the stream of what holds for a whole run; no release has it."""


@dataclass(frozen=True, repr=False)
class Generator:
    """The secret source of all noise and coins of one run.

    key: 32 bytes. private: whether the key is secret and unpredictable; False for a seeded generator.
    """

    key: bytes
    private: bool

    def stream(self, release: int) -> "Stream":
        """The stream of one release, numbered from 0."""
        return Stream(self.key, release)


def secure_generator() -> Generator:
    """A generator with a fresh key from the operating system."""
    return Generator(secrets.token_bytes(32), private=True)


def seeded_generator(seed: int) -> Generator:
    """A reproducible generator for tests and comparisons; it gives no privacy, the seed tells the noise."""
    return Generator(hashlib.sha256(f"seeded noise {seed}".encode()).digest(), private=False)


class Stream:
    """Uniform, normal, Laplace and Gumbel draws of one release, and independent coins."""

    def __init__(self, key: bytes, release: int, position: int = 0) -> None:
        self._key, self._release, self.position = key, release, position
        # A block of the cipher is two words; it is encrypted by its number, so that a stream can start at any.
        nonce = release.to_bytes(8, "big") + (position // 2).to_bytes(8, "big")
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(nonce)).encryptor()
        self._cipher.update(bytes(8 * (position % 2)))

    def later(self, words: int) -> "Stream":
        """The same stream when so many more words have been drawn; both go on by themselves."""
        return type(self)(self._key, self._release, self.position + words)

    def words(self, count: int) -> NDArray[np.uint64]:
        """Uniform 64-bit words, shape [count]."""
        self.position += count
        return np.frombuffer(self._cipher.update(bytes(8 * count)), dtype=np.uint64)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Uniform on (0, 1), shape [count], each with 52 random bits below a random exponent.

        The bits do not thin out towards 0, so that the tail of a logarithm has no holes wider than its rounding, and no
        end: of those below 2^-53 each is drawn again there.
        """
        fraction, exponent = self.words(count), self.words(count)
        found = _joined(fraction, exponent)
        below = np.flatnonzero(exponent >> np.uint64(11) == 0)
        if len(below):
            found[below] = 2.0**-53 * self.uniform(len(below))
        return found

    def coins(self, count: int, rate: float) -> NDArray[np.bool_]:
        """Independent coins, shape [count], each True with probability `rate` rounded down to a multiple of 2^-64."""
        if rate >= 1:
            return np.ones(count, dtype=np.bool_)
        return self.words(count) < np.uint64(math.floor(rate * 2.0**64))

    def pairs(self, count: int) -> NDArray[np.uint64]:
        """Two words for each of `count` records, shape [count, 2]; a record's own do not depend on later records."""
        return self.words(2 * count).reshape(count, 2)

    def parts(self, count: int, parts: int) -> NDArray[np.int64]:
        """To which of `parts` each of `count` records belongs, shape [count]; the same in all releases of a run."""
        words = Stream(self._key, _OF_RUN).words(count)
        found: NDArray[np.int64] = (words % np.uint64(parts)).astype(np.int64)
        return found

    def subset(self, count: int, size: int) -> NDArray[np.intp]:
        """A random subset of `size` of `count` places, ascending, each subset equally likely up to ties of 64 bits."""
        words = self.words(count)
        return np.sort(np.argpartition(words, size - 1)[:size])

    def normal(self, count: int) -> NDArray[np.float64]:
        """Standard normal draws, shape [count], by Box and Muller 1958; many of them on all cores."""
        half = (count + 1) // 2
        found = self._normal_in_parts(half) if half > _PART else None
        if found is None:
            found = np.concatenate(_box_muller(self.uniform(half), self.uniform(half)))
        return found[:count]

    def _normal_in_parts(self, half: int) -> NDArray[np.float64] | None:
        """The same draws, a part at a time, each from its places of this stream; the bits are the same, too.

        None, with nothing drawn, where a uniform draw goes on with more words (once in 2^53): all later ones then move.
        """
        found = np.empty((2, half))

        def draw(start: int) -> bool:
            size = min(_PART, half - start)
            words = [self.later(number * half + start).words(size) for number in range(4)]
            if min(int(words[1].min()), int(words[3].min())) >> 11 == 0:
                return False
            found[:, start : start + size] = _box_muller(_joined(*words[:2]), _joined(*words[2:]))
            return True

        if not all(_drawers().map(draw, range(0, half, _PART))):
            return None
        after = self.later(4 * half)
        self._cipher, self.position = after._cipher, after.position
        return found.reshape(-1)

    def laplace(self, count: int) -> NDArray[np.float64]:
        """Laplace draws of scale 1, shape [count]: a random sign times a standard exponential."""
        sign = np.where(self.coins(count, 0.5), 1.0, -1.0)
        return -sign * np.log(self.uniform(count))

    def k_norm(self, count: int, *, box: bool) -> NDArray[np.float64]:
        """A draw x, shape [count], of density proportional to exp(-|x|), for the L2 norm or for that of `Box`.

        Its length is a Gamma(count) draw; its direction that of any point whose density depends on its norm alone. For
        a box such a point is u - s 1, u uniform in [0, 1]^count and s in [0, 1]: as many s as 1 - |x| lead to x.
        """
        length = -float(np.log(self.uniform(count)).sum())
        if not box:
            direction = self.normal(count)
            return length / float(np.linalg.norm(direction)) * direction
        direction = self.uniform(count) - self.uniform(1)
        width = max(float(direction.max()), 0.0) - min(float(direction.min()), 0.0)
        return length / width * direction

    def gumbel(self, count: int) -> NDArray[np.float64]:
        """Standard Gumbel draws, shape [count]: minus the logarithm of a standard exponential."""
        near_one = self.coins(count, 0.5)
        distance = 0.5 * self.uniform(
            count
        )  # of a uniform number from 0 or from 1, since both its tails count
        return -np.log(np.where(near_one, -np.log1p(-distance), -np.log(distance)))


def _joined(fraction: NDArray[np.uint64], exponent: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers of two words each."""
    bits = np.frexp((exponent >> np.uint64(11)).astype(np.float64))[1]
    found: NDArray[np.float64] = np.ldexp(
        0.5 + (fraction >> np.uint64(12)).astype(np.float64) * 2.0**-53, bits.astype(np.int64) - 53
    )
    return found


def _box_muller(
    one: NDArray[np.float64], other: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    radius, angle = np.sqrt(-2.0 * np.log(one)), 2.0 * math.pi * other
    return radius * np.cos(angle), radius * np.sin(angle)


@cache
def _drawers() -> ThreadPoolExecutor:
    """Threads for parts of many draws: the cipher and numpy let the interpreter's lock go."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="noise")


def is_below(words: NDArray[np.uint64], rates: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Coins with rates of their own, one for each word, each True with its rate rounded down to a multiple of 2^-64."""
    certain = rates >= 1
    limits = np.floor(np.where(certain, 0.0, rates) * 2.0**64).astype(np.uint64)
    found: NDArray[np.bool_] = certain | (words < limits)
    return found


def add_on_grid(total: NDArray[np.float64], noise: NDArray[np.float64], *, std: float) -> NDArray[np.float64]:
    """`total + noise`, both rounded to the grid that belongs to `std` and added exactly.

    total, noise: shape [d]. std: scale of the noise, above 0; public. A coordinate of the sum beyond 2^28 times
    `std` is clamped there, which no neighbour can feel as more than its own contribution.
    """
    import torch

    return add_steps(torch.from_numpy(total), steps_of(noise, std=std), std=std).numpy()


def steps_of(noise: NDArray[np.float64], *, std: float) -> NDArray[np.float64]:
    """Noise in whole steps of the grid that belongs to `std`."""
    return np.rint(noise / grid_step(std))


def add_steps(total: "Tensor", noise: NDArray[np.float64], *, std: float) -> "Tensor":
    """`add_on_grid` where the sum is, on any device, of noise in steps."""
    import torch

    step = grid_step(std)
    steps = torch.round(total / step).clamp_(-_MAX_STEPS, _MAX_STEPS)
    return steps.add_(torch.from_numpy(noise).to(total.device)).mul_(step)


def grid_step(std: float) -> float:
    """The grid's step: `std` times 2^-24, rounded down to a power of two."""
    return 2.0 ** (math.floor(math.log2(std)) - GRID_BITS)


def std_on_grid(std: float, *, sensitivity: float, dimension: int) -> float:
    """The standard deviation that makes up for rounding a sum of `dimension` coordinates to the grid.

    Rounding moves each coordinate by at most half a step, so two neighbouring sums, once rounded, differ by at most
    sensitivity + sqrt(dimension) * step in L2 norm.
    """
    return std * (1.0 + math.sqrt(dimension) * grid_step(std) / sensitivity)


def scale_on_grid(scale: float, *, sensitivity: float, dimension: int) -> float:
    """`std_on_grid` for Laplace noise, where the L1 norm counts: at most sensitivity + dimension * step."""
    return scale * (1.0 + dimension * grid_step(scale) / sensitivity)

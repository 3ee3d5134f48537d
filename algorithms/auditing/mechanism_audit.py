"""An audit of each mechanism alone on its two worst neighbours: many draws, no training, no records.

The sum is zero for one neighbour and as far away as one record can move it for the other. In a selection the candidates
tie, or one loses by the whole bound. The score is the likelihood ratio, which gives the best test, and its result is
compared with the mechanism's event.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import dp_accounting as dp
import numpy as np
import torch
from numpy.typing import NDArray

from algorithms.auditing.bounds import (
    Attack,
    family_of,
    many_runs,
)
from algorithms.auditing.game import key_of
from algorithms.auditing.likelihood import length_of
from algorithms.gradients import L1, L2, Box
from algorithms.privacy.accounting.epsilon import Accountant, epsilon
from algorithms.privacy.mechanisms.correlated import Correlated, Toeplitz
from algorithms.privacy.mechanisms.noise import Stream
from algorithms.privacy.mechanisms.release import (
    Gaussian,
    Gumbel,
    KNorm,
    Laplace,
    Release,
    argmin_release,
    gradient_release,
)
from algorithms.privacy.mechanisms.release_noise import NoiseAhead, add_noise, noisy_argmin
from algorithms.privacy.mechanisms.sampling import (
    FixedOrder,
    FullBatch,
    Poisson,
    draw_sample,
)

Array = NDArray[np.float64]
DELTA = 1e-5
_DIMENSION = 3
_STEPS, _PARTS, _WORDS = 4, 2, 8
"""For a run with correlated noise: steps, parts of the records, and the largest number of stream words for a draw."""


@dataclass(frozen=True)
class MechanismAudit:
    """A mechanism's audit. claimed: epsilon of its event at delta 1e-5."""

    name: str
    claimed: float
    attack: Attack


@dataclass(frozen=True)
class _Neighbours:
    """scores: (release, stream, whether the record is in, draws) -> log likelihood ratios, shape [draws]."""

    release: Release
    scores: Callable[[Release, Stream, bool, int], Array]


def audit_mechanisms(*, draws: int = 4000, seed: int = 0, only: Sequence[str] = ()) -> list[MechanismAudit]:
    """The audit of every mechanism at a noise multiplier of 1, of correlated noise at 1.5.

    Args:
        draws: For each neighbour; draws in several dimensions are made one after the other.
        seed: Of the draws.
        only: Names of mechanisms; empty for all.

    Example:
        >>> any(found.attack.is_violated for found in audit_mechanisms(draws=200))
        False
    """
    rows = []
    for name, pair in ((name, _NEIGHBOURS[name]) for name in only or _NEIGHBOURS):
        sides = [
            pair.scores(pair.release, key_of("mechanism", name, seed).stream(side), bool(side), draws)
            for side in (0, 1)
        ]
        schedule = [(pair.release.event(), 1)]
        accountant: Accountant = "rdp" if isinstance(schedule[0][0], dp.dp_event.ZCDpEvent) else "pld"
        claimed, cost = family_of(schedule, DELTA, accountant=accountant)
        attack = many_runs(np.stack(sides, axis=1), claimed, cost, DELTA)
        rows.append(MechanismAudit(name, epsilon(schedule, DELTA, accountant=accountant), attack))
    return rows


def _on_a_line(release: Release, stream: Stream, is_in: bool, draws: int) -> Array:
    """Many draws of one coordinate, as the coordinates of one noise vector."""
    rate, scale = release.sampling.rate, release.noise_scale
    reached = is_in * np.ones(draws)
    if not isinstance(release.sampling, FullBatch):
        reached = np.zeros(draws)
        reached[draw_sample(release.sampling, draws, stream, step=0)] = float(is_in)
    total = torch.from_numpy(reached * release.clipping.sensitivity)
    seen = add_noise(total, release, stream).numpy() / scale
    shift = release.clipping.sensitivity / scale
    is_laplace = isinstance(release.noise, Laplace)
    # Log p_1 / p_0 at scale 1: |x| - |x - shift| for Laplace noise, x shift - shift^2 / 2 for normal noise.
    ratio = np.abs(seen) - np.abs(seen - shift) if is_laplace else seen * shift - shift**2 / 2
    if rate == 1:
        return np.asarray(ratio)
    return np.asarray(np.logaddexp(np.log1p(-rate), np.log(rate) + ratio))  # log(1 - q + q e^ratio)


def _in_space(release: Release, stream: Stream, is_in: bool, draws: int) -> Array:
    far = np.zeros(_DIMENSION)
    far[0] = release.clipping.sensitivity
    columns = []
    for _ in range(draws):
        seen = add_noise(torch.from_numpy(is_in * far), release, stream).numpy()
        # Log p_1 / p_0 of the density exp(-|x| / scale).
        nearer = length_of(seen, release.clipping) - length_of(seen - far, release.clipping)
        columns.append(nearer / release.noise_scale)
    return np.array(columns)


def _play_selection(release: Release, stream: Stream, is_in: bool, draws: int) -> Array:
    """Two candidates; with the record the first loses by the bound, so choosing it is evidence against the record."""
    bound = release.clipping.sensitivity
    picks = np.array(
        [
            noisy_argmin(torch.tensor([is_in * bound, 0.0], dtype=torch.float64), release, stream)
            for _ in range(draws)
        ]
    )
    # Exact for Gumbel noise, whose difference is logistic; without the record both are as likely.
    loses = 1 / (1 + np.exp(bound / release.noise_scale))
    log_ratios: Array = np.where(picks == 0, np.log(2 * loses), np.log(2 * (1 - loses)))
    return log_ratios


def _over_steps(release: Release, stream: Stream, is_in: bool, draws: int) -> Array:
    """A record in every second step of a run; each coordinate is a separate run, whitened by the strategy."""
    noise = release.noise
    assert isinstance(noise, Correlated)
    assert isinstance(noise.strategy, Toeplitz)
    column = noise.strategy.column(noise.steps)
    correlator, released, means = noise.strategy.correlator(draws), [], []
    for step in range(noise.steps):
        step_release = replace(release, noise=replace(noise, step=step))
        takes_part = float(step % _PARTS == 0)
        ahead = NoiseAhead.of(step_release, stream.later(step * _WORDS * draws), draws, correlator=correlator)
        sums = torch.full((draws,), is_in * takes_part * release.clipping.sensitivity, dtype=torch.float64)
        released.append(ahead.add_noise(sums).numpy() / release.noise_scale)
        means.append(takes_part * release.clipping.sensitivity / release.noise_scale)
    rows = range(noise.steps)
    # C [steps, steps], lower triangular
    through = np.array([[column[i - j] if 0 <= i - j < len(column) else 0.0 for j in rows] for i in rows])
    shift = through @ np.array(means)
    # Released is means + C^-1 z, so C times it is shift + z with independent z.
    return np.asarray(shift @ (through @ np.array(released)) - shift @ shift / 2)


_NEIGHBOURS = {
    "Gaussian": _Neighbours(gradient_release(FullBatch(), L2(1.0), Gaussian(1.0), 1.0), _on_a_line),
    "Gaussian on a Poisson sample": _Neighbours(
        gradient_release(Poisson(0.5), L2(1.0), Gaussian(1.0), 1.0), _on_a_line
    ),
    "Gaussian, correlated over four steps": _Neighbours(
        gradient_release(
            FixedOrder(_PARTS), L2(1.0), Correlated(1.5, Toeplitz((0.7, 0.5, 0.3)), _STEPS), 1.0
        ),
        _over_steps,
    ),
    "Laplace": _Neighbours(gradient_release(FullBatch(), L1(1.0), Laplace(1.0), 1.0), _on_a_line),
    "K-norm of the box": _Neighbours(gradient_release(FullBatch(), Box(1.0), KNorm(1.0), 1.0), _in_space),
    "Gumbel selection": _Neighbours(argmin_release(1.0, Gumbel(1.0)), _play_selection),
    "Laplace selection": _Neighbours(argmin_release(1.0, Laplace(1.0)), _play_selection),
}

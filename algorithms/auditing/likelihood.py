"""The attacker's score of what it saw: the log likelihood ratio of answers with and without a canary."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import toeplitz

from algorithms.auditing.game import Answer, Game
from algorithms.core.plan import Plan
from algorithms.gradients import L1, Affine, Box, PerLayer
from algorithms.privacy.accounting.correlated import CorrelatedDpEvent, buffered_column
from algorithms.privacy.accounting.epsilon import REPLACE_ONE
from algorithms.privacy.mechanisms.correlated import Correlated
from algorithms.privacy.mechanisms.release import KNorm, Laplace, Minimum, NoNoise

Array = NDArray[np.float64]


def contribution(game: Game, answer: Answer, features: Array) -> Array:
    """A canary's clipped contribution to a sum."""
    bound = answer.bound
    if answer.kind == "norms":
        return np.array([bound.norm])
    if answer.kind == "norm count":
        return np.array([-0.5])
    if answer.kind == "loss gain":
        return np.array([-features @ answer.public_query.numpy()]).clip(-bound.norm, bound.norm)
    if answer.kind == "total":
        label = torch.from_numpy(game.labels([int(features.any())]))[0]
        gradient = answer.public_query(torch.from_numpy(features.astype(np.float32)), label)
        vector = gradient.double().numpy().reshape(-1)
        norm = float(np.linalg.norm(vector, 1 if isinstance(bound, L1) else 2))
        shrunk: Array = vector * min(1.0, bound.norm / max(norm, 1e-300))
        return shrunk
    if isinstance(bound, PerLayer):
        layers = zip(np.split(features, len(bound.norms)), bound.norms, strict=True)
        return np.concatenate([layer * norm / np.linalg.norm(layer) for layer, norm in layers])
    if isinstance(bound, Affine):
        features = (features - bound.shift.double().numpy()) / bound.scale.double().numpy()
    norm = min(bound.clip_norm, bound.input_norm) if isinstance(bound, Minimum) else bound.norm
    clipped: Array = features * norm / length_of(features, bound)
    return clipped


def length_of(vector: Array, bound: Any) -> float:
    """A vector's length in the norm of a bound."""
    if isinstance(bound, Box):
        return float(max(vector.max(), 0.0) - min(vector.min(), 0.0))
    return float(np.linalg.norm(vector, 1 if isinstance(bound, L1) else 2))


def log_likelihood(game: Game, plan: Plan, answers: Sequence[Answer], canary: int, *, alone: bool) -> float:
    """The log likelihood ratio of the answers with and without a canary, which is the best test.

    Args:
        game, plan: Of the run.
        answers: Of the barrier.
        canary: Its index.
        alone: Whether there is no other canary; otherwise queries that mix all records are skipped, and only the
            coordinates of this canary are used.

    Source:
        Neyman and Pearson 1933: no test of the same rate of false alarms misses less.
    """
    series = [answer for answer in answers if isinstance(answer.noise, Correlated)]
    others = [answer for answer in answers if not isinstance(answer.noise, Correlated)]
    ratios = [_log_ratio(game, plan, answer, canary, alone=alone) for answer in others]
    # Correlated noise makes the steps' answers dependent, so that their likelihood is of all together: of the whitened
    # answers, averaged over the record's coins.
    if series:
        features = game.canary(canary)
        charged = next(event for event, _ in plan.schedule if isinstance(event, CorrelatedDpEvent))
        through = whitening(charged, len(series))
        ratios.append(_of_taking_part(game, series, through, features))
        if plan.adjacency == REPLACE_ONE.name:
            ratios.append(-_of_taking_part(game, series, through, -features))
    return math.fsum(ratios)


@lru_cache
def whitening(event: CorrelatedDpEvent, steps: int) -> Array:
    """The lower triangular matrix [steps, steps] that whitens the noise of all steps, with the event's scale.

    It is computed from the event, not from the code that draws the noise.
    """
    if event.leaves:
        mixed = _tree_noise(event.leaves, steps)
        whitener: Array = np.linalg.inv(np.linalg.cholesky(mixed @ mixed.T))
        return whitener
    column = np.zeros(steps)
    column[: len(event.coefficients)] = event.coefficients[:steps]
    if event.weights:
        column = buffered_column(np.array(event.weights), np.array(event.decays), steps)
    return np.tril(toeplitz(column))


def _tree_noise(leaves: int, steps: int) -> Array:
    """The noise of each step by that of the nodes, [steps, nodes]: least squares over complete nodes (Honaker 2015)."""
    sizes = [1 << level for level in range(leaves.bit_length())]
    trees = [(start, min(start + leaves, steps)) for start in range(0, steps, leaves)]
    spans = [
        (a, a + size) for start, end in trees for size in sizes for a in range(start, end - size + 1, size)
    ]
    covers = np.array([[a <= leaf < b for leaf in range(steps)] for a, b in spans], dtype=np.float64)
    # The sum of the first leaves is that of the largest complete nodes that they fill, from the left. The noise of such
    # a node is what least squares take of its own and of all nodes below it.
    sums = np.zeros((steps + 1, len(spans)))
    for start, end in trees:
        for done in range(start + 1, end + 1):
            sums[done], a = sums[start], start
            for size in reversed(sizes):
                if a + size <= done:
                    below = [n for n, (left, right) in enumerate(spans) if a <= left and right <= a + size]
                    sums[done, below] += np.ones(size) @ np.linalg.pinv(covers[below, a : a + size])
                    a += size
    return np.diff(sums, axis=0)


def _of_taking_part(game: Game, series: Sequence[Answer], through: Array, features: Array) -> float:
    """The log likelihood ratio of an answer with a record and with nothing in its place."""
    first, steps = series[0], len(series)
    whole = contribution(game, first, features)
    length = float(np.linalg.norm(whole))
    # [steps], along the contribution, whitened
    seen = through @ np.array([answer.value @ whole for answer in series]) / (length * first.scale)
    moves = through * (length / first.scale)  # [steps, steps]: how a participation in a step shows
    parts, chance = first.sampling.parts, first.sampling.chance
    logs = []
    for start in range(min(parts, steps)):
        inside = moves[:, start::parts]  # the columns of one part's steps
        if chance == 1:
            inside = inside.sum(axis=1, keepdims=True)
        ratios = inside.T @ seen - np.square(inside).sum(axis=0) / 2  # log of N(move, 1) over N(0, 1)
        # In each of its steps by a coin of its own.
        logs.append(float(np.logaddexp(_log(1 - chance), math.log(chance) + ratios).sum()))
    logs += [0.0] * (parts - len(logs))  # of parts whose turn never comes
    # The mean over the parts, which are equally likely.
    return float(np.logaddexp.reduce(logs)) - math.log(parts)


def _log_ratio(game: Game, plan: Plan, answer: Answer, canary: int, *, alone: bool) -> float:
    if isinstance(answer.noise, NoNoise):
        return 0.0
    features = game.canary(canary)
    replaced = -features if plan.adjacency == REPLACE_ONE.name else np.zeros_like(features)
    if answer.kind == "argmin":
        return _of_selection(answer, features, replaced) if alone else 0.0
    if not alone and answer.kind not in ("gradient", "minimum"):
        return 0.0
    with_it = contribution(game, answer, features)
    without = contribution(game, answer, replaced) if replaced.any() else np.zeros_like(with_it)
    others = np.zeros_like(with_it)
    if answer.kind == "total":
        # The others' sum, on average.
        others = game.zeros * answer.sampling.rate * contribution(game, answer, np.zeros_like(features))
    if answer.kind == "norm count":
        others = np.array([0.5 * game.zeros * answer.sampling.rate])
    seen = answer.value - others
    if not alone:
        support = with_it != 0
        seen, with_it, without = seen[support], with_it[support], without[support]
    rate, rest = answer.sampling.rate, _log_density(answer, seen)
    mixed = [
        np.logaddexp(_log(1 - rate) + rest, math.log(rate) + _log_density(answer, seen - there))
        for there in (with_it, without)
    ]
    return float(mixed[0] - mixed[1])


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _log_density(answer: Answer, residual: Array) -> float:
    """The log density of the claimed noise, up to a constant."""
    noise = answer.noise
    if isinstance(noise, Laplace):
        return -float(np.abs(residual).sum()) / answer.scale
    if isinstance(noise, KNorm) or noise.name == "pureobjectivenoise":
        return -length_of(residual, answer.bound) / answer.scale
    return -float((residual**2).sum()) / (2 * answer.scale**2)


def _of_selection(answer: Answer, features: Array, replaced: Array) -> float:
    """The score of an argmin by Gumbel noise, whose choice has softmax probabilities; by Laplace noise it is close."""
    points, bound = answer.public_query.numpy(), answer.bound.norm
    chosen_index, rate = int(answer.value[0]), answer.sampling.rate

    def log_probability(losses: Array) -> float:
        scores = -losses / answer.scale
        return float(scores[chosen_index] - np.logaddexp.reduce(scores))

    def log_of_mixture(of: Array) -> float:
        there = log_probability(np.clip(points @ of, 0.0, bound))
        none = log_probability(np.zeros(len(points)))
        return float(np.logaddexp(_log(1 - rate) + none, math.log(rate) + there))

    return log_of_mixture(features) - log_of_mixture(replaced)

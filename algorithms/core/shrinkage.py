"""Shrinking a trained model towards one that says the same of all records, as far as its gain on that is not certain.

Where there is little to learn, all that a private training leaves in its parameters may be noise. For a linear
classifier the counts of the classes are released, too; a number's centre has been, before training. After it, what is
released is by how much the losses are lower than those of the frequencies, or of the centre. That gain, beyond what
chance gives on records that were trained on, says how much of the training is kept.

How much is best is known where the records are unit vectors. Along the way from the start to what was trained, the gain
is a k - b k^2 for the share k. What noise costs, b, follows from public numbers; then the released a - b says a, and
the best share is a / 2 b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

from pydantic import Field

from algorithms.core.estimated_counts import estimated_counts
from algorithms.core.falling_errors import MEAN_SQUARE, ErrorReleases, error_releases
from algorithms.core.minibatch import DPSGDState, Moves
from algorithms.core.optimizers import Positive
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import Intercepts, NumberKind, PlanningFacts
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting import MAX_EPSILON
from algorithms.privacy.accounting.gaussian import noise_for_share
from algorithms.privacy.mechanisms.release import Gaussian, Release, total_release

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from algorithms.privacy.barrier.barrier import Barrier
else:
    torch = lazy_module("torch")

ONE = L2(1.0)
CERTAIN = 3.0
"""From so many standard deviations of its noise on, a gain keeps all of the training, where records are no unit
vectors."""
_DIRECTIONS = 5.0
"""How many directions rows of cells vary in, about: what they learn by heart in a time t goes with the root of it."""
_GAIN_MARGIN, _NOISE_COST_MARGIN = 0.25, 0.7
"""In standard deviations of its noise: by so much a gain is taken to be smaller, and so much is added to what noise
costs, in squares, where the gain's own noise is the larger one."""
_OF_TWO_CLASSES, _OF_MORE = 0.5, 1.0
"""The bound on a record's gain, in nats."""
_OF_NUMBERS: Mapping[NumberKind, tuple[float, float]] = {"number": (0.2, 1.0), "count": (0.7, 0.5)}
"""The same in units of the loss on the released scale, and the loss's curvature. Counts are skewed: clipped at less,
rates that are too low for the few large ones seem to gain."""
_MAX_SHARE_OF_COUNTS = 0.3
"""The largest share of the counts of many classes."""


@dataclass(frozen=True)
class Shrinkage:
    """What a plan states of the releases: of the gain and, but for a number, of the counts of its classes or labels.

    gain_noise: multiplier of the gain. bound: of a record's gain. counts: of classes or labels. curvature: of the loss
    by its output, about, of a number. errors: the releases between the steps, by which its clip norm falls, if any.
    """

    gain_noise: Positive
    bound: Positive
    counts: ClassCounts | LabelCounts | None = None
    curvature: Positive = 1.0
    errors: Annotated[ErrorReleases | None, Field(exclude_if=lambda value: value is None)] = None

    @property
    def before(self) -> list[tuple[Release, int]]:
        """What is released before the first step, each once."""
        return [] if self.counts is None else [(self.counts.release, 1)]

    @property
    def between(self) -> dict[int, list[tuple[Release, int]]]:
        """What is released between the steps, by the number of steps before."""
        return {} if self.errors is None else self.errors.between

    @property
    def after(self) -> list[tuple[Release, int]]:
        """The sum of clipped gains in loss, after the last step."""
        return [(total_release(L2(self.bound), Gaussian(self.gain_noise)), 1)]


@dataclass(frozen=True)
class ClassCounts:
    """The released counts of a classifier's classes.

    noise: their multiplier. classes: their number. intercepts: the parameters that say the frequencies.
    """

    noise: Positive
    classes: Annotated[int, Field(ge=2)]
    intercepts: Intercepts

    @property
    def release(self) -> Release:
        """The counts, of which a record changes one by 1."""
        return total_release(ONE, Gaussian(self.noise))

    def count(self, label: Tensor) -> Tensor:
        """What a record adds, [classes]."""
        return (torch.arange(self.classes, device=label.device) == label).float()

    def log_odds(self, counts: Tensor) -> Tensor:
        """The outputs that say the frequencies of noisy counts, [classes], or [1] for two classes and one output.

        With class weights frequencies are weighted, too: no other constant has a smaller loss.

        Example:
            >>> of_two = ClassCounts(2.0, 2, Intercepts(0, 1, 1, 1.0))
            >>> of_two.log_odds(torch.tensor([400.0, 800.0])).exp()
            tensor([2.0000])
        """
        logs = (self._weights.to(counts) * estimated_counts(counts, self.noise)).log()
        return logs[1:] - logs[:1] if self.intercepts.outputs == 1 else logs - logs.mean()

    def shape(self, log_odds: Tensor) -> LossShape:
        """That of the loss where outputs say the frequencies."""
        logits = log_odds.double()
        shares = torch.cat([-logits, logits]).mul(0.5).softmax(0) if len(logits) == 1 else logits.softmax(0)
        weight = 1.0 / float((shares / self._weights.to(shares)).sum())  # of a record, as shares are weighted
        outputs = shares[1:] if self.intercepts.outputs == 1 else shares
        # The Hessian by the outputs is diag(p) - p p^T, whose trace is the sum of p (1 - p).
        curvature = weight * float((outputs * (1.0 - outputs)).sum())
        # Square and curvature are the same, as of any loss that is a log likelihood.
        return LossShape(curvature, curvature, curvature / (self.classes - 1))

    @property
    def _weights(self) -> Tensor:
        return torch.tensor(self.intercepts.class_weights or [1.0] * self.classes)


@dataclass(frozen=True)
class LabelCounts:
    """The released counts of the records with and without each of several labels.

    noise: their multiplier. labels: their number. intercepts: the parameters that say the frequencies.
    """

    noise: Positive
    labels: Annotated[int, Field(ge=1)]
    intercepts: Intercepts

    @property
    def release(self) -> Release:
        """The counts, of which a record changes one of each label by 1."""
        return total_release(L2(math.sqrt(self.labels)), Gaussian(self.noise))

    def count(self, label: Tensor) -> Tensor:
        """What a record adds, [2 labels]: 1 to those with each label that it has, and to those without each other."""
        return torch.cat([1.0 - label, label])

    def log_odds(self, counts: Tensor) -> Tensor:
        """The outputs that say the frequencies of noisy counts, [labels]."""
        noise = self.noise * math.sqrt(self.labels)
        # [labels]; a pair is without, with
        return torch.stack([estimated_counts(pair, noise).log().diff()[0] for pair in counts.view(2, -1).T])

    def shape(self, log_odds: Tensor) -> LossShape:
        """That of the loss, a mean over the labels, where outputs say the frequencies."""
        shares = log_odds.double().sigmoid()
        curvature = float((shares * (1.0 - shares)).mean())
        return LossShape(curvature / self.labels, curvature, curvature / self.labels)


class LossShape(NamedTuple):
    """Of a loss by the outputs.

    Attributes:
        square: The mean square of a record's gradient.
        curvature: The trace of its Hessian.
        rate: The same of a single output that is free, by which gradients pull it back.
    """

    square: float
    curvature: float
    rate: float


class Chance(NamedTuple):
    """What a training on unit vectors with nothing to learn does, in standard deviations of the gain's noise.

    Attributes:
        flattery: What it seems to gain, as it is measured on the records that it learned by heart.
        cost: What its noise costs, and what was learned by heart costs others.
    """

    flattery: float
    cost: float


def left_of_moves(time: float) -> float:
    """The share of what a record's own gradients would move its output that others leave, where rows are cells.

    It is the sum of 1 - exp(-time l) over time, with the eigenvalues l of the rows' second moment, whose sum is 1 as
    rows are unit vectors. They fall about as the squares of their places.

    time: of all steps, times the loss's curvature.

    Example:
        >>> [round(left_of_moves(time), 2) for time in (0.0, 10.0, 100.0, 2500.0)]
        [1.0, 0.61, 0.33, 0.09]
    """
    return 1.0 / (1.0 + math.sqrt(time) / _DIRECTIONS)


def chance_of(shape: LossShape, moves: Moves, records: float) -> Chance:
    """In units of the loss of a record. records: their number, public or released."""
    time = moves.record * records * shape.rate
    left, left_of_noise = left_of_moves(time), left_of_moves(2.0 * time)
    by_heart, by_noise = moves.record * shape.square, moves.noise**2 * shape.curvature / 2.0
    # Where rows are drawn anew, the sum of the squares of 1 - exp(-time l) is lost, of which half is in both.
    return Chance(by_heart * left, by_noise * left_of_noise + by_heart * (left - left_of_noise))


def kept_share(gain: float, cost: float | None) -> float:
    """The share of the training that a gain beyond chance keeps.

    gain: in standard deviations of its noise. cost: of the training's noise, in the same unit; None if unknown.

    Example:
        >>> [kept_share(gain, cost=None) for gain in (-1.0, 1.5, 10.0)]
        [0.0, 0.5, 1.0]
        >>> [round(kept_share(gain, cost=4.0), 2) for gain in (-4.0, 0.25, 10.0)]
        [0.0, 0.49, 1.0]
    """
    if cost is None:
        return min(1.0, max(0.0, gain / CERTAIN))
    # The best share a / 2 b, as a = (a - b) + b.
    return min(1.0, max(0.0, (gain - _GAIN_MARGIN + cost) / (2.0 * math.hypot(cost, _NOISE_COST_MARGIN))))


@dataclass(frozen=True)
class ShrunkState(DPSGDState):
    """The state of steps that a shrinkage follows.

    start: [d], parameters that say the released frequencies of the classes to every record, or zeros, which say a
    number's centre. clip_shares: [releases between the steps], of the clip norm after each, 1 until it is released.
    gain: [], of the training over them and beyond chance, in standard deviations of its noise. kept:
    [], the share of the training that is kept; both NaN until the gain is released.
    """

    start: Tensor
    clip_shares: Tensor
    gain: Tensor
    kept: Tensor

    def with_start(self, plan: Plan, barrier: Barrier) -> Self:
        """The state with a start by the counts of the classes, which are released; a number's stays at zero."""
        chosen = plan.params(Shrinkage).counts
        if chosen is None:
            return self

        def of_its_classes(_features: Tensor, label: Tensor) -> Tensor:
            return chosen.count(label)

        from algorithms.core.user_level import user_level_barrier

        rows, release = user_level_barrier(barrier, plan.facts.rows_per_user), chosen.release
        assert isinstance(release.clipping, L2)
        counts = rows.total(of_its_classes, bound=release.clipping, noise=Gaussian(chosen.noise))
        start, intercepts = torch.zeros_like(self.start), chosen.intercepts
        start[intercepts.indices] = chosen.log_odds(counts).to(start) / intercepts.weight
        return replace(self, start=start)

    def with_errors(self, plan: Plan, barrier: Barrier, records: float) -> Self:
        """The state with the share of the clip norm by the gain so far, if it is released before the next step.

        records: their number, public or released.
        """
        errors, count = plan.params(Shrinkage).errors, int(self.optimizer_state.count)
        if errors is None or count not in errors.after:
            return self
        gain = barrier.loss_gain(
            self.start, self.parameters, bound=errors.bound, noise=Gaussian(errors.noise)
        )
        shares = self.clip_shares.clone()
        shares[errors.after.index(count)] = errors.clip_share(gain, records)
        return replace(self, clip_shares=shares)

    def clip_share_at(self, step: int, plan: Plan) -> float:
        """The share of the clip norm in a step, of which so many came before it."""
        errors = plan.params(Shrinkage).errors
        released = 0 if errors is None else sum(after <= step for after in errors.after)
        return float(self.clip_shares[released - 1]) if released else 1.0

    def shrunk(
        self, trained: Tensor, plan: Plan, barrier: Barrier, records: float, moves: Moves | None
    ) -> Self:
        """The state whose parameters are to be published, by the gain of the trained ones [d], which is released.

        records: their number, public or released. moves: of the steps, where records are unit vectors.
        """
        shrinkage = plan.params(Shrinkage)
        bound, noise = L2(shrinkage.bound), Gaussian(shrinkage.gain_noise)
        # A sum over all records, in standard deviations of its noise, as all that follows is.
        released = barrier.loss_gain(self.start, trained, bound=bound, noise=noise) / noise.scale(bound)
        chance = None if moves is None else self._chance(shrinkage, records, moves)
        gain = released if chance is None else released - chance.flattery
        share = kept_share(gain, None if chance is None else chance.cost)
        # Linear in the parameters, and so in what a linear model says of each record.
        shrunk = trained if share == 1.0 else self.start + share * (trained - self.start)
        moved = replace(self.optimizer_state, parameters=shrunk.clone(), average=shrunk.clone())
        stated = {"gain": torch.full_like(self.gain, gain), "kept": torch.full_like(self.kept, share)}
        return replace(self, optimizer_state=moved, **stated)

    def _chance(self, shrinkage: Shrinkage, records: float, moves: Moves) -> Chance:
        """In standard deviations of the noise of the gain, which is a sum over records."""
        counts, curvature = shrinkage.counts, shrinkage.curvature
        shape = LossShape(MEAN_SQUARE, curvature, curvature)
        if counts is not None:
            shape = counts.shape(self.start[counts.intercepts.indices] * counts.intercepts.weight)
        noise = shrinkage.gain_noise * shrinkage.bound
        return Chance(*(number * records / noise for number in chance_of(shape, moves, records)))

    @property
    def facts(self) -> dict[str, float]:
        """What a model's file states: the released gain, and the share of the training that is kept."""
        return {"gain": float(self.gain), "kept": float(self.kept)}


def plan_errors(share: float, target: Target, facts: PlanningFacts, steps: int) -> ErrorReleases | None:
    """The releases between the steps, of which each takes a share of the squared mu of the target's budget.

    None where there is a single step.

    Raises:
        RefusedError: Unless a number is predicted by its squared error, whose centre is released.
    """
    if facts.number != "number":
        raise RefusedError(
            "{method.error_share} lets the clip norm follow the errors of a linear model of a number whose centre is"
            " released, and this model, or its loss, is another one; leave it out.",
            code="no_errors_to_follow",
        )
    budget = min(target.budget.epsilon, MAX_EPSILON), target.budget.delta
    return error_releases(noise_for_share(share, *budget), steps)


def plan_shrinkage(share: float, target: Target, facts: PlanningFacts) -> Shrinkage:
    """The releases, of which each takes a share of the squared mu of the target's budget.

    Counts take a multiple of it, as what is rare is lost in more noise; a number has none.

    Raises:
        RefusedError: For a model that has no parameters for the frequencies of classes, and of a number without a
            released centre, for delta 0, and where the releases would leave nothing to the training.
    """
    intercepts = facts.intercepts
    if intercepts is None and facts.number is None:
        raise RefusedError(
            "{method.shrink_share} shrinks a linear model of classes or labels by cross-entropy towards their"
            " frequencies, or one of a number or a count towards its released centre, and this model, or its loss, is"
            " another one, or has no bias and no constant cell; leave it out.",
            code="nothing_to_shrink_to",
        )
    of_counts = (
        0.0 if intercepts is None else share_of_counts(share, facts.classes, of_labels=intercepts.of_labels)
    )
    if target.budget.delta == 0 or share + of_counts >= 1.0:
        raise RefusedError(
            "{method.shrink_share} is {share:g}, and the releases that take it leave nothing to the training, or have"
            " no delta; set it to less, such as 0.05, and {target.delta} above 0.",
            code="shrink_share_too_large",
            share=share,
        )
    # More than the largest epsilon is refused with the whole plan.
    budget = min(target.budget.epsilon, MAX_EPSILON), target.budget.delta
    gain_noise = noise_for_share(share, *budget)
    if intercepts is None:
        assert facts.number is not None
        bound, curvature = _OF_NUMBERS[facts.number]
        return Shrinkage(gain_noise, bound, curvature=curvature)
    noise = noise_for_share(of_counts, *budget)
    if intercepts.of_labels:
        labels = intercepts.outputs
        bound = _OF_TWO_CLASSES / math.sqrt(labels)  # a mean of independent gains varies less
        return Shrinkage(gain_noise, bound, LabelCounts(noise, labels, intercepts))
    bound = _OF_TWO_CLASSES if facts.classes == 2 else _OF_MORE
    return Shrinkage(gain_noise, bound, ClassCounts(noise, facts.classes, intercepts))


def share_of_counts(share: float, classes: int, *, of_labels: bool) -> float:
    """The share of the squared mu that the counts take, of the classes or of labels, where the gain takes `share`.

    Example:
        >>> [share_of_counts(0.02, classes, of_labels=False) for classes in (2, 5, 20)]
        [0.02, 0.04, 0.1]
    """
    if of_labels:
        return 2.0 * share
    if classes == 2:
        return share
    return max(2.0 * share, min(share * classes / 4.0, _MAX_SHARE_OF_COUNTS))

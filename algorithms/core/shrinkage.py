"""Shrinking a trained model towards one that says the same of all records, as far as its gain on that is not certain.

Where there is little to learn, all that a private training leaves in its parameters may be noise. For a linear
classifier the counts of the classes are released, too; a number's centre has been, before training. After it, what is
released is by how much the losses are lower than those of the frequencies, or of the centre. The gain in standard
deviations of its noise says how much of the training is kept: nothing at 0 or below, all from `CERTAIN` on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
from pydantic import Field
from torch import Tensor

from algorithms.core.minibatch import DPSGDState
from algorithms.core.optimizers import Positive
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import Intercepts, NumberKind, PlanningFacts
from algorithms.core.user_level import user_level_barrier
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.privacy.accounting import MAX_EPSILON
from algorithms.privacy.accounting.gaussian import noise_for_share
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Gaussian, Release, total_release

ONE = L2(1.0)
CERTAIN = 3.0
"""From so many standard deviations of its noise on, a gain keeps all of the training."""
_OF_TWO_CLASSES, _OF_MORE = 0.5, 1.0
"""The bound on a record's gain, in nats."""
_OF_NUMBERS: Mapping[NumberKind, float] = {"number": 0.2, "count": 0.7}
"""The same in units of the loss on the released scale. Counts are skewed: clipped at less, rates that are too low
for the few large ones seem to gain."""
_ADDED = 0.5
"""What is added to each count, in standard deviations of its noise, so that no class seems impossible."""


@dataclass(frozen=True)
class Shrinkage:
    """What a plan states of the releases: of the gain and, of a classifier, of the counts of its classes.

    gain_noise: multiplier of the gain. bound: of a record's gain. counts: of a classifier.
    """

    gain_noise: Positive
    bound: Positive
    counts: "ClassCounts | None" = None

    @property
    def before(self) -> list[tuple[Release, int]]:
        """What is released before the first step, each once."""
        return [] if self.counts is None else [(self.counts.release, 1)]

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

    def log_odds(self, counts: Tensor) -> Tensor:
        """The outputs that say the frequencies of noisy counts, [classes], or [1] for two classes and one output.

        With class weights frequencies are weighted, too: no other constant has a smaller loss.

        Example:
            >>> of_two = ClassCounts(2.0, 2, Intercepts(0, 1, 1, 1.0))
            >>> of_two.log_odds(torch.tensor([-3.0, 1.0])).exp()  # 0 and 1, and 1 for each
            tensor([2.])
        """
        weights = torch.tensor(self.intercepts.class_weights or [1.0] * self.classes).to(counts)
        logs = (weights * (counts.clamp(min=0.0) + _ADDED * self.noise)).log()
        return logs[1:] - logs[:1] if self.intercepts.outputs == 1 else logs - logs.mean()


def kept_share(gain: float) -> float:
    """The share of the training that a gain keeps, in standard deviations of its noise.

    Example:
        >>> [kept_share(gain) for gain in (-1.0, 1.5, 10.0)]
        [0.0, 0.5, 1.0]
    """
    return min(1.0, max(0.0, gain / CERTAIN))


@dataclass(frozen=True)
class ShrunkState(DPSGDState):
    """The state of steps that a shrinkage follows.

    start: [d], parameters that say the released frequencies of the classes to every record, or zeros, which say a
    number's centre. gain: [], of the training over them, in standard deviations of its noise; NaN until it is released.
    """

    start: Tensor
    gain: Tensor

    def with_start(self, plan: Plan, barrier: Barrier) -> Self:
        """The state with a start by the counts of the classes, which are released; a number's stays at zero."""
        chosen = plan.params(Shrinkage).counts
        if chosen is None:
            return self

        def of_its_class(_features: Tensor, label: Tensor) -> Tensor:
            return (torch.arange(chosen.classes, device=label.device) == label).float()

        rows = user_level_barrier(barrier, plan.facts.rows_per_user)
        counts = rows.total(of_its_class, bound=ONE, noise=Gaussian(chosen.noise))
        start, intercepts = torch.zeros_like(self.start), chosen.intercepts
        start[intercepts.indices] = chosen.log_odds(counts).to(start) / intercepts.weight
        return replace(self, start=start)

    def shrunk(self, trained: Tensor, plan: Plan, barrier: Barrier) -> Self:
        """The state whose parameters are to be published, by the gain of the trained ones [d], which is released."""
        shrinkage = plan.params(Shrinkage)
        bound, noise = L2(shrinkage.bound), Gaussian(shrinkage.gain_noise)
        gain = barrier.loss_gain(self.start, trained, bound=bound, noise=noise) / noise.scale(bound)
        kept = kept_share(gain)
        shrunk = trained if kept == 1.0 else self.start + kept * (trained - self.start)
        moved = replace(self.optimizer_state, parameters=shrunk.clone(), average=shrunk.clone())
        return replace(self, optimizer_state=moved, gain=torch.full_like(self.gain, gain))

    @property
    def facts(self) -> dict[str, float]:
        """What a model's file states: the released gain, and the share of the training that is kept."""
        return {"gain": float(self.gain), "kept": kept_share(float(self.gain))}


def plan_shrinkage(share: float, target: Target, facts: PlanningFacts) -> Shrinkage:
    """The releases, of which each takes a share of the squared mu of the target's budget.

    The counts of more than two classes take twice that, as rarer classes are lost in more noise. A number has none.

    Raises:
        RefusedError: For a model that has no parameters for the frequencies of classes, and of a number without a
            released centre, for delta 0, and where the releases would leave nothing to the training.
    """
    if facts.intercepts is None and facts.number is None:
        raise RefusedError(
            "{method.shrink_share} shrinks a linear classifier by cross-entropy towards the frequencies of the classes,"
            " or a linear model of a number or a count towards its released centre, and this model, or its loss, is"
            " another one, or has no bias and no constant cell; leave it out.",
            code="nothing_to_shrink_to",
        )
    is_of_two = facts.classes == 2
    of_counts = 0.0 if facts.intercepts is None else share if is_of_two else 2.0 * share
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
    if facts.intercepts is None:
        assert facts.number is not None
        return Shrinkage(gain_noise, _OF_NUMBERS[facts.number])
    counts = ClassCounts(noise_for_share(of_counts, *budget), facts.classes, facts.intercepts)
    return Shrinkage(gain_noise, _OF_TWO_CLASSES if is_of_two else _OF_MORE, counts)

"""The evaluation of private held-out records: one noisy histogram, planned and paid for with the training.

Training and evaluation are of disjoint people: on which side a record is depends on that record alone, and never
changes. So under add-or-remove-one a run costs the larger of the two; see `events.on_disjoint_parts`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from algorithms.errors import RefusedError
from algorithms.evaluation import HistogramSpec, ReleasedHistogram
from algorithms.evaluation.histogram import Floats
from algorithms.gradients import L1, L2
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting.events import Schedule, Trials, all_shown, schedule_to_json
from algorithms.privacy.documents import StatedEvaluation, StatedTrials
from algorithms.privacy.mechanisms.noise import Generator
from algorithms.privacy.mechanisms.release import Gaussian, Laplace, Release
from algorithms.privacy.mechanisms.release_noise import add_noise, noise_std
from algorithms.privacy.mechanisms.sampling import FullBatch

if TYPE_CHECKING:
    import torch

    from algorithms.privacy.barrier.trace import Trace
else:
    torch = lazy_module("torch")


@dataclass(frozen=True)
class EvaluationPlan:
    """The one release of the held-out records, decided before a record is read.

    Attributes:
        spec: Its histogram.
        noise: "laplace" for a run at delta 0.
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        epsilon: What the people held out may lose, at the run's delta.
        trials: Of a search, each of whose trials makes this release: how their number is drawn, or how many there are
            where all are released.
    """

    spec: HistogramSpec
    noise: Literal["gaussian", "laplace"]
    noise_multiplier: float
    epsilon: float
    trials: Trials | int | None = None

    @property
    def release(self) -> Release:
        """The release, whose bound is the histogram's sensitivity; its L1 norm for Laplace noise."""
        if self.noise == "gaussian":
            return Release(
                "evaluation", FullBatch(), L2(self.spec.sensitivity), Gaussian(self.noise_multiplier)
            )
        return Release(
            "evaluation", FullBatch(), L1(self.spec.l1_sensitivity), Laplace(self.noise_multiplier)
        )

    @property
    def schedule(self) -> Schedule:
        """The schedule: this one release, or those of a search."""
        once = self.schedule_of_trial
        if self.trials is None:
            return once
        if isinstance(self.trials, Trials):
            return [(self.trials.event([once]), 1)]
        return [(all_shown([once] * self.trials), 1)]

    @property
    def schedule_of_trial(self) -> Schedule:
        """The schedule of a single release."""
        return [(self.release.event(), 1)]

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in each cell."""
        return noise_std(self.release, self.spec.cells)

    def to_document(self) -> StatedEvaluation:
        """This part of a plan's document, with the event from which a card's verifier recomputes the cost."""
        return StatedEvaluation(
            spec=json.loads(self.spec.to_json()),
            noise=self.noise,
            noise_multiplier=self.noise_multiplier,
            epsilon=self.epsilon,
            schedule=tuple(schedule_to_json(self.schedule)),
            trials=_stated_trials(self.trials),
        )

    @classmethod
    def from_document(cls, stated: StatedEvaluation) -> Self:
        """The inverse of `to_document`; raises RefusedError for anything else."""
        try:
            spec = HistogramSpec.from_json(json.dumps(stated.spec))
            trials = _trials_in(stated.trials)
            planned = cls(spec, stated.noise, stated.noise_multiplier, stated.epsilon, trials)
            if planned.to_document() == stated:
                return planned
        except (ValueError, KeyError, TypeError, OverflowError):
            pass
        raise RefusedError(
            "the plan's evaluation is not one that calibration writes; {plan.remedy}.",
            code="evaluation_plan_edited",
        )


def _stated_trials(trials: Trials | int | None) -> StatedTrials | int | None:
    if not isinstance(trials, Trials):
        return trials
    return StatedTrials(mean=trials.mean, shape=trials.shape if math.isfinite(trials.shape) else None)


def _trials_in(stated: StatedTrials | int | None) -> Trials | int | None:
    if not isinstance(stated, StatedTrials):
        return stated
    return Trials(stated.mean, math.inf if stated.shape is None else stated.shape)


def release_evaluation(
    planned: EvaluationPlan,
    cells: Floats,
    *,
    generator: Generator,
    trace: Trace,
    step: int,
    composed: float = 0.0,
) -> ReleasedHistogram:
    """Release the histogram and record it in the run's trace.

    cells: exact, [cells]; they are private. generator: of the run, so that a resumed run draws the same noise. step:
    the row's in the trace. composed: what the whole run then costs, where that is more than the larger of the two.
    """
    release = planned.release
    noisy = add_noise(torch.from_numpy(cells), release, generator.evaluation())
    so_far = max([composed, planned.epsilon, *(row.epsilon for row in trace.rows[-1:])])
    trace.step = step
    trace.record(release, release.event(), noise_std=planned.noise_std, epsilon=so_far)
    return ReleasedHistogram(planned.spec, noisy.numpy(), planned.noise_std)

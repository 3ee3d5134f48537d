"""Features that are learned from all records before training: releases like any others, which are charged.

Each kind makes its queries to the barrier and turns the answers into the buffers of a feature map in front of the
model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from algorithms.core.calibration import count_release
from algorithms.core.minibatch import noisy_count
from algorithms.core.plan import Plan
from algorithms.core.user_level import user_level_barrier, user_level_model
from algorithms.models import Model
from algorithms.models.feature_transforms import Front, Shape, install_buffers
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig, RecordArrays
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import Generator
from algorithms.privacy.mechanisms.release import Release


class FeatureLearner(Protocol):
    """A kind of learned features.

    A kind may also have `check(model)`, which refuses models that do not fit behind its map, and
    `start(barrier, model)`, which is called after `learn` and returns the model's initial parameters.
    """

    def releases(self, shape: Shape) -> Sequence[Release]:
        """Its queries, for records of a shape; raises RefusedError for shapes that do not fit."""
        ...

    def learn(self, barrier: Barrier, shape: Shape, records: float) -> Mapping[str, Tensor]:
        """Make the queries; returns the module's buffers. records: their number, or a `NoisyCount`."""
        ...

    def module(self, shape: Shape) -> Front:
        """The feature map for records of a shape, before anything is learned."""
        ...


class NoisyCount(float):
    """A released number of records.

    Attributes:
        noise: Its standard deviation.
    """

    noise: float

    def __new__(cls, number: float, noise: float) -> "NoisyCount":
        """A number of at least 1."""
        count = super().__new__(cls, max(1.0, number))
        count.noise = noise
        return count


def schedule_of(features: FeatureLearner, shape: Shape, records: int | None, count_noise: float) -> Schedule:
    """The events of learning the features; a count of the records comes first if their number is private.

    Args:
        features: Their kind.
        shape: Of one record.
        records: Their number, None if it is private.
        count_noise: Noise multiplier of the count.

    Raises:
        RefusedError: For a shape that does not fit the kind.
    """
    first = [] if records is not None else [count_release(count_noise)]
    return [(release.event(), 1) for release in (*first, *features.releases(shape))]


def learn_buffers(
    features: FeatureLearner, barrier: Barrier, records: int | None, count_noise: float
) -> dict[str, Tensor]:
    """Learn the buffers of the features' module, by the releases of `schedule_of`.

    Args:
        features: Their kind.
        barrier: Of the records, which answers and charges.
        records: Their number, None if it is private and is counted first.
        count_noise: Noise multiplier of the count.
    """
    number = NoisyCount(noisy_count(barrier, count_noise), count_noise) if records is None else float(records)
    return dict(features.learn(barrier, barrier.input_shape, number))


@dataclass(frozen=True)
class LearnedFeatures:
    """Learned features: the buffers of their map, and the initial parameters of training."""

    buffers: Mapping[str, Tensor]
    start: Tensor


def learn_shared_features(
    features: FeatureLearner,
    plan: Plan,
    model: Model,
    *,
    records: RecordArrays,
    generator: Generator,
    compute: ComputeConfig,
) -> tuple[LearnedFeatures, Trace]:
    """Learn features once for several runs that share them.

    Args:
        features: Their kind.
        plan: Of one of these runs, whose schedule begins with these releases.
        model: It has the features' map in front.
        records: All of them.
        generator: Of the noise of these releases.
        compute: Device, threads and memory.

    Returns:
        The features, and the rows of the trace of their releases.
    """
    trace, rows = Trace(), plan.facts.rows_per_user
    barrier = Barrier(
        records,
        user_level_model(model, rows),
        privacy_filter=plan.open_filter(),
        generator=generator,
        delta=plan.target.budget.delta,
        trace=trace,
        compute=plan.with_public_sizes(compute),
    )
    return learn_features(features, barrier, model, plan), trace


def learn_features(features: FeatureLearner, barrier: Barrier, model: Model, plan: Plan) -> LearnedFeatures:
    """Learn features by the releases of `schedule_of`, and the initial parameters if the kind gives them."""
    row_barrier = user_level_barrier(barrier, plan.facts.rows_per_user)
    learned = learn_buffers(features, row_barrier, plan.facts.records, plan.target.count_noise)
    start = model.initial_parameters()
    if hasattr(features, "start"):
        start = features.start(row_barrier, install_buffers(model, learned))
    return LearnedFeatures(learned, start)

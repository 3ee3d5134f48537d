"""What is learned about the features of all records before training: a release like any other, and charged.

Each kind says what it asks of the barrier and makes tensors of the answers: the buffers of a map of one record, which
comes before the model that is then trained.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol

from pydantic import Field
from torch import Tensor

from algorithms.core.minibatch import count_release, noisy_count
from algorithms.models.feature_transforms import Front, Shape
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Release

Positive = Annotated[float, Field(gt=0, lt=math.inf)]


class Features(Protocol):
    """A kind of learned features.

    releases: what it asks, for records of a shape; raises RefusedError for a shape that it does not fit. learn: asks
    it, and returns the module's buffers; records: their number, or a noisy count. module: the map, which learns them.

    A kind may also have `check(model)`, which refuses a model behind its map, and `start(barrier, model)`, asked after
    `learn`, which gives the parameters that the model starts at.
    """

    def releases(self, shape: Shape) -> Sequence[Release]: ...
    def learn(self, barrier: Barrier, shape: Shape, records: float) -> Mapping[str, Tensor]: ...
    def module(self, shape: Shape) -> Front: ...


def schedule(features: Features, shape: Shape, records: int | None, count_noise: float) -> Schedule:
    """What learning the features costs; a count of the records comes first where their number is private."""
    first = [] if records is not None else [count_release(count_noise)]
    return [(release.event(), 1) for release in (*first, *features.releases(shape))]


def learned(
    features: Features, barrier: Barrier, records: int | None, count_noise: float
) -> dict[str, Tensor]:
    """The buffers of the features' module, from the releases of `schedule`."""
    number = max(1.0, noisy_count(barrier, count_noise)) if records is None else float(records)
    return dict(features.learn(barrier, barrier.input_shape, number))

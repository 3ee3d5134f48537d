"""The barrier: the only place that holds the private records during training.

It answers through releases alone. Each one is validated, its event is charged to the run's filter, and only then are
the records touched, noise is added and the answer is given; an exception after the charge leaves the charge.

Formal guarantees (add-or-remove-one record, for callers that keep to the public methods):
- a release's noise and its event are built from the same `Release`, so the two cannot disagree;
- a record enters a sum through a clipped contribution of its own loss or statistic, never above its bound, whatever the
  other records are, up to the rounding of 32-bit sums (which depends on the batch, and is not small for extreme
  parameters); a model that does not take each record by itself, as seen on made-up inputs, is refused;
- sums are divided by a public constant; an empty sample answers with noise; a record without a finite contribution
  counts as zero.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.gradients import (
    L1,
    L2,
    Clipping,
    Engine,
    PerLayer,
    Unclippable,
    clip_and_sum,
)
from algorithms.models import Model
from algorithms.privacy.errors import Refused
from algorithms.privacy.filters import Filter
from algorithms.privacy.noise import Generator, Stream, add_on_grid, scale_on_grid, std_on_grid
from algorithms.privacy.releases import (
    FullBatch,
    Gaussian,
    Gumbel,
    Laplace,
    Noise,
    NoNoise,
    Release,
    Sampling,
    argmin_release,
    gradient_release,
    total_release,
)
from algorithms.privacy.trace import Trace


class Records(Protocol):
    """The private records: memory-mapped or plain arrays, `features` [n, *input_shape] and `labels` [n]."""

    @property
    def features(self) -> NDArray[np.float32]: ...
    @property
    def labels(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class Performance:
    """What cannot change a result: where the arithmetic runs and how much memory it may take."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory_mb: int = 1024
    physical_batch: int | None = None

    def engine(self, model: Model, records: Records) -> Engine:
        """The gradient engine for a model of such records; raises Refused where the model mixes them."""
        try:
            return Engine(
                model,
                input_shape=records.features.shape[1:],
                input_dtype=torch.from_numpy(np.empty(0, records.features.dtype)).dtype,
                device=self.device,
                memory_mb=self.memory_mb,
                physical_batch=self.physical_batch,
            )
        except Unclippable as reason:
            raise Refused(
                f"{reason}, so no record's gradient can be clipped; use layers and losses that take each record by"
                " itself, like GroupNorm."
            ) from reason


class Barrier:
    """Holds records and answers releases about them.

    model: the architecture whose losses are differentiated. spend: the run's filter. generator: the secret source of
    noise and coins. delta: at which the trace states the cost so far. trace: where releases are recorded.
    Raises Refused, before anything is spent, when the model mixes records or the answers could not be private.
    """

    def __init__(
        self,
        records: Records,
        model: Model,
        *,
        spend: Filter,
        generator: Generator,
        delta: float,
        trace: Trace,
        performance: Performance | None = None,
    ) -> None:
        self.__records = records
        self.__generator = generator
        self.__spend = spend
        self.__model = model
        self.__delta = delta
        self.__trace = trace
        self.__performance = performance or Performance()
        self.__engine = self.__performance.engine(model, records)

    def gradient(
        self, parameters: Tensor, *, sampling: Sampling, clipping: Clipping, noise: Noise, divisor: float
    ) -> Tensor:
        """A noised sum of clipped gradients over a sample, divided by a public constant.

        parameters: flat, shape [d], where the gradients are taken. divisor: public, usually the expected batch size.
        Returns shape [d], float32. Raises Refused for a combination without a proven event and BudgetRefused when
        the event is not afforded; nothing is touched then.
        """
        layers = len(self.__model.layers)
        if isinstance(clipping, PerLayer) and len(clipping.norms) != layers:
            raise Refused(
                f"per-layer clipping has {len(clipping.norms)} bounds, the model has {layers} layers;"
                " give one for each."
            )
        release = gradient_release(sampling, clipping, noise, divisor)
        stream = self.__charge(release, dimension=len(parameters))
        point = parameters.to(self.__performance.device)
        total = torch.zeros(len(parameters), dtype=torch.float64)
        for inputs, labels in self.__slices(self.__sample(release, stream)):
            total += self.__engine.clipped_sum(point, inputs, labels, clipping).cpu()
        answer = _noised(total.numpy(), release, stream) / divisor
        return torch.from_numpy(answer).to(torch.float32).to(parameters.device)

    def total(
        self,
        statistic: Callable[[Tensor, Tensor], Tensor],
        *,
        bound: L1 | L2,
        noise: Noise,
        sampling: Sampling | None = None,
    ) -> Tensor:
        """A noised sum of a statistic of each record, clipped to `bound`.

        statistic: (input [*input_shape], label []) -> [k], of one record alone. Returns shape [k], float64.
        Raises as `gradient` does.
        """
        release = total_release(bound, noise, sampling)
        example = torch.zeros(self.__records.features.shape[1:])
        dimension = statistic(example, torch.tensor(0)).numel()
        stream = self.__charge(release, dimension=dimension)
        total = torch.zeros(dimension, dtype=torch.float64)
        for inputs, labels in self.__slices(self.__sample(release, stream)):
            rows = torch.func.vmap(statistic)(inputs, labels).reshape(len(labels), dimension).double()
            total += clip_and_sum(rows, bound).cpu()
        return torch.from_numpy(_noised(total.numpy(), release, stream))

    def argmin(self, candidates: Tensor, *, bound: float, noise: Noise) -> int:
        """The index of the candidate whose total loss is least, by noisy selection.

        candidates: parameters, shape [k, d]. bound: each record's loss is clipped to [0, bound]. Returns 0 .. k - 1.
        Raises as `gradient` does.
        """
        release = argmin_release(bound, noise)
        stream = self.__charge(release, dimension=len(candidates))
        points = candidates.to(self.__performance.device)
        scores = np.zeros(len(candidates))
        for inputs, labels in self.__slices(self.__sample(release, stream)):
            for index, candidate in enumerate(points):
                scores[index] -= float(self.__engine.clipped_losses(candidate, inputs, labels, bound))
        draws = _draws(release, stream, len(candidates))
        return int(np.argmax(scores + release.noise_scale * draws))

    def affords(self, release: Release) -> bool:
        """Whether a release could be asked for now."""
        return self.__spend.affords(release.event())

    def spent(self, delta: float) -> float:
        """The epsilon spent so far at `delta`, an upper bound."""
        return self.__spend.spent(delta)

    def __charge(self, release: Release, *, dimension: int) -> Stream:
        """Charges a release, writes it to the trace and opens its stream of noise and coins."""
        event = release.event()
        self.__spend.charge(event)
        self.__trace.record(
            release, event, noise_std=_noise_std(release, dimension), epsilon=self.__spend.spent(self.__delta)
        )
        return self.__generator.stream(len(self.__trace.rows) - 1)

    def __sample(self, release: Release, stream: Stream) -> NDArray[np.intp]:
        """The indices of the records that take part, ascending."""
        count = len(self.__records.labels)
        if isinstance(release.sampling, FullBatch):
            return np.arange(count)
        return np.flatnonzero(stream.coins(count, release.sampling.rate))

    def __slices(self, chosen: NDArray[np.intp]) -> Iterator[tuple[Tensor, Tensor]]:
        """The chosen records in physical batches, on the device."""
        device = self.__performance.device
        size = self.__engine.physical_batch
        for start in range(0, len(chosen), size):
            rows = chosen[start : start + size]
            inputs = torch.from_numpy(self.__records.features[rows]).to(device)
            yield inputs, torch.from_numpy(self.__records.labels[rows]).to(device)


def _noised(total: NDArray[np.float64], release: Release, stream: Stream) -> NDArray[np.float64]:
    """The sum with its noise, both on the grid; the sum itself where the release asks for no noise."""
    if isinstance(release.noise, NoNoise):
        return total
    noise = _noise_on_grid(release, len(total)) * _draws(release, stream, len(total))
    return add_on_grid(total, noise, std=release.noise_scale)


def _noise_on_grid(release: Release, dimension: int) -> float:
    """The scale of the noise with what rounding to the grid costs."""
    widen = scale_on_grid if isinstance(release.noise, Laplace) else std_on_grid
    return widen(release.noise_scale, sensitivity=release.clipping.sensitivity, dimension=dimension)


def _noise_std(release: Release, dimension: int) -> float:
    """The standard deviation of the noise on the sum (or on a score), for the trace."""
    if isinstance(release.noise, NoNoise):
        return 0.0
    scale = release.noise_scale if release.kind == "argmin" else _noise_on_grid(release, dimension)
    return float(scale * _STD_AT_SCALE_1[type(release.noise)])


def _draws(release: Release, stream: Stream, count: int) -> NDArray[np.float64]:
    """Draws of the release's noise at scale 1, shape [count]."""
    match release.noise:
        case Gaussian():
            return stream.normal(count)
        case Laplace():
            return stream.laplace(count)
        case Gumbel():
            return stream.gumbel(count)
        case NoNoise():
            return np.zeros(count)


_STD_AT_SCALE_1 = {Gaussian: 1.0, Laplace: math.sqrt(2.0), Gumbel: math.pi / math.sqrt(6.0)}

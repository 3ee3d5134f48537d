"""Made-up records, on which a model is looked at before it sees private ones."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.models import Model


@dataclass(frozen=True)
class Form:
    """What records look like: shape and type of their inputs, whole numbers below `entries`, labels below `classes`.

    constants: whole numbers of which one may fill up a record's rest, as padding does.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    entries: int = 2
    constants: tuple[int, ...] = (0, 1)
    classes: int = 2

    def draw(self, count: int, seed: int) -> "Sample":
        """Made-up records: normal numbers, or whole ones of any entry, the rest of each one constant."""
        source = torch.Generator().manual_seed(seed)
        labels = torch.arange(seed, seed + count) % self.classes
        if self.dtype.is_floating_point:
            inputs = torch.randn(count, *self.shape, generator=source).to(self.dtype)
            return Sample(inputs.to(self.device), labels.to(self.device))
        inputs = torch.randint(0, self.entries, (count, math.prod(self.shape)), generator=source)
        for index, record in enumerate(inputs):
            begins = int(torch.randint(0, len(record) + 1, (), generator=source))
            record[begins:] = self.constants[(seed + index) % len(self.constants)]
        whole = inputs.view(count, *self.shape).to(self.dtype)
        return Sample(whole.to(self.device), labels.to(self.device))


@dataclass(frozen=True)
class Sample:
    """Made-up inputs [count, *shape] and labels."""

    inputs: Tensor
    labels: Tensor

    def all_of(self, constant: int) -> "Sample":
        """The same number of records, in which every number is the same."""
        return Sample(torch.full_like(self.inputs, constant), self.labels)

    def times(self, factor: float) -> "Sample":
        """The same records, larger; whole numbers are all 0 for the factor 0 and stay as they are for others."""
        if factor == 0.0:
            return Sample(torch.zeros_like(self.inputs), self.labels)
        return Sample(self.inputs * factor if self.inputs.is_floating_point() else self.inputs, self.labels)

    def with_holes(self) -> "Sample":
        """The same records, the first value of each in the first dimension missing; whole numbers stay as they are."""
        inputs = self.inputs.clone()
        if inputs.is_floating_point() and inputs.dim() > 1:
            inputs[:, 0] = math.nan
        return Sample(inputs, self.labels)

    def in_64_bits(self) -> "Sample":
        """The same records in float64; whole numbers stay as they are."""
        return Sample(self.inputs.double() if self.inputs.is_floating_point() else self.inputs, self.labels)

    def among(self, others: "Sample", place: int) -> "Sample":
        """One record, at its place among other ones."""
        inputs, labels = others.inputs.clone(), others.labels.clone()
        inputs[place], labels[place] = self.inputs[place], self.labels[place]
        return Sample(inputs, labels)

    def alone(self, place: int) -> "Sample":
        """One record without any other."""
        return Sample(self.inputs[place : place + 1], self.labels[place : place + 1])


def away_from_start(model: Model) -> Tensor:
    """A point near the start at which no layer is zero and hides what is before it."""
    start = model.initial_parameters()
    draw = torch.Generator().manual_seed(2)
    moved: Tensor = start + (0.1 * torch.randn(len(start), generator=draw)).to(start)
    return moved


@contextmanager
def same_randomness(seed: int = 0) -> Iterator[None]:
    """Dropout that drops the same each time, and leaves the generators as they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed would note the call stack for each kind of accelerator that is not there
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield

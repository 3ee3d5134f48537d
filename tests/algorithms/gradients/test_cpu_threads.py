"""The number of threads follows from the size of a pass, before its time: short passes have one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.gradients import Engine, PerExampleModel
from algorithms.models import build
from tests.support.gradients.problems import BRIEF
from tests.support.threads import cpu_threads


def of(module: nn.Module, shape: tuple[int, ...], physical_batch: int, **settings: Any) -> Engine:
    losses = nn.CrossEntropyLoss(reduction="none")
    model = PerExampleModel("made up", module, losses)
    return Engine(model, input_shape=shape, physical_batch=physical_batch, **settings)


def dense(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(60, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 16, 8, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))


class Recurrent(nn.Module):
    """Its operations are no products that PyTorch counts."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.states, self.last = (
            nn.Embedding(50, 64),
            nn.LSTM(64, 64, batch_first=True),
            nn.Linear(64, 2),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """[batch, 40] -> [batch, 2]."""
        outputs: Tensor = self.last(self.states(self.table(inputs))[0][:, -1])
        return outputs


PASSES: list[tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = [
    (lambda: nn.Linear(60, 10), (60,), 2048, 1),
    (lambda: nn.Linear(2000, 10), (2000,), 256, 1),
    (lambda: dense(32), (60,), 2048, 1),
    (lambda: dense(256), (60,), 256, 1),
    (lambda: dense(256), (60,), 2048, 2),
    (convolutional, (1, 28, 28), 64, 1),
    (convolutional, (1, 28, 28), 1024, 2),
]


@pytest.mark.parametrize(("make", "shape", "physical_batch", "threads"), PASSES)
def test_short_passes_have_one_thread_and_long_ones_two(
    make: Callable[[], nn.Module], shape: tuple[int, ...], physical_batch: int, threads: int
) -> None:
    """As was measured: of the first, two threads took longer, and of the others up to a third less time."""
    assert of(make(), shape, physical_batch, limits=BRIEF).threads == threads


@pytest.mark.parametrize(("physical_batch", "threads"), [(32, 1), (512, 2)])
def test_recurrent_passes_count_by_their_memory(physical_batch: int, threads: int) -> None:
    engine = of(Recurrent(), (40,), physical_batch, input_dtype=torch.int64, limits=BRIEF)
    assert engine.inspection.operations * physical_batch < 10**6
    assert engine.threads == threads


@pytest.mark.parametrize(("records", "threads"), [(10_000, 1), (100_000, 2)])
def test_closed_forms_take_all_records_of_a_step(records: int, threads: int) -> None:
    model = build("softmax", input_shape=(1000,), classes=10, seed=0)
    engine = Engine(model, input_shape=(1000,), expected_batch=records, physical_batch=64)
    assert engine.threads == threads


SEEN: list[tuple[int, int]] = []


class Counting(nn.Module):
    """A linear layer that notes with how many threads each of its passes runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """[batch, 20] -> [batch, 3]."""
        SEEN.append((len(inputs), torch.get_num_threads()))
        outputs: Tensor = self.layer(inputs)
        return outputs


def test_an_inspection_of_short_passes_has_one_thread() -> None:
    """But for the pass of one record that shows how short they are."""
    SEEN.clear()
    with cpu_threads(2):
        of(Counting(), (20,), 128)
        assert torch.get_num_threads() == 2
    several = [threads for records, threads in SEEN if records > 1]
    assert len(several) > 10
    assert set(several) == {1}

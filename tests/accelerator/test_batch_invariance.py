"""A device whose last bits depend on a record's place in a pass: no private record is trained on there."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from algorithms.models import Model
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.filters import ScheduleFilter
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import Generator
from data.readers.records import RecordBatch
from tests.support.refusals import refused_as


@pytest.fixture
def usual_inspections() -> None:
    """Full ones, whose warnings are tested here."""


class RoundsByPlace(nn.Module):
    """A row that is computed by another kernel than the others, on the device alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.ones(len(x), 1, device=x.device)
        if x.device.type == "sim" and x.dtype == torch.float32:
            factors[1:2] = 1.0 + 2.0**-22
        outputs: Tensor = self.layer(x * factors)
        return outputs


def barrier(
    device: torch.device, *, private: bool, physical_batch: int = 64, accept_rounding: bool = False
) -> Barrier:
    rows = np.random.default_rng(0).standard_normal((100, 8)).astype(np.float32)
    loss = nn.CrossEntropyLoss(reduction="none")
    return Barrier(
        RecordBatch(rows, np.zeros(100, np.int64)),
        Model("mine", RoundsByPlace(), loss, scores=lambda outputs: outputs),
        privacy_filter=ScheduleFilter([], Budget(1.0, 1e-5)),
        generator=Generator(bytes(32), private=private),
        delta=1e-5,
        trace=Trace(),
        compute=ComputeConfig(device, physical_batch=physical_batch, accept_rounding=accept_rounding),
    )


def test_private_records_are_refused_and_public_ones_get_a_warning(
    sim: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    with refused_as("rounding_depends_on_batch"):
        barrier(sim, private=True)
    caplog.clear()
    barrier(sim, private=False)
    assert "on the device sim the last bits of a record's gradient depend" in caplog.text


def test_rounding_is_accepted_where_the_owner_says_so(sim: torch.device) -> None:
    barrier(sim, private=True, accept_rounding=True)


def test_one_record_a_pass_is_taken(sim: torch.device) -> None:
    barrier(sim, private=True, physical_batch=1)


def test_the_same_model_is_taken_on_the_cpu(sim: torch.device) -> None:
    barrier(torch.device("cpu"), private=True)

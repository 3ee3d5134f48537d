"""Made-up records and parameters are the same each time, however few of them are made."""

import math

import pytest
import torch
from torch import nn

from algorithms.gradients import PerExampleModel
from algorithms.gradients.synthetic_inputs import InputSpec, near_start


class Vector(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.short, self.long = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((size,), 2.0))


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000, 2**16, 2**16 + 5])
def test_parameters_move_by_the_first_numbers_of_one_draw(size: int) -> None:
    draw = torch.randn(2**16, generator=torch.Generator().manual_seed(2))
    whole = torch.cat([draw, draw])[:size]
    model = PerExampleModel("vector", Vector(size), nn.CrossEntropyLoss(reduction="none"))
    expected = torch.cat([1.0 + 0.1 * draw[:3], 2.0 + 0.2 * whole])
    assert torch.allclose(near_start(model), expected, rtol=1e-6, atol=0.0)


def test_a_record_is_repeated_with_its_label() -> None:
    sample = InputSpec((4,), torch.float32, torch.device("cpu"), classes=3).draw(5, 0)
    repeated = sample.repeat_record(1)
    assert torch.equal(repeated.inputs, sample.inputs[1].expand(5, 4))
    assert repeated.labels.tolist() == [1] * 5


@pytest.mark.parametrize("is_signed", [False, True])
def test_records_have_the_labels_that_a_loss_is_tried_with(is_signed: bool) -> None:
    spec = InputSpec(
        (4,), torch.float32, torch.device("cpu"), classes=3, label_shape=(2,), is_signed=is_signed
    )
    sample = spec.draw(6, seed=2)
    assert torch.equal(sample.labels, spec.labels(6, seed=2))
    assert sample.labels.shape == (6, 2) and not math.isclose(float(sample.labels.double().std()), 0.0)

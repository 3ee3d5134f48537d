"""Per-example gradients of a model: sums of them by parameter, as processes that share parameters add them up."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.gradients import L1, L2, Clipping, Engine, PerLayer
from algorithms.models.model import Model
from tests.support.gradients.problems import BRIEF

SIZES = (240, 60, 3)
"""A layer that is summed by itself, and a narrow one, which is summed together with other small ones."""


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(*SIZES[:2]), nn.Tanh(), nn.Linear(*SIZES[1:]))


def clipped(gradient: list[Tensor], clipping: Clipping) -> Tensor:
    """A record's gradient, scaled down to its bound as a whole or by layer."""
    groups = [gradient[:2], gradient[2:]] if isinstance(clipping, PerLayer) else [gradient]
    bounds = clipping.norms if isinstance(clipping, PerLayer) else (clipping.norm,)  # type: ignore[union-attr]
    order = 1 if isinstance(clipping, L1) else 2
    parts = [torch.cat([part.flatten() for part in group]).double() for group in groups]
    return torch.cat(
        [part * min(1.0, bound / float(part.norm(order))) for part, bound in zip(parts, bounds, strict=True)]
    )


@pytest.mark.parametrize("clipping", [L2(0.3), L1(2.0), PerLayer((0.2, 0.05))])
def test_sums_by_parameter_are_weighted_by_the_norm_of_the_whole_gradient(clipping: Clipping) -> None:
    module, draw = layers(), torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(9, SIZES[0], generator=draw), torch.arange(9) % 3
    inputs[:3] *= 0.01  # shorter gradients in the first layer
    expected = torch.zeros(sum(part.numel() for part in module.parameters()), dtype=torch.float64)
    for record, label in zip(inputs, labels, strict=True):
        loss = functional.cross_entropy(module(record), label)
        expected += clipped(list(torch.autograd.grad(loss, list(module.parameters()))), clipping)
    inputs, labels = torch.cat([inputs, torch.full_like(inputs[:1], torch.nan)]), torch.arange(10) % 3

    model = Model("made up", module, nn.CrossEntropyLoss(reduction="none"), scores=lambda outputs: outputs)
    engine = Engine(model, input_shape=(SIZES[0],), limits=BRIEF)
    found = engine.contributions(model.initial_parameters(), inputs, labels)
    total, count = torch.zeros_like(expected), 0
    for place, part in found.clipped_parts(clipping):
        total[place] += part
        count += len(part)
    assert count == len(expected)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-6)


def test_parts_leave_out_padding_that_fills_one_and_have_the_norms_of_the_whole() -> None:
    module, draw = layers(), torch.Generator().manual_seed(1)
    model = Model("made up", module, nn.CrossEntropyLoss(reduction="none"), scores=lambda outputs: outputs)
    inputs, labels = torch.randn(41, SIZES[0], generator=draw), torch.arange(41) % 3
    engine = Engine(model, input_shape=(SIZES[0],), physical_batch=64, limits=BRIEF)
    whole = engine.contributions(model.initial_parameters(), inputs, labels)
    parts = [whole.part(rows) for rows in whole.parts(20)]  # of 41 records and 23 copies of the last one
    assert [(len(part.losses), part.padding) for part in parts] == [(20, 0), (20, 0), (1, 19)]
    assert whole.parts(40) == [slice(0, 40), slice(40, 64)]
    assert torch.equal(torch.cat([part.losses for part in parts]), whole.losses)
    torch.testing.assert_close(torch.cat([part.norms(L2(1.0)) for part in parts]), whole.norms(L2(1.0)))
    together = torch.stack([part.clipped_sum(L2(0.1)) for part in parts]).sum(dim=0)
    torch.testing.assert_close(together, whole.clipped_sum(L2(0.1)))

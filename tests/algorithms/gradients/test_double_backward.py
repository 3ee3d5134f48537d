"""Models that differentiate in their forward pass: forces, gradient penalties, differential equations."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.gradients import L2
from algorithms.gradients.model_inspection import InspectionLimits
from tests.support.gradients import naive
from tests.support.gradients.problems import BRIEF, SMALL, Spec, Wired, by_limits, check, problem


def derivative(
    function: Callable[[Tensor], Tensor], x: Tensor, *, is_kept: bool = True
) -> tuple[Tensor, Tensor]:
    """A function at values without a graph, and its derivative."""
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        found = function(x)
        return found, torch.autograd.grad(found.sum(), x, create_graph=is_kept)[0]


def layers(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Softplus(), nn.Linear(8, 1))


def _curved(self: Wired, x: Tensor) -> Tensor:
    """Residuals of a differential equation of the second order."""
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        found = self.layers(x)
        slope = torch.autograd.grad(found.sum(), x, create_graph=True)[0]
        bend = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)[0]
    return torch.cat([found, slope, bend], dim=1)


def _convex(self: Wired, x: Tensor) -> Tensor:
    """The gradient of a function with positive weights, so that it is convex."""

    def function(x: Tensor) -> Tensor:
        hidden = functional.softplus(self.first(x))
        return functional.linear(hidden, functional.softplus(self.weight)).exp()

    return derivative(function, x)[1]


def _penalty(self: Wired, x: Tensor) -> Tensor:
    found, slope = derivative(self.layers, x)
    return torch.cat([found, (slope.flatten(1).norm(dim=1, keepdim=True) - 1.0).square()], dim=1)


def _descent(self: Wired, x: Tensor) -> Tensor:
    """An energy before and after a step down, which is a constant."""
    return self.layers(
        torch.cat([x, x - 0.1 * derivative(self.layers, x, is_kept=False)[1]], dim=1).view(-1, 2, 4)
    )


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.GroupNorm(1, 3), nn.Softplus(), nn.Flatten(), nn.Linear(12, 1)
    )


SPECS = {
    "a force": (
        Spec(lambda: Wired(lambda self, x: -derivative(self.layers, x)[1], layers=layers()), (4,)),
        (),
    ),
    "a second derivative": (
        Spec(lambda: Wired(_curved, layers=layers()), (4,)),
        ("matmul backward",),
    ),
    "of computed weights": (
        Spec(
            lambda: Wired(_convex, first=nn.Linear(4, 3), weight=nn.Parameter(torch.randn(1, 3))),
            (4,),
        ),
        (),
    ),
    "a penalty": (
        Spec(lambda: Wired(_penalty, layers=_images()), (1, 3, 3)),
        ("conv2d backward", "group_norm backward"),
    ),
    "a step": (Spec(lambda: Wired(_descent, layers=layers()), (4,)), ()),
}


@pytest.mark.parametrize(("name", "limits"), by_limits(SPECS, in_full=["a step"]))
def test_derivatives_in_the_forward_pass_are_recorded(name: str, limits: InspectionLimits) -> None:
    """In one pass, where a record that is not finite is in no other's way."""
    spec, materialised = SPECS[name]
    made = problem(spec)
    engine = made.engine(physical_batch=SMALL, limits=limits)
    assert engine.is_batched and engine.operations_without_rule == materialised
    check(made, engine)
    missing = replace(made, inputs=torch.cat([torch.full_like(made.inputs[:1], math.nan), made.inputs[1:]]))
    norms = [engine.norms(*some.arguments, L2(1.0)) for some in (made, missing)]
    assert torch.equal(norms[0][1:], norms[1][1:])


def test_derivatives_are_those_of_parameters_in_main_memory() -> None:
    made = problem(SPECS["a force"][0])
    sums = [
        made.engine(physical_batch=SMALL, offload=each, limits=BRIEF).clipped_sum(*made.arguments, L2(1.0))
        for each in (True, False)
    ]
    assert naive.relative(*sums) < 1e-12

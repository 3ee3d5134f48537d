"""Weights that layers use through a map by entries, such as a mask: the map multiplies the sum over records."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize, prune

from algorithms.gradients import L2, PerExampleGradients
from algorithms.gradients.model_inspection import InspectionLimits
from algorithms.gradients.parameter_gradients import LinearGrad
from algorithms.gradients.pointwise_gradients import PointwiseGrad, pointwise_gradients
from tests.support.gradients import naive
from tests.support.gradients.problems import BRIEF, SMALL, Spec, Wired, by_limits, check_batched, problem


class Positive(nn.Module):
    """Keeps a weight positive, as in monotone networks."""

    def forward(self, weight: Tensor) -> Tensor:
        return functional.softplus(weight)


def through(change: Callable[[Tensor], Tensor]) -> Spec:
    """A linear layer that uses a function of its weight."""

    def make() -> nn.Module:
        weight = nn.Parameter(torch.randn(48, 40, dtype=torch.float64))
        return Wired(lambda self, x: functional.linear(x, change(self.w)), w=weight)

    return Spec(make, (40,))


def positive() -> nn.Module:
    layer = nn.Linear(40, 48)
    parametrize.register_parametrization(layer, "weight", Positive())
    return layer


def pruned() -> nn.Module:
    layer = nn.Linear(40, 48)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        prune.random_unstructured(layer, "weight", amount=0.4)
    return layer


def used_as_it_is_too(self: Wired, x: Tensor) -> Tensor:
    masked = self.w * torch.ones_like(self.w).tril()
    return functional.linear(torch.tanh(functional.linear(x, masked)), self.w)


MAPS = {
    "a mask": through(lambda w: w * torch.ones_like(w).tril()),
    "a mask before the weight": through(lambda w: torch.ones_like(w).triu() * w),
    "a mask by where": through(lambda w: torch.where(torch.ones_like(w).tril() > 0, w, 0.0)),
    "squares": through(lambda w: w**2),
    "a map of a map": through(lambda w: torch.exp(w).masked_fill(torch.ones_like(w).tril() > 0, 0.0)),
    "transposed before": through(lambda w: torch.tanh(w.view(40, 48).t())),
    "transposed after": through(lambda w: torch.tanh(w.view(40, 48)).t()),
    "positive": Spec(positive, (40,)),
    "pruned": Spec(pruned, (40,)),
}
WRITTEN = {
    "a sequence": Spec(through(torch.tanh).make, (3, 40)),
    "few numbers": Spec(
        lambda: Wired(
            lambda self, x: functional.linear(x, torch.tanh(self.w)), w=nn.Parameter(torch.randn(4, 5))
        ),
        (5,),
    ),
    "over a number, rounded": through(lambda w: w + torch.div(w, 0.1, rounding_mode="floor")),
    "used as it is, too": Spec(
        lambda: Wired(used_as_it_is_too, w=nn.Parameter(torch.randn(40, 40) / 6)), (40,)
    ),
    "one number for all": Spec(
        lambda: Wired(
            lambda self, x: functional.linear(x, self.w.exp() * torch.ones(48, 40)),
            w=nn.Parameter(torch.zeros(1)),
        ),
        (40,),
    ),
}


@pytest.mark.parametrize(("name", "limits"), by_limits(MAPS | WRITTEN, in_full=["a map of a map"]))
def test_gradients_of_a_weight_behind_a_map_by_entries_are_those_of_the_loop(
    name: str, limits: InspectionLimits
) -> None:
    check_batched((MAPS | WRITTEN)[name], limits)


@pytest.mark.parametrize("name", [name for name in MAPS if name != "transposed before"])
def test_no_gradient_of_a_weight_behind_a_map_by_entries_is_materialised(name: str) -> None:
    made = problem(MAPS[name])
    found = made.engine(physical_batch=SMALL, limits=BRIEF).contributions(*made.arguments)
    found.clipped_sum(naive.clippings(made.model, made.gradients)["L2"])
    assert any(isinstance(each, PointwiseGrad) for each in found.gradients.values())
    assert found.materialized_bytes == 0


@pytest.mark.parametrize(
    ("error", "slope", "value"), [(1e-163, 1e10, 1e155), (1e150, 1e-165, 1e30), (1e-90, 1e-80, 1e153)]
)
def test_contribution_is_within_the_bound_where_squares_of_64_bits_underflow(
    error: float, slope: float, value: float
) -> None:
    numbers = torch.tensor([error, value, slope], dtype=torch.float64)
    errors, inputs, slopes = (
        part.expand(size) for part, size in zip(numbers, [(2, 1, 48), (2, 1, 40), (48 * 40,)], strict=True)
    )
    gradient = pointwise_gradients(LinearGrad(inputs, errors), slopes)
    assert isinstance(gradient, PointwiseGrad)
    of_sum = PerExampleGradients(
        torch.zeros(2), {"w": gradient}, {"w": slice(0, 1920)}, (("w",),), torch.float64
    )
    bound = 1e-12
    assert float(of_sum.clipped_sum(L2(bound)).norm()) <= 2 * bound

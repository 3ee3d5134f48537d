"""Kernels that are computed from parameters by way of many values, as of state spaces."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from algorithms.gradients import L2
from algorithms.gradients.factored_gradients import FactoredGrad
from algorithms.gradients.model_inspection import InspectionLimits
from tests.support.gradients.problems import BRIEF, SMALL, Spec, Wired, by_limits, check_batched, problem

CHANNELS, STATES, LENGTH = 3, 4, 6
SIGNAL = CHANNELS, LENGTH
Parts = tuple[Tensor, ...]


def kernel(compute: Callable[..., Tensor], *shapes: tuple[int, ...], twice: bool = False) -> Spec:
    """A convolution over all places with a kernel [channels, length] that follows from parameters of these shapes."""

    def convolve(self: Wired, signals: Tensor) -> Tensor:
        values = compute(*(getattr(self, f"p{i}") for i in range(len(shapes))))
        transformed = torch.fft.rfft(values, n=2 * LENGTH) * torch.fft.rfft(signals, n=2 * LENGTH)
        convolved = torch.fft.irfft(transformed, n=2 * LENGTH)[..., :LENGTH]
        return convolved * values if twice else convolved

    def make() -> nn.Module:
        return Wired(
            convolve, **{f"p{i}": nn.Parameter(0.4 * torch.randn(shape)) for i, shape in enumerate(shapes)}
        )

    return Spec(make, SIGNAL)


def times(like: Tensor) -> Tensor:
    return torch.arange(LENGTH, dtype=like.dtype)


def diagonal(weights: Tensor, decay: Tensor, turns: Tensor, steps: Tensor) -> Tensor:
    """The kernel of S4D (Gu et al. 2022, arXiv:2206.11893)."""
    rates = -torch.exp(decay) + 1j * turns
    moved = rates * torch.exp(steps)[:, None]
    factors = torch.view_as_complex(weights) * (torch.exp(moved) - 1.0) / rates
    return 2 * torch.einsum("hn,hnl->hl", factors, torch.exp(moved[..., None] * torch.arange(LENGTH))).real


def by_matmul(weights: Tensor, rates: Tensor) -> Tensor:
    powers = torch.exp(-rates.square()[..., None] * times(rates))
    return (weights[:, None] @ powers)[:, 0]


def transposed(weights: Tensor, rates: Tensor) -> Tensor:
    powers = (times(rates)[:, None, None] * rates.sin()).cos() * torch.ones(LENGTH, CHANNELS, STATES).tril()
    return torch.einsum("lhn,hn->hl", powers.to(weights), weights)


def holomorphic(weights: Tensor, rates: Tensor) -> Tensor:
    bases = torch.view_as_complex(rates) + 2.0
    powers = ((-bases)[..., None] * (1.0 + 0.5j * times(weights))).square().reciprocal().log() / (1.0 + 2j)
    return torch.einsum("hn,hnl->hl", torch.view_as_complex(weights), powers).real


def of_tables(weights: Tensor, table: Tensor) -> Tensor:
    return torch.einsum("hn,hnl->hl", weights, table)


def by_a_view(weights: Tensor, rates: Tensor) -> Tensor:
    """Values in another shape than that in which the sum takes them."""
    flat = rates.reshape(-1, 1) * times(rates)
    return torch.einsum("hn,hnl->hl", weights, torch.exp(flat.view(*rates.shape, LENGTH)))


def of_transforms(weights: Tensor, rates: Tensor) -> Tensor:
    waves = torch.fft.fft(torch.view_as_complex(rates), n=LENGTH)
    return torch.fft.ifft(waves * torch.view_as_complex(weights)).real


SIZE, BOTH = (CHANNELS, STATES), (CHANNELS, STATES, 2)
KERNELS = {
    "S4D": kernel(diagonal, BOTH, SIZE, SIZE, (CHANNELS,)),
    "S4D, used twice": kernel(diagonal, BOTH, SIZE, SIZE, (CHANNELS,), twice=True),
    "by matmul": kernel(by_matmul, SIZE, SIZE),
    "other orders of dimensions": kernel(transposed, SIZE, SIZE),
    "maps of complex numbers": kernel(holomorphic, BOTH, BOTH),
}
OTHERS = {
    "values of another shape": kernel(by_a_view, SIZE, SIZE),
    "a table of trained values": kernel(of_tables, SIZE, (*SIZE, LENGTH)),
    "transforms": kernel(of_transforms, (CHANNELS, LENGTH, 2), (CHANNELS, STATES, 2)),
}


@pytest.mark.parametrize(("name", "limits"), by_limits(KERNELS | OTHERS, in_full=["S4D"]))
def test_gradients_of_the_parameters_of_a_kernel_are_those_of_the_loop(
    name: str, limits: InspectionLimits
) -> None:
    check_batched((KERNELS | OTHERS)[name], limits)


@pytest.mark.parametrize("name", KERNELS)
def test_no_gradient_of_the_many_values_is_formed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = problem(KERNELS[name])
    engine = made.engine(physical_batch=SMALL, limits=BRIEF)
    summed = Mock(wraps=FactoredGrad.summed_to)
    monkeypatch.setattr(FactoredGrad, "summed_to", lambda self, shape: summed(self, shape))
    monkeypatch.setattr(FactoredGrad, "rows", property(Mock(side_effect=AssertionError)))
    engine.clipped_sum(*made.arguments, L2(1.0))
    assert summed.call_count >= 1


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 1), (1, 3, 4), (4,), (2, 1, 1), ()])
def test_sum_to_a_shape_is_that_of_formed_gradients(shape: tuple[int, ...]) -> None:
    values, factor = torch.randn(5, 2, 1, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    gradient = FactoredGrad(values, factor, torch.Size((2, 3, 4)))
    expected = [each.view(2, 3, 4).sum_to_size(shape).flatten() for each in gradient.rows]
    torch.testing.assert_close(gradient.summed_to(torch.Size(shape)), torch.stack(expected))


def test_chosen_records_keep_their_gradients_also_in_64_bits() -> None:
    values, factor = torch.randn(5, 2, 1, 4) * 1e30, torch.randn(2, 3, 4) * 1e20
    gradient = FactoredGrad(values, factor, torch.Size((2, 3, 4)))
    rows = (values.double() * factor.double()).flatten(start_dim=1)
    assert torch.equal(gradient.double().take(torch.tensor([3, 0])).rows, rows[[3, 0]])
    assert torch.equal(gradient.take(slice(1, 3)).double().rows, rows[1:3])

"""Weights that layers use standardised or normalised: pulled back by rows, not record by record."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from algorithms.gradients import L2, normalised_weights
from algorithms.gradients.model_inspection import InspectionLimits
from algorithms.gradients.normalised_weights import (
    NormalisedGrad,
    RowFactorGrad,
    pull_back_by_rows,
    standardised_gradients,
)
from algorithms.gradients.parameter_gradients import LinearGrad
from algorithms.gradients.rules import pull_back
from tests.support.gradients import naive
from tests.support.gradients.problems import BRIEF, SMALL, Spec, Wired, by_limits, check, problem

Map = Callable[[Tensor], Tensor]


class Standardised(nn.Conv2d):
    """A convolution of a normaliser-free network: standardised kernels times a gain (Brock et al. 2021)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, **settings: int) -> None:
        super().__init__(inputs, outputs, kernel, **settings)  # type: ignore[arg-type]
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))

    def forward(self, input: Tensor) -> Tensor:
        flat, gain = self.weight.reshape(1, self.out_channels, -1), (self.gain * 0.7).view(-1)
        weight = functional.batch_norm(flat, None, None, gain, training=True, momentum=0.0, eps=1e-6)
        output: Tensor = self._conv_forward(input, weight.reshape_as(self.weight), self.bias)
        return output


class Scaled(nn.Conv2d):
    """A convolution with an equalised learning rate (Karras et al. 2018)."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self._conv_forward(input, self.weight * 0.3, self.bias)
        return output


def table() -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.randn(7, 3, dtype=torch.float64))}


def mapped(change: Map, *sizes: int) -> Callable[[], nn.Module]:
    """A linear layer that uses a function of its weight."""

    def make() -> nn.Module:
        weight = nn.Parameter(torch.randn(*sizes, dtype=torch.float64))
        return Wired(lambda self, x: functional.linear(x, change(self.w)), w=weight)

    return make


def standardised(w: Tensor, **settings: Any) -> Tensor:
    """The rows of a matrix as PyTorch standardises the channels of a batch."""
    return functional.batch_norm(w[None], None, None, training=True, **settings)[0]


def with_factors(rows: int, width: int, *names: str) -> Callable[[], nn.Module]:
    """A linear layer whose standardised weight has a gain, or a shift, or both."""

    def make() -> nn.Module:
        factors = {name: nn.Parameter(torch.rand(rows, dtype=torch.float64) + 0.5) for name in names}
        weight = nn.Parameter(torch.randn(rows, width, dtype=torch.float64))

        def wiring(self: Any, x: Tensor) -> Tensor:
            its = {name: getattr(self, name) * 0.7 for name in names}
            return functional.linear(x, standardised(self.w, **its))

        return Wired(wiring, w=weight, **factors)

    return make


def on_images(*layers: Callable[[], nn.Module], channels: int = 8, size: int = 5) -> Spec:
    return Spec(lambda: nn.Sequential(*(layer() for layer in layers)), (channels, size, size))


BY_ROWS = {
    "standardised, a gain": on_images(lambda: Standardised(8, 32, 3, padding=1), nn.Tanh),
    "standardised, in groups": on_images(lambda: Standardised(64, 64, 3, groups=2), channels=64, size=4),
    "standardised, of every channel": on_images(lambda: Standardised(8, 8, 16, groups=8), size=17),
    "standardised, by Gram matrices": on_images(
        lambda: Standardised(48, 48, 3), nn.Tanh, channels=48, size=4
    ),
    "weight norm, no sequence": Spec(lambda: weight_norm(nn.Linear(48, 48)), (48,)),
    "weight norm, a sequence": Spec(lambda: weight_norm(nn.Linear(48, 48)), (3, 48)),
    "weight norm, a long sequence": Spec(lambda: weight_norm(nn.Linear(48, 48)), (60, 48)),
    "weight norm, transposed": Spec(lambda: weight_norm(nn.ConvTranspose1d(32, 24, 3)), (32, 7)),
    "centred": Spec(mapped(lambda w: w - w.mean(dim=1, keepdim=True), 48, 48), (48,)),
    "of length 1": Spec(mapped(lambda w: functional.normalize(w, dim=1), 48, 48), (2, 48)),
    "standardised by formula": Spec(
        mapped(lambda w: (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-3), 48, 48), (2, 48)
    ),
    "centred, over a number": Spec(mapped(lambda w: (w - w.mean(dim=1, keepdim=True)) / 7.0, 48, 48), (48,)),
    "of two numbers": Spec(mapped(lambda w: functional.normalize(w, dim=1), 1100, 2), (2,)),
}
CLOSED = {
    "standardised, a gain": BY_ROWS["standardised, a gain"],
    "standardised": Spec(mapped(standardised, 48, 48), (2, 48)),
    "standardised, a gain and a shift": Spec(with_factors(48, 50, "weight", "bias"), (3, 50)),
    "standardised, a shift": Spec(with_factors(48, 50, "bias"), (50,)),
    "standardised, of few numbers": Spec(with_factors(5, 4, "weight"), (2, 4)),
    "weight norm, a sequence": BY_ROWS["weight norm, a sequence"],
    "weight norm, by the first dimension from the end": Spec(
        lambda: weight_norm(nn.Linear(48, 48), dim=-2), (2, 48)
    ),
    "scaled": Spec(mapped(lambda w: 0.3 * w, 48, 48), (2, 48)),
    "over a number": Spec(mapped(lambda w: w / 7.0, 48, 48), (2, 48)),
    "scaled, of kernels": on_images(lambda: Scaled(8, 16, 3)),
    "scaled, of a table": Spec(
        lambda: Wired(lambda self, x: (self.w * 0.3)[x.abs().mul(3).long() % 7], **table()), (5,)
    ),
}
SHARED = {
    "a weight, standardised twice": Spec(
        mapped(lambda w: standardised(standardised(w) + w), 48, 48), (2, 48)
    ),
    "a weight, by two maps": Spec(
        lambda: Wired(
            lambda self, x: (
                functional.linear(x, functional.normalize(self.w, dim=1)).tanh()
                + functional.linear(x, self.w - self.w.mean(dim=1, keepdim=True))
            ),
            w=nn.Parameter(torch.randn(48, 48, dtype=torch.float64)),
        ),
        (2, 48),
    ),
    "a gain, by two weights": Spec(
        lambda: Wired(
            lambda self, x: functional.linear(
                functional.linear(x, functional.normalize(self.v, dim=1) * self.g).tanh(),
                functional.normalize(self.w, dim=1) * self.g,
            ),
            v=nn.Parameter(torch.randn(48, 48, dtype=torch.float64)),
            w=nn.Parameter(torch.randn(48, 48, dtype=torch.float64)),
            g=nn.Parameter(torch.rand(48, 1, dtype=torch.float64) + 0.5),
        ),
        (2, 48),
    ),
    "nothing, beside a map of another kind": Spec(
        lambda: nn.Sequential(
            weight_norm(nn.Linear(48, 48)), nn.Tanh(), weight_norm(nn.Linear(48, 48), dim=1)
        ),
        (2, 48),
    ),
}
OTHERS = {
    "of length 1 by columns": Spec(mapped(lambda w: functional.normalize(w, dim=0), 48, 48), (2, 48)),
    "of length 1 as a whole": Spec(mapped(lambda w: w / w.norm(), 48, 48), (2, 48)),
    "without half of the entries": Spec(mapped(lambda w: w * (w > 0), 48, 48), (2, 48)),
    "tanh": Spec(mapped(torch.tanh, 48, 48), (2, 48)),
    "centred by columns": Spec(mapped(lambda w: w - w.mean(dim=0), 48, 48), (48,)),
    "a product of two": Spec(mapped(lambda w: w[:48] @ w[48:], 96, 48), (48,)),
}

OF_ROWS_TOGETHER = {
    "of length 1, two rows as one": Spec(
        mapped(lambda w: functional.normalize(w.view(24, 96), dim=1).view(48, 48), 48, 48), (2, 48)
    ),
    "standardised, two rows as one": Spec(
        mapped(lambda w: standardised(w.view(24, 96)).view(48, 48), 48, 48), (2, 48)
    ),
    "standardised, a row of either half as one": Spec(
        mapped(
            lambda w: functional.batch_norm(w, None, None, training=True).view(48, 48),
            *(2, 24, 48),
        ),
        (2, 48),
    ),
    "centred, two rows as one": Spec(
        mapped(lambda w: (w.view(24, 96) - w.view(24, 96).mean(1, keepdim=True)).view(48, 48), 48, 48), (48,)
    ),
    "standardised, with a gain that is the shift": Spec(
        lambda: Wired(
            lambda self, x: functional.linear(x, standardised(self.w, weight=self.g, bias=self.g)),
            w=nn.Parameter(torch.randn(48, 48, dtype=torch.float64)),
            g=nn.Parameter(torch.rand(48, dtype=torch.float64) + 0.5),
        ),
        (2, 48),
    ),
}

OF_FEW_NUMBERS = {
    "by rows": Spec(lambda: weight_norm(nn.Linear(5, 3)), (5,)),
    "by columns": Spec(lambda: weight_norm(nn.Linear(5, 3), dim=1), (2, 5)),
    "as a whole": Spec(lambda: weight_norm(nn.Linear(5, 3), dim=None), (5,)),
    "of a kernel": Spec(lambda: weight_norm(nn.Conv1d(4, 6, 3)), (4, 7)),
    "counted from the end": Spec(lambda: weight_norm(nn.Conv1d(4, 6, 3), dim=-2), (4, 7)),
}


@pytest.mark.parametrize(("name", "limits"), by_limits(BY_ROWS, in_full=["weight norm, no sequence"]))
def test_gradients_of_a_normalised_weight_are_those_of_the_loop(name: str, limits: InspectionLimits) -> None:
    made = problem(BY_ROWS[name])
    engine = made.engine(physical_batch=SMALL, limits=limits)
    check(made, engine)
    kinds = {type(each) for each in engine.contributions(*made.arguments).gradients.values()}
    assert NormalisedGrad in kinds


def test_gain_of_chosen_records_uses_what_is_computed_of_their_weight() -> None:
    made = problem(BY_ROWS["weight norm, no sequence"])
    whole = made.engine(physical_batch=SMALL, limits=BRIEF).contributions(*made.arguments)
    chosen = whole.take(torch.tensor([1, 3])).gradients
    (weight,) = (each for each in chosen.values() if isinstance(each, NormalisedGrad))
    (gain,) = (each for each in chosen.values() if isinstance(each, RowFactorGrad))
    assert gain.of is weight and len(weight.rows) == 2


@pytest.mark.parametrize("together", [normalised_weights.WEIGHTS_AT_ONCE, 1])
@pytest.mark.parametrize(("name", "limits"), by_limits(SHARED))
def test_several_weights_are_pulled_back_as_each_alone(
    name: str, together: int, limits: InspectionLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normalised_weights, "WEIGHTS_AT_ONCE", together)
    made = problem(SHARED[name])
    engine = made.engine(physical_batch=SMALL, limits=limits)
    check(made, engine)
    assert engine.is_batched and not engine.operations_without_rule


def test_backward_passes_are_few_for_weights_without_a_common_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [torch.randn(8, 60, requires_grad=True) for _ in range(6)]
    weights[5] = weights[0]
    ends = [functional.normalize(weight, dim=1) for weight in weights]
    parts = [LinearGrad(torch.randn(4, 1, 60), torch.randn(4, 1, 8)) for _ in weights]
    passes, grad = [], torch.autograd.grad

    def spy(*args: Any, **kwargs: Any) -> Any:
        passes.append(args)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", spy)
    pulled = pull_back_by_rows(
        list(zip(parts, ends, strict=True)), {str(i): weight for i, weight in enumerate(weights[:5])}
    )
    assert [list(each or {}) for each in pulled] == [["0"], ["1"], ["2"], ["3"], ["4"], ["0"]]
    assert len(passes) == 2 * 3


@pytest.mark.parametrize(("name", "limits"), by_limits(OTHERS, in_full=["tanh"]))
def test_maps_of_another_kind_are_pulled_back_record_by_record(
    name: str, limits: InspectionLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which maps these are, the inspection finds out once."""
    made = problem(OTHERS[name])
    engine = made.engine(physical_batch=SMALL, limits=limits)
    monkeypatch.setattr(sys.modules[pull_back_by_rows.__module__], "_pull_back", None)
    check(made, engine)
    kinds = {type(each) for each in engine.contributions(*made.arguments).gradients.values()}
    assert NormalisedGrad not in kinds


@pytest.mark.parametrize("name", OF_ROWS_TOGETHER)
def test_a_map_that_moves_rows_by_others_is_recorded_as_it_is(name: str) -> None:
    made = problem(OF_ROWS_TOGETHER[name])
    engine = made.engine(physical_batch=SMALL, limits=BRIEF)
    check(made, engine)
    assert engine.is_batched


@pytest.mark.parametrize(("name", "limits"), by_limits(OF_FEW_NUMBERS))
def test_weight_norms_of_few_numbers_go_through_no_graph(
    name: str, limits: InspectionLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = problem(OF_FEW_NUMBERS[name])
    engine = made.engine(physical_batch=SMALL, limits=limits)
    monkeypatch.setattr(sys.modules[pull_back.__module__], "_through", None)
    check(made, engine)
    assert engine.is_batched and not engine.operations_without_rule


@pytest.mark.parametrize(("name", "limits"), by_limits(CLOSED, in_full=["standardised, a gain and a shift"]))
def test_maps_of_a_known_form_go_through_no_graph(
    name: str, limits: InspectionLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = problem(CLOSED[name])
    engine = made.engine(physical_batch=SMALL, limits=limits)
    monkeypatch.setattr(sys.modules[pull_back.__module__], "_through", None)
    monkeypatch.setattr(sys.modules[pull_back.__module__], "pull_back_by_rows", None)
    check(made, engine)
    assert engine.is_batched and not engine.operations_without_rule


@pytest.mark.parametrize(
    "name", ["standardised, by Gram matrices", "weight norm, no sequence", "weight norm, a sequence"]
)
def test_no_gradient_of_a_normalised_weight_is_materialised(name: str) -> None:
    made = problem(BY_ROWS[name])
    found = made.engine(physical_batch=SMALL, limits=BRIEF).contributions(*made.arguments)
    found.clipped_sum(L2(1.0))
    weights = max(span.stop - span.start for span in found.slices.values())
    assert found.materialized_bytes < 8 * SMALL * weights // 10


@pytest.mark.parametrize("name", ["standardised, a gain", "weight norm, no sequence", "of two numbers"])
def test_sums_in_32_bits_are_those_of_the_loop_in_64(name: str) -> None:
    exact, made = problem(BY_ROWS[name]), problem(BY_ROWS[name], torch.float32)
    bound = float(exact.gradients.norm(dim=1).median())
    expected = naive.contributions(exact.model, exact.gradients, L2(bound)).sum(dim=0)
    found = made.engine(physical_batch=SMALL, limits=BRIEF).clipped_sum(*made.arguments, L2(bound))
    assert naive.relative(found, expected) < 5e-6


def test_rows_that_are_constant_or_zero_have_finite_gradients() -> None:
    weight = torch.randn(6, 400, dtype=torch.float64)
    weight[1], weight[3] = 0.5, 0.0
    weight.requires_grad_()
    gain = torch.rand(6, 1, dtype=torch.float64, requires_grad=True)
    end = gain * (weight - weight.mean(1, keepdim=True)) / (weight.var(1, keepdim=True) + 1e-2).sqrt()
    part = LinearGrad(torch.randn(4, 1, 400, dtype=torch.float64), torch.randn(4, 1, 6, dtype=torch.float64))
    (pulled,) = pull_back_by_rows([(part, end)], {"w": weight, "g": gain})
    assert pulled is not None and isinstance(pulled["g"], RowFactorGrad)
    for name, start in (("w", weight), ("g", gain)):
        expected = torch.stack(
            [
                torch.autograd.grad(end, start, each.view(6, 400), retain_graph=True)[0].view(-1)
                for each in part.rows
            ]
        )
        assert naive.relative(pulled[name].rows, expected) < 1e-12
        assert naive.relative(pulled[name].square_norms(), expected.square().sum(dim=1)) < 1e-12


def test_constant_rows_have_finite_gradients_in_the_closed_form() -> None:
    weight = torch.randn(6, 400, dtype=torch.float64)
    weight[1], weight[3], weight[4] = 0.5, 0.0, 0.5 + 1e-9 * weight[4]
    starts = weight.requires_grad_(), *(torch.rand(6, dtype=torch.float64, requires_grad=True) for _ in "gs")
    part = LinearGrad(torch.randn(4, 1, 400, dtype=torch.float64), torch.randn(4, 1, 6, dtype=torch.float64))
    end = functional.batch_norm(weight[None], None, None, *starts[1:], training=True, eps=1e-6)[0]
    pulled = standardised_gradients(part, weight.detach(), starts[1].detach(), 1e-6)
    assert pulled is not None
    for gradient, start in zip(pulled, starts, strict=True):
        expected = torch.stack(
            [
                torch.autograd.grad(end, start, each.view(6, 400), retain_graph=True)[0].view(-1)
                for each in part.rows
            ]
        )
        assert naive.relative(gradient.rows, expected) < 1e-9
        assert naive.relative(gradient.square_norms(), expected.square().sum(dim=1)) < 1e-9


def test_rows_of_large_gradients_that_are_formed_one_by_one_have_their_own_products() -> None:
    width, length = 736, 100
    inputs, errors = torch.randn(2, 3, length, width) * torch.tensor([1.0, 3.0, 9.0])[:, None, None]
    directions = functional.normalize(torch.randn(width, width, dtype=torch.float64), dim=1)
    gradient = LinearGrad(inputs, errors)
    assert not gradient.is_materialized
    found = gradient.row_products(directions)
    assert found.slack is None  # so that rows were formed
    rows = errors.double().mT @ inputs.double()
    torch.testing.assert_close(found.squares, rows.square().sum(dim=2), rtol=1e-4, atol=0.0)
    along = torch.stack([rows.sum(dim=2) / width**0.5, (rows * directions).sum(dim=2)])
    torch.testing.assert_close(found.along, along, rtol=0.0, atol=1e-4 * float(rows.norm(dim=2).amax()))

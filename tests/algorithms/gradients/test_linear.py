"""The closed forms for linear models against their definition: a loop over single records in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from algorithms.gradients import LinearRecords, LineCandidates, linear_layer
from algorithms.gradients.clipping import L1, L2, Affine, Clipping, Normalised, PerLayer, Unclipped
from algorithms.models import Model, build
from algorithms.models.objectives import cross_entropy

SHAPE = (2, 3)
Problem = tuple[Model, Tensor, Tensor, Tensor]
MODELS = ["softmax", "logistic", "svm", "squared", "bare"]
TOLERANCES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]


def own(outputs: int, bias: bool, losses: Callable[[Tensor, Tensor], Tensor]) -> Model:
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, outputs, bias=bias))
    return Model("own", module, losses, lambda values: values)


def model_of(name: str) -> Model:
    if name == "squared":  # one output, none of the losses that are written out
        return own(1, True, lambda outputs, labels: (outputs[:, 0] - labels).square() / 2)
    if name == "bare":
        return own(3, False, cross_entropy)
    return build(name, input_shape=SHAPE, classes=3 if name == "softmax" else 2, seed=0)


def problem(name: str, count: int = 12, dtype: torch.dtype = torch.float64, seed: int = 3) -> Problem:
    """A model, parameters of length 1.5, and records of lengths from 0.05 to 5."""
    model, draw = model_of(name), torch.Generator().manual_seed(seed)
    parameters = torch.randn(model.parameter_count, generator=draw, dtype=torch.float64)
    inputs = torch.randn(count, *SHAPE, generator=draw, dtype=torch.float64)
    lengths = 5 * 10.0 ** (2 * torch.rand(count, 1, 1, generator=draw, dtype=torch.float64) - 2)
    inputs *= lengths / inputs.norm(dim=(1, 2), keepdim=True)
    labels = torch.randint(0, 3 if name in ("softmax", "bare") else 2, (count,), generator=draw)
    return model, (1.5 * parameters / parameters.norm()).to(dtype), inputs.to(dtype), labels


def a_line(parameters: Tensor, steps: int = 7) -> LineCandidates:
    direction = torch.randn(len(parameters), generator=torch.Generator().manual_seed(5)).to(parameters.dtype)
    return LineCandidates(parameters, direction / direction.norm(), tuple(0.3 * i for i in range(steps)))


def norm(gradient: Tensor, clipping: Clipping) -> float:
    return float(gradient.norm(p=1 if isinstance(clipping, L1) else 2))


def gradient_of(model: Model, parameters: Tensor, one_input: Tensor, label: Tensor) -> Tensor:
    values = parameters.detach().double().requires_grad_()
    loss = model.losses(model.outputs(model.by_name(values), one_input.double()[None]), label[None]).sum()
    return torch.autograd.grad(loss, values)[0]


def the_loop(model: Model, parameters: Tensor, inputs: Tensor, labels: Tensor, clipping: Clipping) -> Tensor:
    total = torch.zeros(len(parameters), dtype=torch.float64)
    for one_input, label in zip(inputs, labels, strict=True):
        gradient = gradient_of(model, parameters, one_input, label)
        length, bound = norm(gradient, clipping), min(clipping.sensitivity, 1e300)
        room = length + clipping.stability if isinstance(clipping, Normalised) else max(length, bound)
        total += gradient * (bound / room)
    return total


@torch.no_grad()
def the_losses(model: Model, candidates: Tensor, inputs: Tensor, labels: Tensor, bound: float) -> Tensor:
    sums = []
    for candidate in candidates:
        losses = model.losses(model.outputs(model.by_name(candidate), inputs), labels).tolist()
        sums.append(math.fsum(0.0 if math.isnan(loss) else min(max(loss, 0.0), bound) for loss in losses))
    return torch.tensor(sums, dtype=torch.float64)


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clipping", [L2(0.5), L1(0.7), PerLayer((0.3,)), Normalised(0.4, 0.01), Unclipped()])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_the_sum_equals_the_loop(name: str, clipping: Clipping, dtype: torch.dtype, tolerance: float) -> None:
    model, parameters, inputs, labels = problem(name, dtype=dtype)
    found = LinearRecords(model, inputs, labels).clipped_sum(parameters, clipping)
    expected = the_loop(model, parameters, inputs, labels, clipping)
    assert found.dtype == torch.float64 and apart(found, expected) < tolerance


@given(st.sampled_from(MODELS), st.integers(1, 40), st.integers(0, 1000), st.floats(1e-3, 1e3))
@settings(deadline=None, max_examples=60)
def test_any_problem_equals_the_loop(name: str, count: int, seed: int, bound: float) -> None:
    model, parameters, inputs, labels = problem(name, count, seed=seed)
    records, line = LinearRecords(model, inputs, labels), a_line(parameters)
    expected = the_loop(model, parameters, inputs, labels, L2(bound))
    torch.testing.assert_close(records.clipped_sum(parameters, L2(bound)), expected, rtol=1e-10, atol=1e-10)
    losses = the_losses(model, line.candidates, inputs, labels, bound)
    for found in (records.losses_on(line, bound=bound), records.losses_at(line.candidates, bound=bound)):
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9 * count)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_losses_on_a_line_equal_any_others(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model, parameters, inputs, labels = problem(name, 20_000, dtype)  # several blocks of them
    records, line = LinearRecords(model, inputs, labels), a_line(parameters, 3)
    expected = the_losses(model, line.candidates, inputs, labels, 1.7)
    assert apart(records.losses_on(line, bound=1.7), expected) < tolerance
    assert apart(records.losses_at(line.candidates, bound=1.7), expected) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-5)])
def test_far_margins(dtype: torch.dtype, tolerance: float) -> None:
    """PyTorch's softplus goes over to its argument at 20, an error of 2e-9 that its own form here has not."""
    model, parameters, inputs, labels = problem("logistic", 100, dtype)
    records, far = LinearRecords(model, inputs * 1e3, labels), inputs * 1e3
    for bound in (70.0, 90.0, 900.0):
        expected = the_losses(model, parameters[None], far, labels, bound)
        assert apart(records.losses_at(parameters[None], bound=bound), expected) < tolerance
    expected = the_loop(model, parameters, far, labels, Unclipped())
    assert apart(records.clipped_sum(parameters, Unclipped()), expected) < tolerance


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clipping", [L2, L1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_record_is_above_the_bound(name: str, clipping: type[L2], dtype: torch.dtype) -> None:
    model, parameters, inputs, labels = problem(name, dtype=dtype)
    for one_input, label in zip(inputs, labels, strict=True):
        alone = LinearRecords(model, one_input[None], label[None])
        size = norm(gradient_of(model, parameters, one_input, label), clipping(1.0))
        for scale in (1 - 1e-7, 1 + 1e-7, 1.1, 1e6, 1e30):
            bound = size / scale + 1e-12
            assert norm(alone.clipped_sum(parameters, clipping(bound)), clipping(bound)) <= bound, scale


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_loss_is_above_the_bound(name: str, dtype: torch.dtype) -> None:
    model, parameters, inputs, labels = problem(name, dtype=dtype)
    for one_input, label in zip(inputs, labels, strict=True):
        alone = LinearRecords(model, one_input[None], label[None])
        losses = alone.losses_on(a_line(parameters), bound=0.1)
        assert losses.min() >= 0.0 and losses.max() <= 0.1


@pytest.mark.parametrize(("outputs", "size", "slope"), [(1, 1e-42, 1e32), (2, 1.0, 1e28)])
def test_the_bound_holds_at_the_ends_of_32_bits(outputs: int, size: float, slope: float) -> None:
    model = own(outputs, False, lambda values, _: slope * values.sum(dim=1))
    for factor in range(1, 20):
        alone = LinearRecords(model, torch.full((1, *SHAPE), factor * size), torch.tensor([0]))
        assert norm(alone.clipped_sum(torch.zeros(6 * outputs), L2(1e-12)), L2(1.0)) <= 1e-12


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e25])
def test_a_record_that_is_not_finite_harms_no_other(name: str, bad: float) -> None:
    model, parameters, inputs, labels = problem(name, dtype=torch.float32)
    without = LinearRecords(model, inputs[1:], labels[1:]).clipped_sum(parameters, L2(0.5))
    inputs[0, 1, 1] = bad
    records, line = LinearRecords(model, inputs, labels), a_line(parameters)
    assert apart(records.clipped_sum(parameters, L2(0.5)), without) < 1e-6
    expected = the_losses(model, line.candidates, inputs, labels, 1.7)
    for found in (records.losses_on(line, bound=1.7), records.losses_at(line.candidates, bound=1.7)):
        assert apart(found, expected) < 1e-5


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bound", [0.05, 0.1, 0.3, 0.69, 1.0, 100.0])
@pytest.mark.parametrize("scale", [1.0, math.inf])
def test_a_record_without_cached_outputs_counts_at_least_0_and_at_most_the_bound(
    name: str, bound: float, scale: float
) -> None:
    """Zeros replace it in the sums of 32 bits, which must not be subtracted as the loss of zeros in 64 bits."""
    model, parameters, inputs, labels = problem(name, dtype=torch.float32)
    inputs[0] = math.nan
    line = a_line(parameters * scale)
    more, fewer = (LinearRecords(model, inputs[first:], labels[first:]) for first in (0, 1))
    for difference in (
        more.losses_on(line, bound=bound) - fewer.losses_on(line, bound=bound),
        more.losses_at(line.candidates, bound=bound) - fewer.losses_at(line.candidates, bound=bound),
    ):
        assert -1e-11 <= float(difference.min()) <= float(difference.max()) <= bound + 1e-11


@pytest.mark.parametrize("outputs", [1, 2])
def test_an_error_that_is_not_finite_counts_as_zero(outputs: int) -> None:
    """The root of a negative output is not a number; its other outputs' errors are."""
    model = own(outputs, True, lambda values, _: values[:, 0].sqrt() + values[:, -1])
    parameters, labels = torch.linspace(-1, 1, model.parameter_count), torch.zeros(40, dtype=torch.int64)
    inputs = problem("softmax", 40, torch.float32)[2]
    defined = model.outputs(model.by_name(parameters), inputs)[:, 0] > 0
    assert 0 < int(defined.sum()) < 40
    expected = the_loop(model, parameters, inputs[defined], labels[defined], L2(0.5))
    assert apart(LinearRecords(model, inputs, labels).clipped_sum(parameters, L2(0.5)), expected) < 1e-5
    assert LinearRecords(model, inputs, labels).clipped_sum(parameters * math.inf, L2(0.5)).isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_no_records_and_no_candidates(name: str) -> None:
    model, parameters, inputs, labels = problem(name, count=0)
    empty, line = LinearRecords(model, inputs, labels), a_line(parameters)
    assert empty.clipped_sum(parameters, L2(0.5)).tolist() == [0.0] * len(parameters)
    for losses in (empty.losses_on(line, bound=1.0), empty.losses_at(line.candidates, bound=1.0)):
        assert losses.tolist() == [0.0] * 7
    records = LinearRecords(model, *problem(name)[2:])
    assert records.losses_on(a_line(parameters, 0), bound=1.0).shape == (0,)


@pytest.mark.parametrize("name", MODELS)
def test_cached_outputs_change_no_bit_and_do_not_outlive_a_change_in_place(name: str) -> None:
    model, parameters, inputs, labels = problem(name, 500, torch.float32)
    records, line = LinearRecords(model, inputs, labels), a_line(parameters)
    for _ in range(2):
        fresh = LinearRecords(model, inputs, labels)
        assert torch.equal(records.losses_on(line, bound=3.0), fresh.losses_on(line, bound=3.0))
        found, expected = (one.clipped_sum(parameters, L2(0.5)) for one in (records, fresh))
        assert torch.equal(found, expected)
        parameters.mul_(-1.0)  # the same tensor, another point
        line = a_line(parameters)
    elsewhere = 2.0 * parameters
    assert apart(records.clipped_sum(elsewhere, L2(0.5)), records.clipped_sum(parameters, L2(0.5))) > 1e-3


def test_what_has_no_closed_form_is_refused() -> None:
    model, parameters, inputs, labels = problem("logistic")
    records = LinearRecords(model, inputs, labels)
    for clipping in (PerLayer((0.1, 0.2)), Affine(1.0, torch.zeros(7), torch.ones(7))):
        with pytest.raises(ValueError, match="no single bound"):
            records.clipped_sum(parameters, clipping)
    with pytest.raises(ValueError, match="not one linear layer"):
        LinearRecords(build("tanh_cnn", input_shape=(1, 28, 28), classes=3, seed=0), inputs, labels)
    layer, frozen = nn.Linear(6, 1), nn.Linear(6, 1).requires_grad_(False)
    assert linear_layer(nn.Sequential(nn.Flatten(), layer)) is layer
    for other in ((nn.Flatten(start_dim=2), layer), (nn.Flatten(), frozen), (nn.Flatten(), nn.ReLU(), layer)):
        assert linear_layer(nn.Sequential(*other)) is None


@pytest.mark.parametrize("label", [2, 255, 10**6, -1])
@pytest.mark.parametrize("name", ["logistic", "svm"])
def test_a_label_that_is_no_class_does_not_weigh_more(name: str, label: int) -> None:
    model = build(name, input_shape=(3,), classes=2, seed=0)
    records = LinearRecords(model, torch.ones(1, 3), torch.tensor([label]))
    assert float(records.clipped_sum(model.initial_parameters(), L2(0.5)).norm()) <= 0.5


def test_only_a_plain_linear_layer_has_the_closed_forms() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2.0 * super().forward(input)

    hooked = nn.Linear(3, 1)
    hooked.register_forward_hook(lambda layer, inputs, output: 2.0 * output)
    weighed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))
    assert linear_layer(nn.Sequential(nn.Flatten(), nn.Linear(3, 1))) is not None
    for layer in (Doubled(3, 1), hooked, weighed):
        assert linear_layer(nn.Sequential(nn.Flatten(), layer)) is None

"""The gradient engine against its definition: a loop over single examples in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from algorithms.gradients import (
    L1,
    L2,
    Clipping,
    PerLayer,
    Unclipped,
    clip_and_sum,
    clipped_losses,
    clipped_sum,
    physical_batch,
)
from algorithms.models import Model, build

MODELS = {
    "softmax": lambda: build("softmax", input_shape=(1, 5, 5), classes=3, seed=0),
    "logistic": lambda: build("logistic", input_shape=(7,), classes=2, seed=0),
    "svm": lambda: build("svm", input_shape=(7,), classes=2, seed=0),
    "tanh_cnn": lambda: build("tanh_cnn", input_shape=(1, 28, 28), classes=3, seed=0),
}
SHAPES = {"softmax": (1, 5, 5), "logistic": (7,), "svm": (7,), "tanh_cnn": (1, 28, 28)}


def problem(
    name: str, count: int = 9, dtype: torch.dtype = torch.float64
) -> tuple[Model, Tensor, Tensor, Tensor]:
    model = MODELS[name]()
    draw = torch.Generator().manual_seed(3)
    parameters = model.initial_parameters() + 0.3 * torch.randn(model.parameter_count, generator=draw)
    inputs = torch.randn(count, *SHAPES[name], generator=draw) * torch.logspace(-2, 2, max(count, 2))[
        :count
    ].view(-1, *[1] * len(SHAPES[name]))
    labels = torch.randint(0, 3 if name in ("softmax", "tanh_cnn") else 2, (count,), generator=draw)
    return model, parameters.to(dtype), inputs.to(dtype), labels


def one_gradient(model: Model, parameters: Tensor, one_input: Tensor, label: Tensor) -> Tensor:
    values = parameters.double().requires_grad_()
    loss = model.losses(model.outputs(model.named(values), one_input.double()[None]), label[None]).sum()
    return torch.autograd.grad(loss, values)[0]


def by_definition(
    model: Model, parameters: Tensor, inputs: Tensor, labels: Tensor, clipping: Clipping
) -> Tensor:
    total = torch.zeros(model.parameter_count, dtype=torch.float64)
    for one_input, label in zip(inputs, labels, strict=True):
        gradient = one_gradient(model, parameters, one_input, label)
        bounds = clipping.norms if isinstance(clipping, PerLayer) else (clipping.sensitivity,)
        parts = model.layers() if isinstance(clipping, PerLayer) else [slice(0, len(gradient))]
        for part, bound in zip(parts, bounds, strict=True):
            norm = float(gradient[part].norm(p=1 if isinstance(clipping, L1) else 2))
            total[part] += gradient[part] * min(1.0, bound / norm if norm else 1.0)
    return total


def bounds_of(model: Model, kind: str) -> Clipping:
    layers = len(model.layers())
    return {
        "l2": L2(0.5),
        "l1": L1(0.7),
        "per layer": PerLayer(tuple(0.2 + 0.3 * i for i in range(layers))),
        "none": Unclipped(),
    }[kind]


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("kind", ["l2", "l1", "per layer", "none"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-6), (torch.float32, 1e-4)])
def test_equals_the_loop_over_examples(name: str, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    """The tolerance is the room of 1e-6 that is left below a bound."""
    model, parameters, inputs, labels = problem(name, dtype=dtype)
    clipping = bounds_of(model, kind)
    found = clipped_sum(model, parameters, inputs, labels, clipping)
    expected = by_definition(model, parameters, inputs, labels, clipping)
    assert found.dtype == torch.float64
    assert float((found - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("name", list(MODELS))
def test_any_choice_of_slices_gives_the_same_sum(name: str) -> None:
    model, parameters, inputs, labels = problem(name)
    whole = clipped_sum(model, parameters, inputs, labels, L2(0.5))
    for size in (1, 4, 9):
        parts = [
            clipped_sum(model, parameters, inputs[i : i + size], labels[i : i + size], L2(0.5))
            for i in range(0, 9, size)
        ]
        torch.testing.assert_close(torch.stack(parts).sum(dim=0), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", list(MODELS))
def test_an_empty_batch_is_zero(name: str) -> None:
    model, parameters, inputs, labels = problem(name, count=0)
    assert not clipped_sum(model, parameters, inputs, labels, L2(0.5)).any()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_an_example_that_is_not_finite_counts_as_zero(name: str, bad: float) -> None:
    model, parameters, inputs, labels = problem(name, dtype=torch.float32)
    expected = clipped_sum(model, parameters, inputs[1:], labels[1:], L2(0.5))
    inputs[0] = bad
    found = clipped_sum(model, parameters, inputs, labels, L2(0.5))
    assert torch.isfinite(found).all()
    moved = float((found - expected).norm())
    assert moved <= 0.5 if bad == 1e38 else moved < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [1e-20, 1.0 - 1e-7, 1.0, 1.0 + 1e-7, 3.0, 1e20])
def test_a_contribution_is_never_above_its_bound(norm: float, dtype: torch.dtype) -> None:
    direction = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    row = (direction / direction.norm() * norm).to(dtype)
    room = {torch.float32: 0.0, torch.bfloat16: 2**-8}[
        dtype
    ]  # a bfloat16 row is only known to its own rounding
    assert float(clip_and_sum(row, L2(1.0), []).norm()) <= 1.0 + room


@pytest.mark.parametrize("scale", [1 - 2e-6, 1.0, 1 + 1e-6, 100.0])
def test_the_closed_form_is_never_above_the_bound(scale: float) -> None:
    model, parameters, inputs, labels = problem("softmax", dtype=torch.float32)
    for i in range(len(labels)):
        bound = float(one_gradient(model, parameters, inputs[i], labels[i]).norm()) / scale
        alone = clipped_sum(model, parameters, inputs[i : i + 1], labels[i : i + 1], L2(bound))
        assert float(alone.norm()) <= bound


@given(
    rows=st.integers(1, 6), columns=st.integers(1, 9), seed=st.integers(0, 1000), bound=st.floats(1e-3, 1e3)
)
@settings(deadline=None, max_examples=50)
def test_what_is_within_the_bound_is_left_as_it_is(rows: int, columns: int, seed: int, bound: float) -> None:
    contributions = torch.randn(
        rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    small = contributions / contributions.norm(dim=1, keepdim=True) * bound * (1 - 1e-5)
    torch.testing.assert_close(clip_and_sum(small, L2(bound), []), small.sum(dim=0))


def test_losses_are_clipped_on_both_sides() -> None:
    model, parameters, inputs, labels = problem("softmax")
    losses = model.losses(model.outputs(model.named(parameters), inputs), labels)
    assert losses.max() > 2.0
    torch.testing.assert_close(
        clipped_losses(model, parameters, inputs, labels, 2.0), losses.clamp(0, 2).sum()
    )
    lowered = Model("low", model.module, lambda o, y: model.losses(o, y) - 1e6, model.scores)
    assert clipped_losses(lowered, parameters, inputs, labels, 2.0) == 0.0


def test_physical_batches_follow_the_memory() -> None:
    model, cuda = MODELS["tanh_cnn"](), torch.device("cuda")
    assert physical_batch(model, 1, cuda) == 1
    assert physical_batch(model, 4000, cuda) == pytest.approx(2 * physical_batch(model, 2000, cuda), rel=0.01)
    assert 1 <= physical_batch(model, 4000, torch.device("cpu")) <= physical_batch(model, 4000, cuda)


def test_the_tanh_network_has_the_published_size() -> None:
    model = build("tanh_cnn", input_shape=(1, 28, 28), classes=10, seed=0)
    assert model.parameter_count == 26_010
    layers = model.layers()
    assert [type(m).__name__ for m in model.module if list(m.parameters())] == [
        "Conv2d",
        "Conv2d",
        "Linear",
        "Linear",
    ]
    assert [part.stop - part.start for part in layers] == [1040, 8224, 16416, 330]
    assert layers[0].start == 0 and layers[-1].stop == 26_010


def test_a_model_s_start_depends_on_its_seed_alone() -> None:
    starts = [
        build("tanh_cnn", input_shape=(1, 28, 28), classes=3, seed=s).initial_parameters() for s in (1, 1, 2)
    ]
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


@pytest.mark.parametrize(
    ("name", "shape", "classes", "message"),
    [
        ("mlp", (4,), 2, "there is no model 'mlp'"),
        ("logistic", (4,), 3, "is for 2 classes"),
        ("tanh_cnn", (4,), 2, "at least 20 x 20"),
        ("tanh_cnn", (1, 8, 8), 10, "at least 20 x 20"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    name: str, shape: tuple[int, ...], classes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, input_shape=shape, classes=classes, seed=0)


def test_a_single_linear_layer_without_bias_takes_the_general_way() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False))
    model = Model("bare", module, MODELS["softmax"]().losses, lambda outputs: outputs)
    inputs, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    found = clipped_sum(model, model.initial_parameters(), inputs, labels, L2(0.1))
    expected = by_definition(model, model.initial_parameters(), inputs, labels, L2(0.1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

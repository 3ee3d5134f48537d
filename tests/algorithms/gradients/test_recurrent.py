"""The unrolled recurrences against the layers of torch and their automatic differentiation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.gradients.rules.recurrent import Unrolled, unrolled_gru, unrolled_lstm

KINDS = ["lstm", "gru"]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
assert_equal = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)

Parts = dict[str, Tensor]
"""What one of the recurrences is given: gates, weight, hidden, and cell or recurrent and perhaps bias; all leaves."""


@dataclass(frozen=True)
class Case:
    """A layer of torch with inputs [T, B, I] and what it starts from, each [D, B, H]; float64."""

    kind: str
    layer: nn.RNNBase
    inputs: Tensor
    start: tuple[Tensor, ...]

    def weights(self, name: str) -> Tensor:
        """A weight of every direction, stacked."""
        suffixes = ["_l0", "_l0_reverse"][: len(self.start[0])]
        return torch.stack([getattr(self.layer, name + suffix) for suffix in suffixes])

    def entered(self) -> Tensor:
        """The inputs in processing order, [D, T, B, I]."""
        return torch.stack([self.inputs, self.inputs.flip(0)][: len(self.start[0])])


def case(
    kind: str, steps: int = 4, batch: int = 3, width: int = 3, directions: int = 2, bias: bool = True
) -> Case:
    draw = torch.Generator().manual_seed(steps + 10 * batch + 100 * width)
    layer_type, states = {"lstm": (nn.LSTM, 2), "gru": (nn.GRU, 1)}[kind]
    layer = layer_type(2, width, bias=bias, bidirectional=directions == 2).double()
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    inputs = torch.randn(steps, batch, 2, generator=draw, dtype=torch.float64)
    start = torch.randn(states, directions, batch, width, generator=draw, dtype=torch.float64)
    return Case(kind, layer, inputs, start.unbind())


def parts(case: Case) -> Parts:
    gates = torch.einsum("dtbi,dgi->dtbg", case.entered(), case.weights("weight_ih"))
    found = {"weight": case.weights("weight_hh"), **dict(zip(("hidden", "cell"), case.start, strict=False))}
    if case.kind == "gru":
        found["recurrent"] = torch.zeros_like(gates)
    if case.layer.bias:
        gates = gates + case.weights("bias_ih")[:, None, None]
    if case.layer.bias and case.kind == "gru":
        found["bias"] = case.weights("bias_hh")
    elif case.layer.bias:
        gates = gates + case.weights("bias_hh")[:, None, None]
    return changed({"gates": gates, **found}, torch.clone)


def changed(parts: Parts, change: Callable[[Tensor], Tensor]) -> Parts:
    return {name: change(part.detach()).requires_grad_() for name, part in parts.items()}


def run(parts: Parts) -> Unrolled:
    if "cell" in parts:
        return unrolled_lstm(parts["gates"], parts["weight"], (parts["hidden"], parts["cell"]))
    return unrolled_gru(
        parts["gates"], parts["recurrent"], parts["weight"], parts.get("bias"), parts["hidden"]
    )


def coefficients(like: Tensor) -> Tensor:
    return torch.cos(torch.arange(like.numel(), device=like.device)).to(like.dtype).view(like.shape)


def gradients(parts: Parts, results: list[Tensor]) -> Parts:
    """Of a sum of results with different coefficients, which are left as they were; the graph stays."""
    names = [name for name in ("gates", "recurrent", "hidden", "cell") if name in parts]
    leaves, above = [parts[name] for name in names], [coefficients(result) for result in results]
    found = torch.autograd.grad(results, leaves, above, retain_graph=True)
    assert all(map(torch.equal, above, map(coefficients, results)))
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_other_types_are_within_rounding(
    kind: str, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    one = case(kind, steps=10, batch=7, width=8)
    for parameter in one.layer.parameters():
        parameter.data *= 0.4
    narrow = changed(parts(one), partial(torch.Tensor.to, device=device, dtype=dtype))
    assert_same(narrow, changed(narrow, torch.Tensor.double), tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_order_does_not_matter(kind: str) -> None:
    """Gates seen through a permutation, and zeros that are one number."""
    plain = parts(case(kind))
    odd = changed(plain, lambda part: part.mT.contiguous().mT if part.dim() == 4 else part)
    assert not odd["gates"].is_contiguous()
    if kind == "gru":
        odd["recurrent"] = torch.zeros(()).double().expand_as(odd["gates"]).requires_grad_()
    assert_same(odd, plain, 1e-13)


def assert_same(ours: Parts, theirs: Parts, tolerance: float) -> None:
    """The same outputs and gradients, relative to their norm, in our type and on our device."""
    found, expected = run(ours), run(theirs)
    our_gradients = gradients(ours, [found.outputs, *found.last]).values()
    their_gradients = gradients(theirs, [expected.outputs, *expected.last]).values()
    pairs = zip(our_gradients, their_gradients, strict=True)
    for our, their in [(found.outputs.detach(), expected.outputs.detach()), *pairs]:
        assert our.dtype == ours["gates"].dtype and our.device == ours["gates"].device
        assert float((our - their).norm() / their.norm()) < tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward_pass_gives_the_same(kind: str) -> None:
    """Whatever was done in between to the gradients that came out."""
    ours = parts(case(kind))
    unrolled = run(ours)
    first = gradients(ours, [unrolled.outputs, *unrolled.last])
    copies = {name: gradient.clone() for name, gradient in first.items()}
    for gradient in first.values():
        assert gradient.any()
        gradient.zero_()
    second = gradients(ours, [unrolled.outputs, *unrolled.last])
    assert all(torch.equal(second[name], copies[name]) for name in copies)


@pytest.mark.parametrize("kind", KINDS)
def test_results_cannot_be_written_over(kind: str) -> None:
    """`previous` shares the outputs' memory, so an activation in place would spoil the weight's gradient."""
    unrolled = run(parts(case(kind)))
    with pytest.raises(RuntimeError, match="modified inplace"):
        functional.relu_(unrolled.outputs)

"""The rules of products and of recurrences: parameters in products of any letters, and what recurrences are given."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from algorithms.gradients import L1, L2, Affine, PerLayer
from algorithms.gradients.arithmetic import pad_to_multiple
from algorithms.gradients.model_inspection import InspectionLimits
from algorithms.gradients.rules.general import _Call
from algorithms.gradients.rules.recurrent import Unrolled, unrolled_gru, unrolled_lstm
from tests.support.device import DEVICE
from tests.support.gradients import naive
from tests.support.gradients.problems import BRIEF, SMALL, Spec, Wired, by_limits, check, problem, rows


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64))


def taken(
    wiring: Callable[..., Tensor], shape: tuple[int, ...], *sizes: int, **parts: nn.Module | nn.Parameter
) -> Spec:
    """A function of a parameter `w` and of records that went through a layer."""
    return Spec(lambda: Wired(wiring, w=drawn(*sizes), layer=nn.Linear(shape[-1], shape[-1]), **parts), shape)


def einsum(equation: str) -> Callable[..., Tensor]:
    return lambda self, x: torch.einsum(equation, self.layer(x), self.w)


PRODUCTS = {
    "einsum of a vector": taken(einsum("bi,oi->bo"), (4,), 3, 4),
    "einsum, output first in the weight": taken(einsum("bti,io->bto"), (5, 4), 4, 3),
    "einsum, mixed order": taken(einsum("bti,oih->btoh"), (5, 4), 2, 4, 3),
    # In the order b d a c, so that going there and going back permute differently.
    "einsum, order of a cycle": taken(einsum("ntac,abcd->ntbd"), (5, 2, 3), 2, 4, 3, 5),
    "einsum, sum over the sequence": taken(einsum("bti,io->bo"), (5, 4), 4, 3),
    "einsum, blocks": taken(einsum("bhi,hio->bho"), (3, 4), 3, 4, 2),
    "einsum, large blocks": taken(einsum("bhi,hio->bho"), (3, 18), 3, 18, 20),
    "einsum, large blocks of sequences": taken(einsum("bthi,hoi->btho"), (5, 3, 18), 3, 20, 18),
    "einsum, large blocks of short sequences": taken(einsum("bthi,hoi->btho"), (2, 2, 40), 2, 40, 40),
    "einsum, large blocks in the middle": taken(einsum("bhi,iho->bho"), (3, 18), 18, 3, 20),
    "einsum, record inside": taken(
        lambda self, x: torch.einsum("bti,ot->ibo", self.layer(x), self.w).transpose(0, 1), (5, 4), 3, 5
    ),
    "einsum, dots": taken(einsum("...i,oi->...o"), (5, 4), 3, 4),
    "einsum, no arrow": taken(einsum("bti,io"), (5, 4), 4, 3),
    "einsum, upper letters": taken(einsum("ZYi,io->ZYo"), (5, 4), 4, 3),
    "einsum of three": taken(
        lambda self, x: torch.einsum("bi,bj,ijo->bo", self.layer(x), x, self.w), (4,), 4, 4, 3
    ),
    "einsum with what all share": taken(
        lambda self, x: torch.einsum("bi,ik,ko->bo", self.layer(x), torch.eye(4).to(x), self.w), (4,), 4, 3
    ),
    "matmul from the left": taken(lambda self, x: self.w @ self.layer(x), (5, 4), 3, 5),
    "matmul with a vector": taken(lambda self, x: self.layer(x) @ self.w, (5, 4), 4),
    "matmul of a vector from the left": taken(lambda self, x: self.w @ self.layer(x), (5, 4), 5),
    "matmul by heads": taken(lambda self, x: self.layer(x) @ self.w, (3, 5, 4), 3, 4, 2),
    "matmul, stretched": taken(lambda self, x: self.layer(x)[:, None] @ self.w, (5, 4), 3, 4, 2),
    "matmul, one for all": taken(lambda self, x: self.layer(x) @ self.w, (5, 4), 1, 4, 2),
    "mv": taken(lambda self, x: torch.mv(self.layer(x), self.w)[:, None], (4,), 4),
    "bmm over a dimension": taken(
        lambda self, x: torch.bmm(self.layer(x).transpose(0, 1), self.w).transpose(0, 1), (3, 4), 3, 4, 2
    ),
    "baddbmm over a dimension": taken(
        lambda self, x: torch.baddbmm(self.added, self.layer(x).transpose(0, 1), self.w).transpose(0, 1),
        *((3, 18), 3, 18, 20),
        added=drawn(3, 1, 20),
    ),
    "baddbmm, a value added": taken(
        lambda self, x: x.transpose(0, 1).baddbmm(self.layer(x).transpose(0, 1), self.w).transpose(0, 1),
        *((3, 4), 3, 4, 4),
    ),
    "baddbmm of values, a parameter added": taken(
        lambda self, x: torch.baddbmm(self.w, self.layer(x), x.transpose(1, 2)), (5, 4), 5, 5
    ),
    "folded records": taken(
        lambda self, x: torch.einsum("bi,io->bo", self.layer(x).flatten(0, 1), self.w).view(len(x), -1),
        *((5, 4), 4, 3),
    ),
    "tensordot": taken(lambda self, x: torch.tensordot(self.layer(x), self.w, dims=1), (5, 4), 4, 3),
    "tensordot of two": taken(
        lambda self, x: torch.tensordot(self.layer(x), self.w, dims=([2, 1], [0, 1])), (5, 4), 4, 5, 3
    ),
    "bilinear": taken(lambda self, x: self.two(self.layer(x), x), (4,), 1, two=nn.Bilinear(4, 4, 3)),
    "bilinear over a sequence": taken(
        lambda self, x: self.two(self.layer(x), x), (5, 4), 1, two=nn.Bilinear(4, 4, 3, bias=False)
    ),
    "repeat": taken(lambda self, x: self.layer(x) + self.w.repeat(len(x), 1, 1), (5, 4), 5, 4),
    "repeat within": taken(lambda self, x: self.layer(x) * self.w.repeat(len(x), 2), (4,), 1, 2),
    "repeat by heads": taken(
        lambda self, x: (self.layer(x).flatten(0, 1) + self.w.repeat(len(x), 1)).view(x.shape), (5, 4), 5, 4
    ),
    "tile": taken(lambda self, x: self.layer(x) * torch.tile(self.w, (len(x), 1)), (4,), 4),
    "a number added": taken(lambda self, x: self.layer(x) * (1.0 + self.w), (4,), 4),
    "parts of an iteration": taken(lambda self, x: sum(self.layer(x) * part for part in self.w), (4,), 3, 4),
}


LIKE_OTHERS = {
    *("einsum of a vector", "einsum, output first in the weight", "einsum, sum over the sequence"),
    *("einsum, upper letters", "matmul with a vector", "matmul, stretched", "matmul, one for all"),
    *("tensordot", "bilinear", "repeat within", "repeat by heads"),
}
"""Products that take the branches of others in other orders of their letters."""
IN_FULL = ["einsum, blocks", "folded records", "repeat"]


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        *by_limits([name for name in PRODUCTS if name not in LIKE_OTHERS], in_full=IN_FULL),
        *(
            pytest.param(name, limits, marks=pytest.mark.soak)
            for name in sorted(LIKE_OTHERS)
            for limits in (BRIEF, InspectionLimits())
        ),
    ],
)
def test_a_product_has_the_gradients_of_the_loop(name: str, limits: InspectionLimits) -> None:
    made = problem(PRODUCTS[name])
    engine = made.engine(limits=limits)
    check(made, engine)
    assert engine.is_batched and not engine.operations_without_rule


@pytest.mark.parametrize(
    "name",
    [
        *("einsum, mixed order", "einsum, order of a cycle", "einsum, blocks", "matmul from the left"),
        *("einsum, large blocks", "einsum, large blocks of sequences"),
        *("einsum, large blocks of short sequences", "einsum, large blocks in the middle"),
    ],
)
def test_a_product_has_every_norm(name: str) -> None:
    made = problem(PRODUCTS[name])
    found = made.engine(limits=BRIEF).contributions(*made.arguments)
    spread = torch.rand(made.model.parameter_count, dtype=torch.float64) + 0.5
    layers = PerLayer((1.0,) * len(made.model.layers))
    for clipping in (L1(1.0), L2(1.0), layers, Affine(1.0, 0.1 * spread, spread)):
        expected = naive.norms(made.model, made.gradients, clipping)
        assert naive.relative(found.norms(clipping), expected) < 1e-9


TABLES = {
    "by index": lambda self, x: self.w[x],
    "from the end": lambda self, x: self.w[x - 9],
    "index_select": lambda self, x: self.w.index_select(0, x.flatten()).view(len(x), -1, 4),
    "one-hot": lambda self, x: functional.one_hot(x, 9).to(self.w) @ self.w,
}


@pytest.mark.parametrize(("name", "limits"), by_limits(TABLES, in_full=["by index"]))
def test_rows_that_are_looked_up_without_a_layer_are_an_embedding(
    name: str, limits: InspectionLimits
) -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        return self.layer(TABLES[name](self, x).tanh())

    made = problem(Spec(lambda: Wired(wiring, w=drawn(9, 4), layer=nn.Linear(4, 3)), (5,), entries=9))
    engine = made.engine(limits=limits)
    check(made, engine)
    assert engine.is_batched and not engine.operations_without_rule and engine.physical_batch > 1


DEPTHWISE = {
    "plain": nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "strides, dilation": nn.Conv2d(4, 4, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2), groups=4),
    "several kernels a channel": nn.Conv2d(4, 8, 3, stride=2, groups=4),
    "one place": nn.Conv2d(4, 4, 7, groups=4),
}


@pytest.mark.parametrize(("name", "limits"), by_limits(DEPTHWISE, in_full=["plain"]))
def test_kernels_of_one_channel_each(name: str, limits: InspectionLimits) -> None:
    layers = nn.Sequential(nn.Conv2d(2, 4, 1), DEPTHWISE[name], nn.Flatten())
    made = problem(Spec(lambda: layers, (2, 7, 7)))
    check(made, made.engine(physical_batch=SMALL, limits=limits))


def test_kernels_of_one_channel_count_a_record_alike_in_any_company() -> None:
    made = problem(
        Spec(lambda: nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.Flatten()), (6, 9, 9)), torch.float32
    )
    engine = made.engine(limits=BRIEF)
    draw = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(150, 6, 9, 9, generator=draw), torch.arange(150) % 3
    together = engine.norms(made.parameters, inputs, labels, L2(1.0))
    for start in (0, 7, 93):
        some = slice(start, start + 50)
        assert torch.equal(engine.norms(made.parameters, inputs[some], labels[some], L2(1.0)), together[some])


@pytest.mark.parametrize(("steps", "largest"), [(64, 8), (65, 64)])
def test_gradients_of_large_computed_weights_are_pulled_back_for_a_few_records(
    steps: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a value leaves numbers at the end of a vector."""

    def wiring(self: Wired, x: Tensor) -> Tensor:
        decays = torch.exp(-self.rates[:, :, None] * torch.arange(steps, dtype=x.dtype) / steps)
        kernels = torch.einsum("hn,hnl->hl", self.shares, decays)
        outputs: Tensor = self.last(torch.tanh(torch.cat([x, x[:, : steps - 64]], dim=1) @ kernels.T))
        return outputs

    parts = {"rates": drawn(16, 64), "shares": drawn(16, 64), "last": nn.Linear(16, 3)}
    made = problem(Spec(lambda: Wired(wiring, **parts), (64,)))
    engine, counts, vmap = made.engine(limits=BRIEF), list[int](), torch.func.vmap

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*vectors: Tensor) -> Any:
            counts.append(len(vectors[0]))
            return vmap(function)(*vectors)

        return run

    monkeypatch.setattr(torch.func, "vmap", counted)
    records = pad_to_multiple(made.inputs), pad_to_multiple(made.labels)
    assert engine.inspection.layouts is not None
    found = engine.passes.record_gradients(made.parameters, *records, engine.inspection.layouts)
    assert max(counts) == largest
    expected = naive.norms(made.model, made.gradients, L2(1.0))
    assert naive.relative(found.first(len(made.labels)).norms(L2(1.0)), expected) < 1e-9
    assert naive.relative(rows(made, engine), made.gradients) < 1e-9


class _BackwardCalls(TorchDispatchMode):
    """Counts the backward passes of GELU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.gelu_backward.default
        return func(*args, **(kwargs or {}))


def test_a_network_of_parameters_alone_is_differentiated_for_all_records_at_once() -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        places = torch.linspace(0.0, 1.0, 3, dtype=x.dtype)[:, None]
        return self.branch(x) @ self.trunk(places).T

    def trunk() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 5), nn.GELU(), nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 4))

    made = problem(Spec(lambda: Wired(wiring, branch=nn.Linear(6, 4), trunk=trunk()), (6,)))
    engine = made.engine(physical_batch=SMALL, limits=BRIEF)
    assert engine.is_batched and not engine.operations_without_rule
    with _BackwardCalls() as calls:
        engine.contributions(*made.arguments)
    assert calls.count == 2
    check(made, engine)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(40, 60, 3, padding=1),
        nn.Conv1d(40, 60, 1, groups=2),
        nn.ConvTranspose1d(40, 60, 1, groups=2),
    ],
    ids=["one", "groups", "transposed"],
)
def test_a_convolution_with_one_place_materialises_nothing(layer: nn.Module) -> None:
    made = problem(Spec(lambda: nn.Sequential(layer, nn.Flatten()), (40, 1)))
    engine = made.engine(limits=BRIEF)
    found = engine.contributions(*made.arguments)
    expected = naive.norms(made.model, made.gradients, L2(1.0))
    assert naive.relative(found.norms(L2(1.0)), expected) < 1e-9
    assert found.materialized_bytes <= engine.physical_batch * 60 * 8  # those of biases


def test_many_small_parameters_are_measured_and_added_together() -> None:
    made = problem(Spec(lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (5, 3)))
    engine = made.engine(limits=BRIEF)
    assert naive.relative(rows(made, engine), made.gradients) < 1e-10
    bad = made.inputs.clone()
    bad[2] = float("nan")
    kept = [i for i in range(len(bad)) if i != 2]
    expected = naive.contributions(made.model, made.gradients[kept], L2(0.5)).sum(dim=0)
    assert naive.relative(engine.clipped_sum(made.parameters, bad, made.labels, L2(0.5)), expected) < 1e-9


KINDS = ["lstm", "gru"]
DEVICES = sorted({"cpu", DEVICE.type})
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


def test_memory_that_lacks_changes_no_way_of_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another way would round otherwise, because of what else takes memory at that moment."""

    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(_Call, "_together", fail)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        object.__new__(_Call).gradients(torch.zeros(1))

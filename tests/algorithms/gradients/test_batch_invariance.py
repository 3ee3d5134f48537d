"""What a record counts does not depend on how many others there are, on its place among them, or on what they count."""

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.gradients import (
    L1,
    L2,
    Affine,
    Box,
    Clipping,
    Engine,
    LinearRecords,
    LineCandidates,
    Normalised,
    PerLayer,
    RecordsNotIndependentError,
    UnsupportedModelError,
    batch_invariance,
)
from algorithms.gradients import engine as engine_module
from algorithms.gradients.arithmetic import PassCounts, pass_sizes
from algorithms.gradients.grad_sample_recorder import UnrecordedError
from algorithms.gradients.model import copy_module
from algorithms.gradients.model_gradients import PerExampleGradients
from algorithms.gradients.model_inspection import InspectionLimits
from algorithms.gradients.parameter_gradients import DenseGrad, LinearGrad, PerExample
from algorithms.gradients.passes import Passes
from algorithms.gradients.rules.convolution import ConvGrad, Window
from algorithms.gradients.rules.layers import HAS_FAST_LINEAR, FastLinear
from algorithms.gradients.table_gradients import EmbeddingGrad
from algorithms.models import Model, build
from algorithms.models.objectives import cross_entropy
from tests.support.gradients import forms, naive
from tests.support.gradients.networks import NETWORKS, REPEATS, SPECS, TYPICAL
from tests.support.gradients.problems import (
    BRIEF,
    SMALL,
    Problem,
    Spec,
    Wired,
    by_limits,
    cached_problem,
    problem,
    rows,
    unlike_alone,
)
from tests.support.soak import soak_but
from tests.support.threads import cpu_threads

F32, BF16 = torch.float32, torch.bfloat16
_RECORDS = 2**13


def halves() -> Tensor:
    """Numbers that lift a sum just above 4096, then as many that are half of what 32 bits tell apart there."""
    lift = np.full(_RECORDS, 0.995, np.float32)
    lifted = int(np.searchsorted(lift.cumsum(dtype=np.float32), 4096 + 2**-10)) + 1
    return torch.cat([torch.from_numpy(lift[:lifted]), torch.full((_RECORDS - lifted,), -0.98 * 2.0**-12)])


FORMS = {
    "rows": lambda v: DenseGrad(v[:, None]),
    "wide rows": lambda v: DenseGrad(v[:, None] * torch.eye(1, 64)),
    "products": lambda v: LinearGrad(torch.ones(len(v), 1, 1), v[:, None, None]),
    "wide products": lambda v: LinearGrad(torch.eye(1, 120).expand(len(v), 1, 120), v[:, None, None]),
    "patches": lambda v: ConvGrad(
        torch.ones(len(v), 1, 1, 1), v[:, None, None, None], Window((1, 1), (1, 1), (0, 0), (1, 1), 1)
    ),
    "lookups": lambda v: EmbeddingGrad(torch.zeros(len(v), 1, dtype=torch.int64), v[:, None, None], 2),
}


def summed(gradient: PerExample, clipping: Clipping, size: int) -> Tensor:
    losses = torch.zeros(_RECORDS)
    everything = PerExampleGradients(losses, {"w": gradient}, {"w": slice(0, size)}, (("w",),), torch.float32)
    without = everything.take(torch.arange(1, _RECORDS))
    return everything.clipped_sum(clipping) - without.clipped_sum(clipping)


@pytest.mark.parametrize("name", FORMS)
def test_a_sum_takes_every_record_for_what_it_is(name: str) -> None:
    """In 32 bits the first record decides whether thousands of small ones are swallowed: two whole bounds."""
    gradient = FORMS[name](halves())
    size = gradient.rows.shape[1] if name != "lookups" else 2
    for clipping in (L2(1.0), L1(1.0), PerLayer((1.0,)), Affine(1.0, torch.zeros(size), torch.ones(size))):
        assert float(summed(FORMS[name](halves()), clipping, size).norm()) <= 1.0


def test_a_closed_form_takes_every_record_for_what_it_is() -> None:
    """A public number of records, of which the first is exchanged for one that counts nothing."""
    model = build("logistic_through_origin", input_shape=(1,), classes=2, seed=0)
    values = halves()
    inputs, labels = 2.0 * values[:, None], torch.zeros(_RECORDS, dtype=torch.int64)
    changed = torch.cat([torch.zeros(1, 1), inputs[1:]])
    sums = [
        LinearRecords(model, given, labels).clipped_sum(torch.zeros(1), L2(1.0))
        for given in (inputs, changed)
    ]
    assert float((sums[0] - sums[1]).norm()) <= 1.0


@pytest.mark.parametrize("clipping", [L2(1.0), L1(1.0), PerLayer((1.0,)), Normalised(1.0)])
@pytest.mark.parametrize("size", [1e6, 1e17, 1e20])
def test_lookups_of_one_entry_that_cancel_swallow_nothing_of_the_others(
    clipping: Clipping, size: float
) -> None:
    errors = torch.cat([torch.ones(200, 2, 1), torch.tensor([[[size], [-size]]])])
    twice = EmbeddingGrad(torch.zeros(201, 2, dtype=torch.int64), errors, 2)
    all_of_them = forms.contributions(twice)
    others = all_of_them.take(torch.arange(200)).clipped_sum(clipping)
    assert float(others.norm()) == pytest.approx(200.0, rel=1e-5)
    assert float((all_of_them.clipped_sum(clipping) - others).norm()) <= 1.0


LARGE = {
    "products": lambda v: LinearGrad(*(v[:, None, None] * torch.eye(2, 512) for _ in range(2))),
    "patches": lambda v: ConvGrad(
        *(v[:, None, None, None] * torch.ones(1, 512, 1, 1) / 512**0.5 for _ in range(2)),
        Window((1, 1), (1, 1), (0, 0), (1, 1), 1),
    ),
}


@pytest.mark.parametrize("clipping", [L2(1.0), L2(100.0), PerLayer((1.0,)), Normalised(1.0)])
@pytest.mark.parametrize("name", LARGE)
def test_a_gradient_that_32_bits_cannot_hold_adds_its_bound(name: str, clipping: Clipping) -> None:
    """Its norm by Gram matrices, in 64 bits, is finite."""
    values = torch.full((11,), 1e-3)
    values[-1] = 1.8e19
    everything = forms.contributions(LARGE[name](values))
    others = everything.take(torch.arange(10)).clipped_sum(clipping)
    moved = float((everything.clipped_sum(clipping) - others).norm())
    assert moved == pytest.approx(clipping.sensitivity, rel=1e-5)


class Difference(nn.Module):
    """A linear layer over positions, the last of which is taken off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(200, 32, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[batch, positions, 200] -> [batch, 32]."""
        outputs: Tensor = self.layer(inputs)
        return outputs[:, :-1].sum(dim=1) - outputs[:, -1]


def test_terms_that_cancel_in_one_record_swallow_nothing_of_the_others() -> None:
    direction = functional.normalize(torch.randn(32, generator=torch.Generator().manual_seed(0)), dim=0)
    model = Model("difference", Difference(), lambda outputs, _: outputs @ direction, lambda outputs: outputs)
    engine = Engine(model, input_shape=(5, 200))
    unit = functional.normalize(torch.randn(200, generator=torch.Generator().manual_seed(1)), dim=0)
    others = 0.1 * unit.expand(200, 5, 200).clone()
    others[:, -1] *= -1
    cancels = torch.zeros(1, 5, 200)
    cancels[0, -2:] = 1e9 * unit
    labels, start = torch.zeros(201, dtype=torch.int64), model.initial_parameters()
    expected = engine.clipped_sum(start, others, labels[1:], L2(1.0))
    for place in range(70, 80):
        inputs = torch.cat([others[:place], cancels, others[place:]])
        assert float((engine.clipped_sum(start, inputs, labels, L2(1.0)) - expected).norm()) <= 1.0


@pytest.mark.parametrize("is_line", [True, False])
@pytest.mark.parametrize("name", ["logistic", "svm", "softmax"])
def test_losses_of_very_long_records_do_not_turn_when_one_is_exchanged(name: str, *, is_line: bool) -> None:
    """Of forty records some are too long for margins that are carried, the others zero."""
    outputs = 3 if name == "softmax" else 1
    model = build(name, input_shape=(60,), classes=max(2, outputs), seed=0)
    line = LineCandidates(
        *torch.randn(2, 61 * outputs, generator=torch.Generator().manual_seed(5)), (0.0, 1.0, 2.0)
    )
    weights = line.candidates[0][: 60 * outputs].view(outputs, 60)
    long = forms.cancelling(weights, 1e19, torch.Generator().manual_seed(4))
    sums = []
    for count in range(1, 40):
        inputs = torch.zeros(40, 60)
        inputs[:count] = long
        records = LinearRecords(model, inputs, torch.zeros(40, dtype=torch.int64))
        of_all = (
            records.losses_on(line, bound=1.0) if is_line else records.losses_at(line.candidates, bound=1.0)
        )
        sums.append(of_all)
    for fewer, more in pairwise(sums):
        assert float((more - fewer).abs().max()) <= 1.0 + 1e-9


def alone(engine: Engine, made: Problem, records: list[int], place: int) -> Tensor:
    """The gradient of one record among others, and its norm."""
    some = made.take(records)
    found = engine.contributions(*some.arguments)
    norms = found.norms(L2(1.0))
    weights = torch.ones(1, dtype=torch.float64)
    return torch.cat([found.take(torch.tensor([place])).weighted_sum(weights), norms[[place]]])


@pytest.mark.parametrize(
    "name",
    soak_but([name for name in TYPICAL if name not in REPEATS], dict.fromkeys((*TYPICAL, *NETWORKS))),
)
def test_a_record_is_the_same_bit_for_bit_in_any_company(name: str) -> None:
    made, engine = cached_problem(SPECS[name], torch.float32)
    assert engine.physical_batch == 64
    engine = copy(engine)
    for engine.physical_batch in (64, 32):
        expected = alone(engine, made, [0], 0)
        for others, place in (([0, 1], 0), ([3, 2, 0], 2), ([1, 2, 0, 4, 5], 2), ([5, 4, 3, 2, 1, 0, 2], 5)):
            assert torch.equal(alone(engine, made, others, place), expected), (others, place)


@pytest.mark.parametrize("place", [0, 40])
@pytest.mark.parametrize("name", soak_but(["linear, sequence"], ["linear, sequence", "cnn"]))
def test_a_device_that_rounds_by_place_is_found(name: str, place: int) -> None:
    """A row that is computed in another order, as by another kernel, so that its last bits alone differ."""
    turned: list[int] = []

    def wiring(self: Wired, x: Tensor) -> Tensor:
        factors = torch.ones(len(x), *[1] * (x.dim() - 1))
        factors[[row for row in turned if row < len(x)]] = 1.0 + 2.0**-22
        return self.layer(x * factors)

    spec = replace(SPECS[name], make=lambda: Wired(wiring, layer=SPECS[name].make()))
    engine = problem(spec, torch.float32).engine(physical_batch=64)
    point = engine.passes.model.initial_parameters()
    assert engine.compare_passes(point, point.device).is_same
    turned.append(place)
    assert not engine.compare_passes(point, point.device).is_same


def test_a_pass_that_does_not_fit_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Engine, "contributions", full)
    with pytest.raises(UnsupportedModelError) as refusal:
        problem(SPECS["linear"], torch.float32).engine(physical_batch=64)
    assert (refusal.value.code, refusal.value.fields["size"]) == ("pass_exceeds_memory", 64)


@pytest.mark.skipif(not HAS_FAST_LINEAR, reason="oneDNN's products need AVX-512")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("p", "o"), [(60, 1000), (1000, 10), (97, 101), (768, 256), (5000, 2), (1, 9000)])
def test_a_row_of_a_fast_layer_is_the_same_bit_for_bit_in_any_company(p: int, o: int, threads: int) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(o, p, generator=draw), torch.randn(640, p, generator=draw)
    with cpu_threads(threads):
        alone = FastLinear.apply(rows[:64], weight, None)
        for count in (64, 128, 320, 640):
            order = torch.randperm(count, generator=draw)
            together = FastLinear.apply(rows[order], weight, None)
            assert torch.equal(together[order.argsort()[:64]], alone)


@pytest.mark.skipif(not HAS_FAST_LINEAR, reason="oneDNN's products need AVX-512")
def test_a_fast_layer_has_the_derivatives_of_a_slow_one() -> None:
    """Of second order too, since some models differentiate within their forward pass."""
    draw = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(64, 3, 50, generator=draw), torch.randn(70, 50, generator=draw)
    bias = torch.randn(70, generator=draw)
    found = []
    for layer in (FastLinear.apply, functional.linear):
        leaf = rows.clone().requires_grad_()
        first = torch.autograd.grad(layer(leaf, weight, bias).sin().sum(), leaf, create_graph=True)[0]
        found.append((first, torch.autograd.grad(first.square().sum(), leaf)[0]))
    for fast, slow in zip(*found, strict=True):
        assert torch.allclose(fast, slow, rtol=1e-4, atol=1e-4 * float(slow.detach().abs().max()))


def test_a_model_with_a_fast_layer_has_the_sums_of_the_loop() -> None:
    layers = (nn.Linear(8, 128), nn.Linear(128, 128), nn.ReLU(inplace=True), nn.Linear(128, 3))
    made = problem(Spec(lambda: nn.Sequential(*layers), (8,)), torch.float32)
    clipping = naive.clippings(made.model, made.gradients)["L2"]
    expected = naive.contributions(made.model, made.gradients, clipping).sum(dim=0)
    assert naive.relative(made.engine().clipped_sum(*made.arguments, clipping), expected) < 1e-5


@pytest.mark.parametrize(
    "bias",
    [
        lambda self, x: self.table[:1, 0].expand(128),
        lambda self, x: self.table[:, 0],
        lambda self, x: self.layer.weight.diagonal(),
        lambda self, x: self.before(x),
    ],
    ids=["expanded", "a column", "the diagonal of its weight", "each record's own"],
)
def test_a_large_layer_takes_a_bias_in_any_form(bias: Callable[[Wired, Tensor], Tensor]) -> None:
    """A look in 64 bits does not find what a layer in 32 bits reads outside of its bias."""

    def run(self: Wired, x: Tensor) -> Tensor:
        return functional.linear(x, self.layer.weight, bias(self, x))

    parts = {"layer": nn.Linear(128, 128, bias=False), "before": nn.Linear(128, 128)}
    spec = Spec(lambda: Wired(run, table=nn.Parameter(torch.randn(128, 5)), **parts), (128,))
    made = problem(spec, torch.float32)
    engine = made.engine(physical_batch=SMALL, limits=BRIEF)
    assert engine.is_batched
    assert naive.relative(rows(made, engine), made.gradients) < 1e-4


class Experts(nn.Module):
    """Top-1 experts that drop tokens beyond a capacity, which is at least 64."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(6, 4), nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.gate(x), -1)
        chosen = functional.one_hot(shares.argmax(-1), 4).to(x.dtype)
        is_held = (torch.cumsum(chosen, 0) * chosen).sum(-1) <= max(64, int(1.25 * len(x) / 4))
        mixed = sum(chosen[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return self.out(x + mixed * (is_held.to(x.dtype) * shares.amax(-1))[:, None])  # type: ignore[no-any-return]


def linear(before: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Wired(lambda self, x: self.layer(before(x)), layer=nn.Linear(6, 2))


def from_a_number_on(count: int, mixing: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return linear(lambda x: mixing(x) if len(x) >= count else x)


SLOWEST = "the number of equal rows"
BY_SIZE: dict[str, Callable[[], nn.Module]] = {
    "experts of a capacity": Experts,
    "centred from 128 on": from_a_number_on(128, lambda x: x - x.mean(dim=0)),
    "centred from 300 on": from_a_number_on(300, lambda x: x - x.mean(dim=0)),
    "scaled by the number from 128 on": from_a_number_on(128, lambda x: x * (128 / len(x)) * 0.5),
    "scaled by the number": linear(lambda x: x * min(1.0, 64 / len(x))),
    "the last rows": from_a_number_on(65, lambda x: torch.cat([x[:64], 2 * x[64:]])),
    "whether the last row repeats the one before it": from_a_number_on(
        65, lambda x: torch.where((x[-1:] == x[-2:-1]).all(), x, 0.5 * x)
    ),
    SLOWEST: from_a_number_on(65, lambda x: x / (x[:, :1] == x[:, 0]).sum(1, keepdim=True)),
}


@pytest.mark.parametrize(
    ("name", "expected_batch"),
    soak_but(
        [(name, batch) for name in BY_SIZE for batch in (16.0, 1000.0) if name != SLOWEST],
        [(name, batch) for name in BY_SIZE for batch in (16.0, 200.0, 1000.0)],
    ),
)
def test_what_begins_with_many_records_is_refused_whatever_size_the_passes_have(
    name: str, expected_batch: float
) -> None:
    model = Model("made up", BY_SIZE[name](), cross_entropy, lambda outputs: outputs)
    with pytest.raises(RecordsNotIndependentError, match="mixes records"):
        Engine(model, input_shape=(6,), expected_batch=expected_batch)


@pytest.mark.parametrize("expected_batch", [16.0, 1000.0])
def test_a_loss_that_is_scaled_by_the_number_of_records_is_refused(expected_batch: float) -> None:
    def losses(outputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(outputs, labels) * min(1.0, 64 / len(labels))

    model = Model("made up", nn.Linear(6, 2), losses, lambda outputs: outputs)
    with pytest.raises(RecordsNotIndependentError, match="the loss of the model made up mixes records"):
        Engine(model, input_shape=(6,), expected_batch=expected_batch)


def thirds(x: Tensor, is_rounded: Tensor) -> Tensor:
    """The same numbers, of which some may differ in a last bit of 32 bits."""
    return torch.where(is_rounded, x * 3.0 / 3.0, x)


class RoundedBackward(torch.autograd.Function):
    """The same numbers, whose gradients are rounded where the record before is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> Tensor:
        return thirds(errors[0], ctx.saved_tensors[0].roll(1, 0).abs() > 20.0)


def places(x: Tensor) -> Tensor:
    return torch.arange(len(x))[:, None]


LAST_BITS: dict[str, Callable[[Wired, Tensor], Tensor]] = {
    "by the record before": lambda self, x: self.layer(thirds(x, x.roll(1, 0).abs() > 20.0)),
    "by the row": lambda self, x: self.layer(thirds(x, places(x) % 2 == 0)),
    "of the last row": lambda self, x: self.layer(thirds(x, places(x) == len(x) - 1)),
    "of gradients": lambda self, x: RoundedBackward.apply(self.layer(x)),
    "more than the last bits of one row": lambda self, x: self.layer(torch.where(places(x) == 100, 2 * x, x)),
}


@pytest.mark.usefixtures("all_comparisons")
@pytest.mark.parametrize("name", LAST_BITS)
def test_records_whose_last_bits_depend_on_their_company_are_taken_one_at_a_time(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Less than a tolerance finds, and at a kink a whole gradient."""
    spec = Spec(lambda: Wired(LAST_BITS[name], layer=nn.Linear(6, 2)), (6,))
    engine = problem(spec, torch.float32).engine(expected_batch=300.0)
    assert engine.physical_batch == 1
    assert "the last bits of a record's values depend on the other records" in caplog.text


def sizes_of(engine: Engine, run: Callable[[], object]) -> set[int]:
    """How many rows the model's module has in the passes of a call."""
    sizes: set[int] = set()
    hook = engine.passes.model.module.register_forward_pre_hook(lambda _, inputs: sizes.add(len(inputs[0])))
    run()
    hook.remove()
    return sizes


@cache
def small_network() -> Problem:
    """Of two layers, whose records have the same bits in passes of all sizes."""
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)
    return problem(Spec(lambda: nn.Sequential(*layers), (6,)), torch.float32)


@cache
def usual_engine() -> Engine:
    """Of the small network; not to be changed."""
    return small_network().engine()


@pytest.mark.parametrize("expected_batch", [None, 1e6])
def test_all_passes_of_an_engine_have_one_size_whatever_the_number_of_records(
    expected_batch: float | None,
) -> None:
    made = small_network()
    engine = made.engine(expected_batch=expected_batch, limits=BRIEF)
    for count in (1, 2, 7, 63, 64, 65, 200):
        some = made.take([0] * count)
        for ask in (
            lambda some=some: engine.clipped_sum(*some.arguments, L2(1.0)),
            lambda some=some: engine.norms(*some.arguments, L2(1.0)),
            lambda some=some: engine.clipped_losses(*some.arguments, 1.0),
        ):
            assert sizes_of(engine, ask) == {engine.physical_batch}


def test_a_pass_over_few_records_has_the_smallest_size_that_was_compared() -> None:
    made = small_network()
    engine = made.engine(expected_batch=16.0)
    smallest, *others = *engine.smaller_sizes, engine.physical_batch
    assert [smallest, *others] in ([16, 24, 32], [12, 16, 24, 32])  # 12 has the same bits on some processors
    wanted = {
        1: {smallest},
        16: {16},
        17: {24},
        24: {24},
        25: {32},
        32: {32},
        33: {32, smallest},
        50: {32, 24},
    }
    for count, sizes in wanted.items():
        records = made.take([0] * count).arguments
        for clipping in (L2(1.0), Normalised(1.0, 0.1)):
            assert sizes_of(engine, partial(engine.clipped_sum, *records, clipping)) == sizes
            assert sizes_of(engine, partial(engine.norms, *records, clipping)) == sizes
        # What was not compared in other sizes: norms of other kinds, and losses.
        for clipping in (L1(1.0), PerLayer((1.0, 1.0)), Box(1.0)):
            assert sizes_of(engine, partial(engine.clipped_sum, *records, clipping)) == {32}
        assert sizes_of(engine, partial(engine.clipped_losses, *records, 1.0)) == {32}


@pytest.mark.parametrize(
    ("name", "expected_batch"),
    soak_but(
        [*((name, 16) for name in ("linear, sequence", "bilstm", "cnn", "transformer")), ("cnn", 64)],
        [(name, batch) for name in dict.fromkeys((*TYPICAL, *NETWORKS)) for batch in (16, 64)],
    ),
)
def test_a_record_is_the_same_bit_for_bit_in_passes_of_each_size(name: str, expected_batch: int) -> None:
    made = problem(SPECS[name], torch.float32, count=2 * expected_batch)
    engine = made.engine(expected_batch=float(expected_batch), limits=BRIEF)
    in_full_passes = copy(engine)
    in_full_passes.smaller_sizes = ()
    for count in (1, 5, *engine.smaller_sizes, min(len(made.labels), engine.physical_batch)):
        records = made.take(slice(0, count)).arguments
        norms, sums = (
            [each.norms(*records, L2(1.0)) for each in (engine, in_full_passes)],
            [each.clipped_sum(*records, L2(0.5)) for each in (engine, in_full_passes)],
        )
        assert torch.equal(*norms) and torch.equal(*sums), count


def turned(outputs: Tensor, place: slice) -> Tensor:
    """The outputs of a pass of 24 records with other last bits, in some rows."""
    turns = torch.ones(len(outputs), 1)
    turns[place if len(outputs) == 24 else slice(0)] += 2.0**-22
    return outputs * turns


def same_values(values: Tensor, gradients: Tensor) -> Tensor:
    """A tensor with the values of one and the gradients of another."""
    return values.detach() + (gradients - gradients.detach())


OTHER_BITS: dict[str, Callable[[Wired, Tensor], Tensor]] = {
    "of all records": lambda self, x: turned(self.layer(x), slice(None)),
    "of the last record": lambda self, x: turned(self.layer(x), slice(23, 24)),
    "of gradients alone": lambda self, x: same_values(self.layer(x), turned(self.layer(x), slice(None))),
}


@pytest.mark.parametrize("name", OTHER_BITS)
def test_a_size_in_which_records_have_other_bits_is_not_taken(name: str) -> None:
    """As if PyTorch chose another kernel for so many rows."""
    made = problem(Spec(lambda: Wired(OTHER_BITS[name], layer=nn.Linear(6, 2)), (6,)), torch.float32)
    engine = made.engine(expected_batch=16.0, limits=BRIEF)
    assert engine.physical_batch == 32
    assert engine.smaller_sizes in ((16,), (12, 16))  # 12 has the same bits on some processors


def test_usual_size_is_one_with_which_smaller_ones_agree() -> None:
    """As if PyTorch chose another kernel for 16 rows than for fewer, so that passes of 16 have no smaller size."""

    def wiring(self: Wired, x: Tensor) -> Tensor:
        turn = 2.0**-22 if len(x) >= 16 else 0.0
        return self.layer(x) * torch.full((len(x), 1), 1.0 + turn)

    made = problem(Spec(lambda: Wired(wiring, layer=nn.Linear(1000, 1000)), (1000,)), torch.float32)
    engine = made.engine(expected_batch=8.0, limits=BRIEF)
    assert engine.physical_batch == 12
    assert engine.smaller_sizes
    records = made.take([0] * engine.smaller_sizes[-1]).arguments
    assert sizes_of(engine, partial(engine.clipped_sum, *records, L2(1.0))) == {engine.smaller_sizes[-1]}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_size_in_which_records_have_other_bits_with_some_threads_is_not_taken(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may have fewer threads than the engine takes at most."""
    monkeypatch.setattr(engine_module, "SHORT_PASS_SECONDS", 0.0)  # passes so short have one thread
    other: set[int] = set()

    def wiring(self: Wired, x: Tensor) -> Tensor:
        is_other = len(x) in other and torch.get_num_threads() == threads
        outputs: Tensor = self.layer(x)
        return outputs * (1.0 + 2.0**-22) if is_other else outputs

    made = problem(Spec(lambda: Wired(wiring, layer=nn.Linear(6, 2)), (6,)), torch.float32)
    with cpu_threads(2):
        (*sizes, largest) = made.engine(expected_batch=64.0).smaller_sizes
        other.add(largest)
        assert made.engine(expected_batch=64.0).smaller_sizes == tuple(sizes)


class RarelyOther(nn.Module):
    """Raises a number of 65 to a power, which PyTorch rounds otherwise at the end of a tensor, for one in fifty."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.layers, self.power = nn.ModuleList([nn.Linear(6, 65), nn.Linear(65, 2)]), power

    def forward(self, inputs: Tensor) -> Tensor:
        """[batch, 6] -> [batch, 2]."""
        outputs: Tensor = self.layers[1]((2.0 + self.layers[0](inputs).tanh()) ** self.power)
        return outputs


@pytest.mark.parametrize(("power", "sizes"), [(1.0001, ()), (2, (12, 16, 24))])
def test_a_size_that_leaves_numbers_at_the_end_is_not_taken(
    power: float, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if made-up records agree in it."""
    monkeypatch.setattr(batch_invariance, "_is_same", lambda *_: True)
    engine = problem(Spec(lambda: RarelyOther(power), (6,)), torch.float32).engine(expected_batch=16.0)
    assert (engine.physical_batch, engine.smaller_sizes) == (32, sizes)


def test_a_size_that_leaves_numbers_at_the_end_of_a_threads_half_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 80 records with 514 numbers each, all fill pairs of vectors, and what each of two threads has does not."""
    monkeypatch.setattr(batch_invariance, "_is_same", lambda *_: True)
    monkeypatch.setattr(engine_module, "SHORT_PASS_SECONDS", 0.0)  # passes so short have one thread
    layers = nn.Linear(6, 516), nn.SiLU(), nn.Linear(516, 2)
    made = problem(Spec(lambda: nn.Sequential(*layers), (6,)), torch.float32)
    engine = made.engine(expected_batch=64.0)
    assert (engine.physical_batch, engine.smaller_sizes) == (128, (64, 80))
    layers = nn.Linear(6, 514), nn.SiLU(), nn.Linear(514, 2)
    made = problem(Spec(lambda: nn.Sequential(*layers), (6,)), torch.float32)
    engine = made.engine(expected_batch=64.0)
    assert (engine.physical_batch, engine.smaller_sizes) == (128, (64,))


def test_a_usual_size_leaves_no_numbers_at_the_end() -> None:
    made = problem(Spec(lambda: RarelyOther(1.5), (6,)), torch.float32)
    engine = made.engine(physical_batch=64)
    assert engine.physical_batch == 64
    engine = copy(engine)
    engine.physical_batch = 12
    point = made.model.initial_parameters()
    assert not engine.compare_passes(point, point.device).is_same


def test_passes_have_one_size_where_other_sizes_are_not_compared() -> None:
    made = small_network()
    in_16_bits = replace(made, model=replace(made.model, precision=BF16))
    assert made.engine(physical_batch=32, limits=BRIEF).smaller_sizes == ()  # as asked for
    assert made.engine(limits=BRIEF).smaller_sizes == ()
    for each in (made.engine(expected_batch=16.0, offload=True), in_16_bits.engine(expected_batch=16.0)):
        assert each.physical_batch > 1 and each.smaller_sizes == ()


@pytest.mark.parametrize("expected", [4, 16, 40, 64, 150])
def test_the_slots_of_passes_are_those_of_poisson_samples(expected: int) -> None:
    """By the law of the sample, one number of records after another."""
    for size in (8, 16, 32, 48, 128):
        for smaller in ((), (1,), (size // 4, size // 2)):
            mean, full, chance = 0.0, 0.0, math.exp(-expected)
            for count in range(400):
                left = max(count, 1) % size or size
                full += chance * (max(count, 1) - left) / size
                mean += chance * (
                    max(count, 1) - left + min(each for each in (*smaller, size) if each >= left)
                )
                chance *= expected / (count + 1)
            counts = PassCounts.of(size, float(expected))
            assert counts.slots(smaller) == pytest.approx(mean)
            assert counts.mean_full == pytest.approx(full, abs=1e-9)


@pytest.mark.parametrize("expected", [16, 32, 64, 128])
def test_samples_of_the_expected_size_have_few_more_slots_than_records(expected: int) -> None:
    """At most one and a half standard deviations, whatever the model costs."""
    made = small_network()
    engine = made.engine(expected_batch=float(expected))
    counts = PassCounts.of(engine.physical_batch, float(expected))
    assert counts.slots(engine.smaller_sizes) <= expected + 1.5 * math.sqrt(expected)


MEASURED = {
    "LeNet": (36, 843_968, 130_852, 1.46, 0.115),
    "VGG with GroupNorm": (94, 19_765_248, 1_234_340, 3.81, 1.320),
    "N-BEATS": (74, 56_448, 25_790, 1.14, 0.009),
    "gated temporal network": (129, 2_599_440, 420_435, 5.30, 0.410),
    "temporal network, weight norm": (74, 8_061_312, 798_100, 6.30, 0.722),
    "EdgeNeXt": (413, 754_264, 253_320, 8.89, 0.244),
}
"""Operators of a pass, operations and bytes of a record, and milliseconds that a pass and a record took one core."""


@pytest.mark.parametrize("expected", [8.0, 16.0, 32.0, 64.0])
@pytest.mark.parametrize("name", MEASURED)
def test_sums_take_little_longer_than_with_the_best_sizes(
    name: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By times that were measured, at most 5 %, where passes of fewer than 16 records agree, and those of more."""
    kernels, operations, bytes_each, fixed, each = MEASURED[name]
    engine = copy(usual_engine())

    def agreeing(sizes: tuple[int, ...], usual: int) -> tuple[int, ...]:
        return tuple(size for size in sizes if (size < 16) == (usual < 16))

    monkeypatch.setattr(
        Engine, "_sizes_that_agree", lambda self, sizes, _: agreeing(sizes, self.physical_batch)
    )
    monkeypatch.setattr(Engine, "_is_invariant", lambda *_: True)
    monkeypatch.setattr(Engine, "_fills", lambda *_: True)
    cpu = torch.device("cpu")
    cost = replace(engine.inspection.cost, each=bytes_each)
    engine.inspection = replace(engine.inspection, kernels=kernels, operations=operations, cost=cost)
    engine.physical_batch = engine._cheapest_size(192, expected, cpu)
    engine._find_smaller_sizes(192, expected, cpu)

    def milliseconds(size: int, smaller: tuple[int, ...]) -> float:
        counts = PassCounts.of(size, expected)
        return (counts.mean_full + 1.0) * fixed + counts.slots(smaller) * each

    others = {size: PassCounts.of(size, expected).smaller_sizes() for size in pass_sizes(192)}
    best = min(milliseconds(size, agreeing(smaller, size)) for size, smaller in others.items())
    assert milliseconds(engine.physical_batch, engine.smaller_sizes) <= 1.05 * best


def factors(form: Callable[[Tensor], Tensor]) -> Spec:
    """Products of eight numbers below 1, which are zero for a record of zeros."""
    return Spec(
        lambda: Wired(
            lambda self, x: self.last(form(torch.tanh(self.first(x)).view(len(x), 8, 8))),
            first=nn.Linear(6, 64, bias=False),
            last=nn.Linear(8, 3),
        ),
        (6,),
    )


def force(x: Tensor) -> Tensor:
    """A derivative of products, taken in the forward pass."""
    with torch.enable_grad():
        its = x if x.requires_grad else x.clone().requires_grad_()
        (derivative,) = torch.autograd.grad(its.prod(dim=2).sum(), its, create_graph=True)
    return derivative[:, 0]


def product(x: Tensor) -> Tensor:
    return x.prod(dim=2)


@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize(("form", "limits"), by_limits([product, force], in_full=[product]))
def test_a_record_with_a_factor_of_zero_changes_no_bit_of_the_others(
    form: Callable[[Tensor], Tensor],
    limits: InspectionLimits,
    request: pytest.FixtureRequest,
    *,
    is_replayed: bool,
) -> None:
    """PyTorch takes another way back through a product if any record has a factor of zero."""
    if is_replayed:
        request.getfixturevalue("replayed_passes")
    made = problem(factors(form), torch.float32, count=SMALL)
    engine = made.engine(physical_batch=SMALL, limits=limits)
    assert engine.is_batched
    assert engine.physical_batch == SMALL
    zeros = replace(made, inputs=made.inputs.index_fill(0, torch.tensor([20]), 0.0))
    for place in (0, 19, 63):
        expected = alone(engine, made, [*range(SMALL)], place)
        assert torch.equal(alone(engine, zeros, [*range(SMALL)], place), expected)
    exact = naive.loop(
        replace(made.model, module=copy_module(made.model.module).double()),
        *(part.double() for part in (made.parameters, zeros.inputs)),
        zeros.labels,
    )
    sums = engine.clipped_sum(*zeros.arguments, L2(0.1))
    assert naive.relative(sums, naive.contributions(made.model, exact, L2(0.1)).sum(dim=0)) < 1e-4
    assert bool(engine.replayed_sizes) == is_replayed


def test_a_record_whose_pass_cannot_be_recorded_changes_no_bit_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has a pass of its own, and the others passes of the size that was compared."""
    spec = Spec(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), (6,), losses=cross_entropy
    )
    made = problem(replace(spec, classes=2), torch.float32, count=13)
    engine, sizes = made.engine(physical_batch=8), set[int]()

    def only_usual(run: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: Passes, parameters: Tensor, inputs: Tensor, *rest: Any) -> Any:
            if len(inputs) > 1 or run is recorded:
                sizes.add(len(inputs))
                if bool((inputs > 100.0).any()):
                    raise UnrecordedError("another way")
            return run(self, parameters, inputs, *rest)

        return checked

    recorded = Passes.record_gradients
    monkeypatch.setattr(Passes, "record_gradients", only_usual(recorded))
    monkeypatch.setattr(Passes, "losses", only_usual(Passes.losses))
    inputs, others = made.inputs.clone(), [0, 1, 2, *range(4, 13)]
    inputs[3] = 101.0
    odd, usual = replace(made, inputs=inputs), made.take(others)
    for clipping in (L2(0.1), PerLayer((0.1, 0.1)), L1(0.1)):
        norms = [engine.norms(*some.arguments, clipping) for some in (odd, usual)]
        assert torch.equal(norms[0][others], norms[1])
        sums = [engine.clipped_sum(*some.arguments, clipping) for some in (odd, usual, odd.take([3]))]
        assert naive.relative(sums[0] - sums[1], sums[2]) < 1e-12
    losses = [engine.clipped_losses(*some.arguments, 1e9) for some in (odd, usual, odd.take([3]))]
    assert float(losses[0] - losses[1] - losses[2]) == pytest.approx(0.0, abs=1e-12 * float(losses[0]))
    assert sizes == {8}


def test_the_size_that_passes_have_is_one_that_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    compare = batch_invariance.compare_batches

    def noted(*arguments: Any, **settings: Any) -> batch_invariance.BatchComparison:
        compared.append(arguments[3])
        return compare(*arguments, **settings)

    monkeypatch.setattr("algorithms.gradients.engine.compare_batches", noted)
    made = problem(Spec(lambda: nn.Linear(6, 2), (6,)), torch.float32)
    for settings in ({"expected_batch": 5.0}, {"expected_batch": 900.0}, {"physical_batch": 7}, {}):
        compared.clear()
        assert made.engine(**settings, limits=BRIEF).physical_batch == compared[-1]


def test_passes_are_about_as_large_as_batches_are_expected_to_be() -> None:
    """A wide layer, of which a record takes long, and a narrow one, of which none does."""
    widths: dict[int, list[int]] = {}
    for width in (8, 1000):
        made = problem(
            Spec(lambda width=width: nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2)), (width,))
        )
        sizes = [
            made.engine(expected_batch=float(batch), limits=BRIEF).physical_batch
            for batch in (4, 16, 32, 128)
        ]
        assert sizes == sorted(sizes) and sizes[0] <= 16 and sizes[1] <= 32 and sizes[2] <= 64
        assert 64 <= sizes[3] <= 256
        widths[width] = sizes
    assert all(wide <= narrow for narrow, wide in zip(*widths.values(), strict=True))


def test_a_deep_narrow_network_is_not_cut_into_many_passes() -> None:
    """Calling its operators takes longer than what they compute."""

    def deep() -> nn.Module:
        blocks = [
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()) for _ in range(16)
        ]
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * 16 * 16, 2))

    made = problem(Spec(deep, (4, 16, 16)), torch.float32)
    sizes = [made.engine(expected_batch=float(batch), limits=BRIEF).physical_batch for batch in (8, 16)]
    assert sizes == [16, 24]


def test_a_size_that_memory_does_not_hold_is_not_taken() -> None:
    heavy = build("softmax", input_shape=(100_000,), classes=2, seed=0)
    engine = Engine(heavy, input_shape=(100_000,), memory_mb=2, expected_batch=500.0, limits=BRIEF)
    assert engine.physical_batch == 2


def spoiling_the_next(compute: Callable[..., PerExampleGradients]) -> Callable[..., PerExampleGradients]:
    """As products in bfloat16 do on some processors: beside a record that is not finite no other is."""

    def with_nan(
        engine: Engine, point: Tensor, inputs: Tensor, labels: Tensor, *rest: Any
    ) -> PerExampleGradients:
        is_bad = ~inputs.isfinite().all()
        return compute(engine, point, torch.full_like(inputs, torch.nan) if is_bad else inputs, labels, *rest)

    return with_nan


def test_in_bfloat16_records_beside_one_that_is_not_finite_are_computed_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = replace(build("mlp", input_shape=(8,), classes=2, seed=0), precision=BF16)
    engine, point = Engine(model, input_shape=(8,)), model.initial_parameters()
    inputs, labels = torch.randn(7, 8, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 2
    inputs[3] = torch.nan
    kept = [0, 1, 2, 4, 5, 6]
    expected = engine.clipped_sum(point, inputs[kept], labels[kept], L2(0.1))
    monkeypatch.setattr(Engine, "contributions", spoiling_the_next(Engine.contributions))
    found = engine.clipped_sum(point, inputs, labels, L2(0.1))
    assert float(expected.norm()) > 0.1
    assert naive.relative(found, expected) < 1e-2


def test_in_bfloat16_losses_beside_one_that_is_not_finite_are_computed_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all others, which such a record would otherwise take out of a sum, each by up to the bound."""
    model = replace(build("softmax", input_shape=(8,), classes=2, seed=0), precision=BF16)
    engine, start = Engine(model, input_shape=(8,)), model.initial_parameters()
    inputs, labels = torch.randn(7, 8, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 2
    inputs[3] = torch.nan
    points, kept = (start, torch.linspace(-1.0, 1.0, len(start))), [0, 1, 2, 4, 5, 6]

    def sums(*records: Tensor) -> list[float]:
        return [
            float(engine.clipped_losses(points[1], *records, 2.0)),
            float(engine.clipped_loss_gain(*points, *records, 0.5)),
        ]

    expected, computed = sums(inputs[kept], labels[kept]), type(engine.passes).losses

    def with_nan(passes: Any, point: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        is_bad = ~inputs.isfinite().all()
        return computed(passes, point, torch.full_like(inputs, torch.nan) if is_bad else inputs, labels)

    monkeypatch.setattr(type(engine.passes), "losses", with_nan)
    assert min(map(abs, expected)) > 0.01
    assert sums(inputs, labels) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(("asked", "taken"), [(31, 31), (32, 32), (63, 32), (64, 64), (130, 128)])
def test_a_pass_has_any_number_of_records_that_memory_allows(asked: int, taken: int) -> None:
    """Where they fill the vectors of all kernels, a multiple of what those hold."""
    in_16_bits = replace(build("mlp", input_shape=(8,), classes=2, seed=0), precision=torch.bfloat16)
    engine = Engine(in_16_bits, input_shape=(8,), physical_batch=asked, limits=BRIEF)
    assert engine.physical_batch == taken


def on_hinge(parameters: Tensor, count: int) -> Tensor:
    """Records of label 1 whose margin is 1, where the gradient of the hinge jumps; [count, inputs]."""
    weights, bias = parameters[:-1].double(), parameters[-1].double()
    points = 100.0 * torch.randn(count, len(weights), generator=torch.Generator().manual_seed(3)).double()
    return (points + weights * ((1.0 - bias - points @ weights) / (weights @ weights))[:, None]).float()


def test_a_record_too_long_for_a_closed_form_adds_nothing_and_moves_no_other() -> None:
    model = build("svm", input_shape=(60,), classes=2, seed=0)
    start, labels = (
        torch.randn(61, generator=torch.Generator().manual_seed(3)),
        torch.ones(5, dtype=torch.int64),
    )
    for one in on_hinge(start, 40):
        usual = one.expand(5, 60).clone()
        long = usual.clone()
        long[0] = 1e19
        sums = [LinearRecords(model, given, labels).clipped_sum(start, L2(1.0)) for given in (usual, long)]
        assert float((sums[0] - sums[1]).norm()) <= 1.0
        assert float(LinearRecords(model, long[:1], labels[:1]).clipped_sum(start, L2(1.0)).norm()) == 0.0


@pytest.mark.parametrize("physical_batch", [33, None])
def test_records_at_a_kink_do_not_turn_when_one_is_taken_away(physical_batch: int | None) -> None:
    """Records on the hinge of a support vector machine: a last bit of their margin is all of their gradient."""
    model = build("svm", input_shape=(60,), classes=2, seed=0)
    start = torch.randn(61, generator=torch.Generator().manual_seed(3))
    engine = Engine(model, input_shape=(60,), physical_batch=physical_batch, limits=BRIEF)
    for one in on_hinge(start, 40):
        inputs, labels = one.expand(100, 60), torch.ones(100, dtype=torch.int64)
        sums = [
            engine.clipped_sum(start, inputs[:count], labels[:count], L2(1.0)) for count in (97, 98, 99, 100)
        ]
        for fewer, more in pairwise(sums):
            assert float((more - fewer).norm()) <= 1.0


@pytest.mark.parametrize(("width", "threads", "count"), [(60, 1, 15), (300, 2, 69), (300, 2, 1001)])
def test_a_closed_form_does_not_turn_when_a_record_is_taken_away(
    width: int, threads: int, count: int
) -> None:
    """Products of so many more records have other kernels, and other last bits: of the last records, or of all."""
    model = build("svm", input_shape=(width,), classes=2, seed=0)
    start = torch.randn(width + 1, generator=torch.Generator().manual_seed(3))
    with cpu_threads(threads):
        for one in on_hinge(start, 12):
            inputs, labels = one.repeat(count + 1, 1), torch.ones(count + 1, dtype=torch.int64)
            fewer, more = (
                LinearRecords(model, inputs[:n], labels[:n]).clipped_sum(start, L2(1.0))
                for n in (count, count + 1)
            )
            assert float((more - fewer).norm()) <= 1.0


@pytest.mark.parametrize(("width", "threads", "count"), [(60, 1, 15), (300, 2, 1001)])
def test_losses_on_a_line_do_not_turn_when_a_record_is_taken_away(
    width: int, threads: int, count: int
) -> None:
    """Of records so long that the last bits of their margins decide whether a loss is 0 or the bound."""
    model = build("logistic", input_shape=(width,), classes=2, seed=0)
    draw = torch.Generator().manual_seed(5)
    line = LineCandidates(*torch.randn(2, width + 1, generator=draw), (0.0, 1.0, 2.0))
    with cpu_threads(threads):
        for _ in range(8):
            one = forms.cancelling(line.candidates[:1, :width], 1e12, draw)
            inputs, labels = one.repeat(count + 1, 1), torch.ones(count + 1, dtype=torch.int64)
            fewer, more = (
                LinearRecords(model, inputs[:n], labels[:n]).losses_on(line, bound=1.0)
                for n in (count, count + 1)
            )
            assert float((more - fewer).abs().max()) <= 1.0 + 1e-9


@cache
def between(
    activation: type[nn.Module], width: int, physical_batch: int, precision: torch.dtype = F32
) -> Engine:
    """A model with an activation of so many numbers of each record between two layers; not to be changed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, width), activation(), nn.Linear(width, 3))
    model = Model(
        "between", net, lambda outputs, _: outputs[:, 0], lambda outputs: outputs, precision=precision
    )
    return Engine(model, input_shape=(20,), physical_batch=physical_batch, limits=BRIEF)


def told_apart(engine: Engine, start: Tensor, count: int) -> bool:
    """Whether an activation has other values for a record in some places of a pass of `count` than in others."""
    records = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(count, dtype=torch.int64)
    passes = (engine.contributions(start, one.expand(count, 20).contiguous(), labels) for one in records)
    layers: Iterator[Any] = (each.gradients["2.weight"] for each in passes)
    activations = (layer.inputs for layer in layers)
    return not all(torch.equal(found, found[:1].expand_as(found)) for found in activations)


WIDE, START = 1027, torch.randn(21 * 1027 + 3 * 1028, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("activation", "count"),
    soak_but(
        [(nn.SiLU, 64), (nn.SiLU, 128), (nn.SiLU, 192), (nn.Sigmoid, 192), (nn.Softplus, 192)],
        [(kind, count) for kind in (nn.SiLU, nn.Sigmoid, nn.Softplus) for count in (64, 128, 192)],
    ),
)
def test_two_threads_cut_passes_where_it_changes_no_record(activation: type[nn.Module], count: int) -> None:
    engine = between(activation, WIDE, 192)
    with cpu_threads(engine.max_threads):
        assert not told_apart(engine, START, count)


def test_more_threads_cut_where_it_changes_a_record() -> None:
    engine = between(nn.SiLU, WIDE, 192)
    with cpu_threads(5):
        assert told_apart(engine, START, 192)


@pytest.mark.parametrize(
    ("physical_batch", "precision", "max_threads"),
    [(192, F32, 2), (32, F32, 1), (1, F32, 2), (192, BF16, 1), (1, BF16, 2)],
)
def test_as_many_threads_as_leave_no_numbers_over(
    physical_batch: int, precision: torch.dtype, max_threads: int
) -> None:
    assert between(nn.SiLU, 8, physical_batch, precision).max_threads == max_threads


def test_losses_at_candidates_do_not_turn_when_a_record_is_taken_away() -> None:
    """A loss that jumps where the sigmoids of a vector and of single numbers differ."""
    point, value = unlike_alone(torch.sigmoid, torch.float64)

    def losses(outputs: Tensor, _labels: Tensor) -> Tensor:
        return 1e18 * (torch.sigmoid(outputs[:, 0].double()) - value).clamp(min=0.0)

    steep = Model("steep", nn.Sequential(nn.Flatten(), nn.Linear(1, 1)), losses, lambda outputs: outputs)
    candidates = torch.stack([point, torch.zeros(())]).float()[None]
    sums = [
        LinearRecords(steep, torch.ones(count, 1), torch.zeros(count, dtype=torch.int64)).losses_at(
            candidates, bound=1.0
        )
        for count in range(1, 130)
    ]
    for fewer, more in pairwise(sums):
        assert float((more - fewer).abs().max()) <= 1.0


def test_logarithms_that_records_share_round_none_of_them() -> None:
    """Margins whose factors 1 + exp(v) are rounded down in pairs of one kind, and not in pairs of two kinds."""
    model = build("logistic_through_origin", input_shape=(1,), classes=2, seed=0)
    kinds = torch.linspace(-2.0, -0.2, 4000)[[1340, 380]]
    margins = kinds.repeat(2**16)
    margins[2**16] = 5.0  # whose loss is above the bound
    line = LineCandidates(torch.ones(1), torch.zeros(1), (0.0,))
    sums = [
        LinearRecords(model, some[:, None], torch.zeros(len(some), dtype=torch.int64)).losses_on(
            line, bound=1.0
        )
        for some in (margins, torch.cat([margins[: 2**16], margins[2**16 + 1 :]]))
    ]
    assert 1.0 - 1e-6 < float(sums[0] - sums[1]) <= 1.0 + 1e-9


def test_a_gradient_of_all_records_does_not_turn_when_one_is_taken_away() -> None:
    """The derivative of a kinked loss behind an activation, whose last bits differ in vectors and single numbers."""
    point, value = unlike_alone(functional.silu, torch.float32)

    def losses(outputs: Tensor, _labels: Tensor) -> Tensor:
        return 1e4 * torch.relu(functional.silu(outputs[:, 0]) - value)

    steep = Model("steep", nn.Sequential(nn.Flatten(), nn.Linear(1, 1)), losses, lambda outputs: outputs)
    at = torch.stack([point, torch.zeros(())])
    sums = [
        LinearRecords(steep, torch.ones(count, 1), torch.zeros(count, dtype=torch.int64)).clipped_sum(
            at, L2(1.0)
        )
        for count in range(1, 130)
    ]
    for fewer, more in pairwise(sums):
        assert float((more - fewer).norm()) <= 1.0

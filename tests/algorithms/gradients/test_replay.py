"""Passes that are replayed as a list of operations: the same bits as recorded ones, and which passes are not."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from algorithms.gradients import (
    L1,
    L2,
    Clipping,
    Engine,
    Packing,
    Part,
    PerExampleGradients,
    PerExampleModel,
    PerLayer,
    RowModule,
)
from algorithms.gradients import replay as replay_module
from algorithms.gradients.clipping import Affine, Normalised
from algorithms.gradients.passes import Passes
from algorithms.gradients.replay import NormReplay, Replay, Replays, flatten, norm_replay_of, replay_of
from algorithms.gradients.synthetic_inputs import InputSpec
from algorithms.gradients.tracer_mode import TracerMode
from tests.support.gradients.problems import BRIEF

SIZE, ROW, TEXT, IMAGE = 8, (6,), (5,), (3, 8, 8)
LOSSES = nn.CrossEntropyLoss(reduction="none")

pytestmark = pytest.mark.usefixtures("replayed_passes")


class Words(nn.Module):
    """A trained table and a frozen one, position embeddings, attention and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.frozen = nn.Embedding(11, 8).requires_grad_(False)
        self.positions = nn.Parameter(torch.randn(5, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.recurrent = nn.LSTM(8, 4, batch_first=True)
        self.head = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, words: Tensor) -> Tensor:
        values = self.encoder((self.table(words) + self.frozen(words)) * self.scale + self.positions)
        return self.head(self.recurrent(values)[0].mean(dim=1))


def dense() -> nn.Module:
    tied = nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), tied, nn.ReLU(inplace=True), tied, nn.Linear(6, 3))


def images() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 3))


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.LayerNorm(5), nn.Linear(5, 3)
    )


class Standardised(nn.Conv2d):
    """A convolution with standardised weights, of enough numbers to be pulled back by rows."""

    def forward(self, images: Tensor) -> Tensor:
        rows = nn.functional.batch_norm(self.weight.flatten(1)[None], None, None, training=True)
        return nn.functional.conv2d(images, rows.view_as(self.weight), self.bias)


def orthogonal() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))


class Masked(nn.Linear):
    """A layer some of whose weights are zero, as in an autoregressive network."""

    def forward(self, rows: Tensor) -> Tensor:
        mask = torch.ones_like(self.weight).tril()
        return nn.functional.linear(rows, self.weight * mask, self.bias)


class Turned(nn.Module):
    """A recurrence with complex numbers that follow from real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.shrink, self.turn = nn.Parameter(torch.rand(5)), nn.Parameter(torch.rand(5))
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, rows: Tensor) -> Tensor:
        factor = torch.exp(-self.shrink + 1j * torch.exp(self.turn))
        values = self.first(rows)
        state = factor * values + values.roll(1, dims=1)
        return self.last((factor * state).real)


MODELS = {
    "complex recurrence": (Turned, ROW),
    "orthogonal": (orthogonal, ROW),
    "masked": (lambda: nn.Sequential(Masked(6, 350), nn.Tanh(), nn.Linear(350, 3)), ROW),
    "dense, tied": (dense, ROW),
    "weight norm": (normalised, ROW),
    "standardised": (
        lambda: nn.Sequential(Standardised(3, 80, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80 * 36, 3)),
        IMAGE,
    ),
    "images": (images, IMAGE),
    "words": (Words, TEXT),
}


def records(shape: tuple[int, ...], count: int = SIZE, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    if shape == TEXT:
        return torch.randint(0, 11, (count, *shape), generator=draw), labels
    return torch.randn(count, *shape, generator=draw), labels


def engine_of(module: nn.Module, shape: tuple[int, ...] = ROW, **settings: Any) -> Engine:
    dtype = records(shape)[0].dtype
    model = PerExampleModel("model", module, LOSSES)
    return Engine(model, input_shape=shape, input_dtype=dtype, physical_batch=SIZE, limits=BRIEF, **settings)


def recorded(engine: Engine, *arguments: Tensor) -> PerExampleGradients:
    assert engine.inspection.layouts is not None
    return engine.passes.record_gradients(*arguments, engine.inspection.layouts)


def clippings(engine: Engine) -> list[Clipping]:
    """Those whose norms are part of a replay, and others, which have one of gradients alone."""
    model = engine.passes.model
    places = torch.arange(model.parameter_count) % 3
    affine = Affine(1.0, places * 0.1, 1.0 + places)
    return [L2(0.1), L2(10.0), Normalised(1.0, 0.1), L1(1.0), PerLayer((0.5,) * len(model.layers)), affine]


@pytest.mark.parametrize("name", MODELS)
def test_replayed_pass_has_the_bits_of_a_recorded_one(name: str) -> None:
    torch.manual_seed(1)
    make, shape = MODELS[name]
    engine = engine_of(make(), shape)
    start = engine.passes.model.initial_parameters()
    for seed in range(3):
        point, batch = start + 0.3 * torch.randn_like(start), records(shape, seed=seed)
        few = SIZE - seed  # of which the pass is filled up with copies of the last record
        filled = [
            torch.cat([part[:few], part[few - 1 : few].expand(seed, *part.shape[1:])]) for part in batch
        ]
        for clipping in clippings(engine):
            replayed = engine.contributions(point, *(part[:few] for part in batch), clipping)
            expected = recorded(engine, point, *filled).first(few)
            assert torch.equal(replayed.losses, expected.losses)
            assert replayed.gradients.keys() == expected.gradients.keys()
            assert torch.equal(replayed.norms(clipping), expected.norms(clipping))
            assert torch.equal(replayed.clipped_sum(clipping), expected.clipped_sum(clipping))
    assert engine.replayed_sizes == (SIZE,)


class Mixed(nn.Module):
    """Two columns of categories, each with a table, and three numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(4, 2), nn.Embedding(7, 2)])
        self.last = nn.Linear(7, 3)

    def forward(self, codes: Tensor, numbers: Tensor) -> Tensor:
        columns = [table(codes[:, i]) for i, table in enumerate(self.tables)]
        return self.last(torch.cat([*columns, numbers.tanh()], dim=1))


def test_rows_of_categories_and_numbers_are_replayed() -> None:
    packing = Packing((Part("codes", (2,), torch.int64), Part("numbers", (3,), torch.float32)))
    model = PerExampleModel("mixed", RowModule(Mixed(), packing), LOSSES, packing=packing)
    engine = Engine(model, input_shape=(5,), input_dtype=packing.dtype, physical_batch=SIZE, limits=BRIEF)
    point = model.initial_parameters()
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        numbers = torch.randn(2 * SIZE, 3, generator=draw)
        numbers[-1] = torch.tensor([float("nan"), -0.0, 1e-40])  # whose bits are kept
        rows = packing.join([torch.randint(0, 4, (2 * SIZE, 2), generator=draw), numbers])
        for batch in (rows[SIZE:], rows[:SIZE]):  # one of them is not where its memory begins
            replayed = engine.contributions(point, batch, torch.arange(SIZE) % 3, L2(1.0))
            expected = recorded(engine, point, batch, torch.arange(SIZE) % 3)
            assert torch.equal(replayed.losses.view(torch.int32), expected.losses.view(torch.int32))
            assert torch.equal(replayed.clipped_sum(L2(1.0)), expected.clipped_sum(L2(1.0)))
    assert engine.replayed_sizes == (SIZE,)


def test_missing_numbers_are_among_the_compared_rows_beside_categories() -> None:
    packing = Packing((Part("codes", (2,), torch.int64), Part("numbers", (3,), torch.float32)))
    form = InputSpec((5,), packing.dtype, torch.device("cpu"), packing=packing)
    rows = torch.cat([sample.inputs for sample in replay_module._samples(form, SIZE, 0)])
    codes, numbers = packing.split(rows)
    assert bool(numbers.isnan().any()) and not bool(numbers.isnan().all())
    assert bool((codes >= 0).all()) and int(codes.max()) < 1000


class ByRowsAtFirst(nn.Linear):
    """Standardises small weights by hand, which is a map by rows, and changes large ones otherwise."""

    def forward(self, rows: Tensor) -> Tensor:
        values = self.weight - self.weight.mean(dim=1, keepdim=True) + (self.weight - 20.0).relu()
        weight = values / (values.std(dim=1, keepdim=True) + 1.0) * self.bias[:, None]
        return nn.functional.linear(rows, weight, self.bias)


def test_pass_is_recorded_where_the_parameters_make_a_map_another_one() -> None:
    torch.manual_seed(2)
    engine = engine_of(nn.Sequential(ByRowsAtFirst(6, 350), nn.Tanh(), nn.Linear(350, 3)))
    model = engine.passes.model
    start, batch, bound = model.initial_parameters(), records(ROW), L2(1e4)
    for point in (start, 50.0 * torch.randn_like(start), start):
        free = point.clone().requires_grad_()
        loss = model.losses(model.outputs(model.by_name(free), batch[0]), batch[1]).sum()
        (expected,) = torch.autograd.grad(loss, free)
        total = engine.clipped_sum(point, *batch, bound)
        torch.testing.assert_close(total.float(), expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(total, recorded(engine, point, *batch).clipped_sum(bound))
    assert engine.replayed_sizes == (SIZE,)


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_part_of_a_replay(name: str) -> None:
    make, shape = MODELS[name]
    engine = engine_of(make(), shape)
    layouts = engine.inspection.layouts
    assert layouts is not None
    replay = replay_of(engine.passes, layouts, engine.inspection.form, SIZE, with_norms=True)
    assert replay is not None
    gradients = replay(engine.passes.model.initial_parameters(), *records(shape))
    assert gradients is not None and "_whole_norms" in gradients.measured


def test_first_passes_of_a_size_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short run pays for no trace; the sums are the same."""
    monkeypatch.setattr(replay_module, "RECORDED", 3)
    traces = Mock(side_effect=replay_of)
    monkeypatch.setattr("algorithms.gradients.engine.replay_of", traces)
    engine = engine_of(dense())
    point, batch = engine.passes.model.initial_parameters(), records(ROW)
    sums = [engine.clipped_sum(point, *batch, L2(1.0)) for _ in range(3)]
    assert engine.replayed_sizes == () and not traces.called
    sums += [engine.clipped_sum(point, *batch, L2(1.0)) for _ in range(3)]
    assert engine.replayed_sizes == (SIZE,) and traces.call_count == 1
    assert all(torch.equal(each, sums[0]) for each in sums)


def test_pass_without_a_replay_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Mock(return_value=None)
    monkeypatch.setattr("algorithms.gradients.engine.replay_of", traces)
    engine = engine_of(dense())
    point, batch = engine.passes.model.initial_parameters(), records(ROW)
    engine.clipped_sum(point, *batch, L2(1.0))
    calls = traces.call_count
    assert calls and engine.replayed_sizes == ()
    engine.clipped_sum(point, *batch, L2(1.0))
    assert traces.call_count == calls


def test_replay_runs_no_model_and_takes_fewer_records(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(dense())
    point, (inputs, labels) = engine.passes.model.initial_parameters(), records(ROW)
    engine.clipped_sum(point, inputs, labels, L2(1.0))
    single = [
        recorded(engine, point, inputs[i : i + 1].repeat(SIZE, 1), labels[i : i + 1].repeat(SIZE))
        for i in range(5)
    ]
    expected = torch.stack([each.first(1).clipped_sum(L2(1.0)) for each in single]).sum(dim=0)
    monkeypatch.delattr(Passes, "record_gradients")
    torch.testing.assert_close(engine.clipped_sum(point, inputs[:5], labels[:5], L2(1.0)), expected)


class ByParameter(nn.Linear):
    """Looks at the value of a trained parameter."""

    def __init__(self, *sizes: int, bias: bool = True) -> None:
        super().__init__(*sizes, bias=bias)
        self.weight.data.abs_()

    def forward(self, input: Tensor) -> Tensor:
        factor = 2.0 if bool(self.weight.sum() > 0.0) else 3.0
        return super().forward(input) * factor


class ByRecord(nn.Linear):
    """Looks at the values of the records."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (2.0 if float(input.abs().amax()) != 12.25 else 3.0)


class ByMask(nn.Linear):
    """Computes as many values as there are positive inputs."""

    def forward(self, input: Tensor) -> Tensor:
        changed = input.clone()
        changed[input > 0.0] = input[input > 0.0].sqrt()
        return super().forward(changed)


class Turning(nn.Linear):
    """Computes something else in each pass from the third on, by a number that no operation of PyTorch shows."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.numbers = itertools.count()

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (2.0 if next(self.numbers) < 2 else 3.0)


class Keeping(nn.Linear):
    """Adds up what it has seen in a tensor that outlives the pass."""

    def __init__(self, *sizes: int, as_buffer: bool = False) -> None:
        super().__init__(*sizes)
        if as_buffer:
            self.register_buffer("seen", torch.zeros(sizes[0]))
        else:
            self.seen = torch.zeros(sizes[0])

    def forward(self, input: Tensor) -> Tensor:
        self.seen.add_(input.detach().sum(dim=0).to(self.seen.dtype))
        return super().forward(input)


class OfConstants(nn.Linear):
    """Takes the same rows from any records, so that its gradients hold memory from before the pass."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.rows = torch.ones(SIZE, sizes[0])

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.rows.to(input.dtype))


def replay_uninspected(module: nn.Linear) -> Replay | None:
    """The replay of a layer's passes if the inspection, which refuses some, had taken it for a plain one."""
    inspected = engine_of(nn.Linear(6, 3))
    layouts, passes = inspected.inspection.layouts, inspected.passes
    assert layouts is not None
    passes = replace(passes, model=replace(passes.model, module=module))
    return replay_of(passes, layouts, inspected.inspection.form, SIZE)


@pytest.mark.parametrize("kind", [ByParameter, ByRecord, ByMask, Turning, Keeping, OfConstants])
def test_pass_that_follows_from_values_or_outlives_itself_is_not_replayed(kind: type[nn.Linear]) -> None:
    assert replay_uninspected(nn.Linear(6, 3)) is not None
    assert replay_uninspected(kind(6, 3)) is None


def test_branch_on_a_parameter_follows_the_parameter() -> None:
    engine = engine_of(nn.Sequential(ByParameter(6, 3, bias=False)))
    start, batch = engine.passes.model.initial_parameters().abs(), records(ROW)
    gradients = []
    for sign, factor in ((1.0, 2.0), (-1.0, 3.0)):
        weight = (sign * start).view(3, 6).requires_grad_()
        LOSSES(factor * batch[0] @ weight.T, batch[1]).sum().backward()
        assert weight.grad is not None
        gradients.append(weight.grad.flatten().double())
        torch.testing.assert_close(
            engine.clipped_sum(sign * start, *batch, L2(1e3)), gradients[-1], rtol=1e-5, atol=1e-6
        )
    assert not torch.allclose(*gradients)


class ByProduct(nn.Module):
    """Uses a product of parameters, of which PyTorch looks at the factors unless a pass is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.factors = nn.Parameter(1.0 + 0.1 * torch.randn(200))

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(input) * self.factors.prod()


def test_pass_with_a_product_of_parameters_has_the_bits_that_it_has_while_traced() -> None:
    torch.manual_seed(2)
    engine = engine_of(ByProduct())
    arguments = engine.passes.model.initial_parameters(), *records(ROW)
    plain = recorded(engine, *arguments)
    with TracerMode():  # type: ignore[no-untyped-call]
        traced = recorded(engine, *arguments)
    for name, gradient in plain.gradients.items():
        assert torch.equal(gradient.rows, traced.gradients[name].rows), name


def test_buffer_that_a_pass_writes_into_is_new_in_each_replay() -> None:
    module = Keeping(6, 3, as_buffer=True)
    replay = replay_uninspected(module)
    assert replay is not None
    point = torch.cat([part.detach().flatten() for part in module.parameters()])
    first, second = replay(point, *records(ROW)), replay(point, *records(ROW))
    assert first is not None and second is not None
    assert torch.equal(first.clipped_sum(L2(1.0)), second.clipped_sum(L2(1.0)))
    assert torch.equal(module.seen, torch.zeros(6))


def gray() -> nn.Module:
    """Takes images of one channel, which are laid out by their strides before a convolution."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))


@pytest.mark.parametrize(("make", "shape"), [(dense, ROW), (gray, (1, 8, 8))])
def test_arguments_of_another_form_are_recorded(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    engine = engine_of(make(), shape)
    point, (inputs, labels) = engine.passes.model.initial_parameters(), records(shape)
    engine.clipped_sum(point, inputs, labels, L2(0.1))
    assert engine.replayed_sizes
    points = torch.stack([torch.zeros_like(point), point])
    others: list[tuple[Any, ...]] = [
        (points[1], inputs, labels),  # which begins within another tensor
        (point.repeat_interleave(2)[::2], inputs, labels),
        (point, inputs.transpose(0, -1).contiguous().transpose(0, -1), labels),
        (point, inputs, labels.repeat_interleave(2)[::2]),
        (point.double(), inputs.double(), labels),
    ]
    if len(shape) > 1:
        others.append((point, inputs.transpose(2, 3).contiguous().transpose(2, 3), labels))
    for arguments in others:
        expected = recorded(engine, *arguments).clipped_sum(L2(0.1))
        assert torch.equal(engine.clipped_sum(*arguments, L2(0.1)), expected)


def test_replay_takes_no_pass_of_another_size() -> None:
    replay = replay_uninspected(nn.Linear(6, 3))
    assert replay is not None
    point, (inputs, labels) = torch.randn(21), records(ROW)
    assert replay(point, inputs, labels) is not None
    assert replay(point, inputs[:5], labels[:5]) is None
    assert replay(point, *records(ROW, count=SIZE + 1)) is None


def test_error_of_a_record_is_in_pytorchs_words() -> None:
    engine = engine_of(dense())
    inputs, labels = records(ROW)
    labels[3] = 7
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        engine.clipped_sum(engine.passes.model.initial_parameters(), inputs, labels, L2(1.0))


def test_record_that_is_not_finite_adds_nothing_to_a_replayed_sum() -> None:
    engine = engine_of(dense())
    point, (inputs, labels) = engine.passes.model.initial_parameters(), records(ROW)
    others = torch.arange(SIZE) != 3
    expected = engine.clipped_sum(point, inputs[others], labels[others], L2(1.0))
    inputs[3] = torch.nan
    assert torch.equal(engine.clipped_sum(point, inputs, labels, L2(1.0)), expected)


@pytest.mark.parametrize("recorded", [0, 11])
def test_threads_replay_side_by_side(recorded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first pass on, or from one amid the others', by a trace that one of them makes."""
    monkeypatch.setattr(replay_module, "RECORDED", recorded)
    engine = engine_of(Words(), TEXT)
    point, batch = engine.passes.model.initial_parameters(), records(TEXT)
    expected, sums = engine.clipped_sum(point, *batch, L2(1.0)), list[Tensor]()

    def work(copy: Engine) -> None:
        sums.extend(copy.clipped_sum(point, *batch, L2(1.0)) for _ in range(10))

    threads = [threading.Thread(target=work, args=(engine.copy_for_thread(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sums) == 30
    assert all(torch.equal(each, expected) for each in sums)
    assert engine.replayed_sizes == (SIZE,)


def test_threads_record_their_passes_while_one_is_traced() -> None:
    replays, sizes = Replays(), list[Replay | None]()

    def find() -> None:
        sizes.append(replays.of((SIZE, True), fail))

    def fail() -> None:
        raise AssertionError("two threads trace a pass")

    def find_slowly() -> None:
        other = threading.Thread(target=find)
        other.start()
        other.join()

    assert replays.of((SIZE, True), find_slowly) is None
    assert sizes == [None]


def test_replay_leaves_other_functions_of_torchscript_as_they_are() -> None:
    engine = engine_of(dense())
    before = torch._C._get_graph_executor_optimize()
    assert before
    engine.clipped_sum(engine.passes.model.initial_parameters(), *records(ROW), L2(1.0))
    assert torch._C._get_graph_executor_optimize() == before


def test_large_passes_and_random_models_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Mock(side_effect=replay_of)
    monkeypatch.setattr("algorithms.gradients.engine.replay_of", traces)
    dropout = nn.Sequential(nn.Linear(6, 400), nn.Dropout(0.5), nn.Linear(400, 3)).train()
    wide = nn.Sequential(nn.Linear(6, 4000), nn.Tanh(), nn.Linear(4000, 3))
    for engine in (engine_of(dropout), engine_of(wide, memory_mb=1)):
        engine.clipped_sum(engine.passes.model.initial_parameters(), *records(ROW), L2(1.0))
    assert not traces.called


def test_without_torchscript_there_is_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(dense())
    layouts = engine.inspection.layouts
    assert layouts is not None
    assert replay_of(engine.passes, layouts, engine.inspection.form, SIZE) is not None
    monkeypatch.delattr(torch._C, "_create_function_from_graph")
    assert replay_of(engine.passes, layouts, engine.inspection.form, SIZE) is None


PARTS = [*((name, SIZE - 1) for name in MODELS), *(("words", count) for count in (SIZE, SIZE // 2, 1))]


@pytest.mark.parametrize(("name", "count"), PARTS)
def test_norms_of_parts_are_replayed_with_the_bits_of_recorded_ones(name: str, count: int) -> None:
    torch.manual_seed(1)
    make, shape = MODELS[name]
    engine = engine_of(make(), shape)
    engine.part_size = SIZE // 2
    batch = engine.passes.model.initial_parameters(), *records(shape, count)

    def answers() -> list[Tensor]:
        return [engine.norms(*batch, L2(1.0)), engine.clipped_sum(*batch, L2(1.0))]

    replayed, replays = answers(), engine._norm_replays
    assert replays is not None and replays.sizes == engine.replayed_sizes == (SIZE,)
    engine._replays = engine._norm_replays = None
    assert all(torch.equal(*pair) for pair in zip(replayed, answers(), strict=True))


def test_part_of_another_form_has_no_replayed_norms() -> None:
    engine = engine_of(Words(), TEXT)
    layouts, rows = engine.inspection.layouts, slice(4, 8)
    assert layouts is not None
    replay = norm_replay_of(engine.passes, layouts, engine.inspection.form, SIZE, rows)
    assert replay is not None
    whole = recorded(engine, engine.passes.model.initial_parameters(), *records(TEXT))
    assert replay(whole, flatten(whole)) is not None
    fewer = replace(whole, gradients={name: whole.gradients[name] for name in list(whole.gradients)[1:]})
    wider = replace(whole, gradients=whole._change_each(lambda each: each.double()))
    renamed = replace(whole, gradients={f"{name} of another": each for name, each in whole.gradients.items()})
    flat = flatten(whole)
    strided = replace(
        whole, gradients=flat.fill([each.repeat_interleave(2, dim=0)[::2] for each in flat.tensors])
    )
    for other in (whole.first(4), whole.part(slice(0, 7)), fewer, wider, renamed, strided):
        assert replay(other, flatten(other)) is None


def test_norms_of_other_bits_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(Words(), TEXT)
    layouts = engine.inspection.layouts
    assert layouts is not None
    find = partial(norm_replay_of, engine.passes, layouts, engine.inspection.form, SIZE)
    calls, replayed = itertools.count(), NormReplay.__call__

    def third_is_wrong(replay: NormReplay, *arguments: Any) -> PerExampleGradients | None:
        found = replayed(replay, *arguments)
        if found is not None and next(calls) == 2:
            vars(found)["_whole_norms"][0] *= 1.0 + 2.0**-52
        return found

    assert find(slice(0, 4)) is not None
    monkeypatch.setattr(NormReplay, "__call__", third_is_wrong)
    assert find(slice(0, 4)) is None

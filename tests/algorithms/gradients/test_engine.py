"""What holds for every way in which the engine takes gradients: one pass, physical batches, empty ones, odd records."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from algorithms.gradients import (
    L2,
    Engine,
    Normalised,
    PerExampleGradients,
    PerLayer,
    clip_and_sum,
)
from algorithms.gradients.op_tracer import MemoryTracer
from algorithms.models import Model, build
from algorithms.models.objectives import cross_entropy
from tests.algorithms.models.forms import FORMS, form_of, moved, records
from tests.support.gradients import naive
from tests.support.gradients.networks import NETWORKS, ON_TOKENS, REPEATS, SPECS, TYPICAL
from tests.support.gradients.problems import (
    BRIEF,
    SMALL,
    Problem,
    Spec,
    Wired,
    cached_problem,
    frozen,
    problem,
)
from tests.support.soak import soak_but

OF_EACH_FORM = [name for name in TYPICAL if name not in REPEATS]
"""One network of convolutions beside their layers."""
SOME_CUT = ["linear, sequence", "conv2d", "attention to itself", "einsum", "embedding, padding", "cnn"]


@pytest.mark.parametrize("name", soak_but(SOME_CUT, TYPICAL + ON_TOKENS))
def test_any_physical_batch_gives_the_same_sum(name: str) -> None:
    made, whole = cached_problem(SPECS[name], torch.float64)
    assert whole.physical_batch >= 6
    parts = copy(whole)
    for kind, clipping in naive.clippings(made.model, made.gradients).items():
        expected = whole.clipped_sum(*made.arguments, clipping)
        for parts.physical_batch in (1, 2, 5, 6):
            into = torch.full_like(expected, torch.nan)
            found = parts.clipped_sum(*made.arguments, clipping, into)
            assert found is into and naive.relative(found, expected) < 1e-10, kind


@pytest.mark.parametrize("name", soak_but(OF_EACH_FORM + ON_TOKENS, TYPICAL + ON_TOKENS))
def test_an_empty_batch_is_zero(name: str) -> None:
    made, engine = cached_problem(SPECS[name], torch.float32)
    nobody = made.take(slice(0, 0))
    for clipping in naive.clippings(made.model, made.gradients).values():
        found = engine.clipped_sum(*nobody.arguments, clipping)
        assert found.shape == made.parameters.shape and found.dtype == torch.float64
        assert not found.any()
        assert len(engine.norms(*nobody.arguments, clipping)) == 0


class _NoReading(TorchDispatchMode):
    """Refuses what the host waits for on a device: reading values, and shapes that depend on them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in (
            "_local_scalar_dense",
            "nonzero",
            "equal",
            "masked_select",
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", soak_but(OF_EACH_FORM + ON_TOKENS, TYPICAL + ON_TOKENS))
def test_a_sum_of_finite_gradients_reads_no_value(name: str) -> None:
    """So that the passes of a device follow each other; and it is the same sum."""
    made, engine = cached_problem(SPECS[name], torch.float32)
    for kind, clipping in naive.clippings(made.model, made.gradients).items():
        with _NoReading():
            found, is_right = engine.clipped_sum_if_finite(*made.arguments, clipping)
        assert bool(is_right) and torch.equal(found, engine.clipped_sum(*made.arguments, clipping)), kind
    inputs = made.inputs.clone()
    if inputs.is_floating_point():
        inputs[2] = math.nan
        assert not engine.clipped_sum_if_finite(made.parameters, inputs, made.labels, L2(1.0))[1]


def test_a_layer_without_outputs_adds_nothing() -> None:
    parts = {"layer": nn.Linear(4, 3), "empty": nn.Linear(4, 0)}
    made = problem(
        Spec(lambda: Wired(lambda self, x: torch.cat([self.layer(x), self.empty(x)], 1), **parts), (4,))
    )
    engine = made.engine(physical_batch=SMALL, limits=BRIEF)
    for kind, clipping in naive.clippings(made.model, made.gradients).items():
        expected = naive.contributions(made.model, made.gradients, clipping).sum(dim=0)
        assert naive.relative(engine.clipped_sum(*made.arguments, clipping), expected) < 1e-10, kind


def test_the_physical_batch_follows_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    made = problem(NETWORKS["cnn"], torch.float32)
    many = {"expected_batch": 1e9}
    sizes = [made.engine(memory_mb=megabytes, limits=BRIEF, **many).physical_batch for megabytes in (1, 2, 4)]
    assert sizes == sorted(sizes) and sizes[0] >= 1
    assert 2 * sizes[0] <= sizes[1] <= 2 * sizes[0] + 64
    assert sizes[2] > sizes[0]
    heavy = build("softmax", input_shape=(100_000,), classes=2, seed=0)
    few = Engine(heavy, input_shape=(100_000,), memory_mb=2, limits=BRIEF)
    assert 1 < few.physical_batch < 32 and "processes 2 records a pass" in caplog.text
    assert "memory_mb=18" in caplog.text
    given = {asked: made.engine(physical_batch=asked, limits=BRIEF).physical_batch for asked in (7, 63, 200)}
    assert given == {7: 7, 63: 32, 200: 192}


def test_copies_of_weights_are_not_counted_for_each_record() -> None:
    layers = nn.MaxPool2d(2), nn.Conv2d(64, 64, 3), nn.Flatten()  # kernels are copied for max pooling
    engine = problem(Spec(lambda: nn.Sequential(*layers), (64, 6, 6)), torch.float32).engine(
        memory_mb=3, limits=BRIEF
    )
    assert engine.inspection.is_brief
    assert engine.physical_batch == 64 and engine.pass_bytes <= 3e6


class Tokens(nn.Module):
    """A linear layer on a short sequence, whose materialised gradients are larger than its sides, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(30, 34), nn.Linear(34, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(self.first(inputs)).mean(dim=1))
        return outputs


OF_TOKENS = Spec(Tokens, (3, 30))


@pytest.fixture
def parts_of_any_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are materialised in parts where they take more memory than what is saved, however little that is."""
    monkeypatch.setattr("algorithms.gradients.engine.MATERIALIZED_PER_SAVED", 1.0)
    for bound in ("MIN_PART_BYTES", "MIN_PARAMETER_BYTES"):
        monkeypatch.setattr(f"algorithms.gradients.engine.{bound}", 0.0)


@pytest.mark.parametrize("count", [1, 32, 33, 64, 90, 128])
def test_gradients_in_parts_have_the_sums_and_norms_of_a_loop(
    count: int, parts_of_any_memory: None, request: pytest.FixtureRequest
) -> None:
    if count % 2:
        request.getfixturevalue("replayed_passes")
    made = problem(OF_TOKENS, torch.float32, count=count)
    engine = made.engine(physical_batch=SMALL, limits=BRIEF)
    assert engine.part_size == 32
    sizes = [len(labels) for _, _, labels in engine.in_parts(*made.arguments)]
    assert sizes == [min(32, count - start) for start in range(0, count, 32)]
    for kind, clipping in naive.clippings(made.model, made.gradients).items():
        expected = naive.contributions(made.model, made.gradients, clipping).sum(dim=0)
        assert naive.relative(engine.clipped_sum(*made.arguments, clipping), expected) < 1e-5, kind
        norms = naive.norms(made.model, made.gradients, clipping)
        assert naive.relative(engine.norms(*made.arguments, clipping), norms) < 1e-5, kind


@pytest.mark.usefixtures("parts_of_any_memory", "replayed_passes")
def test_a_record_in_a_part_is_the_same_bit_for_bit_in_any_company() -> None:
    made = problem(OF_TOKENS, torch.float32, count=SMALL)
    engine = made.engine(physical_batch=SMALL, limits=BRIEF)
    recorded = copy(engine)
    recorded._replays = recorded._norm_replays = None
    assert engine.part_size == 32

    def answers(each: Engine, some: Problem) -> Tensor:
        """[records, parameters and norm]"""
        one = torch.ones(1, dtype=torch.float64)
        return torch.stack(
            [
                torch.cat([part.take(torch.tensor([place])).weighted_sum(one), part.norms(L2(1.0))[[place]]])
                for part, *_ in each.in_parts(*some.arguments, L2(1.0))
                for place in range(len(part.losses))
            ]
        )

    expected = answers(recorded, made)
    beside, others = replace(made, inputs=made.inputs.clone()), torch.arange(SMALL) % 3 == 0
    for first, extreme in enumerate((0.0, 1e30, math.inf, math.nan)):
        beside.inputs[3 * first :: 12] = extreme
    turned = list(range(SMALL))[::-1]
    for each in (engine, recorded):
        for count in (1, 31, 32, 33, 48):
            assert torch.equal(answers(each, made.take(slice(count))), expected[:count]), count
        assert torch.equal(answers(each, made.take(turned)), expected[turned])
        assert torch.equal(answers(each, beside)[~others], expected[~others])
    assert engine._norm_replays is not None and SMALL in engine._norm_replays.sizes


def test_parts_are_materialised_one_after_another(parts_of_any_memory: None) -> None:
    made = problem(OF_TOKENS, torch.float32, count=SMALL)
    engine = made.engine(physical_batch=SMALL, limits=BRIEF)
    whole = copy(engine)
    whole.part_size = None
    peaks = []
    for each in (engine, whole):
        each.clipped_sum(*made.arguments, L2(1.0))
        with MemoryTracer() as memory:
            each.clipped_sum(*made.arguments, L2(1.0))
        peaks.append(memory.peak)
    materialised = 4 * SMALL * 30 * 34
    assert peaks[1] - peaks[0] > materialised / 3


def test_models_have_parts_where_materialised_gradients_are_most_of_the_memory(
    parts_of_any_memory: None,
) -> None:
    of_tokens = problem(OF_TOKENS, torch.float32)
    without_sequence = problem(Spec(lambda: nn.Linear(50, 40), (50,)), torch.float32)
    assert of_tokens.engine(physical_batch=SMALL, limits=BRIEF).part_size == 32
    assert without_sequence.engine(physical_batch=SMALL, limits=BRIEF).part_size is None
    assert of_tokens.engine(physical_batch=SMALL, limits=BRIEF, offload=True).part_size is None


def test_little_memory_is_not_taken_in_parts() -> None:
    assert problem(OF_TOKENS, torch.float32).engine(physical_batch=SMALL, limits=BRIEF).part_size is None


@pytest.mark.parametrize("name", soak_but(OF_EACH_FORM, TYPICAL))
@pytest.mark.parametrize("bad", soak_but([math.inf], [math.inf, math.nan, -math.inf]))
def test_a_record_that_is_not_finite_adds_nothing_and_harms_no_other(name: str, bad: float) -> None:
    made, engine = cached_problem(SPECS[name], torch.float32)
    inputs = made.inputs.clone()
    inputs[2] = bad
    others = made.take([0, 1, 3, 4, 5])
    for kind, clipping in naive.clippings(made.model, made.gradients).items():
        found = engine.clipped_sum(made.parameters, inputs, made.labels, clipping)
        expected = engine.clipped_sum(*others.arguments, clipping)
        assert naive.relative(found, expected) < 1e-5, kind


@pytest.mark.parametrize("name", soak_but(OF_EACH_FORM, TYPICAL))
@pytest.mark.parametrize("huge", soak_but([1e18, 3e38], [1e18, 1e30, 1e38, 3e38]))
def test_a_record_of_any_size_stays_within_its_bound(name: str, huge: float) -> None:
    made, engine = cached_problem(SPECS[name], torch.float32)
    inputs, others = made.inputs.clone(), made.take([0, 1, 3, 4, 5])
    inputs[2] = huge * made.inputs[2].sign()
    for clipping in (L2(0.5), Normalised(0.5), PerLayer((0.5,) * len(made.model.layers))):
        found = engine.clipped_sum(made.parameters, inputs, made.labels, clipping)
        moved = found - engine.clipped_sum(*others.arguments, clipping)
        assert torch.isfinite(found).all()
        assert all(size <= bound + 1e-5 for size, bound in naive.measured(made.model, moved, clipping))


@pytest.mark.parametrize("name", soak_but(OF_EACH_FORM, TYPICAL))
def test_a_batch_in_which_no_record_is_finite_is_zero(name: str) -> None:
    made, engine = cached_problem(SPECS[name], torch.float32)
    for clipping in naive.clippings(made.model, made.gradients).values():
        found = engine.clipped_sum(
            made.parameters, torch.full_like(made.inputs, math.nan), made.labels, clipping
        )
        assert found.shape == made.parameters.shape and not found.any()


@pytest.mark.parametrize("name", ON_TOKENS)
def test_a_record_whose_loss_is_not_finite_adds_nothing(name: str) -> None:
    """Words cannot be odd, but losses can."""
    made, _ = cached_problem(SPECS[name], torch.float32)

    def losses(outputs: Tensor, labels: Tensor) -> Tensor:
        return made.model.losses(outputs, labels % 3) * torch.where(labels == 5, math.nan, 1.0)

    model = Model("odd", made.model.module, losses, made.model.scores)
    labels = made.labels.clone()
    labels[4] = 5
    engine = Engine(model, input_shape=made.inputs.shape[1:], input_dtype=torch.int64, limits=BRIEF)
    found = engine.clipped_sum(made.parameters, made.inputs, labels, L2(0.1))
    expected = engine.clipped_sum(*made.take([0, 1, 2, 3, 5]).arguments, L2(0.1))
    assert naive.relative(found, expected) < 1e-5


def test_rows_are_clipped_by_norms_that_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    norms_of = PerExampleGradients.norms

    def norms(gradients: PerExampleGradients, clipping: L2) -> Tensor:
        taken.append(len(gradients.losses))
        return norms_of(gradients, clipping)

    monkeypatch.setattr(PerExampleGradients, "norms", norms)
    clip_and_sum(torch.ones(3, 2), L2(1.0))
    assert taken == [3]


def test_a_row_that_is_not_finite_adds_nothing() -> None:
    rows = torch.tensor([[3.0, 4.0], [math.nan, 0.0], [math.inf, 1.0], [0.3, 0.4]])
    torch.testing.assert_close(
        clip_and_sum(rows, L2(1.0)), torch.tensor([0.9, 1.2]).double(), rtol=1e-5, atol=0
    )


def test_losses_are_clipped_on_both_sides() -> None:
    model, form = form_of("softmax"), FORMS["softmax"]
    made = Problem(model, moved(model), *records(form))
    losses = model.losses(model.outputs(model.by_name(made.parameters), made.inputs), made.labels)
    bound = float(losses.median())
    found = made.engine(physical_batch=4).clipped_losses(*made.arguments, bound)
    torch.testing.assert_close(found, losses.double().clamp(0, bound).sum())
    lowered = Model("low", model.module, lambda o, y: cross_entropy(o, y) - 1e6, model.scores)
    assert Engine(lowered, input_shape=form.shape).clipped_losses(*made.arguments, bound) == 0.0


@pytest.mark.parametrize(("odd", "counted"), [(math.nan, 0.0), (math.inf, 2.0), (-math.inf, 0.0)])
def test_a_loss_that_is_not_finite_is_clipped_too(odd: float, counted: float) -> None:
    module = nn.Linear(3, 1)
    model = Model("odd", module, lambda o, y: o[:, 0] * 0 + torch.where(y == 1, odd, 1.0), lambda o: o)
    finite = Model("finite", module, lambda o, y: o[:, 0] * 0 + 1.0, lambda o: o)
    assert Engine(finite, input_shape=(3,), limits=BRIEF).clipped_losses(*_three(finite), 2.0) == 3.0
    engine = Engine(model, input_shape=(3,), physical_batch=2, limits=BRIEF)
    assert engine.clipped_losses(*_three(model), 2.0) == 2.0 + counted


def test_per_layer_bounds_that_do_not_fit_are_refused() -> None:
    made, engine = cached_problem(NETWORKS["cnn"], torch.float32)
    with pytest.raises(ValueError, match="2 bounds, the model has 4 layers"):
        engine.clipped_sum(*made.arguments, PerLayer((1.0, 1.0)))


def test_neither_the_records_nor_the_parameters_are_changed() -> None:
    for name in (*OF_EACH_FORM, *ON_TOKENS):
        made, engine = cached_problem(SPECS[name], torch.float32)
        parameters, inputs = made.parameters.clone(), made.inputs.clone()
        before = [value.clone() for value in made.model.module.state_dict().values()]
        engine.clipped_sum(*made.arguments, L2(1.0))
        assert torch.equal(made.parameters, parameters) and torch.equal(made.inputs, inputs)
        after = made.model.module.state_dict().values()
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def _three(model: Model) -> tuple[Tensor, Tensor, Tensor]:
    return model.initial_parameters(), torch.ones(3, 3), torch.tensor([0, 1, 0])


SOME = [
    "linear",
    "linear, long sequence",
    "linear, wide sequence",
    "conv2d, many places",
    "conv2d, many channels",
    "embedding",
    "lstm, 3 layers, 2 directions, biases, batch first",
    "decoder tied to the embedding",
    "linear sequence, used again",
    "einsum",
    "cnn",
    "bilstm",
    "transformer",
    "merged low-rank adaptation",
]


@contextmanager
def count_runs(module: nn.Module) -> Iterator[list[int]]:
    """How many records a module has run on in each of its runs since."""
    calls: list[int] = []
    hook = module.register_forward_pre_hook(lambda _module, inputs: calls.append(len(inputs[0])))
    yield calls
    hook.remove()


@pytest.mark.parametrize("name", SOME)
def test_losses_norms_and_sums_come_from_one_pass(name: str) -> None:
    made, engine = cached_problem(SPECS[name], torch.float64)
    kinds = naive.clippings(made.model, made.gradients)
    with count_runs(engine.passes.model.module) as calls:
        found = engine.contributions(*made.arguments)
        losses = found.losses
        sums = {kind: (found.norms(each), found.clipped_sum(each)) for kind, each in kinds.items()}
    assert len(calls) == 1
    outputs = made.model.outputs(made.model.by_name(made.parameters), made.inputs)
    torch.testing.assert_close(losses, made.model.losses(outputs, made.labels))
    for kind, clipping in kinds.items():
        norms, total = sums[kind]
        assert naive.relative(norms, naive.norms(made.model, made.gradients, clipping)) < 1e-10
        expected = naive.contributions(made.model, made.gradients, clipping).sum(dim=0)
        assert naive.relative(total, expected) < 1e-10
    assert not losses.requires_grad and not total.requires_grad


@pytest.mark.parametrize("kind", ["L2", "L1", "PerLayer", "Affine"])
def test_no_record_s_copy_of_a_large_table_is_written_down(kind: str) -> None:
    made = problem(Spec(lambda: nn.Embedding(900, 3), (4,), entries=900))
    found = made.engine(limits=BRIEF).contributions(*made.arguments)
    found.norms(naive.clippings(made.model, made.gradients)[kind])
    table, records = made.gradients[0].nbytes, len(found.losses) + found.padding
    assert 0 < found.materialized_bytes < 0.1 * records * table


@pytest.mark.parametrize("name", SOME)
def test_norms_of_all_records_are_streamed(name: str) -> None:
    made, engine = problem(SPECS[name], count=19), copy(cached_problem(SPECS[name], torch.float64)[1])
    engine.physical_batch = 8
    kinds = naive.clippings(made.model, made.gradients)
    for clipping in (kinds["L2"], kinds["PerLayer"]):
        with count_runs(engine.passes.model.module) as calls:
            found = engine.norms(*made.arguments, clipping)
            assert len(calls) == 3
            engine.clipped_sum(*made.arguments, clipping)
            assert len(calls) == 6
        assert naive.relative(found, naive.norms(made.model, made.gradients, clipping)) < 1e-10


@pytest.mark.parametrize("name", SOME)
def test_a_choice_of_records_by_their_norms(name: str) -> None:
    """Importance sampling: all norms first, then the sum of the accepted, each of one length (Wei et al. 2022)."""
    made, engine = cached_problem(SPECS[name], torch.float64)
    found = engine.contributions(*made.arguments)
    norms = found.norms(Normalised(0.5))
    for chosen in (
        (norms > norms.median()).nonzero()[:, 0],
        torch.tensor([4, 1]),
        torch.tensor([], dtype=torch.int64),
    ):
        total = found.take(chosen).clipped_sum(Normalised(0.5))
        accepted = made.gradients[chosen]
        expected = (0.5 * accepted / accepted.norm(dim=1, keepdim=True)).sum(dim=0)
        assert total.shape == expected.shape
        assert naive.relative(total, expected) < 1e-10
        assert torch.equal(found.take(chosen).losses, found.losses[chosen])


def test_a_gradient_of_nothing_stays_nothing() -> None:
    """Neither clipping to a given norm nor a division by zero makes something of it."""
    none = PerExampleGradients.of_rows(torch.zeros(3, 5))
    for clipping in (Normalised(1.0), Normalised(1.0, stability=0.1), L2(1.0)):
        assert not none.clipped_sum(clipping).any()


def test_a_parameter_that_has_no_effect_has_no_gradient() -> None:
    """A part that a model has and does not use: its place is zero, and shifted like any other."""
    unused = {"before": nn.Linear(2, 2), "after": nn.Linear(3, 1)}
    made = problem(Spec(lambda: Wired(lambda self, x: self.used(x), used=nn.Linear(4, 3), **unused), (4,)))
    engine = made.engine(limits=BRIEF)
    for kind, clipping in naive.clippings(made.model, made.gradients).items():
        expected = naive.contributions(made.model, made.gradients, clipping).sum(dim=0)
        assert naive.relative(engine.clipped_sum(*made.arguments, clipping), expected) < 1e-10, kind
        norms = naive.norms(made.model, made.gradients, clipping)
        assert naive.relative(engine.norms(*made.arguments, clipping), norms) < 1e-10, kind


def test_the_huber_hinge_is_the_hinge_with_its_kink_rounded_off() -> None:
    """Chaudhuri et al. 2011, section 3.4.2, by the integral of its slope -P(u > z), u uniform in [1/2, 3/2]."""
    model, margins = build("huber_svm", input_shape=(1,), classes=2, seed=0), torch.linspace(-2.0, 3.0, 501)
    outputs = torch.cat([margins, -margins]).double()[:, None].requires_grad_()
    losses = model.losses(outputs, torch.arange(2).repeat_interleave(501).flip(0))
    (slopes,) = torch.autograd.grad(losses.sum(), outputs, create_graph=True)
    (curvatures,) = torch.autograd.grad((slopes * outputs.detach().sign()).sum(), outputs)
    expected = (1.5 - margins.double()).clamp(0.0, 1.0)
    torch.testing.assert_close(slopes[:501, 0], -expected, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(slopes[501:, 0], expected, rtol=0.0, atol=1e-6)
    areas = torch.cumulative_trapezoid(expected.flip(0), dx=0.01).flip(0)
    torch.testing.assert_close(losses[:500], areas, rtol=0.0, atol=1e-5)
    assert model.bounds is not None
    assert float(curvatures.abs().max()) == model.bounds.curvature == 1.0
    assert float(slopes.detach().abs().max()) == model.bounds.slope == 1.0
    assert float(losses.detach().min()) == model.bounds.least == 0.0


def test_the_flat_vector_is_the_parameters_in_their_order() -> None:
    model = form_of("tanh_cnn")
    flat = model.initial_parameters()
    named = model.by_name(flat)
    assert list(named) == [name for name, _ in model.module.named_parameters()]
    assert all(torch.equal(named[name], parameter) for name, parameter in model.module.named_parameters())
    starts, ends = zip(*((place.start, place.stop) for place in model.slices.values()), strict=True)
    assert starts == (0, *ends[:-1]) and ends[-1] == len(flat)


def test_only_trained_parameters_are_in_the_flat_vector() -> None:
    module = nn.Sequential(frozen(nn.Linear(4, 5)), nn.Linear(5, 3))
    model = Model("frozen", module, cross_entropy, lambda outputs: outputs)
    assert list(model.shapes) == ["1.weight", "1.bias"]
    assert model.parameter_count == 5 * 3 + 3
    assert model.layers == (("1.weight", "1.bias"),)


def test_a_shared_parameter_is_in_the_flat_vector_once() -> None:
    table, decoder = nn.Embedding(6, 4), nn.Linear(4, 6)
    decoder.weight = table.weight
    module = Wired(lambda self, words: self.decoder(self.table(words)), table=table, decoder=decoder)
    model = Model("tied", module, cross_entropy, lambda outputs: outputs)
    assert model.parameter_count == 6 * 4 + 6
    moved = model.initial_parameters() + 1.0
    words = torch.tensor([[0, 5]])
    expected = (table.weight[words] + 1.0) @ (table.weight + 1.0).T + decoder.bias + 1.0
    torch.testing.assert_close(model.outputs(model.by_name(moved), words), expected)


def test_the_precision_is_the_one_that_is_asked_for() -> None:
    for word, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        assert build("softmax", input_shape=(4,), classes=3, seed=0, precision=word).precision == dtype


def test_a_sum_over_several_passes_holds_one_of_them_at_a_time() -> None:
    made = problem(SPECS["cnn"], torch.float32, count=192)
    engine, peaks = made.engine(physical_batch=64, limits=BRIEF), []
    for count in (64, 192):
        with MemoryTracer() as memory:
            engine.clipped_sum(*made.take(slice(count)).arguments, L2(1.0))
        peaks.append(memory.peak)
    assert peaks[1] <= 1.1 * peaks[0]


def test_processes_take_as_many_passes_again_as_the_one_with_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where those that are not finite come again; others would wait for one that took fewer."""
    model = Model(
        "small", nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none"), scores=lambda outputs: outputs
    )
    engine = Engine(replace(model, precision=torch.bfloat16), input_shape=(3,), physical_batch=8)
    own = engine.contributions
    sizes: list[int] = []

    def contributions(point: Tensor, inputs: Tensor, labels: Tensor, *rest: Any) -> Any:
        sizes.append(len(labels))
        return own(point, inputs, labels, *rest)

    monkeypatch.setattr(engine, "contributions", contributions)
    inputs, labels = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    inputs[2] = math.nan
    point = model.initial_parameters()
    expected = engine.clipped_sum(point, inputs, labels, L2(1.0))
    assert sizes == [4, 1]
    sizes.clear()
    monkeypatch.setattr(engine, "shards", SimpleNamespace(max_count=lambda count: count + 2))
    assert torch.equal(engine.clipped_sum(point, inputs, labels, L2(1.0)), expected)
    assert sizes == [4, 1, *[0, 1] * 2]  # an empty pass is one over a made-up record

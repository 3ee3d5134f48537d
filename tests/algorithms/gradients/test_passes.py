"""Models that go another way than layer after layer: in place, with dropout, from a start at zero, or by values."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.gradients import L2, RecordsNotIndependentError
from algorithms.gradients.grad_sample_recorder import OverwrittenOutputError
from algorithms.gradients.model_inspection import InspectionLimits
from tests.support.gradients import naive
from tests.support.gradients.problems import (
    BRIEF,
    SMALL,
    Problem,
    Spec,
    Wired,
    by_limits,
    check,
    problem,
    rows,
    zero_start,
)


def _overwritten(self: Wired, inputs: Tensor) -> Tensor:
    """What was added to is changed before the backward pass, which nothing has a need of."""
    hidden = torch.tanh(inputs)
    out = hidden + self.first
    hidden += 1.0
    return self.last(out) + hidden[:, :2]


def _overwritten_where_frozen(self: Wired, inputs: Tensor) -> Tensor:
    """The same of what a layer read of which the bias alone is trained."""
    hidden = torch.tanh(inputs)
    out = functional.linear(hidden, self.layer.weight.detach(), self.layer.bias)
    hidden += 1.0
    return self.last(out) + hidden[:, :2]


def _overwritten_output(self: Wired, inputs: Tensor) -> Tensor:
    """In place from the first layer on."""
    hidden = self.layer(inputs)
    hidden.mul_(0.5).add_(1.0)
    hidden[:, 0] = 0.0
    functional.relu_(hidden)
    return self.last(hidden)


def _overwriting_sequences(condition: Callable[[nn.Module], bool]) -> Problem:
    """A model that overwrites the output of its second layer of sequences, which is a view, under a condition."""

    def wiring(self: Wired, inputs: Tensor) -> Tensor:
        hidden = self.layer(self.first(inputs))
        if condition(self):
            hidden[inputs > 0.5] = 0.0
        return self.last(hidden).sum(dim=1)

    layers = {"first": nn.Linear(4, 4), "layer": nn.Linear(4, 4), "last": nn.Linear(4, 2)}
    return problem(Spec(lambda: Wired(wiring, **layers), (3, 4)))


def test_an_output_of_sequences_may_be_overwritten() -> None:
    """It is a view, and what overwrites a view takes its place in the graph."""
    made = _overwriting_sequences(lambda _: True)
    engine = made.engine(limits=BRIEF)
    assert engine.is_batched and not engine.passes.keeps_views
    check(made, engine)


@pytest.mark.parametrize("limits", [BRIEF, InspectionLimits()], ids=["brief", "full"])
def test_a_gradient_is_not_lost_where_an_output_is_overwritten_after_the_inspection(
    limits: InspectionLimits,
) -> None:
    """Gradients of views that were kept would not arrive, and a sum without these would look like any other."""
    overwrites = False
    made = _overwriting_sequences(lambda _: overwrites)
    engine = made.engine(limits=limits)
    assert engine.is_batched and engine.passes.keeps_views
    check(made, engine)
    overwrites = True
    assert engine.inspection.layouts is not None
    with pytest.raises(OverwrittenOutputError, match="overwritten in place"):
        engine.passes.record_gradients(*made.arguments, engine.inspection.layouts)
    gradients = replace(made).gradients  # by a loop over the model as it is now
    expected = naive.contributions(made.model, gradients, L2(1.0)).sum(dim=0)
    assert naive.relative(engine.clipped_sum(*made.arguments, L2(1.0)), expected) < 1e-10


def test_a_parameter_may_take_the_type_of_a_batch() -> None:
    def wiring(self: Wired, inputs: Tensor) -> Tensor:
        return self.last(inputs * (2.0 * self.first).to(inputs) * self.first.type_as(inputs)).sum(dim=1)

    layers = {"last": nn.Linear(4, 2), "first": nn.Parameter(torch.randn(4))}
    made = problem(Spec(lambda: Wired(wiring, **layers), (3, 4)))
    engine = made.engine(limits=BRIEF)
    assert engine.is_batched and not engine.operations_without_rule
    check(made, engine)


@pytest.mark.parametrize("wiring", [_overwritten, _overwritten_where_frozen, _overwritten_output])
def test_what_is_overwritten_in_place_is_seen(
    wiring: Callable[..., Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    layers = {"layer": nn.Linear(4, 4), "last": nn.Linear(4, 2)}
    spec = Spec(lambda: Wired(wiring, first=nn.Parameter(torch.randn(4)), **layers), (4,))
    with caplog.at_level(logging.WARNING, logger="algorithms"):
        made = problem(spec)
        check(made, made.engine(physical_batch=SMALL, limits=BRIEF))
    is_seen = ["in place" in record.getMessage() for record in caplog.records]
    assert is_seen == ([True] if wiring is _overwritten_where_frozen else [])


def _without_bias_of_keys(self: Wired, inputs: Tensor) -> Tensor:
    """Part of a copy of a parameter is overwritten, through a view, and by another parameter."""
    bias = self.first.clone()
    seen = bias.view(2, 2)
    bias[:1].zero_()
    bias[2:] = self.pair
    bias.mul_(2.0)
    return self.last(inputs + bias) + seen[0]


def _built_of_entries(self: Wired, inputs: Tensor) -> Tensor:
    """A matrix is filled with parameters, as that of a rotation is."""
    matrix = torch.eye(4, dtype=inputs.dtype)
    matrix[0] = self.first
    matrix[1:3, 1] = self.pair.sin()
    more = torch.zeros_like(matrix)
    more += torch.outer(self.first, self.first)
    return self.last(inputs @ (matrix + more))


def _put_into_records(self: Wired, inputs: Tensor) -> Tensor:
    """Parameters are put into what is computed from the records, and into a tensor for them."""
    parts = inputs.new_zeros(len(inputs), 3, 2)
    parts[:, 0] = self.pair
    parts[:, 1:] = self.layer(inputs).view(-1, 2, 2)
    hidden = self.layer(parts.flatten(start_dim=1)[:, :4])
    hidden[:, 1:3] = self.pair
    return self.last(hidden)


def _added_to_parts(self: Wired, inputs: Tensor) -> Tensor:
    """Parts of what is computed from the records are changed in place."""
    hidden = self.layer(inputs)
    hidden[:, 1:3] += self.pair
    hidden[:, :2].mul_(self.pair)
    return self.last(hidden)


def _overwritten_after_use(self: Wired, inputs: Tensor) -> Tensor:
    bias = self.first.clone()
    hidden = inputs + bias
    bias[2:] = self.pair
    return self.last(hidden * bias)


WRITING = [
    _without_bias_of_keys,
    _built_of_entries,
    _put_into_records,
    _added_to_parts,
    _overwritten_after_use,
]


@pytest.mark.parametrize(("wiring", "limits"), by_limits(WRITING, in_full=[_put_into_records]))
def test_parameters_may_be_written_into_other_tensors(
    wiring: Callable[..., Tensor], limits: InspectionLimits
) -> None:
    def make() -> nn.Module:
        parts = {"first": nn.Parameter(torch.randn(4)), "pair": nn.Parameter(torch.randn(2))}
        return Wired(wiring, layer=nn.Linear(4, 4), last=nn.Linear(4, 2), **parts)

    made = problem(Spec(make, (4,)))
    engine = made.engine(limits=limits)
    assert engine.is_batched == (wiring is not _overwritten_after_use)
    check(made, engine)


def _another_way(self: Wired, inputs: Tensor) -> Tensor:
    """The same numbers by another way, for odd inputs that no examination has met."""
    if bool((inputs > 100.0).any()):
        return self.layer(inputs.transpose(0, 1)).transpose(0, 1).sum(dim=1)
    return self.layer(inputs).sum(dim=1)


def _another_layer(self: Wired, inputs: Tensor) -> Tensor:
    """For each record its own layer, by the sign of a number of its own."""
    rows = [(self.layer if bool(one[0, 0] > 0) else self.other)(one).sum(dim=0) for one in inputs]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("wiring", "count"),
    [(_another_way, 1), (_another_way, 2), (_another_way, 3), (_another_way, 4), (_another_layer, 3)],
)
def test_a_model_that_takes_another_way_is_right(wiring: Callable[..., Tensor], count: int) -> None:
    """Three places in each record: with three records the shapes are the same, whichever way is taken."""
    made = problem(
        Spec(lambda: Wired(wiring, layer=nn.Linear(4, 2), other=nn.Linear(4, 2)), (3, 4)), count=count
    )
    inputs = made.inputs.clone()
    inputs[0, 1, 1] = 101.0
    limits = InspectionLimits() if count == 3 else BRIEF
    engine = made.engine(physical_batch=SMALL, limits=limits)
    check(made, engine)
    check(replace(made, inputs=inputs), engine)


def _looks_for_padding(self: Wired, tokens: Tensor) -> Tensor:
    """As models of transformers do to warn where padding has no mask."""
    if 0 in tokens[:, [-1, 0]]:
        self.warned = True
    return self.layer(self.table(tokens)).sum(dim=1)


def _doubles_where_padded(self: Wired, tokens: Tensor) -> Tensor:
    hidden = self.layer(self.table(tokens)).sum(dim=1)
    return hidden * 2.0 if 0 in tokens else hidden


def _of_tokens(wiring: Callable[..., Tensor]) -> Problem:
    """Four records, of which two hold the token 0, in the middle and at the beginning."""
    spec = Spec(lambda: Wired(wiring, table=nn.Embedding(6, 4), layer=nn.Linear(4, 2)), (5,), entries=6)
    made = problem(spec, count=4)
    tokens = made.inputs.clone().clamp(min=1)
    tokens[1, 2] = tokens[2, 0] = 0
    return replace(made, inputs=tokens)


def test_membership_that_changes_nothing_is_answered() -> None:
    made = _of_tokens(_looks_for_padding)
    engine = made.engine()
    assert engine.is_batched
    check(made, engine)


def test_membership_that_changes_other_records_is_refused() -> None:
    with pytest.raises(RecordsNotIndependentError, match="mixes records"):
        _of_tokens(_doubles_where_padded).engine()


def test_an_engine_goes_on_right_after_it_met_another_way() -> None:
    made = problem(Spec(lambda: Wired(_another_way, layer=nn.Linear(4, 2)), (3, 4)), count=4)
    odd = replace(made, inputs=made.inputs + 101.0)
    engine = made.engine(limits=BRIEF)
    for some in (made, odd, made, odd):
        expected = naive.contributions(some.model, some.gradients, L2(0.1)).sum(dim=0)
        assert naive.relative(engine.clipped_sum(*some.arguments, L2(0.1)), expected) < 1e-10


DROPPING = {
    "dropout": Spec(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), (4,)),
    "channels": Spec(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(36, 2)),
        (1, 5, 5),
    ),
    "pixels, between layers that are faster in another order": Spec(
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Conv2d(4, 4, 2)),
            *(nn.Flatten(), nn.Linear(16, 2)),
        ),
        (2, 8, 8),
    ),
    "lstm": Spec(
        lambda: Wired(
            lambda self, x: self.layer(x)[0], layer=nn.LSTM(3, 4, 2, dropout=0.5, batch_first=True)
        ),
        (5, 3),
    ),
    "transformer": Spec(lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True), (5, 4)),
    "attention with weights": Spec(
        lambda: Wired(
            lambda self, x: self.layer(x, x, x)[0],
            layer=nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True),
        ),
        (5, 4),
    ),
    "a scaled weight": Spec(
        lambda: Wired(
            lambda self, x: functional.dropout(functional.linear(x, self.layer.weight * 2.0), 0.5),
            layer=nn.Linear(4, 8),
        ),
        (4,),
    ),
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_model_with_dropout_is_taken(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Other numbers are dropped in each pass and for each record; every contribution is within its bound."""
    made = problem(DROPPING[name], torch.float32, count=5)
    made = replace(
        made, inputs=made.inputs[:1].expand(5, *made.inputs.shape[1:]), labels=made.labels[:1].expand(5)
    )
    engine = made.engine(limits=BRIEF)
    assert not caplog.records
    torch.manual_seed(0)
    drawn = [rows(made, engine) for _ in range(2)]
    assert naive.relative(*drawn) > 1e-2
    assert min(float((drawn[0][i] - drawn[0][j]).norm()) for i in range(5) for j in range(i)) > 1e-3
    bound = 0.2 * float(drawn[0].norm(dim=1).median())
    for i in range(5):
        assert float(engine.clipped_sum(*made.take([i]).arguments, L2(bound)).norm()) <= bound


RIGHT_AT_ANY_START = {
    "low-rank adaptation that starts at zero": Spec(
        lambda: Wired(
            lambda self, x: functional.linear(x @ self.a.T, self.b),
            a=nn.Parameter(torch.randn(3, 4)),
            b=nn.Parameter(torch.zeros(2, 3)),
        ),
        (4,),
    ),
    "folded by time before a layer that starts at zero": Spec(
        lambda: Wired(
            lambda self, x: self.last(
                self.layer(x.transpose(0, 1).reshape(-1, 4)).view(3, len(x), 5).tanh().sum(0)
            ),
            layer=nn.Linear(4, 5),
            last=zero_start(nn.Linear(5, 2)),
        ),
        (3, 4),
    ),
    "a small part that is folded by time": Spec(
        lambda: Wired(
            lambda self, x: (
                self.main(x.flatten(1))
                + 1e-5 * self.layer(x.transpose(0, 1).reshape(-1, 4)).view(3, len(x), 2).tanh().sum(0)
            ),
            layer=nn.Linear(4, 2),
            main=nn.Linear(12, 2),
        ),
        (3, 4),
    ),
    "a small part whose weight is transposed": Spec(
        lambda: Wired(
            lambda self, x: self.main(x) + 1e-5 * (x @ self.w.T),
            w=nn.Parameter(torch.randn(2, 4)),
            main=nn.Linear(4, 2),
        ),
        (4,),
    ),
}


@pytest.mark.parametrize("name", RIGHT_AT_ANY_START)
def test_no_gradient_is_left_out_or_mistaken_because_it_is_small_at_the_start(name: str) -> None:
    """Compared parameter by parameter, each relative to its own size."""
    made = problem(RIGHT_AT_ANY_START[name])
    found = rows(made, made.engine())
    for place in made.model.slices.values():
        assert naive.relative(found[:, place], made.gradients[:, place]) < 1e-9


@pytest.mark.parametrize(("kind", "width"), [(nn.Embedding, 12), (nn.EmbeddingBag, 4)])
def test_a_table_of_sparse_gradients_is_taken_as_one_of_dense_ones(
    kind: Callable[..., nn.Embedding | nn.EmbeddingBag], width: int
) -> None:
    def of_words(self: Wired, words: Tensor) -> Tensor:
        return self.last(self.table(words).flatten(1))

    def made(*, sparse: bool) -> Problem:
        return problem(
            Spec(
                lambda: Wired(of_words, table=kind(5, 4, sparse=sparse), last=nn.Linear(width, 2)),
                (3,),
                entries=5,
            )
        )

    check(made(sparse=False), made(sparse=True).engine(limits=BRIEF))


def test_a_weight_may_be_a_vector() -> None:
    made = problem(
        Spec(
            lambda: Wired(lambda self, x: functional.linear(x, self.w), w=nn.Parameter(torch.randn(4))),
            (3, 4),
        )
    )
    engine = made.engine(limits=BRIEF)
    assert engine.is_batched
    check(made, engine)


class Rounded(torch.autograd.Function):
    """Straight through, as in training for weights of few bits."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return (8.0 * weight).round() / 8.0

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> Tensor:
        return errors


class Scaled(torch.autograd.Function):
    """values times a weight, for a number of records."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, count: int | None = None) -> Tensor:
        ctx.save_for_backward(values, weight)
        return values.view(count or len(values), 3) * weight

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor, Tensor, None]:
        values, weight = ctx.saved_tensors
        return errors * weight, (errors * values).sum(dim=0), None


@pytest.mark.parametrize(
    ("wiring", "materialised"),
    [
        (lambda self, x: self.last(functional.linear(x, Rounded.apply(2.0 * self.layer.weight))), ()),
        (
            lambda self, x: self.last(torch.tanh(Scaled.apply(self.layer(x), self.layer.bias))),
            ("Scaled",),
        ),
        (
            lambda self, x: self.last(torch.tanh(Scaled.apply(self.layer(x), self.layer.bias, len(x)))),
            ("Scaled",),
        ),
    ],
)
def test_a_function_with_a_backward_pass_of_its_own_is_taken(
    wiring: Callable[[Wired, Tensor], Tensor], materialised: tuple[str, ...]
) -> None:
    """In one pass, and no record is in another's way; if it takes parameters alone, by autograd's graph of them."""
    made = problem(Spec(lambda: Wired(wiring, layer=nn.Linear(4, 3), last=nn.Linear(3, 2)), (4,)))
    engine = made.engine(limits=BRIEF)
    assert engine.is_batched and engine.operations_without_rule == materialised
    check(made, engine)
    missing = replace(made, inputs=torch.cat([torch.full_like(made.inputs[:1], math.nan), made.inputs[1:]]))
    norms = [engine.norms(*some.arguments, L2(1.0)) for some in (made, missing)]
    assert torch.equal(norms[0][1:], norms[1][1:])  # 0 times NaN, in a sum over records, would be NaN for all
    assert torch.autograd.Function.apply.__module__ == "torch.autograd.function"  # as it was


class Starts(nn.Module):
    """A start for each record, taken from as many first frames as there are records, as in TimeSformer."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(2))

    def forward(self, frames: Tensor) -> tuple[Tensor, None, Tensor]:
        self.seen = frames
        starts = torch.zeros(frames.shape[:2].numel(), 2).to(frames) + self.start
        return starts[: len(frames)], None, frames.mean(dim=(1, 2))[:, None] * starts.view(len(frames), -1)


class Sparse(nn.Module):
    """A layer with a sparse weight, which PyTorch makes without telling the recorder."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(3))
        self.register_buffer("places", torch.tensor([[0, 1, 3], [2, 0, 3]]))

    def forward(self, values: Tensor) -> Tensor:
        return functional.linear(values, torch.sparse_coo_tensor(self.places, self.values, (4, 4)).to_dense())


@pytest.mark.parametrize(("layer", "limits"), by_limits([Starts, Sparse], in_full=[Starts]))
def test_only_a_layer_that_cannot_be_recorded_is_taken_record_by_record(
    layer: type[nn.Module], limits: InspectionLimits
) -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        found = self.inner(torch.tanh(self.first(x)))
        return self.last(torch.cat([found[0], found[2]], 1) if isinstance(found, tuple) else found.mean(1))

    width = 8 if layer is Starts else 4
    made = problem(
        Spec(lambda: Wired(wiring, first=nn.Linear(4, 4), inner=layer(), last=nn.Linear(width, 3)), (3, 4))
    )
    engine = made.engine(physical_batch=SMALL, limits=limits)
    assert engine.is_batched and engine.operations_without_rule == (layer.__name__,)
    check(made, engine)
    elsewhere = made.engine(physical_batch=SMALL, offload=True, limits=limits)
    sums = [each.clipped_sum(*made.arguments, L2(1.0)) for each in (engine, elsewhere)]
    assert naive.relative(*sums) < 1e-12
    inner = engine.passes.model.module.get_submodule("inner")
    assert not vars(inner).keys() & {"forward", "seen"}  # nothing is left in it


def test_pairs_of_numbers_are_complex_wherever_they_are_among_the_parameters() -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ torch.view_as_complex(self.pairs)).abs() + self.shift

    made = problem(
        Spec(
            lambda: Wired(
                wiring, shift=nn.Parameter(torch.randn(3)), pairs=nn.Parameter(torch.randn(4, 3, 2))
            ),
            (4,),
        )
    )
    engine = made.engine(limits=BRIEF)
    assert engine.is_batched
    check(made, engine)


def test_a_weight_that_is_computed_in_32_bits_is_no_mixture_of_records() -> None:
    """As of FourierFT: gradients that are added up before they are rounded are others than those added up after."""

    def wiring(self: Wired, x: Tensor) -> Tensor:
        return functional.linear(x, torch.cos(self.weight.float()).to(x))

    made = problem(Spec(lambda: Wired(wiring, weight=nn.Parameter(torch.randn(3, 4))), (4,)))
    engine = made.engine()
    assert engine.is_batched
    assert naive.relative(rows(made, engine), made.gradients) < 1e-6


def _by_distances(self: Wired, x: Tensor) -> Tensor:
    """By distances that no record has a part in, of which `torch.func` gives wrong gradients."""
    distances = torch.cdist(self.w, self.w, p=1.0).sum(dim=1)
    return torch.func.vmap(lambda row: row @ self.w * distances)(x)


@pytest.mark.parametrize(("wiring", "limits"), by_limits([_by_distances]))
def test_records_have_passes_of_their_own_where_their_batched_gradients_are_wrong(
    wiring: Callable[[Wired, Tensor], Tensor], limits: InspectionLimits
) -> None:
    made = problem(Spec(lambda: Wired(wiring, w=nn.Parameter(torch.randn(4, 4))), (4,)))
    engine = made.engine(limits=limits)
    assert not engine.is_batched and engine.passes.are_separate
    check(made, engine)

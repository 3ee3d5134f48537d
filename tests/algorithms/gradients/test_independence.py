"""Honest mistakes that ordinary records do not show, as they lie in place, number, length, or what is kept."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.gradients import L2, Engine, PerExampleModel, RecordsNotIndependentError
from algorithms.gradients.independence import USUAL_COUNT, ModelProbe, check_apart, content_digest
from algorithms.gradients.model_inspection import InspectionLimits, examine
from algorithms.gradients.passes import Passes
from algorithms.gradients.synthetic_inputs import InputSpec, SyntheticBatch, near_start
from algorithms.models import Model
from tests.support.gradients.problems import (
    BRIEF,
    BRIEFEST,
    LIMITS,
    SMALL,
    Problem,
    Spec,
    Wired,
    check,
    problem,
)


def positions_along_the_batch(self: Wired, x: Tensor) -> Tensor:
    """Positions for a sequence that comes first, as in PyTorch's tutorial, where the batch does."""
    return self.layer(self.drop(x + torch.arange(len(x), dtype=x.dtype).sin()[:, None]))


def members_of_an_ensemble(self: Wired, x: Tensor) -> Tensor:
    """Each part of the batch with the fast weights of another member (Wen et al. 2020)."""
    members = torch.arange(len(x)) * 2 // len(x)
    return self.layer(self.drop(x * (1.0 + members[:, None])))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("wiring", [positions_along_the_batch, members_of_an_ensemble])
def test_a_result_by_place_is_refused_in_large_models_and_behind_dropout(
    wiring: Callable[[Wired, Tensor], Tensor], limits: InspectionLimits, dropout: float
) -> None:
    spec = Spec(lambda: Wired(wiring, layer=nn.Linear(4, 2), drop=nn.Dropout(dropout)), (4,))
    with pytest.raises(RecordsNotIndependentError, match="mixes records"):
        problem(spec, torch.float32).engine(limits=limits)


SOME_SIZES: dict[str, Callable[[int], bool]] = {
    "pairs": lambda size: size % 2 == 0,
    "eights": lambda size: size % 8 == 0,
    "more than a few": lambda size: size > 3,
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("size", SOME_SIZES)
def test_what_mixes_records_in_batches_of_some_sizes_is_refused(size: str, limits: InspectionLimits) -> None:
    """As mixup, which needs pairs, and batch statistics where there are enough records for them.

    By the inspection alone, before passes of the run's size are compared.
    """

    def wiring(self: Wired, x: Tensor) -> Tensor:
        return self.layer(0.7 * x + 0.3 * x.flip(0) if SOME_SIZES[size](len(x)) else x)

    made = problem(Spec(lambda: Wired(wiring, layer=nn.Linear(4, 2)), (4,)), torch.float32)
    with pytest.raises(RecordsNotIndependentError, match="mixes records"):
        examine(Passes(made.model), InputSpec((4,), torch.float32, torch.device("cpu")), limits)


def test_a_loss_that_mixes_records_of_a_mark_among_numbers_is_refused() -> None:
    """As a loss for records without a target, which have -1 in its place."""

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        found = outputs[:, 0]
        return torch.where(targets < 0, (found - found.flip(0)).square(), (found - targets).square())

    model = Model("made up", nn.Linear(4, 1), losses, lambda outputs: outputs, label_dtype=torch.float32)
    with pytest.raises(RecordsNotIndependentError, match="the loss of the model made up"):
        Engine(model, input_shape=(4,))


def kept_path(self: Wired, x: Tensor) -> Tensor:
    """Stochastic depth of each record."""
    return self.layer(x * torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(0.95))


def kept_layer(self: Wired, x: Tensor) -> Tensor:
    """Layer drop: one decision for the batch."""
    return self.layer(x if torch.rand(()) > 0.01 else 2.0 * x)


def shuffled(self: Wired, x: Tensor) -> Tensor:
    return self.layer(x[:, torch.randperm(2).repeat(2)])


def unused(self: Wired, x: Tensor) -> Tensor:
    return self.layer(x if torch.rand(()) >= 0.0 and torch.randint(9, ()) < 9 else 2.0 * x)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("wiring", [kept_path, kept_layer, shuffled, unused])
def test_what_a_model_seldom_draws_is_seen(
    wiring: Callable[[Wired, Tensor], Tensor], limits: InspectionLimits
) -> None:
    made = problem(Spec(lambda: Wired(wiring, layer=nn.Linear(4, 2)), (4,)), torch.float32)
    assert made.engine(limits=limits).is_random == (wiring is not unused)


@pytest.mark.parametrize("limits", LIMITS)
def test_what_a_model_keeps_of_its_first_records_must_not_count_later(limits: InspectionLimits) -> None:
    def centred(self: Wired, x: Tensor) -> Tensor:
        self.mean = getattr(self, "mean", x.detach().mean(dim=0))
        return self.layer(x - self.mean.to(x))

    def shown(self: Wired, x: Tensor) -> Tensor:
        self.weights = torch.softmax(self.layer(x), dim=1).detach()
        return self.layer(x)

    made = problem(Spec(lambda: Wired(shown, layer=nn.Linear(4, 2)), (4,)))
    check(made, made.engine(physical_batch=SMALL, limits=limits))
    with pytest.raises(
        RecordsNotIndependentError, match="the forward pass of the model made up mixes records"
    ):
        problem(Spec(lambda: Wired(centred, layer=nn.Linear(4, 2)), (4,)), torch.float32).engine(
            limits=limits
        )


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("only_first", [True, False])
def test_what_lies_deeper_than_attributes_is_not_kept_of_records(
    limits: InspectionLimits, *, only_first: bool
) -> None:
    """It is not discarded after a pass, as attributes are."""

    class Holding(Wired):
        def __init__(self) -> None:
            super().__init__(centred, layer=nn.Linear(4, 2))
            self.state: dict[str, dict[str, Tensor]] = {"kept": {}}

    def centred(self: Holding, x: Tensor) -> Tensor:
        kept, own = self.state["kept"], x.detach().mean(dim=0)
        before = kept.get("mean", own).to(x)
        kept["mean"] = before if only_first else own
        return self.layer(x - before)

    with pytest.raises(RecordsNotIndependentError, match="the attribute state keeps"):
        problem(Spec(Holding, (4,)), torch.float32).engine(limits=limits)


def scaled_errors(scale: Callable[[Tensor], Tensor]) -> Callable[[Wired, Tensor], Tensor]:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        found = self.layer(x)
        if found.requires_grad:
            found.register_hook(lambda errors: errors * scale(errors.norm()))
        return self.last(self.drop(found))

    return wiring


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("scale", [lambda norm: 1.0 / norm, lambda norm: (10.0 / norm).clamp(max=1.0)])
def test_errors_that_are_scaled_over_the_batch_are_not_taken_together(
    scale: Callable[[Tensor], Tensor], limits: InspectionLimits, dropout: float
) -> None:
    """Refused, or taken record by record."""
    layers: dict[str, Any] = {"layer": nn.Linear(4, 4), "last": nn.Linear(4, 2), "drop": nn.Dropout(dropout)}
    made = problem(Spec(lambda: Wired(scaled_errors(scale), **layers), (4,)), torch.float32)
    try:
        engine = made.engine(limits=limits)
    except RecordsNotIndependentError as refusal:
        assert "the backward pass" in str(refusal)
        return
    assert not engine.is_batched


def of_capacity(factor: float, least: int) -> Callable[[Wired, Tensor], Tensor]:
    """Experts that take no more than their part of the batch, in its order (Fedus et al. 2022)."""

    def wiring(self: Wired, x: Tensor) -> Tensor:
        chosen = functional.one_hot(self.router(x).argmax(dim=1), 4)
        capacity = max(least, int(factor * len(x) / 4))
        has_room = (chosen.cumsum(dim=0) <= capacity) & (chosen > 0)
        experts = self.experts(x).unflatten(1, (4, 2))
        return x[:, :2] + (experts * has_room[:, :, None]).sum(dim=1)

    return wiring


def experts_of_capacity(factor: float, least: int) -> Spec:
    wiring = of_capacity(factor, least)
    return Spec(lambda: Wired(wiring, router=nn.Linear(6, 4), experts=nn.Linear(6, 8)), (6,))


@pytest.mark.parametrize(("factor", "least"), [(1.25, 1), (2.0, 4), (3.0, 8)])
def test_experts_that_are_full_are_refused(factor: float, least: int) -> None:
    with pytest.raises(RecordsNotIndependentError, match="mixes records"):
        problem(experts_of_capacity(factor, least), torch.float32).engine()


@pytest.mark.parametrize("seed", [2, 3, 5])
def test_experts_that_are_full_are_refused_in_the_largest_models(seed: int) -> None:
    """Also where two made-up records choose different ones."""
    with pytest.raises(RecordsNotIndependentError, match="mixes records"):
        problem(experts_of_capacity(1.25, 1), torch.float32, seed=seed).engine(limits=BRIEFEST)


def sorted_by_length(self: Wired, x: Tensor) -> Tensor:
    """Series that end in zeros, the longest first while a layer works on them."""
    lengths = (x != 0).any(dim=2).sum(dim=1)
    order = lengths.argsort(descending=True, stable=True)
    hidden = torch.tanh(self.first(x))[order]
    return self.layer(hidden).sum(dim=1)[order.argsort()]


def padded(made: Problem) -> Problem:
    inputs = made.inputs.clone()
    for index, series in enumerate(inputs):
        series[1 + index % 4 :] = 0.0
    return Problem(made.model, made.parameters, inputs, made.labels)


@pytest.mark.parametrize("limits", LIMITS)
def test_series_that_are_sorted_by_length_keep_their_own_gradients(limits: InspectionLimits) -> None:
    made = problem(
        Spec(lambda: Wired(sorted_by_length, first=nn.Linear(3, 3), layer=nn.Linear(3, 2)), (5, 3))
    )
    check(padded(made), made.engine(limits=limits))


class Centred(nn.Module):
    """A loss that follows the mean of the outputs, and says so nowhere in what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(dim=0)
        return functional.cross_entropy(outputs, labels, reduction="none")


@pytest.mark.parametrize("losses", [Centred(), Centred().forward])
def test_a_loss_that_keeps_a_mean_in_a_buffer_is_refused(losses: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(RecordsNotIndependentError, match="is changed by every forward pass"):
        problem(Spec(lambda: nn.Linear(4, 2), (4,), losses=losses, classes=2), torch.float32).engine()


class Tied(nn.Module):
    """A table whose entries a look-up shortens, and that all records compare their outputs with."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(0.02 * torch.randn(20, 16, generator=torch.Generator().manual_seed(0)))

    def forward(self, words: Tensor) -> Tensor:
        return functional.embedding(words, self.table, max_norm=1.0).mean(dim=1) @ self.table.T


@pytest.mark.parametrize("limits", LIMITS)
def test_writing_into_parameters_is_refused_even_if_it_changes_none_yet(limits: InspectionLimits) -> None:
    """The entries are shorter than the bound at the start, and one record more moved a later sum by 6 bounds."""
    losses = nn.CrossEntropyLoss(reduction="none")
    model = Model("tied", Tied(), losses, lambda outputs: outputs)
    with pytest.raises(RecordsNotIndependentError, match="writes what it computes of records into"):
        Engine(model, input_shape=(5,), input_dtype=torch.int32, limits=limits)


class Follower:
    """Keeps the largest value that it saw, and is called like a function."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_what_is_kept_by_an_object_that_is_called_is_seen() -> None:
    def make() -> nn.Module:
        made = Wired(lambda self, x: self.layer(self.follow(x)), layer=nn.Linear(4, 2))
        made.follow = Follower()
        return made

    with pytest.raises(RecordsNotIndependentError, match="the attribute follow is changed"):
        problem(Spec(make, (4,))).engine()


def test_losses_over_parts_that_are_left_out_are_of_each_record_alone() -> None:
    """A large model, whose loss divides by how many labels count in the batch: all of those that are made up."""

    def losses(outputs: Tensor, labels: Tensor) -> Tensor:
        each = functional.cross_entropy(outputs, labels, reduction="none", ignore_index=-100)
        return each * (len(labels) / (labels != -100).sum())

    made = problem(Spec(lambda: nn.Linear(4, 2), (4,), losses=losses, classes=2), torch.float32)
    engine = made.engine(limits=BRIEF)
    labels = torch.where(torch.arange(6) < 3, made.labels, -100)
    all_of_them = engine.clipped_losses(made.parameters, made.inputs, labels, 1e3)
    first = engine.clipped_losses(made.parameters, made.inputs[:3], labels[:3], 1e3)
    assert float(all_of_them) == pytest.approx(float(first))
    found = engine.clipped_sum(made.parameters, made.inputs, labels, L2(1e3))
    assert torch.allclose(found, engine.clipped_sum(made.parameters, made.inputs[:3], labels[:3], L2(1e3)))


def masked_softmax(self: Wired, x: Tensor) -> Tensor:
    """Attention with a mask as large as its numbers allow, whose softmax is in 32 bits; some rows are all masked."""
    scores = self.first(x).masked_fill(x[:, :1] <= 0.0, torch.finfo(x.dtype).min)
    weights = scores.softmax(dim=1, dtype=torch.float32)
    return self.layer(weights.to(x.dtype) * x)


def roots(self: Wired, x: Tensor) -> Tensor:
    """No number for records that begin with a negative one."""
    return self.layer(x) + self.first(x)[:, :2] * x[:, :1].sqrt()


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("wiring", [masked_softmax, roots])
def test_records_without_a_finite_loss_are_neither_random_nor_hide_the_gradients_of_others(
    wiring: Callable[[Wired, Tensor], Tensor], limits: InspectionLimits
) -> None:
    made = problem(
        Spec(lambda: Wired(wiring, first=nn.Linear(4, 4), layer=nn.Linear(4, 2)), (4,)), torch.float32
    )
    engine = made.engine(limits=limits)
    assert not engine.is_random
    assert engine.is_batched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("size", [1, 7, 4096, 2**18])
def test_a_digest_changes_with_each_byte_and_with_the_shape(size: int, dtype: torch.dtype) -> None:
    value = torch.zeros(size, dtype=dtype)
    digest = content_digest(value)
    assert digest == content_digest(value.clone()) != content_digest(value[None])
    bits = value.view(torch.uint8)
    for index in {0, len(bits) // 2, len(bits) - 1}:
        bits[index] = 1
        assert content_digest(value) != digest
        bits[index] = 0
    if size > 1:
        first, last = torch.zeros_like(value), torch.zeros_like(value)
        first[0] = last[-1] = True
        assert content_digest(first) != content_digest(last)
        assert content_digest(first) == content_digest(first[:, None].expand(-1, 2)[:, 0])


def test_a_digest_is_of_the_bits_so_that_a_missing_number_equals_itself() -> None:
    missing = torch.tensor([float("nan"), -0.0])
    assert content_digest(missing) == content_digest(missing.clone())
    assert content_digest(torch.tensor([0.0])) != content_digest(torch.tensor([-0.0]))


@pytest.fixture
def seen_passes(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Any, ...]]:
    """How often each pass was made, by its kind, weight, precision and records."""
    seen = Counter[tuple[Any, ...]]()
    observe, gradient = ModelProbe.observe, ModelProbe.gradient

    def note(probe: ModelProbe, sample: SyntheticBatch, *kind: object) -> None:
        records = sample.inputs.numpy().tobytes(), *sample.labels.tolist()
        seen[*kind, probe.is_exact, len(sample.labels), *records] += 1

    def noting_observe(probe: ModelProbe, sample: SyntheticBatch) -> Any:
        note(probe, sample, "losses")
        return observe(probe, sample)

    def noting_gradient(probe: ModelProbe, sample: SyntheticBatch, weight: float = 1.0) -> Tensor:
        note(probe, sample, "gradient", weight)
        return gradient(probe, sample, weight)

    monkeypatch.setattr(ModelProbe, "observe", noting_observe)
    monkeypatch.setattr(ModelProbe, "gradient", noting_gradient)
    return seen


class WordMeans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(50, 4), nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        outputs: Tensor = self.layer(self.table(words).mean(dim=1))
        return outputs


@pytest.mark.parametrize("is_of_words", [False, True])
def test_records_are_told_apart_by_passes_of_which_none_is_made_again(
    is_of_words: bool, seen_passes: Counter[tuple[Any, ...]]
) -> None:
    module, dtype = (WordMeans(), torch.int64) if is_of_words else (nn.Linear(12, 2), torch.float32)
    model = PerExampleModel("told apart", module, nn.CrossEntropyLoss(reduction="none"))
    form = InputSpec((12,), dtype, torch.device("cpu"), entries=50, constants=(0, 1, 49))
    assert not check_apart(ModelProbe(Passes(model), near_start(model), form, tolerance=1e-4))
    # The first pass has the records that are then shown among others.
    assert sorted(seen_passes.values())[-2:] == [1, 2]
    few = [kind for kind in seen_passes if kind[0] == "gradient"]
    assert len(few) == (8 if is_of_words else 18)


def test_as_many_records_as_a_pass_has_are_compared_once(seen_passes: Counter[tuple[Any, ...]]) -> None:
    module = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1), nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    )
    model = PerExampleModel("of some operations", module, nn.CrossEntropyLoss(reduction="none"))
    inspection = examine(Passes(model), InputSpec((8, 32, 32), torch.float32, torch.device("cpu")))
    assert not inspection.is_brief
    exact = [seen_passes[kind] for kind in seen_passes if kind[:3] == ("losses", True, USUAL_COUNT)]
    assert len(exact) > 5 and set(exact) == {1}

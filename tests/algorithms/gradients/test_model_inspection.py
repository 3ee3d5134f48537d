"""What is refused before a private record is seen, and what is let through; also what mixes odd records alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.core.user_level import user_level_model
from algorithms.gradients import (
    L2,
    Engine,
    RecordsNotIndependentError,
    Unclipped,
)
from algorithms.gradients.grad_sample_recorder import Args, Func, GradSampleRecorder, Kwargs
from algorithms.gradients.independence import _attributes
from algorithms.gradients.model_inspection import InspectionLimits
from algorithms.gradients.op_tracer import MemoryTracer
from algorithms.gradients.rules import RULES
from algorithms.models import Model
from algorithms.models.objectives import cross_entropy
from tests.support.gradients import naive
from tests.support.gradients.problems import (
    BRIEF,
    BRIEFEST,
    LIMITS,
    Spec,
    Wired,
    check,
    frozen,
    problem,
    rows,
    wavy,
    zero_start,
)
from tests.support.soak import soak_but


def around(mixing: Callable[[Tensor], Tensor], last: nn.Linear) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Wired(lambda self, x: mixing(x)), nn.Tanh(), last)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "the mean of the batch": lambda x: x - x.mean(dim=0),
    "the largest of the batch": lambda x: x / x.abs().amax(),
    "attention over the batch": lambda x: torch.softmax(x @ x.T, dim=1) @ x,
    "records before it": lambda x: x.cumsum(dim=0),
    "records after it": lambda x: x.flip(0).cumsum(dim=0).flip(0),
    "the next record": lambda x: x + x.roll(1, 0),
    "the last record": lambda x: x + x[-1],
    "the first record": lambda x: x + x[:1],
    "how many records there are": lambda x: x / len(x),
    "the place in the batch": lambda x: x * (1 + torch.arange(len(x)))[:, None],
}


@pytest.mark.parametrize("start", ["random", "zero"])
@pytest.mark.parametrize("name", MIXING)
def test_a_layer_that_depends_on_the_other_records_is_refused(name: str, start: str) -> None:
    """A last layer that starts at zero hides what is before it from the loss at the start."""
    last = zero_start(nn.Linear(4, 2)) if start == "zero" else nn.Linear(4, 2)
    with pytest.raises(RecordsNotIndependentError, match=r"the layer 1 \(Wired\) mixes records"):
        problem(Spec(lambda: around(MIXING[name], last), (4,))).engine()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_over_the_batch_is_refused(kind: type[nn.Module]) -> None:
    """What is easily forgotten: batch_first."""
    spec = Spec(lambda: Wired(lambda self, x: self.layer(x)[0].flatten(1), layer=kind(3, 4)), (5, 3))
    with pytest.raises(
        RecordsNotIndependentError, match=rf"layer \({kind.__name__}, batch_first=False\) mixes"
    ):
        problem(spec).engine()


@pytest.mark.parametrize(
    ("layer", "shape", "named"),
    [
        (lambda: nn.BatchNorm1d(4), (4,), r"0 \(BatchNorm1d\)"),
        (lambda: nn.BatchNorm2d(2), (2, 3, 3), r"0 \(BatchNorm2d\)"),
        (lambda: nn.BatchNorm1d(4, affine=False), (4,), r"0 \(BatchNorm1d\)"),
        (lambda: nn.BatchNorm1d(4, track_running_stats=False).eval(), (4,), r"0 \(BatchNorm1d\)"),
        (lambda: nn.InstanceNorm1d(2, track_running_stats=True), (2, 4), r"0 \(InstanceNorm1d\)"),
    ],
)
def test_a_normalisation_over_records_is_refused(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], named: str
) -> None:
    with pytest.raises(RecordsNotIndependentError, match=rf"the layer {named} mixes records"):
        problem(Spec(lambda: nn.Sequential(layer(), nn.Flatten(), nn.PReLU()), shape)).engine()


def test_a_normalisation_over_records_by_its_function_is_refused_by_name() -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        return functional.batch_norm(self.layer(x), None, None, training=True)

    spec = Spec(lambda: nn.Sequential(nn.Linear(4, 4), Wired(wiring, layer=nn.Linear(4, 3))), (4,))
    with pytest.raises(
        RecordsNotIndependentError,
        match=r"normalises over the batch in the layer 1 \(Wired\).* mixes records",
    ):
        problem(spec, torch.float32).engine()


def over_pairs(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - outputs.roll(1, 0)).square().sum(dim=1)


def against_the_others(outputs: Tensor, labels: Tensor) -> Tensor:
    """A contrastive loss: each record against all."""
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="none")


def divided(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs, labels) / len(labels)


def shared(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs, labels).mean().expand(len(labels))


def by_label(outputs: Tensor, labels: Tensor) -> Tensor:
    """Weights that balance the classes of the batch."""
    return cross_entropy(outputs, labels) / (labels[:, None] == labels).sum(dim=1)


def of_those_before(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs, labels).cumsum(dim=0)


@pytest.mark.parametrize("start", ["random", "zero"])
@pytest.mark.parametrize(
    "losses", [over_pairs, against_the_others, divided, shared, by_label, of_those_before]
)
def test_a_loss_that_depends_on_the_other_records_is_refused(
    losses: Callable[[Tensor, Tensor], Tensor], start: str
) -> None:
    def make() -> nn.Module:
        return zero_start(nn.Linear(4, 2)) if start == "zero" else nn.Linear(4, 2)

    with pytest.raises(RecordsNotIndependentError, match="the loss of the model made up"):
        problem(Spec(make, (4,), losses=losses, classes=2)).engine()


def test_a_loss_that_depends_on_the_batch_is_refused_behind_dropout_too() -> None:
    """Where no two passes are the same, the loss of given outputs still is."""
    spec = Spec(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)), (4,), losses=divided, classes=2)
    with pytest.raises(RecordsNotIndependentError, match="the loss of the model made up"):
        problem(spec).engine()


@pytest.mark.parametrize(
    ("losses", "shape"),
    [
        (lambda o, y: cross_entropy(o, y).mean(), r"\[\]"),
        (lambda o, y: cross_entropy(o, y)[:, None], r"\[3, 1\]"),
        (lambda o, y: o.square(), r"\[3, 2\]"),
    ],
)
def test_a_loss_of_another_shape_is_refused(losses: Callable[[Tensor, Tensor], Tensor], shape: str) -> None:
    with pytest.raises(
        RecordsNotIndependentError, match=rf"loss of the model made up has shape {shape} for 3 records"
    ):
        problem(Spec(lambda: nn.Linear(4, 2), (4,), losses=losses)).engine()


def _counting(self: Wired, inputs: Tensor) -> Tensor:
    self.steps += 1
    return self.layer(inputs)


def _averaging(self: Wired, inputs: Tensor) -> Tensor:
    self.steps = 0.9 * self.steps + 0.1 * inputs.detach().mean(dim=0)
    return self.layer(inputs)


@pytest.mark.parametrize(("wiring", "start"), [(_counting, torch.zeros(())), (_averaging, torch.zeros(4))])
def test_a_buffer_that_changes_is_refused(wiring: Callable[..., Tensor], start: Tensor) -> None:
    spec = Spec(lambda: Wired(wiring, layer=nn.Linear(4, 2), steps=start.clone()), (4,))
    with pytest.raises(RecordsNotIndependentError, match="the buffer steps is changed"):
        problem(spec).engine()


def _tabling(self: Wired, inputs: Tensor) -> Tensor:
    if self.steps.numel() == 0:
        self.steps = torch.arange(inputs.shape[1], dtype=inputs.dtype)
    return self.layer(inputs * self.steps)


def _from_the_first_records(self: Wired, inputs: Tensor) -> Tensor:
    if self.steps.numel() == 0:
        self.steps = inputs.detach().mean(dim=0)
    return self.layer(inputs - self.steps)


def test_a_buffer_that_the_first_pass_makes_may_be_a_table_and_nothing_of_records() -> None:
    def spec(wiring: Callable[..., Tensor]) -> Spec:
        return Spec(lambda: Wired(wiring, layer=nn.Linear(4, 2), steps=torch.zeros(0)), (4,))

    made = problem(spec(_tabling))
    check(made, made.engine())
    with pytest.raises(RecordsNotIndependentError, match="the buffer steps is changed"):
        problem(spec(_from_the_first_records)).engine()


def test_a_layer_is_called_by_its_name_in_the_model_of_a_persons_rows() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model = user_level_model(Model("made up", module, cross_entropy, lambda outputs: outputs), 2)
    with pytest.raises(RecordsNotIndependentError, match=r"the layer 1 \(BatchNorm1d\)"):
        Engine(model, input_shape=(2, 4))


def test_tensors_that_a_layer_keeps_are_known_by_their_values_and_not_copied() -> None:
    class Keeping(nn.Module):
        def __init__(self, kept: Tensor) -> None:
            super().__init__()
            self.views = [kept[:3], kept[3:5]]

    everything = torch.arange(1e6)
    first, same, other = (
        _attributes(Keeping(kept)) for kept in (everything, everything.clone(), everything + 1)
    )
    assert first == same != other
    assert sum(map(len, first.values())) < 10_000


def test_gradients_that_rounding_in_32_bits_moves_far_are_compared_in_64() -> None:
    made = problem(
        Spec(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), (4,)), torch.float32
    )
    assert made.engine(limits=replace(BRIEF, gradient_tolerance=0.0)).is_batched


@pytest.mark.parametrize("mixing", [0.0, 1e-6])
def test_losses_that_rounding_in_32_bits_moves_far_are_compared_in_64(mixing: float) -> None:
    def amplified(self: Wired, x: Tensor) -> Tensor:
        moved = self.first(x + mixing * x.mean(dim=0) if mixing else x)
        return self.last(torch.sin(1e6 * moved))

    spec = Spec(lambda: Wired(amplified, first=nn.Linear(300, 300), last=nn.Linear(300, 2)), (300,))
    made = problem(spec, torch.float32)
    if mixing:
        with pytest.raises(
            RecordsNotIndependentError, match="the forward pass of the model made up mixes records"
        ):
            made.engine(limits=BRIEF)
    else:
        assert made.engine(limits=BRIEF).physical_batch >= 64


@pytest.mark.parametrize("limits", LIMITS)
def test_gradients_that_are_wrong_in_32_bits_alone_are_found(
    limits: InspectionLimits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a kernel that 64 bits do not have."""
    plain = RULES[functional.linear]

    def faulty(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
        input, *rest = args
        output: Tensor = plain(recorder, func, (input, *rest), kwargs)
        return output if input.dtype == torch.float64 else Scaled.apply(output)  # type: ignore[no-untyped-call]

    spec = Spec(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), (4,))
    assert problem(spec, torch.float32).engine(limits=limits).is_batched
    monkeypatch.setitem(RULES, functional.linear, faulty)
    made = problem(spec, torch.float32)
    engine = made.engine(limits=limits)
    assert not engine.is_batched and "wrong in the precision of training" in caplog.text
    total = engine.clipped_sum(*made.arguments, Unclipped())
    assert naive.relative(total, made.gradients.sum(dim=0)) < 1e-5


class Scaled(torch.autograd.Function):
    """Gradients that are a tenth too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> Tensor:
        return 1.1 * errors


def test_records_that_mix_in_32_bits_alone_are_refused() -> None:
    """As in a kernel that 64 bits do not have."""

    def wiring(self: Wired, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(dim=0) if x.dtype == torch.float32 else x)

    with pytest.raises(
        RecordsNotIndependentError, match="the forward pass of the model made up mixes records"
    ):
        problem(Spec(lambda: Wired(wiring, layer=nn.Linear(4, 2)), (4,)), torch.float32).engine()


def test_a_layer_that_renews_its_buffers_is_taken_in_evaluation_mode() -> None:
    def spectral(mode: bool) -> nn.Module:
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 2)).train(mode)

    with pytest.raises(RecordsNotIndependentError, match=r"_[uv] is changed by a forward pass.*\.eval\(\)"):
        problem(Spec(lambda: spectral(True), (4,))).engine()
    made = problem(Spec(lambda: spectral(False), (4,)))
    engine = made.engine()
    assert engine.is_batched
    check(made, engine)


def _turning(self: Wired, inputs: Tensor) -> Tensor:
    self.part.weight.data.copy_(self.part.weight.data.roll(1, 0))
    return self.part(self.layer(inputs))


def test_a_parameter_that_moves_and_keeps_its_numbers_is_taken() -> None:
    """As those of an LSTM do on a GPU, in every pass with other weights."""

    def wiring(self: Wired, inputs: Tensor) -> Tensor:
        self.part.weight.data = self.part.weight.data.clone()
        return self.part(self.layer(inputs))

    made = problem(Spec(lambda: Wired(wiring, layer=nn.Linear(4, 4), part=frozen(nn.Linear(4, 3))), (4,)))
    check(made, made.engine())


@pytest.mark.parametrize("make", [nn.Linear, lambda *sizes: frozen(nn.Linear(*sizes))])
def test_a_parameter_that_changes_is_refused(make: Callable[..., nn.Module]) -> None:
    """By its name, though its numbers are the same in another order."""
    spec = Spec(lambda: Wired(_turning, layer=nn.Linear(4, 4), part=make(4, 3)), (4,))
    with pytest.raises(RecordsNotIndependentError, match=r"the parameter part\.weight is changed"):
        problem(spec).engine()


def test_a_look_at_a_large_model_holds_few_copies_of_it() -> None:
    layers = (layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.Tanh()))
    made = problem(Spec(lambda: nn.Sequential(*layers, nn.Linear(512, 2)), (512,)), torch.float32)
    with MemoryTracer() as memory:
        assert made.engine().inspection.is_brief
    assert memory.peak < 3 * 4 * made.model.parameter_count


def mixup(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def exchanged(x: Tensor) -> Tensor:
    return torch.where(torch.empty(len(x), 1).bernoulli_(0.5) > 0, x.flip(0), x)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mixing", [mixup, exchanged])
@pytest.mark.parametrize("limits", LIMITS)
def test_records_in_a_random_order_are_found_by_several_seeds(
    mixing: Callable[[Tensor], Tensor], dropout: float, limits: InspectionLimits
) -> None:
    """Of the two records of a brief look, one seed may keep the order."""

    def wiring(self: Wired, x: Tensor) -> Tensor:
        return self.last(self.drop(self.layer(mixing(x))))

    layers: dict[str, Any] = {
        "layer": nn.Linear(4, 200),
        "drop": nn.Dropout(dropout),
        "last": nn.Linear(200, 3),
    }
    with pytest.raises(
        RecordsNotIndependentError, match="the forward pass of the model made up mixes records"
    ):
        problem(Spec(lambda: Wired(wiring, **layers), (4,)), torch.float32).engine(limits=limits)


@pytest.mark.parametrize(("asks", "dropout", "most"), [(False, 0.0, 14), (True, 0.0, 17), (False, 0.1, 20)])
def test_a_look_at_a_large_model_takes_few_passes(
    monkeypatch: pytest.MonkeyPatch, asks: bool, dropout: float, most: int
) -> None:
    """As many as forward passes of so many records; the shapes of a full pass are computed without numbers."""
    monkeypatch.setattr(
        "algorithms.gradients.engine.QUICK_OPERATIONS", 0
    )  # as for a model whose passes take long
    records = 0

    def count_records(self: Wired, x: Tensor) -> Tensor:
        nonlocal records
        records += 0 if x.is_meta else len(x)
        masked = torch.where(x < 0, 0.0, x) if not asks or not bool((x >= 0).all()) else x
        return self.layer(self.drop(masked))

    layers = {"layer": nn.Linear(200, 2), "drop": nn.Dropout(dropout)}
    spec = Spec(lambda: Wired(count_records, **layers).train(dropout > 0), (200,))
    engine = problem(spec, torch.float32).engine(limits=BRIEFEST)
    assert engine.physical_batch >= 32 and engine.is_random == (dropout > 0)
    compared = 0 if engine.is_random else 4 * engine.physical_batch + 1  # with and without gradients, twice
    assert records <= most + compared


@pytest.mark.parametrize("mixing", [lambda x: x - x.mean(dim=0), lambda x: x.flip(0), lambda x: x.cumsum(0)])
def test_large_model_that_mixes_in_large_batches_takes_one_record_a_pass(
    mixing: Callable[[Tensor], Tensor],
) -> None:
    spec = Spec(
        lambda: Wired(lambda self, x: self.layer(mixing(x) if len(x) > 3 else x), layer=nn.Linear(4, 2)), (4,)
    )
    made = problem(spec, torch.float32)
    engine = made.engine(limits=BRIEFEST)
    assert engine.physical_batch == 1
    total = engine.clipped_sum(*made.arguments, Unclipped())
    assert naive.relative(total, made.gradients.sum(dim=0)) < 1e-5


def _with_the_next(x: Tensor) -> Tensor:
    return x + x.roll(1, 0)


@pytest.mark.parametrize(
    ("wiring", "losses", "named"),
    [
        (lambda self, x: self.last(_with_the_next(x)), wavy, "the forward pass of the model made up"),
        (
            lambda self, x: self.rnn(x.transpose(0, 1))[0].transpose(0, 1),
            lambda outputs, labels: wavy(_with_the_next(outputs), labels),
            "the loss of the model made up",
        ),
    ],
)
def test_who_mixes_is_named(wiring: Callable[..., Tensor], losses: Callable[..., Tensor], named: str) -> None:
    """A layer before which records are mixed already, or whose first dimension is time, is not to blame."""
    spec = Spec(lambda: Wired(wiring, rnn=nn.GRU(4, 4), last=nn.Linear(4, 2)), (3, 4), losses=losses)
    with pytest.raises(RecordsNotIndependentError, match=f"^{named} mixes records"):
        problem(spec).engine()


def _remembering(self: Wired, inputs: Tensor) -> Tensor:
    before = getattr(self, "mean", 0.0)
    self.mean = inputs.detach().mean(dim=0)
    return self.layer(inputs - before)


def test_what_is_remembered_outside_of_buffers_is_forgotten_after_a_pass() -> None:
    made = problem(Spec(lambda: Wired(_remembering, layer=nn.Linear(4, 2)), (4,)))
    check(problem(Spec(lambda: nn.Sequential(nn.Linear(4, 2)), (4,))), made.engine())
    assert not hasattr(made.model.module, "mean")


def test_the_state_is_as_it_was_after_an_examination() -> None:
    """The generator of random numbers, the parameters, and the mode of the layers."""
    made = problem(Spec(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)), (4,)))
    before = {name: value.clone() for name, value in made.model.module.state_dict().items()}
    state = torch.get_rng_state()
    made.engine()
    assert torch.equal(torch.get_rng_state(), state)
    assert made.model.module.training
    after = made.model.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(layer._forward_hooks for layer in made.model.module.modules())


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = Model("fixed", frozen(nn.Linear(4, 2)), wavy, lambda outputs: outputs)
    with pytest.raises(ValueError, match="the model fixed has no"):
        Engine(model, input_shape=(4,))


LOOKING: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda mask: torch.where(mask)[0],
    "where by name": lambda mask: torch.where(condition=mask)[0],
    "repeated": lambda mask: torch.arange(len(mask)).repeat_interleave(mask.long()),
    "repeated by name": lambda mask: torch.arange(len(mask)).repeat_interleave(repeats=mask.long()),
}


def _routed(chosen: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Of two places of each record those go through a layer that their size selects: as a rule the first alone."""

    def wiring(self: Wired, inputs: Tensor) -> Tensor:
        mask = torch.stack([inputs[:, 0, 0] < 50, inputs[:, 1, 0] > 50], dim=1).flatten()
        places = chosen(mask)
        routed: Tensor = self.layer(inputs.flatten(0, 1)[places])
        sums = routed.new_zeros(len(inputs), 3).index_add(0, places // 2, routed)
        return torch.tanh(sums)

    return wiring


@pytest.mark.parametrize("name", LOOKING)
def test_a_choice_by_value_is_no_layout(name: str) -> None:
    """One record with two chosen places and one with none: the records between must keep their own gradients."""

    def make() -> nn.Module:
        return nn.Sequential(Wired(_routed(LOOKING[name]), layer=nn.Linear(4, 3)), nn.Linear(3, 2))

    made = problem(Spec(make, (2, 4)), torch.float32, count=40)
    engine = made.engine()
    inputs = made.inputs.clone()
    inputs[1::2] *= 0.01
    inputs[0, 1, 0], inputs[39, 0, 0] = 60.0, 60.0
    found = engine.clipped_sum(made.parameters, inputs, made.labels, L2(1e-2))
    without = engine.clipped_sum(made.parameters, inputs[:39], made.labels[:39], L2(1e-2))
    assert float((found - without).norm()) <= 1e-2


def _of_many(x: Tensor) -> Tensor:
    return x - x.mean(dim=0) if len(x) >= 16 else x


def _scaled_to_largest(x: Tensor) -> Tensor:
    return x / (x.abs().amax() / 10.0).clamp(min=1.0)


def _missing_filled(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), x.nanmean(dim=0), x)


def _largest_dropped(x: Tensor) -> Tensor:
    return torch.where(x.abs() > 100.0 * x.abs().median(), 0.0, x)


def _by_branch(x: Tensor) -> Tensor:
    return x - x.mean(dim=0) if bool((x.abs() > 50.0).any()) else x


@pytest.mark.parametrize(
    "mixing", [_of_many, _scaled_to_largest, _missing_filled, _largest_dropped, _by_branch]
)
def test_a_layer_that_mixes_unusual_records_is_refused(mixing: Callable[[Tensor], Tensor]) -> None:
    spec = Spec(lambda: nn.Sequential(Wired(lambda self, x: mixing(x)), nn.Linear(6, 2)), (6,))
    with pytest.raises(RecordsNotIndependentError, match=r"the layer 0 \(Wired\) mixes records"):
        problem(spec, torch.float32).engine()


@pytest.mark.parametrize("losses", ["small", "cut"])
def test_a_loss_that_mixes_a_little_or_rarely_is_refused(losses: str) -> None:
    def small(outputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(outputs, labels) + 1e-4 * outputs.var(dim=0).sum()

    def cut(outputs: Tensor, labels: Tensor) -> Tensor:
        found = cross_entropy(outputs, labels)
        return torch.where(found > 50.0 * found.median(), 0.0, found)

    chosen = {"small": small, "cut": cut}[losses]
    with pytest.raises(RecordsNotIndependentError, match="the loss of the model"):
        problem(Spec(lambda: nn.Linear(6, 2), (6,), losses=chosen, classes=2), torch.float32).engine()


@pytest.mark.parametrize("width", soak_but([2, 5], range(2, 8)))
def test_records_that_are_sorted_on_the_way_keep_their_own_gradients(width: int) -> None:
    def forward(self: Wired, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.layer(x[order])[order.argsort()]

    made = problem(Spec(lambda: Wired(forward, layer=nn.Linear(width, 2)), (width,)))
    assert naive.relative(rows(made, made.engine()), made.gradients) < 1e-9


def test_a_branch_in_the_loss_is_taken_record_by_record() -> None:
    def losses(outputs: Tensor, labels: Tensor) -> Tensor:
        found = cross_entropy(outputs, labels)
        return found * 2.0 if bool((found > 1e9).any()) else found

    made = problem(Spec(lambda: nn.Linear(4, 2), (4,), losses=losses, classes=2))
    assert naive.relative(rows(made, made.engine()), made.gradients) < 1e-9


def test_a_buffer_that_changes_rarely_starts_the_same_in_every_pass() -> None:
    def forward(self: Wired, x: Tensor) -> Tensor:
        self.widest.copy_(torch.maximum(self.widest, x.detach().abs().amax() - 1e6).clamp(min=0.0))
        return self.layer(x)

    spec = Spec(lambda: Wired(forward, layer=nn.Linear(4, 2), widest=torch.zeros(())), (4,))
    made = problem(spec)
    made.engine().clipped_sum(made.parameters, 1e9 * made.inputs, made.labels, L2(1.0))
    assert float(dict(made.model.module.named_buffers())["widest"]) == 0.0


@cache
def in_bfloat16(width: int) -> tuple[Model, Engine]:
    layers = Spec(lambda: nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 3)), (width,))
    model = replace(problem(layers, torch.float32).model, precision=torch.bfloat16)
    return model, Engine(model, input_shape=(width,), limits=BRIEF)


@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("width", [5, 784])
def test_in_bfloat16_a_bad_record_takes_no_other_with_it(place: int, bad: float, width: int) -> None:
    model, engine = in_bfloat16(width)
    draw = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(7, width, generator=draw), torch.arange(7) % 2
    kept = [i for i in range(7) if i != place]
    inputs[place] = bad
    at = model.initial_parameters()
    alone = sum(engine.clipped_sum(at, inputs[i : i + 1], labels[i : i + 1], L2(0.1)) for i in kept)
    moved = engine.clipped_sum(at, inputs, labels, L2(0.1)) - alone
    assert float(moved.norm()) <= 0.1 + 1e-2 * 0.1 * len(kept)  # the others only round differently


def test_the_way_of_later_batches_does_not_depend_on_a_record() -> None:
    def forward(self: Wired, x: Tensor) -> Tensor:
        return self.layer(x) if x.shape[0] != 4 else self.layer(self.layer.weight.sum() * 0.0 + x)

    made = problem(Spec(lambda: Wired(forward, layer=nn.Linear(4, 2)), (4,)))
    engine = made.engine()
    before = engine.contributions(made.parameters, made.inputs[:3], made.labels[:3])
    engine.contributions(made.parameters, made.inputs[:4], made.labels[:4])
    after = engine.contributions(made.parameters, made.inputs[:3], made.labels[:3])
    assert {type(g) for g in before.gradients.values()} == {type(g) for g in after.gradients.values()}

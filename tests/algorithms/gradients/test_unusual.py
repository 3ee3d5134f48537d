"""Models that mix records only at unusual values, and records that could disturb each other."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from algorithms.gradients import L2, Engine, RecordsNotIndependentError
from algorithms.gradients.arithmetic import in_full_precision
from algorithms.gradients.linear import LinearRecords, linear_layer
from algorithms.models import Model, build
from algorithms.models.objectives import cross_entropy
from tests.algorithms.gradients import naive
from tests.algorithms.gradients.zoo import Spec, Wired, problem, rows


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


@pytest.mark.parametrize("width", range(2, 8))
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
    return model, Engine(model, input_shape=(width,))


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


def test_products_of_fewer_bits_are_off_during_a_pass_and_then_as_before() -> None:
    torch.backends.cudnn.allow_tf32 = True
    seen = []

    def forward(self: Wired, x: Tensor) -> Tensor:
        seen.append(torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
        return self.layer(x)

    made = problem(Spec(lambda: Wired(forward, layer=nn.Linear(4, 2)), (4,)))
    engine = made.engine()
    seen.clear()
    engine.clipped_sum(*made.arguments, L2(1.0))
    assert seen == [False] * len(seen) and seen
    assert torch.backends.cudnn.allow_tf32
    with in_full_precision():
        assert not torch.backends.cudnn.allow_tf32


def test_products_of_fewer_bits_are_off_until_the_last_of_several_passes_has_ended() -> None:
    """Trials of a search run in threads, and the settings are those of the process."""
    torch.backends.cudnn.allow_tf32 = True
    one, other = in_full_precision(), in_full_precision()
    for enters in (one, other):
        enters.__enter__()
    one.__exit__(None, None, None)
    assert not torch.backends.cudnn.allow_tf32
    other.__exit__(None, None, None)
    assert torch.backends.cudnn.allow_tf32


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

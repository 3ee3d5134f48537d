"""Learned features: what they ask, what they make of it, and that training goes on behind them."""

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from algorithms.core import training
from algorithms.core.learned_features import FeatureLearner, learn_buffers, schedule_of
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.features import FEATURES, from_settings
from algorithms.gradients import L2, LinearRecords, replay
from algorithms.models import Model, build
from algorithms.models.feature_transforms import (
    Standardisation,
    buffers,
    front,
    in_front,
    install_buffers,
    shape_after,
)
from algorithms.models.networks import UnitRecords
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.filters import ScheduleFilter
from algorithms.privacy.barrier import frozen_prefix as frozen_prefix_module
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig
from algorithms.privacy.barrier.frozen_prefix import frozen_prefix, has_frozen_prefix
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian
from algorithms.privacy.mechanisms.sampling import FullBatch
from algorithms.target_scale import TargetScale
from tests.support import barriers, bench
from tests.support.bench import MadeUp, algorithm
from tests.support.costs import costs_once
from tests.support.engines import engines_once
from tests.support.refusals import refused_as

__all__ = ["costs_once", "engines_once"]

SHAPE, COUNT = (4, 3, 3), 400
QUIET = 1e-4
OF_ANY_RECORDS = [name for name in FEATURES if name != "histograms"]  # which are of tables
SETTINGS: dict[str, dict[str, Any]] = {
    "whitened": {
        "groups": 2,
        "moment_bound": 50.0,
        "ridge": 1e-6,
        "mean_noise": QUIET,
        "moment_noise": QUIET,
    },
    "principal_components": {"components": 5, "noise": QUIET},
    "standardised": {"noise": QUIET, "mean_bound": 50.0, "square_bound": 500.0},
    "centred": {"mean_noise": QUIET, "moment_noise": QUIET},
    "preconditioned": {"noise": QUIET},
    "target_scale": {"noise": QUIET},
}


def kind(name: str, **changes: Any) -> FeatureLearner:
    return from_settings({"name": name} | SETTINGS[name] | changes)


def records(count: int = COUNT, *, seed: int = 0) -> MadeUp:
    """Maps whose channels are correlated, of different size and off centre."""
    draw = np.random.default_rng(seed)
    mixing = draw.normal(size=(4, 4)) * np.array([3.0, 1.0, 0.5, 0.1])[:, None]
    maps = np.einsum("ij,njhw->nihw", mixing, draw.normal(size=(count, *SHAPE))) + 1.0
    return MadeUp(maps.astype(np.float32), draw.integers(0, 3, count))


def model_behind(features: FeatureLearner) -> Model:
    module = features.module(SHAPE)
    if isinstance(features, TargetScale):
        return in_front(module, build("linear", input_shape=SHAPE, classes=1, seed=1))
    return in_front(module, build("softmax", input_shape=shape_after(module, SHAPE), classes=3, seed=1))


def barrier(features: FeatureLearner, data: MadeUp, *, count: int | None = COUNT, seed: int = 1) -> Barrier:
    events = schedule_of(features, SHAPE, count, QUIET)
    privacy_filter = ScheduleFilter(events, Budget(1e9, 1e-5))
    model, source = model_behind(features), seeded_generator(seed)
    if isinstance(features, TargetScale):
        data = MadeUp(data.features, (data.labels - 1.0).astype(np.float32))
    return Barrier(
        data,
        model,
        privacy_filter=privacy_filter,
        generator=source,
        delta=1e-5,
        trace=Trace(),
        compute=ComputeConfig(number=count),
    )


def mapped(features: FeatureLearner, tensors: dict[str, Tensor], inputs: NDArray[np.float32]) -> Tensor:
    module = features.module(SHAPE)
    module.load_state_dict(tensors)
    found: Tensor = module(torch.from_numpy(inputs))
    return found


def test_whitened_channels_are_centred_and_have_no_correlation_left() -> None:
    features, data = kind("whitened"), records()
    tensors = learn_buffers(features, barrier(features, data), COUNT, QUIET)
    found = mapped(features, tensors, data.features).transpose(0, 1).flatten(1)
    normal = functional.group_norm(torch.from_numpy(data.features), 2)
    torch.testing.assert_close(tensors["mean"], normal.mean(dim=0), rtol=0, atol=1e-3)
    torch.testing.assert_close(found @ found.T / found.shape[1], torch.eye(4), rtol=0, atol=5e-3)


def test_principal_components_are_those_of_records_of_norm_1() -> None:
    features, data = kind("principal_components"), records()
    tensors = learn_buffers(features, barrier(features, data), COUNT, QUIET)
    unit = functional.normalize(torch.from_numpy(data.features).flatten(1), dim=1).double()
    first = torch.linalg.eigh(unit.T @ unit).eigenvectors[:, -5:].flip(1)
    overlap = (tensors["components"].double() * first).sum(dim=0).abs()
    torch.testing.assert_close(overlap, torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-3)
    expected = torch.from_numpy(data.features).flatten(1) @ tensors["components"]
    torch.testing.assert_close(mapped(features, tensors, data.features), expected)


def test_centred_records_have_unit_length_mean_0_and_are_whitened_to_a_power() -> None:
    features, data = kind("centred", power=0.5, ridge=1e-9), records()
    found = mapped(features, learn_buffers(features, barrier(features, data), COUNT, QUIET), data.features)
    torch.testing.assert_close(found.mean(dim=0), torch.zeros(36), rtol=0, atol=1e-2)
    torch.testing.assert_close(found.T @ found / COUNT, torch.eye(36), rtol=0, atol=2e-2)


@pytest.mark.parametrize("noise", [1.0, 20.0, 100.0, 1000.0])
def test_the_mean_of_few_records_is_nearer_to_theirs_than_its_noise_says(noise: float) -> None:
    """By James and Stein the error in d numbers is at most d - (d - 2)^2 / (d - 2 + l) variances of their noise, where
    l is the square of the true mean in these.
    """
    features, data = kind("centred", mean_noise=noise, moment_noise=None), records()
    true = functional.normalize(torch.from_numpy(data.features).flatten(1), dim=1).mean(dim=0)
    learnt = [
        learn_buffers(features, barrier(features, data, seed=seed), COUNT, QUIET)["mean"]
        for seed in range(40)
    ]
    errors = [float((mean - true).square().sum()) for mean in learnt]
    variance = (noise / COUNT) ** 2
    at_most = variance * (36 - 34**2 / (34 + float(true.square().sum()) / variance))
    assert np.mean(errors) < 1.15 * at_most  # and four standard deviations of a mean of 40


def test_preconditioned_records_of_unit_length_are_as_long_in_all_directions() -> None:
    features, data = kind("preconditioned", length=3.0), records()
    mapped_records = mapped(
        features, learn_buffers(features, barrier(features, data), COUNT, QUIET), data.features
    )
    moment = mapped_records.T @ mapped_records / COUNT
    torch.testing.assert_close(moment, torch.eye(36) * 3.0**2 / 36, rtol=0, atol=5e-3)


def test_directions_that_are_lost_in_noise_are_not_amplified() -> None:
    features, data = kind("preconditioned", noise=1e4, length=3.0), records()
    matrix = learn_buffers(features, barrier(features, data), COUNT, QUIET)["matrix"]
    assert torch.linalg.cond(matrix) < 2.0  # sqrt(3), where the noise's eigenvalues end at twice its scale
    lengths = torch.linalg.vector_norm(mapped(features, {"matrix": matrix}, data.features), dim=1)
    assert 1.5 < float(lengths.mean()) < 6.0


@pytest.mark.parametrize(("model", "classes"), [("softmax", 3), ("logistic", 2), ("unit_linear", 3)])
def test_a_linear_head_starts_at_the_sums_of_its_classes(model: str, classes: int) -> None:
    features, data = kind("centred", moment_noise=None, head_noise=QUIET, head_length=2.0), records()
    data = MadeUp(data.features, data.labels % classes)
    asked = barrier(features, data)
    tensors = learn_buffers(features, asked, COUNT, QUIET)
    module = features.module(SHAPE)
    made = in_front(module, build(model, input_shape=shape_after(module, SHAPE), classes=classes, seed=1))
    behind = install_buffers(made, tensors)
    start = behind.by_name(features.start(asked, behind))  # type: ignore[attr-defined]
    unit = functional.normalize(mapped(features, tensors, data.features), dim=1)
    if model == "unit_linear":  # which sees a constant beside it
        unit = functional.normalize(functional.pad(unit, (0, 1), value=0.3), dim=1)
    labels = torch.from_numpy(data.labels)
    sums = torch.stack([unit[labels == c].sum(dim=0) for c in range(classes)])
    sums = sums[1:] - sums[:1] if model == "logistic" else sums
    weight = next(tensor for tensor in start.values() if tensor.ndim == 2)
    expected = 2.0 * sums / (sums.norm() / len(sums) ** 0.5)
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-3)
    assert all(not tensor.any() for tensor in start.values() if tensor.ndim == 1)


def test_a_network_has_no_head_that_class_sums_can_start() -> None:
    features = kind("centred", head_noise=QUIET)
    with refused_as("head_not_linear"):
        features.check(build("tanh_cnn", input_shape=(1, 28, 28), classes=3, seed=1))  # type: ignore[attr-defined]


def test_standardised_channels_have_mean_0_and_mean_square_1() -> None:
    features, data = kind("standardised"), records()
    found = mapped(features, learn_buffers(features, barrier(features, data), COUNT, QUIET), data.features)
    torch.testing.assert_close(found.mean(dim=(0, 2, 3)), torch.zeros(4), rtol=0, atol=5e-3)
    torch.testing.assert_close(found.square().mean(dim=(0, 2, 3)), torch.ones(4), rtol=0, atol=5e-3)


@pytest.mark.parametrize("name", OF_ANY_RECORDS)
def test_a_record_is_mapped_by_itself(name: str) -> None:
    features, data = kind(name), records(20)
    tensors = learn_buffers(features, barrier(features, data), COUNT, QUIET)
    together = mapped(features, tensors, data.features)
    alone = torch.cat([mapped(features, tensors, data.features[i : i + 1]) for i in range(20)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    module = features.module(SHAPE)
    assert together.shape[1:] == shape_after(module, SHAPE)
    assert front(module.settings, SHAPE).settings == module.settings


@pytest.mark.parametrize("name", OF_ANY_RECORDS)
@pytest.mark.parametrize("count", [COUNT, None])
def test_what_is_asked_is_what_was_planned(name: str, count: int | None) -> None:
    features = kind(name)
    asked = barrier(features, records(), count=count)
    learn_buffers(features, asked, count, QUIET)
    with refused_as("no_further_release", BudgetRefusedError):
        learn_buffers(features, asked, count, QUIET)


@pytest.mark.parametrize("name", OF_ANY_RECORDS)
def test_a_huge_record_moves_the_sums_by_its_bound_alone(name: str) -> None:
    features, data = kind(name, **{key: 1.0 for key in SETTINGS[name] if key.endswith("bound")}), records()
    more = MadeUp(
        np.concatenate([data.features, np.full((1, *SHAPE), 1e15, np.float32)]), np.append(data.labels, 0)
    )
    sums = [answers(features, side) for side in (data, more)]
    bounds = [release.clipping.sensitivity for release in features.releases(SHAPE)]
    for before, after, bound in zip(*sums, bounds, strict=True):
        assert float((after - before).norm()) <= bound * (1 + 1e-6)


def answers(features: FeatureLearner, data: MadeUp) -> list[Tensor]:
    """What the barrier answers, with the first answer's use in the second question held fixed."""
    asked, found = barrier(features, data), []

    class Kept:
        input_shape = SHAPE

        def total(self, *given: Any, **named: Any) -> Tensor:
            found.append(asked.total(*given, **named))
            return torch.zeros_like(found[-1])

        def histograms(self, *given: Any, **named: Any) -> Tensor:
            found.append(asked.histograms(*given, **named))
            return torch.zeros_like(found[-1])

        def moment(self, *given: Any, **named: Any) -> Tensor:
            found.append(asked.moment(*given, **named))
            return torch.eye(len(found[-1]), dtype=torch.float64)

    features.learn(Kept(), SHAPE, COUNT)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("name", "shape", "changes", "code"),
    [
        ("whitened", (12,), {}, "whiten_maps"),
        ("whitened", (4, 3, 3), {"groups": 3}, "whiten_maps"),
        ("standardised", (12,), {}, "standardise_maps"),
        ("principal_components", (3,), {}, "too_many_components"),
        ("preconditioned", (4097,), {}, "too_many_for_moment"),
        ("centred", (4097,), {}, "too_many_for_moment"),
    ],
)
def test_records_of_another_shape_are_refused(
    name: str, shape: tuple[int, ...], changes: dict[str, Any], code: str
) -> None:
    with refused_as(code):
        kind(name, **changes).releases(shape)


def test_unknown_features_are_refused_with_the_known_ones() -> None:
    with refused_as("name_unknown", name="fourier"):
        from_settings({"name": "fourier"})


def facts(model: Model) -> PlanningFacts:
    return PlanningFacts(COUNT, model.parameter_count, len(model.layers), 3)


def target(features: FeatureLearner) -> Target:
    return Target(Budget(3.0, 1e-4), prior_events=tuple(schedule_of(features, SHAPE, COUNT, 100.0)))


def plan(features: FeatureLearner) -> Plan:
    method = algorithm("dp_sgd", steps=4, expected_batch_size=100)
    return method.plan(target(features), facts(model_behind(features)))


def loud(name: str) -> FeatureLearner:
    return kind(name, **{key: 20.0 for key in SETTINGS[name] if key.endswith("noise")})


@pytest.mark.parametrize("name", OF_ANY_RECORDS)
def test_learning_is_paid_out_of_the_run_s_budget(name: str) -> None:
    whole, model = plan(loud(name)), model_behind(loud(name))
    facts = replace(whole.facts)
    alone = algorithm("dp_sgd", steps=4, expected_batch_size=100).plan(Target(Budget(3.0, 1e-4)), facts)
    assert whole.noise_multiplier > alone.noise_multiplier
    assert whole.epsilon["pld"] <= 3.0
    assert whole.schedule[: len(whole.target.prior_events)] == list(whole.target.prior_events)
    assert Plan.from_document(whole.to_document()) == whole
    assert model.parameter_count == facts.parameters
    with pytest.raises(RefusedError):
        plan(kind(name))


def trained(
    features: FeatureLearner,
    folder: Path,
    *,
    by: str = "dp_sgd",
    stop_after: int | None = None,
    **settings: Any,
) -> training.Trained:
    wanted = {"expected_batch_size": 100} | (settings or {"steps": 4})
    method, model = algorithm(by, **wanted), model_behind(features)
    return bench.trained(
        method,
        method.plan(target(features), facts(model)),
        model,
        folder,
        records=records,
        features=features,
        stop_after=stop_after,
    )


def test_a_run_taken_up_has_learned_the_same(tmp_path: Path) -> None:
    features = loud("whitened")
    whole = trained(features, tmp_path / "whole")
    with pytest.raises(bench.StoppedError):
        trained(features, tmp_path / "broken", stop_after=2)
    again = trained(features, tmp_path / "broken")
    assert torch.equal(whole.state.parameters, again.state.parameters)
    assert whole.trace.rows == again.trace.rows
    assert len(buffers(whole.model)) > 0
    for kept, found in zip(buffers(whole.model).values(), buffers(again.model).values(), strict=True):
        assert torch.equal(kept, found)
    assert [row.kind for row in whole.trace.rows[: len(features.releases(SHAPE))]].count("total") > 0


def test_a_run_without_privacy_learns_them_too(tmp_path: Path) -> None:
    found = trained(loud("standardised"), tmp_path, by="non_private", steps=2)
    assert [row.kind for row in found.trace.rows] == ["total", "total", "gradient", "gradient"]


def test_importance_sampling_goes_on_behind_them_with_what_they_left(tmp_path: Path) -> None:
    """A budget spent on the way pays for them, and a run taken up draws by the norms that it had."""

    def run(folder: str, *, stop_after: int | None = None) -> training.Trained:
        own = {"epochs": 2, "expected_batch_size": 100, "floor": 0.001, "oversampling": 2.0}
        return trained(loud("standardised"), tmp_path / folder, by="dpis", stop_after=stop_after, **own)

    whole = run("whole")
    assert [row.kind for row in whole.trace.rows].count("gradient") == 8
    with pytest.raises(bench.StoppedError):
        run("broken", stop_after=3)
    again = run("broken")
    assert torch.equal(whole.state.parameters, again.state.parameters)
    assert whole.trace.rows == again.trace.rows


@pytest.mark.parametrize("name", [name for name in OF_ANY_RECORDS if name != "target_scale"])
def test_what_is_taken_ahead_of_the_steps_gives_the_same_gradients(name: str) -> None:
    features, data = kind(name), records()
    model = install_buffers(
        model_behind(features), learn_buffers(features, barrier(features, data), COUNT, QUIET)
    )
    head, seen = frozen_prefix(model, data, ComputeConfig(number=COUNT), physical_batch=64)
    assert head is not model
    assert len(seen.features) == COUNT
    answers = [gradient(model, data), gradient(head, seen)]
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)
    assert frozen_prefix(model, data, ComputeConfig(), physical_batch=64) == (model, data)


def test_records_are_mapped_in_passes_of_the_size_that_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = model_behind(kind("standardised")), set[int]()
    compute = ComputeConfig(number=COUNT, physical_batch=16)
    some = records(COUNT - 5)  # which fill no whole number of passes
    asked, forward = barriers.barrier(some, model, compute=compute), Standardisation.forward

    def noted(self: Standardisation, inputs: Tensor) -> Tensor:
        sizes.add(len(inputs))
        return forward(self, inputs)

    monkeypatch.setattr(Standardisation, "forward", noted)
    head, _ = asked._Barrier__unnoised.precompute_frozen_prefix(model)  # type: ignore[attr-defined]
    assert head is not model
    assert sizes == {1, 16}  # one record of zeros shows the shape of what follows


def test_a_public_number_decides_whether_maps_are_held() -> None:
    features, data = kind("standardised"), records()
    model = install_buffers(
        model_behind(features), learn_buffers(features, barrier(features, data), COUNT, QUIET)
    )
    most = 10**6 // (4 * math.prod(SHAPE))
    held = [
        frozen_prefix(model, data, ComputeConfig(memory_mb=1, number=n), physical_batch=64)[0] is not model
        for n in (most, most + 1)
    ]
    assert held == [True, False]


@pytest.mark.parametrize("public", [COUNT, None])
def test_what_a_run_holds_of_its_records_follows_from_public_numbers(
    public: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a private number of records nothing is held, however few there are; of a public one the same for any."""
    features = loud("standardised")
    taken: set[str] = set()
    model, method = model_behind(features), algorithm("dp_gd", steps=2)
    before = tuple(schedule_of(features, SHAPE, public, 100.0))
    facts = PlanningFacts(public, model.parameter_count, len(model.layers), 3)
    plan = method.plan(Target(Budget(3.0, 1e-4), prior_events=before), facts)

    def noted(owner: Any, way: str) -> None:
        real = getattr(owner, way)
        monkeypatch.setattr(owner, way, lambda *of, **named: taken.add(way) or real(*of, **named))

    noted(frozen_prefix_module, "_apply_maps")
    noted(LinearRecords, "clipped_sum")
    for there in (3, COUNT, COUNT + 1, 4000):  # of the last, the features alone need a megabyte
        taken.clear()
        bench.trained(
            method,
            plan,
            model,
            tmp_path / str(there),
            records=lambda there=there: records(there),
            features=features,
            compute=ComputeConfig(memory_mb=1),
        )
        assert taken == (set() if public is None else {"_apply_maps", "clipped_sum"})


@pytest.mark.parametrize(
    ("name", "settings", "layers"),
    [
        ("unit_linear", {}, ["Linear"]),
        ("scatter_linear", {"groups": 2}, ["Linear"]),
        ("softmax", {}, ["Flatten", "Linear"]),
    ],
)
def test_a_model_s_own_first_maps_are_taken_ahead_too(
    name: str, settings: dict[str, Any], layers: list[str]
) -> None:
    features, data = kind("whitened"), records()
    model = in_front(
        front({"kind": "whitening", "groups": 2}, SHAPE),
        build(name, input_shape=SHAPE, classes=3, seed=0, settings=settings),
    )
    model = install_buffers(model, learn_buffers(features, barrier(features, data), COUNT, QUIET))
    head, seen = frozen_prefix(model, data, ComputeConfig(number=COUNT), physical_batch=64)
    assert [type(layer).__name__ for layer in head.module.children()] == layers
    assert seen.features.shape == ((COUNT, *SHAPE) if name == "softmax" else (COUNT, 37))
    torch.testing.assert_close(gradient(model, data), gradient(head, seen), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by", ["dp_sgd", "dpis"])
def test_a_model_s_first_maps_are_computed_once_without_learned_features_too(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory holds the results, by public numbers; every bit of a run is that of one that maps in each pass."""
    model = build("scatter_linear", input_shape=SHAPE, classes=3, seed=0, settings={"groups": 2})
    count, counted = 8000, list[int]()
    settings = {"steps": 6} if by == "dp_sgd" else {"epochs": 1, "floor": 0.001, "oversampling": 2.0}
    method = algorithm(by, expected_batch_size=2000, **settings)
    plan = method.plan(Target(Budget(3.0, 1e-4)), PlanningFacts(count, model.parameter_count, 1, 3))
    forward = UnitRecords.forward

    def noted(self: UnitRecords, inputs: Tensor) -> Tensor:
        counted.append(len(inputs))
        return forward(self, inputs)

    monkeypatch.setattr(UnitRecords, "forward", noted)
    monkeypatch.setattr(replay, "RECORDED", 10_000)  # a replay calls no `forward`

    def run(memory_mb: int) -> tuple[training.Trained, int]:
        counted.clear()
        compute = ComputeConfig(memory_mb=memory_mb, physical_batch=64)
        found = bench.trained(
            method, plan, model, tmp_path / str(memory_mb), records=lambda: records(count), compute=compute
        )
        return found, counted.count(64)

    (held, once), (not_held, often) = run(2), run(1)  # 8000 records of 37 numbers need 1.2 MB
    assert once <= count / 64 + 10 < often
    assert torch.equal(held.state.parameters, not_held.state.parameters)
    assert held.trace.rows == not_held.trace.rows


def test_learned_layers_and_unknown_ones_in_front_are_left_in_the_model() -> None:
    data, compute = records(), ComputeConfig(number=COUNT)
    for first in (nn.GroupNorm(2, 4), nn.Tanh()):
        module = nn.Sequential(first, nn.Flatten(), nn.Linear(math.prod(SHAPE), 3))
        model = replace(build("softmax", input_shape=SHAPE, classes=3, seed=0), module=module)
        assert not has_frozen_prefix(model)
        assert frozen_prefix(model, data, compute, physical_batch=64) == (model, data)


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda _module, _inputs, outputs: 0.5 * outputs)


def with_a_parameter(module: nn.Module) -> None:
    module.register_parameter("shift", nn.Parameter(torch.zeros(3)))


def with_another_forward(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda inputs: 0.5 * forward(inputs)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (hooked, ""),
        (hooked, "0"),
        (with_a_parameter, ""),
        (with_another_forward, ""),
        (with_another_forward, "0"),
    ],
)
def test_a_sequence_that_does_more_than_its_layers_is_not_cut(
    change: Callable[[nn.Module], None], place: str
) -> None:
    model = normalised_in_front(nn.Flatten())
    assert has_frozen_prefix(model)
    change(model.module.get_submodule(place))
    assert not has_frozen_prefix(model)


class Lookup(nn.Module):
    """Takes numbers from -10 to 10 alone, as its inputs are after a normalisation of 36 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-10.0, 10.0, 21), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.get_buffer("table")[inputs.nan_to_num().round().long() + 10].flatten(1)


def test_a_model_whose_other_layers_need_what_the_first_ones_give_is_left_whole() -> None:
    """They refuse made-up records that are not normalised, which is seen after the run is paid for."""
    data, model = records(), normalised_in_front(Lookup())
    whole = barriers.barrier(data, model, compute=ComputeConfig(number=COUNT))
    assert whole.with_model(model) is whole
    features = kind("whitened")
    behind = in_front(front({"kind": "whitening", "groups": 2}, SHAPE), model)
    learned = install_buffers(behind, learn_buffers(features, barrier(features, data), COUNT, QUIET))
    assert whole.with_model(learned).input_shape == SHAPE


def normalised_in_front(layer: nn.Module) -> Model:
    """A model that normalises each record before this layer, which flattens it."""
    module = nn.Sequential(nn.GroupNorm(1, 4, affine=False), layer, nn.Linear(math.prod(SHAPE), 3))
    return replace(build("softmax", input_shape=SHAPE, classes=3, seed=0), module=module)


def gradient(model: Model, data: Any) -> Tensor:
    point, terms = model.initial_parameters() + 0.1, {"clipping": L2(1.0), "noise": Gaussian(1e-3)}
    asked = barriers.barrier(data, model, compute=ComputeConfig())
    return asked.gradient(point, sampling=FullBatch(), divisor=COUNT, **terms)  # type: ignore[arg-type]


def test_mapped_records_go_with_the_barrier_that_held_them() -> None:
    features, data = kind("whitened"), records()
    first = barrier(features, data)
    model = install_buffers(model_behind(features), learn_buffers(features, first, COUNT, QUIET))
    gc.disable()  # nothing but the last reference may have to go
    try:
        second = first.with_model(model)
        gone = weakref.ref(second)
        del second
        assert gone() is None
    finally:
        gc.enable()


def test_what_no_file_can_give_settings_of_is_refused() -> None:
    with refused_as("settings_no_file", name="torch.nn:Linear"):
        from_settings({"name": "torch.nn:Linear"})

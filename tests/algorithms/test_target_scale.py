"""The released scale of a number to predict: of known histograms, in training and in results."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.core.learned_features import NoisyCount, learn_buffers
from algorithms.core.plan import Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.training import ResumableRun, train
from algorithms.features import from_settings as features_of
from algorithms.gradients import L2, Engine
from algorithms.methods import from_settings
from algorithms.model_facts import ModelFacts
from algorithms.models import Model, build
from algorithms.models.feature_transforms import in_front, install_buffers
from algorithms.models.saved import architecture
from algorithms.noise_limits import target_share
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.gaussian import gaussian_epsilon, noise_for_share
from algorithms.privacy.barrier.barrier import ComputeConfig
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import NoNoise
from algorithms.target_scale import centre_and_scale, histogram_edges, released_mean
from tests.support.barriers import Free, barrier
from tests.support.bench import MadeUp
from tests.support.device import DEVICE
from tests.support.refusals import refused_as
from tests.support.soak import soak_but

FEATURES = features_of({"name": "target_scale", "noise": 5.0})


def scaled_model(width: int) -> Model:
    model = build("linear", input_shape=(width,), classes=1, seed=0)
    return in_front(FEATURES.module((width,)), model)


EDGES = histogram_edges(24.0)
"""As for 400 records at epsilon 1."""


def counts_of(labels: np.ndarray, edges: torch.Tensor = EDGES) -> torch.Tensor:
    return torch.from_numpy(np.histogram(labels, edges.numpy())[0].astype(np.float64))


def by_noisy_counts(
    labels: np.ndarray, noise: float, draw: np.random.Generator, *, is_exact_later: bool = False
) -> tuple[float, float]:
    edges = histogram_edges(len(labels) / noise)
    noisy = counts_of(labels, edges) + torch.from_numpy(draw.normal(0, noise, len(edges) - 1))
    return centre_and_scale(noisy, edges, noise, len(labels), is_exact_later=is_exact_later)


@pytest.mark.parametrize("deviations", [1e-3, 24.0, 119.0, 1e3, 1e9])
def test_cells_cover_the_range_finest_at_its_ends_and_its_middle(deviations: float) -> None:
    edges = histogram_edges(deviations)
    widths = edges.diff()
    assert (float(edges[0]), float(edges[-1])) == (-1.0, 1.0) and bool((widths > 1e-6).all())
    assert len(edges) <= 300 and float(widths.max()) < 2 / 12 + 1e-9
    for value in (-1.0, 0.0, 1.0):
        beside = widths[(edges[1:] >= value) & (edges[:-1] <= value)]
        assert beside.tolist() == pytest.approx([2e-6] * len(beside), rel=1e-6)


def test_more_records_for_the_noise_have_more_cells() -> None:
    steps = [float(histogram_edges(deviations).diff().max()) for deviations in (24, 120, 240, 1e4)]
    assert steps == sorted(steps, reverse=True) and steps[0] > 7 * steps[-1]


@pytest.mark.parametrize("too_wide", soak_but([10.0, 1e5], [10.0, 1e3, 1e5]))
@pytest.mark.parametrize("kind", ["bell", "skewed"])
def test_a_range_that_is_far_too_wide_does_not_stretch_the_scale(kind: str, too_wide: float) -> None:
    """Of 1,200 records at epsilon 1, in the worst of 20 releases, by the histogram alone: the centre in deviations."""
    noise, far, scales = noise_for_share(0.05, epsilon=1.0), [], []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        number = draw.normal(0.0, 1.0, 1200) if kind == "bell" else draw.gamma(2.0, 0.7, 1200)
        labels = 2.0 * number / too_wide - (kind == "skewed")
        centre, scale = by_noisy_counts(labels.clip(-1, 1), noise, draw)
        far.append((centre - labels.mean()) / labels.std())
        scales.append(scale / labels.std())
    assert np.abs(far).max() < 1.0 and min(scales) > 0.5 and np.median(scales) < 2.5, (far, scales)


@pytest.mark.parametrize(
    ("mean", "deviation"), [(-0.9, 0.05), (-0.5, 0.2), (0.2, 0.25), (0.3, 0.17), (0.6, 0.1)]
)
def test_the_scale_is_that_of_the_histogram(mean: float, deviation: float) -> None:
    labels = np.random.default_rng(0).normal(mean, deviation, 20_000).clip(-1, 1)
    centre, scale = by_noisy_counts(labels, 30.0, np.random.default_rng(1))
    assert centre == pytest.approx(labels.mean(), abs=0.3 * deviation + 0.02)
    assert 0.8 < scale / (1.5 * labels.std()) < 1.6


def test_noise_alone_does_not_stretch_the_scale() -> None:
    """A number near its lowest, as with an outlier far away, in a range that is a hundred times too wide."""
    counts = torch.zeros(len(EDGES) - 1, dtype=torch.float64)
    counts[0] = 1000.0
    counts += torch.from_numpy(np.random.default_rng(2).normal(0, 50.0, len(counts))).clamp(max=60.0)
    assert centre_and_scale(counts, EDGES, noise=50.0, records=1000.0) == (
        pytest.approx(-1.0, abs=0.01),
        pytest.approx(0.0, abs=0.01),
    )


@pytest.mark.parametrize("kind", soak_but(["skewed", "even"], ["skewed", "bell", "even"]))
def test_the_centre_of_480_records_is_seldom_far_off(kind: str) -> None:
    """By the usual noise at epsilon 1, in the worst of 150 releases, and in the mean of the squares."""
    errors = []
    for seed in range(150):
        draw = np.random.default_rng(seed)
        made = {
            "skewed": draw.lognormal(-3.5, 1.0, 480) - 1.0,
            "bell": draw.normal(0.3, 0.25, 480),
            "even": draw.uniform(-0.9, 0.9, 480),
        }
        labels = made[kind].clip(-1, 1)
        noise = noise_for_share(target_share(480, 1.0), epsilon=1.0)
        errors.append((by_noisy_counts(labels, noise, draw)[0] - labels.mean()) / labels.std())
    assert np.abs(errors).max() < 1.6, np.abs(errors).max()
    assert np.square(errors).mean() < 0.4**2, np.square(errors).mean()


def test_the_mean_is_exact_where_most_numbers_are_zero() -> None:
    """Of 480 records at epsilon 1, in the mean of the squares, and by the histogram alone it is not."""
    noise, errors = noise_for_share(target_share(480, 1.0), epsilon=1.0), []
    mean_noise = noise_for_share(0.05, epsilon=1.0)
    with_mean = features_of({"name": "target_scale", "noise": noise, "mean_noise": mean_noise})
    for features in (features_of({"name": "target_scale", "noise": noise}), with_mean):
        squares = []
        for seed in range(40):
            labels = np.random.default_rng(seed).poisson(0.2, 480) / 5.0 - 1.0  # of at most 10
            records = MadeUp(np.zeros((480, 1), np.float32), labels.astype(np.float32))
            asked = barrier(records, scaled_model(1), privacy_filter=Free(), generator=seeded_generator(seed))
            centre = features.learn(asked, (1,), 480.0)["centre"]
            squares.append(((float(centre) - labels.mean()) / labels.std()) ** 2)
        errors.append(float(np.mean(squares)))
    assert errors[0] > 1.5 * errors[1] and errors[1] < 0.01, errors


def test_a_mean_is_that_of_the_clamped_numbers_and_costs_its_share() -> None:
    features = features_of({"name": "target_scale", "noise": 1e-3, "mean_noise": 40.0})
    labels = np.random.default_rng(0).lognormal(-2.0, 1.0, 3000).clip(0, 2).astype(np.float32) - 1.0
    free = Free()
    asked = barrier(MadeUp(np.zeros((3000, 1), np.float32), labels), scaled_model(1), privacy_filter=free)
    learned = features.learn(asked, (1,), 3000.0)
    scale = float(learned["scale"])
    edges = histogram_edges(3000 / 1e-3)
    by_histogram, same = centre_and_scale(
        counts_of(labels, edges), edges, noise=1e-3, records=3000.0, is_exact_later=True
    )
    assert scale == pytest.approx(same, abs=1e-4)
    reach = 1.5 * scale * math.sqrt(3000 / (40.0 * 15.0))
    low, high = max(-1.0, by_histogram - reach), by_histogram + reach
    noise = (high - low) / 2 * 40.0 / 3000
    assert float(learned["centre"]) == pytest.approx(labels.clip(low, high).mean(), abs=4 * noise)
    assert [event.noise_multiplier for event in free.events] == [1e-3, 40.0]
    assert len(features.releases((1,))) == 2


@pytest.mark.parametrize("kind", soak_but(["skewed"], ["counts", "skewed", "even"]))
def test_a_noisy_number_of_records_hardly_shifts_the_mean(kind: str) -> None:
    """Of 400 records at epsilon 1, whose number is known to 100: in the mean of the squares, beside that of an exact
    number by the same noise."""
    noise, errors = noise_for_share(0.05, epsilon=1.0), dict[int | None, list[float]]()
    features = features_of({"name": "target_scale", "noise": noise, "mean_noise": noise})
    for records, seed in itertools.product((400, None), range(60)):
        draw = np.random.default_rng(seed)
        made = {
            "counts": draw.poisson(3.0, 400) / 25.0 - 1.0,
            "skewed": draw.gamma(2.0, 0.05, 400).clip(0.0, 2.0) - 1.0,
            "even": draw.uniform(-0.9, 0.9, 400),
        }
        labels = made[kind].astype(np.float32)
        rows = MadeUp(np.zeros((400, 1), np.float32), labels)
        asked = barrier(rows, scaled_model(1), privacy_filter=Free(), generator=seeded_generator(seed))
        centre = learn_buffers(features, asked, records, 100.0)["centre"]  # type: ignore[arg-type]
        errors.setdefault(records, []).append(((float(centre) - labels.mean()) / labels.std()) ** 2)
    assert np.mean(errors[None]) < 4.0 * np.mean(errors[400]), errors


class _Exact:
    """A barrier that answers without noise, and notes each answer and its bound."""

    def __init__(self, labels: np.ndarray) -> None:
        records = MadeUp(np.zeros((len(labels), 1), np.float32), labels.astype(np.float32))
        self._asked, self.seen = barrier(records, scaled_model(1)), []

    def total(self, statistic: Any, *, bound: Any, noise: Any) -> torch.Tensor:
        answer = self._asked.total(statistic, bound=bound, noise=NoNoise())
        self.seen.append((float(answer), bound.norm))
        return answer


@pytest.mark.parametrize("value", [1.0, 1e30, -math.inf, math.nan])
def test_no_record_moves_a_mean_by_more_than_its_bound(value: float) -> None:
    """Whatever it holds and whatever was released before; and the mean stays in the range."""
    labels = np.random.default_rng(0).uniform(-1, 1, 9)
    numbers = (9.0, NoisyCount(9.0, noise=100.0))
    for centre, scale, noise, number in itertools.product(
        (-1.0, 0.3, 1.0), (0.02, 3.0), (1e-3, 10.0, 1e6), numbers
    ):
        sums = []
        for some in (labels, np.append(labels, value)):
            asked = _Exact(some)
            mean = released_mean(asked, centre, scale, noise, number)  # type: ignore[arg-type]
            assert -1.0 <= mean <= 1.0
            sums += asked.seen
        (without, bound), (with_it, _) = sums
        assert abs(with_it - without) <= bound * (1 + 1e-9), (centre, scale, noise, number)


def test_a_count_of_no_record_gives_a_number_in_the_range() -> None:
    nothing = torch.zeros(len(EDGES) - 1)
    for counts in (nothing, nothing - 50.0):
        centre, scale = centre_and_scale(counts, EDGES, noise=1e6, records=0.0)
        assert -1.0 <= centre <= 1.0 and 2e-6 <= scale <= 1.5


def test_the_histogram_costs_its_share() -> None:
    noise = noise_for_share(0.05, epsilon=1.0)
    assert gaussian_epsilon(1.0 / (noise * math.sqrt(0.05)), 1e-5) == pytest.approx(1.0, rel=1e-6)
    assert FEATURES.releases((3,))[0].event() is not None


def test_the_engine_clips_errors_on_the_scale() -> None:
    model = install_buffers(scaled_model(3), {"centre": torch.tensor(0.5), "scale": torch.tensor(0.25)})
    draw = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(50, 3, generator=draw), torch.rand(50, generator=draw)
    point = torch.randn(4, generator=draw)
    wide = torch.cat([rows, torch.ones(50, 1)], dim=1).double()
    errors = wide @ point.double() - (labels.double() - 0.5) / 0.25
    added = errors[:, None] * wide
    expected = (added * (0.7 / added.norm(dim=1, keepdim=True)).clamp(max=1.0)).sum(0)
    found = Engine(model, input_shape=(3,)).clipped_sum(point, rows, labels, L2(0.7))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    outputs = model.outputs(model.by_name(point), rows)
    assert torch.allclose(
        model.scores(outputs)[:, 0].double(), 0.5 + 0.25 * (wide @ point.double()), atol=1e-6
    )
    assert torch.allclose(model.losses(outputs, labels).double(), errors.square() / 2, rtol=1e-5)


def test_a_narrow_number_is_learned_in_a_wide_range() -> None:
    """Its deviation is a fiftieth of the range, where a model of the range itself learns next to nothing."""
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(2000, 3)).astype(np.float32) / 2
    labels = (-0.9 + 0.04 * (rows[:, 0] - rows[:, 1] + draw.normal(size=2000) / 4)).astype(np.float32)
    method = from_settings(
        {
            "name": "dp_sgd",
            "steps": 60,
            "expected_batch_size": 400,
            "update": {"learning_rate": 0.5, "momentum": 0.9, "schedule": "linear", "noise_limit": 0.35},
        }
    )
    errors = {}
    for name, features in (("scaled", FEATURES), ("plain", None)):
        model = build("linear", input_shape=(3,), classes=1, seed=0) if features is None else scaled_model(3)
        events = () if features is None else tuple((one.event(), 1) for one in features.releases((3,)))
        facts = PlanningFacts(records=2000, parameters=4, layers=1, classes=1, loss=model.bounds)
        plan = method.plan(Target(Budget(1.0, 1e-5), prior_events=events), facts)
        state, trace, model = train(
            method,
            plan,
            model,
            open_records=lambda: MadeUp(rows, labels),
            run=ResumableRun(run_id="0" * 64, generator=seeded_generator(3), folder=Path("nowhere")),
            compute=ComputeConfig(DEVICE),
            features=features,
        )
        outputs = model.outputs(model.by_name(method.released(state)), torch.from_numpy(rows))
        errors[name] = float((model.scores(outputs)[:, 0] - torch.from_numpy(labels)).square().mean())
        assert [row.kind for row in trace.rows].count("gradient") == 60
    variance = float(labels.var())
    assert errors["scaled"] < 0.2 * variance < errors["plain"]


def test_a_model_s_file_brings_the_scale_back() -> None:
    facts = {
        "model": "linear",
        "input_shape": [3],
        "classes": [],
        "outputs": 1,
        "predicts": "number",
        "front": {"kind": "target_scale"},
    }
    model = install_buffers(scaled_model(3), {"centre": torch.tensor(0.5), "scale": torch.tensor(0.25)})
    published = model.published_tensors(torch.randn(4))
    again, rows = architecture(ModelFacts.model_validate_json(json.dumps(facts))), torch.randn(5, 3)
    assert torch.equal(
        again.scores(again.outputs(published, rows)), model.scores(model.outputs(published, rows))
    )


def test_other_targets_are_refused() -> None:
    with refused_as("target_not_a_number"):
        FEATURES.check(build("softmax", input_shape=(3,), classes=4, seed=0))  # type: ignore[attr-defined]


def test_a_loss_of_the_model_s_own_is_refused_not_replaced() -> None:
    def absolute_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (outputs[..., 0] - labels).abs()

    model = build("linear", input_shape=(3,), classes=1, seed=0, predicts="number")
    FEATURES.check(model)  # type: ignore[attr-defined]
    with refused_as("own_loss_on_a_scale"):
        FEATURES.check(replace(model, losses=absolute_error))  # type: ignore[attr-defined]

"""The minimum with noise in its objective or on itself: what a record moves, what it costs, and how it is found."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.special import expit, logsumexp
from sklearn.linear_model import LogisticRegression

from algorithms.errors import RefusedError
from algorithms.models import Model, build
from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE, compose_loss, rdp
from algorithms.privacy.accounting.events import ObjectivePerturbationDpEvent
from algorithms.privacy.barrier.minimum import (
    OutOfReachError,
    PerturbedObjective,
    conjugate_gradients,
    minimum,
    solve_minimum,
)
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian, Minimum, NoNoise, ObjectiveNoise, minimum_release
from tests.support.barriers import (
    FALSE_ALARM,
    Free,
    barrier,
    conv_model,
    no_records,
)
from tests.support.bench import MadeUp, small_model
from tests.support.engines import engines_once
from tests.support.soak import soak_but

__all__ = ["engines_once"]

WIDTH = 5
MODEL = build("logistic", input_shape=(WIDTH,), classes=2, seed=0)
SVM = build("svm", input_shape=(WIDTH,), classes=2, seed=0)
NOISES = (Gaussian(1e-3), ObjectiveNoise(1e-3, 1e-3))


def problem(**changes: Any) -> Minimum:
    """Records of norm up to 2, whose curvature is up to 1/4 2^2."""
    settings = {"clip_norm": 0.7, "regularisation": 2.0, "tolerance": 1e-6, "input_norm": 2.0}
    return Minimum(**(settings | {"curvature": 1.0} | changes))


def some(count: int, width: int = WIDTH) -> MadeUp:
    draw = np.random.default_rng(3)
    return MadeUp(draw.normal(size=(count, width)).astype(np.float32), draw.integers(0, 2, count))


def with_one(records: MadeUp, features: NDArray[np.float32], label: int) -> MadeUp:
    return MadeUp(np.concatenate([records.features, features[None]]), np.append(records.labels, label))


def extremes() -> dict[str, NDArray[np.float32]]:
    ray = np.random.default_rng(4).normal(size=WIDTH)
    ray /= np.linalg.norm(ray)
    lengths = {"short": 1e-30, "usual": 1.0, "long": 1e6, "longest": 1e38}
    places = {name: (length * ray).astype(np.float32) for name, length in lengths.items()}
    nothing = {"none": np.zeros(WIDTH, np.float32), "nan": np.full(WIDTH, np.nan, np.float32)}
    return places | nothing | {"infinite": np.array([np.inf, 1, 0, 0, 0], np.float32)}


def answered(records: MadeUp, asked: Minimum, noise: Gaussian | ObjectiveNoise) -> torch.Tensor:
    """As a barrier answers, with the same noise each time, without a barrier's examination of the model."""
    stream = seeded_generator(5).stream(0)
    return solve_minimum(MODEL, records.features, records.labels, minimum_release(asked, noise), stream)


OUTSIDE, INSIDE = NOISES
MOVED = [
    *((40, OUTSIDE, 0.05), (0, INSIDE, 0.05), (40, INSIDE, 0.7)),
    *((0, OUTSIDE, 0.7), (40, OUTSIDE, 5.0), (0, INSIDE, 5.0)),
]
"""Each pair of a number of records, a noise and a bound is in one of them."""


@pytest.mark.parametrize(
    ("count", "noise", "clip_norm"), soak_but(MOVED, product((0, 40), NOISES, (0.05, 0.7, 5.0)))
)
def test_no_record_can_move_the_minimum_further_than_its_bound(
    count: int, noise: Gaussian | ObjectiveNoise, clip_norm: float
) -> None:
    asked = problem(clip_norm=clip_norm, regularisation=0.3)
    without = answered(some(count), asked, noise)
    moved = {
        (name, label): float((answered(with_one(some(count), place, label), asked, noise) - without).norm())
        for name, place in extremes().items()
        for label in (0, 1)
    }
    assert max(moved.values()) <= asked.sensitivity * (1 + 1e-6)
    assert moved["nan", 1] <= 2 * asked.slack * (1 + 1e-6)
    if clip_norm == 0.05:  # the bound is nearly reached: the test can fail
        assert max(moved.values()) > 0.95 * asked.sensitivity


def objective(records: MadeUp, model: Model = MODEL, **changes: Any) -> PerturbedObjective:
    settings: dict[str, Any] = {"clip_norm": 0.7, "input_norm": 2.0, "regularisation": 0.3}
    tilt = torch.zeros(model.parameter_count, dtype=torch.float64)
    return PerturbedObjective(
        model, records.features, records.labels, **(settings | {"tilt": tilt} | changes)
    )


@pytest.mark.parametrize("kind", ["logistic", "huber_svm"])
@pytest.mark.parametrize("name", [*extremes()])
def test_a_record_adds_a_bounded_gradient_and_a_bounded_curvature(name: str, kind: str) -> None:
    model = build(kind, input_shape=(WIDTH,), classes=2, seed=0)
    assert model.bounds is not None
    most = model.bounds.curvature * 2.0**2
    lone, none = with_one(some(0), extremes()[name], 1), some(0)
    for seed, scale in enumerate([0.0, 0.5, 3.0, 1e3, 1e6]):
        point = scale * torch.randn(
            WIDTH + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        for clip_norm in (0.1, 0.7, 2.0):
            pair = [objective(records, model, clip_norm=clip_norm) for records in (lone, none)]
            gradient = pair[0].gradient(point) - pair[1].gradient(point)
            curvature = torch.linalg.eigvalsh(pair[0].hessian(point) - pair[1].hessian(point))
            assert gradient.norm() <= clip_norm * (1 + 1e-12) + 1e-12 * point.norm()
            assert curvature.min() >= -1e-12 and curvature.max() <= most + 1e-12


@pytest.mark.parametrize(
    ("length", "expected"), [(0.5, 0.25), (1.0, 0.5), (1.6, 0.7), (2.0, 0.7), (9.0, 0.7)]
)
def test_a_record_is_clipped_at_its_bound_and_no_sooner(length: float, expected: float) -> None:
    """At the origin a logistic loss has the slope 1/2; longer records are scaled down to a length of 2."""
    model = build("logistic_through_origin", input_shape=(1,), classes=2, seed=0)
    lone = MadeUp(np.full((1, 1), length, np.float32), np.ones(1, np.int64))
    origin = torch.zeros(1, dtype=torch.float64)
    assert float(objective(lone, model).gradient(origin).abs()) == pytest.approx(expected)
    free = objective(lone, model, clip_norm=9.0)
    assert float(free.gradient(origin).abs()) == pytest.approx(min(length, 2.0) / 2)


def test_the_second_derivative_is_that_of_the_first_and_ends_where_a_loss_turns_linear() -> None:
    asked, step = objective(some(30), clip_norm=0.3), 1e-6
    point = torch.full((WIDTH + 1,), 0.4, dtype=torch.float64)
    rows = [
        (asked.gradient(point + step * e) - asked.gradient(point - step * e)) / (2 * step)
        for e in torch.eye(WIDTH + 1, dtype=torch.float64)
    ]
    torch.testing.assert_close(torch.stack(rows), asked.hessian(point), rtol=1e-6, atol=1e-6)
    free = objective(some(30), clip_norm=100.0)
    assert float((free.hessian(point) - asked.hessian(point)).trace()) > 1.0


MANY = 1200


def rows_of_cells(count: int) -> MadeUp:
    """Rows of norm 1 of four active cells each, the first of which are active more often, but for one with a NaN."""
    draw = np.random.default_rng(5)
    features = np.zeros((count, MANY), np.float32)
    for part in range(4):
        cells = np.minimum(draw.geometric(0.02, count) - 1, MANY // 4 - 1) + part * (MANY // 4)
        features[np.arange(count), cells] = 0.5
    features[1, 0] = np.nan
    return MadeUp(features, draw.integers(0, 2, count))


@pytest.mark.parametrize("clip_norm", [0.7, 0.2])
def test_the_minimum_of_many_sparse_rows_is_within_the_tolerance(clip_norm: float) -> None:
    """As two solvers' answers are, each within tolerance / regularisation of the minimum; the gradient is by hand."""
    records, model = (
        rows_of_cells(400),
        build("logistic_through_origin", input_shape=(MANY,), classes=2, seed=0),
    )
    tilt = 0.1 * torch.from_numpy(np.random.default_rng(6).normal(size=MANY))
    settings: dict[str, Any] = {"clip_norm": clip_norm, "input_norm": 1.0, "tilt": tilt}
    found = minimum(objective(records, model, **settings), tolerance=1e-6).numpy()
    rows = np.nan_to_num(records.features.astype(np.float64))
    rows[1] = 0.0
    slopes = np.clip(expit(rows @ found) - records.labels, -clip_norm, clip_norm)
    assert np.linalg.norm(rows.T @ slopes + 0.3 * found + tilt.numpy()) <= 1.001e-6
    assert np.linalg.norm(found) > 1.0


def test_conjugate_gradients_leave_a_hundredth_of_a_gradient() -> None:
    half = torch.from_numpy(np.random.default_rng(7).normal(size=(60, 60)))
    matrix, right = half @ half.T + torch.eye(60, dtype=torch.float64), torch.ones(60, dtype=torch.float64)
    solution = conjugate_gradients(lambda vector: matrix @ vector, right)
    assert 0.0 < float((matrix @ solution - right).norm()) <= 0.011 * float(right.norm())


@pytest.mark.parametrize("kind", ["logistic", "huber_svm"])
@pytest.mark.parametrize("seed", [14, 36, 48])
def test_minima_are_found_where_losses_turn_linear_all_at_once(seed: int, kind: str) -> None:
    """Long records under a small bound: Newton's steps alone run to and fro between the kinks."""
    draw = np.random.default_rng(seed)
    features = draw.normal(size=(12, 2)) * 10.0 ** draw.uniform(-3, 6, size=(12, 1))
    records = MadeUp(features.astype(np.float32), draw.integers(0, 2, 12))
    tilt = torch.from_numpy(0.05 * draw.normal(size=3))
    model = build(kind, input_shape=(2,), classes=2, seed=0)
    asked = objective(records, model, clip_norm=0.1, input_norm=3000.0, regularisation=1e-4, tilt=tilt)
    assert asked.gradient(minimum(asked, tolerance=1e-7)).norm() <= 1e-7


@pytest.mark.parametrize("seed", soak_but([0], range(2)))
def test_minima_are_found_with_little_regularisation_and_many_pieces(seed: int) -> None:
    """Newton's steps alone never get there: how far each goes has to be searched for."""
    draw = np.random.default_rng(seed)
    features = draw.normal(size=(200, 20)).astype(np.float32)
    labels = ((features @ draw.normal(size=20) > 0) ^ (draw.random(200) < 0.1)).astype(np.int64)
    model = build("huber_svm", input_shape=(20,), classes=2, seed=0)
    longest = float(np.linalg.norm(np.c_[features, np.ones(200)], axis=1).max())
    clip_norm, little = 0.024 * longest, longest**2 / 1e4
    tilt = torch.from_numpy(clip_norm * draw.normal(size=21))
    settings = {"clip_norm": clip_norm, "input_norm": longest, "regularisation": little, "tilt": tilt}
    for records in (MadeUp(features, labels), MadeUp(features[1:], labels[1:])):
        asked = objective(records, model, **settings)
        assert asked.gradient(minimum(asked, tolerance=1e-6 * clip_norm)).norm() <= 1e-6 * clip_norm


def test_a_tolerance_out_of_reach_is_reported_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = [], PerturbedObjective.gradient
    monkeypatch.setattr(PerturbedObjective, "gradient", lambda *asked: looks.append(1) or look(*asked))
    with pytest.raises(OutOfReachError, match="larger tolerance"):
        minimum(objective(some(50)), tolerance=1e-40)
    assert len(looks) < 1000


def test_the_minimum_without_noise_is_that_of_scikit_learn() -> None:
    records = some(20_000, width=3)  # more than one block
    model = build("logistic_through_origin", input_shape=(3,), classes=2, seed=0)
    found = barrier(records, model).minimum(problem(regularisation=4.0), noise=NoNoise())
    expected = LogisticRegression(C=0.25, fit_intercept=False, tol=1e-10).fit(
        records.features, records.labels
    )
    np.testing.assert_allclose(found, expected.coef_[0], atol=1e-4)
    free = problem(regularisation=4.0, clip_norm=1e6, input_norm=1e3, curvature=1e6, tolerance=1e-5)
    noised = barrier(records, model).minimum(free, noise=Gaussian(1e-12))
    np.testing.assert_allclose(noised, expected.coef_[0], atol=1e-5)


def wide(width: int = 2000) -> Model:
    return build("logistic_through_origin", input_shape=(width,), classes=2, seed=0)


def assert_normal(residuals: NDArray[np.float64]) -> None:
    """Standard normal residuals, by their sum of squares and by their law."""
    total = float(np.sum(residuals**2))
    assert FALSE_ALARM < stats.chi2.cdf(total, len(residuals)) < 1 - FALSE_ALARM
    assert stats.kstest(residuals, stats.norm().cdf).pvalue > FALSE_ALARM


def test_noise_on_the_result_has_the_scale_that_is_charged() -> None:
    asked = problem(tolerance=0.1)
    empty = barrier(no_records(20_000), wide(20_000), privacy_filter=(privacy_filter := Free()))
    answers = torch.cat([empty.minimum(asked, noise=Gaussian(1.3)) for _ in range(3)]).double().numpy()
    assert privacy_filter.events == [dp.GaussianDpEvent(1.3)] * 3
    assert_normal(answers / (1.3 * (0.7 + 2 * 0.1) / 2.0))


def test_noise_in_the_objective_and_on_the_result_have_the_scales_that_are_charged() -> None:
    """Without records the minimum is -b / Lambda; b is drawn first, and can be drawn again from the seed."""
    asked, noise, width = problem(tolerance=0.1, regularisation=2.0), ObjectiveNoise(1.3, 1.7), 1000
    trace = Trace()
    empty = barrier(no_records(width), wide(width), trace=trace)
    tilts, others = [], []
    for release in range(8):
        answer = empty.minimum(asked, noise=noise).double().numpy()
        drawn = seeded_generator(5).stream(release).normal(width)
        tilts.append(drawn)
        others.append((answer + 1.3 * 0.7 * drawn / 2.0) / (1.7 * 2 * 0.1 / 2.0))
    assert_normal(np.concatenate(others))
    assert stats.pearsonr(np.concatenate(tilts), np.concatenate(others)).pvalue > FALSE_ALARM
    assert trace.rows[0].noise_std == pytest.approx(1.3 * 0.7)
    pair = dp.ComposedDpEvent([ObjectivePerturbationDpEvent(1.3, 0.5), dp.GaussianDpEvent(1.7)])
    assert trace.events() == [pair] * 8


@pytest.mark.parametrize(
    ("model", "noise", "changes", "message"),
    [
        (small_model(), Gaussian(1.0), {}, "not a linear model with one output"),
        (conv_model(), Gaussian(1.0), {}, "not a linear model with one output"),
        (SVM, Gaussian(1.0), {"curvature": math.inf}, "smooth"),
        (SVM, ObjectiveNoise(1, 1), {}, "smooth"),
        (MODEL, ObjectiveNoise(1.0, 1.0), {"curvature": 0.99}, "have up to 1"),
        (MODEL, ObjectiveNoise(1.0, 1.0), {"input_norm": 2.1}, "have up to 1.1"),
        (MODEL, Gaussian(1.0), {"curvature": math.inf}, "declare at least that"),
    ],
)
def test_what_has_no_bound_is_refused_before_anything_is_charged(
    model: Model, noise: Any, changes: dict[str, float], message: str
) -> None:
    privacy_filter, trace = Free(), Trace()
    images = MadeUp(np.ones((3, 1, 4, 4), np.float32), np.zeros(3, np.int64))
    records = some(3) if model.parameter_count == WIDTH + 1 else images
    with pytest.raises(RefusedError, match=message):
        barrier(records, model, privacy_filter=privacy_filter, trace=trace).minimum(
            problem(**changes), noise=noise
        )
    assert privacy_filter.events == [] and trace.rows == []


@pytest.mark.parametrize("name", ["clip_norm", "regularisation", "tolerance", "input_norm", "curvature"])
def test_impossible_problems_are_refused(name: str) -> None:
    for bad in (-0.5, math.nan, *(() if name == "curvature" else (0.0, math.inf))):
        with pytest.raises(RefusedError):
            problem(**{name: bad})


def test_records_on_the_disk_give_the_same_answer(tmp_path: Path) -> None:
    records = some(60)
    np.save(tmp_path / "features.npy", records.features)
    mapped = MadeUp(np.load(tmp_path / "features.npy", mmap_mode="r"), records.labels)
    for noise in NOISES:
        answers = [barrier(held, MODEL).minimum(problem(), noise=noise) for held in (records, mapped)]
        assert torch.equal(*answers)
        assert torch.equal(answers[0], answered(records, problem(), noise).float())


def log_density(
    points: NDArray[np.float64], records: MadeUp, asked: Minimum, std: float
) -> NDArray[np.float64]:
    """Of the minimum of a perturbed objective in one dimension, by the change of variables b = -gradient."""
    gradient, curvature = asked.regularisation * points, np.full(len(points), asked.regularisation)
    for (x,), label in zip(records.features.astype(np.float64), records.labels, strict=True):
        sign, bound = 2.0 * label - 1.0, asked.clip_norm / abs(x)
        slope = -sign * expit(-sign * x * points)
        gradient += np.clip(slope, -bound, bound) * x
        curvature += np.where(np.abs(slope) < bound, x**2 * expit(x * points) * expit(-x * points), 0.0)
    return stats.norm.logpdf(gradient, scale=std) + np.log(curvature)


def weights(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the trapezoidal rule."""
    return (np.diff(points, prepend=points[0]) + np.diff(points, append=points[-1])) / 2


def log_integral(logarithms: NDArray[np.float64], points: NDArray[np.float64]) -> float:
    return float(logsumexp(logarithms, b=weights(points)))


@pytest.mark.parametrize("count", [0, 50])
@pytest.mark.parametrize(
    ("regularisation", "multiplier", "clip_norm"),
    [
        (0.05, 8.0, 2.0),
        (0.05, 0.5, 0.5),
        (0.5, 2.0, 2.0),
        (5.0, 0.5, 0.5),
        (50.0, 0.5, 0.5),
        (50.0, 2.0, 0.5),
    ],
)
def test_the_stated_cost_dominates_the_exact_one(
    count: int, regularisation: float, multiplier: float, clip_norm: float
) -> None:
    asked = problem(clip_norm=clip_norm, regularisation=regularisation)
    records = MadeUp((2 * some(count, 1).features).clip(-2, 2), some(count, 1).labels)
    std = multiplier * clip_norm
    reach = np.arcsinh(50 * (9 * std + 2 * count + 2) / regularisation)
    points = np.sinh(np.linspace(-reach, reach, 30_001)) / 50
    more = with_one(records, np.array([2.0], np.float32), 1)
    pair = [log_density(points, held, asked, std) for held in (records, more)]
    assert [log_integral(one, points) for one in pair] == pytest.approx([0.0, 0.0], abs=1e-3)
    event = ObjectivePerturbationDpEvent(multiplier, asked.curvature / regularisation)
    stated = compose_loss([(event, 1)], ADD_OR_REMOVE_ONE, grid=1e-3)
    by_order = dict(zip((1.5, 4.0, 16.0), rdp([(event, 1)], orders=(1.5, 4.0, 16.0)), strict=True))
    for p, q in (pair, pair[::-1]):
        for epsilon in (0.0, 0.3, 1.0, 3.0):
            exact = float(np.maximum(np.exp(p) - np.exp(epsilon + q), 0.0) @ weights(points))
            assert exact <= stated.deltas(np.array([epsilon]))[0] * (1 + 1e-3) + 1e-9
        for order, divergence in by_order.items():
            assert log_integral(order * p + (1 - order) * q, points) / (order - 1) <= divergence + 1e-3


def test_the_stated_renyi_divergence_is_the_moment_of_the_stated_loss() -> None:
    multiplier, ratio = 1.7, 0.6
    draw = np.linspace(0.0, 40.0, 400_001)
    loss = math.log1p(ratio) + 0.5 / multiplier**2 + draw / multiplier
    for order in (1.5, 4.0, 32.0):
        whole = log_integral(math.log(2.0) + stats.norm.logpdf(draw) + (order - 1) * loss, draw)
        found = rdp([(ObjectivePerturbationDpEvent(multiplier, ratio), 3)], orders=(order,))[0]
        assert found == pytest.approx(3 * whole / (order - 1), rel=1e-5)


def test_the_whole_loss_distribution_is_that_of_the_stated_loss() -> None:
    stated = compose_loss([(ObjectivePerturbationDpEvent(1.7, 0.6), 1)], ADD_OR_REMOVE_ONE, grid=1e-4)
    draw = np.linspace(0.0, 40.0, 400_001)
    loss = math.log1p(0.6) + 0.5 / 1.7**2 + draw / 1.7
    for epsilon in (0.0, 0.5, 1.0, 3.0):
        gain = np.maximum(-np.expm1(epsilon - loss), 0.0)
        expected = float(2 * stats.norm.pdf(draw) * gain @ weights(draw))
        assert expected <= stated.deltas(np.array([epsilon]))[0] + 1e-9
        assert stated.deltas(np.array([epsilon]))[0] == pytest.approx(expected, rel=1e-3, abs=1e-6)

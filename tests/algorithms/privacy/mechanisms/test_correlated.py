"""Correlated noise: its sensitivity, its cost, its covariance, and what is refused. False-alarm rates of 1e-6 each."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import attrs
import dp_accounting as dp
import numpy as np
import pytest
import torch
from scipy import stats
from scipy.linalg import toeplitz

from algorithms.core import noise_strategies
from algorithms.core.noise_strategies import (
    _decay_length,
    _summed_noise,
    _SummedNoise,
    best_banded,
    best_buffered,
    square_root,
)
from algorithms.core.noise_workload import Workload, mean_squared_noise, workload
from algorithms.core.optimizers import OptimizerConfig
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.privacy.accounting.correlated import (
    CorrelatedStepDpEvent,
    releases_of,
    squared_sensitivity,
    squared_tree_sensitivity,
)
from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE, REPLACE_ONE, epsilon, group_privacy
from algorithms.privacy.accounting.events import event_from_json, event_to_json, unroll
from algorithms.privacy.accounting.filters import rho_under
from algorithms.privacy.accounting.risk import profile
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.correlated import Buffered, Correlated, Strategy, Toeplitz, Tree
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian, gradient_release
from algorithms.privacy.mechanisms.sampling import CyclicPoisson, FixedOrder, Poisson, Sampling, draw_sample
from tests.algorithms.privacy.accounting.golden_values import GOLDEN, golden_value
from tests.support.barriers import FALSE_ALARM, barrier, no_records, wide_model
from tests.support.bench import made_up, small_model
from tests.support.refusals import refused_as

DELTA = 1e-5
STRATEGIES: dict[str, Strategy] = {
    "independent": Toeplitz((1.0,)),
    "banded": Toeplitz((0.8, 0.5, 0.2)),
    "with a negative band": Toeplitz((1.0, -0.4, 0.3)),
    "buffered": Buffered((0.3, 0.1), (0.5, 0.9)),
    "tree": Tree(8),
    "tree of odd size": Tree(5),
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


def matrix(coefficients: Any, steps: int) -> np.ndarray:
    column = np.zeros(steps)
    column[: len(coefficients)] = coefficients[:steps]
    return np.array([[column[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])


def nodes(leaves: int, steps: int) -> np.ndarray:
    """The sums that the trees release, as a matrix of the steps, shape [nodes, steps]."""
    rows = []
    for start in range(0, steps, leaves):
        size, width = min(leaves, steps - start), 1
        while width <= size:
            for first in range(0, size - width + 1, width):
                row = np.zeros(steps)
                row[start + first : start + first + width] = 1.0
                rows.append(row)
            width *= 2
    return np.array(rows)


def moved(strategy: np.ndarray, parts: int) -> float:
    """The most that a record moves, over all its parts, subsets of its steps, and signs of its gradients."""
    steps = strategy.shape[1]
    most = 0.0
    for first in range(min(parts, steps)):
        places = range(first, steps, parts)
        for signs in itertools.product((-1.0, 0.0, 1.0), repeat=len(places)):
            u = np.zeros(steps)
            u[list(places)] = signs
            most = max(most, float(np.square(strategy @ u).sum()))
    return most


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 9])
@pytest.mark.parametrize(
    "coefficients", [(1.0,), (0.9, 0.5, 0.1), (0.2, 0.9), (1.0, -0.6, 0.2), (0.5, 0.3, -0.4, 0.1)]
)
def test_no_way_to_take_part_moves_more_than_the_sensitivity(
    coefficients: tuple[float, ...], parts: int
) -> None:
    steps = 7
    most = moved(matrix(coefficients, steps), parts)
    bound = squared_sensitivity(np.array(coefficients), steps=steps, parts=parts)
    assert bound >= most * (1 - 1e-12)
    if min(coefficients) >= 0 or len(coefficients) <= parts:
        assert bound == pytest.approx(most)


@pytest.mark.parametrize(
    ("leaves", "steps", "parts"), [(8, 8, 8), (4, 8, 4), (5, 9, 5), (8, 8, 3), (4, 7, 2), (3, 8, 1)]
)
def test_no_way_to_take_part_moves_a_tree_more(leaves: int, steps: int, parts: int) -> None:
    found = squared_tree_sensitivity(leaves=leaves, steps=steps, parts=parts)
    assert found == pytest.approx(moved(nodes(leaves, steps), parts))


def test_the_tree_of_a_pass_moves_by_its_height() -> None:
    """Kairouz et al. 2021: a record is in one node of each complete level, of at most ceil(log2 n) + 1."""
    for leaves in (1, 2, 3, 8, 100):
        found = squared_tree_sensitivity(leaves=leaves, steps=3 * leaves, parts=leaves)
        assert found == 3 * (math.floor(math.log2(leaves)) + 1)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("correlated_sensitivity")])
def test_a_sensitivity_is_that_of_another_library(name: str) -> None:
    p = GOLDEN[name]["params"]
    column = p["decay"] ** np.arange(p["bands"])
    assert squared_sensitivity(column, steps=p["steps"], parts=p["parts"]) == golden_value(name)


def prefix_sums(steps: int) -> Workload:
    """Of a constant learning rate: every gradient has the same weight in all later iterates."""
    return workload(OptimizerConfig(1.0), steps, rows=steps)


def test_the_best_strategies_leave_the_noise_of_those_of_another_library() -> None:
    for steps, bands in ((90, 2), (140, 9), (256, 16)):
        found = mean_squared_noise(
            best_banded(OptimizerConfig(1.0), steps, bands, rows=steps), prefix_sums(steps)
        )
        assert math.sqrt(found) == golden_value(f"correlated_banded_{steps}_{bands}")
    for bands, steps in ((512, 512), (64, 1024)):
        found = mean_squared_noise(square_root(bands), prefix_sums(steps))
        assert math.sqrt(found) == golden_value(f"correlated_root_{bands}_{steps}")
    buffers = best_buffered(OptimizerConfig(1.0), 100, 2, 20, rows=100)
    moves = squared_sensitivity(buffers.column(100), steps=100, parts=20)
    found = moves * mean_squared_noise(buffers, prefix_sums(100))
    assert math.sqrt(found) == golden_value("correlated_buffered_100_2")


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_search_over_some_iterates_ends_where_one_over_all_does(
    schedule: Literal["constant", "linear"],
) -> None:
    update = OptimizerConfig(1.0, schedule=schedule, momentum=0.9)
    asked = workload(update, 256, rows=256)
    some, every = (best_banded(update, 256, 16, rows=rows) for rows in (32, 256))
    assert some != every
    assert mean_squared_noise(some, asked) <= 1.0005 * mean_squared_noise(every, asked)


@pytest.mark.parametrize("length", [12, 40])
def test_the_noise_of_all_iterates_together_is_the_sum_of_each(length: int) -> None:
    """By the autocorrelation of rows and their heads, beside products of matrices."""
    generator = np.random.default_rng(length)
    rows, inverse = np.tril(generator.normal(size=(40, 40)))[[4, 9, 11, 25, 38, 39]], np.zeros(40)
    inverse[:length] = generator.normal(size=length)
    expected = np.square(rows @ toeplitz(inverse, np.zeros(40))).sum()
    summed = _SummedNoise(rows, length)(torch.from_numpy(inverse[:length]))
    assert float(summed) == pytest.approx(expected, rel=1e-12)


def test_a_search_over_a_column_that_does_not_decay_takes_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    update, steps = OptimizerConfig(1.0, momentum=0.9), 256
    every = mean_squared_noise(best_banded(update, steps, 2), prefix_sums(steps))
    _summed_noise.cache_clear()
    best_banded.cache_clear()
    monkeypatch.setattr(noise_strategies, "DECAY_LENGTH", 16)
    assert _decay_length(2, steps) < steps
    some = mean_squared_noise(best_banded(update, steps, 2), prefix_sums(steps))
    assert some == pytest.approx(every, rel=1e-4)


@pytest.mark.parametrize(
    ("schedule", "averaging", "momentum", "nesterov"),
    [
        ("linear", "ema", 0.8, False),
        ("cosine", "tail", 0.5, False),
        ("constant", "none", 0.0, False),
        ("linear", "none", 0.8, True),
    ],
)
def test_a_workload_is_the_course_of_the_update(
    schedule: Literal["constant", "linear", "cosine"],
    averaging: Literal["none", "ema", "tail"],
    momentum: float,
    nesterov: bool,
) -> None:
    """Row t is how far a gradient of each step has moved what would be published after step t."""
    update = OptimizerConfig(
        0.5,
        schedule=schedule,
        momentum=momentum,
        averaging=averaging,
        weight_decay=0.1,
        nesterov=nesterov,
    )
    moving, steps = update.start(torch.zeros(1, dtype=torch.float64)), 9
    gradients = np.random.default_rng(1).normal(size=steps)
    published = []
    for gradient in gradients:
        moving = update.apply(moving, torch.tensor([gradient]), steps=steps)
        published.append(float(update.published_parameters(moving)))
    assert -workload(update, steps).rows @ gradients == pytest.approx(np.array(published), rel=1e-6)
    assert workload(OptimizerConfig(1.0), 1000, rows=10).rows.shape == (10, 1000)
    last = workload(OptimizerConfig(1.0), 1000, rows=10).rows[-1]
    assert (last == 1.0).all()
    few, every = (workload(replace(update, momentum=0.8), 50, rows=rows) for rows in (7, 50))
    assert len(few.after) == 7
    assert few.rows == pytest.approx(every.rows[np.array(few.after) - 1], rel=1e-12, abs=1e-300)


def test_long_runs_are_transformed_at_fast_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Fourier transform of a prime number of steps, or twice that, takes ten times as long as of a few more."""
    sizes = set()
    for name in ("rfft", "irfft"):
        original = getattr(np.fft, name)

        def noted(numbers: Any, n: int | None = None, original: Callable[..., Any] = original) -> Any:
            sizes.add(n or numbers.shape[-1])
            return original(numbers, n=n)

        monkeypatch.setattr(np.fft, name, noted)
    update, steps = OptimizerConfig(0.9), 4_999
    mean_squared_noise(best_buffered(update, steps, 1, 500), workload(update, steps))
    assert max(sizes) >= 2 * steps
    for size in sizes:
        for factor in (2, 3, 5):
            while size % factor == 0:
                size //= factor
        assert size == 1


@pytest.mark.parametrize(
    ("update", "buffers", "noise"),
    [
        (OptimizerConfig(1.0, momentum=0.9, schedule="linear"), 1, 66.79),
        (OptimizerConfig(1.0, averaging="ema"), 1, 6.037),
        (OptimizerConfig(1.0, momentum=0.9, schedule="cosine", averaging="ema", nesterov=True), 4, 50.23),
    ],
)
def test_a_search_for_buffers_ends_soon_where_noise_is_least(
    update: OptimizerConfig, buffers: int, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strategies whose inverse grows without end are no place to search."""
    searched = 0

    def counted(self: _SummedNoise, inverse: torch.Tensor) -> torch.Tensor:
        nonlocal searched
        searched += 1
        return original(self, inverse)

    original = _SummedNoise.__call__
    monkeypatch.setattr(_SummedNoise, "__call__", counted)
    steps, parts = 4_800, 600
    best_buffered.cache_clear()
    found = best_buffered(update, steps, buffers, parts)
    assert searched <= 40
    moves = squared_sensitivity(found.column(steps), steps=steps, parts=parts)
    assert math.sqrt(moves * mean_squared_noise(found, workload(update, steps))) < noise


@every_strategy
def test_the_noise_in_the_iterates_is_that_of_its_matrix(strategy: Strategy) -> None:
    steps, asked = 11, workload(OptimizerConfig(1.0, momentum=0.5), 11)
    noise = released_noise(strategy, steps)
    assert strategy.variances(steps) == pytest.approx(np.square(noise).sum(axis=1))
    expected = np.square(asked.rows @ noise).sum(axis=1).mean()
    assert mean_squared_noise(strategy, asked) == pytest.approx(expected)


def released_noise(strategy: Strategy, steps: int) -> np.ndarray:
    """How the noise of each step is made of independent draws, shape [steps, draws], by another way than the product's.

    Of a tree: the best linear estimate of each prefix sum's noise from the nodes below it, as nothing later is used.
    """
    if not isinstance(strategy, Tree):
        event = strategy.event(1.0, steps)
        column = event.coefficients or strategy.column(steps)  # type: ignore[attr-defined]
        return np.linalg.inv(matrix(column, steps))
    prefixes, every = np.zeros((steps, 0)), []
    for start in range(0, steps, strategy.leaves):
        size = min(strategy.leaves, steps - start)
        tree = nodes(size, size)
        found = np.zeros((steps, len(tree)))
        for place in range(size):
            seen = [i for i, row in enumerate(tree) if row.nonzero()[0].max() <= place]
            target = np.zeros(size)
            target[: place + 1] = 1.0
            # The least noise among combinations of what is released by then that make up the prefix sum.
            found[start + place, seen] = np.linalg.pinv(tree[seen].T) @ target
        found[start + size :] = found[start + size - 1]
        every.append(found)
    prefixes = np.concatenate([prefixes, *every], axis=1)
    return np.diff(prefixes, axis=0, prepend=np.zeros((1, prefixes.shape[1])))


def noise_of_a_run(strategy: Strategy, steps: int, *, seed: int = 5, multiplier: float = 2.0) -> np.ndarray:
    """What a barrier without records answers, in units of W's deviation, shape [steps, parameters]."""
    model = wide_model()
    empty = barrier(no_records(), model, generator=seeded_generator(seed))
    answers = [
        ask(empty, Correlated(multiplier, strategy, steps, step), model=model) for step in range(steps)
    ]
    return np.stack([answer.numpy() for answer in answers]).astype(np.float64) / (0.5 * multiplier)


@every_strategy
def test_what_is_released_has_the_covariance_of_its_strategy(strategy: Strategy) -> None:
    """Whitened by the strategy's own covariance it is independent standard normal, over steps and coordinates."""
    steps = 9
    noise, mixed = noise_of_a_run(strategy, steps), released_noise(strategy, steps)
    covariance = mixed @ mixed.T
    white = np.linalg.solve(np.linalg.cholesky(covariance), noise)
    total = float(np.square(white).sum())
    assert FALSE_ALARM < stats.chi2(white.size).sf(total) < 1 - FALSE_ALARM
    products = (white @ white.T / math.sqrt(white.shape[1]))[np.triu_indices(steps, 1)]
    assert stats.chi2(len(products)).sf(float(np.square(products).sum())) > FALSE_ALARM
    # Noise that stood alone in each step would not pass for it, but where it is.
    if not np.allclose(covariance, np.eye(steps)):
        assert stats.chi2(noise.size).sf(float(np.square(noise).sum() / np.trace(covariance) * steps)) > 0
        far = (noise @ noise.T / math.sqrt(noise.shape[1]))[np.triu_indices(steps, 1)]
        assert stats.chi2(len(far)).sf(float(np.square(far).sum())) < FALSE_ALARM


@every_strategy
def test_the_trace_has_the_deviation_of_each_step(strategy: Strategy) -> None:
    steps, model, trace = 6, wide_model(), Trace()
    empty = barrier(no_records(), model, trace=trace)
    for step in range(steps):
        ask(empty, Correlated(2.0, strategy, steps, step), model=model)
    expected = 2.0 * 0.5 * np.sqrt(strategy.variances(steps))
    assert [row.noise_std for row in trace.rows] == pytest.approx(expected, rel=1e-4)
    assert {(row.noise, row.sampling, row.noise_multiplier) for row in trace.rows} == {
        ("correlated", "fixed order", 2.0)
    }


def ask(asked: Barrier, noise: Correlated, **changes: Any) -> torch.Tensor:
    model = changes.pop("model", small_model())
    terms: dict[str, Any] = {"sampling": FixedOrder(3), "clipping": L2(0.5), "divisor": 1.0}
    return asked.gradient(model.initial_parameters(), noise=noise, **(terms | changes))


def event(strategy: Strategy, sampling: Sampling, *, multiplier: float = 2.0, steps: int = 12) -> dp.DpEvent:
    return gradient_release(sampling, L2(1.0), Correlated(multiplier, strategy, steps, 0), 1.0).event()


def test_a_run_costs_one_gaussian_release_in_fixed_order() -> None:
    strategy = Toeplitz((0.8, 0.6))
    overlap_free = dp.GaussianDpEvent(2.0 / math.sqrt(3 * 1.0))  # three columns of norm 1
    assert unroll([(event(strategy, FixedOrder(4)), 1)]) == [(overlap_free, 1)]
    assert unroll([(event(Tree(4), FixedOrder(4)), 1)]) == [(dp.GaussianDpEvent(2.0 / 3.0), 1)]


def test_a_cyclic_sample_costs_a_sampled_release_for_each_round() -> None:
    strategy = Toeplitz((3.0, 4.0))
    found = unroll([(event(strategy, CyclicPoisson(5, 0.02)), 1)])
    assert found == [(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(0.4)), 3)]


def test_one_band_in_one_part_costs_what_independent_noise_does() -> None:
    plain = gradient_release(Poisson(0.1), L2(1.0), Gaussian(2.0), 1.0).event()
    correlated = event(Toeplitz((1.0,)), CyclicPoisson(1, 0.1))
    for accountant in ("pld", "rdp"):
        costs = [epsilon([row], DELTA, accountant=accountant) for row in ((correlated, 1), (plain, 12))]
        assert costs[0] == costs[1]
    assert (profile([(correlated, 1)]).delta == profile([(plain, 12)]).delta).all()


@pytest.mark.parametrize(
    ("strategy", "sampling"),
    [
        (Toeplitz((0.8, 0.5, 0.2)), CyclicPoisson(2, 0.1)),
        (Buffered((0.3,), (0.5,)), CyclicPoisson(5, 0.1)),
        (Tree(4), CyclicPoisson(5, 0.1)),
        (Toeplitz((0.8, 0.5)), Poisson(0.1)),
    ],
    ids=["a band too many", "buffers", "tree", "plain Poisson samples"],
)
def test_what_no_theorem_covers_is_refused(strategy: Strategy, sampling: Sampling) -> None:
    asked, touched = barrier(made_up()), Correlated(2.0, strategy, 12, 0)
    with pytest.raises(RefusedError, match="proven"):
        epsilon([(event(strategy, sampling), 1)], DELTA)
    with pytest.raises(RefusedError, match="proven"):
        ask(asked, touched, sampling=sampling)


def test_a_strategy_that_is_not_normalised_costs_what_it_moves() -> None:
    """A strategy and a multiple of it, with as many times the noise, are one mechanism."""
    small, large = Toeplitz((0.4, 0.3)), Toeplitz((4.0, 3.0))
    for sampling in (FixedOrder(4), CyclicPoisson(4, 0.1)):
        costs = [
            epsilon([(event(strategy, sampling, multiplier=z), 1)], DELTA)
            for strategy, z in ((small, 1.0), (large, 10.0))
        ]
        assert costs[0] == pytest.approx(costs[1])


def test_events_are_what_they_were_written_as_and_impossible_ones_refused() -> None:
    whole = event(Buffered((0.3, 0.1), (0.5, 0.9)), FixedOrder(4))
    assert event_from_json(json.loads(json.dumps(event_to_json(whole)))) == whole
    changes: Any = (
        {"parts": 0},
        {"rate": 1.5},
        {"noise_multiplier": -1.0},
        {"decays": [0.5, 1.5]},
        {"leaves": 4},
    )
    for change in changes:
        with pytest.raises(RefusedError, match="no mechanism"):
            epsilon([(attrs.evolve(whole, **change), 1)], DELTA)
    with refused_as("no_bound_replace_one", mechanism="correlated noise"):
        epsilon([(whole, 1)], DELTA, adjacency=REPLACE_ONE)


def test_later_steps_cost_nothing_after_the_event_that_paid_for_them_alone() -> None:
    whole, later = event(Toeplitz((0.8, 0.6)), FixedOrder(4)), CorrelatedStepDpEvent(2.0, 4, 1.0)
    assert epsilon([(whole, 1), (later, 11)], DELTA) == epsilon([(whole, 1)], DELTA)
    for wrong in (
        [(later, 1)],
        [(whole, 1), (later, 12)],
        [(later, 11), (whole, 1)],
        [(whole, 0), (later, 11)],
        [(dp.ComposedDpEvent([dp.SelfComposedDpEvent(whole, 0), dp.SelfComposedDpEvent(later, 11)]), 1)],
        [(whole, 1), (attrs.evolve(later, noise_multiplier=3.0), 11)],
    ):
        with pytest.raises(RefusedError, match="paid for"):
            epsilon(wrong, DELTA)


def test_rho_and_groups_are_those_of_the_whole_release() -> None:
    ordered = event(Toeplitz((0.8, 0.6)), FixedOrder(4))
    sampled = event(Toeplitz((0.8, 0.6)), CyclicPoisson(4, 0.1))
    for one in (ordered, sampled):  # nothing is gained by sampling
        assert rho_under(ADD_OR_REMOVE_ONE, one) == pytest.approx(3 / (2 * 2.0**2))
    assert epsilon([(group_privacy(ordered, 2), 1)], DELTA) == epsilon(
        [(dp.GaussianDpEvent(1.0 / math.sqrt(3)), 1)], DELTA
    )
    with refused_as("no_bound_of_correlated_group", count=2):
        group_privacy(sampled, 2)


def test_a_step_out_of_turn_or_of_another_run_is_refused_before_it_is_charged() -> None:
    def at(step: int, **changes: Any) -> Correlated:
        return replace(Correlated(2.0, Toeplitz((0.8, 0.5)), 4, step), **changes)

    trace = Trace()
    asked = barrier(made_up(), trace=trace)
    with pytest.raises(RefusedError, match="out of order or under changed terms"):
        ask(asked, at(1))
    ask(asked, at(0))
    for wrong, terms in (
        (at(2), {}),
        (at(1, multiplier=3.0), {}),
        (at(1, strategy=Toeplitz((0.8, 0.4))), {}),
        (at(1, steps=5), {}),
        (at(1), {"clipping": L2(0.6)}),
        (at(1), {"sampling": FixedOrder(4)}),
    ):
        with pytest.raises(RefusedError, match="out of order or under changed terms"):
            ask(asked, wrong, **terms)
    ask(asked, at(1), divisor=7.0)
    with pytest.raises(RefusedError, match="out of order or under changed terms"):
        ask(asked, at(1))  # its noise is used up
    assert len(trace.rows) == 2


def test_a_run_that_is_taken_up_goes_on_with_the_same_noise() -> None:
    """Also where a release of another kind came before; another model's noise is of another length."""
    strategy, records = Toeplitz((0.8, 0.5, 0.2)), made_up()

    def answers(asked: Barrier, first: int, last: int) -> list[torch.Tensor]:
        return [ask(asked, Correlated(2.0, strategy, 6, step)) for step in range(first, last)]

    trace = Trace()
    whole = barrier(records, trace=trace)
    whole.total(lambda x, y: torch.ones(1), bound=L2(1.0), noise=Gaussian(1.0))
    expected = answers(whole, 0, 6)
    resumed = barrier(records, trace=Trace(trace.rows[:4]))
    assert all(map(torch.equal, answers(resumed, 3, 6), expected[3:]))
    other = small_model("logistic", classes=2)
    another = barrier(made_up(classes=2), other, trace=Trace(trace.rows[:4]))
    with pytest.raises(RefusedError, match="out of order or under changed terms"):
        ask(another, Correlated(2.0, strategy, 6, 3), model=other)


def test_a_record_takes_part_in_the_steps_of_its_part_alone() -> None:
    count, parts, generator = 20_000, 4, seeded_generator(3)

    def took_part(sampling: CyclicPoisson | FixedOrder, step: int) -> np.ndarray:
        found = np.zeros(count, dtype=bool)
        found[draw_sample(sampling, count, generator.stream(step), step=step)] = True
        return found

    ordered = np.stack([took_part(FixedOrder(parts), step) for step in range(8)])
    assert (ordered[:4].sum(axis=0) == 1).all() and (ordered[4:] == ordered[:4]).all()
    assert stats.chisquare(ordered[:4].sum(axis=1)).pvalue > FALSE_ALARM
    sampled = np.stack([took_part(CyclicPoisson(parts, 0.1), step) for step in range(8)])
    assert not (sampled & ~ordered).any()
    for step in range(8):
        assert stats.binomtest(int(sampled[step].sum()), int(ordered[step].sum()), 0.4).pvalue > FALSE_ALARM
    both = int((sampled[:4] & sampled[4:]).sum())  # its coins in two rounds are its own
    assert stats.binomtest(both, count, 0.16).pvalue > FALSE_ALARM


def test_parts_are_drawn_by_the_key_of_the_run_and_shared_by_no_release() -> None:
    one, other = (seeded_generator(seed).stream(0).parts(1000, 4) for seed in (1, 2))
    assert (one != other).any()
    assert (one == seeded_generator(1).stream(7).parts(1000, 4)).all()
    words = (seeded_generator(1).stream(0).words(1000) % np.uint64(4)).astype(int)
    assert stats.chisquare(np.bincount(one * 4 + words, minlength=16)).pvalue > FALSE_ALARM


def test_orthogonal_canaries_find_no_more_than_the_run_is_charged_for() -> None:
    """The best test knows each canary's part and weighs its steps by the strategy; what it reaches is the event's mu.

    Canaries are records whose gradients do not overlap, each in or out by a coin of the test.
    """
    strategy, steps, parts, multiplier = Toeplitz((0.75, 0.6, 0.2)), 9, 3, 3.0
    model = wide_model()
    noise = noise_of_a_run(strategy, steps, multiplier=multiplier) * multiplier
    canaries = noise.shape[1]
    columns = matrix(strategy.coefficients, steps)
    is_in, place = np.random.default_rng(0).random(canaries) < 0.5, np.arange(canaries) % parts
    takes_part = np.stack([(place == step % parts) & is_in for step in range(steps)])
    released = columns @ (noise + takes_part)  # what the steps tell, turned into what was noised: C G + W
    means = columns @ np.stack([place == step % parts for step in range(steps)]).astype(float)
    scores = (released * means).sum(axis=0) / np.linalg.norm(means, axis=0)
    mu = (scores[is_in].mean() - scores[~is_in].mean()) / multiplier
    (gaussian, _count) = releases_of(attrs.evolve(strategy.event(multiplier, steps), parts=parts))
    claimed = 1.0 / gaussian.noise_multiplier
    chance = stats.norm.isf(FALSE_ALARM) * math.sqrt(4.0 / canaries)
    assert mu <= claimed + chance
    assert mu >= 0.97 * claimed - chance  # the first part's canaries reach it all
    assert model.parameter_count == canaries


@pytest.mark.parametrize("steps", [1, 2, 3, 1000])
def test_a_buffered_matrix_times_its_inverse_is_the_identity(steps: int) -> None:
    buffers = np.arange(1.0, 17.0)
    strategy = Buffered(tuple(0.3 / buffers**2), tuple(1.0 - 0.5**buffers))
    product = np.convolve(strategy.column(steps), strategy.inverse(steps))[:steps]
    assert product == pytest.approx(np.eye(steps)[0], abs=1e-14)

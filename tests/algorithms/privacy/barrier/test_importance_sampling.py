"""Importance samples and releases of norms: who takes part, what is charged, what stays inside. False alarms: 1e-6."""

import math
from copy import copy
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import dp_accounting as dp
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import Tensor

from algorithms.errors import RefusedError
from algorithms.gradients import L1, L2, Affine, Engine, Normalised
from algorithms.models import Model, build
from algorithms.privacy.accounting.epsilon import rdp
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig
from algorithms.privacy.barrier.importance_sampling import LastNorms, are_below, importance_sum
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import is_below, seeded_generator
from algorithms.privacy.mechanisms.release import (
    Gaussian,
    Gumbel,
    Laplace,
    NoNoise,
    gradient_release,
    norm_count_release,
    norm_total_release,
)
from algorithms.privacy.mechanisms.sampling import FullBatch, Importance, Poisson
from tests.support.barriers import FALSE_ALARM, Free, barrier, no_records, wide_model
from tests.support.bench import MadeUp, made_up, small_model, with_record
from tests.support.chosen_words import ChosenWords
from tests.support.refusals import refused_as

COUNT, C = 12, 1.0
DRAWS, COPIES = 5_000, 50
TOGETHER = 640  # so that a release is one pass
SCALES = np.linspace(0.01, 3.0, COUNT)
IMPORTANCE = Importance(0.2)
NO_NOISE: Any = Gaussian(1e-6)


def axes(scales: np.ndarray = SCALES) -> MadeUp:
    """A record on each axis: at the origin a logistic model's gradient of each has half its length."""
    return MadeUp(np.diag(2 * scales).astype(np.float32), np.zeros(len(scales), dtype=np.int64))


def axes_model(count: int = COUNT) -> Model:
    return build("logistic_through_origin", input_shape=(count,), classes=2, seed=0)


@cache
def engine_of_axes(count: int) -> Engine:
    return Engine(axes_model(count), input_shape=(count,), physical_batch=TOGETHER)


def step(asked: Barrier, point: Tensor, sampling: Importance = IMPORTANCE, **changes: Any) -> Tensor:
    terms = {"clipping": Normalised(C), "noise": NO_NOISE, "divisor": 1.0} | changes
    return asked.gradient(point, sampling=sampling, **terms).double()


def summed(
    engine: Engine, inputs: Tensor, labels: Tensor, last: LastNorms, sampling: Importance, stream: Any
) -> Tensor:
    """The importance sum of records in one batch at zero, by the inside of the barrier."""
    point = torch.zeros(len(labels))
    inside: dict[str, Any] = {"engine": engine, "last": last}
    inside["load"] = lambda rows: (inputs[rows], labels[rows])
    return importance_sum(point, len(labels), sampling, Normalised(C), stream, **inside)


def taking_part(sampling: Importance, *, warm: np.ndarray | None, scales: np.ndarray = SCALES) -> Any:
    """Who took part in each draw, [DRAWS, COUNT], and what each contributed, by the inside of the barrier.

    A release draws COPIES records of each scale, on axes of their own. warm: last norms before each release, by scale;
    None for norms never seen.
    """
    many = axes(np.tile(scales, COPIES))
    inputs, labels = torch.from_numpy(many.features), torch.from_numpy(many.labels)
    engine = engine_of_axes(len(labels))
    last, totals = LastNorms(), []
    before = np.full(len(labels), np.inf) if warm is None else np.tile(warm, COPIES)
    for release in range(DRAWS // COPIES):
        last.restore(torch.from_numpy(before))
        stream = seeded_generator(1).stream(release)
        totals.append(summed(engine, inputs, labels, last, sampling, stream))
    parts = torch.stack(totals).numpy().reshape(DRAWS, COUNT)
    return parts > 1e-9, parts


CALLS: list[tuple[Importance, Any, float]] = [
    (Importance(0.2), None, C),
    (Importance(0.2), SCALES, C),
    (Importance(0.6, oversampling=1.0, floor=0.5), SCALES, C),
    (Importance(0.3, oversampling=2.0, floor=0.05), np.zeros(COUNT), 0.1),
]


@pytest.mark.parametrize(
    ("sampling", "warm", "reachable"),
    [pytest.param(*call, marks=[pytest.mark.soak] if place == 1 else []) for place, call in enumerate(CALLS)],
)
def test_a_record_takes_part_by_its_clipped_norm(sampling: Importance, warm: Any, reachable: float) -> None:
    """Whatever its last norm was, up to the bound that follows from it."""
    took_part, totals = taking_part(sampling, warm=warm)
    expected = sampling.rate * np.minimum(SCALES, reachable) / C
    counts = took_part.sum(axis=0)
    for found, likely in zip(counts, expected, strict=True):
        assert stats.binomtest(int(found), DRAWS, likely).pvalue > FALSE_ALARM / COUNT
    np.testing.assert_allclose(totals[took_part], C, rtol=1e-5)
    assert totals.min() == 0 and totals.max() <= C


def test_records_that_weigh_nothing_are_as_good_as_left_out() -> None:
    """As on an accelerator; a pass with a record that is not finite is taken again."""
    count, draw = 200, np.random.default_rng(0)
    features = torch.from_numpy(draw.normal(size=(count, 5)).astype(np.float32))
    features[7], features[150], features[151] = np.nan, np.inf, 1e30
    model = build("logistic", input_shape=(5,), classes=2, seed=0)
    engine = Engine(model, input_shape=(5,), physical_batch=64)
    point, labels = model.initial_parameters(), torch.zeros(count, dtype=torch.int64)
    sums, norms = [], []
    for by_weight in (True, False):
        last = LastNorms()
        stream = seeded_generator(2).stream(0)
        loaded: dict[str, Any] = {"engine": engine, "load": lambda rows: (features[rows], labels[rows])}
        for _ in range(2):  # of which the second starts from norms of the first
            asked = (point, count, Importance(0.6, oversampling=1.5), Normalised(C), stream.later(0))
            sums.append(importance_sum(*asked, last=last, by_weight=by_weight, **loaded))
        norms.append(last.to_tensor())
    assert sums[0].norm() > C and not torch.equal(sums[0], sums[1])
    torch.testing.assert_close(sums[:2], sums[2:], rtol=1e-12, atol=1e-12)
    assert norms[0] is not None and norms[1] is not None and torch.equal(norms[0], norms[1])


def test_each_part_of_a_pass_has_the_coins_and_bounds_of_its_own_records() -> None:
    """Where gradients of a pass are measured some at a time."""
    count, draw = 100, np.random.default_rng(0)
    features = torch.from_numpy(draw.normal(size=(count, 5)).astype(np.float32))
    labels, model = (
        torch.zeros(count, dtype=torch.int64),
        build("logistic", input_shape=(5,), classes=2, seed=0),
    )
    whole = Engine(model, input_shape=(5,), physical_batch=64)
    parts = copy(whole)
    parts.part_size = 20
    sums, norms = [], []
    for engine in (whole, parts):
        last, stream = LastNorms(), seeded_generator(2).stream(0)
        for _ in range(2):  # of which the second has a bound for each record
            asked = (
                model.initial_parameters(),
                count,
                Importance(0.6, oversampling=1.5),
                Normalised(C),
                stream,
            )
            loaded: dict[str, Any] = {"load": lambda rows: (features[rows], labels[rows]), "last": last}
            sums.append(importance_sum(*asked, engine=engine, **loaded))
        norms.append(last.to_tensor())
    assert not torch.equal(sums[0], sums[1])
    torch.testing.assert_close(sums[:2], sums[2:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norms[0], norms[1])


def test_coins_of_a_device_fall_as_those_of_the_host() -> None:
    edges = np.array([0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 2**12, 2**64 - 1], dtype=np.uint64)
    rates = [0.0, 2.0**-65, 2.0**-64, 2.0**-32, 2.0**-32 + 2.0**-64, 0.3, 0.5, 1 - 2.0**-53, 1.0, 1.5]
    drawn = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    pairs = [(word, rate) for word in edges for rate in rates]
    # of 53 bits: just above the word, or just below it
    pairs += [(word, float(word) / 2**64) for word in drawn]
    words, chances = np.array([word for word, _ in pairs]), np.array([rate for _, rate in pairs])
    halves = torch.from_numpy(np.stack(np.divmod(words, 2**32), axis=1).astype(np.float64))
    found = are_below(halves, torch.from_numpy(chances)).numpy()
    exact = [
        int(word) < min(1, Fraction(rate)) * 2**64 // 1 for word, rate in zip(words, chances, strict=True)
    ]
    assert found.tolist() == exact == is_below(words, chances).tolist()
    assert 0.2 < np.mean(exact[-1000:]) < 0.8


def test_where_all_norms_reach_the_bound_it_is_a_poisson_sample_of_dp_sgd() -> None:
    """The same rate for each record, the same contributions as clipping gives, the same event."""
    scales = np.full(COUNT, 2.5)
    took_part, totals = taking_part(IMPORTANCE, warm=scales, scales=scales)
    sizes = np.bincount(took_part.sum(axis=1), minlength=COUNT + 1)
    law = DRAWS * stats.binom.pmf(np.arange(COUNT + 1), COUNT, IMPORTANCE.rate)
    few = law < 5
    observed, expected = (np.append(x[~few], x[few].sum()) for x in (sizes, law))
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > FALSE_ALARM
    inputs, labels = torch.from_numpy(axes(scales).features), torch.from_numpy(axes(scales).labels)
    engine = Engine(axes_model(), input_shape=(COUNT,))
    for member, total in zip(took_part[:20], totals[:20], strict=True):
        rows = np.flatnonzero(member)
        clipped = engine.clipped_sum(torch.zeros(COUNT), inputs[rows], labels[rows], L2(C)).numpy()
        np.testing.assert_allclose(total, clipped, rtol=1e-5, atol=1e-9)
    ours = gradient_release(IMPORTANCE, Normalised(C), Gaussian(1.3), 1.0).event()
    assert ours == gradient_release(Poisson(IMPORTANCE.rate), L2(C), Gaussian(1.3), 1.0).event()


def test_the_variance_from_sampling_is_never_below_that_of_dp_sgd_at_the_same_event() -> None:
    """A record's part, at equal rate and noise: q C g - q^2 g^2 against q g^2 - q^2 g^2."""
    norms = np.random.default_rng(0).gamma(0.5, 1.0, size=1000).clip(max=C)
    for rate in (0.01, 0.2, 1.0):
        taken = rate * norms / C
        ours, theirs = C**2 * taken * (1 - taken), norms**2 * rate * (1 - rate)
        assert (ours >= theirs).all()
        assert ours.sum() > theirs.sum()


def test_one_more_record_moves_the_sum_by_its_bound_and_no_other_record_s_coins() -> None:
    """The same key with and without an extreme last record; coins do not depend on how many records follow."""
    model, records = small_model(), made_up(30)
    more = with_record(records, np.full((1, 4, 4), 1e6, dtype=np.float32), 0)
    point, sampling, moved = model.initial_parameters(), Importance(0.2, oversampling=2.0), []
    for seed in range(8):
        one, two = (barrier(data, generator=seeded_generator(seed)) for data in (records, more))
        for _ in range(15):
            moved.append(float((step(two, point, sampling) - step(one, point, sampling)).norm()))
    assert max(moved) <= C * (1 + 1e-4)
    often = sum(distance > 0.9 * C for distance in moved)
    assert stats.binomtest(often, len(moved), sampling.rate).pvalue > FALSE_ALARM
    assert sum(1e-3 < distance < 0.99 * C for distance in moved) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_record_without_a_finite_gradient_never_takes_part(value: float) -> None:
    records = axes()
    records.features[3] = value
    asked, point = barrier(records, axes_model()), torch.zeros(COUNT)
    answers = torch.stack([step(asked, point, Importance(1.0, oversampling=1.0)) for _ in range(5)])
    assert torch.isfinite(answers).all()
    assert (answers[:, 3].abs() < 1e-4).all()
    assert (answers[:, -1].abs() > 0.9).all()
    norms = np.delete(np.minimum(SCALES, C), 3)
    assert asked.norm_total(point, bound=L2(C), noise=NO_NOISE) == pytest.approx(norms.sum(), rel=1e-4)


def test_a_total_of_norms_is_their_sum_cut_off_and_is_charged_once_each() -> None:
    privacy_filter, trace = Free(), Trace()
    asked = barrier(axes(), axes_model(), privacy_filter=privacy_filter, trace=trace)
    for bound in (0.5, 1.0, 9.0):
        total = asked.norm_total(torch.zeros(COUNT), bound=L2(bound), noise=NO_NOISE)
        assert total == pytest.approx(np.minimum(SCALES, bound).sum(), rel=1e-4)
    assert privacy_filter.events == [dp.GaussianDpEvent(1e-6)] * 3
    assert [row.kind for row in trace.rows] == ["norms"] * 3
    assert [row.clip_norm for row in trace.rows] == [0.5, 1.0, 9.0]


def test_a_second_total_at_the_same_parameters_makes_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, passes, measure = barrier(axes(), axes_model()), [], Engine.norms

    def spy(*arguments: Any) -> Tensor:
        passes.append(len(arguments))
        return measure(*arguments)

    monkeypatch.setattr(Engine, "norms", spy)
    point = torch.zeros(COUNT)
    for bound in (4.0, 1.0):
        asked.norm_total(point.clone(), bound=L2(bound), noise=Gaussian(1.0))
    assert len(passes) == 1
    asked.norm_total(point + 1, bound=L2(1.0), noise=Gaussian(1.0))
    assert len(passes) == 2
    step(asked, point, Importance(1.0, oversampling=1.0))
    asked.norm_total(point + 1, bound=L2(1.0), noise=Gaussian(1.0))
    assert len(passes) == 3


def test_norms_of_another_model_at_the_same_parameters_are_its_own() -> None:
    model, point = axes_model(), torch.zeros(COUNT)
    steeper = replace(model, losses=lambda outputs, labels: 100 * model.losses(outputs, labels))
    asked = barrier(axes(), model)
    for queried, factor in ((asked, 1), (asked.with_model(steeper), 100), (asked, 1)):
        total = queried.norm_total(point, bound=L2(1e3), noise=NO_NOISE)
        assert total == pytest.approx(factor * SCALES.sum(), rel=1e-3)


def test_a_total_of_norms_tells_later_samples_whom_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    compute = Engine.contributions

    def spy(engine: Engine, point: Tensor, inputs: Tensor, labels: Tensor, *rest: Any) -> Any:
        looked.append(len(labels))
        return compute(engine, point, inputs, labels, *rest)

    tiny, point = axes(np.full(COUNT, 0.02)), torch.zeros(COUNT)
    asked, sampling = barrier(tiny, axes_model()), Importance(1.0, oversampling=1.0)
    monkeypatch.setattr(Engine, "contributions", spy)
    step(asked, point, sampling)
    assert sum(looked) == COUNT  # never seen: all are candidates
    asked.norm_total(point, bound=L2(C), noise=NO_NOISE)
    looked.clear()
    for _ in range(20):
        step(asked, point, sampling)
    assert sum(looked) < 20 * COUNT / 4


@pytest.mark.parametrize("sampling", [FullBatch(), Poisson(0.5)])
def test_a_count_of_norms_is_half_the_difference_and_costs_by_a_half(sampling: Any) -> None:
    privacy_filter, trace = Free(), Trace()
    asked = barrier(axes(), axes_model(), privacy_filter=privacy_filter, trace=trace)
    answer = asked.norm_count(torch.zeros(COUNT), bound=L2(1.0), noise=NO_NOISE, sampling=sampling)
    coins = seeded_generator(5).stream(0).of_sample().coins(COUNT, 0.5)
    rows = np.arange(COUNT) if sampling == FullBatch() else np.flatnonzero(coins)
    assert answer == pytest.approx(np.where(SCALES[rows] <= 1.0, 0.5, -0.5).sum(), abs=1e-3)
    inner = dp.GaussianDpEvent(1e-6)
    assert privacy_filter.events == [
        inner if sampling == FullBatch() else dp.PoissonSampledDpEvent(0.5, inner)
    ]
    assert (trace.rows[0].kind, trace.rows[0].clip_norm) == ("norm count", 0.5)


@pytest.mark.parametrize(
    ("norm", "part"), [(0.98, 0.5), (0.995, 0.25), (1.0, 0.0), (1.005, -0.25), (1.02, -0.5)]
)
def test_a_norm_near_the_bound_counts_in_part(norm: float, part: float) -> None:
    """So that rounding, which differs with the records beside it, takes no norm from one side to the other."""
    asked = barrier(axes(np.full(COUNT, norm)), axes_model())
    answer = asked.norm_count(torch.zeros(COUNT), bound=L2(1.0), noise=NO_NOISE)
    assert answer == pytest.approx(COUNT * part, abs=0.01)


@pytest.mark.parametrize("scale", [0.3, 1.0, 1.7])
def test_a_count_of_norms_does_not_jump_at_the_bound(scale: float) -> None:
    """One last bit above and below the very norms, and at them."""
    records, point = axes(np.full(COUNT, scale)), torch.zeros(COUNT)
    inputs, labels = torch.from_numpy(records.features), torch.from_numpy(records.labels)
    norm = float(Engine(axes_model(), input_shape=(COUNT,)).norms(point, inputs, labels, L2(1.0))[0])
    bounds = (math.nextafter(norm, 0.0), norm, math.nextafter(norm, math.inf))
    for bound in bounds:
        answer = barrier(records, axes_model()).norm_count(point, bound=L2(bound), noise=NO_NOISE)
        assert answer == pytest.approx(0.0, abs=1e-4)


def test_a_norm_that_has_outgrown_its_bound_counts_as_the_bound() -> None:
    """The last norm was a tenth of the present one, so that a record takes part a tenth as often."""
    records = axes(np.full(COUNT, C))
    inputs, labels = torch.from_numpy(records.features), torch.from_numpy(records.labels)
    engine, last, taken = Engine(axes_model(), input_shape=(COUNT,)), LastNorms(), 0
    sampling = Importance(0.8, oversampling=1.0, floor=0.01)
    for release in range(200):
        last.restore(torch.full((COUNT,), 0.1 * C, dtype=torch.float64))
        taken += int(
            (summed(engine, inputs, labels, last, sampling, seeded_generator(2).stream(release)) > 0.5).sum()
        )
    assert stats.binomtest(taken, 200 * COUNT, 0.08).pvalue > FALSE_ALARM


def test_the_noise_has_the_scale_that_is_charged() -> None:
    """Of importance samples, by chi-square; of norms and counts, by a sum of squares of many releases."""
    model, multiplier, bound = wide_model(), 1.3, 3.0
    empty, point = barrier(no_records(), model), model.initial_parameters()
    terms = {"clipping": Normalised(bound), "noise": Gaussian(multiplier), "divisor": 8.0}
    answers = [step(empty, point, **terms) for _ in range(4)]
    gradients = torch.cat(answers).numpy() * 8.0 / (multiplier * bound)
    noise: Any = Gaussian(multiplier)
    small = barrier(no_records(COUNT), axes_model())
    at = torch.zeros(COUNT)
    totals = np.array([small.norm_total(at, bound=L2(bound), noise=noise) for _ in range(600)])
    counts = np.array([small.norm_count(at, bound=L2(9.0), noise=noise) for _ in range(600)])
    for residuals in (gradients, totals / (multiplier * bound), counts / (multiplier * 0.5)):
        squares, k = np.sum(residuals**2), len(residuals)
        assert min(stats.chi2.cdf(squares, k), stats.chi2.sf(squares, k)) > FALSE_ALARM


def test_a_release_is_repeated_bit_for_bit_with_the_norms_that_were_kept() -> None:
    model, trace, last = small_model(), Trace(), LastNorms()
    wide: dict[str, Any] = {"clipping": Normalised(20.0)}  # of which the norms are small parts
    asked = barrier(made_up(40), trace=trace, last_norms=last)
    point, sampling = model.initial_parameters(), Importance(0.25, oversampling=2.0)
    asked.norm_total(point, bound=L2(C), noise=Gaussian(1.0))
    step(asked, point, sampling, **wide)
    kept = last.to_tensor()
    assert kept is not None
    again = LastNorms()
    again.restore(kept.clone())
    later = Trace(trace.rows[:2])
    answer = step(asked, point + 0.1, sampling, **wide)
    repeated = step(barrier(made_up(40), trace=later, last_norms=again), point + 0.1, sampling, **wide)
    assert torch.equal(repeated, answer)
    forgotten = step(barrier(made_up(40), trace=Trace(trace.rows[:2])), point + 0.1, sampling, **wide)
    assert not torch.equal(forgotten, answer)


def test_last_norms_are_shown_nowhere(tmp_path: Any) -> None:
    last, trace = LastNorms(), Trace()
    asked = barrier(axes(), axes_model(), trace=trace, last_norms=last)
    step(asked, torch.zeros(COUNT))
    assert "." not in repr(last).split(" object at ")[-1] and "inf" not in repr(last)
    assert not [name for name in dir(asked) if "norms" in name and not name.startswith("_")]
    trace.write(tmp_path / "trace.parquet")
    row = pd.read_parquet(tmp_path / "trace.parquet").iloc[0]
    assert (row.sampling, row.sampling_rate, row.clipping) == ("importance", 0.2, "Normalised")
    other = Trace()
    step(barrier(axes(SCALES[::-1]), axes_model(), trace=other), torch.zeros(COUNT))
    assert trace.rows[0] == other.rows[0]


@pytest.mark.parametrize("physical_batch", [1, 5, None])
def test_how_many_records_are_taken_at_once_changes_nothing(physical_batch: int | None) -> None:
    answers = []
    for size in (physical_batch, 64):
        asked = barrier(made_up(40), compute=ComputeConfig(physical_batch=size))
        answers.append(step(asked, small_model().initial_parameters(), Importance(0.25, oversampling=2.0)))
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-5, atol=1e-5)


def test_rounding_makes_no_record_more_likely_than_its_event_says() -> None:
    """Words at the limits: of candidates, with a margin below the charged rate; of accepted ones, exactly."""
    sampling, longest = Importance(0.3, oversampling=2.0), 2**64 - 1
    charged = int(Fraction(0.3) * 2 * 2**64)  # of a candidate, whose gradient then counts by half its bound
    first = {0: True, int(charged * (1 - 2.0**-40)): True, charged - 1: False, charged: False, longest: False}
    second = {0: True, 2**63 - 1: True, 2**63: False, longest: False}
    cases = list(product(first.items(), second.items()))
    records = axes(np.full(len(cases), 2.0))
    inputs, labels = torch.from_numpy(records.features), torch.from_numpy(records.labels)
    engine = Engine(axes_model(len(cases)), input_shape=(len(cases),))
    words = ChosenWords(*(word for (one, _), (other, _) in cases for word in (one, other)))
    total = summed(engine, inputs, labels, LastNorms(), sampling, words)
    assert (total > 0.5).tolist() == [one and other for (_, one), (_, other) in cases]


def test_the_event_is_that_of_the_lemma() -> None:
    """q = b C / K and z = sigma_G N C / K (Wei et al. 2022, Lemma 3.1), by the Rényi divergence of the mixture."""
    rate, z, order = 0.05, 1.4, 8
    event = gradient_release(Importance(rate), Normalised(C), Gaussian(z), 1.0).event()
    assert event == dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z))
    j = np.arange(order + 1)
    terms = stats.binom.pmf(j, order, rate) * np.exp((j**2 - j) / (2 * z**2))
    assert rdp([(event, 1)], orders=(float(order),))[0] == pytest.approx(np.log(terms.sum()) / (order - 1))


@pytest.mark.parametrize(
    ("clipping", "noise"),
    [(L2(1.0), Gaussian(1.0)), (L1(1.0), Laplace(1.0)), (Normalised(1.0, 0.01), Gaussian(1.0))],
)
def test_importance_samples_of_anything_else_are_refused(clipping: Any, noise: Any) -> None:
    privacy_filter = Free()
    with pytest.raises(RefusedError):
        asked, point = barrier(made_up(), privacy_filter=privacy_filter), small_model().initial_parameters()
        step(asked, point, clipping=clipping, noise=noise)
    assert privacy_filter.events == []


def test_releases_of_norms_without_a_proof_are_refused() -> None:
    for release in (
        norm_total_release(L2(1.0), Laplace(1.0)),
        norm_count_release(Laplace(1.0), Poisson(0.5)),
        norm_count_release(Gaussian(1.0), IMPORTANCE),
    ):
        with pytest.raises(RefusedError, match="has no proven privacy event"):
            release.event()
    assert norm_total_release(L2(1.0), NoNoise()).event() == dp.NonPrivateDpEvent()


@pytest.mark.parametrize(
    "terms",
    [
        {"rate": 0.0},
        {"rate": 1.1},
        {"rate": 0.5, "oversampling": 0.9},
        {"rate": 0.1, "floor": 0.0},
        {"rate": 0.1, "floor": 1.5},
        {"rate": 0.21, "oversampling": 5.0},
    ],
)
def test_terms_that_no_sample_can_have_are_refused(terms: dict[str, float]) -> None:
    with pytest.raises(RefusedError):
        Importance(**terms)


def test_norms_in_bfloat16_are_refused_before_the_charge() -> None:
    privacy_filter = Free()
    asked = barrier(
        made_up(), replace(small_model(), precision=torch.bfloat16), privacy_filter=privacy_filter
    )
    point = small_model().initial_parameters()
    for ask in (
        lambda: step(asked, point),
        lambda: asked.norm_total(point, bound=L2(1.0), noise=Gaussian(1.0)),
        lambda: asked.norm_count(point, bound=L2(1.0), noise=Gaussian(1.0)),
    ):
        with refused_as("model_in_bfloat16"):
            ask()
    assert privacy_filter.events == []


@pytest.mark.parametrize("count", [0, 3])
def test_a_question_that_is_impossible_is_refused_whether_there_are_records_or_not(count: int) -> None:
    """An error of the arithmetic would tell that somebody was drawn."""
    privacy_filter = Free()
    asked, point = barrier(made_up(count), privacy_filter=privacy_filter), small_model().initial_parameters()
    wrong = Affine(1.0, torch.zeros(7), torch.ones(7))
    questions: list[Any] = [lambda: step(asked, point, Poisson(1.0), clipping=wrong)]  # type: ignore[arg-type]
    questions += [lambda: asked.norm_count(point, bound=wrong, noise=Gaussian(1.0))]  # type: ignore[arg-type]
    for dtype in (torch.float64, torch.float16, torch.int64):
        other = point.to(dtype)
        questions += [
            lambda other=other: step(asked, other),
            lambda other=other: step(asked, other, Poisson(1.0), clipping=L2(1.0)),  # type: ignore[arg-type]
            lambda other=other: asked.norm_total(other, bound=L2(1.0), noise=Gaussian(1.0)),
            lambda other=other: asked.norm_count(other, bound=L2(1.0), noise=Gaussian(1.0)),
            lambda other=other: asked.argmin(other[None], bound=1.0, noise=Gumbel(1.0)),
        ]
    for question in questions:
        with pytest.raises(RefusedError, match="give"):
            question()
    assert privacy_filter.events == []

"""Samples: who takes part and what is charged for it, and selections by their law. False-alarm rates of 1e-6 each."""

import math
from itertools import combinations
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.gradients import L1, L2, Normalised
from algorithms.models import build
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import epsilon
from algorithms.privacy.accounting.events import PureDpEvent
from algorithms.privacy.accounting.filters import RenyiFilter, ScheduleFilter, ZCDPFilter
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian, Gumbel, Laplace, argmin_release, gradient_release
from algorithms.privacy.mechanisms.release_noise import noisy_argmin
from algorithms.privacy.mechanisms.sampling import FullBatch, Importance, Poisson, WithoutReplacement
from tests.support.barriers import FALSE_ALARM, Free, barrier, no_records, wide_model
from tests.support.bench import MadeUp, made_up, small_model
from tests.support.refusals import refused_as
from tests.support.soak import soak_but

COUNT, SIZE, RELEASES = 12, 5, 4000


def test_every_subset_is_equally_likely() -> None:
    """Each pair of places takes part together equally often, and so does each place; every subset occurs."""
    draws = np.array([seeded_generator(2).stream(release).subset(COUNT, SIZE) for release in range(RELEASES)])
    assert (np.diff(draws, axis=1) > 0).all() and draws.min() >= 0 and draws.max() < COUNT
    took_part = np.zeros((RELEASES, COUNT), dtype=int)
    np.put_along_axis(took_part, draws, 1, axis=1)
    assert (took_part.sum(axis=1) == SIZE).all()
    whole = math.comb(COUNT, SIZE)
    codes = np.unique(took_part @ 2 ** np.arange(COUNT), return_counts=True)[1]
    counts = np.concatenate([codes, np.zeros(whole - len(codes))])
    assert FALSE_ALARM < stats.chisquare(counts).pvalue < 1 - FALSE_ALARM
    pairs = [int((took_part[:, i] & took_part[:, j]).sum()) for i, j in combinations(range(COUNT), 2)]
    likely = SIZE * (SIZE - 1) / (COUNT * (COUNT - 1))
    tails = [stats.binomtest(pair, RELEASES, likely).pvalue for pair in pairs]
    assert min(tails) > FALSE_ALARM / len(pairs)
    again = int((took_part[1:] & took_part[:-1]).sum())  # one step's sample says nothing of the next one's
    assert stats.binomtest(again, COUNT * (RELEASES - 1), (SIZE / COUNT) ** 2).pvalue > FALSE_ALARM


@pytest.mark.parametrize("size", [1, COUNT])
def test_the_least_and_the_largest_subset(size: int) -> None:
    drawn = {tuple(seeded_generator(0).stream(release).subset(COUNT, size)) for release in range(300)}
    assert drawn == ({tuple(range(COUNT))} if size == COUNT else {(place,) for place in range(COUNT)})


@pytest.mark.parametrize(("size", "records"), [(0, 5), (6, 5), (-1, 5)])
def test_a_sample_that_does_not_fit_is_refused(size: int, records: int) -> None:
    with pytest.raises(RefusedError, match="give a size from 1 to"):
        WithoutReplacement(size, records)


def ones(count: int) -> MadeUp:
    return MadeUp(np.ones((count, 1, 4, 4), dtype=np.float32), np.zeros(count, dtype=np.int64))


def one_step(records: MadeUp, sampling: Any, noise: Any = None, **changes: Any) -> Tensor:
    point, terms = small_model().initial_parameters(), {"clipping": L2(0.5), "divisor": float(SIZE)}
    asked = barrier(records, **changes)
    return asked.gradient(point, sampling=sampling, noise=noise or Gaussian(1e-5), **terms).double()


def test_a_sample_holds_exactly_its_size_of_records() -> None:
    """Equal records: the sum is that of one of them, times the number that took part."""
    alone = one_step(ones(1), Poisson(1.0))
    for release in range(3):
        whole = one_step(ones(40), WithoutReplacement(7, 40), generator=seeded_generator(release))
        torch.testing.assert_close(whole, 7 * alone, rtol=1e-4, atol=1e-4)


def charged_rate(event: dp.DpEvent) -> float:
    """How likely a record takes part, by what was charged."""
    match event:
        case dp.PoissonSampledDpEvent():
            return float(event.sampling_probability)
        case dp.SampledWithoutReplacementDpEvent():
            return float(event.sample_size / event.source_dataset_size)
    return 1.0


def shown_by(kind: str, asked: Barrier, sampling: Any) -> np.ndarray:
    """Who took part in a release of one-hot records whose gradients are longer than the bound, [count]."""
    quiet, point = Gaussian(1e-4), torch.zeros(asked.input_shape[0])
    if kind == "total":
        answer = asked.total(lambda one, label: one, bound=L2(5.0), noise=quiet, sampling=sampling) / 5.0
    elif kind == "norm count":  # of a single record, whose norm is beyond the bound
        count = asked.norm_count(point, bound=L2(1.0), noise=quiet, sampling=sampling)
        answer = torch.tensor([-2.0 * count])
    else:
        bound: Any = Normalised(1.0) if isinstance(sampling, Importance) else L2(1.0)
        answer = asked.gradient(point, sampling=sampling, clipping=bound, noise=quiet, divisor=1.0).abs()
    return np.rint(answer.numpy()).astype(int)


TAKING_PART: list[tuple[str, Any, int]] = [
    ("total", Poisson(0.3), 100),
    ("gradient", Importance(0.3, oversampling=3.0), 100),
    ("gradient", WithoutReplacement(30, 100), 100),
    ("gradient", FullBatch(), 100),
    ("norm count", Poisson(0.3), 1),
]
"""Each kind of answer, and each kind of sample."""


@pytest.mark.parametrize(
    ("kind", "sampling", "count"), soak_but(TAKING_PART, [*TAKING_PART, ("gradient", Poisson(0.3), 100)])
)
def test_each_record_takes_part_at_the_charged_rate_by_coins_of_its_own(
    kind: str, sampling: Any, count: int
) -> None:
    """Each record as often as the rate in the event that was charged says, and alike in no two releases.

    A rate that is a tenth off is found, and a record that never takes part.
    """
    records = MadeUp(5 * np.eye(count, dtype=np.float32), np.zeros(count, dtype=np.int64))
    privacy_filter, releases = Free(), 60 if count > 1 else 300
    model = build("logistic_through_origin", input_shape=(count,), classes=2, seed=0)
    asked = barrier(records, model, privacy_filter=privacy_filter)
    took_part = np.array([shown_by(kind, asked, sampling) for _ in range(releases)])
    rate = charged_rate(privacy_filter.events[0])
    assert set(privacy_filter.events) == {privacy_filter.events[0]} and set(np.unique(took_part)) <= {0, 1}
    assert stats.binomtest(int(took_part.sum()), took_part.size, rate).pvalue > FALSE_ALARM
    each = [stats.binomtest(int(found), releases, rate).pvalue for found in took_part.sum(axis=0)]
    assert min(each) > FALSE_ALARM / count
    again = took_part[1:] & took_part[:-1]
    assert stats.binomtest(int(again.sum()), again.size, rate**2).pvalue > FALSE_ALARM
    sizes = took_part.sum(axis=1)
    if isinstance(sampling, Poisson | Importance):  # coins that records share would vary otherwise
        dispersion = float(((sizes - count * rate) ** 2).sum() / (count * rate * (1 - rate)))
        assert FALSE_ALARM < stats.chi2.sf(dispersion, releases) < 1 - FALSE_ALARM
    else:
        assert set(sizes) == {count * rate}


@pytest.mark.parametrize("records", [39, 41])
def test_a_sample_of_another_number_of_records_is_refused_before_the_charge(records: int) -> None:
    privacy_filter, trace = Free(), Trace()
    with pytest.raises(RefusedError, match="public size"):
        one_step(made_up(40), WithoutReplacement(7, records), privacy_filter=privacy_filter, trace=trace)
    assert privacy_filter.events == [] and trace.rows == []


def test_a_replaced_record_moves_a_sample_s_sum_by_at_most_twice_its_bound() -> None:
    before, moved = made_up(COUNT), []
    whole, extreme = one_step(before, WithoutReplacement(SIZE, COUNT)), np.full((1, 4, 4), 1e6)
    for place in range(COUNT):
        after = MadeUp(before.features.copy(), before.labels.copy())
        after.features[place], after.labels[place] = extreme, (after.labels[place] + 1) % 3
        moved.append(float((one_step(after, WithoutReplacement(SIZE, COUNT)) - whole).norm()) * SIZE)
    assert max(moved) <= 2 * 0.5 * (1 + 1e-4)
    assert sum(distance > 1e-3 for distance in moved) == SIZE  # the same sample, whatever its records are


@pytest.mark.parametrize(("clipping", "noise"), [(L2(1.0), Gaussian(3.0)), (L1(1.0), Laplace(3.0))])
def test_a_sample_of_fixed_size_is_charged_as_such(clipping: Any, noise: Any) -> None:
    event = gradient_release(WithoutReplacement(7, 40), clipping, noise, 7.0).event()
    inner = dp.GaussianDpEvent(3.0) if isinstance(noise, Gaussian) else dp.LaplaceDpEvent(3.0)
    assert event == dp.SampledWithoutReplacementDpEvent(40, 7, inner)
    for privacy_filter in (ZCDPFilter(100.0), RenyiFilter(8.0, Budget(100.0, 1e-5))):
        with pytest.raises(RefusedError):
            privacy_filter.charge(event)


def test_a_step_on_a_sample_is_repeated_bit_for_bit_on_resume() -> None:
    sampling, trace = WithoutReplacement(20, 40), Trace()
    asked = barrier(made_up(40), trace=trace)
    point = small_model().initial_parameters()
    ask: dict[str, Any] = {"clipping": L2(0.5), "noise": Gaussian(0.1), "divisor": 20.0}
    answers = [asked.gradient(point, sampling=sampling, **ask) for _ in range(3)]
    assert not torch.equal(answers[0], answers[1])
    later = Trace(trace.rows[:2])
    again = barrier(made_up(40), trace=later).gradient(point, sampling=sampling, **ask)
    assert torch.equal(again, answers[2])
    assert later.rows[2] == trace.rows[2]
    assert (later.rows[2].sampling, later.rows[2].sampling_rate) == ("without replacement", 0.5)


@pytest.mark.parametrize(("noise", "kind"), [(Gumbel(0.5), Gumbel), (Laplace(0.5), Laplace)])
def test_a_selection_on_a_sample_is_charged_as_a_sample_of_a_pure_one(noise: Any, kind: type) -> None:
    event = argmin_release(3.0, noise, Poisson(0.1)).event()
    assert event == dp.PoissonSampledDpEvent(0.1, PureDpEvent(2.0))
    assert epsilon([(event, 1)], 0.0, accountant="pure") == pytest.approx(math.log1p(0.1 * math.expm1(2.0)))
    assert argmin_release(3.0, kind(0.5)).event() == dp.dp_event.ZCDpEvent(0.5 if kind is Gumbel else 2.0)
    with refused_as("no_bound_by_zcdp"):
        ZCDPFilter(100.0).charge(event)


LOSSES = np.array([0.0, 0.05, 0.5, 0.45, 0.4, 0.48, 0.42])
"""What each record of ones costs seven candidates, at a bound of 0.5."""


def candidates() -> Tensor:
    """Softmax models that give a record of ones and class 0 these losses; the last bit of the first is no matter."""
    margins = -np.log(np.expm1(np.maximum(LOSSES, 1e-9)) / 2)
    points = torch.zeros(len(LOSSES), small_model().parameter_count)
    points[:, :16] = torch.from_numpy(margins / 16)[:, None]
    return points


def law(losses: np.ndarray, noise: Gumbel | Laplace) -> np.ndarray:
    """How likely noise at the bound of 0.5 makes each candidate the best, [k]."""
    scores = -losses / (0.5 * noise.multiplier)
    if isinstance(noise, Gumbel):
        return np.asarray(special.softmax(scores))
    x = np.linspace(-60.0, 60.0, 3001)
    below = stats.laplace.cdf(x[:, None, None] + scores[:, None] - scores)  # [x, chosen, other]
    below[:, range(len(scores)), range(len(scores))] = 1.0
    return np.asarray(np.trapezoid(stats.laplace.pdf(x)[:, None] * below.prod(axis=2), x, axis=0))


def check_law(chosen: list[int], expected: np.ndarray) -> None:
    found = np.bincount(chosen, minlength=len(LOSSES))
    assert stats.chisquare(found, len(chosen) * expected / expected.sum()).pvalue > FALSE_ALARM


@pytest.mark.parametrize("noise", [Gumbel(2.0), Laplace(2.0)])
def test_the_noise_of_a_selection_has_the_sign_and_scale_of_its_law(noise: Any) -> None:
    """Three and more candidates tell Gumbel noise from its negative; noise smaller by a tenth is found."""
    release, losses = argmin_release(0.5, noise), torch.from_numpy(4 * LOSSES)
    streams = (seeded_generator(6).stream(place) for place in range(10_000))
    check_law([noisy_argmin(losses, release, one) for one in streams], law(4 * LOSSES, noise))


PREFERRED: list[tuple[int, Poisson | None, Any]] = [(4, None, Gumbel(2.0)), (8, Poisson(0.5), Laplace(2.0))]
"""Each noise, with and without a sample."""


@pytest.mark.parametrize(
    ("count", "sampling", "noise"),
    soak_but(PREFERRED, [*PREFERRED, (8, Poisson(0.5), Gumbel(2.0)), (0, Poisson(0.5), Laplace(2.0))]),
)
def test_a_selection_prefers_as_its_law_says(count: int, sampling: Poisson | None, noise: Any) -> None:
    """Of a sample, the law's mixture over how many take part at the rate that was charged.

    Half of the noise, or a sample of all records, is missed once in 300 times at most.
    """
    privacy_filter, points = Free(), candidates()
    asked = barrier(ones(count), privacy_filter=privacy_filter)
    chosen = [asked.argmin(points, bound=0.5, noise=noise, sampling=sampling) for _ in range(400)]
    likely = stats.binom.pmf(np.arange(count + 1), count, charged_rate(privacy_filter.events[0]))
    laws = np.stack([law(took_part * LOSSES, noise) for took_part in range(count + 1)])
    check_law(chosen, likely @ laws)


def test_an_empty_sample_is_answered_with_noise() -> None:
    asked = barrier(no_records(), wide_model())
    point = torch.zeros(30_003)
    answer = asked.gradient(point, sampling=Poisson(1e-9), clipping=L2(1.0), noise=Gaussian(2.0), divisor=4.0)
    assert FALSE_ALARM < stats.chi2.cdf(float((answer.double() * 2).square().sum()), 30_003) < 1 - FALSE_ALARM
    candidates = torch.stack([point, point, point])
    chosen = [
        asked.argmin(candidates, bound=1.0, noise=Gumbel(2.0), sampling=Poisson(1e-9)) for _ in range(60)
    ]
    assert set(chosen) == {0, 1, 2}


def test_a_selection_on_a_sample_is_repeated_bit_for_bit_on_resume() -> None:
    trace, model = Trace(), small_model()
    asked = barrier(made_up(40), trace=trace)
    points = torch.randn(30, model.parameter_count, generator=torch.Generator().manual_seed(0))
    ask: dict[str, Any] = {"bound": 2.0, "noise": Gumbel(1.0), "sampling": Poisson(0.5)}
    chosen = [asked.argmin(points, **ask) for _ in range(6)]
    assert len(set(chosen)) > 1
    for done in range(6):
        assert barrier(made_up(40), trace=Trace(trace.rows[:done])).argmin(points, **ask) == chosen[done]


def test_a_plan_of_samples_allows_nothing_else() -> None:
    event = dp.SampledWithoutReplacementDpEvent(40, 7, dp.GaussianDpEvent(3.0))
    privacy_filter = ScheduleFilter([(event, 2)], Budget(1.0, 1e-5), dp.NeighboringRelation.REPLACE_ONE)
    for other in (
        dp.SampledWithoutReplacementDpEvent(40, 8, dp.GaussianDpEvent(3.0)),
        dp.SampledWithoutReplacementDpEvent(41, 7, dp.GaussianDpEvent(3.0)),
        dp.PoissonSampledDpEvent(7 / 40, dp.GaussianDpEvent(3.0)),
    ):
        with refused_as("not_the_next_release", BudgetRefusedError):
            privacy_filter.charge(other)
    privacy_filter.charge(event)
    assert privacy_filter.affords(event)

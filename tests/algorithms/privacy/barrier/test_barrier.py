"""The barrier's promises, with the statistical tests at a false-alarm rate of 1e-6 each."""

import copy
import logging
import math
import re
import traceback
from typing import Any

import dp_accounting as dp
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.gradients import L1, L2, PerLayer, Unclipped, engine
from algorithms.models import Model, build
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.filters import ScheduleFilter, ZCDPFilter
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.compute_config import ComputeConfig
from algorithms.privacy.barrier.trace import ReleaseRow, Trace
from algorithms.privacy.mechanisms.noise import secure_generator, seeded_generator
from algorithms.privacy.mechanisms.release import (
    Gaussian,
    Gumbel,
    Laplace,
    Minimum,
    NoNoise,
    Release,
    argmin_release,
    gradient_release,
    minimum_release,
    total_release,
)
from algorithms.privacy.mechanisms.sampling import FullBatch, Poisson, WithoutReplacement
from tests.support.barriers import FALSE_ALARM, Free, barrier, conv_model, no_records, wide_model
from tests.support.bench import MadeUp, made_up, small_model, with_record
from tests.support.refusals import refused_as
from tests.support.threads import cpu_threads


def residuals(clipping: L2 | PerLayer, multiplier: float, releases: int = 4) -> np.ndarray:
    model, trace = wide_model(), Trace()
    empty = barrier(no_records(), model, trace=trace)
    answers = [
        empty.gradient(
            model.initial_parameters(),
            sampling=Poisson(0.5),
            clipping=clipping,
            noise=Gaussian(multiplier),
            divisor=8.0,
        )
        for _ in range(releases)
    ]
    return torch.cat(answers).double().numpy() * 8.0 / (multiplier * clipping.sensitivity)


@pytest.mark.parametrize("clipping", [L2(0.5), L2(3.0), PerLayer((2.0,))])
def test_the_noise_of_a_gradient_has_the_scale_that_is_charged(clipping: L2 | PerLayer) -> None:
    r = residuals(clipping, 1.3)
    lower, upper = stats.chi2.cdf(np.sum(r**2), len(r)), stats.chi2.sf(np.sum(r**2), len(r))
    assert len(r) > 1e5  # power: noise smaller by 2 % is found
    assert min(lower, upper) > FALSE_ALARM


def test_the_noise_of_a_total_has_the_scale_that_is_charged() -> None:
    empty = barrier(no_records(), wide_model())
    k = 100_000

    def statistic(features: Tensor, label: Tensor) -> Tensor:
        return torch.zeros(k)

    normal = empty.total(statistic, bound=L2(2.0), noise=Gaussian(0.7)).numpy() / (2.0 * 0.7)
    laplace = empty.total(statistic, bound=L1(2.0), noise=Laplace(0.7)).numpy() / (2.0 * 0.7)
    assert stats.kstest(normal, stats.norm().cdf).pvalue > FALSE_ALARM
    assert stats.kstest(laplace, stats.laplace().cdf).pvalue > FALSE_ALARM
    assert FALSE_ALARM < stats.gamma.cdf(np.abs(laplace).sum(), k) < 1 - FALSE_ALARM


def test_worst_case_canaries_leak_what_is_charged_and_no_more() -> None:
    """1,000 canaries along their own directions, half of them in: scores are N(b, z^2), and the gap says mu = 1/z."""
    canaries, z = 1000, 1.0
    inside = np.arange(canaries) % 2 == 0
    directions = 1e3 * np.eye(canaries, dtype=np.float32)
    records = MadeUp(directions[inside], np.zeros(int(inside.sum()), dtype=np.int64))
    asked = barrier(records, build("softmax", input_shape=(canaries,), classes=3, seed=0))

    def features(one: Tensor, label: Tensor) -> Tensor:
        return one

    scores = asked.total(features, bound=L2(2.0), noise=Gaussian(z)).numpy() / 2.0
    mean_in, mean_out = scores[inside].mean(), scores[~inside].mean()
    spread = math.sqrt((scores[inside].var() + scores[~inside].var()) / 2)
    mu = (mean_in - mean_out) / spread
    error = math.sqrt(1 / inside.sum() + 1 / (~inside).sum() + mu**2 / (2 * canaries))
    assert abs(mu - 1 / z) / error < 5


def ask(asked: Barrier, clipping: Any, parameters: Tensor) -> Tensor:
    return asked.gradient(
        parameters, sampling=FullBatch(), clipping=clipping, noise=Gaussian(0.01), divisor=4.0
    ).double()


@pytest.mark.parametrize("name", ["softmax", "conv"])
@pytest.mark.parametrize("clip_norm", [0.1, 2.0])
@pytest.mark.parametrize("layered", [False, True])
def test_no_record_can_move_a_gradient_further_than_its_bound(
    name: str, clip_norm: float, layered: bool
) -> None:
    model = small_model() if name == "softmax" else conv_model()
    layers = len(model.layers)
    clipping = PerLayer((clip_norm / math.sqrt(layers),) * layers) if layered else L2(clip_norm)
    parameters = model.initial_parameters()
    without = ask(barrier(made_up(12), model), clipping, parameters)
    for scale in (1e-3, 1.0, 1e6, 1e30):
        features = (scale * np.random.default_rng(1).normal(size=(1, 4, 4))).astype(np.float32)
        moved = ask(barrier(with_record(made_up(12), features, 2), model), clipping, parameters) - without
        assert float(moved.norm()) * 4.0 <= clip_norm * (1 + 1e-5) + 1e-5
        # The closed forms leave out what is too long for 32 bits.
        assert float(moved.norm()) > 0 or scale == 1e30


def test_sums_are_divided_by_the_public_number_not_by_the_batch() -> None:
    model, parameters = small_model(), small_model().initial_parameters()
    one = MadeUp(np.ones((1, 1, 4, 4), dtype=np.float32), np.zeros(1, dtype=np.int64))
    many = MadeUp(np.ones((9, 1, 4, 4), dtype=np.float32), np.zeros(9, dtype=np.int64))
    few, more = (float(ask(barrier(held, model), L2(1.0), parameters).norm()) for held in (one, many))
    assert more / few == pytest.approx(9.0, rel=0.05)


def test_what_is_not_afforded_touches_and_records_nothing() -> None:
    trace, model = Trace(), small_model()
    privacy_filter = ZCDPFilter(1e-3)
    asked = barrier(made_up(), model, privacy_filter=privacy_filter, trace=trace)
    release = gradient_release(FullBatch(), L2(1.0), Gaussian(1.0), 1.0)
    assert not asked.affords(release)
    with refused_as("filter_exhausted", BudgetRefusedError):
        ask(asked, L2(1.0), model.initial_parameters())
    assert trace.rows == []
    assert privacy_filter.epsilon_spent(1e-5) == 0.0


def test_a_planned_run_keeps_to_its_order() -> None:
    first, second = dp.GaussianDpEvent(1.0), dp.GaussianDpEvent(2.0)
    privacy_filter = ScheduleFilter([(first, 1), (second, 1)], Budget(10.0, 1e-5))
    assert not privacy_filter.affords(second)
    with refused_as("not_the_next_release", BudgetRefusedError):
        privacy_filter.charge(second)
    privacy_filter.charge(first)
    assert privacy_filter.affords(second) and not privacy_filter.affords(first)


TRACKING = nn.InstanceNorm1d(3, track_running_stats=True)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.SyncBatchNorm(3), TRACKING])
def test_a_layer_that_mixes_records_is_refused_by_name(layer: nn.Module) -> None:
    module = nn.Sequential(nn.Linear(4, 3), layer)
    model = Model("mixing", module, small_model().losses, lambda outputs: outputs)
    with refused_as("records_mixed") as refusal:
        barrier(made_up(), model)
    assert f"1 ({type(layer).__name__})" in str(refusal.value.fields["why"])


class BatchNormOfMyOwn(nn.Module):
    """Mixes records, but is no layer that PyTorch knows to be a BatchNorm."""

    def forward(self, values: Tensor) -> Tensor:
        """The values less their mean."""
        return values - values.mean(dim=0)


@pytest.mark.parametrize(
    ("layer", "can_be_replaced"),
    [(nn.BatchNorm1d(3), True), (nn.SyncBatchNorm(3), True), (BatchNormOfMyOwn(), False), (TRACKING, False)],
)
def test_replacing_batch_norms_is_advised_where_it_helps(layer: nn.Module, can_be_replaced: bool) -> None:
    module = nn.Sequential(nn.Linear(16, 3), layer)
    model = Model(
        "mixing", nn.Sequential(nn.Flatten(), module), small_model().losses, lambda outputs: outputs
    )
    with refused_as("records_mixed") as refusal:
        barrier(made_up(), model)
    assert ("replace_batch_norm" in str(refusal.value.fields["advice"])) is can_be_replaced


def test_a_model_that_draws_random_numbers_is_refused() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3))
    with pytest.raises(RefusedError, match="draws random numbers"):
        barrier(made_up(), Model("dropping", module, small_model().losses, lambda outputs: outputs))


@pytest.mark.parametrize(("physical_batch", "threads"), [(None, 2), (32, 1)])
def test_threads_are_as_few_as_leave_a_record_the_same_in_any_place(
    physical_batch: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SHORT_PASS_SECONDS", 0.0)
    asked = barrier(made_up(), compute=ComputeConfig(physical_batch=physical_batch))
    with cpu_threads(3):
        ask(asked, L2(1.0), small_model().initial_parameters())
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize("shape", [(0,), (50,), (52,)])
def test_points_that_do_not_fit_the_model_are_refused_before_the_charge(shape: tuple[int, ...]) -> None:
    privacy_filter = Free()
    asked = barrier(made_up(), privacy_filter=privacy_filter)
    with pytest.raises(RefusedError, match="do not fit the model"):
        ask(asked, L2(1.0), torch.zeros(shape))
    for candidates in (torch.zeros(2, *shape), torch.zeros(0, 51)):
        with pytest.raises(RefusedError, match="do not fit the model"):
            asked.argmin(candidates, bound=1.0, noise=Gumbel(0.5))
    assert privacy_filter.events == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_candidate_that_is_not_finite_is_never_selected(bad: float) -> None:
    right = small_model().initial_parameters()
    candidates = torch.stack([torch.full_like(right, bad), right])
    chosen = {
        barrier(made_up(), generator=seeded_generator(i)).argmin(candidates, bound=1.0, noise=Gumbel(50.0))
        for i in range(20)
    }
    assert chosen == {1}


def test_per_layer_bounds_that_do_not_fit_the_model_are_refused_before_the_charge() -> None:
    privacy_filter, model = Free(), conv_model()
    with pytest.raises(RefusedError, match="3 bounds, the model has 2 layers"):
        ask(
            barrier(made_up(), model, privacy_filter=privacy_filter),
            PerLayer((1.0, 1.0, 1.0)),
            model.initial_parameters(),
        )
    assert privacy_filter.events == []


def test_a_module_that_centres_its_batch_is_refused() -> None:
    class Centring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            flat = inputs.flatten(start_dim=1)
            return self.layer(flat - flat.mean(dim=0))

    model = Model("centring", Centring(), small_model().losses, lambda outputs: outputs)
    with refused_as("records_mixed"):
        barrier(made_up(8), model)


@pytest.mark.parametrize(
    ("release", "event"),
    [
        (gradient_release(Poisson(0.1), L2(1.0), Gaussian(2.0), 1.0), "PoissonSampledDpEvent"),
        (gradient_release(FullBatch(), PerLayer((1.0, 2.0)), Gaussian(2.0), 1.0), "GaussianDpEvent"),
        (gradient_release(Poisson(0.1), Unclipped(), NoNoise(), 1.0), "NonPrivateDpEvent"),
        (total_release(L1(1.0), Laplace(2.0)), "LaplaceDpEvent"),
        (argmin_release(1.0, Gumbel(2.0)), "ZCDpEvent"),
    ],
)
def test_a_question_costs_its_proven_event(release: Release, event: str) -> None:
    assert type(release.event()).__name__ == event


@pytest.mark.parametrize(
    "release",
    [
        gradient_release(Poisson(0.1), L2(1.0), Laplace(2.0), 1.0),
        gradient_release(Poisson(0.1), Unclipped(), Gaussian(2.0), 1.0),
        gradient_release(Poisson(0.1), L2(1.0), Gumbel(2.0), 1.0),
        total_release(L2(1.0), Laplace(2.0)),
        argmin_release(1.0, Gaussian(2.0)),
        argmin_release(1.0, Gumbel(2.0), WithoutReplacement(5, 50)),
        total_release(L1(1.0), Laplace(2.0), WithoutReplacement(5, 50)),
        minimum_release(Minimum(1.0, 1.0, 1e-6, 2.0, 1.0), Laplace(2.0)),
    ],
)
def test_a_question_without_a_proven_event_is_refused(release: Release) -> None:
    with pytest.raises(RefusedError, match="no proven privacy event"):
        release.event()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0.0), "sampling rate must lie"),
        (lambda: Poisson(1.1), "sampling rate must lie"),
        (lambda: Gaussian(0.0), "noise multiplier must be"),
        (lambda: Laplace(math.nan), "noise multiplier must be"),
        (lambda: Gumbel(math.inf), "noise multiplier must be"),
        (lambda: L2(0.0), "clip norm must lie"),
        (lambda: L2(1e-40), "clip norm must lie"),
        (lambda: PerLayer((1.0, -1.0)), "clip norm must lie"),
        (lambda: gradient_release(FullBatch(), L2(1.0), Gaussian(1.0), 0.0), "divided by a public number"),
    ],
)
def test_impossible_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_trace_survives_its_file(tmp_path: Any) -> None:
    trace, model = Trace(), small_model()
    asked = barrier(made_up(), model, trace=trace, generator=secure_generator())
    trace.step = 3
    ask(asked, L2(1.0), model.initial_parameters())
    trace.write(tmp_path / "trace.parquet")
    written = pd.read_parquet(tmp_path / "trace.parquet")
    names = (
        "release step kind event sampling sampling_rate clipping clip_norm noise noise_multiplier noise_std"
    )
    assert list(written) == [*names.split(), "divisor", "epsilon"]
    assert [ReleaseRow(**read) for read in written.to_dict("records")] == trace.rows
    assert trace.events() == [dp.GaussianDpEvent(0.01)]
    assert (trace.rows[0].step, trace.rows[0].clip_norm, trace.rows[0].divisor) == (3, 1.0, 4.0)


PRIVATE = 317
"""A number of records that occurs nowhere else."""


def _refused_of(asked: Barrier) -> dict[str, Any]:
    """Questions that a barrier refuses, by name."""
    point, noise, bound = small_model().initial_parameters(), Gaussian(1.0), L2(1.0)
    terms: dict[str, Any] = {"sampling": FullBatch(), "clipping": bound, "noise": noise, "divisor": 1.0}

    return {
        "a point of another length": lambda: asked.gradient(point[1:], **terms),
        "a point of another type": lambda: asked.gradient(point.double(), **terms),
        "no bound for each layer": lambda: asked.gradient(
            point, **terms | {"clipping": PerLayer((1.0,) * 7)}
        ),
        "another public number": lambda: asked.total(
            lambda features, _: features.flatten(),
            bound=L1(1.0),
            noise=Laplace(2.0),
            sampling=WithoutReplacement(5, 300),
        ),
        "another norm": lambda: asked.norm_count(point, bound=L1(1.0), noise=noise),  # type: ignore[arg-type]
        "no minimum": lambda: asked.minimum(
            Minimum(clip_norm=1.0, regularisation=1.0, tolerance=1e-9, input_norm=1.0, curvature=1.0),
            noise=noise,
        ),
        "no matrix": lambda: asked.moment(lambda features, _: features.flatten(), bound=bound, noise=noise),
        "no candidate": lambda: asked.argmin(point[None][:0], bound=1.0, noise=Gumbel(1.0)),
        "a copy": lambda: copy.copy(asked),
    }


@pytest.mark.parametrize("name", _refused_of(barrier(made_up(5))))
def test_what_is_refused_does_not_say_how_many_records_there_are(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    records = made_up(PRIVATE)
    numbers = [PRIVATE, PRIVATE - 1, *np.bincount(records.labels).tolist()]
    kind = TypeError if name == "a copy" else RefusedError
    with caplog.at_level(logging.DEBUG), pytest.raises(kind) as failed:
        _refused_of(barrier(records))[name]()
    told = "".join(traceback.format_exception(failed.value)) + caplog.text
    told = re.sub(r"line \d+, in", "", told)
    assert not [number for number in numbers if re.search(rf"(?<![\d.]){number}(?![\d.])", told)]

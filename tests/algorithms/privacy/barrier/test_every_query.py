"""What the barrier promises for every kind of question, not for gradients alone."""

import gc
import warnings
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from algorithms.errors import RefusedError
from algorithms.gradients import L1, L2, Engine, PerLayer
from algorithms.gradients.replay import Replay
from algorithms.models import Model
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import (
    grid_step,
    scale_on_grid,
    seeded_generator,
    std_on_grid,
)
from algorithms.privacy.mechanisms.release import (
    Gaussian,
    Gumbel,
    Laplace,
    argmin_release,
    gradient_release,
)
from algorithms.privacy.mechanisms.sampling import FullBatch, Poisson
from tests.algorithms.privacy.barrier.every_query import (
    BINARY,
    NOISE,
    PARAMETERS,
    QUESTIONS,
    WHOLE,
    every_question,
)
from tests.support.barriers import FALSE_ALARM, Free, barrier, no_records, wide_model
from tests.support.bench import SHAPE, MadeUp, add_on_grid, made_up, small_model
from tests.support.engines import engines_once
from tests.support.soak import soak_but
from tests.support.threads import cpu_threads

__all__ = ["engines_once"]


class Guarded:
    """Records whose values may not be touched before the charge; the shape of a record is public."""

    def __init__(self, privacy_filter: Free) -> None:
        self.privacy_filter = privacy_filter

    @property
    def labels(self) -> np.ndarray:
        assert self.privacy_filter.events, "the records were touched before the charge"
        return made_up(classes=2).labels

    @property
    def features(self) -> np.ndarray:
        return (
            made_up(classes=2).features
            if self.privacy_filter.events
            else np.zeros((0, 1, 4, 4), dtype=np.float32)
        )


@every_question
def test_every_question_is_charged_its_event_before_the_look(kind: str) -> None:
    ask, event = QUESTIONS[kind]
    privacy_filter, trace = Free(), Trace()
    ask(barrier(Guarded(privacy_filter), privacy_filter=privacy_filter, trace=trace))  # type: ignore[arg-type]
    assert privacy_filter.events == [event]
    assert trace.events() == [event]


@pytest.fixture(scope="module")
def nothing_is_left() -> None:
    """What other tests left may warn when it goes; looking for it takes longer than a question."""
    gc.collect()


@every_question
@pytest.mark.usefixtures("nothing_is_left", "log_to_pytest_alone")
def test_nothing_recorded_logged_or_printed_depends_on_the_records(
    kind: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither on what they are, nor on how many there are or take part: 40 of them, 41 and 90."""
    told = []
    for count in (40, 41, 90):
        trace = Trace()
        caplog.clear()
        with caplog.at_level(1), cpu_threads(1), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            asked = barrier(made_up(count, seed=count, classes=2), trace=trace)
            for trace.step in range(3):
                QUESTIONS[kind][0](asked)
        told.append((trace.rows, caplog.messages, capfd.readouterr(), [str(one.message) for one in warned]))
    assert len(told[0][0]) == 3
    assert told[0] == told[1] == told[2]


@every_question
def test_two_releases_share_no_noise(kind: str) -> None:
    """Without records an answer is its noise, and a selection follows it alone. False alarms: 1e-6 a question."""
    asked, ask = barrier(made_up(0)), QUESTIONS[kind][0]
    first = np.atleast_1d(np.asarray(ask(asked), dtype=np.float64))
    later = [np.atleast_1d(np.asarray(ask(asked), dtype=np.float64)) for _ in range(8 + 300 // len(first))]
    answers = np.stack([first, *later])
    assert stats.pearsonr(answers[:-1].ravel(), answers[1:].ravel()).pvalue > FALSE_ALARM


@every_question
def test_no_question_goes_on_in_a_fork(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would draw the noise that the first process draws, for another answer."""
    privacy_filter, trace = Free(), Trace()
    asked = barrier(made_up(classes=2), privacy_filter=privacy_filter, trace=trace)
    second = asked.with_model(small_model())
    monkeypatch.setattr("os.getpid", lambda: -1)
    for each in (asked, second):
        with pytest.raises(RefusedError, match="in another process than it was made in"):
            QUESTIONS[kind][0](each)
    assert privacy_filter.events == [] and trace.rows == []


def test_a_second_model_of_a_run_has_noise_of_its_own() -> None:
    """Without records an answer is its noise: each is drawn from the stream of its own release."""
    trace = Trace()
    first = barrier(made_up(0), trace=trace)
    second = first.with_model(small_model("mlp"))
    k = 1000

    def total(asked: Barrier) -> NDArray[np.float64]:
        noise = Gaussian(2.0)
        return asked.total(lambda one, label: torch.zeros(k), bound=L2(1.0), noise=noise).numpy()

    for number, asked in enumerate((first, second, first.with_model(BINARY), second, first)):
        draws = seeded_generator(5).stream(number).normal(k)
        scale = std_on_grid(2.0, sensitivity=1.0, dimension=k)
        assert np.array_equal(total(asked), add_on_grid(np.zeros(k), scale * draws, std=2.0))
    assert len(trace.rows) == 5


class Noted(nn.Module):
    """A linear model that notes how many records each of its passes has."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.layer = nn.Flatten(), nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        PASSES.add(len(inputs))
        outputs: Tensor = self.layer(self.flat(inputs))
        return outputs


PASSES: set[int] = set()


QUERIES = [kind for kind in QUESTIONS if "minimum" not in kind]
# The last of the sizes is the usual one; the others are compared with it. On some processors 4 has other bits.
SIZES = (None, (64,)), (6.0, (4, 8, 12, 16)), (400.0, (384, 448))
OF_SIZES = [(kind, batch, sizes) for kind in QUERIES for batch, sizes in SIZES]
SAMPLED = {f"{kind} of a sample" for kind in ("total", "norm_count", "argmin")}
"""Those of which samples are drawn and cut into passes as a gradient's are."""


@pytest.mark.parametrize(
    ("kind", "expected_batch", "sizes"),
    soak_but(
        [each for each in OF_SIZES if each[0] not in SAMPLED and (each[1] == 6.0 or each[0] == QUERIES[0])],
        OF_SIZES,
    ),
)
def test_no_pass_has_a_size_that_was_not_compared(
    kind: str, expected_batch: float | None, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a model's passes nor those of statistics, however many records there are or take part."""
    rows: set[int] = set()
    vmap = torch.func.vmap

    def noted(statistic: Any) -> Any:
        return lambda *parts: (rows.add(len(parts[0])), vmap(statistic)(*parts))[1]

    replay = Replay.__call__

    def replayed(self: Replay, parameters: Tensor, inputs: Tensor, labels: Tensor) -> Any:
        PASSES.add(len(inputs))
        return replay(self, parameters, inputs, labels)

    monkeypatch.setattr(Replay, "__call__", replayed)
    model, is_seen = Model("noted", Noted(), small_model().losses, lambda outputs: outputs), False
    compute = ComputeConfig(expected_batch=expected_batch, workers=1)
    for count in (1, 40, 65, 130):
        asked = barrier(made_up(count, classes=2), model, compute=compute)
        monkeypatch.setattr(torch.func, "vmap", noted)
        PASSES.clear()
        QUESTIONS[kind][0](asked)
        monkeypatch.setattr(torch.func, "vmap", vmap)
        assert {*sizes} >= PASSES and rows <= {1, 4096}  # one row tells a statistic's shape
        is_seen |= bool(PASSES or rows)
    assert is_seen


def test_noise_is_added_once_however_many_slices() -> None:
    """Nine records that count as zero, one to a slice, against none at all: the same noise, bit for bit."""
    nothing = MadeUp(np.full((9, 10_000), np.nan, dtype=np.float32), np.zeros(9, dtype=np.int64))
    one_by_one = ComputeConfig(physical_batch=1)

    def answer(records: MadeUp) -> torch.Tensor:
        asked = barrier(records, wide_model(), compute=one_by_one)
        point = wide_model().initial_parameters()
        return asked.gradient(point, sampling=WHOLE, clipping=L2(1.0), noise=NOISE, divisor=1.0)

    assert torch.equal(answer(nothing), answer(no_records()))


def test_layers_bounds_add_up_as_squares() -> None:
    assert PerLayer((3.0, 4.0)).sensitivity == 5.0


def test_a_loss_that_is_not_finite_counts_as_zero() -> None:
    engine = Engine(small_model(), input_shape=SHAPE)
    inputs = torch.from_numpy(made_up(5).features)
    labels = torch.from_numpy(made_up(5).labels)
    expected = engine.clipped_losses(PARAMETERS, inputs[1:], labels[1:], 2.0)
    inputs[0] = float("nan")
    assert engine.clipped_losses(PARAMETERS, inputs, labels, 2.0) == expected


@pytest.mark.parametrize(("bound", "noise"), [(L2(2.0), Gaussian(0.7)), (L1(2.0), Laplace(0.7))])
def test_an_answer_has_the_widened_noise_and_the_trace_says_so(bound: Any, noise: Any) -> None:
    k, trace = 100_000, Trace()
    answer = barrier(no_records(), wide_model(), trace=trace).total(
        lambda one, label: torch.zeros(k), bound=bound, noise=noise
    )
    stream, normal = seeded_generator(5).stream(0), isinstance(noise, Gaussian)
    widen = std_on_grid if normal else scale_on_grid
    scale = widen(1.4, sensitivity=2.0, dimension=k)
    draws = stream.normal(k) if normal else stream.laplace(k)
    assert np.array_equal(answer.numpy(), add_on_grid(np.zeros(k), scale * draws, std=1.4))
    assert trace.rows[0].noise_std == scale * (1.0 if normal else np.sqrt(2.0))
    assert trace.rows[0].noise_std > 1.4 * (1.0 if normal else np.sqrt(2.0))


def test_laplace_noise_is_raised_by_what_rounding_adds_to_the_sensitivity() -> None:
    scale, dimension = 3.0, 10_000
    neighbours_differ_by = 1.0 + dimension * grid_step(scale)
    assert scale_on_grid(scale, sensitivity=1.0, dimension=dimension) / neighbours_differ_by >= scale


@pytest.mark.parametrize(("noise", "rho"), [(Gumbel(0.5), 0.5), (Laplace(0.5), 2.0)])
def test_a_selection_costs_the_rho_of_its_law(noise: Any, rho: float) -> None:
    """With epsilon = 1/z = 2: epsilon^2 / 8 by bounded range, epsilon^2 / 2 by pure epsilon."""
    assert argmin_release(3.0, noise).event() == dp.dp_event.ZCDpEvent(rho)


@pytest.mark.parametrize("clipping", [L1(1.0), L2(1.0), PerLayer((1.0,))])
@pytest.mark.parametrize("rate", [None, 0.25])
def test_a_sum_costs_exactly_its_multiplier_and_rate(clipping: Any, rate: float | None) -> None:
    noise: Any = Laplace(3.0) if isinstance(clipping, L1) else Gaussian(3.0)
    inner = dp.LaplaceDpEvent(3.0) if isinstance(clipping, L1) else dp.GaussianDpEvent(3.0)
    sampling = FullBatch() if rate is None else Poisson(rate)
    expected = inner if rate is None else dp.PoissonSampledDpEvent(rate, inner)
    assert gradient_release(sampling, clipping, noise, 1.0).event() == expected


def test_the_noise_of_a_release_does_not_use_the_words_of_its_coins() -> None:
    """Nine records that count as zero: the answer is noise from the release's stream, apart from their coins'."""
    model, rate = wide_model(), 0.5
    nothing = MadeUp(np.full((9, 10_000), np.nan, dtype=np.float32), np.zeros(9, dtype=np.int64))
    answer = barrier(nothing, model).gradient(
        model.initial_parameters(), sampling=Poisson(rate), clipping=L2(1.0), noise=Gaussian(1.0), divisor=1.0
    )
    stream, k = seeded_generator(5).stream(0), model.parameter_count
    assert not set(stream.later(0).words(9)) & set(stream.of_sample().words(9))
    expected = add_on_grid(
        np.zeros(k), std_on_grid(1.0, sensitivity=1.0, dimension=k) * stream.normal(k), std=1.0
    )
    assert torch.equal(answer, torch.from_numpy(expected).to(torch.float32))

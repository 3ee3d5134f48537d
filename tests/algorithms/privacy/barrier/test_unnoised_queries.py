"""Under which conditions answers are computed, and what is told of one that fails."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from algorithms.errors import QueryFailedError
from algorithms.gradients import L2, Engine, replay
from algorithms.gradients import engine as engine_module
from algorithms.gradients.replay import Replay
from algorithms.models import Model
from algorithms.models.objectives import cross_entropy
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig
from algorithms.privacy.barrier.fixed_arithmetic import fixed_arithmetic
from algorithms.privacy.mechanisms.release import Gaussian
from algorithms.privacy.mechanisms.sampling import FullBatch, Poisson
from tests.algorithms.privacy.barrier.every_query import PARAMETERS, QUESTIONS, every_question
from tests.support.barriers import Free, barrier
from tests.support.bench import SHAPE, MadeUp, made_up, small_model
from tests.support.refusals import refused_as
from tests.support.threads import cpu_threads

backends: Any = torch.backends  # its types say less than it has
OF_THE_MODEL = ["gradient", "argmin", "norm total", "norm count", "loss gain"]
SECRET = 987_654


def gradient(asked: Barrier) -> Tensor:
    return asked.gradient(
        PARAMETERS, sampling=FullBatch(), clipping=L2(1.0), noise=Gaussian(1e-6), divisor=1.0
    )


def telling() -> MadeUp:
    """Records of which one has a label that is no class."""
    records = made_up()
    return MadeUp(records.features, np.append(records.labels[:-1], SECRET))


@pytest.mark.parametrize("kind", OF_THE_MODEL)
def test_what_fails_stays_charged_and_tells_nothing_of_a_record(kind: str) -> None:
    privacy_filter = Free()
    with pytest.raises(QueryFailedError, match="cause is withheld") as failed:
        QUESTIONS[kind][0](barrier(telling(), privacy_filter=privacy_filter))
    assert len(privacy_filter.events) == 1
    assert str(SECRET) not in str(failed.value)
    assert failed.value.__cause__ is failed.value.__context__ is None


class Hungry:
    """Records whose file cannot be read into memory."""

    labels = made_up().labels

    @property
    def features(self) -> np.ndarray:
        if self.asked:
            raise self.error
        return made_up().features

    asked = False

    def __init__(self, error: Exception) -> None:
        self.error = error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(f"Unable to allocate an array with shape ({SECRET}, 1, 4, 4)"),
        RuntimeError(
            f"[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate {SECRET}"
        ),
    ],
)
def test_too_little_memory_is_said_without_a_number_of_records(error: Exception) -> None:
    records = Hungry(error)
    asked = barrier(records)  # type: ignore[arg-type]
    records.asked = True
    with refused_as("answer_short_of_memory", QueryFailedError) as failed:
        gradient(asked)
    assert str(SECRET) not in str(failed.value)


@pytest.mark.parametrize(("short", "threads"), [(0.0, 2), (1.0, 1)])
@every_question
def test_an_answer_has_few_threads_whoever_asks(
    kind: str, short: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch has a number of threads for each thread of the program."""
    monkeypatch.setattr(engine_module, "SHORT_PASS_SECONDS", short)
    asked, seen = barrier(made_up(classes=2)), []

    def ask() -> None:
        torch.set_num_threads(4)
        QUESTIONS[kind][0](asked)
        seen.append(torch.get_num_threads())

    with cpu_threads(1):
        (other := threading.Thread(target=ask)).start()
        other.join()
    assert seen == [threads]


def test_autocast_around_a_run_changes_nothing() -> None:
    expected = gradient(barrier(made_up()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gradient(barrier(made_up())), expected)


SEEN: list[str] = []


class Watched(nn.Linear):
    """Notes with which precision its product would be taken."""

    def forward(self, input: Tensor) -> Tensor:
        SEEN.append(backends.mkldnn.matmul.fp32_precision)
        return super().forward(input)


def of(*layers: nn.Module) -> Model:
    """A model of made-up records."""
    module = nn.Sequential(nn.Flatten(), *layers)
    return Model("made up", module, small_model().losses, lambda outputs: outputs)


@pytest.mark.parametrize("recorded", [0, 64])
@pytest.mark.parametrize("kind", OF_THE_MODEL)
def test_products_have_32_bits_whatever_the_program_has_set(
    kind: str, recorded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Replay.__call__

    def replayed(self: Replay, parameters: Tensor, inputs: Tensor, labels: Tensor) -> Any:
        SEEN.append(backends.mkldnn.matmul.fp32_precision)
        return call(self, parameters, inputs, labels)

    monkeypatch.setattr(replay, "RECORDED", recorded)
    monkeypatch.setattr(Replay, "__call__", replayed)
    asked, before = barrier(made_up(), of(Watched(16, 3))), torch.get_float32_matmul_precision()
    SEEN.clear()
    torch.set_float32_matmul_precision("medium")
    try:
        QUESTIONS[kind][0](asked)
        assert set(SEEN) == {"ieee"}
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("workers", [1, 2])
def test_answers_are_the_same_whenever_passes_begin_to_be_replayed(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of about 20 records have passes of several sizes, whose traces are made amid the steps."""
    answers, sizes = list[list[Tensor]](), list[tuple[int, ...]]()
    for recorded in (0, 3, 10**6):
        monkeypatch.setattr(replay, "RECORDED", recorded)
        compute = ComputeConfig(expected_batch=8.0, workers=workers)
        asked = barrier(made_up(200), of(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)), compute=compute)
        point, gradients = torch.linspace(-1.0, 1.0, 16 * 8 + 8 + 8 * 3 + 3), list[Tensor]()
        for _ in range(12):
            gradients.append(
                asked.gradient(
                    point, sampling=Poisson(0.1), clipping=L2(0.1), noise=Gaussian(1.0), divisor=20.0
                )
            )
            point = point - gradients[-1]
        answers.append(gradients)
        sizes.append(vars(asked)["_Barrier__unnoised"].engine.replayed_sizes)
    assert sizes[0] and sizes[1] and not sizes[2]
    for others in answers[1:]:
        assert all(map(torch.equal, others, answers[0]))


def test_what_is_done_to_the_model_after_it_was_examined_changes_nothing() -> None:
    """A layer that would mix records in training was let through as it does not when it evaluates."""
    model = of(nn.BatchNorm1d(16, affine=False).eval(), nn.Linear(16, 3))
    expected, asked = gradient(barrier(made_up(), model)), barrier(made_up(), model)
    model.module.train()
    assert torch.equal(gradient(asked), expected)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float()


def test_16_bits_within_32_are_refused() -> None:
    """They would need other passes, and another number of threads."""
    with refused_as("computes_in_16_bits", model="made up"):
        barrier(made_up(), of(Halved(), nn.Linear(16, 3)))


def is_zero(tiny: Tensor) -> bool:
    return bool((tiny * 0.5 == 0.0).any())


def test_the_smallest_numbers_are_no_zeros_or_one_thread_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are is set for a thread, and those that it begins: half of a pass could be computed otherwise."""
    monkeypatch.setattr(engine_module, "SHORT_PASS_SECONDS", 0.0)
    seen: list[tuple[bool, int]] = []
    engine = Engine(small_model(), input_shape=SHAPE)

    def ask() -> None:
        torch.set_num_threads(2)
        torch.set_flush_denormal(True)
        torch.ones(2**17).add_(1.0)  # begins a second thread, which takes after this one
        with fixed_arithmetic(ComputeConfig(), engine):
            seen.append((is_zero(torch.full((2**17,), 1e-39)), torch.get_num_threads()))
        seen.append((is_zero(torch.full((1,), 1e-39)), torch.get_num_threads()))

    with cpu_threads(1):
        (other := threading.Thread(target=ask)).start()
        other.join()
    assert seen == [(False, 1), (True, 1)]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_barrier_is_not_copied(copied: Callable[[Barrier], Any]) -> None:
    """Two would draw the same noise for different answers, whose difference then has none."""
    with pytest.raises(TypeError, match="cannot be copied"):
        copied(barrier(made_up()))


class Shrinking(nn.Linear):
    """Writes into its own weights, as tables with a largest norm do, where it is not examined."""

    def forward(self, input: Tensor) -> Tensor:
        if SEEN:
            self.weight.data.mul_(0.5)
        return super().forward(input)


@pytest.mark.parametrize("kind", OF_THE_MODEL)
def test_no_answer_changes_the_point_it_was_asked_at(kind: str) -> None:
    before = PARAMETERS.clone()
    SEEN.clear()
    asked = barrier(made_up(), of(Shrinking(16, 3)))
    SEEN.append("examined")
    QUESTIONS[kind][0](asked)
    assert torch.equal(PARAMETERS, before)


class Scattered(nn.Module):
    """Fails on some records: with tensors of types, shapes or devices that do not go together."""

    def __init__(self, failing: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.failing, self.is_ready = nn.Linear(16, 3), failing, False

    def forward(self, inputs: Tensor) -> Tensor:
        values = inputs.flatten(1)
        outputs: Tensor = self.layer(self.failing(values) if self.is_ready else values)
        return outputs


MISTAKES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "type": (lambda values: values.double(), "same dtype"),
    "shape": (lambda values: values[:, 1:], "shapes cannot be multiplied"),
    "device": (lambda values: values.to("meta"), "expected device meta"),
}


@pytest.mark.parametrize("sampling", [FullBatch(), Poisson(1e-3)], ids=["all records", "a small sample"])
@pytest.mark.parametrize("kind", MISTAKES)
def test_what_fails_on_any_records_is_said_in_full(kind: str, sampling: FullBatch | Poisson) -> None:
    mistake, words = MISTAKES[kind]
    model = Model("scattered", Scattered(mistake), cross_entropy, lambda outputs: outputs)
    asked = barrier(made_up(4000), model)
    vars(asked)["_Barrier__unnoised"].engine.passes.model.module.is_ready = True
    with pytest.raises(QueryFailedError, match=rf"made-up records: \w+Error: .*{words}"):
        asked.gradient(
            model.initial_parameters(), sampling=sampling, clipping=L2(1.0), noise=Gaussian(1.0), divisor=1.0
        )


def test_a_failure_that_only_some_records_cause_is_not_told_on_made_up_ones() -> None:
    """A record without a number fails; the made-up ones have all."""

    def failing(values: Tensor) -> Tensor:
        return values[:, 1:] if bool(values.isnan().any()) else values

    model = Model("scattered", Scattered(failing), cross_entropy, lambda outputs: outputs)
    records = made_up()
    records.features[0] = np.nan
    asked = barrier(records, model)
    vars(asked)["_Barrier__unnoised"].engine.passes.model.module.is_ready = True
    with pytest.raises(QueryFailedError, match="cause is withheld"):
        asked.gradient(
            model.initial_parameters(),
            sampling=FullBatch(),
            clipping=L2(1.0),
            noise=Gaussian(1.0),
            divisor=1.0,
        )


def test_a_statistic_that_fails_is_refused_before_its_charge() -> None:
    privacy_filter = Free()
    asked = barrier(made_up(), privacy_filter=privacy_filter)
    with pytest.raises(RuntimeError, match="size"):
        asked.total(lambda one, _label: one.flatten() + torch.zeros(5), bound=L2(1.0), noise=Gaussian(1.0))
    assert not privacy_filter.events

"""Full-batch questions about a linear model: the closed forms answer as the general engine does."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.gradients import L1, L2, Affine, Clipping, LineCandidates, Normalised, PerLayer
from algorithms.models import build
from algorithms.models.objectives import with_class_weights
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.barrier.unnoised_queries import all_in_closed_form, has_closed_forms, loss_sums
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian, Gumbel, Laplace
from algorithms.privacy.mechanisms.sampling import FullBatch
from tests.support.barriers import barrier
from tests.support.bench import MadeUp, OneLook
from tests.support.gradients.forms import cancelling

COUNT, WIDTH = 300, 7
MODEL = build("logistic", input_shape=(WIDTH,), classes=2, seed=0)
STEPS = (0.0, 0.1, 0.5, 2.0)


def records() -> MadeUp:
    draw = np.random.default_rng(0)
    return MadeUp(draw.normal(size=(COUNT, WIDTH)).astype(np.float32), draw.integers(0, 2, COUNT))


def asked(*, closed: bool, trace: Trace | None = None, seed: int = 3) -> Barrier:
    """A barrier that may hold the closed forms, or may not, since the number of records is private."""
    compute = OneLook(number=COUNT if closed else None)
    generator = seeded_generator(seed)
    return barrier(records(), MODEL, generator=generator, trace=trace or Trace(), compute=compute)


def point(seed: int = 1) -> Tensor:
    return torch.randn(MODEL.parameter_count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("clipping", "noise"),
    [
        (L2(0.5), Gaussian(1e-6)),
        (L1(0.5), Laplace(1e-6)),
        (PerLayer((0.5,)), Gaussian(1e-6)),
        (Normalised(0.5), Gaussian(1e-6)),
        (Affine(0.5, torch.full((WIDTH + 1,), 0.1), torch.full((WIDTH + 1,), 2.0)), Gaussian(1e-6)),
    ],
)
def test_gradients_are_those_of_the_general_way(clipping: Clipping, noise: Any) -> None:
    ask: dict[str, Any] = {"sampling": FullBatch(), "clipping": clipping, "noise": noise, "divisor": 10.0}
    answers = [asked(closed=closed).gradient(point(), **ask) for closed in (True, False)]
    assert float(answers[0].norm()) > 0.01
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_line", [True, False])
def test_selections_are_those_of_the_general_way(is_line: bool) -> None:
    line = LineCandidates(point(), point(2), STEPS)
    candidates = line if is_line else line.candidates
    chosen = {
        (closed, seed): asked(closed=closed, seed=seed).argmin(candidates, bound=3.0, noise=Gumbel(20.0))
        for closed in (True, False)
        for seed in range(8)
    }
    assert len(set(chosen.values())) > 1  # the noise decides, in the same way both times
    assert all(chosen[True, seed] == chosen[False, seed] for seed in range(8))


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_candidate_that_is_not_finite_is_not_chosen(bad: float, closed: bool) -> None:
    candidates = torch.stack([point(), point()])
    candidates[0, 1] = bad  # where each loss would count as 0
    assert asked(closed=closed).argmin(candidates, bound=3.0, noise=Gumbel(1e-3)) == 1


def test_sampled_losses_on_a_line_do_not_turn_when_a_record_is_taken_away() -> None:
    """Equal records whose margins are what rounding leaves of large terms: the last bits decide the whole loss."""
    model = build("softmax", input_shape=(784,), classes=10, seed=0)
    draw = torch.Generator().manual_seed(0)
    line = LineCandidates(*torch.randn(2, model.parameter_count, generator=draw), (0.0, 1.0))
    weights = line.origin[:7840].view(10, 784)
    labels = torch.zeros(12, dtype=torch.int64)
    engine = ComputeConfig().engine(model, MadeUp(np.zeros((12, 784), dtype=np.float32), labels.numpy()))
    for _ in range(30):
        inputs = cancelling(weights, 1e8, draw).expand(12, 784)
        fewer, more = (
            loss_sums(
                model, engine, line.candidates, [(inputs[:count], labels[:count])], 1.0, ComputeConfig()
            )
            for count in (11, 12)
        )
        assert float((more - fewer).abs().max()) <= 1.0 + 1e-9


def iteration(asked: Barrier, start: Tensor) -> Tensor:
    """A gradient and a step chosen along it."""
    gradient = asked.gradient(
        start, sampling=FullBatch(), clipping=L2(1.0), noise=Gaussian(0.1), divisor=float(COUNT)
    )
    line = LineCandidates(start, gradient, STEPS)
    return line.at(asked.argmin(line, bound=3.0, noise=Gumbel(0.1)))


def test_a_run_taken_up_between_steps_goes_on_bit_for_bit() -> None:
    trace = Trace()
    whole = asked(closed=True, trace=trace)
    first = iteration(whole, point())
    trace.step = 1
    expected = iteration(whole, first)
    before = Trace(trace.rows[:2])
    before.step = 1
    assert torch.equal(iteration(asked(closed=True, trace=before), first), expected)


def test_a_public_number_decides_whether_records_are_held() -> None:
    """With one more record, which nobody may notice, nothing else is rounded in another way."""
    wide = build("logistic", input_shape=(125,), classes=2, seed=0)
    for there in (999, 1001):
        some = MadeUp(np.zeros((there, 125), dtype=np.float32), np.zeros(there, dtype=np.int64))
        found = {
            number: all_in_closed_form(wide, some, ComputeConfig(memory_mb=1, number=number)) is not None
            for number in (1000, 1001, None)
        }
        assert found == {1000: True, 1001: False, None: False}


def test_a_model_of_another_kind_or_precision_takes_the_general_way() -> None:
    assert has_closed_forms(MODEL)
    assert not has_closed_forms(replace(MODEL, precision=torch.bfloat16))
    own = replace(MODEL, losses=lambda outputs, labels: MODEL.losses(outputs, labels))
    assert not has_closed_forms(own)
    weights = (1.0, 4.0)
    assert [has_closed_forms(with_class_weights(model, weights)) for model in (MODEL, own)] == [True, False]
    assert not has_closed_forms(replace(MODEL, bounds=None))
    assert not has_closed_forms(build("tanh_cnn", input_shape=(1, 28, 28), classes=2, seed=0))

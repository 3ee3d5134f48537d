"""Noise that is drawn while the sum is computed: the same bits as afterwards, for every sample."""

import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from algorithms.gradients import L2, Normalised
from algorithms.models import Model
from algorithms.privacy.mechanisms import release_noise
from algorithms.privacy.mechanisms.noise import Stream, seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian, Release, gradient_release
from algorithms.privacy.mechanisms.sampling import (
    FullBatch,
    Importance,
    Poisson,
    Sampling,
    WithoutReplacement,
    draw_sample,
)
from tests.support.barriers import barrier
from tests.support.bench import RECORDS, made_up, small_model
from tests.support.waiting import HANG_SECONDS


@pytest.fixture(autouse=True)
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every model was large."""
    monkeypatch.setattr(release_noise, "MIN_DRAWN_AHEAD", 1)


@pytest.mark.parametrize(
    "sampling",
    [FullBatch(), Poisson(0.3), Poisson(1.0), WithoutReplacement(7, RECORDS), Importance(0.2)],
    ids=lambda sampling: type(sampling).__name__,
)
def test_the_noise_is_what_comes_after_the_coins(sampling: Sampling) -> None:
    """Of records that add nothing, so that the answer is the noise alone."""
    records = made_up()
    records.features[:] = np.nan
    clipping = Normalised(1.0) if isinstance(sampling, Importance) else L2(1.0)
    point = small_model().initial_parameters()
    answer = barrier(records).gradient(
        point, sampling=sampling, clipping=clipping, noise=Gaussian(2.0), divisor=1.0
    )
    release = gradient_release(sampling, clipping, Gaussian(2.0), 1.0)
    drawn = seeded_generator(5).stream(0)
    if isinstance(sampling, Importance):
        drawn.pairs(RECORDS)
    else:
        draw_sample(sampling, RECORDS, drawn, step=0)
    expected = release_noise.add_noise(torch.zeros(len(point), dtype=torch.float64), release, drawn)
    assert torch.equal(answer, expected.float())


class Waiting(nn.Linear):
    """A layer that goes on once the noise is drawn, if it is waited for."""

    drawn: threading.Event | None = None

    def forward(self, input: Tensor) -> Tensor:
        assert self.drawn is None or self.drawn.wait(timeout=HANG_SECONDS)
        return super().forward(input)


def test_the_noise_is_drawn_while_the_sum_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Flatten(), Waiting(16, 3))
    model = Model("waiting", module, small_model().losses, lambda outputs: outputs)
    asked, done, draws = barrier(made_up(), model), threading.Event(), release_noise.draws

    def told(release: Release, stream: Stream, count: int) -> NDArray[np.float64]:
        found = draws(release, stream, count)
        done.set()
        return found

    monkeypatch.setattr(release_noise, "draws", told)
    monkeypatch.setattr(Waiting, "drawn", done)
    answer = asked.gradient(
        model.initial_parameters(), sampling=FullBatch(), clipping=L2(1.0), noise=Gaussian(1.0), divisor=1.0
    )
    assert torch.isfinite(answer).all() and done.is_set()

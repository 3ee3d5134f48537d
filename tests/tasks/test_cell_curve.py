"""The curve of a run: where it starts and ends, and the losses it is made of."""

import numpy as np
import pytest
import torch

from algorithms.models import build
from algorithms.privacy.barrier.trace import Trace
from data import PublicDescription, public_description
from data.card import data_card
from data.readers.records import Records
from tasks.comparing.trial import Curve, Sides, mean_losses

MODEL = build("logistic_through_origin", input_shape=(3,), classes=2, seed=0)


def public() -> PublicDescription:
    return public_description(data_card("synthetic-logistic"))


def test_it_starts_where_the_algorithm_does_and_ends_where_that_ended() -> None:
    draw = np.random.default_rng(0)
    part = Records(draw.random((50, 3), dtype=np.float32), draw.integers(0, 2, 50))
    curve = Curve(lambda state: state, 5, start=torch.full((3,), 10.0))
    for step in (1, 2, 3):  # ends before its last planned step
        curve.on_state(step, torch.full((3,), 10.0 - step))
    frame = curve.frame(MODEL, Trace(), Sides(public(), part, part), regularisation=0.5)
    points_ = torch.stack([torch.full((3,), value) for value in (10.0, 9.0, 8.0, 7.0)])
    rows = torch.from_numpy(part.features) @ points_.T
    signs = torch.from_numpy(2 * part.labels - 1)[:, None]
    losses = torch.nn.functional.softplus(-signs * rows).double().mean(dim=0)
    expected = losses + 0.5 * points_.double().square().sum(dim=1)
    assert list(frame["step"]) == [0, 1, 2, 3]
    assert frame["objective"].to_numpy() == pytest.approx(expected.numpy(), rel=1e-6)
    assert mean_losses(MODEL, points_, part) == pytest.approx(losses.numpy(), rel=1e-6)

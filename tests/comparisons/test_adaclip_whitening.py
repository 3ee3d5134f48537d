"""Whitening before the clip: the released gradient is the clipped one, and only noise lies behind the transform."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from comparisons import adaclip_whitening as whitening
from comparisons.adaclip_whitening import BATCH, CLIP_NORM, SHAPES, Shape, noisy_gradient, transform_of
from data.readers.records import RecordBatch

WHITENED = SHAPES["directions, power 1/2 (whitening)"]


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_gradients_are_clipped_by_their_length_behind_the_transform() -> None:
    inputs = torch.randn((6, 4), generator=draws(1)) * 5
    labels, transform = torch.tensor([0, 3, 9, 1, 0, 2]), torch.diag(torch.tensor([1.0, 2.0, 0.5, 0.1]))
    weights = torch.randn((4, whitening.CLASSES), generator=draws(2), requires_grad=True)
    expected = torch.zeros(4, whitening.CLASSES)
    for record, label in zip(inputs, labels, strict=True):
        loss = torch.nn.functional.cross_entropy((record @ weights)[None], label[None])
        (gradient,) = torch.autograd.grad(loss, weights)
        expected += gradient / max(1.0, float((transform @ gradient).norm()) / CLIP_NORM) / BATCH
    lengths, noise = (inputs @ transform).norm(dim=1), torch.zeros(4, whitening.CLASSES)
    found = noisy_gradient(weights.detach(), (inputs, labels, lengths), transform.inverse(), noise)
    assert torch.allclose(found, expected, atol=1e-7)
    noisy = noisy_gradient(weights.detach(), (inputs, labels, lengths), transform.inverse(), noise + 1.0)
    assert torch.allclose((noisy - found) * BATCH, transform.inverse().sum(dim=1)[:, None], atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_a_transform_has_an_inverse_and_keeps_the_records_length(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whitening, "MOMENT_NOISE", 1e-3)
    inputs = torch.nn.functional.normalize(
        torch.randn((2000, 5), generator=draws(3)) * torch.tensor([9.0, 3, 3, 1, 1]), dim=1
    )
    transform, inverse = transform_of(SHAPES[name], inputs, draws(4))
    assert torch.allclose(transform @ inverse, torch.eye(5), atol=1e-4)
    assert float((inputs @ transform).square().sum(dim=1).mean()) == pytest.approx(1.0, rel=0.01)
    if SHAPES[name] == WHITENED:
        behind = inputs @ transform
        assert torch.allclose(behind.T @ behind / len(inputs), torch.eye(5) / 5, atol=0.01)


def test_the_moment_is_paid_for_by_the_steps() -> None:
    without, with_it = (whitening.multiplier_of(shape, 0.5, 60_000) for shape in (Shape(), WHITENED))
    assert without < with_it


def test_cases_are_compared_in_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)

    def of(count: int) -> RecordBatch:
        return RecordBatch(
            generator.random((count, 1, 3, 3)).astype(np.float32), generator.integers(0, 10, count)
        )

    data: Any = SimpleNamespace(train=of(1200), test=of(50))
    place: Any = SimpleNamespace(
        context=SimpleNamespace(workspace=SimpleNamespace(store=tmp_path)), trials=[None]
    )
    monkeypatch.setattr(whitening, "work_of", lambda file, root: place)
    monkeypatch.setattr(whitening, "prepare_data", lambda work: None)
    monkeypatch.setattr(whitening, "trial_records", lambda store, trial: data)
    monkeypatch.setattr(whitening, "multiplier_of", lambda shape, epsilon, records: 1.0)
    whitening.main(tmp_path / "new", seeds=2, steps=2)
    table = pd.read_csv(tmp_path / "new" / "adaclip-whitening.csv")
    assert len(table) == len(whitening.EPSILONS) * len(SHAPES) * len(whitening.RATES)
    assert (table["count"] == 2).all() and table["mean"].between(0, 1).all()

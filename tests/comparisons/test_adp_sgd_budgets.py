"""Matched against constant noise, all cases of a seed in one product: each is DP-SGD's own descent at its epsilon."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from comparisons import adp_sgd_budgets as budgets
from comparisons.adp_sgd_budgets import BATCH, CLIP_NORM, Case, accuracy_courses, cases_of, clipped_sums
from data.readers.records import RecordBatch

RECORDS, STEPS = 20_000, 20


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def records(count: int) -> RecordBatch:
    generator = np.random.default_rng(count)
    return RecordBatch(
        generator.random((count, 1, 3, 3)).astype(np.float32), generator.integers(0, 10, count)
    )


def test_gradients_of_all_cases_are_clipped_record_by_record() -> None:
    inputs, labels = torch.randn((6, 4), generator=draws(1)) * 3, torch.tensor([0, 3, 9, 1, 0, 2])
    weights = torch.randn((4, 2, 10), generator=draws(2))
    sums = clipped_sums(weights, inputs, labels)
    for case in range(2):
        own = weights[:, case].clone().requires_grad_()
        expected = torch.zeros(4, 10)
        for record, label in zip(inputs, labels, strict=True):
            loss = torch.nn.functional.cross_entropy((record @ own)[None], label[None])
            (gradient,) = torch.autograd.grad(loss, own)
            expected += gradient / max(1.0, float(gradient.norm()) / CLIP_NORM)
        assert torch.allclose(sums[:, case], expected, atol=1e-5)


def test_both_noises_cost_the_same_epsilon_and_move_by_the_same_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budgets, "MEAN_RATES", {0.838: (0.5,)})
    cases = cases_of(RECORDS, STEPS)
    for case in cases:
        accountant = PLDAccountant(value_discretization_interval=4e-3)
        for multiplier, count in zip(*np.unique(case.multipliers, return_counts=True), strict=True):
            event = PoissonSampledDpEvent(BATCH / RECORDS, GaussianDpEvent(float(multiplier)))
            accountant.compose(event, int(count))
        assert accountant.get_epsilon(1e-5) == pytest.approx(0.838, rel=0.02)
    matched, constant = (case for case in cases if case.schedule == "1/sqrt(20 + t)")
    assert np.array_equal(matched.rates, constant.rates) and matched.rates.mean() == pytest.approx(0.5)
    assert np.ptp(constant.multipliers) == 0
    assert matched.multipliers[-1] / matched.multipliers[0] == pytest.approx((39 / 20) ** 0.25, rel=0.05)


def test_a_case_does_not_depend_on_the_others_and_more_noise_is_worse() -> None:
    train = RecordBatch(np.repeat(np.eye(10, dtype=np.float32), 200, axis=0), np.repeat(np.arange(10), 200))
    quiet = Case("steps", "matched", 1.0, 1.0, np.full(30, 1.0), np.full(30, 0.1))
    loud = replace(quiet, multipliers=np.full(30, 1000.0))
    both = accuracy_courses([loud, quiet], train, train, draws(3))
    assert both.shape == (budgets.MEASUREMENTS, 2)
    assert np.array_equal(both[:, 1:], accuracy_courses([quiet], train, train, draws(3)))
    assert both[-1, 1] == 1.0 > both[-1, 0]


def test_runs_are_written_as_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = SimpleNamespace(train=records(1200), test=records(50))
    work: Any = SimpleNamespace(
        context=SimpleNamespace(workspace=SimpleNamespace(store=tmp_path)), trials=[None]
    )
    monkeypatch.setattr(budgets, "work_of", lambda file, root: work)
    monkeypatch.setattr(budgets, "prepare_data", lambda work: None)
    monkeypatch.setattr(budgets, "trial_records", lambda store, trial: data)
    monkeypatch.setattr(budgets, "factor_at", lambda alphas, rates, epsilon: 1.0)
    budgets.main(tmp_path / "new", seeds=2, steps=25)
    table = pd.read_csv(tmp_path / "new" / "adp-sgd-budgets.csv")
    assert len(table) == 2 * 2 * 2 * sum(map(len, budgets.MEAN_RATES.values()))
    assert (table["best"] >= table["last"]).all() and table["last"].between(0, 1).all()

"""The best public schedule: least by its own cost, the paper's where noise is much, and no worse where it is little."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from comparisons import best_schedule
from comparisons.best_schedule import best_multipliers, disturbance
from comparisons.noise_power import EPSILONS


@pytest.mark.parametrize("sharpness", [1.0, 3.0])
def test_no_step_is_better_with_more_or_less_noise(sharpness: float) -> None:
    """What noise adds to the parameters and lambda times the cost, where s^2 = c / (4 lambda)."""
    lengths, rates, scale = np.array([1.0, 0.5, 0.1]), np.array([0.1, 0.2, 0.05]), 0.03
    best = best_multipliers(lengths, rates, scale, sharpness=sharpness)

    def total(multipliers: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> float:
        cost = np.square(rates) * np.expm1(sharpness / np.square(multipliers))
        noise = np.square(lengths * multipliers / rates)
        return float(np.sum(noise + sharpness / (4 * scale**2) * cost))

    for step in range(3):
        for factor in (0.99, 1.01):
            other = best.copy()
            other[step] *= factor
            assert total(other) > total(best)


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of three, and one curve of costs: the best schedule is then a little further from its least."""
    monkeypatch.setattr(best_schedule, "ROUNDS", 1)
    monkeypatch.setattr(best_schedule, "SHARPNESS", (1.0,))


def test_with_much_noise_the_best_schedule_is_the_paper_s() -> None:
    paper, best, constant = (disturbance(name, 0.01, steps=60) for name in ("paper", "best", "constant"))
    assert best == pytest.approx(paper, rel=2e-3) and paper < 0.99 * constant


def test_with_little_noise_the_batches_help_too() -> None:
    found = {name: disturbance(name, 4.0, steps=100) for name in best_schedule.SCHEDULES}
    assert found["best, batches too"] < 0.97 * found["best"] < found["paper"]


def test_schedules_are_compared_in_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_schedule, "disturbance", lambda name, epsilon, steps: 2.0 * len(name))
    best_schedule.main(tmp_path / "new", steps=5)
    table = pd.read_csv(tmp_path / "new" / "best-schedule.csv")
    assert list(table.relative[:2]) == [1.0, len("paper") / len("constant")]
    assert len(table) == len(EPSILONS) * len(best_schedule.SCHEDULES)

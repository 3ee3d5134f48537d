"""How steps are timed in turn, by a clock that the steps themselves move."""

import pytest

from algorithms.gradients import replay
from benchmarks.measure import Plan, Timed, alternate


@pytest.mark.parametrize("first", [0.001, 10.0])
def test_number_of_repeats_does_not_follow_from_the_first_step(
    first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a first step traces passes, by whose seconds short steps would not be repeated."""
    monkeypatch.setattr(replay, "RECORDED", replay.RECORDED)
    steps, now = 0, 0.0

    def step() -> None:
        nonlocal steps, now
        steps += 1
        now += first if steps == 1 else 0.001

    (seconds,) = alternate({"short": Timed(step)}, Plan(1, 1, repeat=True), lambda: now)["short"]
    assert seconds == pytest.approx(0.001)
    assert steps == 1 + 1 + 1 + 200  # to be timed once, and each again before it is repeated for 0.2 s

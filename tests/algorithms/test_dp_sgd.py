"""DP-SGD's ways to bound a gradient, and that it and its relatives refuse what no noise reaches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.core.method import Algorithm, Plan, PublicInfo, Target
from algorithms.errors import RefusedError
from algorithms.gradients import L2, Normalised, PerLayer
from algorithms.methods.dp_sgd import DPSGD
from algorithms.privacy.accounting import Budget
from tests.algorithms import bench
from tests.algorithms.bench import made_up, run, small_model
from tests.algorithms.unaccounted import plan_with, with_schedule

TARGET = Target(Budget(0.3, 1e-5))
PUBLIC = PublicInfo(1000, 10, 2, 2)
RELATIVES = ["dp_sgd", "dp_sgd_decay", "quantile_clipping", "adaclip", "adp_sgd"]


class Asked:
    """A stand-in for the barrier that keeps what it was asked, and answers 0."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def gradient(self, parameters: torch.Tensor, **settings: Any) -> torch.Tensor:
        self.settings = settings
        return torch.zeros_like(parameters)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"clip_norm": 3.0}, L2(3.0)),
        ({"clip_norm": 3.0, "clipping": "per_layer"}, PerLayer((3.0 / 2**0.5,) * 2)),
        ({"clip_norm": 3.0, "clipping": "normalised"}, Normalised(3.0, 0.01)),
        ({"clip_norm": 3.0, "clipping": "normalised", "stability": 0.5}, Normalised(3.0, 0.5)),
    ],
)
def test_the_bound_is_the_one_that_was_asked_for(settings: dict[str, Any], expected: Any) -> None:
    method, barrier = DPSGD(2, 10, **settings), Asked()
    plan = replace(plan_with(1.0, steps=2), public=PUBLIC)
    method.step(method.init(torch.zeros(10), plan), plan, barrier)  # type: ignore[arg-type]
    assert barrier.settings["clipping"] == expected


def test_normalised_gradients_cost_what_clipped_ones_cost() -> None:
    plans = [DPSGD(20, 100, clipping=clipping).plan(TARGET, PUBLIC) for clipping in ("l2", "normalised")]
    assert plans[0].schedule == plans[1].schedule
    assert plans[0].noise_multiplier == plans[1].noise_multiplier


def test_a_run_with_normalised_gradients_takes_steps_of_their_scale() -> None:
    model = small_model("softmax")
    found = {}
    for clip_norm in (1.0, 10.0):
        method = DPSGD(1, 40, clip_norm=clip_norm, clipping="normalised", stability=0.0)
        plan = with_schedule(plan_with(0.5, steps=1, batch=40, records=40, weights=np.ones(1)))
        found[clip_norm] = run(method, plan, made_up(), model).answers[0]
    torch.testing.assert_close(found[10.0], 10.0 * found[1.0], rtol=1e-4, atol=1e-6)


def planned(name: str, epsilon: float, *, records: int | None = 40, **settings: Any) -> Plan:
    method: Algorithm[Any] = bench.algorithm(name, **settings)
    return method.plan(Target(Budget(epsilon, 1e-5)), PublicInfo(records, 10, 1, 2))


@pytest.mark.parametrize("name", RELATIVES)
def test_an_epsilon_that_the_count_alone_exceeds_is_refused(name: str) -> None:
    with pytest.raises(RefusedError, match=r"no noise multiplier up to 1e\+07 meets epsilon = 0\.005"):
        planned(name, 0.005, records=None, expected_batch_size=None, sampling_rate=0.1)


@pytest.mark.parametrize("name", RELATIVES)
def test_where_the_number_of_records_is_private_it_is_counted_first(name: str) -> None:
    plan = planned(name, 0.5, records=None, expected_batch_size=None, sampling_rate=0.1)
    first, rest = plan.schedule[0], plan.schedule[1:]
    assert (type(first[0]).__name__, first[1], plan.divisor) == ("GaussianDpEvent", 1, None)
    assert {type(event).__name__ for event, _ in rest} == {"PoissonSampledDpEvent"}


@pytest.mark.parametrize("name", RELATIVES)
def test_a_rate_is_needed_where_the_number_of_records_is_private(name: str) -> None:
    with pytest.raises(RefusedError, match=r"set algorithm\.sampling_rate"):
        planned(name, 2.0, records=None)

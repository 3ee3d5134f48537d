"""The price of a search and the number of its trials, against dp_accounting and the distributions themselves."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE, ORDERS, composed, epsilon
from algorithms.privacy.accounting.event_rules import EitherDpEvent
from algorithms.privacy.accounting.events import event_from_json, event_to_json
from algorithms.privacy.accounting.selection import Trials, all_shown, trials_of

QUIET, LOUD = [(GaussianDpEvent(8.0), 4)], [(GaussianDpEvent(5.0), 2)]


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, math.inf])
def test_a_search_costs_what_the_theorems_say(shape: float) -> None:
    accountant = RdpAccountant(ORDERS)
    accountant.compose(RepeatAndSelectDpEvent(SelfComposedDpEvent(GaussianDpEvent(8.0), 4), 10.0, shape))
    event = Trials(10.0, shape).event([QUIET])
    assert epsilon([(event, 1)], 1e-5, accountant="rdp") == pytest.approx(accountant.get_epsilon(1e-5))
    assert event_from_json(event_to_json(event)) == event


def deltas_of(event: object) -> Callable[[float, str], float]:
    """Bounds of delta at an epsilon for the record's removal or addition, by profiles."""
    found = composed([(event, 1)], 1e-4, ADD_OR_REMOVE_ONE)  # type: ignore[list-item]
    sides = {"remove": found._pmf_remove, "add": found._pmf_add}
    return lambda at, side: float(sides[side].get_delta_for_epsilon(at))


@pytest.mark.parametrize(
    ("mean", "shape"), [(6.0, 0.0), (6.0, 1.0), (20.0, 0.5), (6.0, math.inf), (1.0, 1.0)]
)
@pytest.mark.parametrize("score", [lambda y: y, lambda y: -y, np.abs])
def test_the_best_never_tells_more_than_its_profile(
    mean: float, shape: float, score: Callable[[np.ndarray], np.ndarray]
) -> None:
    """The best of trials that each release one number with normal noise: its density is integrated."""
    y = np.linspace(-16, 16, 8_001)
    order, width = np.argsort(score(y), kind="stable"), y[1] - y[0]
    numbers, trials = np.arange(1, 800), Trials(mean, shape)
    is_poisson = math.isinf(shape)
    chances = stats.poisson(mean).pmf(numbers) if is_poisson else np.exp(trials._log_chances(numbers))

    def best(centre: float) -> np.ndarray:
        one = stats.norm(centre, 2.0).pdf(y) * width
        reached = np.empty_like(one)
        reached[order] = np.cumsum(one[order])
        middle = np.clip(reached - one / 2, 0.0, 1.0)
        return one * sum(
            k * p * middle ** (k - 1) for k, p in zip(numbers, chances, strict=True) if p > 1e-18
        )

    bound = deltas_of(trials.event([[(GaussianDpEvent(2.0), 1)]]))
    pairs = {"remove": (best(1.0), best(0.0)), "add": (best(0.0), best(1.0))}
    for side, (some, other) in pairs.items():
        for at in (0.0, 0.3, 1.0, 2.0, 4.0):
            exact = float(np.maximum(some - math.exp(at) * other, 0.0).sum())
            assert exact <= bound(at, side) * (1 + 1e-4) + 1e-9
            assert mean > 1 or exact == pytest.approx(bound(at, side), rel=1e-2, abs=1e-9)


def test_a_profile_is_tighter_than_renyi_divergences_and_worse_than_one_trial() -> None:
    for shape in (0.0, 1.0, math.inf):
        event, one = Trials(8.0, shape).event([LOUD, QUIET]), epsilon(LOUD, 1e-5)
        assert one < epsilon([(event, 1)], 1e-5) < epsilon([(event, 1)], 1e-5, accountant="rdp")
    assert epsilon([(Trials(1.0).event([LOUD]), 1)], 1e-5) == pytest.approx(epsilon(LOUD, 1e-5), rel=1e-4)


def test_the_worst_of_the_candidates_counts_at_each_order() -> None:
    both, each = Trials(10.0).event([QUIET, LOUD]), [Trials(10.0).event([one]) for one in (QUIET, LOUD)]
    cost = epsilon([(both, 1)], 1e-5, accountant="rdp")
    assert cost == pytest.approx(max(epsilon([(one, 1)], 1e-5, accountant="rdp") for one in each))
    assert epsilon([(EitherDpEvent([GaussianDpEvent(2.0)]), 1)], 1e-5, accountant="rdp") == pytest.approx(
        epsilon([(GaussianDpEvent(2.0), 1)], 1e-5, accountant="rdp")
    )


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, math.inf])
def test_the_number_of_trials_has_the_mean_that_is_priced(shape: float) -> None:
    numbers = np.array([Trials(6.0, shape).number((u + 0.5) / 20_000) for u in range(20_000)])
    assert numbers.mean() == pytest.approx(6.0, rel=0.02)
    assert numbers.min() == (0 if math.isinf(shape) else 1)


def test_a_geometric_number_has_its_chances() -> None:
    numbers = np.array([Trials(4.0).number((u + 0.5) / 10_000) for u in range(10_000)])
    assert [(numbers == k).mean() for k in (1, 2, 3)] == pytest.approx([0.25, 0.1875, 0.140625], abs=2e-4)


def test_the_trials_of_a_search_are_read_off_its_event() -> None:
    assert trials_of([(Trials(3.0).event([QUIET, LOUD]), 1)]) == [QUIET, LOUD]
    assert trials_of([(all_shown([QUIET, LOUD]), 1)]) == [QUIET, LOUD]
    assert trials_of(QUIET) is None

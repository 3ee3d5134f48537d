"""The price of a search and the number of its trials, against dp_accounting and the distributions themselves."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.epsilon import epsilon
from algorithms.privacy.accounting.event_rules import EitherDpEvent
from algorithms.privacy.accounting.events import event_from_json, event_to_json
from algorithms.privacy.accounting.rdp import ORDERS
from algorithms.privacy.accounting.selection import Trials, all_shown, trials_of

QUIET, LOUD = [(GaussianDpEvent(8.0), 4)], [(GaussianDpEvent(5.0), 2)]


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, math.inf])
def test_a_search_costs_what_the_theorems_say(shape: float) -> None:
    accountant = RdpAccountant(ORDERS)
    accountant.compose(RepeatAndSelectDpEvent(SelfComposedDpEvent(GaussianDpEvent(8.0), 4), 10.0, shape))
    event = Trials(10.0, shape).event([QUIET])
    assert epsilon([(event, 1)], 1e-5, accountant="rdp") == pytest.approx(accountant.get_epsilon(1e-5))
    assert event_from_json(event_to_json(event)) == event
    with pytest.raises(RefusedError, match="Rényi bounds alone"):
        epsilon([(event, 1)], 1e-5)


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

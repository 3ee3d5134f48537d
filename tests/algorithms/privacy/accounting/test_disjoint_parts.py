"""Releases on disjoint people cost the worst part: closed forms, the density itself, groups, and what is refused."""

import json
import math

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from scipy import stats

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.epsilon import REPLACE_ONE, Accountant, epsilon, group_privacy
from algorithms.privacy.accounting.event_classes import DisjointPartsDpEvent, parts
from algorithms.privacy.accounting.events import (
    CorrelatedStepDpEvent,
    Schedule,
    Trials,
    disjoint_parts_of,
    event_from_json,
    event_to_json,
    on_disjoint_parts,
    releases_in_order,
    schedule_to_json,
    trials_of,
)
from algorithms.privacy.accounting.filters import rho_of
from algorithms.privacy.ledger import Composition
from tests.support.refusals import refused_as

DELTA = 1e-5
TRAINING, EVALUATION = [(GaussianDpEvent(2.0), 3)], [(GaussianDpEvent(4.0), 1)]
BOTH = on_disjoint_parts(TRAINING, EVALUATION)


def test_the_cost_is_the_closed_form_of_the_larger_part() -> None:
    """By Balle and Wang 2018: of mu = sqrt(3) / 2 it is 3.7086349, of mu = 1 it is 4.3771781."""
    assert epsilon(BOTH, DELTA) == pytest.approx(3.708634930511884, rel=1e-9)
    louder = on_disjoint_parts(TRAINING, [(GaussianDpEvent(1.0), 1)])
    assert epsilon(louder, DELTA) == pytest.approx(4.377178095681225, rel=1e-9)


def test_pure_epsilons_and_rho_are_those_of_the_larger_part() -> None:
    pure = on_disjoint_parts([(LaplaceDpEvent(10.0), 20)], [(LaplaceDpEvent(0.4), 1)])
    assert epsilon(pure, 0.0, accountant="pure") == pytest.approx(2.5)
    assert rho_of(BOTH[0][0]) == pytest.approx(3 / 8)


@pytest.mark.parametrize(
    ("composition", "price"), [(Composition("renyi", 4.0), 1.5), (Composition("zcdp"), 0.375)]
)
def test_a_ledger_prices_the_larger_part(composition: Composition, price: float) -> None:
    """Gaussian noise z diverges by order / (2 z^2), and so do three releases three times."""
    assert composition.events_price(schedule_to_json(BOTH), "ADD_OR_REMOVE_ONE", 1) == pytest.approx(price)


PARTS: list[Schedule] = [
    [(PoissonSampledDpEvent(0.01, GaussianDpEvent(0.9)), 300)],
    [(GaussianDpEvent(30.0), 1), (PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0)), 40)],
    [(GaussianDpEvent(1.3), 1)],
    [(LaplaceDpEvent(5.0), 6)],
]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("one", range(len(PARTS)))
@pytest.mark.parametrize("other", [1, 2])
def test_the_cost_is_that_of_the_larger_part_and_below_no_part(
    one: int, other: int, accountant: Accountant
) -> None:
    each = [epsilon(PARTS[index], DELTA, accountant=accountant) for index in (one, other)]
    both = epsilon(on_disjoint_parts(PARTS[one], PARTS[other]), DELTA, accountant=accountant)
    assert both == max(each)


def test_several_runs_cost_at_least_what_they_cost_a_person_of_one_side() -> None:
    one, other = PARTS[1], PARTS[2]
    again = epsilon(on_disjoint_parts(one, other) * 2, DELTA)
    assert again >= max(epsilon([*part] * 2, DELTA) for part in (one, other)) * (1 - 1e-6)
    assert again <= epsilon([*other] * 2, DELTA) * 1.01


def test_what_is_released_of_both_parts_tells_no_more_than_is_charged() -> None:
    """The evaluation of one held-out person depends on what training released; the joint density is integrated."""
    grid = np.linspace(-24.0, 24.0, 1201)
    cell = grid[1] - grid[0]

    def joint(trained_on: float, held_out: float) -> np.ndarray:
        model = stats.norm(trained_on, 2.0).pdf(grid) * cell
        score = held_out * np.tanh(grid)  # of the released model, at most 1
        released: np.ndarray = model[:, None] * stats.norm(score[:, None], 4.0).pdf(grid[None, :]) * cell
        return released

    delta = 0.01
    charged = epsilon(on_disjoint_parts([(GaussianDpEvent(2.0), 1)], EVALUATION), delta)
    here, no_trained, no_held_out = joint(1.0, 1.0), joint(0.0, 1.0), joint(1.0, 0.0)
    for other in (no_trained, no_held_out):
        for some, without in ((here, other), (other, here)):
            # of the grid's kinks
            assert np.maximum(some - math.exp(charged) * without, 0.0).sum() <= delta * (1 + 1e-3)
    tight = np.maximum(here - math.exp(charged) * no_trained, 0.0).sum()
    assert tight == pytest.approx(delta, rel=0.01)


def test_the_best_of_trials_that_others_scored_tells_no_more_than_is_charged() -> None:
    """A trial is a model and a noisy score of it by other people; the best score's trial leaves, of a geometric number.

    With Q the distribution of scores and f the generating function of the number, the winner has the density of a
    trial times f'(Q); it is integrated.
    """
    grid = np.linspace(-22.0, 22.0, 881)
    cell, mean = grid[1] - grid[0], 5.0

    def winner(trained_on: float, held_out: float) -> np.ndarray:
        model = stats.norm(trained_on, 2.0).pdf(grid) * cell
        score = stats.norm(held_out * np.tanh(grid)[:, None], 3.0)
        below = model @ score.cdf(grid[None, :])
        chosen = (1 / mean) / (1 - (1 - 1 / mean) * below) ** 2
        density: np.ndarray = model[:, None] * score.pdf(grid[None, :]) * cell * chosen
        return density

    delta, training, score = 0.01, [(GaussianDpEvent(2.0), 1)], [(GaussianDpEvent(3.0), 1)]
    trials = Trials(mean)
    searches = [(trials.event([training]), 1)], [(trials.event([score]), 1)]
    charged = epsilon(on_disjoint_parts(*searches), delta)
    of_one_trial = epsilon(on_disjoint_parts(training, score), delta)
    here = winner(1.0, 1.0)
    assert here.sum() == pytest.approx(1.0, abs=1e-3)
    seen = []
    for other in (winner(0.0, 1.0), winner(1.0, 0.0)):
        for some, without in ((here, other), (other, here)):
            assert np.maximum(some - math.exp(charged) * without, 0.0).sum() <= delta
            seen.append(np.maximum(some - math.exp(of_one_trial) * without, 0.0).sum())
    assert max(seen) > 1.1 * delta  # choosing costs more than a trial


@pytest.mark.parametrize("accountant", ["pld", "rdp", "pure"])
def test_a_record_that_is_replaced_may_change_sides_so_nothing_is_claimed(accountant: Accountant) -> None:
    parts = on_disjoint_parts([(LaplaceDpEvent(5.0), 1)], [(LaplaceDpEvent(9.0), 1)])
    with refused_as("no_bound_replace_one", mechanism="releases on disjoint people"):
        epsilon(parts, 0.0 if accountant == "pure" else DELTA, accountant=accountant, adjacency=REPLACE_ONE)


def test_a_group_may_be_on_both_sides_and_then_pays_for_both() -> None:
    of_two = group_privacy(BOTH[0][0], 2)
    assert event_to_json(of_two)["events"] == [
        _composed({"type": "GaussianDpEvent", "noise_multiplier": 2.0}),
        _composed(_times(3, 2.0), _times(1, 4.0), nested=True),
        _composed(_times(3, 1.0), nested=True),
    ]
    similar = DisjointPartsDpEvent([LaplaceDpEvent(2.0), LaplaceDpEvent(1.0)])
    assert epsilon([(group_privacy(similar, 3), 1)], 0.0, accountant="pure") == pytest.approx(3.0)


def test_a_group_in_many_parts_pays_for_its_dearest_way() -> None:
    """Pure epsilons grow with the records in a part, so that all three are in the dearest: 3 times 1 / 1."""
    many = DisjointPartsDpEvent([LaplaceDpEvent(1.0 + index / 1000) for index in range(20)])
    of_three = group_privacy(many, 3)
    assert len(parts(of_three)) == math.comb(22, 3)
    assert epsilon([(of_three, 1)], 0.0, accountant="pure") == pytest.approx(3.0)
    alike = DisjointPartsDpEvent([LaplaceDpEvent(1.0)] * 20)
    assert len(parts(group_privacy(alike, 3))) == 4  # 3 together, 2 and 1, 1 and 2, and each apart
    with refused_as("no_bound_of_group", count=40):
        group_privacy(many, 40)


def _times(count: int, noise: float) -> dict[str, object]:
    event = {"type": "GaussianDpEvent", "noise_multiplier": noise}
    return {"type": "SelfComposedDpEvent", "event": event, "count": count}


def _composed(*parts: dict[str, object], nested: bool = False) -> dict[str, object]:
    if not nested:  # of the second part alone
        return {
            "type": "ComposedDpEvent",
            "events": [{"type": "ComposedDpEvent", "events": [_times(1, 2.0)]}],
        }
    inner = [{"type": "ComposedDpEvent", "events": [part]} for part in parts]
    return {"type": "ComposedDpEvent", "events": inner}


def test_its_document_is_that_of_its_parts() -> None:
    document = {
        "type": "DisjointPartsDpEvent",
        "events": [
            {"type": "ComposedDpEvent", "events": [_times(3, 2.0)]},
            {"type": "ComposedDpEvent", "events": [_times(1, 4.0)]},
        ],
    }
    assert event_to_json(BOTH[0][0]) == document
    assert event_from_json(json.loads(json.dumps(document))) == BOTH[0][0]
    assert disjoint_parts_of(BOTH) == [TRAINING, EVALUATION]
    assert releases_in_order(BOTH) == [*TRAINING, *EVALUATION]
    assert disjoint_parts_of(TRAINING) is None
    assert releases_in_order(TRAINING) == TRAINING


def test_other_people_may_evaluate_the_winner_of_a_search() -> None:
    one, other = [(GaussianDpEvent(8.0), 4)], [(GaussianDpEvent(5.0), 2)]
    search = [(Trials(3.0).event([one, other]), 1)]
    assert trials_of(on_disjoint_parts(search, EVALUATION)) == [[*one, *EVALUATION], [*other, *EVALUATION]]
    assert trials_of(BOTH) is None


def test_other_people_may_evaluate_each_trial_of_a_search() -> None:
    one, other = [(GaussianDpEvent(8.0), 4)], [(GaussianDpEvent(5.0), 2)]
    trials = Trials(3.0)
    searches = [(trials.event([one, other]), 1)], [(trials.event([EVALUATION]), 1)]
    whole = on_disjoint_parts(*searches)
    assert trials_of(whole) == [[*one, *EVALUATION], [*other, *EVALUATION]]
    assert epsilon(whole, DELTA) == max(epsilon(each, DELTA) for each in searches)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("whole", [True, False], ids=["disjoint", "composed"])
def test_later_steps_that_nobody_paid_for_are_refused_within_a_part(
    whole: bool, accountant: Accountant
) -> None:
    steps: list[DpEvent] = [SelfComposedDpEvent(CorrelatedStepDpEvent(5.0, 1, 1.0), 9)]
    event = (
        DisjointPartsDpEvent([ComposedDpEvent(steps), GaussianDpEvent(9.0)])
        if whole
        else ComposedDpEvent(steps)
    )
    with pytest.raises(RefusedError, match="none before them has paid"):
        epsilon([(event, 1), (GaussianDpEvent(9.0), 1)], DELTA, accountant=accountant)

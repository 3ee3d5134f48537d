"""EpsilonGuesses of the epsilon of a search's trials, beside what searches over Gaussian trials are charged."""

import math

import pytest
from dp_accounting import GaussianDpEvent

from algorithms.privacy.accounting.epsilon import epsilon
from algorithms.privacy.accounting.events import Schedule, Trials, all_shown
from tasks.tuning.gaussian_search import EpsilonGuesses, GaussianSearch


@pytest.mark.parametrize("noise", [0.3, 4.0, 300.0])
@pytest.mark.parametrize("trials", [Trials(12.0), Trials(12.0, math.inf), Trials(1.0), None])
def test_a_search_over_gaussian_trials_costs_what_is_guessed(noise: float, trials: Trials | None) -> None:
    trial: Schedule = [(GaussianDpEvent(noise), 1)]
    like = GaussianSearch(1e-5, trials, shown=3)
    each = epsilon(trial, 1e-5)
    price = epsilon([(all_shown([trial] * 3) if trials is None else trials.event([trial]), 1)], 1e-5)
    assert like.price(each) == pytest.approx(price, rel=1e-3)
    assert like.epsilon_per_trial(price, 10 * each) == pytest.approx(each, rel=2e-3)
    assert like.epsilon_per_trial(price, each / 2) == each / 2


def test_guesses_reach_what_is_wanted_where_a_price_is_a_power_of_the_other() -> None:
    like = GaussianSearch(1e-5, Trials(12.0))
    guesses, cost = EpsilonGuesses(like, 1.0, 1.0), 0.0
    guess: float | None = guesses.first()
    for _ in range(2):
        assert guess is not None
        cost = 1.4 * like.price(guess) ** 0.8
        guess = guesses.after(guess, cost)
    assert guess is not None
    assert 1.4 * like.price(guess) ** 0.8 == pytest.approx(1.0, rel=1e-3)
    assert guesses.after(guess, 0.0) is None

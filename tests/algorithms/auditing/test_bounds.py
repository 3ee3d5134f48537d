"""The statistics of audits against exact values, published ones, and their stated rate of false alarms."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from scipy.stats import binom

from algorithms.auditing import bounds
from algorithms.auditing.bounds import Guesses, Rates
from algorithms.privacy.accounting.risk import profile


def test_clopper_and_pearsons_bound_is_exact() -> None:
    high = bounds.upper_rate(3, 40, confidence=0.95)
    assert binom.cdf(3, 40, high) == pytest.approx(0.05)
    assert bounds.upper_rate(40, 40, confidence=0.95) == 1.0


def test_rates_of_a_test_become_the_epsilon_that_explains_them() -> None:
    assert bounds.epsilon_of(Rates(0.5, 0.6), 0.0) == 0.0
    assert bounds.epsilon_of(Rates(0.3, 0.01), 1e-5) == pytest.approx(math.log((1 - 1e-5 - 0.3) / 0.01))
    assert bounds.mu_of(Rates(0.1586553, 0.1586553)) == pytest.approx(2.0, abs=1e-5)


def test_the_bound_of_one_run_has_the_published_value() -> None:
    assert bounds.one_run_p_value(Guesses(100, 100, 75), math.log(3), 0.0) == pytest.approx(0.553, abs=5e-4)
    found = bounds.one_run_epsilon(Guesses(1000, 200, 200), 0.0, confidence=0.95)
    assert found == pytest.approx(-math.log(0.05 ** (-1 / 200) - 1))  # q^200 = 0.05


@pytest.mark.parametrize("mu", [0.5, 1.0])
def test_the_bound_by_trade_off_curves_is_right_for_independent_gaussians(mu: float) -> None:
    """Of a product of Gaussian mechanisms, where it is to be close and never above, but by chance."""
    rng, alarms, found = np.random.default_rng(0), 0, []
    inverse = bounds.gaussian_inverse(mu)
    for _ in range(200):
        coins = rng.random(300) < 0.5
        scores = rng.normal(size=300) + mu * coins
        order = np.argsort(scores)
        made = np.concatenate([~coins[order[:50]], coins[order[-50:]]])
        seen = Guesses(300, 100, int(made.sum()))
        alarms += bounds.is_refuted(seen, inverse, confidence=0.95)
        found.append(bounds.is_refuted(seen, bounds.gaussian_inverse(mu / 3), confidence=0.95))
    assert alarms <= binom.ppf(1 - 1e-6, 200, 0.05)
    assert np.mean(found) > 0.3


def test_a_profiles_inverse_is_that_of_its_mechanism() -> None:
    exact, by_profile = bounds.gaussian_inverse(1.0), bounds.inverse_of(profile([(GaussianDpEvent(1.0), 1)]))
    for share in (0.05, 0.3, 0.9):
        assert by_profile(share) == pytest.approx(exact(share), rel=2e-2)
        assert by_profile(share) <= exact(share) * (1 + 1e-6)


def test_the_epsilon_by_curves_is_the_tighter_one_where_delta_counts() -> None:
    seen = Guesses(1000, 400, 330)
    assert bounds.one_run_gaussian_epsilon(seen, 1e-5, confidence=0.95) > bounds.one_run_epsilon(
        seen, 1e-5, confidence=0.95
    )

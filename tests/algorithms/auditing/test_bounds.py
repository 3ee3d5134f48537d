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


def test_both_errors_of_a_test_hold_together() -> None:
    """At 95 % together each holds at 97.5 %."""
    without, with_record = np.repeat([0.0, 2.0], [37, 3]), np.repeat([0.0, 2.0], [5, 35])
    found = bounds.rates(without, with_record, 1.0, confidence=0.95)
    assert binom.cdf(3, 40, found.alarms) == pytest.approx(0.025)
    assert binom.cdf(5, 40, found.misses) == pytest.approx(0.025)


def test_the_better_of_two_thresholds_is_paid_for() -> None:
    """Each error of each threshold holds at 98.75 %, so that the choice is at 95 %; no false alarm in 200 pairs."""
    scores = np.stack([np.full(200, -1.0), np.full(200, 9.0)], axis=1)
    attack = bounds.many_runs(
        scores, lambda d: profile([(GaussianDpEvent(1 / d), 1)]), lambda d: 4.0 * d, 1e-5
    )
    each = 1 - 0.0125 ** (1 / 200)  # (1 - each)^200 = 0.0125
    assert f"false alarms at most {100 * each:.3g}%, misses at most {100 * each:.3g}%" in attack.detail


def test_delta_counts_in_the_bound_of_one_run() -> None:
    """Theorem 5.2 written out: 2 m delta times the largest mean of the chances just below, one guess at a time."""
    q, m, r, v, delta = 1 / (1 + math.exp(-1.0)), 50, 20, 19, 1e-3
    chances = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    means = [sum(chances[v - i : v]) / i for i in range(1, v + 1)]
    expected = sum(chances[v:]) + 2 * m * delta * max(means)
    assert bounds.one_run_p_value(Guesses(m, r, v), 1.0, delta) == pytest.approx(expected, rel=1e-9)
    assert expected > 1.05 * bounds.one_run_p_value(Guesses(m, r, v), 1.0, 0.0)


def test_a_claim_is_refuted_at_the_stated_level_and_not_at_95_percent() -> None:
    """One in a million: what has a chance of some percent under the claim accuses nobody."""
    claimed = profile([(GaussianDpEvent(3.0), 1)])
    coins = np.arange(400) % 2 == 0
    verdicts = {}
    for right in range(120, 201, 4):
        guessed = np.full(400, 0.5)
        heads, tails = np.flatnonzero(coins), np.flatnonzero(~coins)
        wrong = (200 - right) // 2
        high = [*heads[: 100 - wrong], *tails[:wrong]]
        low = [*tails[wrong:100], *heads[100 - wrong : 100]]
        guessed[high], guessed[low] = 1.0, 0.0
        seen = Guesses(400, 200, right)
        attack = bounds.by_guesses("some", guessed, coins, claimed, 1e-5)
        assert f"{right} of 200 guesses" in attack.detail
        inverse = bounds.inverse_of(claimed)
        verdicts[right] = (
            bounds.is_refuted(seen, inverse, confidence=0.95),
            bounds.is_refuted(seen, inverse, confidence=1 - 1e-6),
            attack.is_violated,
        )
    assert (True, False, False) in verdicts.values()
    assert all(stated == told for _, stated, told in verdicts.values()) and verdicts[200][2]

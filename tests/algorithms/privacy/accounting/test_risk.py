"""What an attacker can achieve: against closed forms, against another library, and never below what is true."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from algorithms.privacy.accounting import risk
from algorithms.privacy.accounting.epsilon import ORDERS, REPLACE_ONE, rdp
from algorithms.privacy.accounting.events import PureDpEvent

RATES = np.array([0.001, 0.01, 0.05, 0.2, 0.5, 0.9])


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 3.0])
def test_a_gaussian_mechanism_is_recognised_as_its_closed_form_says(mu: float) -> None:
    found = risk.profile([(dp.GaussianDpEvent(1 / mu), 1)])
    exact = ndtr(ndtri(RATES) + mu)
    assert (risk.max_true_positive_rate(found, RATES) >= exact - 1e-12).all()
    np.testing.assert_allclose(risk.max_true_positive_rate(found, RATES), exact, atol=1e-3)
    assert risk.advantage(found) == pytest.approx(2 * ndtr(mu / 2) - 1, abs=1e-4)
    assert mu <= risk.gaussian_mu(found) == pytest.approx(mu, rel=2e-3)


@pytest.mark.parametrize("place", [0, 7, 50, 99])
def test_the_point_of_a_profile_that_says_most_decides_about_mu(place: int) -> None:
    """The others are those of mu = 0.5, by its closed form, and this one that of 0.8."""
    epsilons = np.linspace(0.0, 1.5, 100)
    weak, strong = (
        ndtr(mu / 2 - epsilons / mu) - np.exp(epsilons) * ndtr(-mu / 2 - epsilons / mu) for mu in (0.5, 0.8)
    )
    deltas = np.where(np.arange(100) == place, strong, weak)
    assert risk.gaussian_mu(risk.Profile(epsilons, deltas)) == pytest.approx(0.8, rel=1e-6)
    assert risk.gaussian_mu(risk.Profile(epsilons, weak)) == pytest.approx(0.5, rel=1e-6)


def test_many_gaussian_releases_are_one_with_less_noise() -> None:
    many = risk.profile([(dp.GaussianDpEvent(8.0), 64)])
    np.testing.assert_allclose(risk.max_true_positive_rate(many, RATES), ndtr(ndtri(RATES) + 1), atol=1e-3)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 4.0])
def test_a_pure_release_is_recognised_as_randomised_response_is(epsilon: float) -> None:
    found = risk.profile([(PureDpEvent(epsilon), 1)])
    exact = np.minimum(np.exp(epsilon) * RATES, 1 - np.exp(-epsilon) * (1 - RATES))
    assert (risk.max_true_positive_rate(found, RATES) >= exact - 1e-12).all()
    np.testing.assert_allclose(risk.max_true_positive_rate(found, RATES), exact, atol=1e-9)


def test_renyi_bounds_give_a_profile_that_is_never_below_the_tight_one() -> None:
    schedule = [(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.1)), 1000)]
    tight = risk.profile(schedule)
    loose = risk.profile_of_rdp(np.array(ORDERS), rdp(schedule))
    assert (risk.max_true_positive_rate(loose, RATES) >= risk.max_true_positive_rate(tight, RATES)).all()
    assert risk.advantage(loose) >= risk.advantage(tight)


def test_the_advantage_is_that_of_the_curve_where_delta_at_0_is_loose() -> None:
    found = risk.profile_of_rdp(np.array([8.0]), np.array([1.0]))
    alarms = np.linspace(0.0, 1.0, 10_001)
    of_curve = float((risk.max_true_positive_rate(found, alarms) - alarms).max())
    assert of_curve - 1e-9 <= risk.advantage(found) == pytest.approx(of_curve, abs=1e-4)
    assert risk.advantage(found) < 0.7 * found.delta[0]


def test_a_curve_says_much_less_than_its_single_point() -> None:
    """Epsilon 3 at delta 1e-5 alone would allow to recognise 95.3 % at 5 % false alarms."""
    found = risk.profile([(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(0.75)), 1000)])
    at_point = np.interp(1e-5, found.delta[::-1], found.epsilon[::-1])
    assert at_point > 3
    assert float(risk.max_true_positive_rate(found, 0.05)) < 0.5 < min(1.0, 1e-5 + math.exp(3) * 0.05)


def test_replacing_a_record_tells_more_than_adding_one() -> None:
    schedule = [(dp.GaussianDpEvent(2.0), 1)]
    added, replaced = risk.profile(schedule), risk.profile(schedule, adjacency=REPLACE_ONE)
    np.testing.assert_allclose(
        risk.max_true_positive_rate(replaced, RATES), ndtr(ndtri(RATES) + 1.0), atol=1e-3
    )
    assert (risk.max_true_positive_rate(replaced, RATES) > risk.max_true_positive_rate(added, RATES)).all()


def test_what_is_not_private_hides_nothing() -> None:
    found = risk.profile([(dp.NonPrivateDpEvent(), 1)])
    assert risk.max_true_positive_rate(found, RATES).tolist() == [1.0] * len(RATES)
    assert risk.gaussian_mu(found) == math.inf


def test_another_library_draws_the_same_curve() -> None:
    plrv = pytest.importorskip("riskcal.analysis")
    schedule = [(dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(1.0)), 300)]
    accountant = dp.pld.PLDAccountant()
    for event, count in schedule:
        accountant.compose(event, count)
    theirs = np.array([plrv.get_beta_from_pld(accountant._pld, alpha) for alpha in RATES])
    np.testing.assert_allclose(risk.min_false_negative_rate(risk.profile(schedule), RATES), theirs, atol=2e-3)


def test_releases_with_hardly_any_noise_have_a_curve_too() -> None:
    found = risk.profile([(dp.GaussianDpEvent(1e-3), 1)])
    assert (risk.max_true_positive_rate(found, RATES) >= ndtr(ndtri(RATES) + 1000)).all()

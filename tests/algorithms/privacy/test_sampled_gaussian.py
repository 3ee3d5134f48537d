"""Losses and Rényi bounds of a sampled Gaussian, computed at many points at once, are those of dp_accounting."""

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_mechanism

from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE, ORDERS
from algorithms.privacy.accounting.losses import SampledGaussianLoss, by_rdp, rdp_of_sampled_gaussian

SIDES = privacy_loss_mechanism.AdjacencyType
EPSILONS = np.concatenate([np.linspace(-6, 6, 2001), [-1e-9, 0.0, 1e-9]])


@pytest.mark.parametrize("side", [SIDES.ADD, SIDES.REMOVE])
@pytest.mark.parametrize("rate", [1e-4, 0.02, 0.5, 0.97])
@pytest.mark.parametrize("multiplier", [0.4, 1.0, 20.0])
def test_its_loss_is_that_of_dp_accounting(side: SIDES, rate: float, multiplier: float) -> None:
    settings = {"sampling_prob": rate, "adjacency_type": side}
    edge = np.log1p(-rate) * (1 if side is SIDES.REMOVE else -1)
    points = np.append(EPSILONS, edge)
    expected = privacy_loss_mechanism.GaussianPrivacyLoss(multiplier, **settings).get_delta_for_epsilon(
        points
    )
    found = SampledGaussianLoss(multiplier, **settings).get_delta_for_epsilon(points)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    assert SampledGaussianLoss(multiplier, **settings).get_delta_for_epsilon(0.3) == pytest.approx(
        float(np.asarray(found)[np.argmin(abs(points - 0.3))]), abs=1e-2
    )


@pytest.mark.parametrize(
    ("rate", "multiplier"), [(1e-6, 1.0), (0.01, 0.3), (0.01, 1.0), (0.2, 100.0), (0.5, 20.0), (0.97, 0.01)]
)
def test_its_renyi_bounds_are_those_of_dp_accounting(rate: float, multiplier: float) -> None:
    """Infinite at the same orders, too: at a rate of a half the series of some is slow."""
    event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier))
    expected, found = (
        by_rdp(event, ORDERS, ADD_OR_REMOVE_ONE),
        rdp_of_sampled_gaussian(multiplier, rate, ORDERS),
    )
    assert np.isinf(found).any() == (rate == 0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=2e-15)
    few = ORDERS[3:12:2]
    np.testing.assert_array_equal(rdp_of_sampled_gaussian(multiplier, rate, few), found[3:12:2])


def test_a_renyi_bound_that_overflows_is_infinite() -> None:
    assert np.isinf(rdp_of_sampled_gaussian(1e-155, 0.5, ORDERS)).all()

"""The privacy loss of a sampled Gaussian on a whole grid at once is that of dp_accounting, point by point."""

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_mechanism

from algorithms.privacy.accounting.losses import SampledGaussianLoss

SIDES = privacy_loss_mechanism.AdjacencyType
EPSILONS = np.concatenate([np.linspace(-6, 6, 2001), [-1e-9, 0.0, 1e-9]])


@pytest.mark.parametrize("side", [SIDES.ADD, SIDES.REMOVE])
@pytest.mark.parametrize("rate", [1e-4, 0.02, 0.5, 0.97])
@pytest.mark.parametrize("multiplier", [0.4, 1.0, 20.0])
def test_it_is_that_of_dp_accounting(side: SIDES, rate: float, multiplier: float) -> None:
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

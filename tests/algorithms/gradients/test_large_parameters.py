"""Parameters so large that their gradients are formed for one record at a time, or never; here with tiny ones."""

import pytest
import torch

from algorithms.gradients import L2, PerLayer, parameter_gradients
from algorithms.gradients.rules.convolution import ConvGrad
from tests.support.gradients.forms import FORMS, NEAR, absolute, drawn, excess, written


@pytest.fixture(autouse=True, params=[0, 64], ids=["singly", "in products of 64 bits"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every parameter was large, with records of many outer products, or of few."""
    monkeypatch.setattr(parameter_gradients, "LARGE_PARAMETER", 0)
    monkeypatch.setattr(parameter_gradients, "MAX_PRODUCTS_ALONE", request.param)


@pytest.mark.parametrize("name", FORMS)
def test_a_gradient_is_never_above_its_bound(name: str) -> None:
    for gradient in drawn(name, 2):
        norm = float(written(gradient)[0].norm())
        assert excess(gradient, PerLayer((norm,))) <= 1.0  # of one layer, as by L2
        assert all(excess(gradient, L2(near * norm)) <= 1.0 for near in NEAR[:1] + NEAR[3:])


@pytest.mark.parametrize("name", FORMS)
def test_a_sum_is_that_of_the_gradients_and_nothing_large_is_kept(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    gradient = FORMS[name](draw)
    gradient = gradient.take(torch.zeros(7, dtype=torch.int64))
    weights = torch.rand(7, generator=draw, dtype=torch.float64)
    gradient.square_norms()
    exact = written(gradient)
    found = torch.ones(exact.shape[1], dtype=torch.float64)  # what was there before stays
    gradient.add_weighted(weights, found)
    sizes = float(written(absolute(gradient))[0].norm())  # what cancels is rounded relative to this
    assert float((found - 1.0 - weights @ exact).norm()) <= 1e-5 * sizes * float(weights.sum())
    if isinstance(gradient, parameter_gradients.LinearGrad | ConvGrad):
        assert not {"rows", "_materialized_sums"} & vars(gradient).keys()

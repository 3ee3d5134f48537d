"""Every layer, and every way to share it, against a loop over single records."""

import logging

import pytest
import torch

from algorithms.gradients import L2
from tests.gradients import naive
from tests.gradients.layers import EMBEDDING, LAYERS
from tests.gradients.networks import AS_A_WHOLE, NETWORKS, SHARING, WITHOUT_RULE
from tests.gradients.zoo import once, problem

SMALL = LAYERS | SHARING | WITHOUT_RULE | AS_A_WHOLE
INNER = {f"{name}, inside": spec.after_a_layer() for name, spec in LAYERS.items() if name not in EMBEDDING}
SPECS = SMALL | INNER | NETWORKS
PRECISIONS = [(torch.float64, 1e-10), (torch.float32, 1e-5)]


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("name", SPECS)
def test_norms_and_sums_are_those_of_the_loop(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """By every clipping; the tolerance is relative to the sum."""
    made, engine = once(SPECS[name], dtype)
    for kind, clipping in naive.clippings(made.model, made.gradients).items():
        expected = naive.contributions(made.model, made.gradients, clipping).sum(dim=0)
        found = engine.clipped_sum(*made.arguments, clipping)
        assert found.dtype == torch.float64
        assert naive.relative(found, expected) < tolerance, kind
        norms = naive.norms(made.model, made.gradients, clipping)
        assert naive.relative(engine.norms(*made.arguments, clipping), norms) < tolerance, kind


@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_told_apart_by_record(name: str) -> None:
    """A sum with one weight for each record is another sum for each way in which records could be mistaken."""
    made, engine = once(SPECS[name], torch.float64)
    weights = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = engine.contributions(*made.arguments).weighted_sum(weights)
    assert naive.relative(found, weights @ made.gradients) < 1e-10


@pytest.mark.parametrize("name", SMALL | NETWORKS)
def test_what_is_taken_record_by_record_is_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    made = problem(SPECS[name])
    with caplog.at_level(logging.INFO, logger="algorithms"):
        engine = made.engine()
        engine.clipped_sum(*made.arguments, L2(1.0))
    expected = {"as a whole": ["is taken record by record"], "in part": ["these are taken record by record"]}
    kind = "as a whole" if name in AS_A_WHOLE else "in part" if name in WITHOUT_RULE else "by rules"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(expected.get(kind, []))
    assert all(part in message for part, message in zip(expected.get(kind, []), said, strict=True))

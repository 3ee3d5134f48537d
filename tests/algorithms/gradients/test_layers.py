"""Every layer, and every way to share it, against a loop over single records."""

import pytest
import torch

from algorithms.gradients import L2
from tests.algorithms.gradients import naive
from tests.algorithms.gradients.layers import EMBEDDING, LAYERS
from tests.algorithms.gradients.networks import AS_A_WHOLE, NETWORKS, OF_PARAMETERS, SHARING
from tests.algorithms.gradients.networks import SPECS as ALONE
from tests.algorithms.gradients.test_engine import ON_WORDS, WAYS
from tests.algorithms.gradients.zoo import once, once_heard

BY_RULES = LAYERS | SHARING | OF_PARAMETERS
INNER = {f"{name}, inside": spec.after_a_layer() for name, spec in LAYERS.items() if name not in EMBEDDING}
"""Layers whose input has a gradient too, which takes all that they do alone."""
SPECS = INNER | {name: spec for name, spec in ALONE.items() if f"{name}, inside" not in INNER}
IN_64_BITS = [(name, torch.float64, 1e-10) for name in SPECS]
IN_32_BITS = [(name, torch.float32, 1e-5) for name in dict.fromkeys((*WAYS, *ON_WORDS, *NETWORKS))]


@pytest.mark.parametrize(("name", "dtype", "tolerance"), IN_64_BITS + IN_32_BITS)
def test_norms_and_sums_are_those_of_the_loop(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """By every clipping, and of batches of one, whose shapes are easily mistaken; relative to the sum."""
    made, engine = once((ALONE | SPECS)[name], dtype)
    for kind, clipping in naive.clippings(made.model, made.gradients).items():
        each = naive.contributions(made.model, made.gradients, clipping)
        found = engine.clipped_sum(*made.arguments, clipping)
        assert found.dtype == torch.float64
        assert naive.relative(found, each.sum(dim=0)) < tolerance, kind
        norms = naive.norms(made.model, made.gradients, clipping)
        assert naive.relative(engine.norms(*made.arguments, clipping), norms) < tolerance, kind
        if kind == "L2":
            for i in (0, 3):
                one = engine.clipped_sum(*made.some([i]).arguments, clipping)
                assert naive.relative(one, each[i]) < tolerance


@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_told_apart_by_record(name: str) -> None:
    """A sum with one weight for each record is another sum for each way in which records could be mistaken."""
    made, engine = once(SPECS[name], torch.float64)
    weights = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = engine.contributions(*made.arguments).weighted_sum(weights)
    assert naive.relative(found, weights @ made.gradients) < 1e-10


@pytest.mark.parametrize("name", SPECS)
def test_what_is_taken_record_by_record_is_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """When the engine is made, and never again."""
    made, engine, said = once_heard(SPECS[name], torch.float64)
    caplog.clear()
    engine.clipped_sum(*made.arguments, L2(1.0))
    assert not caplog.records
    if name.removesuffix(", inside") in BY_RULES or name in NETWORKS:
        assert not said
    else:
        assert len(said) == 1
        part = "the model made up is" if name in AS_A_WHOLE else "in the model made up these are"
        assert f"{part} differentiated record by record: " in said[0]

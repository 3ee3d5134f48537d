"""Sums over a layer of each kind on the simulated accelerator: those of a loop over single records on the CPU."""

import pytest
import torch

from algorithms.gradients import L2, UnsupportedModelError
from tests.support.gradients import naive
from tests.support.gradients.networks import NETWORKS, SPECS
from tests.support.gradients.problems import problem

COMPLEX = "filter by the Fourier transform", "complex weight"
"""Of which the simulated device has no views."""
KINDS = {
    name.partition(",")[0]: name
    for name in reversed(SPECS)
    if not (
        name in NETWORKS
        or name in COMPLEX
        or name == "weighted bags"
        or name.endswith(" of images in a record")
    )
}
"""The first of each kind of layer, without its variants."""


def test_all_kinds_of_layers_are_tried() -> None:
    assert len(KINDS) > 60


def test_a_layer_that_cannot_be_repeated_there_is_refused_by_name(sim: torch.device) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"the layer bag \(EmbeddingBag\).* use the mode mean or sum"
    ):
        problem(SPECS["weighted bags"], torch.float32).engine(device=sim)


@pytest.mark.parametrize("name", sorted(KINDS.values()))
def test_sums_and_norms_are_those_of_the_loop(name: str, sim: torch.device) -> None:
    made = problem(SPECS[name], torch.float32)
    expected = naive.contributions(made.model, made.gradients, L2(0.5)).sum(dim=0)
    engine = made.engine(device=sim)
    records = tuple(part.to(sim) for part in made.arguments)
    assert naive.relative(engine.clipped_sum(*records, L2(0.5)).cpu(), expected) < 2e-5
    norms = naive.norms(made.model, made.gradients, L2(0.5))
    assert naive.relative(engine.norms(*records, L2(0.5)).cpu(), norms) < 2e-5

"""Sums over a layer of each kind on the simulated accelerator: those of a loop over single records on the CPU."""

import re

import pytest
import torch
from torch import nn

from algorithms.gradients import L2, UnsupportedModelError
from tests.support.gradients import naive
from tests.support.gradients.networks import NETWORKS, SPECS
from tests.support.gradients.problems import BRIEF, SMALL, Spec, problem
from tests.support.soak import soak_but

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


LIKE_OTHERS = {
    *(
        "attention across",
        "attention to other inputs",
        "attention to what came before",
        "attention without bias",
    ),
    *("attention with added scores", "attention with another value", "attention, projections frozen"),
    *("attention with keys and values of another width", "attention without weights"),
    *(
        "a bag by offsets",
        "bags of a large table",
        "a large table of bags and words",
        "one entry of a large table",
    ),
    *("the largest of a bag by offsets", "the largest of bags in records", "transposed 1d", "transposed 3d"),
    *("gru of sequences in a record", "lstm of sequences in a record", "transformer decoder layer"),
    *("relu, 1 layers, 1 directions, biases, batch first", "lstm with projections", "rnn cell"),
    *(
        "batch norm 1d, fixed",
        "instance norm 1d",
        "prelu of numbers",
        "layer in the middle frozen",
        "bias frozen",
    ),
    *("parts of a packed weight", "parts of parts", "convolution, used again", "position looked up"),
    *("transposed weight", "product with a matrix", "low-rank adaptation"),
}
"""Layers that use on a device what others use; all are tried on the CPU."""
IN_SUITE = sorted({*KINDS.values()} - LIKE_OTHERS)


def test_all_kinds_of_layers_are_tried() -> None:
    assert len(KINDS) > 60
    assert {*KINDS.values()} >= LIKE_OTHERS


def behind_a_convolution(layer: nn.Module) -> Spec:
    """A small network of images with the layer in it."""
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))
    return Spec(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), layer, *pooled), (1, 8, 8))


UNREPEATABLE = {
    "bag (EmbeddingBag)": (SPECS["weighted bags"], "the mode mean or sum"),
    "1 (AdaptiveAvgPool2d)": (nn.AdaptiveAvgPool2d(2), "average pooling with a fixed kernel"),
    "1 (ReflectionPad2d)": (nn.ReflectionPad2d(1), "padding by zeros"),
    "1 (Upsample)": (nn.Upsample(scale_factor=2, mode="bicubic"), "the mode nearest"),
}


@pytest.mark.parametrize("name", list(UNREPEATABLE))
def test_a_layer_that_cannot_be_repeated_there_is_refused_by_name(name: str, sim: torch.device) -> None:
    layer, instead = UNREPEATABLE[name]
    spec = layer if isinstance(layer, Spec) else behind_a_convolution(layer)
    with pytest.raises(UnsupportedModelError, match=rf"the layer {re.escape(name)} .* use {instead}"):
        problem(spec, torch.float32).engine(device=sim)


@pytest.mark.parametrize("name", soak_but(IN_SUITE, sorted(KINDS.values())))
def test_sums_and_norms_are_those_of_the_loop(name: str, sim: torch.device) -> None:
    made = problem(SPECS[name], torch.float32)
    expected = naive.contributions(made.model, made.gradients, L2(0.5)).sum(dim=0)
    engine = made.engine(device=sim, physical_batch=SMALL, limits=BRIEF)
    records = tuple(part.to(sim) for part in made.arguments)
    assert naive.relative(engine.clipped_sum(*records, L2(0.5)).cpu(), expected) < 2e-5
    norms = naive.norms(made.model, made.gradients, L2(0.5))
    assert naive.relative(engine.norms(*records, L2(0.5)).cpu(), norms) < 2e-5

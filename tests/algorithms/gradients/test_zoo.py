"""Architectures that nobody here wrote: taken in passes of many records, with the sums of the loop."""

from importlib.util import find_spec

import pytest
import torch

from algorithms.gradients import L2, Engine
from algorithms.gradients.model_inspection import InspectionLimits
from algorithms.models import Model
from benchmarks.architectures import LARGE, ZOO, losses
from tests.support.gradients import naive
from tests.support.gradients.problems import BRIEF
from tests.support.soak import soak_but

for library in ("timm", "transformers", "peft"):  # imported by the tests alone, since that takes seconds
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed", allow_module_level=True)

CHOSEN = [
    *("Llama", "Swin (timm)", "selective state space", "graph network, padded"),
    "soft mixture of experts",
]
"""Whose parts none of the layers, networks and recorded tensors has that have tests of their own."""
NAMES = [name for name in ZOO if name not in LARGE]
BRIEFLY = [(name, BRIEF) for name in CHOSEN]
IN_FULL = [(name, InspectionLimits()) for name in NAMES]

pytestmark = pytest.mark.usefixtures("replayed_passes")


@pytest.mark.parametrize(("name", "limits"), soak_but(BRIEFLY, BRIEFLY + IN_FULL))
def test_a_public_architecture_is_taken_in_passes_of_many_records(
    name: str, limits: InspectionLimits
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(name, ZOO[name].make(), losses, lambda outputs: outputs)
    inputs, labels = ZOO[name].inputs(4), torch.arange(4) % 3
    engine = Engine(model, input_shape=ZOO[name].shape, input_dtype=inputs.dtype, limits=limits)
    assert engine.is_batched and engine.physical_batch >= 32
    point = model.initial_parameters()
    gradients = naive.loop(model, point, inputs, labels)
    clipping = L2(float(gradients.norm(dim=1).median()))
    expected = naive.contributions(model, gradients, clipping).sum(dim=0)
    assert naive.relative(engine.clipped_sum(point, inputs, labels, clipping), expected) < 5e-5

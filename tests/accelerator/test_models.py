"""Kinds of models and optimizers on the simulated accelerator: they are trained as on the CPU."""

from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from algorithms.core.optimizers import OptimizerConfig
from algorithms.models.objectives import cross_entropy
from algorithms.privacy.barrier.compute_config import ComputeConfig
from tests.accelerator import simulator
from tests.support import bench
from tests.support.bench import MadeUp
from tests.support.gradients.networks import SPECS
from tests.support.gradients.problems import Spec, Wired, frozen, problem

CPU = torch.device("cpu")


def _adapted_transformer() -> nn.Module:
    """Trained parts of low rank beside a frozen encoder, as in LoRA."""

    def wiring(self: Wired, words: Tensor) -> Tensor:
        sequence = self.table(words)
        return self.last((self.encoder(sequence) + self.up(self.down(sequence))).mean(dim=1))

    layer = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    fixed = {"table": frozen(nn.Embedding(7, 6)), "encoder": frozen(encoder)}
    low_rank = {"down": nn.Linear(6, 2, bias=False), "up": nn.Linear(2, 6, bias=False)}
    return Wired(wiring, **fixed, **low_rank, last=nn.Linear(6, 3))


ADAPTED = Spec(_adapted_transformer, (5,), entries=7, losses=cross_entropy)
MODELS = {name: SPECS[name] for name in ("resnet", "transformer", "lstm, some weights frozen")}
MODELS |= {"gru": SPECS["gru, 1 layers, 1 directions"]}
"""Beside those of the catalogue."""
OFFLOADED = {"cnn": SPECS["cnn"], "transformer with adapters": ADAPTED}
BEYOND = {
    name: pytest.param(
        SPECS[name], marks=pytest.mark.skip("the simulated device has no views of complex numbers")
    )
    for name in ("complex weight", "filter by the Fourier transform")
}


def trained(spec: Spec, device: torch.device, folder: Path, *, offload: bool = False) -> Tensor:
    made = problem(spec, torch.float32, count=bench.RECORDS)
    method = bench.algorithm("dp_sgd", steps=3)
    state, _, _ = bench.trained(
        method,
        bench.planned(method, made.model, accountant="rdp"),
        made.model,
        folder,
        records=lambda: MadeUp(made.inputs.numpy(), made.labels.numpy()),
        compute=ComputeConfig(device, physical_batch=32, offload=offload),
    )
    return method.released(state).cpu()


@pytest.mark.parametrize("spec", (MODELS | BEYOND).values(), ids=(MODELS | BEYOND).keys())
def test_a_model_is_trained_as_on_the_cpu(spec: Spec, sim: torch.device, tmp_path: Path) -> None:
    expected = trained(spec, CPU, tmp_path / "cpu")
    torch.testing.assert_close(trained(spec, sim, tmp_path / "sim"), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", list(OFFLOADED))
def test_a_model_whose_parameters_stay_in_main_memory_is_too(
    name: str, sim: torch.device, tmp_path: Path
) -> None:
    expected = trained(OFFLOADED[name], CPU, tmp_path / "cpu")
    found = trained(OFFLOADED[name], sim, tmp_path / "sim", offload=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


CHOICES = {
    name: get_args(hint)
    for name, hint in get_type_hints(OptimizerConfig).items()
    if get_origin(hint) is Literal
}
"""By setting of an optimizer, the names that it may have."""


@pytest.mark.parametrize("names", product(*CHOICES.values()), ids="-".join)
def test_an_optimizer_steps_as_on_the_cpu_and_waits_for_nothing(names: Any, sim: torch.device) -> None:
    config = OptimizerConfig(
        learning_rate=0.1, momentum=0.9, weight_decay=0.2, **dict(zip(CHOICES, names, strict=True))
    )
    draw = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(6, 40, generator=draw)
    ends = []
    for device in (CPU, sim):
        state = config.start(start.to(device))
        there = [each.to(device) for each in gradients]
        with simulator.recorded() as events:
            for gradient in there:
                state = config.apply(state, gradient, steps=len(gradients))
        assert not events.waits
        ends.append([part.cpu() for part in vars(state).values()])
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)
    assert not torch.equal(ends[0][0], start)

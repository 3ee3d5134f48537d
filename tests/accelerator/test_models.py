"""Kinds of models and optimizers on the simulated accelerator: they are trained as on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.models.objectives import cross_entropy
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
MODELS = {
    name: SPECS[name] for name in ("cnn", "resnet", "bilstm", "transformer", "lstm, some weights frozen")
}
MODELS |= {"gru": SPECS["gru, 1 layers, 1 directions"], "transformer with adapters": ADAPTED}


BEYOND = {
    name: pytest.param(
        SPECS[name], marks=pytest.mark.skip("the simulated device has no views of complex numbers")
    )
    for name in ("complex weight", "filter by the Fourier transform")
}


def trained(
    spec: Spec, device: torch.device, folder: Path, *, offload: bool = False, **update: Any
) -> Tensor:
    made = problem(spec, torch.float32, count=bench.RECORDS)
    method = bench.algorithm("dp_sgd", steps=3, update=update)
    state, _, _ = bench.trained(
        method,
        bench.planned(method, made.model, accountant="rdp"),
        made.model,
        folder,
        records=lambda: MadeUp(made.inputs.numpy(), made.labels.numpy()),
        compute=bench.ComputeConfig(device, physical_batch=32, offload=offload),
    )
    return method.released(state).cpu()


@pytest.mark.parametrize("spec", (MODELS | BEYOND).values(), ids=(MODELS | BEYOND).keys())
def test_a_model_is_trained_as_on_the_cpu(spec: Spec, sim: torch.device, tmp_path: Path) -> None:
    expected = trained(spec, CPU, tmp_path / "cpu")
    torch.testing.assert_close(trained(spec, sim, tmp_path / "sim"), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["cnn", "transformer with adapters"])
def test_a_model_whose_parameters_stay_in_main_memory_is_too(
    name: str, sim: torch.device, tmp_path: Path
) -> None:
    expected = trained(MODELS[name], CPU, tmp_path / "cpu")
    found = trained(MODELS[name], sim, tmp_path / "sim", offload=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, "schedule": "cosine", "averaging": "tail"},
    "adam": {"optimizer": "adam", "momentum": 0.9, "averaging": "ema"},
    "adamw": {"optimizer": "adam", "momentum": 0.9, "weight_decay": 0.2, "schedule": "linear"},
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_optimizer_steps_as_on_the_cpu(name: str, sim: torch.device, tmp_path: Path) -> None:
    spec, update = SPECS["linear"], OPTIMIZERS[name]
    expected = trained(spec, CPU, tmp_path / "cpu", **update)
    torch.testing.assert_close(trained(spec, sim, tmp_path / "sim", **update), expected, rtol=0, atol=1e-6)

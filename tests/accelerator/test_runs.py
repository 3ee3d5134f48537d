"""Runs on the simulated accelerator that are shared by processes, killed, or calls of `fit`, and its encoders."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn

from algorithms.encoders import EncoderSettings, encoder
from algorithms.fitting import fit
from algorithms.methods.dp_sgd import DPSGD
from algorithms.privacy.barrier.compute_config import ComputeConfig
from algorithms.privacy.barrier.process_group import SINGLE_PROCESS, ProcessGroup
from tests.accelerator import simulator
from tests.support import bench
from tests.support.gradients.networks import SPECS
from tests.support.gradients.problems import problem
from tests.support.processes import HANGS, in_processes
from tests.support.waiting import HANG_SECONDS
from tests.support.warm_processes import warm_context

CPU, RECORDS = torch.device("cpu"), 70
SHARED: dict[str, dict[str, bool]] = {"records": {}, "trained parameters": {"shard_trained": True}}
"""What processes share beside the records. FSDP cannot move frozen parameters to such a device."""


def trained(
    device: torch.device, folder: Path, group: ProcessGroup = SINGLE_PROCESS, **shared: bool
) -> Tensor:
    """Three steps of DP-SGD with Adam for a CNN, in passes of 16 records."""
    made = problem(SPECS["cnn"], torch.float32, count=RECORDS)
    method = bench.algorithm("dp_sgd", steps=3, expected_batch_size=30, update={"optimizer": "adam"})
    state, _, _ = bench.trained(
        method,
        bench.planned(method, made.model, records=RECORDS, accountant="rdp"),
        made.model,
        folder,
        records=lambda: bench.MadeUp(made.inputs.numpy(), made.labels.numpy()),
        compute=ComputeConfig(device, physical_batch=16, number=RECORDS, group=group, **shared),
    )
    return method.released(state).cpu()


def on_devices(rank: int, folder: Path) -> dict[str, Tensor]:
    """What one of two processes releases, whose tensors are exchanged by way of the host."""
    meeting = f"file://{folder / 'store'}"
    with simulator.available() as sim:
        backends = "cpu:gloo,sim:host_copies"
        distributed.init_process_group(backends, init_method=meeting, rank=rank, world_size=2, timeout=HANGS)
        try:
            group = ProcessGroup(rank, 2, 2)
            return {
                what: trained(sim, folder / f"{what}-{rank}", group, **shared)
                for what, shared in SHARED.items()
            }
        finally:
            distributed.destroy_process_group()


def test_two_processes_end_where_the_cpu_does(
    sim: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    first, second = in_processes(on_devices, [(0, tmp_path), (1, tmp_path)])
    expected = trained(CPU, tmp_path / "cpu")
    for what in SHARED:
        torch.testing.assert_close(first[what], expected, rtol=0, atol=1e-5)
    assert torch.equal(first["records"], second["records"])


class KilledError(Exception):
    """Ends the process where it is raised, without cleaning up."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def until_killed(folder: Path) -> None:
    """A run that its machine ends in the middle of the second step."""
    with simulator.available() as sim, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "StoppedError", KilledError)
        method = bench.algorithm("dp_sgd", steps=3)
        bench.trained(
            method,
            bench.planned(method, bench.small_model(), accountant="rdp"),
            bench.small_model(),
            folder,
            compute=bench.OneLook(sim),
            stop_after=2,
        )


def test_a_killed_process_is_resumed_bit_for_bit(sim: torch.device, tmp_path: Path) -> None:
    process = warm_context().Process(target=until_killed, args=(tmp_path / "killed",))
    process.start()
    process.join(HANG_SECONDS)
    assert process.exitcode == -signal.SIGKILL and any((tmp_path / "killed").iterdir())
    method, model = bench.algorithm("dp_sgd", steps=3), bench.small_model()
    whole, resumed = (
        method.released(
            bench.trained(
                *(method, bench.planned(method, model, accountant="rdp"), model, tmp_path / name),
                compute=bench.OneLook(sim),
            )[0]
        )
        for name in ("whole", "killed")
    )
    assert torch.equal(whole.cpu(), resumed.cpu())


def fitted(device: str, **people: Any) -> Tensor:
    draw = np.random.default_rng(4)
    X = draw.normal(size=(60, 6)).astype(np.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 2))
    result = fit(
        *(model, nn.CrossEntropyLoss(), X, (X[:, 0] > 0).astype(np.int64)),
        method=DPSGD(steps=3, expected_batch_size=12),
        epsilon=3.0,
        delta=1e-3,
        public=True,
        noise="seeded",
        seed=0,
        device=device,
        **people,
    )
    assert result.model(torch.from_numpy(X)).shape == (60, 2)  # where the caller's records are
    return torch.cat([part.detach().flatten() for part in result.model.parameters()])


@pytest.mark.parametrize(
    "people", [{}, {"people": np.arange(60) // 3, "per_person": 3}], ids=["rows", "people"]
)
def test_a_call_of_fit_ends_where_the_cpu_does(people: dict[str, Any], sim: torch.device) -> None:
    torch.testing.assert_close(fitted("sim", **people), fitted("cpu", **people), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["efficientnet-lite0", "all-minilm-l6-v2"])
def test_an_encoder_has_the_features_of_the_cpu(name: str, sim: torch.device) -> None:
    images = np.random.default_rng(0).random((3, 1, 28, 28), np.float32)
    records: Any = (
        images if name == "efficientnet-lite0" else ["a good film", "bad", "the one that nobody saw"]
    )
    settings = EncoderSettings(size=32) if name == "efficientnet-lite0" else EncoderSettings(length=16)
    with simulator.recorded() as events:
        features = encoder(name, settings).load()(records)
    assert any(event.kind == "d2h" for event in events.all)  # it was computed there
    with simulator.hidden():
        expected = encoder(name, settings).load()(records)
    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-4)

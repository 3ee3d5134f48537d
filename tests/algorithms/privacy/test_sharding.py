"""Frozen parameters sharded over real processes: the answers of one process, and a part of the weights in each."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from algorithms.errors import ModelRefusedError
from algorithms.gradients import L2, Engine
from algorithms.gradients.placement import shard_frozen
from algorithms.models import Model
from algorithms.privacy.barrier.performance import ALONE, Group, Performance
from algorithms.privacy.mechanisms.release import Gaussian
from algorithms.privacy.mechanisms.sampling import FullBatch, Poisson
from tests.algorithms.bench import MadeUp
from tests.algorithms.privacy.test_barrier import barrier
from tests.support.device import DEVICE

PLACE = DEVICE if torch.cuda.device_count() > 1 else torch.device("cpu")
"""A GPU for each process, with two of them."""
WIDTH, RECORDS = 16, 129
"""The second process has one record more than a pass takes, so that it takes two passes while the first takes one."""


class Block(nn.Module):
    """A frozen layer beside an adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        normed = self.norm(inputs)
        return inputs + torch.tanh(self.base(normed) + self.up(self.down(normed)))


class Adapted(nn.Module):
    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 3)
        self.is_checkpointed = is_checkpointed

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = checkpoint(block, inputs, use_reentrant=False) if self.is_checkpointed else block(inputs)
        outputs: Tensor = self.head(self.frozen(inputs))
        return outputs


def adapted(*, is_checkpointed: bool = False) -> Model:
    torch.manual_seed(0)
    losses = nn.CrossEntropyLoss(reduction="none")
    return Model("adapted", Adapted(is_checkpointed=is_checkpointed), losses, scores=lambda outputs: outputs)


def answers(group: Group, *, offload: bool = False) -> Tensor:
    """Of a full batch, of a sample that leaves some process without records, and of layers that run again."""
    generator = np.random.default_rng(1)
    records = MadeUp(
        generator.normal(size=(RECORDS, WIDTH)).astype(np.float32), generator.integers(0, 3, RECORDS)
    )
    performance = Performance(
        PLACE, physical_batch=64, group=group, shard_frozen=not offload, offload=offload
    )
    found = []
    for is_checkpointed in (False, True):
        model = adapted(is_checkpointed=is_checkpointed)
        asked = barrier(records, model, performance=performance)
        for sampling in (FullBatch(), Poisson(0.01), FullBatch()):
            point = model.initial_parameters()
            found.append(
                asked.gradient(point, sampling=sampling, clipping=L2(0.1), noise=Gaussian(0.01), divisor=1.0)
            )
    return torch.stack(found)


def in_a_process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if PLACE.type == "cuda":
        torch.cuda.set_device(rank)
    kind = "gloo" if PLACE.type == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(kind, init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    torch.save(answers(Group(rank, 2, 2)), folder / f"{rank}.pt")
    module = shard_frozen(adapted(), init_device_mesh(PLACE.type, (2,))).module
    local = {name: getattr(part, "_local_tensor", part).shape for name, part in module.named_parameters()}
    torch.save(local, folder / f"shapes-{rank}.pt")
    distributed.destroy_process_group()


def test_processes_that_share_frozen_parameters_answer_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with multiprocessing.get_context("spawn").Pool(2) as processes:
        processes.starmap(in_a_process, [(0, tmp_path), (1, tmp_path)], chunksize=1)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first, second)
    alone = answers(ALONE)
    assert torch.allclose(first, alone, rtol=0.0, atol=1e-5) and float(alone.norm()) > 1
    for name, shape in torch.load(tmp_path / "shapes-0.pt").items():
        whole = adapted().module.get_parameter(name)
        assert shape.numel() == (whole.numel() if whole.requires_grad else whole.numel() / 2), name


def test_trained_parameters_in_main_memory_change_no_answer() -> None:
    offloaded, usual = answers(ALONE, offload=True), answers(ALONE)
    assert torch.allclose(offloaded, usual, rtol=0.0, atol=0.0 if PLACE.type == "cpu" else 1e-5)


@pytest.fixture
def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Of one process, this one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


class Listing(Adapted):
    """Reads its records' values."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(torch.tensor(inputs.tolist(), dtype=inputs.dtype))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"module": nn.Linear(WIDTH, 3)}, "has no frozen parameters"),
        ({"precision": torch.bfloat16}, "computes in bfloat16"),
        ({"module": Listing(is_checkpointed=False)}, "is differentiated record by record"),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(
    changes: dict[str, Any], why: str, mesh: DeviceMesh
) -> None:
    with pytest.raises(ModelRefusedError, match=why):
        Engine(replace(adapted(), **changes), input_shape=(WIDTH,), mesh=mesh)


def test_offloading_beside_sharding_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ModelRefusedError, match="frozen ones are sharded; set performance"):
        Engine(adapted(), input_shape=(WIDTH,), mesh=mesh, offload=True)

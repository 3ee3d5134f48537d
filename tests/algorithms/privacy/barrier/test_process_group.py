"""Parameters sharded over real processes: the answers of one process, and a part of the weights in each."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from algorithms.core import training
from algorithms.gradients import L2, Affine, Engine, PerLayer, ProcessLostError, UnsupportedModelError, engine
from algorithms.gradients.grad_sample_recorder import UnrecordedError
from algorithms.gradients.model_inspection import InspectionLimits
from algorithms.gradients.placement import Shards, shard_frozen
from algorithms.models import Model
from algorithms.privacy.barrier.compute_config import ComputeConfig
from algorithms.privacy.barrier.process_group import SINGLE_PROCESS, ProcessGroup
from algorithms.privacy.barrier.trace import Diagnostics
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian
from algorithms.privacy.mechanisms.sampling import FullBatch, Poisson
from tests.support.barriers import barrier
from tests.support.bench import (
    SETTINGS,
    MadeUp,
    StoppedError,
    algorithm,
    made_up,
    planned,
    small_model,
    trained,
)
from tests.support.processes import PLACE, in_processes, joined
from tests.support.refusals import refused_as
from tests.support.soak import soak_but

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


def answers(group: ProcessGroup, **placing: bool) -> Tensor:
    """Of full batches, samples that leave some process without records, layers that run again, and other clipping.

    The last record's gradient is so large that its square overflows in 32 bits, and the one before is not finite.
    """
    generator = np.random.default_rng(1)
    features = generator.normal(size=(RECORDS, WIDTH)).astype(np.float32)
    features[-2:] = [[np.nan], [1e25]]
    records = MadeUp(features, generator.integers(0, 3, RECORDS))
    compute = ComputeConfig(PLACE, physical_batch=64, group=group, **placing)
    found = []
    for is_checkpointed, precision in (
        (False, torch.float32),
        (True, torch.float32),
        (False, torch.bfloat16),
    ):
        model = replace(adapted(is_checkpointed=is_checkpointed), precision=precision)
        asked = barrier(records, model, compute=compute)
        per_layer = PerLayer((0.05,) * len(model.layers))
        is_plain = not is_checkpointed and precision == torch.float32
        rest = ((FullBatch(), L2(0.1)), (Poisson(0.01), L2(0.1)), (FullBatch(), L2(0.1)))
        for sampling, clipping in (
            (Poisson(0.5), L2(0.1)),
            (FullBatch(), per_layer),
            *(rest if is_plain else ()),
        ):
            point = compute.local_copy(model.initial_parameters())
            noisy = asked.gradient(
                point, sampling=sampling, clipping=clipping, noise=Gaussian(0.01), divisor=1.0
            )
            found.append(noisy if compute.slices is None else compute.slices.collect(noisy))
    if compute.slices is not None:
        ones = torch.ones(len(point))
        with refused_as("clipping_of_whole_vectors", what="Affine"):
            asked.gradient(
                *(point,),
                sampling=FullBatch(),
                clipping=Affine(1.0, 0 * ones, ones),
                noise=Gaussian(0.01),
                divisor=1.0,
            )
    return torch.stack(found).cpu()


def ways_of(count: int) -> tuple[dict[str, bool], ...]:
    """All ways with two processes; with three, whose parts differ in length, the one that is both others."""
    return WAYS if count == 2 else WAYS[2:]


WAYS = ({"shard_frozen": True}, {"shard_trained": True}, {"shard_frozen": True, "shard_trained": True})


@contextmanager
def joined_briefly(rank: int, count: int, folder: Path) -> Iterator[ProcessGroup]:
    """As `joined`; models are inspected as large ones are, so that their passes are compared once.

    Each process inspects each model, which would take most of the time and has tests of its own.
    """
    with joined(rank, count, folder) as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "InspectionLimits", partial(InspectionLimits, full_operations=0))
        yield group


def in_a_process(rank: int, count: int, folder: Path) -> None:
    with joined_briefly(rank, count, folder) as group:
        torch.save([answers(group, **way) for way in ways_of(count)], folder / f"{rank}.pt")
        module = shard_frozen(adapted(), init_device_mesh(PLACE.type, (count,))).module
    local = {name: getattr(part, "_local_tensor", part).shape for name, part in module.named_parameters()}
    torch.save(local, folder / f"shapes-{rank}.pt")


@pytest.mark.parametrize("count", soak_but([2], [2, 3]))
def test_processes_that_share_parameters_answer_as_one_process_does(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if PLACE.type != "cpu" and torch.accelerator.device_count() < count:
        pytest.skip("needs an accelerator for each process")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    in_processes(in_a_process, [(rank, count, tmp_path) for rank in range(count)])
    alone = answers(SINGLE_PROCESS)
    assert float(alone.norm()) > 1
    for way, found in zip(ways_of(count), torch.load(tmp_path / "0.pt"), strict=True):
        assert torch.allclose(found, alone, rtol=0.0, atol=1e-5), way
    if count == 2:
        assert torch.equal(*(torch.load(tmp_path / f"{rank}.pt")[0] for rank in range(2)))
        for name, shape in torch.load(tmp_path / "shapes-0.pt").items():
            whole = adapted().module.get_parameter(name)
            assert shape.numel() == (whole.numel() if whole.requires_grad else whole.numel() / 2), name


def test_trained_parameters_in_main_memory_change_no_answer() -> None:
    offloaded, usual = answers(SINGLE_PROCESS, offload=True), answers(SINGLE_PROCESS)
    assert torch.allclose(offloaded, usual, rtol=0.0, atol=0.0 if PLACE.type == "cpu" else 1e-5)


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shards]:
    """Of one process, this one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield Shards(init_device_mesh("cpu", (1,)))
    distributed.destroy_process_group()


class Listing(Adapted):
    """Reads its records' values."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(torch.tensor(inputs.tolist(), dtype=inputs.dtype))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"module": nn.Linear(WIDTH, 3)}, "has no frozen parameters"),
        ({"module": Listing(is_checkpointed=False)}, "is differentiated record by record"),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(changes: dict[str, Any], why: str, shards: Shards) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        Engine(replace(adapted(), **changes), input_shape=(WIDTH,), shards=shards, shard_frozen=True)


@pytest.mark.parametrize(
    ("failure", "expected", "why"),
    [
        (ProcessLostError(), ProcessLostError, "start all of them again"),
        (UnrecordedError("other tensors"), UnsupportedModelError, r"shard_trained \(other tensors\)"),
    ],
)
def test_a_pass_that_fails_when_it_is_tried_says_why(
    failure: Exception,
    expected: type[Exception],
    why: str,
    shards: Shards,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: object) -> Tensor:
        raise failure

    monkeypatch.setattr(Shards, "gather", failing)
    with pytest.raises(expected, match=why):
        Engine(adapted(), input_shape=(WIDTH,), shards=shards, shard_trained=True)


CRASHED = {
    "dp_sgd": {"update": {"optimizer": "adam", "averaging": "ema"}},
    "adp_sgd": {"decay": {"form": "adaptive"}},  # by the norm of the whole gradient
    "heavy_ball": {},
}
"""Methods that are stopped in the middle."""


def released(name: str, group: ProcessGroup, folder: Path, *, stop_after: int | None = None) -> Tensor:
    """Of a run whose processes hold slices, which resumes from a checkpoint if there is one."""
    method, model = algorithm(name, **CRASHED.get(name, {})), small_model("logistic", classes=2)
    ways = ComputeConfig(PLACE, group=group, shard_trained=True)
    try:
        found = trained(
            *(method, planned(method, model), model, folder),
            records=lambda: made_up(classes=2),
            compute=ways,
            stop_after=stop_after,
        )
    except StoppedError:
        return torch.zeros(0)
    parameters: Tensor = method.released(found.state)
    return parameters.cpu()


def methods_in_a_process(rank: int, folder: Path, names: list[str]) -> dict[str, Tensor]:
    with joined_briefly(rank, 2, folder) as group:
        found = {name: released(name, group, folder / f"{name}-{rank}") for name in names}
        for name in CRASHED:
            released(name, group, folder / f"crashed-{name}-{rank}", stop_after=2)
            found[f"resumed {name}"] = released(name, group, folder / f"alone-{name}")
        return found


BY_COORDINATE = [name for name in SETTINGS if getattr(algorithm(name), "by_coordinate", False)]
SOME = ["dp_sgd", "adp_sgd", "heavy_ball", "matrix_factorisation", "nesterov"]
"""With an optimizer, a norm of the whole gradient, momentum, noise of earlier steps, and a step by two points."""


@pytest.mark.parametrize("names", soak_but([SOME], [SOME, BY_COORDINATE]), ids=len)
def test_methods_release_of_slices_what_they_do_of_whole_vectors(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that were stopped, too, which go on with whole vectors, or did so before."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in CRASHED:
        released(name, SINGLE_PROCESS, tmp_path / f"alone-{name}", stop_after=2)
    found = in_processes(methods_in_a_process, [(0, tmp_path, names), (1, tmp_path, names)])[0]
    assert set(SOME) <= set(BY_COORDINATE)
    for name in names:
        whole = released(name, SINGLE_PROCESS, tmp_path / name)
        assert torch.allclose(found[name], whole, rtol=0.0, atol=1e-6) and float(whole.norm()) > 0, name
        if name in CRASHED:
            resumed = released(name, SINGLE_PROCESS, tmp_path / f"crashed-{name}-0")
            for each in (resumed, found[f"resumed {name}"]):
                assert torch.allclose(each, whole, rtol=0.0, atol=1e-6), name


@pytest.mark.parametrize(
    ("name", "has_diagnostics", "code"),
    [("adaclip", False, "method_of_whole_vectors"), ("dp_sgd", True, "diagnostics_of_shards")],
)
def test_what_slices_cannot_do_is_refused_before_a_charge(
    name: str, has_diagnostics: bool, code: str, tmp_path: Path
) -> None:
    method, model, charged = algorithm(name), small_model(), []
    with refused_as(code):
        training.train(
            *(method, planned(method, model), model),
            open_records=made_up,
            run=training.ResumableRun(
                run_id="one run", generator=seeded_generator(3), folder=tmp_path, checkpoint_seconds=1.0
            ),
            compute=ComputeConfig(group=ProcessGroup(0, 2, 2), shard_trained=True),
            hooks=training.Hooks(
                reserve=lambda: charged.append(name), diagnostics=Diagnostics() if has_diagnostics else None
            ),
        )
    assert charged == []

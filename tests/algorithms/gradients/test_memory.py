"""What lies in memory: batches of changing size do not fill it, and few offloaded weights lie on the device at once."""

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

from algorithms.gradients import L2, Engine, PerLayer, UnsupportedModelError, placement
from algorithms.gradients.grad_sample_recorder import RecordedTensor
from algorithms.gradients.op_tracer import MemoryTracer
from algorithms.gradients.passes import Passes
from algorithms.gradients.placement import Shards
from algorithms.models import Model
from tests.support.device import DEVICE
from tests.support.gradients import naive
from tests.support.gradients.layers import ATTENTION
from tests.support.gradients.networks import AS_A_WHOLE, NETWORKS, OF_PARAMETERS, SHARING, WITHOUT_RULE
from tests.support.gradients.problems import BRIEF, SMALL, Problem, Spec, Wired, frozen, problem
from tests.support.soak import soak_but

ROOT = Path(__file__).parents[3]
NAMES = ["cnn", "bilstm", "merged low-rank adaptation"]
WARM_UP, PASSES, ALLOWED_MB = 8, 20, 4

SCRIPT = """
import ctypes, json, random, re, sys
from pathlib import Path
import torch
from torch import nn
from algorithms.gradients import L2, Engine
from algorithms.models import Model
from tests.support.gradients.networks import AS_A_WHOLE, NETWORKS, OF_PARAMETERS
from tests.support.gradients.problems import BRIEF, Spec, check, problem

def resident(key="VmRSS"):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def share_told():
    layers = nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    model = Model("large", nn.Sequential(*layers), nn.CrossEntropyLoss(reduction="none"), lambda outputs: outputs)
    engine = Engine(model, input_shape=(1024,), physical_batch=256, limits=BRIEF)
    point = model.initial_parameters()
    records, out = (torch.randn(256, 1024), torch.arange(256) % 10), torch.zeros(len(point), dtype=torch.float64)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    for _ in range(2):
        engine.clipped_sum(point, *records, L2(1.0), out)
    return engine.pass_bytes / (resident("VmHWM") - before)

def grown(name, warm_up, passes):
    made, draw = problem((NETWORKS | OF_PARAMETERS | AS_A_WHOLE)[name], torch.float32, count=96), random.Random(0)
    engine = made.engine(physical_batch=48, limits=BRIEF)
    for done, count in enumerate([96, *(draw.randrange(97) for _ in range(warm_up + passes))]):
        if done == warm_up:
            before = resident()
        some = made.take(slice(0, count))
        asked = engine.clipped_sum if done % 2 == 0 else engine.norms
        asked(*some.arguments, L2(1.0))
    return (resident() - before) / 1e6

def imported_compilers():
    made = problem(Spec(lambda: nn.Linear(4, 2), (4,)))
    engine = made.engine(expected_batch=16.0)
    check(made, engine)
    assert engine.is_batched
    return sorted({"sympy", "torch._dynamo"} & sys.modules.keys())

names, warm_up, passes = json.loads(sys.argv[1])
compilers = imported_compilers()
print(json.dumps([share_told(), [grown(name, warm_up, passes) for name in names], compilers]))
"""


@pytest.fixture(scope="module")
def measured() -> tuple[float, list[float], list[str]]:
    """In a process of its own: the told memory of a pass over its growth, what many passes leave in MB, compilers."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("resident memory is read from /proc")
    command = [sys.executable, "-c", SCRIPT, json.dumps([NAMES, WARM_UP, PASSES])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    share, grown, compilers = json.loads(done.stdout)
    return share, grown, compilers


def test_many_passes_do_not_fill_the_memory(measured: tuple[float, list[float], list[str]]) -> None:
    """Measured after the largest batch has been met."""
    _, grown, _ = measured
    assert len(grown) == len(NAMES)
    assert all(megabytes < ALLOWED_MB for megabytes in grown), grown


def test_passes_grow_by_the_memory_that_an_inspection_tells(
    measured: tuple[float, list[float], list[str]],
) -> None:
    """Two thirds of it are gaps between tensors, and what libraries hold."""
    share, _, _ = measured
    assert 0.8 <= share <= 1.6


def test_gradients_are_computed_without_pytorchs_compiler(
    measured: tuple[float, list[float], list[str]],
) -> None:
    """PyTorch imports it with SymPy for a mode or a comparison of shapes, which would take seconds of each run."""
    _, _, compilers = measured
    assert compilers == []


def test_records_in_separate_passes_take_the_memory_of_one_pass_and_of_their_gradients() -> None:
    def losses(outputs: Tensor, labels: Tensor) -> Tensor:
        assert bool(outputs.isfinite().all())  # which `torch.func` refuses
        return outputs.square().sum(dim=1)

    model = Model("asking", nn.Linear(1000, 100), losses, scores=lambda outputs: outputs)
    passes, point = Passes(model), model.initial_parameters()
    with MemoryTracer() as memory:
        passes.one_by_one(point, torch.randn(3, 1000), torch.zeros(3))
    assert memory.peak < 4.5 * point.nbytes


def by_sign(self: Wired, inputs: Tensor) -> Tensor:
    return torch.stack([self.layer(one) if bool(one[0] > 0) else -self.layer(one) for one in inputs])


@cache
def single_and_derived() -> list[tuple[Problem, Engine]]:
    """A model that is taken record by record, and one with a weight that is computed; not to be changed."""
    specs = (
        Spec(lambda: Wired(by_sign, layer=nn.Linear(4, 2)), (4,)),
        OF_PARAMETERS["weight in several forms"],
    )
    return [(made, made.engine(physical_batch=4, limits=BRIEF)) for made in map(problem, specs)]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out"), RuntimeError("can't allocate memory: 1 byte")]
)
def test_records_are_not_taken_another_way_for_lack_of_memory(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other passes would round otherwise, depending on what else takes memory at the moment."""
    (single, alone), (derived, together) = single_and_derived()
    engines = alone, together
    assert [engine.is_batched for engine in engines] == [False, True]

    def full(*_: object) -> Any:
        raise error

    monkeypatch.setattr(torch.func, "grad_and_value", lambda *_: full)
    monkeypatch.setattr(torch.func, "vmap", lambda *_, **__: full)
    for some, engine in zip((single, derived), engines, strict=True):
        with pytest.raises(type(error), match=str(error)):
            engine.clipped_sum(*some.arguments, L2(1.0))


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="an accelerator multiplies more records at once, which takes more"
)
def test_a_sum_takes_its_memory_after_the_backward_pass() -> None:
    module = nn.Sequential(nn.Linear(60, 1000), nn.ReLU(), nn.Linear(1000, 10))
    model = Model("dense", module, nn.CrossEntropyLoss(reduction="none"), scores=lambda outputs: outputs)
    engine = Engine(model, input_shape=(60,), device=DEVICE, physical_batch=640, limits=BRIEF)
    point = model.initial_parameters().to(DEVICE)
    records = torch.randn(640, 60, device=DEVICE), torch.arange(640, device=DEVICE) % 10
    with MemoryTracer() as alone:
        total = engine.clipped_sum(point, *records, L2(1.0))
    with MemoryTracer() as beside:
        again = engine.clipped_sum(point, *records, L2(1.0), out=torch.empty_like(total))
    assert torch.equal(total, again) and alone.peak <= beside.peak - total.nbytes // 2


SPECS = ATTENTION | SHARING | OF_PARAMETERS | WITHOUT_RULE | NETWORKS
CHOSEN = [
    *("linear, used again", "lstm, used again", "embedding, used again", "decoder tied to the embedding"),
    *("overlapping parts", "parts that are apart", "attention with both masks", "weight frozen", "cnn"),
    *("merged low-rank adaptation", "weight in several forms", "position added", "normalised weight"),
    "function of one's own",
]
"""One of each way in which a parameter is used, shared, cut or frozen."""


def engine_of(made: Problem, **placing: Any) -> Engine:
    """Of few records a pass, and after a brief look, since engines are compared that were made alike."""
    return made.engine(device=DEVICE, physical_batch=SMALL, limits=BRIEF, **placing)


@cache
def usual(name: str) -> tuple[Problem, Engine]:
    """A problem, and its engine with whole parameters on the device; not to be changed."""
    made = problem(SPECS[name], torch.float32)
    return made, engine_of(made)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shards]:
    """Of one process, this one."""
    store = tmp_path_factory.mktemp("mesh") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield Shards(init_device_mesh("cpu", (1,)))
    distributed.destroy_process_group()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="processes with a GPU each are tested with the barrier")
@pytest.mark.parametrize("name", soak_but(CHOSEN, SPECS))
def test_sums_in_slices_are_those_of_whole_vectors(name: str, shards: Shards) -> None:
    """Bit for bit, by every clipping that they can have."""
    made, whole = usual(name)
    sliced = engine_of(made, shards=shards, shard_trained=True)
    point = shards.slice_of(made.parameters)
    for kind, clipping in naive.clippings(made.model, made.gradients).items():
        if isinstance(clipping, L2 | PerLayer):
            found = shards.collect(sliced.clipped_sum(point, made.inputs, made.labels, clipping))
            assert torch.equal(
                found, whole.clipped_sum(made.parameters, made.inputs, made.labels, clipping)
            ), kind


@pytest.mark.skipif(DEVICE.type != "cpu", reason="processes with a GPU each are tested with the barrier")
def test_a_process_without_records_adds_nothing_to_a_model_with_an_idle_layer(shards: Shards) -> None:
    """Its pass over a made-up record has norms of both layers."""
    idle = Wired(lambda self, x: self.used(x), used=nn.Linear(4, 3), idle=nn.Linear(4, 3))
    made = problem(Spec(lambda: idle, (4,)), torch.float32)
    point = shards.slice_of(made.parameters)
    nobody = made.take(slice(0, 0))
    found = engine_of(made, shards=shards, shard_trained=True).clipped_sum(
        point, nobody.inputs, nobody.labels, PerLayer((1.0, 1.0))
    )
    assert found.shape == made.parameters.shape and not shards.collect(found).any()


@pytest.mark.parametrize("name", soak_but(CHOSEN, SPECS))
def test_sums_are_those_of_parameters_on_the_device(name: str) -> None:
    """Bit for bit on a CPU, by every clipping."""
    made, on_device = usual(name)
    offloaded = engine_of(made, offload=True)
    inputs, labels = made.inputs.to(DEVICE), made.labels.to(DEVICE)
    for kind, clipping in naive.clippings(made.model, made.gradients).items():
        found = offloaded.clipped_sum(made.parameters, inputs, labels, clipping)
        assert found.device.type == "cpu"
        if DEVICE.type == "cpu":
            assert torch.equal(found, on_device.clipped_sum(made.parameters, inputs, labels, clipping)), kind
        else:
            each = naive.contributions(made.model, made.gradients, clipping)
            assert naive.relative(found, each.sum(dim=0)) < 1e-5, kind
        norms = offloaded.norms(made.parameters, inputs, labels, clipping)
        assert naive.relative(norms.cpu(), naive.norms(made.model, made.gradients, clipping)) < 1e-5


def test_a_layer_or_two_are_on_the_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    width, copies, most = 32, weakref.WeakSet[Tensor](), []
    bringing = placement.Bringer.__init__

    def counting(self: placement.Bringer, device: torch.device, bring: Callable[[str], Tensor]) -> None:
        def spy(name: str) -> Tensor:
            copy = bring(name)
            copies.add(copy)
            most.append(sum(each.numel() for each in copies))
            return copy

        bringing(self, device, spy)

    monkeypatch.setattr(placement.Bringer, "__init__", counting)
    layers = [part for _ in range(12) for part in (nn.Linear(width, width), nn.Tanh())]
    losses = nn.CrossEntropyLoss(reduction="none")
    model = Model("deep", nn.Sequential(*layers), losses, scores=lambda outputs: outputs)
    engine = Engine(model, input_shape=(width,), offload=True, limits=BRIEF)
    point = model.initial_parameters()
    most.clear()
    found = engine.clipped_sum(point, torch.randn(40, width), torch.arange(40) % 3, L2(1.0))
    assert len(most) == 12 * 2 + 11 and float(found.norm()) > 0  # 12 weights and biases, and 11 weights again
    assert max(most) <= 2 * width * (width + 1) and not copies


class _Back(TorchFunctionMode):
    """What the meta device lacks as a stand-in for a GPU: values that come back, and answers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and args[0].is_meta and torch.device("cpu") in args:
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_of_two_places() -> None:
    """PyTorch refuses tensors of several devices in one operation; the meta device stands in for a GPU."""
    network = nn.Sequential(
        *(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()),
        *(nn.Linear(24, 16), nn.Tanh(), frozen(nn.Linear(16, 16)), nn.LayerNorm(16), nn.Linear(16, 3)),
    )
    model = Model("mixed", network, nn.CrossEntropyLoss(reduction="none"), scores=lambda outputs: outputs)
    engine = Engine(model, input_shape=(2, 8), offload=True, limits=BRIEF)
    point, meta = model.initial_parameters(), "meta"
    passes = engine.passes
    passes.model.module[5].to_empty(device=meta)  # type: ignore[operator,index]
    engine.passes = replace(passes, offload=torch.device(meta))
    inputs, labels = torch.empty(64, 2, 8, device=meta), torch.zeros(64, dtype=torch.int64, device=meta)
    gradients = torch.rand(6, len(point))
    with _Back():
        for clipping in naive.clippings(model, gradients).values():
            assert engine.clipped_sum(point, inputs, labels, clipping).device.type == "cpu"
            assert engine.norms(point, inputs, labels, clipping).is_meta
        assert engine.clipped_losses(point, inputs, labels, 1.0).device.type == "cpu"


class Asking(nn.Module):
    """Takes its parameters' place, type and shape, and uses one after the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.layer.weight
        steps = torch.arange(weight.shape[1], device=weight.device, dtype=weight.dtype)
        outputs: Tensor = self.layer(inputs.to(weight) + steps / weight.size(0))
        return outputs


def test_a_model_sees_its_parameters_on_the_device() -> None:
    module = Asking()

    def losses(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs[torch.arange(len(labels)), labels].square() + module.layer.bias.square().sum()

    model = Model("asking", module, losses, scores=lambda outputs: outputs)
    inputs, labels = torch.randn(9, 4, device=DEVICE), torch.arange(9, device=DEVICE) % 3
    sums = [
        Engine(model, input_shape=(4,), device=DEVICE, offload=each, limits=BRIEF).clipped_sum(
            model.initial_parameters().to("cpu" if each else DEVICE), inputs, labels, L2(0.5)
        )
        for each in (True, False)
    ]
    torch.testing.assert_close(sums[0], sums[1].cpu())


def test_a_parameter_tells_where_it_is_brought() -> None:
    bringer = placement.Bringer(torch.device("meta"), lambda _: torch.zeros(2, device="meta"))
    parameter = RecordedTensor.of(torch.zeros(2), parameter="weight", bringing=bringer)
    assert parameter.is_meta and parameter.device.type == "meta" and not parameter.is_cpu


def test_a_part_that_one_call_saves_is_brought_again_as_this_part() -> None:
    """Such as a function in C++ that cuts a parameter itself, and needs the part for its backward pass."""
    weight, inputs = torch.arange(12.0).view(4, 3), torch.ones(2, requires_grad=True)
    bringer = placement.Bringer(torch.device("cpu"), lambda _: weight.clone())
    parameter = RecordedTensor.of(weight, parameter="weight", bringing=bringer)

    def product(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return func(inputs, args[1].as_subclass(Tensor)[1:3, 2], **kwargs)

    with bringer.saving():
        outputs = bringer.call(product, torch.mul, (inputs, parameter), {})
    (found,) = torch.autograd.grad(outputs.sum(), [inputs])
    assert found.tolist() == [5.0, 8.0]


def test_a_model_that_is_taken_record_by_record_is_refused() -> None:
    made = problem(next(iter(AS_A_WHOLE.values())), torch.float32)
    with pytest.raises(UnsupportedModelError) as refusal:
        engine_of(made, offload=True)
    assert (refusal.value.code, refusal.value.fields["settings"]) == ("placement_record_by_record", "offload")

"""Sums on the device that is tested: those of the loop, alike in any place, within the bound, and noised exactly."""

import ast
import math
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.gradients import L2, Affine, Engine, PerLayer
from algorithms.gradients.parameter_gradients import prefers_gram
from algorithms.privacy.barrier.barrier import ComputeConfig
from algorithms.privacy.mechanisms.noise import add_steps, seeded_generator, steps_of
from algorithms.privacy.mechanisms.release import Gaussian
from algorithms.privacy.mechanisms.sampling import Poisson
from tests.support.barriers import barrier
from tests.support.bench import add_on_grid, made_up, small_model
from tests.support.checkout import CODE, PROJECT
from tests.support.device import DEVICE
from tests.support.gradients import naive
from tests.support.gradients.networks import NETWORKS, SPECS
from tests.support.gradients.problems import BRIEF, Problem, problem

NAMES = ["cnn", "bilstm"] if DEVICE.type == "cpu" else [*SPECS]
"""All of them on an accelerator; on a CPU the tests of the layers, of bounds and of batch invariance have them."""
DTYPES = [torch.float32] if DEVICE.type == "cpu" else [torch.float32, torch.bfloat16]
CLIPPING = L2(0.5)


@cache
def placed(name: str, dtype: torch.dtype, count: int = 6) -> tuple[Problem, Engine]:
    """A problem whose tensors are on the device, and its engine with passes of 64; made once, not to be changed."""
    made = problem(SPECS[name], dtype, count=count)
    there = {part: getattr(made, part).to(DEVICE) for part in ("parameters", "inputs", "labels")}
    return replace(made, **there), made.engine(device=DEVICE, physical_batch=64, limits=BRIEF)


def exact(name: str, dtype: torch.dtype) -> Problem:
    """The same problem on the CPU, whose gradients are those of the loop, in 32 bits or more."""
    return problem(SPECS[name], dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), *zip(DTYPES, (2e-5, 0.2), strict=False)]
)
@pytest.mark.parametrize("name", NAMES)
def test_sums_and_norms_are_those_of_the_loop(name: str, dtype: torch.dtype, tolerance: float) -> None:
    (made, engine), loop = placed(name, dtype), exact(name, dtype)
    # PyTorch's kernel for the norm of a weight was seen to be off by 2e-8 on an H200, in 64 bits.
    allowed = max(tolerance, 1e-7) if name == "normalised weight" else tolerance
    for kind, clipping in naive.clippings(loop.model, loop.gradients).items():
        expected = naive.contributions(loop.model, loop.gradients, clipping).sum(dim=0)
        norms = naive.norms(loop.model, loop.gradients, clipping)
        if isinstance(clipping, Affine):
            clipping = replace(clipping, shift=clipping.shift.to(DEVICE), scale=clipping.scale.to(DEVICE))
        found = engine.clipped_sum(*made.arguments, clipping)
        assert found.device.type == DEVICE.type
        assert naive.relative(found.cpu(), expected) < allowed, kind
        assert naive.relative(engine.norms(*made.arguments, clipping).cpu(), norms) < allowed, kind


def record_part(made: Problem, engine: Engine, order: list[int], place: int) -> Tensor:
    """The gradient of one record among others, as the sum has it, and its norm."""
    found = engine.contributions(*made.take(order).arguments)
    only, one = torch.tensor([place], device=DEVICE), torch.ones(1, dtype=torch.float64, device=DEVICE)
    return torch.cat([found.take(only).weighted_sum(one), found.norms(CLIPPING)[only]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_record_counts_the_same_in_any_place_and_company(name: str, dtype: torch.dtype) -> None:
    made, engine = placed(name, dtype, 70)
    alone = record_part(made, engine, [0], 0)
    for count in (2, 31, 64):
        for place in {0, 1, count // 2, count - 1}:
            for start in (0, 5):
                order = list(range(start + 1, start + count))
                order.insert(place, 0)
                found = record_part(made, engine, order, place)
                # whole networks were seen to differ in last bits
                if name in NETWORKS and DEVICE.type != "cpu":
                    assert naive.relative(found, alone) < 1e2 * torch.finfo(dtype).eps
                else:
                    assert torch.equal(found, alone), (count, place, start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_record_never_counts_more_than_its_bound(name: str, dtype: torch.dtype) -> None:
    """With bounds at, just above and just under its norm."""
    made, engine = placed(name, dtype)
    found = engine.contributions(*made.take([0]).arguments)
    whole = found.weighted_sum(torch.ones(1, dtype=torch.float64, device=DEVICE))
    for near in (1.0, 1.0 + 1e-7, 1.0 - 1e-7, 0.3):
        bound = near * float(whole.norm())
        assert float(found.clipped_sum(L2(bound)).norm()) <= bound
        each = naive.measured(made.model, whole.cpu(), PerLayer((1.0,) * len(made.model.layers)))
        layers = PerLayer(tuple(max(1e-12, near * size) for size, _ in each))
        added = found.clipped_sum(layers).cpu()
        assert all(size <= most for size, most in naive.measured(made.model, added, layers))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in NAMES if not SPECS[name].entries])
def test_a_record_that_is_not_finite_adds_nothing_and_harms_no_other(
    name: str, dtype: torch.dtype, bad: float
) -> None:
    made, engine = placed(name, dtype)
    inputs, others = made.inputs.clone(), [0, 1, 3, 4, 5]
    inputs[2] = bad
    found = engine.clipped_sum(made.parameters, inputs, made.labels, CLIPPING)
    without = engine.clipped_sum(*made.take(others).arguments, CLIPPING)
    assert naive.relative(found, without) < (1e-12 if DEVICE.type == "cpu" else 1e2 * torch.finfo(dtype).eps)


def test_noise_is_added_on_the_device_as_on_the_cpu() -> None:
    noise = seeded_generator(3).stream(0).normal(1001)
    total = np.random.default_rng(0).normal(size=1001) * 1e3
    found = add_steps(torch.from_numpy(total).to(DEVICE), steps_of(noise, std=0.7), std=0.7)
    assert np.array_equal(found.cpu().numpy(), add_on_grid(total, noise, std=0.7))


def test_an_answer_on_the_device_is_that_of_the_cpu() -> None:
    model = small_model("mlp")
    answers = [
        barrier(made_up(), model, compute=ComputeConfig(device))
        .gradient(
            model.initial_parameters().to(device),
            sampling=Poisson(0.5),
            clipping=L2(1.0),
            noise=Gaussian(1.0),
            divisor=20.0,
        )
        .cpu()
        for device in (DEVICE, torch.device("cpu"))
    ]
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-6)


def test_one_file_alone_names_what_is_of_one_kind_of_device() -> None:
    """In the others, what a device can do is asked of PyTorch, so that any accelerator is taken."""
    names = set()
    for path in (path for folder in CODE for path in (PROJECT / folder).rglob("*.py")):
        if re.search("cuda|cudnn|cublas|nccl", text := path.read_text(encoding="utf-8"), re.IGNORECASE):
            nodes = list(ast.walk(ast.parse(text)))
            words = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            words |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
            if words & {"cuda", "cudnn", "nccl", "mps", "xpu", "CUBLAS_WORKSPACE_CONFIG"}:
                names.add(str(path.relative_to(PROJECT)))
    assert names == {"algorithms/gradients/devices.py"}


def test_gpus_that_are_slow_in_64_bits_materialise_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an A10, Gram matrices in 64 bits take longer than the gradient in 32; on an A100 they do not."""
    capabilities = {"cuda:0": (8, 0), "cuda:1": (8, 6)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[str(device)])
    places = ("cpu", "cuda:0", "cuda:1")
    assert [prefers_gram(100, 768, 3072, torch.device(place)) for place in places] == [True, True, False]
    assert all(prefers_gram(8, 768, 3072, torch.device(place)) for place in places)

"""Sums on the device that is tested: those of the loop, alike in any place, within the bound, and noised exactly."""

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.gradients import L2, Engine
from algorithms.gradients.ghost_clipping import prefers_gram
from algorithms.privacy.barrier.barrier import Performance
from algorithms.privacy.mechanisms.noise import add_steps, seeded_generator, steps_of
from algorithms.privacy.mechanisms.release import Gaussian
from algorithms.privacy.mechanisms.sampling import Poisson
from tests.algorithms.bench import add_on_grid, made_up, small_model
from tests.algorithms.gradients import naive
from tests.algorithms.gradients.networks import NETWORKS
from tests.algorithms.gradients.zoo import Problem, problem
from tests.algorithms.privacy.test_barrier import barrier
from tests.support.device import DEVICE

SOME = ["cnn", "bilstm"]


def placed(made: Problem, count: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    inputs, labels = made.inputs[:count], made.labels[:count]
    return made.parameters.to(DEVICE), inputs.to(DEVICE), labels.to(DEVICE)


def engine_of(made: Problem) -> Engine:
    return made.engine(device=DEVICE, physical_batch=64)


@pytest.mark.parametrize("name", SOME)
def test_sums_and_norms_are_those_of_the_loop(name: str) -> None:
    made = problem(NETWORKS[name], torch.float64)
    engine, clipping = engine_of(made), L2(float(made.gradients.norm(dim=1).median()))
    expected = naive.contributions(made.model, made.gradients, clipping).sum(dim=0)
    assert naive.relative(engine.clipped_sum(*placed(made), clipping).cpu(), expected) < 1e-9
    norms = naive.norms(made.model, made.gradients, clipping)
    assert naive.relative(engine.norms(*placed(made), clipping).cpu(), norms) < 1e-9


@pytest.mark.parametrize("name", SOME)
def test_a_record_counts_the_same_in_any_place_and_never_more_than_its_bound(name: str) -> None:
    made = problem(NETWORKS[name], torch.float32, count=64)
    engine, clipping = engine_of(made), L2(0.5)
    point, inputs, labels = placed(made)

    def counted(order: list[int], place: int) -> Tensor:
        found = engine.contributions(point, inputs[order], labels[order])
        only = torch.tensor([place], device=DEVICE)
        one = torch.ones(1, dtype=torch.float64, device=DEVICE)
        return torch.cat([found.take(only).weighted_sum(one), found.norms(clipping)[only]])

    alone = counted([0], 0)
    for place in (0, 1, 31, 63):
        order = list(range(64))
        order[0], order[place] = place, 0
        assert torch.equal(counted(order, place), alone), place
    assert float(engine.clipped_sum(point, inputs[:1], labels[:1], clipping).norm()) <= 0.5


def test_noise_is_added_on_the_device_as_on_the_cpu() -> None:
    noise = seeded_generator(3).stream(0).normal(1001)
    total = np.random.default_rng(0).normal(size=1001) * 1e3
    found = add_steps(torch.from_numpy(total).to(DEVICE), steps_of(noise, std=0.7), std=0.7)
    assert np.array_equal(found.cpu().numpy(), add_on_grid(total, noise, std=0.7))


def test_an_answer_on_the_device_is_that_of_the_cpu() -> None:
    model = small_model("mlp")
    answers = [
        barrier(made_up(), model, performance=Performance(device))
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


def test_gpus_that_are_slow_in_64_bits_materialise_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an A10, Gram matrices in 64 bits take longer than the gradient in 32; on an A100 they do not."""
    capabilities = {"cuda:0": (8, 0), "cuda:1": (8, 6)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[str(device)])
    places = ("cpu", "cuda:0", "cuda:1")
    assert [prefers_gram(100, 768, 3072, torch.device(place)) for place in places] == [True, True, False]
    assert all(prefers_gram(8, 768, 3072, torch.device(place)) for place in places)

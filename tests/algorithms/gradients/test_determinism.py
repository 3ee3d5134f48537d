"""Layers that a device cannot repeat bit for bit are refused by their name, with what to use."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.gradients import Engine, UnsupportedModelError
from algorithms.models import Model
from algorithms.models.objectives import cross_entropy
from tests.support.device import DEVICE
from tests.support.gradients.problems import BRIEF


def refuse(kernel: str) -> None:
    raise RuntimeError(f"{kernel} does not have a deterministic implementation, but you set 'torch.use_...")


class _Refusing(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, kernel: str) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.kernel = inputs[1]

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor, None]:
        refuse(ctx.kernel)
        return error, None


class Unrepeatable(nn.Module):
    """Stands for a layer without a deterministic pass, forward or backward."""

    def __init__(self, kernel: str, *, is_forward: bool) -> None:
        super().__init__()
        self.kernel, self.is_forward = kernel, is_forward

    def forward(self, values: Tensor) -> Tensor:
        if self.is_forward:
            refuse(self.kernel)
        found: Tensor = _Refusing.apply(values, self.kernel)
        return found


def engine(*layers: nn.Module, device: torch.device = DEVICE) -> Engine:
    model = Model("made up", nn.Sequential(*layers), cross_entropy, lambda outputs: outputs)
    return Engine(model, input_shape=(1, 8, 8), device=device, limits=BRIEF)


@pytest.mark.parametrize("is_forward", [True, False])
@pytest.mark.parametrize(
    ("kernel", "instead"),
    [
        ("adaptive_avg_pool2d_backward_cuda", "a single place"),
        ("reflection_pad2d_backward_cuda", "padding by zeros"),
        ("replication_pad1d_backward_cuda", "padding by zeros"),
        ("avg_pool3d_backward_cuda", "to a single place"),
        ("embedding_bag_backward_cuda_max", "the mode mean or sum"),
        ("max_unpooling2d_forward_out", "the mode nearest"),
        ("upsample_bicubic2d_backward_out_cuda", "the mode nearest"),
        ("cumsum_cuda_kernel", "another operation"),
    ],
)
def test_a_layer_that_cannot_be_repeated_is_named(kernel: str, instead: str, *, is_forward: bool) -> None:
    inner = nn.Sequential(nn.Tanh(), Unrepeatable(kernel, is_forward=is_forward))
    with pytest.raises(
        UnsupportedModelError, match=rf"in the layer 2\.1 \(Unrepeatable\).*{kernel}.*{instead}"
    ):
        engine(nn.Flatten(), nn.Linear(64, 8), inner, nn.Linear(8, 3), device=torch.device("cpu"))


CONV = nn.Conv2d(1, 2, 3, padding=1)
ORDINARY = {
    "AdaptiveAvgPool2d": ("a fixed kernel", [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 3)]),
    "Upsample": (
        "the mode nearest",
        [nn.Upsample(scale_factor=2, mode="bicubic"), nn.Flatten(), nn.Linear(512, 3)],
    ),
}


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU repeats them")
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_layers_are_refused_by_name(name: str) -> None:
    instead, layers = ORDINARY[name]
    with pytest.raises(UnsupportedModelError, match=rf"in the layer 1 \({name}\).*{instead}"):
        engine(CONV, *layers)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)],
        [nn.AvgPool2d(4), nn.Flatten(), nn.Linear(8, 3)],
        [nn.CircularPad2d(1), nn.Flatten(), nn.Linear(200, 3)],
        [nn.Upsample(scale_factor=2), nn.Flatten(), nn.Linear(512, 3)],
    ],
    ids=["pool to one place", "pool", "circular", "nearest"],
)
def test_what_is_advised_is_taken(layers: list[nn.Module]) -> None:
    assert engine(CONV, *layers).is_batched

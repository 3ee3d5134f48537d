"""The same per-example gradients and clipped sums as Opacus, on the models that it supports."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.gradients import L2
from tests.algorithms.gradients import naive
from tests.algorithms.gradients.layers import LAYERS
from tests.algorithms.gradients.networks import NETWORKS
from tests.algorithms.gradients.zoo import Problem, Spec, Wired, problem

opacus: Any = pytest.importorskip("opacus")
layers: Any = pytest.importorskip("opacus.layers")

SUPPORTED = {
    name: (LAYERS | NETWORKS)[name]
    for name in (
        "linear",
        "linear, sequence",
        "linear, no bias",
        "conv1d",
        "conv1d, all settings",
        "conv2d",
        "conv2d, stride and padding",
        "conv2d, dilation",
        "conv2d, groups",
        "embedding",
        "layer norm, sequence",
        "group norm",
        "instance norm 2d",
        "cnn",
        "scattering",
    )
}


def _residual(self: Wired, inputs: Tensor) -> Tensor:
    """Without anything in place, which hooks do not allow."""
    hidden = torch.relu(self.norm(self.first(inputs)))
    return self.last((self.second(hidden) + hidden).mean(dim=(2, 3)))


SUPPORTED["residual"] = Spec(
    lambda: Wired(
        _residual,
        first=nn.Conv2d(2, 4, 3, padding=1),
        norm=nn.GroupNorm(2, 4),
        second=nn.Conv2d(4, 4, 3, padding=1),
        last=nn.Linear(4, 3),
    ),
    (2, 5, 5),
)


def per_example(module: nn.Module, made: Problem) -> dict[str, Tensor]:
    """Opacus's gradients of a module's parameters by name, each [n, ...]."""
    hooked = opacus.GradSampleModule(module, loss_reduction="sum")
    made.model.losses(hooked(made.inputs), made.labels).sum().backward()
    found = {name: p.grad_sample for name, p in hooked._module.named_parameters()}
    return {name: sum(each) if isinstance(each, list) else each for name, each in found.items()}


def moved(made: Problem) -> Any:
    """A copy of the module at the point where the gradients are asked for, with nothing in place."""
    copied = copy.deepcopy(made.model.module)
    with torch.no_grad():
        for name, value in made.model.named(made.parameters).items():
            copied.get_parameter(name).copy_(value)
    for layer in copied.modules():
        if hasattr(layer, "inplace"):
            layer.inplace = False
    return copied


@pytest.mark.parametrize("name", SUPPORTED)
def test_gradients_are_those_of_opacus(name: str) -> None:
    made = problem(SUPPORTED[name])
    engine = made.engine()
    found = per_example(moved(made), made)
    rows = torch.cat([found[each].flatten(start_dim=1) for each in made.model.shapes], dim=1)
    for clipping in naive.clippings(made.model, rows).values():
        expected = naive.contributions(made.model, rows, clipping).sum(dim=0)
        assert naive.relative(engine.clipped_sum(*made.arguments, clipping), expected) < 1e-10


@pytest.mark.parametrize(("kind", "theirs"), [(nn.LSTM, "DPLSTM"), (nn.GRU, "DPGRU")])
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2}, {"bidirectional": True}, {"bias": False}])
def test_recurrent_gradients_are_those_of_opacus(
    kind: Callable[..., nn.Module], theirs: str, settings: dict[str, Any]
) -> None:
    """Its layers are its own, with the names and the meaning of torch's."""

    def outputs(self: Wired, inputs: Tensor) -> Tensor:
        return self.layer(inputs)[0].flatten(1)

    made = problem(Spec(lambda: Wired(outputs, layer=kind(3, 4, batch_first=True, **settings)), (5, 3)))
    own = getattr(layers, theirs)(3, 4, batch_first=True, **settings).double()
    own.load_state_dict(moved(made).layer.state_dict())
    found = per_example(Wired(outputs, layer=own), made)
    engine = made.engine()
    expected = torch.stack(
        [torch.cat([each[i].flatten() for each in found.values()]).norm() for i in range(len(made.labels))]
    )
    assert naive.relative(engine.norms(*made.arguments, L2(1.0)), expected) < 1e-10


@pytest.mark.parametrize("name", ["linear, sequence", "conv2d", "cnn"])
def test_clipped_sums_are_those_of_opacus(name: str) -> None:
    """Its optimiser without noise; it adds 1e-6 to norms."""
    made = problem(SUPPORTED[name])
    engine, bound = made.engine(), float(made.gradients.norm(dim=1).median())
    per_example(module := moved(made), made)
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        expected_batch_size=1,
        loss_reduction="sum",
    )
    optimizer.pre_step()
    expected = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
    assert naive.relative(engine.clipped_sum(*made.arguments, L2(bound)), expected) < 1e-5

"""Problems for the gradient engine: modules, records for them, and the gradients by definition."""

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.gradients import L2, Engine
from algorithms.gradients.model_inspection import InspectionLimits
from algorithms.models import Model
from tests.support.device import DEVICE
from tests.support.gradients import naive

SMALL = 64
"""A physical batch at which a look takes a third less than at the thousands that small models would have."""


class Wired(nn.Module):
    """A module whose forward pass is a function of itself and its inputs; `parts` are its layers and parameters."""

    def __init__(self, wiring: Callable[..., Tensor], **parts: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self.wiring = wiring
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.wiring(self, inputs)
        return outputs


def wavy(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss of any number of outputs whose derivatives by them are all different and of no special form."""
    flat = outputs.flatten(start_dim=1)
    waves = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return torch.sin(flat * waves + labels[:, None].to(flat.dtype) + waves).sum(dim=1)


@dataclass(frozen=True)
class Spec:
    """How to make a problem.

    make: the module. shape: of one record. entries: for whole numbers in 0 .. entries - 1. classes: of the labels.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    entries: int = 0
    losses: Callable[[Tensor, Tensor], Tensor] = wavy
    classes: int = 3

    def after_a_layer(self) -> "Spec":
        """The same module after a linear layer, so that its input has a gradient too."""
        width = self.shape[-1]
        return replace(self, make=lambda: nn.Sequential(nn.Linear(width, width), self.make()))


BRIEF = InspectionLimits(full_operations=0)
"""As large models are inspected."""
BRIEFEST = InspectionLimits(full_operations=0, crowd_operations=0)
"""As models are inspected whose passes are slow."""
LIMITS = [pytest.param(InspectionLimits(), id="full"), pytest.param(BRIEF, id="brief")]
"""Models of tests are small, so they are inspected in full unless they are treated as large."""


def by_limits(cases: Iterable[Any], *, in_full: Collection[Any] = ()) -> list[Any]:
    """Each case with the limits of one inspection in every run of the tests, and of the other in `make soak` too.

    For tests of how gradients are taken, for which a brief inspection does; in_full: those that are inspected in full.
    """
    cases = list(cases)
    assert all(case in cases for case in in_full), "a chosen case is none of the cases"
    return [
        pytest.param(
            case,
            InspectionLimits() if is_full else BRIEF,
            id=f"{getattr(case, '__name__', case)}-{'full' if is_full else 'brief'}",
            marks=[] if is_full == (case in in_full) else pytest.mark.soak,
        )
        for case in cases
        for is_full in (False, True)
    ]


@dataclass(frozen=True)
class Problem:
    """A model, a point, and records."""

    model: Model
    parameters: Tensor
    inputs: Tensor
    labels: Tensor

    @cached_property
    def gradients(self) -> Tensor:
        """By definition, [n, d]."""
        return naive.loop(self.model, self.parameters, self.inputs, self.labels)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the engine's methods take first."""
        return self.parameters, self.inputs, self.labels

    def engine(self, **settings: Any) -> Engine:
        return Engine(
            self.model, input_shape=self.inputs.shape[1:], input_dtype=self.inputs.dtype, **settings
        )

    def take(self, chosen: slice | list[int]) -> "Problem":
        """The same with some of the records."""
        return replace(self, inputs=self.inputs[chosen], labels=self.labels[chosen])


@cache
def has_lstm_in_bfloat16() -> bool:
    """Whether PyTorch's own LSTM runs under autocast here, which oneDNN has for some processors only."""
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            torch.nn.LSTM(2, 2).to(DEVICE)(torch.zeros(1, 1, 2, device=DEVICE))
    except RuntimeError:
        return False
    return True


def problem(spec: Spec, dtype: torch.dtype = torch.float64, *, count: int = 6, seed: int = 0) -> Problem:
    """Records of different sizes for a spec, at a point away from the start; bfloat16 is the model's precision."""
    exact = torch.float32 if dtype == torch.bfloat16 else dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = spec.make().to(exact)
        is_lstm = any(isinstance(layer, torch.nn.LSTM) for layer in module.modules())
        if dtype == torch.bfloat16 and is_lstm and not has_lstm_in_bfloat16():
            pytest.skip("this processor has no LSTM in bfloat16")
        model = Model("made up", module, spec.losses, lambda outputs: outputs, precision=dtype)
        parameters = model.initial_parameters()
        parameters = parameters + 0.2 * torch.randn(len(parameters), dtype=torch.float64).to(exact)
        inputs = torch.randn(count, *spec.shape, dtype=torch.float64)
        inputs = inputs * (0.5 + 1.5 * torch.rand(count, dtype=torch.float64)).view(
            -1, *[1] * len(spec.shape)
        )
        if spec.entries:
            inputs = torch.randint(0, spec.entries, inputs.shape)
        labels = torch.randint(0, spec.classes, (count,))
    return Problem(model, parameters, inputs if spec.entries else inputs.to(exact), labels)


class _Listener(logging.Handler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@cache
def cached_with_log(
    spec: Spec, dtype: torch.dtype, limits: InspectionLimits = BRIEF
) -> tuple[Problem, Engine, list[str]]:
    """A problem, its engine, and what was logged while it was made; made once, not to be changed.

    Without limits the model is inspected briefly, which takes a fifth of the time.
    """
    made, listener, logger = problem(spec, dtype), _Listener(), logging.getLogger("algorithms")
    logger.addHandler(listener)
    engine = made.engine(physical_batch=SMALL, limits=limits)
    logger.removeHandler(listener)
    return made, engine, listener.said


def cached_problem(spec: Spec, dtype: torch.dtype) -> tuple[Problem, Engine]:
    """A problem and its engine, made once; not to be changed."""
    return cached_with_log(spec, dtype)[:2]


def rows(made: Problem, engine: Engine) -> Tensor:
    """Each record's gradient as the engine's sum has it, [n, d]."""
    found = engine.contributions(*made.arguments)
    return torch.stack([found.weighted_sum(one) for one in torch.eye(len(made.labels)).double()])


def check(made: Problem, engine: Engine | None = None) -> None:
    """Norms and each record's gradient are those of the loop; in float64, by an engine of this problem's model."""
    engine = engine or made.engine(physical_batch=SMALL)
    assert naive.relative(rows(made, engine), made.gradients) < 1e-10
    norms = engine.contributions(*made.arguments).norms(L2(1.0))
    assert naive.relative(norms, naive.norms(made.model, made.gradients, L2(1.0))) < 1e-10


def check_batched(spec: Spec, limits: InspectionLimits) -> None:
    """The model runs in passes of many records; gradients, norms and sums by each clipping are those of the loop."""
    made = problem(spec)
    engine = made.engine(physical_batch=SMALL, limits=limits)
    assert engine.is_batched and not engine.operations_without_rule
    check(made, engine)
    for clipping in naive.clippings(made.model, made.gradients).values():
        expected = naive.contributions(made.model, made.gradients, clipping).sum(dim=0)
        assert naive.relative(engine.clipped_sum(*made.arguments, clipping), expected) < 1e-9


def frozen(module: nn.Module, *names: str) -> nn.Module:
    """The module with some parameters, or all of them, not trained."""
    parameters = dict(module.named_parameters())
    for name in names or parameters:
        parameters[name].requires_grad_(False)
    return module


def zero_start(layer: nn.Linear) -> nn.Linear:
    """A layer that starts at zero, so that nothing before it has an effect or a gradient at the start."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def unlike_alone(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A number, and its function in a vector, which is less by a last bit than that of it alone; [] each."""
    points = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    together, alone = function(points), torch.cat([function(one) for one in points.split(1)])
    found = int((alone > together).nonzero()[0])
    return points[found], together[found]

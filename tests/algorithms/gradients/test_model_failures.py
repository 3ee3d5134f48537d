"""Models of the shapes that people bring: taken, with memory that is known before, or refused in one sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.gradients import L2, Engine, PerExampleModel, UnsupportedModelError
from algorithms.gradients.model_inspection import InspectionLimits
from algorithms.gradients.op_tracer import MemoryTracer
from algorithms.models.objectives import cross_entropy
from tests.support.gradients.problems import BRIEF, SMALL, Spec, Wired, by_limits, check, frozen, problem
from tests.support.refusals import refused
from tests.support.soak import soak_but

ENTRIES = 5


def coded(codes: Callable[[Tensor], Tensor]) -> Spec:
    """A row of floats whose first number is the code of a category."""

    def wiring(self: Wired, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.table(codes(x[:, 0])), x[:, 1:]], dim=1))

    return Spec(lambda: Wired(wiring, table=nn.Embedding(ENTRIES, 3), last=nn.Linear(6, 2)), (4,))


def raising(error: Exception) -> Callable[[Wired, Tensor], Tensor]:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        raise error

    return wiring


def endless(self: Wired, x: Tensor) -> Tensor:
    return endless(self, self.layer(x))


def no_missing(self: Wired, x: Tensor) -> Tensor:
    if bool(x.isnan().any()):
        raise ValueError("a value is missing")
    return self.layer(x)


def supported(self: Wired, x: Tensor) -> Tensor:
    """Sparsemax as it is usually written."""
    ordered = self.layer(x).sort(dim=1, descending=True).values
    sums, ranks = ordered.cumsum(dim=1), torch.arange(1, 5)
    support = (1 + ranks * ordered > sums).sum(dim=1, keepdim=True)
    return (ordered - (sums.gather(1, support - 1) - 1) / support).clamp(min=0)


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> Tensor:
        raise NotImplementedError("there is no way back")


def of(wiring: Callable[[Wired, Tensor], Tensor]) -> Spec:
    return Spec(lambda: nn.Sequential(nn.Linear(4, 4), Wired(wiring, layer=nn.Linear(4, 4))), (4,), classes=2)


FAILING: dict[str, tuple[Spec, str]] = {
    "category codes": (
        coded(lambda code: code.long()),
        r"IndexError in the layer table \(Embedding\), at '.*self\.table\(codes.*', .*\.clamp\(0, entries - 1\)",
    ),
    "nothing there": (
        of(raising(NotImplementedError("not yet"))),
        r"NotImplementedError in the layer 1 .*\(not yet\)",
    ),
    "a bug": (of(raising(KeyError("mask"))), r"KeyError in the layer 1 \(Wired\), at 'raise error', .*mask"),
    "a shape": (of(lambda self, x: self.layer(x[:, :3])), r"RuntimeError in the layer 1\.layer \(Linear\)"),
    "no end": (of(endless), "RecursionError in the layer 1"),
    "a check": (of(no_missing), r"ValueError in the layer 1 \(Wired\).*a value is missing"),
    "an index of a missing number": (
        of(supported),
        r"RuntimeError in the layer 1 .*'.*sums\.gather\(1, support - 1\).*sparsemax.*\.clamp\(0, length - 1\)",
    ),
    "the way back": (of(lambda self, x: NoWayBack.apply(self.layer(x))), "NotImplementedError.*no way back"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_model_that_fails_is_refused_in_one_sentence(name: str) -> None:
    spec, said = FAILING[name]
    with refused(rf"^the model made up raised {said}", UnsupportedModelError):
        problem(spec).engine()


PARAMETERS = {
    "complex and real": (
        lambda: Wired(
            lambda self, x: x @ self.w.real, w=nn.Parameter(torch.ones(4, 3) * 1j), b=nn.Linear(4, 3)
        ),
        r"float32 \(b\.weight\) and complex64 \(w\), .*torch\.view_as_complex",
    ),
    "two widths": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3).double()),
        r"float64 \(1\.weight\) and float32 \(0\.weight\), .*model\.float\(\)",
    ),
    "scripted": (lambda: torch.jit.trace(nn.Linear(4, 3), torch.ones(2, 4)), r"TorchScript in it \(it\)"),
    "a scripted layer": (
        lambda: nn.Sequential(torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4)), nn.Linear(4, 3)),
        r"\(its layer 0\), .*by load_state_dict\(scripted\.state_dict\(\)\)",
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_that_do_not_fit_are_named_with_what_to_do(name: str) -> None:
    make, said = PARAMETERS[name]
    with refused(rf"^the model other has .*{said}", UnsupportedModelError):
        Engine(PerExampleModel("other", make(), nn.CrossEntropyLoss(reduction="none")), input_shape=(4,))


def test_checks_of_a_distribution_are_said_to_be_switched_off() -> None:
    def losses(outputs: Tensor, labels: Tensor) -> Tensor:
        normal = torch.distributions.Normal(outputs[:, 0], 1.0, validate_args=True)
        return -normal.log_prob(labels.to(outputs))

    with pytest.raises(UnsupportedModelError, match="give it validate_args=False"):
        problem(Spec(lambda: nn.Linear(4, 2), (4,), losses=losses)).engine()


def test_a_loss_that_fails_is_refused_in_one_sentence() -> None:
    def losses(outputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(outputs, torch.tensor([{0: 0, 1: 1}[label] for label in labels.tolist()]) + 7)

    with pytest.raises(UnsupportedModelError, match=r"raised IndexError, at 'return cross_entropy"):
        problem(Spec(lambda: nn.Linear(4, 2), (4,), losses=losses)).engine()


def test_codes_that_are_kept_inside_of_their_table_are_taken() -> None:
    """As the refusal advises."""
    check(problem(coded(lambda code: code.long().clamp(0, ENTRIES - 1))))


LOOKS = [(15_000, True), (200, False), (600, False)]
A_HUNDREDTH = InspectionLimits(full_bytes=InspectionLimits().full_bytes / 100)
"""Of the memory at which inspections become brief."""


@pytest.mark.parametrize(("width", "is_brief"), soak_but(LOOKS[:2], LOOKS))
def test_a_look_at_a_model_of_much_memory_is_brief(width: int, is_brief: bool) -> None:
    spec = Spec(
        lambda: Wired(
            lambda self, x: self.last(
                torch.sin(self.first(x).repeat(1, width)).unflatten(1, (4, -1)).mean(2)
            ),
            first=nn.Linear(4, 4),
            last=nn.Linear(4, 2),
        ),
        (4,),
    )
    with MemoryTracer() as memory:
        engine = problem(spec, torch.float32).engine(limits=A_HUNDREDTH, memory_mb=10)
    assert engine.inspection.is_brief == is_brief
    assert memory.peak < (1e7 if is_brief else 1e8)  # a full one has a pass of very many records


def encoder(width: int, length: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, batch_first=True)
    return frozen(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def test_what_a_frozen_encoder_computes_counts_as_memory() -> None:
    """It keeps nothing for a backward pass, and takes its room all the same."""
    spec = Spec(
        lambda: Wired(
            lambda self, x: self.head(self.encoder(self.table(x)).mean(dim=1)),
            table=frozen(nn.Embedding(20, 32)),
            encoder=encoder(32, 16),
            head=nn.Linear(32, 2),
        ),
        (16,),
        entries=20,
    )
    made = problem(spec, torch.float32, count=1)
    engine = made.engine(memory_mb=16, expected_batch=1e9, limits=BRIEF)
    count = engine.physical_batch
    assert count >= 64
    with MemoryTracer() as memory:
        found = engine.contributions(
            made.parameters, made.inputs.expand(count, -1), made.labels.expand(count)
        )
        found.norms(L2(1.0))
    assert 4e6 < memory.peak < 20e6
    exact = problem(spec)
    check(exact, exact.engine(physical_batch=SMALL, limits=BRIEF))


class Residual(nn.Module):
    """The block of a ResNet."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), norm(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)
        self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, 2, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.down(x))


class Inverted(nn.Module):
    """The block of an EfficientNet: wider, by channel, squeezed and excited, narrower."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.expand, self.norm1 = nn.Conv2d(channels, wide, 1, bias=False), nn.GroupNorm(4, wide)
        self.depthwise, self.norm2 = nn.Conv2d(wide, wide, 5, 1, 2, groups=wide), nn.GroupNorm(4, wide)
        self.squeeze, self.excite = nn.Conv2d(wide, 2, 1), nn.Conv2d(2, wide, 1)
        self.project, self.norm3 = nn.Conv2d(wide, channels, 1, bias=False), nn.GroupNorm(1, channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.silu(self.norm1(self.expand(x)))
        inner = functional.silu(self.norm2(self.depthwise(inner)))
        scale = self.excite(functional.silu(self.squeeze(inner.mean((2, 3), keepdim=True))))
        return x + self.norm3(self.project(inner * scale.sigmoid()))


class Standardised(nn.Conv2d):
    """A convolution whose kernels are standardised, as in BiT: by a batch norm of the weight itself."""

    def forward(self, input: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = functional.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6)
        return self._conv_forward(input, weight.reshape_as(self.weight), self.bias)


class Centred(nn.Conv2d):
    """The same by its formula (Qiao et al. 2019)."""

    def forward(self, input: Tensor) -> Tensor:
        mean = self.weight.mean(dim=(1, 2, 3), keepdim=True)
        weight = (self.weight - mean) / (self.weight.std(dim=(1, 2, 3), keepdim=True) + 1e-5)
        return self._conv_forward(input, weight, self.bias)


class Scaled(nn.Module):
    """The block of a ConvNeXt: channels last, and a trained scale of each."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm, self.up, self.down = nn.LayerNorm(channels), nn.Linear(channels, 8), nn.Linear(8, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        inner = self.gamma * self.down(functional.gelu(self.up(inner)))
        return x + inner.permute(0, 3, 1, 2)


class Classified(nn.Module):
    """The start of a vision transformer: a token that is the same for all records before those of each."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 4, 4, 4), nn.Parameter(torch.randn(1, 1, 4))
        self.block = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        return self.block(torch.cat([self.token.expand(len(x), -1, -1), patches], dim=1))[:, 0]


def images(*layers: Callable[[], nn.Module]) -> Spec:
    return Spec(lambda: nn.Sequential(*(layer() for layer in layers)), (3, 8, 8))


def group(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


BROUGHT = {
    "resnet, group norm": images(lambda: Residual(3, 4, group), lambda: Residual(4, 8, group)),
    "resnet, batch norm in eval": images(
        lambda: Residual(3, 4, nn.BatchNorm2d).eval(), lambda: Residual(4, 8, nn.BatchNorm2d).eval()
    ),
    "efficientnet": images(lambda: nn.Conv2d(3, 4, 3, 2, 1), lambda: Inverted(4), lambda: Inverted(4)),
    "weights standardised by batch norm": images(
        lambda: Standardised(3, 4, 3), nn.ReLU, lambda: Standardised(4, 4, 3)
    ),
    "weights standardised by formula": images(lambda: Centred(3, 4, 3), nn.ReLU, lambda: Centred(4, 4, 3)),
    "convnext": images(lambda: nn.Conv2d(3, 4, 2, 2), lambda: Scaled(4)),
    "vision transformer": images(Classified, lambda: nn.Linear(4, 2)),
    "a frozen part": images(lambda: frozen(Residual(3, 4, group)), lambda: nn.Conv2d(4, 2, 2)),
}


@pytest.mark.parametrize(("name", "limits"), by_limits(BROUGHT, in_full=["a frozen part"]))
def test_models_that_people_bring_are_taken(name: str, limits: InspectionLimits) -> None:
    made = problem(BROUGHT[name])
    check(made, made.engine(physical_batch=SMALL, limits=limits))

"""Weights that are products, inverses or exponentials of matrices of parameters: gradients stay outer products."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from algorithms.gradients import L2
from algorithms.gradients.grad_sample_recorder import UnrecordedError
from algorithms.gradients.model_inspection import InspectionLimits
from algorithms.gradients.parameter_gradients import LinearGrad
from algorithms.gradients.rules import pull_back
from algorithms.gradients.rules.parameter_products import product_form
from tests.support.gradients.problems import BRIEF, SMALL, Spec, Wired, by_limits, check_batched, problem

WIDTH = 12


class Merged(nn.Module):
    """Adds a product of two narrow matrices to a weight, as a merged adapter does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(shape)) for shape in ((WIDTH, 2), (2, WIDTH)))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down) * 0.5


def parametrized(parametrization: nn.Module, *, frozen: bool = False) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.requires_grad_(not frozen)
    parametrize.register_parametrization(layer, "weight", parametrization)
    return layer


def through(change: Callable[..., Tensor], *shapes: tuple[int, ...], scale: float = 0.3) -> Spec:
    """A linear layer whose weight is a function of matrices of these shapes."""

    def make() -> nn.Module:
        parts = {f"p{i}": nn.Parameter(scale * torch.randn(shape)) for i, shape in enumerate(shapes)}
        return Wired(
            lambda self, x: functional.linear(x, change(*(getattr(self, name) for name in parts))), **parts
        )

    return Spec(make, (WIDTH,))


def orthogonal(outputs: int, by: str) -> Spec:
    def make() -> nn.Module:
        return parametrizations.orthogonal(nn.Linear(WIDTH, outputs), orthogonal_map=by)

    return Spec(make, (WIDTH,))


def spectral(layer: Callable[[], nn.Module], shape: tuple[int, ...]) -> Spec:
    return Spec(lambda: parametrizations.spectral_norm(layer()).eval(), shape)


def one(like: Tensor) -> Tensor:
    return torch.eye(WIDTH, dtype=like.dtype)


SQUARE = WIDTH, WIDTH
FORMS = {
    "a product": through(lambda a, b: a @ b, (9, 3), (3, WIDTH)),
    "a product of three": through(lambda a, b, c: a.mm(b) @ c, (9, 3), (3, 4), (4, WIDTH)),
    "a product with a constant": through(lambda a: torch.matmul(one(a), a.t()), SQUARE),
    "a square": through(lambda a: a @ a, SQUARE),
    "a square with its transpose": through(lambda a: a @ a.mT, SQUARE),
    "a merged adapter": Spec(lambda: parametrized(Merged()), (WIDTH,)),
    "a merged adapter of a fixed weight": Spec(lambda: parametrized(Merged(), frozen=True), (WIDTH,)),
    "a difference": through(lambda a, b: torch.sub(a, b @ a, alpha=0.7), SQUARE, SQUARE),
    "a sum with a multiple": through(lambda a, b: torch.add(b, a @ b, alpha=-0.7), SQUARE, SQUARE),
    "an inverse": through(lambda a: torch.linalg.inv(2.0 * one(a) + a) @ a, SQUARE),
    "a solution": through(
        lambda a, b: torch.linalg.solve(2.0 * one(a) + a, b), SQUARE, (WIDTH, WIDTH), scale=0.2
    ),
    "an exponential": through(torch.matrix_exp, SQUARE),
    "a rotation": through(lambda a: torch.linalg.matrix_exp(a - a.T), SQUARE, scale=1.0),
    "orthogonal, exponential": orthogonal(WIDTH, "matrix_exp"),
    "orthogonal, Cayley": orthogonal(WIDTH, "cayley"),
    "spectral norm": spectral(lambda: nn.Linear(WIDTH, 9), (WIDTH,)),
    "spectral norm of kernels": spectral(lambda: nn.Conv1d(3, 5, 3), (3, 6)),
    "a multiple": through(lambda a, b: b * a, SQUARE, ()),
    "a multiple by the first": through(lambda a, b: a.reshape(1, 1) * b, (), SQUARE),
    "reflections": through(lambda a, b: torch.linalg.householder_product(a, b) * 2.0, (15, WIDTH), (WIDTH,)),
    "reflections, all columns scaled": through(
        lambda a, b: torch.orgqr(a, b) * torch.arange(WIDTH)[None], (15, WIDTH), (WIDTH,)
    ),
    "a Kronecker product": through(torch.kron, (3, 4), (5, 3)),
    "a Kronecker product of a product": through(
        lambda a, b, c: torch.kron(a @ b, c) / 3, (6, 2), (2, 3), (2, 4)
    ),
    "a quotient": through(lambda a, b: a / (b + 2.0), SQUARE, (1,)),
    "an image of a vector": through(lambda a, b: (a @ b).view(3, WIDTH), (3 * WIDTH, 4), (4,)),
    "a quotient by a product of vectors": through(lambda a, b, c: a / (b @ c + 2.0), SQUARE, (5,), (5,)),
    "a multiple, of another shape": through(lambda a, b: (a * b).view(3, WIDTH), (6, 6), ()),
    "a transpose, of another shape": through(lambda a: a.T.reshape(3, WIDTH), (6, 6)),
}
THROUGH_A_GRAPH = {
    "orthogonal, wide, exponential": orthogonal(7, "matrix_exp"),
    "orthogonal, wide, Householder": orthogonal(7, "householder"),
    "orthogonal, tall, Householder": orthogonal(17, "householder"),
    "orthogonal, square, Householder": orthogonal(WIDTH, "householder"),
    "orthogonal, Householder, a sequence": Spec(orthogonal(17, "householder").make, (3, WIDTH)),
    "by its length": through(lambda a: a / a.norm(), SQUARE),
    "a number over a matrix": through(lambda a, b: a / (3.0 + b.abs()), (1, 1), SQUARE),
    "a sum that is stretched": through(lambda a, b: a + b, SQUARE, (WIDTH,)),
    "a Kronecker product, of another shape": through(
        lambda a, b: torch.kron(a, b).view(3, WIDTH), (2, 3), (3, 2)
    ),
    "a product, of another shape": through(lambda a, b: (a @ b).view(3, WIDTH), (6, 2), (2, 6)),
    "an inverse, of another shape": through(
        lambda a: torch.linalg.inv(2.0 * torch.eye(6, dtype=a.dtype) + a).reshape(3, WIDTH), (6, 6)
    ),
    "an exponential, of another shape": through(lambda a: torch.matrix_exp(a).view(3, WIDTH), (6, 6)),
    "reflections, of another shape": through(
        lambda a, b: torch.linalg.householder_product(a, b).reshape(3, WIDTH), (6, 6), (6,)
    ),
    "an exponential, a long sequence": Spec(through(torch.matrix_exp, SQUARE).make, (5, WIDTH)),
    "a product, a long sequence": Spec(through(lambda a, b: a @ b, (9, 20), (20, WIDTH)).make, (30, WIDTH)),
}
SHORT = {
    f"{name}, a short sequence": Spec(FORMS[name].make, (2, WIDTH))
    for name in (
        "a product",
        "a difference",
        "an inverse",
        "a solution",
        "spectral norm",
        "a Kronecker product",
    )
}


@pytest.mark.parametrize(
    ("name", "limits"), by_limits(FORMS | SHORT | THROUGH_A_GRAPH, in_full=["orthogonal, exponential"])
)
def test_gradients_of_the_factors_are_those_of_the_loop(name: str, limits: InspectionLimits) -> None:
    check_batched((FORMS | SHORT | THROUGH_A_GRAPH)[name], limits)


@pytest.mark.parametrize("name", [*FORMS, *SHORT])
def test_no_record_is_pulled_back_through_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = problem((FORMS | SHORT)[name])
    engine = made.engine(physical_batch=SMALL, limits=BRIEF)
    for function in ("_through", "pull_back_by_rows"):
        monkeypatch.setattr(sys.modules[pull_back.__module__], function, None)
    engine.clipped_sum(*made.arguments, L2(1.0))


@pytest.mark.parametrize("angle", [0.0, 1.0, 12.0, 20.0])
def test_exponential_of_turns_by_large_angles_has_its_derivative(angle: float) -> None:
    """To within what the module's docstring says of the rule, for outer products on which no turn is zero."""
    torch.manual_seed(0)
    turns = torch.randn(40, 40, dtype=torch.float64)
    turns = turns - turns.T
    turns = (turns * (angle / torch.linalg.matrix_norm(turns, 2))).requires_grad_()
    inputs, errors = torch.randn(2, 3, 1, 40, dtype=torch.float64)
    weight = torch.matrix_exp(turns)
    gradients = [torch.outer(e[0], x[0]) for e, x in zip(errors, inputs, strict=True)]
    expected = torch.stack(
        [torch.autograd.grad(weight, turns, each, retain_graph=True)[0] for each in gradients]
    )
    closed = product_form("matrix_exp", {id(turns): "turns"}, weight, (turns,), {})
    assert closed is not None
    gradient = (closed(LinearGrad(inputs, errors)) or {})["turns"]
    torch.testing.assert_close(gradient.rows.view_as(expected), expected, rtol=0.0, atol=1e-8)


def test_factor_that_is_overwritten_after_its_use_is_no_factor_any_more() -> None:
    first, buffer = torch.randn(4, 4, requires_grad=True), torch.ones(4, 4)
    closed = product_form("matmul", {id(first): "first"}, first @ buffer, (first, buffer), {})
    buffer.mul_(2.0)
    assert closed is not None
    with pytest.raises(UnrecordedError, match="overwritten after its use"):
        closed(LinearGrad(torch.randn(3, 1, 4), torch.randn(3, 1, 4)))

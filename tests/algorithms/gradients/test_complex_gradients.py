"""Complex weights of real parameters, as of Fourier operators and complex recurrences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.gradients.model_inspection import InspectionLimits
from tests.support.gradients.problems import Spec, Wired, by_limits, check_batched


def pairs(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*sizes, 2, dtype=torch.float64) / sizes[-1] ** 0.5)


def taken(wiring: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...], **parts: nn.Parameter) -> Spec:
    """A function of parameters and of records that went through a layer; the loss sees both parts of its outputs."""

    def whole(self: Wired, x: Tensor) -> Tensor:
        outputs = wiring(self, torch.complex(self.layer(x), x))
        return torch.view_as_real(outputs.resolve_conj())

    return Spec(lambda: Wired(whole, layer=nn.Linear(shape[-1], shape[-1]), **parts), shape)


def weight(self: Wired) -> Tensor:
    return torch.view_as_complex(self.w)


def as_parts(self: Wired, x: Tensor) -> Tensor:
    first, second = weight(self)
    return x @ first + (x @ second).conj()


def of_one_type(self: Wired, x: Tensor) -> Tensor:
    return x @ self.w.to(x.dtype)


PRODUCTS = {
    "a vector": taken(lambda self, x: x @ weight(self), (5,), w=pairs(5, 3)),
    "a large matrix": taken(lambda self, x: x @ weight(self), (40,), w=pairs(40, 50)),
    "a sequence": taken(lambda self, x: x @ weight(self), (4, 5), w=pairs(5, 3)),
    "a long sequence": taken(lambda self, x: x @ weight(self), (30, 5), w=pairs(5, 3)),
    "transposed": taken(lambda self, x: x @ weight(self).T, (5,), w=pairs(3, 5)),
    "conjugated": taken(lambda self, x: x @ weight(self).conj(), (5,), w=pairs(5, 3)),
    "transposed and conjugated": taken(lambda self, x: x @ weight(self).mH, (5,), w=pairs(3, 5)),
    "of conjugates": taken(lambda self, x: x.conj() @ weight(self), (5,), w=pairs(5, 3)),
    "used twice": taken(lambda self, x: (x @ weight(self)) @ weight(self), (5,), w=pairs(5, 5)),
    "parts": taken(as_parts, (5,), w=pairs(2, 5, 3)),
    "blocks": taken(lambda self, x: torch.einsum("bki,kio->bko", x, weight(self)), (3, 5), w=pairs(3, 5, 4)),
    "large blocks": taken(
        lambda self, x: torch.einsum("bki,kio->bko", x, weight(self)), (3, 18), w=pairs(3, 18, 20)
    ),
    "blocks of frequencies": taken(
        lambda self, x: torch.einsum("bix,iox->box", x, weight(self)), (12, 6), w=pairs(12, 10, 6)
    ),
    "three factors": taken(
        lambda self, x: torch.einsum("bi,bj,ijo->bo", x, x.conj(), weight(self)), (4,), w=pairs(4, 4, 3)
    ),
    "added": taken(
        lambda self, x: torch.baddbmm(torch.view_as_complex(self.b), x, weight(self).expand(len(x), -1, -1)),
        *((4, 5),),
        w=pairs(1, 5, 3),
        b=pairs(1, 1, 3),
    ),
    "of real numbers": taken(of_one_type, (5,), w=nn.Parameter(torch.randn(5, 3))),
    "many of real numbers": taken(of_one_type, (40,), w=nn.Parameter(torch.randn(40, 30))),
}


@pytest.mark.parametrize(
    ("name", "limits"), by_limits(PRODUCTS, in_full=["a vector", "large blocks", "of real numbers"])
)
def test_gradients_of_a_complex_weight_are_those_of_the_loop(name: str, limits: InspectionLimits) -> None:
    check_batched(PRODUCTS[name], limits)

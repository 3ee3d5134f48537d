"""Parameters in products of any letters, in tables without a layer, and repeated: none is taken record by record."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.gradients import L1, L2, Affine, PerLayer
from tests.algorithms.gradients import naive
from tests.algorithms.gradients.zoo import Spec, Wired, check, problem, rows


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64))


def taken(wiring: Callable[..., Tensor], shape: tuple[int, ...], *sizes: int, **parts: nn.Module) -> Spec:
    """A function of a parameter `w` and of records that went through a layer."""
    return Spec(lambda: Wired(wiring, w=drawn(*sizes), layer=nn.Linear(shape[-1], shape[-1]), **parts), shape)


def einsum(equation: str) -> Callable[..., Tensor]:
    return lambda self, x: torch.einsum(equation, self.layer(x), self.w)


PRODUCTS = {
    "einsum of a vector": taken(einsum("bi,oi->bo"), (4,), 3, 4),
    "einsum, output first in the weight": taken(einsum("bti,io->bto"), (5, 4), 4, 3),
    "einsum, mixed order": taken(einsum("bti,oih->btoh"), (5, 4), 2, 4, 3),
    "einsum, sum over the sequence": taken(einsum("bti,io->bo"), (5, 4), 4, 3),
    "einsum, blocks": taken(einsum("bhi,hio->bho"), (3, 4), 3, 4, 2),
    "einsum, record inside": taken(
        lambda self, x: torch.einsum("bti,ot->ibo", self.layer(x), self.w).transpose(0, 1), (5, 4), 3, 5
    ),
    "einsum, dots": taken(einsum("...i,oi->...o"), (5, 4), 3, 4),
    "einsum, no arrow": taken(einsum("bti,io"), (5, 4), 4, 3),
    "einsum, upper letters": taken(einsum("ZYi,io->ZYo"), (5, 4), 4, 3),
    "einsum of three": taken(
        lambda self, x: torch.einsum("bi,bj,ijo->bo", self.layer(x), x, self.w), (4,), 4, 4, 3
    ),
    "einsum with what all share": taken(
        lambda self, x: torch.einsum("bi,ik,ko->bo", self.layer(x), torch.eye(4).to(x), self.w), (4,), 4, 3
    ),
    "matmul from the left": taken(lambda self, x: self.w @ self.layer(x), (5, 4), 3, 5),
    "matmul with a vector": taken(lambda self, x: self.layer(x) @ self.w, (5, 4), 4),
    "matmul of a vector from the left": taken(lambda self, x: self.w @ self.layer(x), (5, 4), 5),
    "matmul by heads": taken(lambda self, x: self.layer(x) @ self.w, (3, 5, 4), 3, 4, 2),
    "matmul, stretched": taken(lambda self, x: self.layer(x)[:, None] @ self.w, (5, 4), 3, 4, 2),
    "matmul, one for all": taken(lambda self, x: self.layer(x) @ self.w, (5, 4), 1, 4, 2),
    "mv": taken(lambda self, x: torch.mv(self.layer(x), self.w)[:, None], (4,), 4),
    "bmm over a dimension": taken(
        lambda self, x: torch.bmm(self.layer(x).transpose(0, 1), self.w).transpose(0, 1), (3, 4), 3, 4, 2
    ),
    "folded records": taken(
        lambda self, x: torch.einsum("bi,io->bo", self.layer(x).flatten(0, 1), self.w).view(len(x), -1),
        *((5, 4), 4, 3),
    ),
    "tensordot": taken(lambda self, x: torch.tensordot(self.layer(x), self.w, dims=1), (5, 4), 4, 3),
    "tensordot of two": taken(
        lambda self, x: torch.tensordot(self.layer(x), self.w, dims=([2, 1], [0, 1])), (5, 4), 4, 5, 3
    ),
    "bilinear": taken(lambda self, x: self.two(self.layer(x), x), (4,), 1, two=nn.Bilinear(4, 4, 3)),
    "bilinear over a sequence": taken(
        lambda self, x: self.two(self.layer(x), x), (5, 4), 1, two=nn.Bilinear(4, 4, 3, bias=False)
    ),
    "repeat": taken(lambda self, x: self.layer(x) + self.w.repeat(len(x), 1, 1), (5, 4), 5, 4),
    "repeat within": taken(lambda self, x: self.layer(x) * self.w.repeat(len(x), 2), (4,), 1, 2),
    "repeat by heads": taken(
        lambda self, x: self.layer(x).flatten(0, 1) + self.w.repeat(len(x), 1), (5, 4), 5, 4
    ),
    "tile": taken(lambda self, x: self.layer(x) * torch.tile(self.w, (len(x), 1)), (4,), 4),
    "a number added": taken(lambda self, x: self.layer(x) * (1.0 + self.w), (4,), 4),
    "parts of an iteration": taken(lambda self, x: sum(self.layer(x) * part for part in self.w), (4,), 3, 4),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_has_the_gradients_of_the_loop(name: str) -> None:
    made = problem(PRODUCTS[name])
    engine = made.engine()
    check(made, engine)
    assert engine.is_batched and not engine.materialised


@pytest.mark.parametrize("name", ["einsum, mixed order", "einsum, blocks", "matmul from the left"])
def test_a_product_has_every_norm(name: str) -> None:
    made = problem(PRODUCTS[name])
    found = made.engine().contributions(*made.arguments)
    spread = torch.rand(made.model.parameter_count, dtype=torch.float64) + 0.5
    layers = PerLayer((1.0,) * len(made.model.layers))
    for clipping in (L1(1.0), L2(1.0), layers, Affine(1.0, 0.1 * spread, spread)):
        expected = naive.norms(made.model, made.gradients, clipping)
        assert naive.relative(found.norms(clipping), expected) < 1e-9


TABLES = {
    "by index": lambda self, x: self.w[x],
    "from the end": lambda self, x: self.w[x - 9],
    "index_select": lambda self, x: self.w.index_select(0, x.flatten()).view(len(x), -1, 4),
    "one-hot": lambda self, x: functional.one_hot(x, 9).to(self.w) @ self.w,
}


@pytest.mark.parametrize("name", TABLES)
def test_rows_that_are_looked_up_without_a_layer_are_an_embedding(name: str) -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        return self.layer(TABLES[name](self, x).tanh())

    made = problem(Spec(lambda: Wired(wiring, w=drawn(9, 4), layer=nn.Linear(4, 3)), (5,), entries=9))
    engine = made.engine()
    check(made, engine)
    assert engine.is_batched and not engine.materialised and engine.physical_batch > 1


DEPTHWISE = {
    "plain": nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "strides, dilation": nn.Conv2d(4, 4, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2), groups=4),
    "several kernels a channel": nn.Conv2d(4, 8, 3, stride=2, groups=4),
    "one place": nn.Conv2d(4, 4, 7, groups=4),
}


@pytest.mark.parametrize("name", DEPTHWISE)
def test_kernels_of_one_channel_each(name: str) -> None:
    layers = nn.Sequential(nn.Conv2d(2, 4, 1), DEPTHWISE[name], nn.Flatten())
    made = problem(Spec(lambda: layers, (2, 7, 7)))
    check(made)


def test_kernels_of_one_channel_count_a_record_alike_in_any_company() -> None:
    made = problem(
        Spec(lambda: nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.Flatten()), (6, 9, 9)), torch.float32
    )
    engine = made.engine()
    draw = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(150, 6, 9, 9, generator=draw), torch.arange(150) % 3
    together = engine.norms(made.parameters, inputs, labels, L2(1.0))
    for start in (0, 7, 93):
        some = slice(start, start + 50)
        assert torch.equal(engine.norms(made.parameters, inputs[some], labels[some], L2(1.0)), together[some])


def test_many_small_parameters_are_measured_and_added_together() -> None:
    made = problem(Spec(lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (5, 3)))
    engine = made.engine()
    assert naive.relative(rows(made, engine), made.gradients) < 1e-10
    bad = made.inputs.clone()
    bad[2] = float("nan")
    kept = [i for i in range(len(bad)) if i != 2]
    expected = naive.contributions(made.model, made.gradients[kept], L2(0.5)).sum(dim=0)
    assert naive.relative(engine.clipped_sum(made.parameters, bad, made.labels, L2(0.5)), expected) < 1e-9

"""Settings and patches of PyTorch: what they change while passes run, and that nothing is left of them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.gradients import L2
from algorithms.gradients.patches import in_full_precision, without_shortcuts
from tests.support.gradients.problems import BRIEF, SMALL, Spec, Wired, check, problem

BACKENDS: Any = torch.backends
PRODUCTS = BACKENDS.mkldnn.matmul
OF_PRODUCTS = [
    *((BACKENDS.mkldnn, name) for name in ("matmul", "conv", "rnn")),
    *((BACKENDS.cuda, "matmul"), (BACKENDS.cudnn, "conv"), (BACKENDS.cudnn, "rnn")),
]


@pytest.fixture
def few_bits() -> Iterator[None]:
    """Products of fewer bits are allowed, as by the person's own program."""
    PRODUCTS.fp32_precision = "bf16"
    yield
    PRODUCTS.fp32_precision = "none"


@pytest.mark.usefixtures("few_bits")
def test_products_of_fewer_bits_are_off_during_a_pass_and_then_as_before() -> None:
    seen = []

    def forward(self: Wired, x: Tensor) -> Tensor:
        seen.append((PRODUCTS.fp32_precision, torch.backends.cudnn.allow_tf32))
        return self.layer(x)

    made = problem(Spec(lambda: Wired(forward, layer=nn.Linear(4, 2)), (4,)))
    engine = made.engine()
    seen.clear()
    engine.clipped_sum(*made.arguments, L2(1.0))
    assert seen == [("ieee", False)] * len(seen) and seen
    assert PRODUCTS.fp32_precision == "bf16"
    with in_full_precision():
        assert PRODUCTS.fp32_precision == "ieee"


@pytest.mark.usefixtures("few_bits")
def test_products_of_fewer_bits_are_off_until_the_last_of_several_passes_has_ended() -> None:
    """Trials of a search run in threads, and the settings are those of the process."""
    one, other = in_full_precision(), in_full_precision()
    for enters in (one, other):
        enters.__enter__()
    one.__exit__(None, None, None)
    assert PRODUCTS.fp32_precision == "ieee"
    other.__exit__(None, None, None)
    assert PRODUCTS.fp32_precision == "bf16"


def test_a_precision_for_all_products_is_off_too() -> None:
    backends: Any = torch.backends
    kinds = [getattr(part, name) for part, name in OF_PRODUCTS if hasattr(part, name)]
    before = [kind.fp32_precision for kind in kinds]
    backends.fp32_precision = "tf32"
    try:
        with in_full_precision():
            assert PRODUCTS.fp32_precision == "ieee"
    finally:
        backends.fp32_precision = "none"
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="PyTorch sets TF32 for convolutions on a GPU")
def test_passes_change_no_setting_where_all_products_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """To set and restore them takes as long as a small layer."""
    changed: list[object] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", changed.append)
    made = problem(Spec(lambda: nn.Linear(4, 2), (4,)))
    engine = made.engine()
    engine.clipped_sum(*made.arguments, L2(1.0))
    assert not changed


@pytest.mark.parametrize(("centres", "is_first"), [(3, True), (40, True), (3, False)])
def test_distances_of_rows_take_many_records_a_pass(centres: int, *, is_first: bool) -> None:
    """PyTorch computes distances to 25 points at most in another way if there are more than 25 rows."""

    def forward(self: Wired, x: Tensor) -> Tensor:
        distances = torch.cdist(x, self.w) if is_first else torch.cdist(self.w, x).T
        return self.layer(distances)

    centre = torch.randn(centres, 4, generator=torch.Generator().manual_seed(3))
    spec = Spec(lambda: Wired(forward, w=nn.Parameter(centre.clone()), layer=nn.Linear(centres, 2)), (4,))
    made = problem(spec)
    engine = made.engine(physical_batch=SMALL, limits=BRIEF)
    assert engine.is_batched and engine.physical_batch == SMALL
    check(made, engine)


def test_products_of_several_factors_take_many_records_a_pass() -> None:
    """Which factors are multiplied first would else follow from the number of records, too."""

    def forward(self: Wired, x: Tensor) -> Tensor:
        return torch.einsum("bi,bj,ip,jq,pqo->bo", x, x, self.left, self.right, self.core)

    draw = torch.Generator().manual_seed(3)
    shapes = {"left": (4, 8), "right": (4, 8), "core": (8, 8, 2)}
    starts = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    made = problem(
        Spec(lambda: Wired(forward, **{name: nn.Parameter(starts[name].clone()) for name in starts}), (4,))
    )
    engine = made.engine(physical_batch=SMALL, limits=BRIEF)
    assert engine.is_batched and engine.physical_batch == SMALL
    check(made, engine)


def test_distances_are_outside_of_passes_as_they_were() -> None:
    rows = torch.full((2, 3), 1e3), torch.full((2, 3), 1e3) + 1e-3  # which products of rows cannot tell apart
    before = torch.cdist(*rows)
    with without_shortcuts():
        assert not torch.equal(torch.cdist(*rows), before)
        sequences = tuple(part.expand(5, 2, 3) for part in rows)
        assert torch.equal(torch.cdist(*sequences)[0], before)
    assert torch.equal(torch.cdist(*rows), before)

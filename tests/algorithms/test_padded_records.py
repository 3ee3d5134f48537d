"""Texts and series with padding: made-up records are ones that can occur, and records of padding alone are refused."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from algorithms import DPSGD, NonPrivate, OptimizerConfig, fit
from tests.support.costs import costs_once
from tests.support.engines import engines_once
from tests.support.refusals import refused

__all__ = ["costs_once", "engines_once"]

N, LENGTH, ENTRIES, CLASSES = 12, 5, 20, 3
DRAW = np.random.default_rng(0)
LENGTHS = DRAW.integers(1, LENGTH + 1, N)
THERE = np.arange(LENGTH) < LENGTHS[:, None]
IDS = np.where(THERE, DRAW.integers(2, ENTRIES, (N, LENGTH)), 0)
SERIES = DRAW.normal(size=(N, LENGTH, 4)).astype(np.float32) * THERE[:, :, None]
Y = DRAW.integers(0, CLASSES, N)


class Packed(nn.Module):
    """Packs what is there by lengths that it counts, unless they are given."""

    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        self.padding, self.table = padding, nn.Embedding(ENTRIES, 4, padding_idx=padding)
        self.over, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        counted = (ids != self.padding).sum(1) if lengths is None else lengths
        return self.packed(self.table(ids), counted)

    def packed(self, steps: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(steps, lengths.cpu(), batch_first=True, enforce_sorted=False)
        found: Tensor = self.head(self.over(packed)[1][0])
        return found


class OfSeries(Packed):
    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.packed(ids, (ids != 0).any(-1).sum(1))


class Clamped(Packed):
    def packed(self, steps: Tensor, lengths: Tensor) -> Tensor:
        return super().packed(steps, lengths.clamp(min=1))


class Last(Packed):
    """Looks the last state up by its place."""

    def packed(self, steps: Tensor, lengths: Tensor) -> Tensor:
        states = self.over(steps)[0]
        last = states.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, states.shape[2]))
        found: Tensor = self.head(last[:, 0])
        return found


class Encoded(nn.Module):
    """An encoder, which packs records by their mask in evaluation mode where no gradients are asked for."""

    def __init__(self, *, is_frozen: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(ENTRIES, 4, padding_idx=0), nn.Linear(4, CLASSES)
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.over = nn.TransformerEncoder(layer, 1).requires_grad_(not is_frozen)
        self.table.requires_grad_(not is_frozen)

    def forward(self, ids: Tensor) -> Tensor:
        over = self.over(self.table(ids), src_key_padding_mask=ids == 0)
        found: Tensor = self.head(over[:, 0])
        return found


def train(model: nn.Module, X: Any, *, y: Any = Y, **changes: Any) -> nn.Module:
    method = DPSGD(steps=2, expected_batch_size=4)
    return fit(
        model, "cross_entropy", X, y, **({"method": method, "epsilon": 3, "delta": 1e-2} | changes)
    ).model


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


TAKEN: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "lengths that are counted": (Packed, IDS),
    "lengths that are given": (Packed, {"ids": IDS, "lengths": LENGTHS}),
    "another padding than 0": (lambda: Packed(1), np.where(THERE, IDS, 1)),
    "series": (OfSeries, SERIES),
    "the last state by its place": (Last, IDS),
    "an encoder": (lambda: Encoded().eval(), IDS),
    "a frozen encoder": (lambda: Encoded(is_frozen=True).eval(), IDS),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("name", TAKEN)
def test_a_plain_step_over_padded_records_is_that_of_torch(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all records at once: a model that is differentiated record by record would be logged."""
    make, X = TAKEN[name]
    model, rate = seeded(make), 0.5
    method = NonPrivate(steps=1, expected_batch_size=N, update=OptimizerConfig(learning_rate=rate))
    with caplog.at_level(logging.WARNING, logger="algorithms"):
        trained = train(model, X, method=method, public=True, noise="seeded")
    assert not caplog.records
    given = {key: torch.from_numpy(part) for key, part in (X if isinstance(X, dict) else {"ids": X}).items()}
    loss = nn.functional.cross_entropy(model(**given), torch.from_numpy(Y))
    own = [part for part in model.parameters() if part.requires_grad]
    moved = [part for part in trained.parameters() if part.requires_grad]
    for before, after, gradient in zip(
        own, moved, torch.autograd.grad(loss, own, materialize_grads=True), strict=True
    ):
        torch.testing.assert_close(after, before - rate * gradient, rtol=1e-4, atol=1e-6)


def test_people_with_several_padded_rows_are_taken() -> None:
    people = np.arange(N) // 2
    make, X = TAKEN["lengths that are given"]
    train(seeded(make), X, people=people, per_person=2, delta=1e-3)


@pytest.mark.parametrize("name", ["X", "lengths"])
def test_a_record_of_padding_alone_is_refused_with_what_takes_it(name: str) -> None:
    empty = IDS * (np.arange(N) != 3)[:, None]
    X: Any = empty if name == "X" else {"ids": IDS, "lengths": LENGTHS * (np.arange(N) != 3)}
    with refused(rf"^{name} holds records of nothing but 0, .*leave them out, .*lengths\.clamp\(min=1\)"):
        train(seeded(Packed), X)


@pytest.mark.parametrize("make", [Clamped, lambda: Encoded().eval()])
def test_a_record_of_padding_alone_is_taken_as_the_refusal_advises(make: Callable[[], nn.Module]) -> None:
    train(seeded(make), IDS * (np.arange(N) != 3)[:, None])


@pytest.mark.parametrize("value", [True, False])
def test_settings_of_torch_are_restored(value: bool) -> None:
    packs = torch.backends.mha.get_fastpath_enabled()
    torch.distributions.Distribution.set_default_validate_args(value)
    try:
        train(seeded(Encoded).eval(), IDS)
        assert torch.backends.mha.get_fastpath_enabled() is packs
        with pytest.raises(ValueError, match="invalid values") if value else nullcontext():
            torch.distributions.Normal(0.0, -1.0)
    finally:
        torch.distributions.Distribution.set_default_validate_args(__debug__)  # as PyTorch has it

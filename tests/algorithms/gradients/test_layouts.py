"""Records that are not first, that are folded into other dimensions, or that are taken another way each time."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from algorithms.gradients.grad_sample_recorder import Layout, layout_of
from tests.algorithms.gradients.zoo import SMALL, Spec, Wired, check, problem


def _time_first(self: Wired, inputs: Tensor) -> Tensor:
    return self.last(torch.tanh(self.norm(self.layer(inputs.transpose(0, 1))))).sum(dim=0)


def _folded(self: Wired, inputs: Tensor) -> Tensor:
    """Records first, then time, in one dimension."""
    batch, length, width = inputs.shape
    hidden = torch.tanh(self.norm(self.layer(inputs.reshape(-1, width))))
    return self.last(hidden).view(batch, length, -1).sum(dim=1)


def _folded_by_time(self: Wired, inputs: Tensor) -> Tensor:
    """Time first, then records, in one dimension, where they lie far apart."""
    batch, length, width = inputs.shape
    hidden = torch.tanh(self.norm(self.layer(inputs.transpose(0, 1).reshape(-1, width))))
    return self.last(hidden).view(length, batch, -1).sum(dim=0)


def _folded_behind(self: Wired, inputs: Tensor) -> Tensor:
    """Records, then time, in the second dimension; a matrix for each index of the first."""
    both = torch.stack([inputs, -inputs]).flatten(1, 2)
    mixed = torch.tanh(torch.bmm(both, self.table.weight[:8].view(2, 4, 4)) + self.first)
    return self.last(self.norm(self.layer(mixed))).view(2, *inputs.shape[:2], -1).sum(dim=(0, 2))


def _last(self: Wired, inputs: Tensor) -> Tensor:
    """Records last."""
    hidden = torch.tanh(self.norm(self.layer(inputs.movedim(0, -2))))
    return self.last(hidden).movedim(-2, 0).sum(dim=1)


def _twice(self: Wired, inputs: Tensor) -> Tensor:
    """All records, and all of them upside down, in one dimension."""
    both = torch.cat([inputs, -inputs]).sum(dim=1)
    hidden = torch.tanh(self.norm(self.layer(both)))
    return self.last(hidden[: len(inputs)] + 2.0 * hidden[len(inputs) :])


def _time_steps(self: Wired, inputs: Tensor) -> Tensor:
    """One call for each time."""
    steps = [torch.tanh(self.norm(self.layer(step))) for step in inputs.unbind(dim=1)]
    return self.last(torch.stack(steps)).sum(dim=0)


def _one_after_the_other(self: Wired, inputs: Tensor) -> Tensor:
    """One call for each record."""
    return torch.stack([_folded(self, inputs[i : i + 1])[0] for i in range(len(inputs))])


def _expanded(self: Wired, inputs: Tensor) -> Tensor:
    """A place in front of each record whose value is trained: the size of the batch is an argument."""
    first = self.first.expand(len(inputs), 1, -1)
    return self.last(torch.tanh(self.norm(self.layer(torch.cat([first, inputs], dim=1))))).sum(dim=1)


def _repeated(self: Wired, inputs: Tensor) -> Tensor:
    first = self.first[None].repeat(len(inputs), 1, 1)
    return self.last(torch.tanh(self.norm(self.layer(inputs + first)))).sum(dim=1)


def _indexed(self: Wired, inputs: Tensor) -> Tensor:
    """Positions of a table that is longer than the records."""
    places = torch.arange(inputs.shape[1]).expand(len(inputs), -1)
    return self.last(torch.tanh(self.norm(self.layer(inputs + self.table(places))))).sum(dim=1)


def _checkpointed(self: Wired, inputs: Tensor) -> Tensor:
    return self.last(torch.tanh(self.norm(checkpoint(self.layer, inputs, use_reentrant=False)))).sum(dim=1)


def _compared(self: Wired, inputs: Tensor) -> Tensor:
    """Records with others in one product, whose sum is of each record alone."""
    hidden = self.norm(self.layer(inputs))
    return self.last(torch.einsum("btf,btg->bfg", hidden, hidden).flatten(1)[:, :5])


WIRINGS = {
    "time first": _time_first,
    "folded": _folded,
    "folded by time": _folded_by_time,
    "folded behind": _folded_behind,
    "records last": _last,
    "all twice": _twice,
    "by time": _time_steps,
    "by record": _one_after_the_other,
    "with a trained place": _expanded,
    "with trained places": _repeated,
    "with positions": _indexed,
    "with checkpoints": _checkpointed,
    "with a product": _compared,
}


def _spec(wiring: Callable[..., Tensor], length: int) -> Spec:
    return Spec(
        lambda: Wired(
            wiring,
            layer=nn.Linear(4, 5),
            norm=nn.LayerNorm(5),
            last=nn.Linear(5, 2),
            first=nn.Parameter(torch.randn(1, 4)),
            table=nn.Embedding(9, 4),
        ),
        (length, 4),
    )


@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("name", WIRINGS)
def test_records_are_found_wherever_they_are(name: str, length: int) -> None:
    """Also where there are as many places as records, which no shape tells apart."""
    made = problem(_spec(WIRINGS[name], length))
    engine = made.engine(physical_batch=SMALL)
    assert engine.is_batched == (name != "by record")
    for count in (1, 3, 5, 6):
        check(made.some(slice(0, count)), engine)


IMAGES = {
    "frames folded by time": Spec(
        lambda: Wired(
            lambda self, x: self.norm(self.layer(x.transpose(0, 1).flatten(0, 1))).view(3, len(x), -1).sum(0),
            layer=nn.Conv2d(2, 4, 3),
            norm=nn.GroupNorm(2, 4),
        ),
        (3, 2, 4, 4),
    ),
    "channels last": Spec(
        lambda: Wired(
            lambda self, x: self.layer(x.contiguous(memory_format=torch.channels_last)),
            layer=nn.Conv2d(2, 3, 3, padding=1),
        ),
        (2, 5, 5),
    ),
    "turned": Spec(
        lambda: Wired(lambda self, x: self.layer(x.mT).mT, layer=nn.Conv2d(2, 3, (2, 3))), (2, 4, 5)
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_found_wherever_they_are(name: str) -> None:
    made = problem(IMAGES[name])
    engine = made.engine()
    for count in (1, 3, 4):
        check(made.some(slice(0, count)), engine)


@pytest.mark.parametrize(
    ("few", "more", "expected"),
    [
        ((3, 4), (5, 4), Layout(0)),
        ((4, 3), (4, 5), Layout(1)),
        ((3, 3), (5, 3), Layout(0)),
        ((12, 2), (20, 2), Layout(0, 4)),
        ((3, 5), (5, 5), Layout(0)),
        ((4, 2), (4, 2), None),
        ((3, 3), (5, 5), None),
        ((4, 2), (6, 2), None),
        ((3,), (5, 1), None),
        ((), (), None),
    ],
)
def test_a_layout_follows_from_two_shapes(
    few: tuple[int, ...], more: tuple[int, ...], expected: Layout | None
) -> None:
    assert layout_of(few, more, 3, 5) == expected


@pytest.mark.parametrize("layout", [Layout(0), Layout(1), Layout(2), Layout(0, 2), Layout(1, 2)])
def test_a_layout_takes_records_apart_and_puts_one_back(layout: Layout) -> None:
    ones = [torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    parts = [
        one.movedim(0, layout.dimension)[(slice(None),) * layout.dimension + (slice(layout.folded),)]
        for one in ones
    ]
    whole = torch.cat(parts, dim=layout.dimension)
    found = layout.by_record(whole, 4)
    assert len(found) == 4
    for one, record in zip(parts, found, strict=True):
        assert torch.equal(layout.alone(record), one)
        assert len(record) == layout.folded or layout.folded == 1

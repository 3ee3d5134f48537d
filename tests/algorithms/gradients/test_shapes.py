"""Random shapes against the loop over single records, batches of none and of one included."""

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from algorithms.gradients import Clipping, Engine, PerLayer
from tests.algorithms.gradients import naive
from tests.algorithms.gradients.zoo import Problem, Spec, Wired, problem

COUNTS = st.sampled_from([0, 1, 2, 3, 5])
SEEDS = st.integers(0, 2**31)


def check(spec: Spec, count: int, seed: int) -> None:
    """Sums and norms by every clipping, and at a physical batch of two."""
    made = problem(spec, count=count, seed=seed)
    engine = made.engine(physical_batch=2)
    for clipping in naive.clippings(made.model, made.gradients).values():
        expected = naive.contributions(made.model, made.gradients, clipping).sum(dim=0)
        found = engine.clipped_sum(*made.arguments, clipping)
        assert float((found - expected).norm()) <= 1e-10 * (1.0 + float(expected.norm()))
        _check_norms(made, engine, clipping)


def _check_norms(made: Problem, engine: Engine, clipping: Clipping) -> None:
    norms = naive.norms(made.model, made.gradients, clipping)
    found = engine.norms(*made.arguments, clipping)
    assert len(found) == len(made.labels)
    if len(made.labels):
        assert found.shape == norms.shape
        assert found.dim() == (2 if isinstance(clipping, PerLayer) else 1)
        assert float((found - norms).norm()) <= 1e-10 * (1.0 + float(norms.norm()))


@given(data=st.data(), count=COUNTS, seed=SEEDS)
@settings(deadline=None, max_examples=25)
def test_convolutions(data: st.DataObject, count: int, seed: int) -> None:
    """Any kernel, stride, padding, dilation and groups that fit, in one and two dimensions."""
    dimensions = data.draw(st.sampled_from([1, 2]))
    layer: Callable[..., nn.Module] = {1: nn.Conv1d, 2: nn.Conv2d}[dimensions]

    def each(largest: int, least: int = 1) -> tuple[int, ...]:
        return tuple(data.draw(st.integers(least, largest)) for _ in range(dimensions))

    kernel, stride, dilation, padding = each(3), each(3), each(2), each(2, 0)
    spare, groups = each(5, 0), data.draw(st.integers(1, 3))
    channels, outputs = (groups * data.draw(st.integers(1, 2)) for _ in range(2))
    size = [
        max(1, d * (k - 1) + 1 - 2 * p) + s
        for k, d, p, s in zip(kernel, dilation, padding, spare, strict=True)
    ]
    mode = data.draw(st.sampled_from(["zeros", "replicate"]))
    bias = data.draw(st.booleans())
    check(
        Spec(
            lambda: layer(channels, outputs, kernel, stride, padding, dilation, groups, bias, mode),
            (channels, *size),
        ),
        count,
        seed,
    )


@given(
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    heads=st.integers(1, 3),
    width=st.integers(1, 2),
    first=st.booleans(),
    count=COUNTS,
    seed=SEEDS,
)
@settings(deadline=None, max_examples=15)
def test_attention(
    lengths: tuple[int, int], heads: int, width: int, first: bool, count: int, seed: int
) -> None:
    def wiring(self: Wired, inputs: torch.Tensor) -> torch.Tensor:
        parts = torch.split(inputs, lengths, dim=1)
        targets, sources = parts if first else [part.transpose(0, 1) for part in parts]
        output: torch.Tensor = self.layer(targets, sources, sources)[0]
        return output if first else output.transpose(0, 1)

    def make() -> nn.Module:
        return Wired(wiring, layer=nn.MultiheadAttention(heads * width, heads, batch_first=first))

    check(Spec(make, (sum(lengths), heads * width)), count, seed)

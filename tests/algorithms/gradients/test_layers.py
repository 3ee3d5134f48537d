"""Every layer, every way to share it, and random shapes of some, against a loop over single records."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from algorithms.gradients import L2, Clipping, Engine, PerLayer
from algorithms.gradients.model_inspection import InspectionLimits
from tests.support.gradients import naive
from tests.support.gradients.layers import EMBEDDING, LAYERS
from tests.support.gradients.networks import (
    AS_A_WHOLE,
    NETWORKS,
    OF_PARAMETERS,
    ON_TOKENS,
    REPEATS,
    SHARING,
    TYPICAL,
)
from tests.support.gradients.networks import SPECS as ALONE
from tests.support.gradients.problems import (
    BRIEF,
    Problem,
    Spec,
    Wired,
    cached_with_log,
    problem,
    rows,
)
from tests.support.soak import soak_but

BY_RULES = LAYERS | SHARING | OF_PARAMETERS
INNER = {f"{name}, inside": spec.after_a_layer() for name, spec in LAYERS.items() if name not in EMBEDDING}
"""Layers whose input has a gradient too, which takes all that they do alone."""
SPECS = INNER | {name: spec for name, spec in ALONE.items() if f"{name}, inside" not in INNER}
IN_SUITE = [name for name in SPECS if name.removesuffix(", inside") not in REPEATS]
IN_64_BITS = [(name, torch.float64, 1e-10) for name in SPECS]
IN_32_BITS = [(name, torch.float32, 1e-5) for name in dict.fromkeys((*TYPICAL, *ON_TOKENS, *NETWORKS))]
OF_PARTS = {"bilstm", "transformer", "embedding, padding", "decoder tied to the embedding"}
"""Whose parts are tried in 32 bits too, and which are as a whole in 64 bits."""
CHOSEN = [
    case
    for case in IN_64_BITS + IN_32_BITS
    if case[0].removesuffix(", inside") not in REPEATS
    and not (case[0] in OF_PARTS and case[1] == torch.float32)
]


IN_FULL = {
    *("linear, inside", "conv2d, inside", "linear, used on parts of different length", "parts of parts"),
    *("distances", "embedding, used again", "transform of each record"),
}
"""Inspected in full in 64 bits; the others briefly, which takes a fifth of the time."""


def cached(name: str, dtype: torch.dtype) -> tuple[Problem, Engine, list[str]]:
    """The problem of a name, with its engine and what was logged."""
    is_full = dtype == torch.float64 and name in IN_FULL
    return cached_with_log((ALONE | SPECS)[name], dtype, InspectionLimits() if is_full else BRIEF)


@pytest.mark.parametrize(("name", "dtype", "tolerance"), soak_but(CHOSEN, IN_64_BITS + IN_32_BITS))
def test_norms_and_sums_are_those_of_the_loop(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """By every clipping, and of batches of one, whose shapes are easily mistaken; relative to the sum.

    The pass that the engine makes for each is the same for all.
    """
    made, engine, _ = cached(name, dtype)
    by_all = name.removesuffix(", inside") in TYPICAL or name in NETWORKS
    one_pass = engine.contributions(*made.arguments)
    for kind, clipping in naive.clippings(made.model, made.gradients).items():
        if not (by_all or kind in ("L2", "L1", "PerLayer", "Affine")):
            continue  # the others are these with other factors
        each = naive.contributions(made.model, made.gradients, clipping)
        by_engine = kind == "L2"
        found = engine.clipped_sum(*made.arguments, clipping) if by_engine else one_pass.clipped_sum(clipping)
        assert found.dtype == torch.float64
        assert naive.relative(found, each.sum(dim=0)) < tolerance, kind
        norms = naive.norms(made.model, made.gradients, clipping)
        measured = engine.norms(*made.arguments, clipping) if by_engine else one_pass.norms(clipping)
        assert naive.relative(measured, norms) < tolerance, kind
        if kind == "L2":
            for i in (0, 3):
                one = engine.clipped_sum(*made.take([i]).arguments, clipping)
                assert naive.relative(one, each[i]) < tolerance


@pytest.mark.parametrize("name", soak_but(IN_SUITE, SPECS))
def test_gradients_are_told_apart_by_record(name: str) -> None:
    """A sum with one weight for each record is another sum for each way in which records could be mistaken."""
    made, engine, _ = cached(name, torch.float64)
    weights = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = engine.contributions(*made.arguments).weighted_sum(weights)
    assert naive.relative(found, weights @ made.gradients) < 1e-10


@pytest.mark.parametrize("name", soak_but(IN_SUITE, SPECS))
def test_what_is_taken_record_by_record_is_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """When the engine is made, and never again."""
    made, engine, said = cached(name, torch.float64)
    caplog.clear()
    engine.clipped_sum(*made.arguments, L2(1.0))
    assert not caplog.records
    if name.removesuffix(", inside") in BY_RULES or name in NETWORKS:
        assert not said
    else:
        assert len(said) == 1
        part = "the model made up is" if name in AS_A_WHOLE else "in the model made up these are"
        assert f"{part} differentiated record by record: " in said[0]


@pytest.mark.soak
@pytest.mark.parametrize("name", SPECS)
def test_a_full_inspection_takes_a_model_as_a_brief_one_does(name: str) -> None:
    made, engine, _ = cached_with_log(SPECS[name], torch.float64, InspectionLimits())
    brief = cached_with_log(SPECS[name], torch.float64, BRIEF)[1]
    assert naive.relative(rows(made, engine), made.gradients) < 1e-10
    assert engine.operations_without_rule == brief.operations_without_rule


COUNTS = st.sampled_from([0, 1, 2, 3, 5])
SEEDS = st.integers(0, 2**31)


def check(spec: Spec, count: int, seed: int) -> Engine:
    """Sums and norms by every clipping, and at a physical batch of two, by the engine that is returned."""
    made = problem(spec, count=count, seed=seed)
    engine = made.engine(physical_batch=2, limits=BRIEF)
    for clipping in naive.clippings(made.model, made.gradients).values():
        expected = naive.contributions(made.model, made.gradients, clipping).sum(dim=0)
        found = engine.clipped_sum(*made.arguments, clipping)
        assert float((found - expected).norm()) <= 1e-10 * (1.0 + float(expected.norm()))
        _check_norms(made, engine, clipping)
    return engine


def _check_norms(made: Problem, engine: Engine, clipping: Clipping) -> None:
    norms = naive.norms(made.model, made.gradients, clipping)
    found = engine.norms(*made.arguments, clipping)
    assert len(found) == len(made.labels)
    if len(made.labels):
        assert found.shape == norms.shape
        assert found.dim() == (2 if isinstance(clipping, PerLayer) else 1)
        assert float((found - norms).norm()) <= 1e-10 * (1.0 + float(norms.norm()))


@given(data=st.data(), count=COUNTS, seed=SEEDS)
@settings(deadline=None, max_examples=8)
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
    own=st.booleans(),
    zero=st.booleans(),
    masked=st.booleans(),
    count=COUNTS,
    seed=SEEDS,
)
@settings(deadline=None, max_examples=8)
def test_attention(
    lengths: tuple[int, int],
    heads: int,
    width: int,
    *,
    first: bool,
    own: bool,
    zero: bool,
    masked: bool,
    count: int,
    seed: int,
) -> None:
    """With entries of its own beside the sources, and masks that hide some of these."""

    def wiring(self: Wired, inputs: torch.Tensor) -> torch.Tensor:
        parts = torch.split(inputs, lengths, dim=1)
        targets, sources = parts if first else [part.transpose(0, 1) for part in parts]
        hidden = (torch.arange(lengths[1]) > 1).expand(len(inputs), -1) if masked else None
        output: torch.Tensor = self.layer(targets, sources, sources, key_padding_mask=hidden)[0]
        return output if first else output.transpose(0, 1)

    def make() -> nn.Module:
        layer = nn.MultiheadAttention(
            heads * width, heads, batch_first=first, add_bias_kv=own, add_zero_attn=zero
        )
        return Wired(wiring, layer=layer)

    engine = check(Spec(make, (sum(lengths), heads * width)), count, seed)
    assert engine.is_batched and not engine.operations_without_rule

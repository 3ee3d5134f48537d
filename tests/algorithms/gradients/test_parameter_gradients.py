"""No contribution is above its bound, whatever rounding does."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorithms.gradients import L1, L2, Affine, Clipping, Normalised, PerLayer, Unclipped, clip_and_sum
from algorithms.gradients.block_gradients import BlockGrad
from algorithms.gradients.op_tracer import MemoryTracer
from algorithms.gradients.parameter_gradients import BiasGrad, DenseGrad, LinearGrad, materialize
from algorithms.gradients.rules.convolution import ConvGrad
from algorithms.gradients.table_gradients import EmbeddingGrad
from algorithms.models import Model
from tests.support.gradients import naive
from tests.support.gradients.forms import (
    FORMS,
    NEAR,
    absolute,
    contributions,
    drawn,
    excess,
    patches,
    square,
    written,
)
from tests.support.gradients.layers import LAYERS
from tests.support.gradients.networks import ON_TOKENS, REPEATS, SPECS, TYPICAL
from tests.support.gradients.problems import cached_problem, problem
from tests.support.soak import soak_but


@pytest.mark.parametrize("lies", product(("records", "blocks"), repeat=2))
def test_norms_of_blocks_belong_to_their_records_whichever_comes_first_in_memory(
    lies: tuple[str, str],
) -> None:
    sides = [torch.randn(7, 5, 1, width, dtype=torch.float64) for width in (3, 4)]
    products = torch.einsum("nbti,nbto->nboi", *sides)
    in_memory = [
        side.transpose(0, 1).contiguous().transpose(0, 1) if first == "blocks" else side
        for side, first in zip(sides, lies, strict=True)
    ]
    found = BlockGrad(*in_memory).square_norms()
    torch.testing.assert_close(found, products.square().sum(dim=(1, 2, 3)))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("count", soak_but([3], [3, 10]))
def test_a_single_gradient_is_never_above_its_bound(name: str, count: int) -> None:
    for gradient in drawn(name, count):
        exact = written(gradient)[0]
        for near in NEAR:
            assert excess(gradient, L2(near * float(exact.norm()))) <= 1.0
            assert excess(gradient, L1(near * float(exact.abs().sum()))) <= 1.0
        assert excess(gradient, PerLayer((float(exact.norm()),))) <= 1.0  # of one layer, as by L2
        assert excess(gradient, Normalised(1.0)) <= 1.0
        assert excess(gradient, Normalised(1.0, stability=1e-3)) <= 1.0


@pytest.mark.parametrize("name", FORMS)
def test_a_gradient_well_within_its_bound_is_left_as_it_is(name: str) -> None:
    """What rounding can add is room enough, and no more than a few parts in a million of what is summed."""
    for gradient in drawn(name):
        exact = written(gradient)[0]
        sizes = float(written(absolute(gradient))[0].norm())
        found = contributions(gradient).clipped_sum(L2(1.001 * float(exact.norm()) + 1e-4 * sizes))
        assert float((found - exact).norm()) <= 1e-5 * sizes


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    ("decades", "count"), soak_but([(0.0, 1), (6.0, 1)], [(d, c) for d in (0.0, 3.0, 6.0) for c in (1, 2)])
)
def test_a_shifted_gradient_is_never_above_its_bound(name: str, decades: float, count: int) -> None:
    """Shifts up to the gradient itself, whose difference rounding is then all of; scales far apart."""
    for seed, gradient in enumerate(drawn(name, count)):
        exact, draw = written(gradient)[0], torch.Generator().manual_seed(seed)
        scale = 10.0 ** (decades * (torch.rand(exact.shape, generator=draw) - 0.5))
        for part in (1.0, 1e-2, 1e-4, 1e-6, 1e-8, 0.0):
            shift = (exact * (1 + part * torch.randn(exact.shape, generator=draw))).float()
            for bound in _around_distance(exact, shift, scale):
                assert excess(gradient, Affine(bound, shift, scale)) <= 1.0


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("count", soak_but([1], [1, 2]))
def test_a_shifted_gradient_in_64_bits_is_never_above_its_bound(name: str, count: int) -> None:
    for seed, gradient in enumerate(each.double() for each in drawn(name, count)):
        exact, draw = written(gradient)[0], torch.Generator().manual_seed(seed)
        scale = torch.exp(torch.rand(exact.shape, generator=draw).double())
        for part in (1.0, 1e-6, 1e-9, 1e-12, 1e-14, 1e-16):
            shift = exact * (1 + part * torch.randn(exact.shape, generator=draw))
            for bound in _around_distance(exact, shift, scale):
                assert excess(gradient, Affine(bound, shift, scale), torch.float64) <= 1.0


def test_a_distance_of_errors_too_small_to_square_is_not_taken_for_zero() -> None:
    """Errors whose squares a float cannot hold, under scales that make them count."""
    gradient = LinearGrad(torch.ones(1, 1, 3), torch.full((1, 1, 2), 1e-23))
    shift, scale = torch.zeros(6), torch.full((6,), 1e-15)
    assert excess(gradient, Affine(1e-9, shift, scale)) <= 1.0


def test_what_was_measured_is_what_is_summed_when_records_are_taken() -> None:
    """Sums over a sequence that cancel: what rounding leaves of them is another number in another order."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        half, back = torch.randn(2, 40, 3, generator=draw), torch.randn(2, 40, 2, generator=draw)
        products = LinearGrad(torch.cat([half, half], dim=1), torch.cat([back, -back], dim=1))
        for gradient in (
            products,
            BiasGrad(LinearGrad(products.inputs, products.grad_outputs.mT.contiguous().mT)),
        ):
            found, clipping = contributions(gradient), Normalised(1e-9)
            measured = found.norms(clipping)
            for place in (0, 1):
                taken = torch.tensor([place])
                added = found.take(taken).clipped_sum(clipping, measured[taken])
                assert float(added.norm()) <= clipping.norm


def test_one_large_term_and_many_that_it_swallows_are_within_the_room() -> None:
    """The worst that a running sum can do: each small term is lost as a whole, and all in one direction."""
    for small in (0.5, 0.7, 0.9, 1.0):
        for lead in (1, 2, 4):
            errors = torch.full((900,), (small * 2.0**-24) ** 0.5)
            errors[:lead] = 1.0
            gradient = LinearGrad(torch.ones(1, 1, 15), errors[None, None])
            shift, scale = (written(gradient)[0] * 1.2).float(), torch.ones(900 * 15)
            offset = float(shift.double().norm())
            distance = float((written(gradient)[0] - shift.double()).norm())
            for bound in (0.999 * distance, offset / 7.9):
                assert excess(gradient, Affine(bound, shift, scale)) <= 1.0


@pytest.mark.parametrize("count", [2, 4, 8])
def test_how_an_affine_clip_is_computed_does_not_depend_on_the_batch(count: int) -> None:
    """A choice by numbers whose last bits depend on the batch would let one record change the others' norms."""
    draw = torch.Generator().manual_seed(0)
    errors = torch.randn(1, 4096, generator=draw)
    scale, noise = torch.exp(0.3 * torch.randn(2, 4096, generator=draw)).unbind()
    for part in torch.logspace(-4, 0, 40).tolist():
        shift = (errors[0] * (1 + part * noise)).float()
        bound = _least(shift, scale) * 125
        whole, without = (
            contributions(BiasGrad(LinearGrad(torch.ones(n, 1, 1), errors.repeat(n, 1)[:, None])))
            .norms(Affine(bound, shift, scale))
            .clamp(min=bound)
            for n in (count, count - 1)
        )
        torch.testing.assert_close(whole[1:], without, rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("width", [1, 10, 128, 512, 4096])
@pytest.mark.parametrize("part", [3e-3, 4e-3, 1e-2, 4e-2])
def test_equal_terms_that_are_rounded_alike_do_not_shorten_a_distance(width: int, part: float) -> None:
    """As of a constant background: rounding does not average out, and what cancels leaves little else."""
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        constant, spread = (1.0 + torch.rand(2, generator=draw)).tolist()
        scale = torch.full((width,), spread)
        across = LinearGrad(torch.full((1, 1, width), constant), torch.ones(1, 1, 1))
        along = LinearGrad(torch.ones(1, 1, 1), torch.full((1, 1, width), constant))
        for gradient in (across, along, BiasGrad(along)):
            for shift in (
                torch.full((width,), constant * (1.0 + part)),
                torch.full((width,), constant * (1.0 - part)),
            ):
                distance = float(((constant - shift.double()) / scale.double()).norm())
                for bound in (distance, 0.7 * distance):
                    assert excess(gradient, Affine(bound, shift, scale)) <= 1.0


@pytest.mark.parametrize("offset", [1e1, 1e2, 999.0])
def test_a_far_shift_leaves_a_record_its_bound_among_many(offset: float) -> None:
    """A sum of gradients that are all near the shift is not rounded by the shift's size."""
    draw = torch.Generator().manual_seed(0)
    shift = 0.5 + torch.rand(10, generator=draw)
    shift /= shift.norm()
    scale = torch.full((10,), 1.0 / offset)
    ways = torch.randn(3000, 10, generator=draw)
    rows = shift + 0.5 * scale * ways / ways.norm(dim=1, keepdim=True)
    whole, without = (
        contributions(DenseGrad(each)).clipped_sum(Affine(1.0, shift, scale)) for each in (rows, rows[1:])
    )
    assert 0.1 < float((whole - without).norm()) < 0.6


@pytest.mark.parametrize(
    ("shift", "scale"), [(0.0, 1e-16), (0.0, 1e16), (1.0, 5e-4)], ids=["narrow", "wide", "far"]
)
def test_an_affine_map_that_rounding_would_be_felt_in_is_refused(shift: float, scale: float) -> None:
    with pytest.raises(
        ValueError, match="scale between 1e-15 and 1e\\+15, and the shift within 1000 times the norm 1"
    ):
        Affine(1.0, torch.full((3,), shift), torch.tensor([1.0, 1.0, scale]))


def _around_distance(gradient: Tensor, shift: Tensor, scale: Tensor) -> list[float]:
    """Bounds at, around and far from the distance of a gradient and its shift, that the shift may have."""
    distance = float(((gradient - shift.double()) / scale.double()).norm())
    least = _least(shift, scale)
    parts = (distance, distance * (1 + 1e-6), distance * (1 - 1e-6), 0.1 * distance, 1e-6, 1e3)
    return [max(bound, least) for bound in parts]


def _least(shift: Tensor, scale: Tensor) -> float:
    """The least norm that an affine clipping with this shift may have."""
    return max(1e-12, float((shift.double() / scale.double()).norm()) / 999)


@pytest.mark.parametrize(
    ("shift", "scale", "is_taken"),
    [
        (1999.0, 1.0, True),  # twice the norm, of which a thousand is the limit
        (2001.0, 1.0, False),
        (2001.0, 1.01, True),
        (0.0, 1e14, True),
        (0.0, 1e16, False),
        (0.0, 1e-14, True),
        (0.0, 1e-16, False),
        (float("nan"), 1.0, False),
        (0.0, float("inf"), False),
    ],
)
def test_a_shift_or_scale_that_magnifies_rounding_is_refused(
    shift: float, scale: float, is_taken: bool
) -> None:
    terms = torch.tensor([shift, 0.0]), torch.full((2,), scale)
    if is_taken:
        assert Affine(2.0, *terms).norm == 2.0
    else:
        with pytest.raises(ValueError, match="scale"):
            Affine(2.0, *terms)
    if shift > 0:
        shortened = Affine.within_reach(2.0, *terms).shift / scale
        assert float(shortened.norm()) == pytest.approx(min(1998.0, shift / scale))


@pytest.mark.parametrize("name", FORMS)
def test_many_of_the_same_record_stay_within_as_many_bounds(name: str) -> None:
    """Sums of many records are rounded too, always the same way where the records are the same."""
    gradient = FORMS[name](torch.Generator().manual_seed(0))
    many = contributions(gradient).take(torch.zeros(97, dtype=torch.int64))
    bound = 0.5 * float(written(gradient)[0].norm())
    for clipping in (L2(bound), PerLayer((bound,)), Normalised(bound)):
        assert float(many.clipped_sum(clipping).norm()) <= 97 * bound


WITH_OTHERS = {
    *("linear sequence, used again", "convolution, used again", "group norm, used again"),
    *("parts of a packed weight", "parts of a packed weight, without a sequence", "parts of parts"),
    *("attention to other inputs", "first layer frozen", "layer in the middle frozen", "bias frozen"),
    *("weight frozen", "attention, projections frozen", "attention, output frozen", "position looked up"),
    *("product with a matrix", "transposed weight", "transformer decoder layer", "low-rank adaptation"),
    *("linear, used on parts of different length", "linear, used again", "lstm, used again", "distances"),
    *("scale and shift", "position added"),
}
"""Networks whose gradients have the forms of those of others."""
IN_SUITE = [
    *(name for name in SPECS if not (name in LAYERS or name in REPEATS or name in WITH_OTHERS)),
    *(name for name in TYPICAL + ON_TOKENS if name in LAYERS),
    *(
        "conv1d, all settings",
        "conv2d, depthwise",
    ),
    *("transposed 2d, all settings", "prelu", "bags in records", "weighted bags", "group norm", "rms norm"),
    *("batch norm 1d, fixed", "lstm cell", "attention with padding"),
]
"""Models of every kind, and one layer of each form of gradient."""
OF_ANY_MODEL = [
    *((name, torch.float32) for name in SPECS),
    *((name, torch.bfloat16) for name in dict.fromkeys(TYPICAL + ON_TOKENS)),
]
IN_16_BITS = [
    *("linear", "linear, wide sequence", "conv2d", "conv2d, many places", "layer norm, sequence", "conv3d"),
    *("attention to itself", "einsum", "normalised weight", "embedding, padding", "cnn", "bilstm"),
]


def by_type(dtype: torch.dtype) -> list[str]:
    return IN_SUITE if dtype == torch.float32 else IN_16_BITS


@pytest.mark.parametrize(
    ("name", "dtype"),
    soak_but(
        [(name, dtype) for name, dtype in OF_ANY_MODEL if name in by_type(dtype)],
        OF_ANY_MODEL,
    ),
)
def test_a_record_of_any_model_is_never_above_its_bound(name: str, dtype: torch.dtype) -> None:
    """At, just above and just under its norm, as its whole gradient in the sum has it."""
    made, engine = cached_problem(SPECS[name], dtype)
    found = engine.contributions(*made.take([0]).arguments)
    whole = found.weighted_sum(torch.ones(1, dtype=torch.float64))
    for near in NEAR[:1] + NEAR[3:8:2]:
        for clipping in _around(made.model, whole, near):
            added = found.clipped_sum(clipping)
            assert all(size <= bound for size, bound in naive.measured(made.model, added, clipping))


@pytest.mark.parametrize("name", soak_but(IN_SUITE, SPECS))
def test_measured_norms_are_upper_bounds(name: str) -> None:
    """Of what the sum has for a record, in 32 bits: never below, and above by rounding alone."""
    made, engine = cached_problem(SPECS[name], torch.float32)
    found = engine.contributions(*made.arguments)
    rows = torch.stack([found.weighted_sum(one) for one in torch.eye(len(found.losses)).double()])
    for clipping in naive.clippings(made.model, made.gradients).values():
        exact = naive.norms(made.model, rows, clipping)
        norms = found.norms(clipping)
        assert norms.dtype == torch.float64
        assert (norms >= exact * (1 - 2e-6)).all()
        assert naive.relative(norms, exact) < 2e-5


def _around(model: Model, gradient: Tensor, near: float) -> list[Clipping]:
    """Every clipping, with bounds that are `near` times what this gradient measures."""
    d = torch.Generator().manual_seed(1)
    shift = (gradient * (1 + 5e-3 * torch.randn(gradient.shape, generator=d))).float()
    scale = torch.exp(4 * torch.rand(gradient.shape, generator=d) - 2)
    kinds: dict[str, Clipping] = {
        "L2": L2(1.0),
        "L1": L1(1.0),
        "PerLayer": PerLayer((1.0,)),
        "Affine": Affine(1e12, shift, scale),
        "Normalised": Normalised(1.0, stability=1e-3),
    }
    sizes = {kind: naive.norms(model, gradient[None], clipping)[0] for kind, clipping in kinds.items()}
    bounds = {kind: (near * size).clamp(1e-12, 1e12) for kind, size in sizes.items()}
    bounds["Affine"] = bounds["Affine"].clamp(min=_least(shift, scale))
    layers = PerLayer(tuple(bounds.pop("PerLayer").tolist()))
    return [layers, *(_bounded(kinds[kind], float(bound)) for kind, bound in bounds.items())]


def _bounded(clipping: Clipping, bound: float) -> Clipping:
    """The same clipping with another bound."""
    assert not isinstance(clipping, PerLayer | Unclipped)
    return replace(clipping, norm=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [1e-20, 1e-4, 1.0 - 1e-7, 1.0, 1.0 + 1e-7, 3.0, 1e4, 1e20])
def test_a_row_is_never_above_its_bound(norm: float, dtype: torch.dtype) -> None:
    direction = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    row = (direction / direction.norm() * norm).to(dtype)
    for bound in (near * float(row.double().norm()) for near in NEAR):
        if 1e-12 <= bound <= 1e12:
            assert float(clip_and_sum(row, L2(bound)).norm()) <= bound


@pytest.mark.parametrize(
    ("value", "dtype"), [*product((0.1, 1.0, 1 / 3, 1e-3), [torch.float32]), (5.3, torch.float64)]
)
def test_a_very_long_row_is_never_above_its_bound(value: float, dtype: torch.dtype) -> None:
    """A million equal squares are all rounded the same way, in PyTorch's own norms, too."""
    row = torch.full((1, 2**20 + 5), value, dtype=dtype)

    def length(values: Tensor) -> float:
        return math.sqrt(float(np.square(values.double().numpy()).sum()))  # by pairs

    for near in NEAR:
        bound = near * length(row)
        assert length(clip_and_sum(row, L2(bound))) <= bound


@pytest.mark.parametrize("value", [0.1, 1.0, 1 / 3, 1e-3])
def test_a_product_of_a_very_long_row_is_never_above_its_bound(value: float) -> None:
    gradient = LinearGrad(torch.full((1, 1, 2**20 + 5), value), torch.full((1, 1, 1), value))
    bound = 0.5 * float(written(gradient).norm())
    assert excess(gradient, L2(bound)) <= 1.0


@given(
    length=st.sampled_from([1, 2, 3, 12, 65, 80]),
    inputs=st.integers(1, 60),
    outputs=st.integers(1, 60),
    powers=st.tuples(st.floats(-12, 12), st.floats(-12, 12)),
    bound=st.floats(-6, 6),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=150)
def test_products_of_any_size_are_never_above_their_bound(
    length: int, inputs: int, outputs: int, powers: tuple[float, float], bound: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    seen, back = (
        torch.randn(1, length, n, generator=draw) * 10.0**p
        for n, p in zip((inputs, outputs), powers, strict=True)
    )
    for clipping in (L2(10.0**bound), L1(10.0**bound), Normalised(10.0**bound)):
        assert excess(LinearGrad(seen, back), clipping) <= 1.0


EXTREMES = [
    (1e38, 1.0, 1e-6),
    (1e38, 1e-38, 0.9),
    (1e19, 1e19, 1e-6),
    (1e35, 1e-40, 1e-12),
    (1e-23, 1e20, 1e-6),
    (1e-20, 1e20, 0.1),
    (1e-40, 1e38, 1e-6),
    (3e-5, 1e-40, 1e-12),
]
"""Sizes of inputs and of errors, and a bound, where 32 bits overflow, underflow or lose their precision."""


@pytest.mark.parametrize(("seen", "back", "bound"), EXTREMES)
@pytest.mark.parametrize("length", [1, 3, 70])
def test_gradients_at_the_ends_of_the_range_are_never_above_their_bound(
    seen: float, back: float, bound: float, length: int
) -> None:
    """Where a factor or a square is no normal number, rounding is no longer relative."""
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        inputs, errors = (
            seen * torch.rand(1, length, 9, generator=draw),
            back * torch.randn(1, length, 7, generator=draw),
        )
        words = torch.randint(0, 3, (1, length), generator=draw)
        for gradient in (
            LinearGrad(inputs, errors),
            EmbeddingGrad(words, seen * errors, 5),
            DenseGrad((seen * errors).flatten(1)),
        ):
            assert excess(gradient, L2(bound)) <= 1.0
            assert excess(gradient, Normalised(bound)) <= 1.0


@pytest.mark.parametrize(("seen", "back", "bound"), EXTREMES)
def test_patches_at_the_ends_of_the_range_are_never_above_their_bound(
    seen: float, back: float, bound: float
) -> None:
    for seed in range(20):
        for size in (5, 12):
            gradient = patches(2, size, 3, square(3, padding=1))(torch.Generator().manual_seed(seed))
            assert isinstance(gradient, ConvGrad)
            moved = replace(
                gradient, inputs=seen * gradient.inputs / 1e3, grad_outputs=back * gradient.grad_outputs
            )
            assert excess(moved, L2(bound)) <= 1.0


def test_the_precision_of_the_loss_is_not_that_of_the_sum() -> None:
    """Losses in 64 bits leave room for the rounding of sums in 32."""
    for seed in range(200):
        gradient = FORMS["one product"](torch.Generator().manual_seed(seed))
        bound = 0.5 * float(written(gradient)[0].norm())
        assert float(contributions(gradient, torch.float64).clipped_sum(L2(bound)).norm()) <= bound
    spec = replace(LAYERS["linear"], losses=lambda o, y: (o.double() - y[:, None]).square().sum(1))
    made = problem(spec, torch.float32, count=50)
    engine = made.engine()
    for i in range(50):
        bound = 0.5 * float(made.gradients[i].double().norm())
        assert float(engine.clipped_sum(*made.take([i]).arguments, L2(bound)).norm()) <= bound


@pytest.mark.parametrize(("entries", "length"), [(5, 8), (8, 8), (60, 3), (60, 1), (700, 9), (700, 1)])
def test_lookups_of_an_entry_are_added_up_in_tables_of_any_size(entries: int, length: int) -> None:
    """In a slot for each entry, if the table is small or no longer than a record, else for each lookup."""
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(min(4, entries), (6, length), generator=draw) * (entries // 4)
    errors, weights = torch.randn(6, length, 2, generator=draw), torch.rand(6, generator=draw).double()
    found = EmbeddingGrad(words % entries, errors, entries)
    chosen = torch.nn.functional.one_hot(words % entries, entries).double()
    expected = torch.einsum("nle,nlw->new", chosen, errors.double()).flatten(start_dim=1)
    for some, rows in ((found, expected), (found.take(torch.tensor([4, 1])), expected[[4, 1]])):
        assert torch.allclose(some.rows.double(), rows, atol=1e-5)
        assert torch.allclose(some.square_norms(), rows.square().sum(dim=1), rtol=1e-6)
        total = torch.ones(2 * entries, dtype=torch.float64)
        some.add_weighted(weights[: len(rows)], total)
        assert torch.allclose(total - 1.0, weights[: len(rows)] @ rows)


@pytest.mark.parametrize("sizes", [(8, 32, 128), (8, 32, 96), (4, 64, 32)], ids=str)
def test_gradients_of_few_outer_products_are_measured_and_summed_without_being_formed(
    sizes: tuple[int, int, int],
) -> None:
    length, width, outputs = sizes
    draw = torch.Generator().manual_seed(0)
    seen, back = (torch.randn(6, length, n, generator=draw) for n in (width, outputs))
    back[4, 1:], back[5, length // 2 :], seen[5, length // 2 :] = (
        0.0,
        -back[5, : length // 2],
        seen[5, : length // 2],
    )
    # that of the last record is 0
    exact = torch.einsum("bto,btp->bop", back.double(), seen.double()).flatten(1)
    gradient, weights = LinearGrad(seen, back), torch.rand(6, generator=draw).double()
    norms, total = gradient.square_norms().sqrt(), torch.zeros(outputs * width, dtype=torch.float64)
    gradient.add_weighted(weights, total)
    assert not gradient.is_materialized and "rows" not in vars(gradient)
    assert (norms >= exact.norm(dim=1)).all()
    assert (norms[:5] <= 1.00001 * exact.norm(dim=1)[:5]).all() and norms[5] < 1e-4 * norms[4]
    assert torch.allclose(total, weights @ exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(20, 30, 50), (16, 300, 90), (24, 700, 400)], ids=str)
def test_sums_whose_gradients_are_written_over_each_other_miss_none(sizes: tuple[int, int, int]) -> None:
    """Gradients are formed for a few records at a time, each over the last; 37 records fill no number of times."""
    length, width, outputs = sizes
    draw = torch.Generator().manual_seed(0)
    seen, back = (torch.randn(37, length, n, generator=draw) for n in (width, outputs))
    weights, total = torch.rand(37, generator=draw).double(), torch.ones(outputs * width, dtype=torch.float64)
    LinearGrad(seen, back).add_weighted(weights, total)
    exact = torch.einsum("b,bto,btp->op", weights, back.double(), seen.double()).flatten()
    assert torch.allclose(total - 1.0, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 16])
def test_gradients_are_written_out_once(length: int) -> None:
    """Though they are computed for a few records at a time."""
    inputs, grad_outputs = torch.randn(64, length, 64), torch.randn(64, length, 256)
    with MemoryTracer() as memory:
        rows = materialize(inputs, grad_outputs)
    assert memory.peak == rows.nbytes
    expected = torch.einsum("bto,bti->boi", grad_outputs.double(), inputs.double()).flatten(1)
    assert naive.relative(rows, expected) < 1e-6

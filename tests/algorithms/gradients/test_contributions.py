"""Losses, norms and sums of records from one pass, and of chosen ones among them."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import pytest
import torch
from torch import nn

from algorithms.gradients import L2, Normalised, PerExampleGradients
from tests.algorithms.gradients import naive
from tests.algorithms.gradients.networks import SPECS
from tests.algorithms.gradients.zoo import Spec, Wired, once, problem

SOME = [
    "linear",
    "linear, long sequence",
    "linear, wide sequence",
    "conv2d, many places",
    "conv2d, many channels",
    "embedding",
    "lstm, 3 layers, 2 directions, biases, batch first",
    "decoder tied to the embedding",
    "linear sequence, used again",
    "einsum",
    "cnn",
    "bilstm",
    "transformer",
    "merged low-rank adaptation",
]


@contextmanager
def counted(module: nn.Module) -> Iterator[list[int]]:
    """How many records a module has run on in each of its runs since."""
    calls: list[int] = []
    hook = module.register_forward_pre_hook(lambda _module, inputs: calls.append(len(inputs[0])))
    yield calls
    hook.remove()


@pytest.mark.parametrize("name", SOME)
def test_losses_norms_and_sums_come_from_one_pass(name: str) -> None:
    made, engine = once(SPECS[name], torch.float64)
    kinds = naive.clippings(made.model, made.gradients)
    with counted(engine._passes.model.module) as calls:
        found = engine.contributions(*made.arguments)
        losses = found.losses
        sums = {kind: (found.norms(each), found.clipped_sum(each)) for kind, each in kinds.items()}
    assert len(calls) == 1
    outputs = made.model.outputs(made.model.named(made.parameters), made.inputs)
    torch.testing.assert_close(losses, made.model.losses(outputs, made.labels))
    for kind, clipping in kinds.items():
        norms, total = sums[kind]
        assert naive.relative(norms, naive.norms(made.model, made.gradients, clipping)) < 1e-10
        expected = naive.contributions(made.model, made.gradients, clipping).sum(dim=0)
        assert naive.relative(total, expected) < 1e-10
    assert not losses.requires_grad and not total.requires_grad


@pytest.mark.parametrize("kind", ["L2", "L1", "PerLayer", "Affine"])
def test_no_record_s_copy_of_a_large_table_is_written_down(kind: str) -> None:
    made = problem(Spec(lambda: nn.Embedding(90, 3), (4,), entries=90))
    found = made.engine().contributions(*made.arguments)
    found.norms(naive.clippings(made.model, made.gradients)[kind])
    table, records = made.gradients[0].nbytes, len(found.losses) + found.padding
    assert 0 < found.written_bytes < 0.1 * records * table


@pytest.mark.parametrize("name", SOME)
def test_norms_of_all_records_are_streamed(name: str) -> None:
    made, engine = problem(SPECS[name], count=70), copy(once(SPECS[name], torch.float64)[1])
    engine.physical_batch = 32
    for clipping in naive.clippings(made.model, made.gradients).values():
        with counted(engine._passes.model.module) as calls:
            found = engine.norms(*made.arguments, clipping)
            assert len(calls) == 3
            engine.clipped_sum(*made.arguments, clipping)
            assert len(calls) == 6
        assert naive.relative(found, naive.norms(made.model, made.gradients, clipping)) < 1e-10


@pytest.mark.parametrize("name", SOME)
def test_a_choice_of_records_by_their_norms(name: str) -> None:
    """Importance sampling: all norms first, then the sum of the accepted, each of one length (Wei et al. 2022)."""
    made, engine = once(SPECS[name], torch.float64)
    found = engine.contributions(*made.arguments)
    norms = found.norms(Normalised(0.5))
    for chosen in (
        (norms > norms.median()).nonzero()[:, 0],
        torch.tensor([4, 1]),
        torch.tensor([], dtype=torch.int64),
    ):
        total = found.take(chosen).clipped_sum(Normalised(0.5))
        accepted = made.gradients[chosen]
        expected = (0.5 * accepted / accepted.norm(dim=1, keepdim=True)).sum(dim=0)
        assert total.shape == expected.shape
        assert naive.relative(total, expected) < 1e-10
        assert torch.equal(found.take(chosen).losses, found.losses[chosen])


def test_a_gradient_of_nothing_stays_nothing() -> None:
    """Neither clipping to a given norm nor a division by zero makes something of it."""
    none = PerExampleGradients.of_rows(torch.zeros(3, 5))
    for clipping in (Normalised(1.0), Normalised(1.0, stability=0.1), L2(1.0)):
        assert not none.clipped_sum(clipping).any()


def test_a_parameter_that_has_no_effect_has_no_gradient() -> None:
    """A part that a model has and does not use: its place is zero, and shifted like any other."""
    unused = {"before": nn.Linear(2, 2), "after": nn.Linear(3, 1)}
    made = problem(Spec(lambda: Wired(lambda self, x: self.used(x), used=nn.Linear(4, 3), **unused), (4,)))
    engine = made.engine()
    for kind, clipping in naive.clippings(made.model, made.gradients).items():
        expected = naive.contributions(made.model, made.gradients, clipping).sum(dim=0)
        assert naive.relative(engine.clipped_sum(*made.arguments, clipping), expected) < 1e-10, kind
        norms = naive.norms(made.model, made.gradients, clipping)
        assert naive.relative(engine.norms(*made.arguments, clipping), norms) < 1e-10, kind

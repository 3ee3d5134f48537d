"""Models whose layers run again in the backward pass, as with gradient checkpointing, at parameters not their own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from algorithms.gradients import L2, UnsupportedModelError
from algorithms.gradients.model_inspection import InspectionLimits
from tests.support.gradients import naive
from tests.support.gradients.problems import BRIEF, Problem, Spec, Wired, frozen, problem, rows


def again(self: Wired, x: Tensor) -> Tensor:
    return self.last(checkpoint(self.block, x, use_reentrant=False))


def block(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, width), nn.Tanh())


def adapted(self: Wired, x: Tensor) -> Tensor:
    """A frozen layer with a trained low-rank one beside it."""
    return torch.tanh(self.base(x) + self.up(self.down(x)))


def low_rank() -> nn.Module:
    parts = {"down": nn.Linear(4, 2, bias=False), "up": nn.Linear(2, 4, bias=False)}
    return Wired(adapted, base=frozen(nn.Linear(4, 4)), **parts)


class RunAgain(torch.autograd.Function):
    """Keeps its input alone and runs its layer a second time on the way back, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            found: Tensor = layer(x)
        return found

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(ctx.layer(x), x, errors)[0], None


def reversible(self: Wired, x: Tensor) -> Tensor:
    return self.last(RunAgain.apply(self.first(x), self.block))


def hooked(self: Wired, x: Tensor) -> Tensor:
    """Errors that go back through a layer of the module once more."""
    found = functional.linear(x, self.first.weight * 1.0) if hasattr(self, "alone") else self.first(x)
    if found.requires_grad:
        found.register_hook(lambda errors: errors + self.block(errors).detach())
    return self.last(torch.tanh(found))


def looking(self: Wired, x: Tensor) -> Tensor:
    """What is never recorded, since it looks at a value."""
    return again(self, x) if bool((x.detach()[:, 0] != -999.0).any()) else x


def parts(inner: Callable[[], nn.Module] = block, **more: nn.Module) -> dict[str, nn.Module]:
    return {"block": inner(), "last": nn.Linear(4, 3)} | more


def branching(self: Wired, x: Tensor) -> Tensor:
    """Layers that run again and leave out, if no record needs it, what changes nothing then."""

    def run(x: Tensor) -> Tensor:
        is_long = (x[:, :1] > 50.0).to(x.dtype)
        factors = 1.0 + is_long if bool(x.detach()[:, 0].sum() > 50.0) else 1.0 + torch.zeros_like(is_long)
        return torch.tanh(self.first(x) * factors)

    return self.last(checkpoint(run, x, use_reentrant=False))


def packed(self: Wired, x: Tensor) -> Tensor:
    """Layers that pack sequences by their lengths each time that they run."""
    lengths = 1 + (x[:, :, 0] > 0.0).sum(dim=1).clamp(max=4).cpu()

    def run(x: Tensor) -> Tensor:
        return self.block(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1][-1]

    return self.last(checkpoint(run, x, use_reentrant=False))


AGAIN = {
    "the first layers": Spec(lambda: Wired(again, **parts()), (4,)),
    "later layers": Spec(lambda: nn.Sequential(nn.Linear(4, 4), Wired(again, **parts())), (4,)),
    "a sequence": Spec(lambda: Wired(again, **parts()), (5, 4)),
    "all in parts": Spec(
        lambda: Wired(
            lambda self, x: checkpoint_sequential(self.block, 3, x, use_reentrant=False), block=block()
        ),
        (4,),
    ),
    "one within another": Spec(
        lambda: Wired(again, **parts(lambda: Wired(again, block=block(), last=nn.Linear(4, 4)))), (4,)
    ),
    "low-rank adaptation": Spec(
        lambda: Wired(again, **parts(lambda: nn.Sequential(low_rank(), low_rank()))), (4,)
    ),
    "a layer before it": Spec(
        lambda: Wired(lambda self, x: again(self, self.first(x)), **parts(first=frozen(nn.Linear(4, 4)))),
        (4,),
    ),
    "convolutions": Spec(
        lambda: Wired(
            lambda self, x: self.last(self.pool(checkpoint(self.block, x, use_reentrant=False)).flatten(1)),
            block=nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Conv2d(3, 4, 3)),
            pool=nn.MaxPool2d(2),
            last=nn.Linear(4, 2),
        ),
        (2, 6, 6),
    ),
    "a recurrent layer": Spec(
        lambda: Wired(
            lambda self, x: self.last(checkpoint(self.block, x, use_reentrant=False)[0][:, -1]),
            block=nn.LSTM(3, 4, 2, batch_first=True),
            last=nn.Linear(4, 2),
        ),
        (5, 3),
    ),
    "packed sequences": Spec(
        lambda: Wired(packed, block=nn.GRU(3, 4, batch_first=True), last=nn.Linear(4, 2)), (5, 3)
    ),
    "a branch": Spec(lambda: Wired(branching, first=nn.Linear(4, 4), last=nn.Linear(4, 2)), (4,)),
    "attention": Spec(
        lambda: Wired(again, **parts(lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True))),
        (5, 4),
    ),
    "a look at values": Spec(lambda: Wired(looking, **parts()), (4,)),
    "a function of its own": Spec(
        lambda: Wired(reversible, **parts(lambda: frozen(block()), first=nn.Linear(4, 4))), (4,)
    ),
    "a hook": Spec(lambda: Wired(hooked, **parts(first=nn.Linear(4, 4))), (4,)),
    "a hook, record by record": Spec(
        lambda: Wired(hooked, **parts(first=nn.Linear(4, 4, bias=False), alone=nn.Identity())), (4,)
    ),
}


IN_FULL = {"the first layers", "a function of its own"}
"""Inspected in full; the others briefly, which takes a fifth of the time."""
ALONE = {
    "a recurrent layer",
    "packed sequences",
    "a branch",
    "attention",
    "a hook",
    "a hook, record by record",
}
"""Models taken record by record: their layers keep other tensors, or have other errors, when they run again."""


def by_definition(made: Problem) -> Tensor:
    """Each record's gradient [n, d] by a module whose own parameters are those of the point."""
    module = copy.deepcopy(made.model.module)
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in made.model.by_name(made.parameters).items():
            own[name].copy_(value)
    found = []
    for i in range(len(made.labels)):
        module.zero_grad(set_to_none=True)
        made.model.losses(module(made.inputs[i : i + 1]), made.labels[i : i + 1]).sum().backward()
        each = [own[name].grad for name in made.model.shapes]
        zeros = [torch.zeros_like(own[name]) for name in made.model.shapes]
        found.append(
            torch.cat([z.flatten() if g is None else g.flatten() for g, z in zip(each, zeros, strict=True)])
        )
    return torch.stack(found)


@pytest.mark.parametrize("name", AGAIN)
def test_layers_that_run_again_do_so_at_the_same_parameters(name: str) -> None:
    made = problem(AGAIN[name])
    if (
        name == "a branch"
    ):  # as none of the made-up records has it: what all decide is not what the first one does
        made.inputs[:2, ..., 0] = torch.tensor([60.0, -80.0])
    limits = InspectionLimits() if name in IN_FULL else BRIEF
    expected = by_definition(made)
    engine = made.engine(physical_batch=8, limits=limits)  # each record may have a pass of its own
    assert engine.is_batched == (name not in ALONE)
    assert naive.relative(rows(made, engine), expected) < 1e-10
    clipping = naive.clippings(made.model, expected)["L2"]
    sums = naive.contributions(made.model, expected, clipping).sum(dim=0)
    assert naive.relative(engine.clipped_sum(*made.arguments, clipping), sums) < 1e-10


def reentrant(self: Wired, x: Tensor) -> Tensor:
    return self.last(
        checkpoint(self.block, self.first(x) if hasattr(self, "first") else x, use_reentrant=True)
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("first", [{}, {"first": nn.Linear(4, 4)}])
def test_reentrant_checkpointing_is_refused(first: dict[str, nn.Module]) -> None:
    """Its way back is no function of the parameters that autograd could be asked for."""
    made = problem(Spec(lambda: Wired(reentrant, **parts(**first)), (4,)))
    with pytest.raises(UnsupportedModelError, match="use_reentrant=False"):
        made.engine().clipped_sum(*made.arguments, L2(1.0))


class AddsUp(RunAgain):
    """The same for a layer that is trained, whose gradients it adds up on its way, as reversible networks do."""

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), errors)
        return x.grad, None


def test_a_backward_pass_within_the_backward_pass_is_refused() -> None:
    """What it adds up belongs to no record, and no gradient that is asked for has it."""

    def wiring(self: Wired, x: Tensor) -> Tensor:
        return self.last(AddsUp.apply(self.first(x), self.block))

    with pytest.raises(UnsupportedModelError, match=r"calls backward\(\) inside the backward pass"):
        problem(Spec(lambda: Wired(wiring, **parts(first=nn.Linear(4, 4))), (4,))).engine()

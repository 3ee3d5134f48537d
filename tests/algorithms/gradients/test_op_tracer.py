"""What a model computes is seen, with whatever functions it is written: a private value may not choose the way."""

import copy
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.gradients import L2, RecordsNotIndependentError
from algorithms.gradients.model_inspection import InspectionLimits
from algorithms.gradients.op_tracer import fills_briefly
from algorithms.gradients.passes import Passes
from algorithms.gradients.synthetic_inputs import InputSpec
from algorithms.models.objectives import cross_entropy
from tests.support.gradients import naive
from tests.support.gradients.problems import (
    BRIEF,
    LIMITS,
    Problem,
    Spec,
    Wired,
    check,
    problem,
    rows,
    unlike_alone,
)

PADDING, ENTRIES, LENGTH = 2, 50, 12


def two(inputs: Tensor) -> Tensor:
    """A whole number that could follow from values, and never does, so that no difference shows it."""
    return inputs.flatten()[0].isnan().long() * 0 + 2


LOOKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "slice": lambda x, n: x[:, :n].sum(1, keepdim=True),
    "narrow": lambda x, n: x.narrow(1, 0, n).sum(1, keepdim=True),
    "a range": lambda x, n: x.sum(1, keepdim=True) * torch.arange(n).sum(),
    "zeros": lambda x, n: x.sum(1, keepdim=True) + torch.zeros(n).sum(),
    "repetitions": lambda x, n: x[:, :1].repeat(1, n).sum(1, keepdim=True),
    "padding": lambda x, n: functional.pad(x, (0, n)).sum(1, keepdim=True),
    "splits": lambda x, n: x.split(n, 1)[0].sum(1, keepdim=True),
    "a selection": lambda x, n: x.select(1, n - 1)[:, None],
    "a string": lambda x, n: x[:, : int(f"{n}")].sum(1, keepdim=True),
    "a complex number": lambda x, n: x.sum(1, keepdim=True) * complex(n).real,
}


@pytest.mark.parametrize("name", LOOKS)
def test_every_way_from_a_tensor_to_a_number_is_a_look(name: str) -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        return self.layer(LOOKS[name](x, two(x)))

    made = problem(Spec(lambda: Wired(wiring, layer=nn.Linear(1, 2)), (4,)))
    engine = made.engine()
    assert engine.physical_batch == 1
    check(made, engine)


def masked(self: Wired, x: Tensor) -> Tensor:
    """As masks of padding are applied: not at all where no record has any."""
    there = (x.abs() > 0.5)[:, :, None].to(x)
    hidden = self.layer(x[:, :, None])
    if bool((there == 1).all()):
        return hidden.sum(dim=1)
    return (hidden * there).sum(dim=1)


def by_position(self: Wired, x: Tensor) -> Tensor:
    """A question that no record has a part in."""
    places = torch.arange(x.shape[1]).expand(1, -1)
    return self.layer(x[:, :, None]).sum(dim=1) * (2.0 if bool((places.diff() == 1).all()) else 1.0)


@pytest.mark.parametrize("wiring", [masked, by_position])
def test_a_question_about_values_has_a_public_answer(wiring: Callable[[Wired, Tensor], Tensor]) -> None:
    """The general way is taken for all; a pass in which no record has padding counts the same as any other."""
    made = problem(Spec(lambda: Wired(wiring, layer=nn.Linear(1, 2)), (4,)))
    engine = made.engine()
    assert engine.is_batched and engine.physical_batch > 32
    check(made, engine)
    full = Problem(made.model, made.parameters, made.inputs.sign(), made.labels)
    check(full, engine)


def written_in_parts(x: Tensor) -> Tensor:
    """Which values are larger than those of any made-up record, written through a view."""
    found = torch.zeros(x.shape, dtype=torch.bool)
    found[:, 2:] = x[:, 2:] > 1e5
    return found


def test_a_branch_on_a_part_written_into_a_tensor_is_pinned() -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        return self.layer(x) * (2.0 if written_in_parts(x).any() else 1.0)

    made = problem(Spec(lambda: Wired(wiring, layer=nn.Linear(4, 2)), (4,)))
    engine = made.engine()
    other = replace(made, inputs=torch.cat([torch.full_like(made.inputs[:1], 1e6), made.inputs[1:]]))
    assert torch.equal(rows(made, engine)[1:], rows(other, engine)[1:])


def by_language(self: Wired, x: Tensor) -> Tensor:
    """As X-MOD does, where all records have the first of two languages."""
    found = x.new_zeros(len(x), 3)
    for index, adapter in enumerate((self.first, self.second)):
        mine = torch.zeros(len(x)) == index
        found[mine] = adapter(x[mine])
    return found


MASK = torch.tensor([True, False, True, True])
BY_PUBLIC_MASKS: dict[str, Callable[[Wired, Tensor], Tensor]] = {
    "a buffer": lambda self, x: x[:, self.mask],
    "an attribute": lambda self, x: x[:, self.__dict__["own"]],
    "made in the pass": lambda self, x: x[:, torch.arange(4) != 1],
    "selected": lambda self, x: x.masked_select(self.mask).view(-1, 3),
    "repeated": lambda self, x: torch.repeat_interleave(x, self.mask.long(), dim=1),
    "layers that no record takes": by_language,
}


@pytest.mark.parametrize("name", BY_PUBLIC_MASKS)
def test_what_is_chosen_by_a_mask_that_all_records_share_is_no_look(name: str) -> None:
    def make() -> nn.Module:
        found = Wired(
            lambda self, x: self.last(BY_PUBLIC_MASKS[name](self, self.layer(x))),
            layer=nn.Linear(4, 4),
            last=nn.Linear(3, 2),
            first=nn.Linear(4, 3),
            second=nn.Linear(4, 3),
            mask=MASK,
        )
        found.__dict__["own"] = MASK
        return found

    made = problem(Spec(make, (4,)))
    engine = made.engine(
        physical_batch=64, limits=InspectionLimits() if name in ("a buffer", "selected") else BRIEF
    )
    assert engine.is_batched and engine.physical_batch == 64
    check(made, engine)


def test_what_is_chosen_by_a_mask_that_was_written_in_parts_is_a_look() -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        found = self.layer(x)
        chosen = torch.arange(len(x))[:, None].expand_as(x)[written_in_parts(x)]
        return found + torch.zeros_like(found).index_add(0, chosen, self.layer(x[chosen]))

    made = problem(Spec(lambda: Wired(wiring, layer=nn.Linear(4, 2)), (4,)))
    assert made.engine().physical_batch == 1


class Experts(nn.Module):
    """Each record by one of its experts; those that no record of the batch chose are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 8), nn.ModuleList(nn.Linear(4, 2) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(dim=1)
        chosen, found = shares.argmax(dim=1), x.new_zeros(len(x), 2)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                found = found + expert(x) * (shares[:, index] * mine)[:, None]
        return found


@pytest.mark.parametrize("limits", LIMITS)
def test_experts_that_the_first_made_up_records_leave_out_are_computed(limits: InspectionLimits) -> None:
    made = problem(Spec(Experts, (4,)), count=40)
    engine = made.engine(limits=limits)
    assert engine.is_batched
    check(made, engine)


class Rescaled(nn.Module):
    """The same but for rounding, whether any record is large or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * 3.0 / 3.0 if (x > 3.0).any() else x)


def test_copies_for_other_workers_answer_a_model_alike() -> None:
    """One large record would change the last bits of all others in its pass."""
    made = problem(Spec(Rescaled, (4,)), torch.float32, count=40)
    engine = made.engine()
    inputs = made.inputs.clamp(max=2.0)
    other = torch.cat([torch.full_like(inputs[:1], 5.0), inputs[1:]])
    for each in (engine, engine.copy_for_thread()):
        alone, beside = (
            each.contributions(made.parameters, some, made.labels).take(torch.arange(1, 40))
            for some in (inputs, other)
        )
        assert torch.equal(alone.norms(L2(1.0)), beside.norms(L2(1.0)))


class Energy(nn.Module):
    """The derivative of an energy, as of a molecule, which only a recorder stumbles over."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.func.vmap(torch.func.grad(lambda one: self.energy(one)[0]))(x)


@pytest.mark.parametrize(
    "limits",
    [pytest.param(InspectionLimits(), id="full", marks=pytest.mark.soak), pytest.param(BRIEF, id="brief")],
)
def test_what_only_a_recorder_stumbles_over_is_taken_record_by_record(limits: InspectionLimits) -> None:
    made = problem(Spec(Energy, (4,), classes=4))
    engine = made.engine(limits=limits)
    assert not engine.is_batched
    check(made, engine)


class Channels(nn.Module):
    """Attention within each channel of a series, all channels in one batch, as in PatchTST."""

    def __init__(self, **settings: bool) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True, **settings), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.flatten(0, 1)
        found = self.attention(parts, parts, parts, need_weights=False)[0].mean(dim=1)
        return self.head(found).view(len(x), -1, 2).mean(dim=1)


def test_attention_within_the_parts_of_a_record_is_taken_at_once() -> None:
    made = problem(Spec(Channels, (3, 5, 4)))
    engine = made.engine(limits=BRIEF)
    assert engine.is_batched and not engine.operations_without_rule
    check(made, engine)


def chunked(size: int) -> Callable[[Wired, Tensor], Tensor]:
    return lambda self, x: torch.cat([functional.silu(part) for part in self.layer(x).split(size)])


UNEVEN: dict[str, Callable[[Wired, Tensor], Tensor]] = {
    "a row in front": lambda self, x: functional.silu(torch.cat([self.start, self.layer(x)]))[1:],
    "chunks of 21": chunked(21),
    "chunks of 32": chunked(32),
    "one by one": lambda self, x: torch.stack([functional.silu(one) for one in self.layer(x)]),
}
EVEN: dict[str, Callable[[Wired, Tensor], Tensor]] = {
    "plain": lambda self, x: functional.silu(self.layer(x)),
    "records last": lambda self, x: functional.silu(self.layer(x).T).T,
    "places and records": lambda self, x: functional.silu(self.layer(x).flatten()).view(-1, 3),
    "chunks of 64": chunked(64),
    "a column in front": lambda self, x: functional.silu(
        torch.cat([self.start.expand(len(x), 3), self.layer(x)], dim=1)
    ),
    "no places of a block": lambda self, x: functional.silu(
        torch.cat(
            [self.layer(x), self.layer(x[:, None].unfold(1, 1, 1)[:, 1:].reshape(0, 4)).view(len(x), 0)], 1
        )
    ),
}


def wired(wiring: Callable[[Wired, Tensor], Tensor]) -> Problem:
    spec = Spec(lambda: Wired(wiring, layer=nn.Linear(4, 3), start=nn.Parameter(torch.zeros(1, 3))), (4,))
    return problem(spec)


@pytest.mark.parametrize("name", UNEVEN)
def test_records_that_do_not_fill_what_is_computed_are_taken_one_at_a_time(name: str) -> None:
    made = wired(UNEVEN[name])
    engine = made.engine(physical_batch=128)
    assert engine.physical_batch == 1
    check(made, engine)


@pytest.mark.parametrize("name", [name for name in EVEN if name != "chunks of 64"])
def test_records_that_fill_it_are_taken_together(name: str) -> None:
    assert wired(EVEN[name]).engine(physical_batch=128).physical_batch == 128


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize("name", [*UNEVEN, *(name for name in EVEN if name != "chunks of 64"), "a branch"])
def test_a_brief_look_at_shapes_finds_the_same_with_numbers_and_without(name: str, is_quick: bool) -> None:
    """Of a branch it does not say: the inspection has found another way for it."""
    branch = {"a branch": lambda self, x: self.layer(x) if bool((x > 0).any()) else self.start}
    model = wired((UNEVEN | EVEN | branch)[name]).model
    in_32_bits = replace(model, module=model.module.float())
    form = InputSpec((4,), torch.float32, torch.device("cpu"))
    found = fills_briefly(Passes(in_32_bits), form, (3, 128), is_quick=is_quick)
    assert found == (name not in UNEVEN)


def test_a_record_counts_the_same_in_any_place_where_a_model_works_in_chunks() -> None:
    """Where vectors and single numbers have another last bit, a steep kink makes a whole gradient of it."""
    point, value = unlike_alone(functional.silu, torch.float32)

    def wiring(self: Wired, x: Tensor) -> Tensor:
        chunks = torch.cat([functional.silu(part) for part in (x * self.scale).split(21)])
        return 1e4 * torch.relu(chunks - value)

    def of_label_one(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.sum(dim=1) * (labels == 1)

    spec = Spec(lambda: Wired(wiring, scale=nn.Parameter(torch.ones(3))), (3,), losses=of_label_one)
    engine = problem(spec, torch.float32).engine(physical_batch=64, limits=BRIEF)
    parameters, inputs = torch.ones(3), torch.full((64, 3), float(point))
    first, *others = (
        engine.clipped_sum(parameters, inputs, torch.eye(64, dtype=torch.int64)[place], L2(1.0))
        for place in (0, 1, 20, 21, 41, 42, 62, 63)  # beginnings and ends of the chunks
    )
    assert all(torch.equal(first, other) for other in others)


def of_tokens(wiring: Callable[[Wired, Tensor], Tensor], **more: nn.Module) -> Spec:
    def make() -> nn.Module:
        table = nn.Embedding(ENTRIES, 4, padding_idx=PADDING)
        return Wired(wiring, table=table, layer=nn.Linear(4, 2), **more)

    return Spec(make, (LENGTH,), entries=ENTRIES)


def test_padding_of_each_record_by_itself_mixes_nothing() -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        used = (x != PADDING).sum(dim=1, keepdim=True).clamp(min=1)
        return self.layer(self.table(x).sum(dim=1) / used)

    check(problem(of_tokens(wiring)))


def test_what_is_cut_to_the_longest_record_is_cut_for_none() -> None:
    """The length is a public constant, which no number of made-up records could be if real ones may be longer."""

    def wiring(self: Wired, x: Tensor) -> Tensor:
        assert x.amax().item() < ENTRIES  # asks for a number that does not matter
        longest = ((x != PADDING) * torch.arange(1, x.shape[1] + 1)).amax()
        places = torch.arange(longest)
        shown = x[:, : int(longest)] != PADDING
        return self.layer((self.table(x[:, :longest]) * (shown * (1 + places))[..., None]).sum(dim=1))

    made = problem(of_tokens(wiring))
    engine = made.engine()
    assert engine.is_batched and engine.physical_batch > 32
    check(made, engine)
    check(replace(made, inputs=torch.where(torch.arange(LENGTH) < 5, made.inputs, PADDING)), engine)


def test_a_softmax_in_32_bits_of_masks_in_64_bits_is_examined_in_32() -> None:
    """Where all is masked, and left out later, as in Longformer, only the gradients would not be finite in 64 bits."""

    def wiring(self: Wired, x: Tensor) -> Tensor:
        hidden, masked = self.table(x), torch.arange(LENGTH)[:, None] == 0
        scores = self.layer(hidden) + masked.to(hidden) * torch.finfo(hidden.dtype).min
        shares = scores.softmax(dim=-1, dtype=torch.float32).masked_fill(masked, 0.0)
        return self.layer((shares.to(hidden) * hidden[..., :2]).repeat(1, 1, 2)).sum(dim=1)

    made = problem(of_tokens(wiring), torch.float32)
    engine = made.engine()
    assert engine.is_batched
    assert naive.relative(rows(made, engine), made.gradients) < 1e-5


def test_a_table_that_the_first_pass_makes_is_no_memory() -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        if not hasattr(self, "waves"):
            self.waves = torch.linspace(0.5, 1.5, 4).to(x)
        return self.layer(x * self.waves.to(x))

    check(problem(Spec(lambda: Wired(wiring, layer=nn.Linear(4, 2)), (4,))))


def test_what_a_layer_keeps_of_its_parameters_is_computed_again_in_every_pass() -> None:
    def kept(self: Wired, x: Tensor) -> Tensor:
        if "bias" not in self.kept:
            self.kept["bias"] = self.bias[torch.tensor([1, 0])]
        return self.layer(x) + self.kept["bias"]

    def make(wiring: Callable[[Wired, Tensor], Tensor]) -> nn.Module:
        made = Wired(wiring, layer=nn.Linear(4, 2), bias=nn.Parameter(torch.zeros(2)))
        made.kept = {}  # type: ignore[assignment]
        return made

    plain = problem(Spec(lambda: make(lambda self, x: self.layer(x) + self.bias.flip(0)), (4,)))
    check(plain, problem(Spec(lambda: make(kept), (4,))).engine(physical_batch=64))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_tensor_with_a_graph_that_a_layer_keeps_is_no_hindrance() -> None:
    check(problem(Spec(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 2))), (4,))))


def of_layer(wiring: Callable[[Wired, Tensor], Tensor]) -> Problem:
    return problem(Spec(lambda: Wired(wiring, layer=nn.Linear(4, 3)), (4,)))


class Chunked(torch.autograd.Function):
    """Works through errors in chunks, on their way back alone."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> Tensor:
        return torch.cat([part * 1.0 for part in errors.split(21)])


def marked(self: Wired, x: Tensor) -> Tensor:
    """Scaled by how many records have a mark that no made-up record has."""
    return self.layer(x) * (1 + (x == -999.0).any(dim=1).sum())


def pooled(self: Wired, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        halves = list(pool.map(functional.silu, self.layer(x).detach().split(21)))
    return self.layer(x) + torch.cat(halves)


HIDDEN: dict[str, Callable[[Wired, Tensor], Tensor]] = {
    "chunks of more than the first passes": chunked(1001),
    "chunks on the way back": lambda self, x: Chunked.apply(self.layer(x)),
    "chunks without a graph": lambda self, x: (
        self.layer(x)
        if torch.is_grad_enabled()
        else torch.cat([part * 1.0 for part in self.layer(x).split(21)])
    ),
    "a value of all records": marked,
    "another thread": pooled,
    "a list": lambda self, x: self.layer(x) * len([x.tolist()]),
    "complex numbers": lambda self, x: torch.cat(
        [part.abs() for part in torch.complex(self.layer(x), self.layer(x)).chunk(3)]
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_shows_in_other_passes_or_elsewhere_is_seen(name: str) -> None:
    assert of_layer(HIDDEN[name]).engine(physical_batch=4096).physical_batch == 1


RARE: dict[str, Callable[[Tensor], bool]] = {
    "a copy": lambda x: bool((copy.deepcopy(x.detach()) == -999.0).any()),
    "numpy": lambda x: bool((np.from_dlpack(x.detach()) == -999.0).any()),
    "text": lambda x: "True" in str((x == -999.0).any()),
    "membership": lambda x: -999.0 in x,
    "a maximum": lambda x: max(x.abs().flatten()) == 999.0,
    "a number": lambda x: (x == -999.0).sum().item() > 0,
}


@pytest.mark.parametrize("name", RARE)
def test_a_branch_that_no_made_up_record_takes_changes_no_other_record(name: str) -> None:
    made = problem(
        Spec(
            lambda: Wired(lambda self, x: self.layer(2 * x if RARE[name](x) else x), layer=nn.Linear(4, 3)),
            (4,),
        )
    )
    engine, marked = made.engine(physical_batch=8), made.inputs.clone()
    marked[0] = -999.0
    norms = [engine.norms(made.parameters, some, made.labels, L2(1.0)) for some in (made.inputs, marked)]
    assert torch.equal(norms[0][1:], norms[1][1:])


def clipped_errors(self: Wired, x: Tensor) -> Tensor:
    found = self.layer(x)
    if found.requires_grad:
        found.register_hook(lambda errors: errors * (10.0 / errors.norm()).clamp(max=1.0))
    return found


def in_a_parameter(self: Wired) -> None:
    with torch.no_grad():
        self.steps += 1


def in_the_class(self: Any) -> None:
    type(self).steps = getattr(type(self), "steps", 0) + 1


def in_a_dictionary(self: Wired) -> None:
    if not hasattr(self, "counts"):
        self.counts = defaultdict(lambda: 0)
    self.counts["steps"] += 1


class CountingLoss:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return cross_entropy(outputs, labels)


def by_all(self: Wired, x: Tensor) -> Tensor:
    """A branch that is no shorter way to the same."""
    return self.layer(x) if bool((x[:, 0] > 0).all()) else -2.0 * self.layer(x)


def by_all_or_fails(self: Wired, x: Tensor) -> Tensor:
    """The same, in a model that fails if its second question has the answer of the first."""
    if bool((x[:, 0] > 0).all()):
        return self.layer(x)
    if not bool((~(x[:, 0] > 0)).any()):
        raise ValueError("no record is left")
    return -2.0 * self.layer(x)


def columns_used(self: Wired, x: Tensor) -> Tensor:
    """Columns that are padding for all records."""
    return self.layer(self.table(x).sum(dim=1) / (x != PADDING).any(dim=0).sum().clamp(min=1))


def in_segments(self: Wired, x: Tensor) -> Tensor:
    """Tokens of the largest table that takes them, beside one of two entries."""
    used = (x != PADDING + 1).any(dim=0).sum().clamp(min=1)
    return self.layer((self.table(x) + self.segments((x > PADDING).long())).sum(dim=1) / used)


def of_later_class(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs, labels) * (1 + (labels == 4).any())


def counting(keep: Callable[[Wired], None]) -> Spec:
    class Own(Wired):
        pass

    def wiring(self: Wired, x: Tensor) -> Tensor:
        keep(self)
        return self.layer(x)

    def make() -> nn.Module:
        own = {"steps": nn.Parameter(torch.zeros(()), requires_grad=False)} if keep is in_a_parameter else {}
        return Own(wiring, layer=nn.Linear(4, 2), **own)

    return Spec(make, (4,))


def in_an_attribute(self: Wired) -> None:
    self.passes = getattr(self, "passes", 0) + 1


MIXES, COUNTS = "mixes records", r"is changed by (a|every) forward pass"
REFUSED: dict[str, tuple[Spec, str]] = {
    "a question that changes the outcome": (Spec(lambda: Wired(by_all, layer=nn.Linear(4, 2)), (4,)), MIXES),
    "answers that fail": (Spec(lambda: Wired(by_all_or_fails, layer=nn.Linear(4, 2)), (4,)), MIXES),
    "random numbers of NumPy": (
        Spec(lambda: Wired(lambda self, x: self.layer(x * np.random.rand()), layer=nn.Linear(4, 2)), (4,)),
        "no seed of PyTorch repeats",
    ),
    "columns that are used": (of_tokens(columns_used), MIXES),
    "tokens of several tables": (of_tokens(in_segments, segments=nn.Embedding(2, 4)), MIXES),
    "a loss by a later class": (
        Spec(lambda: nn.Linear(4, 5), (4,), losses=of_later_class, classes=5),
        "the loss of the model made up",
    ),
    "errors on their way back": (
        Spec(lambda: Wired(clipped_errors, layer=nn.Linear(4, 3)), (4,)),
        "the backward pass of the model made up mixes records",
    ),
    "passes": (counting(in_an_attribute), "the attribute passes is changed by every forward pass"),
    "steps in a parameter": (counting(in_a_parameter), COUNTS),
    "steps in the class": (counting(in_the_class), COUNTS),
    "steps in a dictionary": (counting(in_a_dictionary), COUNTS),
    "calls of a loss": (
        Spec(lambda: nn.Linear(4, 3), (4,), losses=CountingLoss()),
        r"the attribute losses\.calls is changed by every forward pass",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_or_counts_where_it_hardly_shows_is_refused(name: str) -> None:
    spec, words = REFUSED[name]
    with pytest.raises(RecordsNotIndependentError, match=words):
        problem(spec).engine()

"""What a model computes is seen, with whatever functions it is written: a private value may not choose the way."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.gradients import L2, Unclippable
from algorithms.models.linear import cross_entropy
from tests.gradients.zoo import Problem, Spec, Wired, check, problem, unlike_alone

PADDING, ENTRIES, LENGTH = 2, 50, 12


def two(inputs: Tensor) -> Tensor:
    """A whole number that could follow from values, and never does, so that no difference shows it."""
    return torch.zeros_like(inputs.flatten()[0]).long() + 2


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


def test_a_record_counts_the_same_in_any_place_where_a_model_works_in_chunks() -> None:
    """Where vectors and single numbers have another last bit, a steep kink makes a whole gradient of it."""
    point, value = unlike_alone(functional.silu, torch.float32)

    def wiring(self: Wired, x: Tensor) -> Tensor:
        chunks = torch.cat([functional.silu(part) for part in (x * self.scale).split(21)])
        return 1e4 * torch.relu(chunks - value)

    def of_label_one(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.sum(dim=1) * (labels == 1)

    spec = Spec(lambda: Wired(wiring, scale=nn.Parameter(torch.ones(3))), (3,), losses=of_label_one)
    engine = problem(spec, torch.float32).engine(physical_batch=64)
    parameters, inputs = torch.ones(3), torch.full((64, 3), float(point))
    first, *others = (
        engine.clipped_sum(parameters, inputs, torch.eye(64, dtype=torch.int64)[place], L2(1.0))
        for place in range(64)
    )
    assert all(torch.equal(first, other) for other in others)


def of_tokens(wiring: Callable[[Wired, Tensor], Tensor]) -> Problem:
    def make() -> nn.Module:
        table = nn.Embedding(ENTRIES, 4, padding_idx=PADDING)
        return Wired(wiring, table=table, layer=nn.Linear(4, 2))

    return problem(Spec(make, (LENGTH,), entries=ENTRIES))


def test_columns_that_are_padding_for_all_records_mix_them() -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        used = (x != PADDING).any(dim=0).sum().clamp(min=1)
        return self.layer(self.table(x).sum(dim=1) / used)

    with pytest.raises(Unclippable, match="mixes records"):
        of_tokens(wiring).engine()


def test_padding_of_each_record_by_itself_mixes_nothing() -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        used = (x != PADDING).sum(dim=1, keepdim=True).clamp(min=1)
        return self.layer(self.table(x).sum(dim=1) / used)

    check(of_tokens(wiring))


def test_a_loss_that_mixes_records_of_a_later_class_is_refused() -> None:
    def losses(outputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(outputs, labels) * (1 + (labels == 4).any())

    with pytest.raises(Unclippable, match="the loss of the model made up"):
        problem(Spec(lambda: nn.Linear(4, 5), (4,), losses=losses, classes=5)).engine()


def test_a_model_that_counts_its_passes_is_refused() -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        self.passes = getattr(self, "passes", 0) + 1
        return self.layer(x) if self.passes < 1000 else -self.layer(x)

    with pytest.raises(Unclippable, match="the attribute passes is changed by every forward pass"):
        problem(Spec(lambda: Wired(wiring, layer=nn.Linear(4, 2)), (4,))).engine()


def test_a_table_that_the_first_pass_makes_is_no_memory() -> None:
    def wiring(self: Wired, x: Tensor) -> Tensor:
        if not hasattr(self, "waves"):
            self.waves = torch.linspace(0.5, 1.5, 4).to(x)
        return self.layer(x * self.waves.to(x))

    check(problem(Spec(lambda: Wired(wiring, layer=nn.Linear(4, 2)), (4,))))

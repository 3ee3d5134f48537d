"""Made-up records and parameters are the same each time, however few of them are made."""

import math

import pytest
import torch
from torch import Tensor, nn

from algorithms.gradients import PerExampleModel
from algorithms.gradients.passes import Passes
from algorithms.gradients.synthetic_inputs import InputSpec, form_of, near_start


class Vector(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.short, self.long = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((size,), 2.0))


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000, 2**16, 2**16 + 5])
def test_parameters_move_by_the_first_numbers_of_one_draw(size: int) -> None:
    draw = torch.randn(2**16, generator=torch.Generator().manual_seed(2))
    whole = torch.cat([draw, draw])[:size]
    model = PerExampleModel("vector", Vector(size), nn.CrossEntropyLoss(reduction="none"))
    expected = torch.cat([1.0 + 0.1 * draw[:3], 2.0 + 0.2 * whole])
    assert torch.allclose(near_start(model), expected, rtol=1e-6, atol=0.0)


def test_a_record_is_repeated_with_its_label() -> None:
    sample = InputSpec((4,), torch.float32, torch.device("cpu"), classes=3).draw(5, 0)
    repeated = sample.repeat_record(1)
    assert torch.equal(repeated.inputs, sample.inputs[1].expand(5, 4))
    assert repeated.labels.tolist() == [1] * 5


@pytest.mark.parametrize("is_signed", [False, True])
def test_records_have_the_labels_that_a_loss_is_tried_with(is_signed: bool) -> None:
    spec = InputSpec(
        (4,), torch.float32, torch.device("cpu"), classes=3, label_shape=(2,), is_signed=is_signed
    )
    sample = spec.draw(6, seed=2)
    assert torch.equal(sample.labels, spec.labels(6, seed=2))
    assert sample.labels.shape == (6, 2) and not math.isclose(float(sample.labels.double().std()), 0.0)


class Columns(nn.Module):
    """A table of its own for each column of categories."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 3) for size in sizes)
        self.last = nn.Linear(3 * len(sizes), 2)

    def forward(self, codes: Tensor) -> Tensor:
        columns = [table(codes[:, i]) for i, table in enumerate(self.tables)]
        return self.last(torch.cat(columns, dim=1))


class Marked(Columns):
    """Texts of which none may be the last entry alone, beside a short table that they are not looked up in."""

    def forward(self, codes: Tensor) -> Tensor:
        if bool((codes == 8).all()):
            raise ValueError("a text without words")
        return self.last(torch.cat([self.tables[0](codes[:, i]) for i in range(2)], dim=1))


def _entries(module: nn.Module, columns: int, count: int) -> int:
    model = PerExampleModel("columns", module, nn.CrossEntropyLoss(reduction="none"))
    spec = InputSpec((columns,), torch.int32, torch.device("cpu"))
    return form_of(Passes(model), near_start(model), spec, count).entries


@pytest.mark.parametrize("sizes", [(9, 5, 4), (12, 7), (7, 12), (31, 30, 29, 28), (2, 1000)], ids=str)
@pytest.mark.parametrize("count", [1, 17])
def test_columns_of_categories_have_entries_that_each_table_has(sizes: tuple[int, ...], count: int) -> None:
    assert _entries(Columns(sizes), len(sizes), count) == min(sizes)


def test_texts_have_all_entries_though_a_text_may_not_be_one_entry_alone() -> None:
    assert _entries(Marked((9, 2)), 2, count=17) == 9

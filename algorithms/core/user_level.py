"""A record that is a person with several rows: whole people are sampled, clipped and protected.

Such a record is [k, *shape] with labels [k, ...]. A row is absent if all its labels are IGNORED, or NaN for real
numbers. A person's loss is the mean over the rows that are present, so its gradient is the mean of theirs; statistics
for learned features are averaged likewise. A bound on each row's gradient, Hessian or statistic therefore holds for a
person too.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from algorithms.gradients import Packing
from algorithms.models import Model
from algorithms.models.objectives import IGNORED
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.statistics import Statistic


class RowWise(nn.Module):
    """Applies a module of rows to people: [batch, k, ...] -> [batch, k, ...].

    packed: k if a row's parts are packed; made-up people are then [batch, k * width].
    """

    def __init__(self, module: nn.Module, packed: int | None = None) -> None:
        super().__init__()
        self.module, self.packed = module, packed

    def forward(self, people: Tensor) -> Tensor:
        if self.packed is not None:
            people = people.reshape(len(people), self.packed, -1)
        outputs: Tensor = self.module(people.flatten(0, 1))
        return outputs.view(*people.shape[:2], *outputs.shape[1:])


def user_level_model(model: Model, rows: int | None) -> Model:
    """The model of people with this number of rows; its flat parameter vector is that of `model`.

    For None, if a record is a row, the model itself.

    Example:
        >>> from algorithms.models.objectives import cross_entropy
        >>> rows = Model("linear", nn.Linear(3, 2), cross_entropy, scores=lambda outputs: outputs)
        >>> people, labels = torch.zeros(4, 5, 3), torch.full((4, 5), IGNORED)
        >>> labels[:, 0] = 1
        >>> model = user_level_model(rows, 5)
        >>> model.losses(model.module(people), labels).shape
        torch.Size([4])
    """
    if rows is None:
        return model
    packing = None if model.packing is None else Packing(model.packing.parts * rows)

    def of_person(outputs: Tensor, labels: Tensor) -> Tensor:
        # outputs [batch, k, ...], labels [batch, k, ...] -> [batch]; absent rows have no loss, and no gradient.
        present, labels = _present_rows(labels, 2)
        each = model.losses(outputs.flatten(0, 1), labels.flatten(0, 1)).view(present.shape)
        return torch.where(present, each, 0.0).sum(1) / present.sum(1).clamp(min=1)

    return replace(
        model,
        module=RowWise(model.module, None if packing is None else rows),
        packing=packing,
        losses=of_person,
        label_shape=(rows, *model.label_shape),
        padding=None if model.padding is None else replace(model.padding, axes=2),
    )


def _present_rows(labels: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Whether each row is present, for rows in dimension `dims` - 1; and the labels without the mark of absence."""
    missing = labels.isnan() if labels.is_floating_point() else labels.eq(IGNORED)
    present = ~missing.flatten(dims).all(-1) if labels.dim() > dims else ~missing
    absent = present.logical_not().view(*present.shape, *[1] * (labels.dim() - dims))
    return present, torch.where(absent, torch.zeros_like(labels), labels)


@dataclass(frozen=True)
class UserLevelBarrier:
    """A barrier for statistics of rows, each of which becomes a person's mean."""

    barrier: Barrier

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.barrier.input_shape[1:]

    def total(self, statistic: Statistic, **options: Any) -> Tensor:
        """Like `Barrier.total`, for a statistic of one row and its label."""

        def mean(rows: Tensor, labels: Tensor) -> Tensor:
            each, present = _row_statistics(statistic, rows, labels)
            return (each * present.view(-1, *[1] * (each.dim() - 1))).sum(0) / present.sum().clamp(min=1)

        return self.barrier.total(mean, **options)

    def histograms(self, cells: Statistic, *args: Any, **options: Any) -> Tensor:
        """Like `Barrier.histograms`, for the cells of one row and its label."""

        def of_rows(rows: Tensor, labels: Tensor) -> Tensor:
            each, present = _row_statistics(cells, rows, labels)
            return torch.where(present[:, None] > 0, each, -1)

        return self.barrier.histograms(of_rows, *args, **options)

    def moment(self, statistic: Statistic, **options: Any) -> Tensor:
        """Like `Barrier.moment`; a person's matrix is built so that its A^T A is the mean of the rows'."""

        def together(rows: Tensor, labels: Tensor) -> Tensor:
            each, present = _row_statistics(statistic, rows, labels)
            # [k, m, c] -> [k m, c]: stacked rows s_r A_r have the product sum_r s_r^2 A_r^T A_r, with s_r^2 = 1 / rows.
            share = (present / present.sum().clamp(min=1)).sqrt()
            return (each * share[:, None, None]).flatten(0, 1)

        return self.barrier.moment(together, **options)


def _row_statistics(statistic: Statistic, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The statistic of each row of a person, [k, ...], and a 1 for each row that is present."""
    present, labels = _present_rows(labels, 1)
    each = torch.stack([statistic(row, label) for row, label in zip(rows, labels, strict=True)])
    return each, present.to(each.dtype)


def user_level_barrier(barrier: Barrier, rows: int | None) -> Barrier:
    """The barrier for statistics of rows: the barrier itself, or `UserLevelBarrier` if a record is a person."""
    return barrier if rows is None else UserLevelBarrier(barrier)  # type: ignore[return-value]

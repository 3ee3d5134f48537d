"""Several rows of one person as one record, so that whole people are sampled, clipped and protected.

A record is [k, *shape] with labels [k, ...]. A row is absent if all its labels are IGNORED, or NaN for real numbers. A
person's loss is the mean over the rows that are present, so its gradient is the mean of theirs; statistics for learned
features are averaged likewise. A bound on each row's gradient, Hessian or statistic therefore holds for a person too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from algorithms.models import Model
from algorithms.models.model import Packing
from algorithms.models.objectives import IGNORED
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.statistics import Statistic


class OfRows(nn.Module):
    """Applies a module of rows to people: [batch, k, ...] -> [batch, k, ...].

    packed: k if a row's parts are packed; made-up people are then [batch, k * width].
    """

    def __init__(self, module: nn.Module, packed: int | None = None) -> None:
        super().__init__()
        self.module, self.packed = module, packed

    def forward(self, people: Tensor) -> Tensor:
        if self.packed is not None:
            people = people.reshape(len(people), self.packed, -1)
        found: Tensor = self.module(people.flatten(0, 1))
        return found.view(*people.shape[:2], *found.shape[1:])


def of_people(model: Model, rows: int | None) -> Model:
    """The model of people with this number of rows; its flat parameter vector is that of `model`.

    For None, if a record is a row, the model itself.

    Example:
        >>> from algorithms.models.objectives import cross_entropy
        >>> rows = Model("linear", nn.Linear(3, 2), cross_entropy, scores=lambda outputs: outputs)
        >>> people, labels = torch.zeros(4, 5, 3), torch.full((4, 5), IGNORED)
        >>> labels[:, 0] = 1
        >>> model = of_people(rows, 5)
        >>> model.losses(model.module(people), labels).shape
        torch.Size([4])
    """
    if rows is None:
        return model
    packing = None if model.packing is None else Packing(model.packing.parts * rows)
    return replace(
        model,
        module=OfRows(model.module, None if packing is None else rows),
        packing=packing,
        losses=_mean_of_rows(model.losses),
        label_shape=(rows, *model.label_shape),
    )


def _mean_of_rows(losses: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def of_person(outputs: Tensor, labels: Tensor) -> Tensor:
        there, labels = _there(labels, 2)
        each = losses(outputs.flatten(0, 1), labels.flatten(0, 1)).view(there.shape)
        return torch.where(there, each, 0.0).sum(1) / there.sum(1).clamp(min=1)

    return of_person


def _there(labels: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Whether each row is present, for rows in dimension `dims` - 1; and the labels without the mark of absence."""
    missing = labels.isnan() if labels.is_floating_point() else labels.eq(IGNORED)
    there = ~missing.flatten(dims).all(-1) if labels.dim() > dims else ~missing
    absent = there.logical_not().view(*there.shape, *[1] * (labels.dim() - dims))
    return there, torch.where(absent, torch.zeros_like(labels), labels)


@dataclass(frozen=True)
class OfPeople:
    """A barrier for statistics of rows, each of which becomes a person's mean."""

    barrier: Barrier

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.barrier.input_shape[1:]

    def total(self, statistic: Statistic, **given: Any) -> Tensor:
        """Like `Barrier.total`, for a statistic of one row and its label."""

        def mean(rows: Tensor, labels: Tensor) -> Tensor:
            each, there = _of_each(statistic, rows, labels)
            return (each * there.view(-1, *[1] * (each.dim() - 1))).sum(0) / there.sum().clamp(min=1)

        return self.barrier.total(mean, **given)

    def moment(self, statistic: Statistic, **given: Any) -> Tensor:
        """Like `Barrier.moment`; a person's matrix is built so that its A^T A is the mean of the rows'."""

        def together(rows: Tensor, labels: Tensor) -> Tensor:
            each, there = _of_each(statistic, rows, labels)
            share = (there / there.sum().clamp(min=1)).sqrt()
            return (each * share[:, None, None]).flatten(0, 1)

        return self.barrier.moment(together, **given)


def _of_each(statistic: Statistic, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The statistic of each row of a person, [k, ...], and a 1 for each row that is present."""
    there, labels = _there(labels, 1)
    each = torch.stack([statistic(row, label) for row, label in zip(rows, labels, strict=True)])
    return each, there.to(each.dtype)


def asked_of_rows(barrier: Barrier, rows: int | None) -> Barrier:
    """The barrier for statistics of rows: the barrier itself, or `OfPeople` if a record is a person."""
    return barrier if rows is None else OfPeople(barrier)  # type: ignore[return-value]

"""Candidates on a line, and the outputs of a linear model that are carried along it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

CARRIES = 16
"""How often margins are carried over before they are computed afresh, which bounds their drift."""


@dataclass(frozen=True)
class Line:
    """The candidates `origin - steps[i] * direction`; origin and direction have the shape [d]."""

    origin: Tensor
    direction: Tensor
    steps: tuple[float, ...]

    def at(self, index: int) -> Tensor:
        """One candidate, shape [d]; who goes on from it takes it from here, so that it is recognised bit for bit."""
        return self.candidates[index].clone()

    @cached_property
    def candidates(self) -> Tensor:
        """All candidates, shape [k, d], computed in 64 bits and rounded to the origin's type; not to be changed."""
        steps = torch.tensor(self.steps, dtype=torch.float64, device=self.origin.device)
        return (self.origin - steps[:, None] * self.direction).to(self.origin.dtype)


@dataclass(frozen=True)
class Carried:
    """Margins from which the next question starts; functions of the records, to be kept where the records may be.

    parameters: [d], where the margins [n, o] belong. age: [], how often they were carried since a fresh product.
    direction [d], steps [k], slopes [n, o]: the last line from there and its direction's margins; empty without one.
    """

    parameters: Tensor
    margins: Tensor
    age: Tensor
    direction: Tensor
    steps: Tensor
    slopes: Tensor

    def moved_to(self, parameters: Tensor) -> "Carried | None":
        """The same where the parameters are its own, or a candidate of the line unless carried too often; else None."""
        if parameters.dtype != self.parameters.dtype:
            return None
        if self.parameters.equal(parameters):
            return self
        if len(self.steps) == 0 or int(self.age) >= CARRIES:
            return None
        candidates = Line(self.parameters, self.direction, tuple(self.steps.tolist())).candidates
        found = (candidates == parameters).all(dim=1).nonzero()
        if len(found) == 0:
            return None
        margins = torch.sub(self.margins, self.slopes, alpha=float(self.steps[found[0, 0]]))
        return at_point(parameters, margins, self.age + 1)


def at_point(parameters: Tensor, margins: Tensor, age: Tensor) -> Carried:
    """Margins without a line."""
    none, steps = margins.new_empty(0), torch.empty(0, dtype=torch.float64)
    return Carried(parameters.detach().clone(), margins, age, none, steps, none)

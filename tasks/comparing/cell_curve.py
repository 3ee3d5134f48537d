"""The objective over the steps of a run: released parameters kept while it trains, their losses computed after it."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.models import Model
from algorithms.privacy.trace import Trace
from data.records import Records
from tasks.comparing.data import Sides

_POINTS = 200
_BATCH, _AT_ONCE = 4096, 32


class Curve:
    """Keeps the released parameters after some of the steps: each where there are few, about 200 where many.

    start: the algorithm's state before the first step.
    """

    def __init__(self, released: Callable[[Any], Tensor], steps: int, *, start: Any) -> None:
        self._released = released
        self._wanted = points(steps)
        self._last: tuple[int, Any] | None = None
        self._kept: list[tuple[int, Tensor]] = []
        self._keep(0, start)
        self.seconds = 0.0

    def observe(self, step: int, state: Any) -> None:
        """Called after each step."""
        began = time.perf_counter()
        self._last = (step, state)
        if step in self._wanted:
            self._keep(step, state)
        self.seconds += time.perf_counter() - began

    def frame(self, model: Model, trace: Trace, data: Sides, *, regularisation: float) -> pd.DataFrame:
        """Columns step, objective, and epsilon spent by then, an upper bound. model: as it was trained."""
        if self._last and self._last[0] != self._kept[-1][0]:
            self._keep(*self._last)  # a run that ended before its last planned step
        parameters = torch.stack([kept for _, kept in self._kept])
        losses = mean_losses(model, parameters, data.train)
        norms = parameters.double().square().sum(dim=1).numpy()
        steps = [step for step, _ in self._kept]
        spent = np.array([0.0, *(row.epsilon for row in trace.rows)])
        done = np.searchsorted([row.step for row in trace.rows], steps, side="left")
        return pd.DataFrame(
            {"step": steps, "objective": losses + regularisation * norms, "epsilon": spent[done]}
        )

    def _keep(self, step: int, state: Any) -> None:
        self._kept.append((step, self._released(state).detach().clone().cpu()))


def points(steps: int) -> set[int]:
    """Which steps of `steps` a curve keeps: all of up to 200, else about 200 that lie denser at the start."""
    if steps <= _POINTS:
        return set(range(1, steps + 1))
    dense = np.geomspace(1, steps, _POINTS // 2).round().astype(int)
    even = np.linspace(1, steps, _POINTS // 2).round().astype(int)
    return {*dense.tolist(), *even.tolist()}


def mean_losses(model: Model, parameters: Tensor, part: Records) -> NDArray[np.float64]:
    """The mean loss over the records at each of several parameters, shape [k, d] -> [k]."""

    def total(point: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        return model.losses(model.outputs(model.named(point), inputs), labels).double().sum()

    totals = torch.zeros(len(parameters), dtype=torch.float64)
    with torch.no_grad():
        for start in range(0, len(part.labels), _BATCH):
            inputs = torch.from_numpy(np.array(part.features[start : start + _BATCH]))
            labels = torch.from_numpy(np.array(part.labels[start : start + _BATCH]))
            for first in range(0, len(parameters), _AT_ONCE):
                some = parameters[first : first + _AT_ONCE]
                totals[first : first + _AT_ONCE] += torch.func.vmap(total, in_dims=(0, None, None))(
                    some, inputs, labels
                )
    result: NDArray[np.float64] = totals.numpy() / len(part.labels)
    return result

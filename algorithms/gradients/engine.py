"""The engine: clipped sums of per-example gradients, by the fastest way that is right for the model.

A pass records every use of a trained parameter and what came back to it (book-keeping, Bu et al. 2023), so norms and
clipped sums follow without a second pass; a model that cannot be recorded is taken record by record by `torch.func`.
Which way, how the records lie in its tensors, and whether it can be clipped at all is found out once, on made-up
inputs.
"""

import copy
import logging
import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from algorithms.gradients.arithmetic import wide
from algorithms.gradients.clipping import Clipping
from algorithms.gradients.contributions import Contributions
from algorithms.gradients.examination import Examined, examine
from algorithms.gradients.passes import Passes
from algorithms.gradients.tape import Unrecorded
from algorithms.models import Model

_LOG = logging.getLogger(__name__)

_PASSES = 3
"""What a forward and a backward pass and the norms need, as a multiple of what a forward pass keeps."""

_CACHED_BYTES = 128e6
"""What a CPU works on best at once."""


class Engine:
    """Per-example gradients of a model on one device.

    input_shape, input_dtype: of one record. memory_mb: what a pass may take, from which the physical batch follows
    unless it is given. Raises Unclippable where the model mixes records.
    """

    def __init__(
        self,
        model: Model,
        *,
        input_shape: tuple[int, ...],
        input_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        memory_mb: int = 1024,
        physical_batch: int | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        self._passes = Passes(_on(model, device))
        self._examined = examine(self._passes, input_shape, input_dtype, device)
        self._log()
        self.physical_batch = physical_batch or _fitting(self._examined, memory_mb, device)

    def clipped_sum(self, parameters: Tensor, inputs: Tensor, labels: Tensor, clipping: Clipping) -> Tensor:
        """The sum over records of their clipped gradients.

        parameters: flat, shape [d]. inputs: [batch, *input_shape]; an empty batch gives zero. labels: [batch].
        Returns shape [d], float64. Every contribution is within the clipping's bound, rounding included.
        """
        first, *others = self._batches(inputs, labels)
        total = self.contributions(parameters, *first).clipped_sum(clipping)
        for batch in others:
            total += self.contributions(parameters, *batch).clipped_sum(clipping)
        return total

    def contributions(self, parameters: Tensor, inputs: Tensor, labels: Tensor) -> Contributions:
        """Losses, norms and sums of one physical batch from a single pass; for the barrier alone."""
        if len(labels) == 0:
            return self._passes.contributions(parameters, parameters.new_zeros(0), {})
        if self._examined.layouts is not None:
            try:
                return self._passes.recorded(parameters, inputs, labels, self._examined.layouts)
            except Unrecorded as reason:
                self._examined = Examined(None, str(reason), self._examined.bytes_per_record)
                self._log()
        return self._passes.one_by_one(parameters, inputs, labels)

    def norms(self, parameters: Tensor, inputs: Tensor, labels: Tensor, clipping: Clipping) -> Tensor:
        """The norm of every record's gradient, as `clipping` measures it; [batch] (or [batch, layers]), float64."""
        parts = [
            self.contributions(parameters, *part).norms(clipping) for part in self._batches(inputs, labels)
        ]
        return torch.cat(parts)

    def clipped_losses(self, parameters: Tensor, inputs: Tensor, labels: Tensor, bound: float) -> Tensor:
        """The sum over records of their losses, each clipped to [0, bound]; shape [], float64."""
        total = torch.zeros((), dtype=torch.float64, device=parameters.device)
        for some, their in self._batches(inputs, labels) if len(labels) else []:
            losses = self._passes.losses(parameters, some, their).double()
            total += torch.nan_to_num(losses, nan=0.0, posinf=bound, neginf=0.0).clamp(0.0, bound).sum()
        return total

    def _batches(self, inputs: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        size = self.physical_batch
        return list(zip(torch.split(inputs, size), torch.split(labels, size), strict=True))

    def _log(self) -> None:
        name, found = self._passes.model.name, self._examined
        if found.layouts is None:
            _LOG.warning("the model %s is taken record by record, since there is %s", name, found.reason)
        elif found.without_rule:
            _LOG.warning(
                "in the model %s these are taken record by record: %s", name, ", ".join(found.without_rule)
            )


def clip_and_sum(rows: Tensor, clipping: Clipping) -> Tensor:
    """The sum of rows after clipping, [batch, d] -> [d], float64; a row that is not finite counts as zero."""
    return Contributions.of_rows(wide(rows)).clipped_sum(clipping)


def _fitting(examined: Examined, memory_mb: int, device: torch.device) -> int:
    """How many records to take at once: what fits the memory, on a CPU no more than is fast."""
    most = math.inf if device.type == "cuda" else _CACHED_BYTES
    return max(1, int(min(memory_mb * 1e6, most) / (_PASSES * examined.bytes_per_record)))


def _on(model: Model, device: torch.device) -> Model:
    """The model with its buffers and untrained parameters on a device."""
    if device.type == "cpu":
        return model
    module: nn.Module = copy.deepcopy(model.module).to(device)
    return replace(model, module=module)

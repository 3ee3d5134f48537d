"""The records of a run: the noise trace, and diagnostics for runs on public records.

The trace has one row per release and is public by construction: nothing in it is computed from a record.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import dp_accounting.dp_event as dp
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.gradients import Affine, Clipping, Engine, PerLayer
from algorithms.privacy.accounting.events import event_from_json, event_to_json
from algorithms.privacy.barrier.record_loader import Batch
from algorithms.privacy.mechanisms.release import Release

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ReleaseRow:
    """One release. epsilon: cost so far at the run's delta, by the plan's accountant or by the run's filter.

    It bounds the cost of a run that ends at a step fixed in advance. If releases are chosen adaptively, no theorem
    makes it the cost of a run that ends because of what was released; then the filter's total holds.
    """

    release: int
    step: int
    kind: str
    event: str
    sampling: str
    sampling_rate: float
    clipping: str
    clip_norm: float
    noise: str
    noise_multiplier: float
    noise_std: float
    divisor: float
    epsilon: float


class Trace:
    """The rows of a run so far. `step` is set by the training loop and stamped on the rows that follow."""

    def __init__(self, rows: list[ReleaseRow] | None = None) -> None:
        self.rows = list(rows or [])
        self.step = 0

    def record(self, release: Release, event: dp.DpEvent, *, noise_std: float, epsilon: float) -> None:
        """Add the row of a release that was just charged."""
        self.rows.append(
            ReleaseRow(
                release=len(self.rows),
                step=self.step,
                kind=release.kind,
                event=json.dumps(event_to_json(event)),
                sampling=re.sub("(?<=[a-z])(?=[A-Z])", " ", type(release.sampling).__name__).lower(),
                sampling_rate=release.sampling.rate,
                clipping=type(release.clipping).__name__,
                clip_norm=release.clipping.sensitivity,
                noise=release.noise.name,
                noise_multiplier=release.noise.multiplier,
                noise_std=noise_std,
                divisor=release.divisor,
                epsilon=epsilon,
            )
        )

    def events(self) -> list[dp.DpEvent]:
        """The recorded events, in order."""
        return [event_from_json(json.loads(row.event)) for row in self.rows]

    def write(self, to: Path | BytesIO) -> None:
        """Write the rows as Parquet."""
        import pandas as pd  # here and below, since a plan has no use for it

        frame = pd.DataFrame(
            [asdict(row) for row in self.rows], columns=list(ReleaseRow.__dataclass_fields__)
        )
        frame.to_parquet(to, index=False)


@dataclass(frozen=True)
class GradientDiagnostics:
    """One gradient release; L2 norms, in units of the model's gradient.

    Attributes:
        release, step: As in the noise trace.
        error: Distance between the answer and the exact mean gradient, which is the unclipped sum over the same sample
            with the same divisor.
        noise: Norm of the answer's noise.
        exact: Norm of the exact gradient.
        clipped: The share of the sample that clipping reduced, NaN for an empty sample.
    """

    release: int
    step: int
    error: float
    noise: float
    exact: float
    clipped: float


@dataclass(frozen=True)
class AnsweredGradient:
    """A gradient release at a point [d]: clipping, divisor, and its sum without and with noise, [d]."""

    point: Tensor
    clipping: Clipping
    divisor: float
    total: NDArray[np.float64]
    noisy: NDArray[np.float64]


class Diagnostics:
    """The effect of clipping and noise on each gradient, computed from the records and stored without noise.

    Only for runs on public records: such a run promises no privacy, and its card and report say so. The measurement
    does not change the answer, and algorithms never see it. Rows exist from the start or the last resumption of a run;
    a crash loses the earlier ones.

    Gradients over importance samples are not measured, since they do not estimate the sample's mean gradient.
    """

    def __init__(self) -> None:
        self.rows: list[GradientDiagnostics] = []

    def measure(
        self,
        answered: AnsweredGradient,
        engine: Engine,
        batches: Iterable[Batch],
        *,
        release_and_step: tuple[int, int],
    ) -> None:
        """Add the row of a gradient, by a second pass over its sample. batches: the sample."""
        total, records, clipped = _exact_sum(answered, engine, batches)
        exact, (shift, scale) = total / answered.divisor, _affine(answered.clipping)
        error = shift + scale * answered.noisy / answered.divisor - exact
        noise = scale * (answered.noisy - answered.total) / answered.divisor
        release, step = release_and_step
        share = clipped / records if records else math.nan
        self.rows.append(GradientDiagnostics(release, step, _norm(error), _norm(noise), _norm(exact), share))

    def write(self, path: Path) -> None:
        """Write the rows as Parquet; the table is empty if nothing was measured."""
        self.frame().to_parquet(path, index=False)

    def frame(self) -> "pd.DataFrame":
        """The rows as a table."""
        import pandas as pd  # here, since a plan has no use for it

        rows = [asdict(row) for row in self.rows]
        return pd.DataFrame(rows, columns=list(GradientDiagnostics.__dataclass_fields__))


def _exact_sum(
    answered: AnsweredGradient, engine: Engine, batches: Iterable[Batch]
) -> tuple[NDArray[np.float64], int, int]:
    """The sum of unclipped gradients, [d]; the number of records, and the number that clipping reduced.

    A record without a finite gradient adds nothing to the sum and counts as reduced.
    """
    total, records, clipped = torch.zeros(len(answered.point), dtype=torch.float64), 0, 0
    parts = (part for batch in batches for part in engine.in_parts(answered.point, *batch))
    for gradients, _, labels in parts:
        norms = gradients.norms(answered.clipping)
        finite = gradients.finite(answered.clipping)
        indices = torch.nonzero(finite)[:, 0]
        weights = torch.ones(len(indices), dtype=torch.float64, device=norms.device)
        total += gradients.take(indices).weighted_sum(weights).cpu()
        records += len(labels)
        clipped += int((_beyond(norms, answered.clipping) | ~finite).sum())
    return total.numpy(), records, clipped


def _norm(vector: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(vector))


def _beyond(norms: Tensor, clipping: Clipping) -> Tensor:
    """Which records have a norm above the bound, in any layer for per-layer bounds; [batch]."""
    if isinstance(clipping, PerLayer):
        return (norms > torch.tensor(clipping.norms, device=norms.device)).any(dim=1)
    return norms > clipping.sensitivity


def _affine(clipping: Clipping) -> tuple[NDArray[np.float64] | float, NDArray[np.float64] | float]:
    """The shift and scale that turn a mean of transformed gradients into a mean of gradients."""
    if not isinstance(clipping, Affine):
        return 0.0, 1.0
    return clipping.shift.double().cpu().numpy(), clipping.scale.double().cpu().numpy()

"""The noise trace: one row a release, public by construction (nothing in it is computed from a record)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import dp_accounting as dp

from algorithms.privacy.accounting.events import event_from_json, event_to_json
from algorithms.privacy.mechanisms.release import Release


@dataclass(frozen=True)
class Row:
    """One release. epsilon: cost so far at the run's delta, by the run's filter.

    It bounds a run that is ended at a step fixed in advance; where releases are chosen on the way, no theorem makes it
    the cost of a run that is ended because of what was seen. What holds then is the whole filter's.
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

    def __init__(self, rows: list[Row] | None = None) -> None:
        self.rows = list(rows or [])
        self.step = 0

    def record(self, release: Release, event: dp.DpEvent, *, noise_std: float, epsilon: float) -> None:
        """Adds the row of a release that was just charged."""
        self.rows.append(
            Row(
                release=len(self.rows),
                step=self.step,
                kind=release.kind,
                event=json.dumps(event_to_json(event)),
                sampling=_SAMPLING[type(release.sampling).__name__],
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

    def write(self, path: Path) -> None:
        """Writes the rows as parquet."""
        import pandas as pd  # here and below, since a plan has no use for it

        frame = pd.DataFrame([asdict(row) for row in self.rows], columns=list(Row.__dataclass_fields__))
        frame.to_parquet(path, index=False)


def read_trace(path: Path) -> Trace:
    """The trace that `Trace.write` wrote."""
    import pandas as pd

    frame = pd.read_parquet(path)
    return Trace([Row(**{str(key): value for key, value in row.items()}) for row in frame.to_dict("records")])


_SAMPLING = {
    "Poisson": "poisson",
    "FullBatch": "full batch",
    "WithoutReplacement": "without replacement",
    "Importance": "importance",
    "CyclicPoisson": "cyclic poisson",
    "FixedOrder": "fixed order",
}

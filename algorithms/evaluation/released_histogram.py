"""The released histogram of held-out records: noisy cells, from which all metrics follow."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from algorithms.evaluation.histogram import Floats, HistogramSpec


@dataclass(frozen=True)
class NoisyTables:
    """Tables by name with their noisy cells, and the standard deviation of the noise in each cell.

    z: standard deviations on each side of an interval.
    """

    spec: HistogramSpec
    tables: Mapping[str, Floats]
    noise_std: float
    z: float


@dataclass(frozen=True)
class ReleasedHistogram:
    """The noisy histogram, which is all that leaves of the held-out records.

    Attributes:
        spec: its description.
        values: [cells].
        noise_std: standard deviation of the independent Gaussian noise in every cell.
        best_of: among how many releases this one is chosen by its own values, on average where their number is drawn at
            random. Intervals then hold in at least 95 % of such choices, whichever is made: each of the releases has an
            interval that misses in at most 5 % / `best_of` (Bonferroni). Estimates are then a little too good.
    """

    spec: HistogramSpec
    values: Floats
    noise_std: float
    best_of: float = 1.0

    @property
    def z(self) -> float:
        """Standard deviations on each side of an interval."""
        return -NormalDist().inv_cdf(0.025 / self.best_of)

    def __post_init__(self) -> None:
        if self.values.shape != (self.spec.cells,) or not np.isfinite(self.values).all():
            raise ValueError("the released cells do not fit the histogram.")
        if not (math.isfinite(self.noise_std) and self.noise_std >= 0):
            raise ValueError("the standard deviation of the noise is a number from 0.")

    def view(self, part: str = "", groups: tuple[int, ...] = (0,)) -> "NoisyTables":
        """The tables of all records, or the sums of those of some groups of a part.

        Example:
            >>> from algorithms.evaluation.histogram import histogram_for
            >>> released = ReleasedHistogram(histogram_for("score", 1, (("sex", ("f", "m")),)), np.arange(10.0), 2.0)
            >>> both = released.view("sex", (0, 1))
            >>> both.tables["score"].tolist(), both.noise_std == math.sqrt(8)
            ([9.0, 11.0, 13.0], True)
        """
        chosen = list(groups)
        tables = {
            name: table[chosen].sum(axis=0) for name, table in self.spec.tables_of(part, self.values).items()
        }
        return NoisyTables(self.spec, tables, self.noise_std * math.sqrt(len(groups)), self.z)

    def half(self, which: int) -> Floats:
        """The noisy cells of one half of the people: of score x label, [bins, 2], or of `temperature_cells`."""
        half: Floats = self.spec.half_cells(self.values)[which]
        return half

    @property
    def has_invalid(self) -> bool:
        """Whether more records than noise explains could not be evaluated; then metrics of the others would mislead."""
        return bool(self.values[-1] > 6.0 * self.noise_std) and self.noise_std > 0

    def to_json(self) -> str:
        document = {
            "spec": json.loads(self.spec.to_json()),
            "values": self.values.tolist(),
            "noise_std": self.noise_std,
        }
        return json.dumps(document, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ReleasedHistogram":
        """Raises ValueError for a text that `to_json` did not write."""
        try:
            document = json.loads(text)
            spec = HistogramSpec.from_json(json.dumps(document["spec"]))
            return cls(spec, np.array(document["values"], np.float64), float(document["noise_std"]))
        except (TypeError, KeyError) as error:
            raise ValueError("this is not a released histogram of held-out records.") from error

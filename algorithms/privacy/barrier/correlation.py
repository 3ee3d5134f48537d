"""Which step of a run's correlated noise comes next, and what it goes on with.

The first step is charged for all, so a later one must be of the same run: the same strategy, noise, sampling and bound,
in its turn. What the trace has recorded is held against it, also where a run is taken up again and the noise of its
earlier steps is drawn once more.
"""

import json
from dataclasses import replace
from typing import Any

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.events import event_to_json
from algorithms.privacy.barrier.performance import Records
from algorithms.privacy.barrier.trace import Row, Trace
from algorithms.privacy.mechanisms.correlated import Correlated, Correlator
from algorithms.privacy.mechanisms.noise import Generator
from algorithms.privacy.mechanisms.release import Release, noise_std, words_of_sample


class Correlation:
    """The correlated steps of a barrier. records: by whose number the place of noise in a stream moves."""

    def __init__(self, generator: Generator, trace: Trace, records: Records) -> None:
        self._generator, self._trace, self._records = generator, trace, records
        self._terms: tuple[Any, ...] = ()
        self._correlator: Correlator | None = None
        self._next = 0

    def of(self, release: Release, dimension: int) -> Correlator | None:
        """What makes the noise of a release that is about to be charged; None where its noise stands alone.

        Raises RefusedError for a step that does not follow the one before it.
        """
        if not isinstance(noise := release.noise, Correlated):
            return None
        first = replace(release, noise=replace(noise, step=0), divisor=1.0)
        if noise.step == 0:
            self._terms, self._next = (first, dimension), 0
            self._correlator = noise.strategy.correlator(dimension)
        elif self._correlator is None:
            self._take_up(first, noise, dimension)
        if self._correlator is None or self._terms != (first, dimension) or self._next != noise.step:
            raise RefusedError(
                f"step {noise.step} of correlated noise was asked for, and it does not go on with the steps before it;"
                " ask for the steps in their order, with one strategy, noise, sampling, bound and model."
            )
        return self._correlator

    def charged(self) -> None:
        """The release that was asked about last is charged."""
        self._next += 1

    def _take_up(self, first: Release, noise: Correlated, dimension: int) -> None:
        """Draws the noise of the steps that the trace has recorded, where they are of the same run."""
        rows = self._rows()
        if not rows or json.loads(rows[0].event) != event_to_json(first.event()) or len(rows) > noise.steps:
            return
        correlator = noise.strategy.correlator(dimension)
        skip = words_of_sample(first.sampling, len(self._records.labels))
        for step, row in enumerate(rows):
            same = replace(first, noise=replace(noise, step=step))
            kept = (type(first.clipping).__name__, first.clipping.sensitivity, noise_std(same, dimension))
            if (row.clipping, row.clip_norm, row.noise_std) != kept:
                return
            correlator.draw(self._generator.stream(row.release).later(skip))
        self._terms, self._correlator, self._next = (first, dimension), correlator, len(rows)

    def _rows(self) -> list[Row]:
        """The releases of the newest run of correlated steps."""
        rows = [row for row in self._trace.rows if row.noise == Correlated(1.0).name]
        starts = [
            place for place, row in enumerate(rows) if json.loads(row.event)["type"] == "CorrelatedDpEvent"
        ]
        return rows[starts[-1] :] if starts else []

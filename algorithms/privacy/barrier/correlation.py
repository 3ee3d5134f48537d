"""The state of correlated noise between the steps of a run, each of which has to continue the steps before it."""

import json
from dataclasses import replace
from typing import Any

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.events import event_to_json
from algorithms.privacy.barrier.record_loader import RecordArrays
from algorithms.privacy.barrier.trace import ReleaseRow, Trace
from algorithms.privacy.mechanisms.correlated import Correlated
from algorithms.privacy.mechanisms.noise import Generator
from algorithms.privacy.mechanisms.release import Correlator, Release
from algorithms.privacy.mechanisms.release_noise import noise_std
from algorithms.privacy.mechanisms.sampling import words_of_sample


class Correlation:
    """The state of a run's correlated noise between its steps.

    The first step is charged for all steps, so each later step must continue it: with the same strategy, noise,
    sampling and bound, in order. This is checked against the trace. In a resumed run the noise of the earlier steps is
    drawn again. records: their number decides where noise begins in a stream.
    """

    def __init__(self, generator: Generator, trace: Trace, records: RecordArrays) -> None:
        self._generator, self._trace, self._records = generator, trace, records
        self._terms: tuple[Any, ...] = ()
        self._correlator: Correlator | None = None
        self._next = 0

    def of(self, release: Release, dimension: int) -> Correlator | None:
        """The correlator for a release that is about to be charged; None if its noise is independent.

        Raises RefusedError for a step that does not follow the step before it.
        """
        if not isinstance(noise := release.noise, Correlated):
            return None
        first = replace(release, noise=replace(noise, step=0), divisor=1.0)
        if noise.step == 0:
            self._terms, self._next = (first, dimension), 0
            self._correlator = noise.strategy.correlator(dimension)
        elif self._correlator is None:
            self._resume(first, noise, dimension)
        if self._correlator is None or self._terms != (first, dimension) or self._next != noise.step:
            raise RefusedError(
                f"step {noise.step} of correlated noise was asked for out of order or under changed terms; ask for the"
                " steps in their order, with one strategy, noise, sampling, bound and model."
            )
        return self._correlator

    def advance(self) -> None:
        """Move to the next step; called once the last release given to `of` is charged."""
        self._next += 1

    def _resume(self, first: Release, noise: Correlated, dimension: int) -> None:
        """Draw the noise of the recorded steps again, if they belong to the same correlated run."""
        rows = self._rows()
        if not rows or json.loads(rows[0].event) != event_to_json(first.event()) or len(rows) > noise.steps:
            return
        correlator = noise.strategy.correlator(dimension)
        skip = words_of_sample(first.sampling, len(self._records.labels))
        for step, row in enumerate(rows):
            same = replace(first, noise=replace(noise, step=step))
            continued = (
                type(first.clipping).__name__,
                first.clipping.sensitivity,
                noise_std(same, dimension),
            )
            if (row.clipping, row.clip_norm, row.noise_std) != continued:
                return
            correlator.draw(self._generator.stream(row.release).later(skip))
        self._terms, self._correlator, self._next = (first, dimension), correlator, len(rows)

    def _rows(self) -> list[ReleaseRow]:
        """The trace's rows of the latest sequence of correlated steps."""
        rows = [row for row in self._trace.rows if row.noise == Correlated(1.0).name]
        starts = [
            index for index, row in enumerate(rows) if json.loads(row.event)["type"] == "CorrelatedDpEvent"
        ]
        return rows[starts[-1] :] if starts else []

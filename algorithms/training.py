"""The training loop: start or take up, step, checkpoint, tell. It knows algorithms only as plan, init and step."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from algorithms import checkpoint
from algorithms.algorithm import Algorithm, Plan, State
from algorithms.models import Model
from algorithms.privacy.barrier import Barrier, Performance, Records
from algorithms.privacy.filters import Filter
from algorithms.privacy.noise import Generator
from algorithms.privacy.trace import Trace

Tell = Callable[[int, float], None]
"""Receives the steps taken so far and the epsilon spent so far."""
Observe = Callable[[int, State], None]
"""Receives the steps taken so far and the state after them, which is made of releases alone."""


def train(
    algorithm: Algorithm[Any],
    plan: Plan,
    model: Model,
    *,
    open_records: Callable[[], Records],
    generator: Generator,
    run_id: str,
    folder: Path,
    performance: Performance,
    checkpoint_seconds: float,
    tell: Tell,
    observe: Observe | None = None,
) -> tuple[State, Trace]:
    """Trains to the plan's end, or from the checkpoint in `folder` on, and returns the last state and the trace.

    generator: the run's own; a run that is taken up must be given the one it began with, and then repeats what it
    drew, bit for bit. open_records: called once, after the plan and the checkpoint were accepted. observe: called after
    each step, for curves.
    Raises Refused where the checkpoint is of another run.
    """
    start = algorithm.init(model.initial_parameters().to(performance.device), plan)
    state, step, trace = checkpoint.load(folder, start, run_id=run_id) or (start, 0, Trace())
    spend = recharged(plan.open_filter(), trace)
    barrier = Barrier(
        open_records(),
        model,
        spend=spend,
        generator=generator,
        delta=plan.target.budget.delta,
        trace=trace,
        performance=performance,
    )
    saved = time.monotonic()
    for trace.step in range(step, plan.steps):
        following = algorithm.step(state, plan, barrier)
        if following is None:
            break
        state = following
        tell(trace.step + 1, trace.rows[-1].epsilon if trace.rows else 0.0)
        if observe is not None:
            observe(trace.step + 1, state)
        if time.monotonic() - saved >= checkpoint_seconds:
            checkpoint.save(folder, state, run_id=run_id, step=trace.step + 1, trace=trace)
            saved = time.monotonic()
    return state, trace


def recharged(spend: Filter, trace: Trace) -> Filter:
    """A fresh filter brought to where a trace left off."""
    for event in trace.events():
        spend.charge(event)
    return spend

"""The training loop: start or take up, step, checkpoint, tell. It knows algorithms only as plan, init and step."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from algorithms import checkpoint
from algorithms.algorithm import Algorithm, Plan, State
from algorithms.features.features import Features, learned
from algorithms.models import Model
from algorithms.models.fronts import buffers, installed
from algorithms.privacy.barrier import Barrier, Performance, Records
from algorithms.privacy.diagnostics import Diagnostics
from algorithms.privacy.errors import Refused
from algorithms.privacy.filters import Filter
from algorithms.privacy.importance import LastNorms
from algorithms.privacy.noise import Generator
from algorithms.privacy.trace import Trace

Tell = Callable[[int, float, float], None]
"""Receives the steps taken so far, the epsilon spent so far and the standard deviation of the last noise."""
Observe = Callable[[int, State], None]
"""Receives the steps taken so far and the state after them, which is made of releases alone."""


@dataclass(frozen=True)
class _Progress:
    """What a checkpoint holds: the algorithm's state, and the buffers of what was learned before its first step."""

    state: Any
    buffers: Mapping[str, Tensor]


class Trained(NamedTuple):
    """The last state, the trace, and the model with what was learned about its features."""

    state: State
    trace: Trace
    model: Model


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
    features: Features | None = None,
    diagnostics: Diagnostics | None = None,
) -> Trained:
    """Trains to the plan's end, or from the checkpoint in `folder` on.

    generator: the run's own; a run that is taken up must be given the one it began with, and then repeats what it
    drew, bit for bit. open_records: called once, after the plan and the checkpoint were accepted. observe: called after
    each step, for curves. features: what is learned before the first step, for a model that they are in front of.
    diagnostics: where what is not private is recorded of public records; a run that is taken up goes on without what
    was recorded before.
    Raises Refused where the checkpoint is of another run.
    """
    state = algorithm.init(model.initial_parameters().to(performance.device), plan)
    start, last_norms = _Progress(state, buffers(model)), LastNorms()
    found, step, trace = checkpoint.load(folder, start, run_id=run_id, last_norms=last_norms) or (
        start,
        0,
        Trace(),
    )
    spend = recharged(plan.open_filter(), trace)
    barrier = Barrier(
        open_records(),
        model,
        spend=spend,
        generator=generator,
        delta=plan.target.budget.delta,
        trace=trace,
        performance=replace(performance, number=plan.public.records),
        last_norms=last_norms,
        diagnostics=diagnostics,
    )
    if features is not None and not trace.rows:
        found = replace(
            found, buffers=learned(features, barrier, plan.public.records, plan.target.count_noise)
        )
    if features is not None:
        barrier = barrier.about(model := installed(model, found.buffers))
    state, saved = found.state, time.monotonic()
    for trace.step in range(step, plan.steps):
        following = algorithm.step(state, plan, barrier)
        if following is None:
            break
        state = following
        last = trace.rows[-1] if trace.rows else None
        tell(trace.step + 1, last.epsilon if last else 0.0, last.noise_std if last else 0.0)
        if observe is not None:
            observe(trace.step + 1, state)
        if time.monotonic() - saved >= checkpoint_seconds:
            progress = _Progress(state, found.buffers)
            checkpoint.save(
                folder, progress, run_id=run_id, step=trace.step + 1, trace=trace, last_norms=last_norms
            )
            saved = time.monotonic()
    return Trained(state, trace, model)


def recharged(spend: Filter, trace: Trace) -> Filter:
    """A fresh filter brought to where a trace left off."""
    for event in trace.events():
        spend.charge(event)
    return spend


def device_of(name: str) -> torch.device:
    """The device "cpu" or "cuda", or for "auto" the better one that is here; raises Refused where there is none.

    On a GPU, PyTorch is set to repeat itself bit for bit.
    """
    has_cuda = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda") or (name == "cuda" and not has_cuda):
        why = "but there is no CUDA device here" if name == "cuda" else "which is no device"
        raise Refused(f"performance.device is {name}, {why}; set it to auto or cpu.")
    if name == "cuda" or (name == "auto" and has_cuda):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        return torch.device("cuda")
    return torch.device("cpu")

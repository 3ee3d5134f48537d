"""The training loop: learn features, start or resume, step, checkpoint, report progress."""

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from algorithms.core.checkpoint import collect, load, save
from algorithms.core.learned_features import FeatureLearner, LearnedFeatures, learn_features
from algorithms.core.method import Algorithm, MethodState
from algorithms.core.plan import Plan
from algorithms.core.user_level import user_level_model
from algorithms.errors import RefusedError
from algorithms.models import Model
from algorithms.models.feature_transforms import buffers, install_buffers
from algorithms.privacy.accounting.filters import Filter
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig, RecordArrays
from algorithms.privacy.barrier.frozen_prefix import has_frozen_prefix
from algorithms.privacy.barrier.importance_sampling import LastNorms
from algorithms.privacy.barrier.trace import Diagnostics, Trace
from algorithms.privacy.mechanisms.noise import Generator

OnStep = Callable[[int, float, float], None]
"""Called with the steps taken, the epsilon spent so far and the standard deviation of the last noise."""
OnState = Callable[[int, MethodState], None]
"""Called with the steps taken and the state after them, which follows from releases alone."""


@dataclass(frozen=True)
class _Progress:
    """The content of a checkpoint: the algorithm's state, and the buffers of learned features."""

    state: Any
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class ResumableRun:
    """Which run is trained, and what it resumes from.

    Attributes:
        run_id: In its checkpoint, which no other run takes.
        generator: Of its noise and samples; a resumed run must get the generator it began with, and then repeats its
            noise bit for bit.
        folder: Of its checkpoint.
        checkpoint_seconds: How often one is saved; by default never.
        checkpoint: The first process's, for the others of a run, in place of one in `folder`.
    """

    run_id: str
    generator: Generator
    folder: Path
    checkpoint_seconds: float = math.inf
    checkpoint: bytes | None = None


@dataclass(frozen=True)
class Hooks:
    """What a caller of the loop learns, pays and replaces.

    Attributes:
        on_step: Called after each step.
        on_state: Called after each step, if given, with the state.
        reserve: Pays for the run; called after the checkpoint and the model are accepted, before the records are read.
        diagnostics: Records what is not private, for public records only; a resumed run loses the earlier entries.
        barrier_of: Makes the barrier; audits use one that keeps its answers.
    """

    on_step: OnStep = lambda *_: None
    on_state: OnState | None = None
    reserve: Callable[[], None] = lambda: None
    diagnostics: Diagnostics | None = None
    barrier_of: Callable[..., Barrier] = Barrier


class Trained(NamedTuple):
    """The last state, the trace, and the model with its learned features."""

    state: MethodState
    trace: Trace
    model: Model


def train(
    algorithm: Algorithm[Any],
    plan: Plan,
    model: Model,
    *,
    open_records: Callable[[], RecordArrays],
    run: ResumableRun,
    compute: ComputeConfig,
    hooks: Hooks = Hooks(),
    features: FeatureLearner | None = None,
    shared_features: tuple[LearnedFeatures, Trace] | None = None,
) -> Trained:
    """Train to the plan's end, from the start or from the run's checkpoint.

    open_records: called once, after the plan and the checkpoint are accepted; only their shape is used before
    `hooks.reserve`. features: learned before the first step, for a model that has their map in front. shared_features:
    features that `learn_shared_features` released for several runs together, instead of a release for this run.

    Raises RefusedError if the checkpoint does not fit the model or the model cannot be trained privately, or not in
    this way, and whatever `hooks.reserve` raises.
    """
    _check_sharing(algorithm, compute, hooks.diagnostics)
    # The start is made in any case: a checkpoint gets its structure, shapes and devices from it.
    first_state = algorithm.init(compute.local_copy(model.initial_parameters()), plan)
    start, last_norms = _Progress(first_state, buffers(model)), LastNorms()
    resumed = load(
        run.folder,
        start,
        run_id=run.run_id,
        last_norms=last_norms,
        slices=compute.slices,
        content=run.checkpoint,
    )
    # Releases that several runs share are in the trace of each, at their price there, as if the run had made them.
    shared, shared_trace = shared_features or (None, None)
    first_trace = Trace() if shared_trace is None else _recost(plan, shared_trace)
    progress, step, trace = resumed or (start, 0, first_trace)
    rows = plan.facts.rows_per_user
    barrier = hooks.barrier_of(
        open_records(),
        user_level_model(model, rows),
        privacy_filter=_filter_after(plan, trace),
        generator=run.generator,
        delta=plan.target.budget.delta,
        trace=trace,
        compute=plan.with_public_sizes(compute),
        last_norms=last_norms,
        diagnostics=hooks.diagnostics,
    )
    hooks.reserve()  # after the barrier, whose inspection of the model may refuse, and before its first query
    if features is not None:
        # A resumed run has the buffers in its checkpoint, and the releases that they came from in its trace.
        if resumed is None:
            learned = shared or learn_features(features, barrier, model, plan)
            progress = _Progress(algorithm.init(compute.local_copy(learned.start), plan), learned.buffers)
        model = install_buffers(model, progress.buffers)
    seen_by_steps = user_level_model(model, rows)
    # Fixed first layers, of which a learned map is one by now, are computed once for all records.
    if features is not None or has_frozen_prefix(seen_by_steps):
        barrier = barrier.with_model(seen_by_steps)
    checkpoints = _Checkpoints(run, compute)
    for trace.step in range(step, plan.steps):  # each row of the trace bears its step
        state = algorithm.step(progress.state, plan, barrier)
        if state is None:
            break
        progress = replace(progress, state=state)
        hooks.on_step(trace.step + 1, *_progress_of(trace, plan))
        if hooks.on_state is not None:
            hooks.on_state(trace.step + 1, state)
        checkpoints.save_if_due(progress, trace, last_norms)
    return Trained(collect(progress.state, compute.slices), trace, model)


@dataclass
class _Checkpoints:
    """Writes the run's checkpoint every so many seconds; of several processes the first does."""

    run: ResumableRun
    compute: ComputeConfig
    saved_at: float = field(default_factory=time.monotonic)

    def save_if_due(self, progress: _Progress, trace: Trace, last_norms: LastNorms) -> None:
        """Save what the steps so far have come to, if the last checkpoint is old enough."""
        slices, group = self.compute.slices, self.compute.group
        is_due = time.monotonic() - self.saved_at >= self.run.checkpoint_seconds
        if slices is not None:  # the first process, which keeps the checkpoint, needs the others' slices
            is_due = group.broadcast_object(is_due)
        if not is_due:
            return
        # Every process takes part in collecting slices, also those that write nothing.
        whole = _Progress(collect(progress.state, slices), progress.buffers)
        if group.is_first:
            step = trace.step + 1
            save(
                self.run.folder,
                whole,
                run_id=self.run.run_id,
                step=step,
                trace=trace,
                last_norms=last_norms,
            )
        self.saved_at = time.monotonic()


def _check_sharing(
    algorithm: Algorithm[Any], compute: ComputeConfig, diagnostics: Diagnostics | None
) -> None:
    """Raises RefusedError for what processes that share a model's parameters cannot do."""
    if compute.group.count == 1:
        return
    if compute.shard_trained and not getattr(algorithm, "by_coordinate", False):
        raise RefusedError(
            "{method} computes with whole vectors of parameters, of which {compute.shard_trained} leaves"
            " each process a slice; set it to false, or {compute.offload} to true in its place.",
            code="method_of_whole_vectors",
            method=type(algorithm).__name__,
        )
    if (compute.shard_frozen or compute.shard_trained) and diagnostics is not None:
        raise RefusedError(
            "diagnostics are computed by the first process alone, which holds a part of the parameters; set"
            " {target.diagnostics}, or {compute.shard_frozen} and {compute.shard_trained}, to false.",
            code="diagnostics_of_shards",
        )


def _progress_of(trace: Trace, plan: Plan) -> tuple[float, float]:
    """The epsilon so far, which is at most the run's, and the noise of the step's gradient, or of its last release."""
    if not trace.rows:
        return 0.0, 0.0
    last = trace.rows[-1]
    of_step = itertools.takewhile(lambda row: row.step == last.step, reversed(trace.rows))
    gradient = next((row for row in of_step if row.kind == "gradient"), last)
    is_known = last.epsilon < math.inf
    return min(last.epsilon, plan.target.budget.epsilon) if is_known else math.inf, gradient.noise_std


def _filter_after(plan: Plan, trace: Trace) -> Filter:
    """The plan's filter with the trace charged, so that a resumed run has no more left than it had."""
    privacy_filter = plan.open_filter()
    for event in trace.events():
        privacy_filter.charge(event)
    return privacy_filter


def _recost(plan: Plan, trace: Trace) -> Trace:
    """The trace's rows of shared releases, with their cost by this run's filter.

    They were recorded under another run's filter, whose costs a trial's trace must not reveal.
    """
    privacy_filter, rows = plan.open_filter(), []
    for row, event in zip(trace.rows, trace.events(), strict=True):
        privacy_filter.charge(event)
        rows.append(replace(row, epsilon=privacy_filter.epsilon_spent(plan.target.budget.delta)))
    return Trace(rows)

"""The training loop: learn features, start or resume, step, checkpoint, report progress; and people as records.

Features that are learned from all records before training are releases like any others, and are charged. Each kind
makes its queries to the barrier and turns the answers into the buffers of a feature map in front of the model.

A checkpoint holds an algorithm's state and the trace so far in one safetensors file, which is written atomically: a
state with an older trace would use the noise of earlier releases again. It also holds the norms that importance
sampling remembers, which are private; only the owner can read the file, and it is deleted with the key.

Where a record is a person with several rows, whole people are sampled, clipped and protected. Such a record is [k,
*shape] with labels [k, ...]. A row is absent if all its labels are IGNORED, or NaN for real numbers. A person's loss is
the mean over the rows that are present, so its gradient is the mean of theirs; statistics for learned features are
averaged likewise. A bound on each row's gradient, Hessian or statistic therefore holds for a person too.
"""

import hashlib
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor, nn

from algorithms.core.calibration import count_release
from algorithms.core.method import Algorithm, Plan, State
from algorithms.core.minibatch import noisy_count
from algorithms.errors import RefusedError
from algorithms.gradients.placement import Shards, is_divided
from algorithms.models import Model
from algorithms.models.feature_transforms import Front, Shape, buffers, installed
from algorithms.models.model import Packing
from algorithms.models.objectives import IGNORED
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.barrier.barrier import Barrier, Performance, Records
from algorithms.privacy.barrier.trace import Diagnostics, Row, Trace
from algorithms.privacy.barrier.unnoised_queries import LastNorms, Statistic
from algorithms.privacy.mechanisms.noise import Generator
from algorithms.privacy.mechanisms.release import Release


class RowWise(nn.Module):
    """Applies a module of rows to people: [batch, k, ...] -> [batch, k, ...].

    packed: k if a row's parts are packed; made-up people are then [batch, k * width].
    """

    def __init__(self, module: nn.Module, packed: int | None = None) -> None:
        super().__init__()
        self.module, self.packed = module, packed

    def forward(self, people: Tensor) -> Tensor:
        if self.packed is not None:
            people = people.reshape(len(people), self.packed, -1)
        found: Tensor = self.module(people.flatten(0, 1))
        return found.view(*people.shape[:2], *found.shape[1:])


def user_level_model(model: Model, rows: int | None) -> Model:
    """The model of people with this number of rows; its flat parameter vector is that of `model`.

    For None, if a record is a row, the model itself.

    Example:
        >>> from algorithms.models.objectives import cross_entropy
        >>> rows = Model("linear", nn.Linear(3, 2), cross_entropy, scores=lambda outputs: outputs)
        >>> people, labels = torch.zeros(4, 5, 3), torch.full((4, 5), IGNORED)
        >>> labels[:, 0] = 1
        >>> model = user_level_model(rows, 5)
        >>> model.losses(model.module(people), labels).shape
        torch.Size([4])
    """
    if rows is None:
        return model
    packing = None if model.packing is None else Packing(model.packing.parts * rows)

    def of_person(outputs: Tensor, labels: Tensor) -> Tensor:
        present, labels = _present_rows(labels, 2)
        each = model.losses(outputs.flatten(0, 1), labels.flatten(0, 1)).view(present.shape)
        return torch.where(present, each, 0.0).sum(1) / present.sum(1).clamp(min=1)

    return replace(
        model,
        module=RowWise(model.module, None if packing is None else rows),
        packing=packing,
        losses=of_person,
        label_shape=(rows, *model.label_shape),
        padding=None if model.padding is None else replace(model.padding, axes=2),
    )


def _present_rows(labels: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Whether each row is present, for rows in dimension `dims` - 1; and the labels without the mark of absence."""
    missing = labels.isnan() if labels.is_floating_point() else labels.eq(IGNORED)
    present = ~missing.flatten(dims).all(-1) if labels.dim() > dims else ~missing
    absent = present.logical_not().view(*present.shape, *[1] * (labels.dim() - dims))
    return present, torch.where(absent, torch.zeros_like(labels), labels)


@dataclass(frozen=True)
class UserLevelBarrier:
    """A barrier for statistics of rows, each of which becomes a person's mean."""

    barrier: Barrier

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.barrier.input_shape[1:]

    def total(self, statistic: Statistic, **given: Any) -> Tensor:
        """Like `Barrier.total`, for a statistic of one row and its label."""

        def mean(rows: Tensor, labels: Tensor) -> Tensor:
            each, present = _row_statistics(statistic, rows, labels)
            return (each * present.view(-1, *[1] * (each.dim() - 1))).sum(0) / present.sum().clamp(min=1)

        return self.barrier.total(mean, **given)

    def moment(self, statistic: Statistic, **given: Any) -> Tensor:
        """Like `Barrier.moment`; a person's matrix is built so that its A^T A is the mean of the rows'."""

        def together(rows: Tensor, labels: Tensor) -> Tensor:
            each, present = _row_statistics(statistic, rows, labels)
            share = (present / present.sum().clamp(min=1)).sqrt()
            return (each * share[:, None, None]).flatten(0, 1)

        return self.barrier.moment(together, **given)


def _row_statistics(statistic: Statistic, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The statistic of each row of a person, [k, ...], and a 1 for each row that is present."""
    present, labels = _present_rows(labels, 1)
    each = torch.stack([statistic(row, label) for row, label in zip(rows, labels, strict=True)])
    return each, present.to(each.dtype)


def user_level_barrier(barrier: Barrier, rows: int | None) -> Barrier:
    """The barrier for statistics of rows: the barrier itself, or `UserLevelBarrier` if a record is a person."""
    return barrier if rows is None else UserLevelBarrier(barrier)  # type: ignore[return-value]


class Features(Protocol):
    """A kind of learned features.

    releases: its queries, for records of a shape; raises RefusedError for shapes that do not fit. learn: makes the
    queries and returns the module's buffers; records: their number, or a noisy count. module: the feature map.

    A kind may also have `check(model)`, which refuses models that do not fit behind its map, and
    `start(barrier, model)`, which is called after `learn` and returns the model's initial parameters.
    """

    def releases(self, shape: Shape) -> Sequence[Release]: ...
    def learn(self, barrier: Barrier, shape: Shape, records: float) -> Mapping[str, Tensor]: ...
    def module(self, shape: Shape) -> Front: ...


def schedule_of(features: Features, shape: Shape, records: int | None, count_noise: float) -> Schedule:
    """The events of learning the features; a count of the records comes first if their number is private."""
    first = [] if records is not None else [count_release(count_noise)]
    return [(release.event(), 1) for release in (*first, *features.releases(shape))]


def learn_buffers(
    features: Features, barrier: Barrier, records: int | None, count_noise: float
) -> dict[str, Tensor]:
    """Learn the buffers of the features' module, by the releases of `schedule_of`."""
    number = max(1.0, noisy_count(barrier, count_noise)) if records is None else float(records)
    return dict(features.learn(barrier, barrier.input_shape, number))


_LOG = logging.getLogger(__name__)

S = TypeVar("S")
CHECKPOINT, _FACTS, _CHECKSUM = "state.safetensors", "checkpoint", "sha256"
_LAST_NORMS = "private/last_norms"


def save(folder: Path, state: object, *, run_id: str, step: int, trace: Trace, last_norms: LastNorms) -> None:
    """Write the run's state after `step` steps and its trace into `folder`, readable by the owner only."""
    facts = json.dumps({"run_id": run_id, "step": step, "trace": [asdict(row) for row in trace.rows]})
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in flatten(state).items()}
    kept = last_norms.to_tensor()
    if kept is not None:
        tensors[_LAST_NORMS] = kept
    metadata = {_FACTS: facts, _CHECKSUM: _checksum(facts, tensors)}
    _write(folder / CHECKPOINT, lambda path: save_file(tensors, path, metadata=metadata))


def load(
    folder: Path,
    start: S,
    *,
    run_id: str,
    last_norms: LastNorms,
    slices: Shards | None = None,
    content: bytes | None = None,
) -> tuple[S, int, Trace] | None:
    """The run's checkpoint in `folder` as (state, steps taken, trace), or None if there is none.

    content: of the checkpoint of another process, in place of a file in `folder`.

    A checkpoint that is damaged or of another run counts as none: the run's generator repeats from its first step what
    it drew before. start: the state before the first step, for structure and devices. last_norms: is restored.
    slices: of the vectors in the state, if processes hold slices. Raises RefusedError if the checkpoint has tensors of
    other shapes.
    """
    if content is None and not (folder / CHECKPOINT).exists():
        return None
    expected = flatten(start)
    try:
        metadata, tensors = _read(folder / CHECKPOINT) if content is None else _parse(content)
    except SafetensorError:
        metadata, tensors = {}, {}
    is_whole = metadata.get(_CHECKSUM) == _checksum(metadata.get(_FACTS, ""), tensors)
    facts = json.loads(metadata[_FACTS]) if is_whole else {}
    if facts.get("run_id") != run_id:
        _LOG.warning(
            "the checkpoint in %s is %s: training begins again with the same noise, at no further cost",
            folder,
            "of another run" if is_whole else "damaged",
        )
        return None
    kept = tensors.pop(_LAST_NORMS, None)
    for name in sorted({*tensors, *expected}):
        there, here = (_form(held[name]) if name in held else "missing" for held in (tensors, expected))
        if there != here:
            raise RefusedError(
                f"{name} is {there} in the checkpoint in {folder}, but {here} in this run; go on with the version that"
                " wrote it, or forfeit that run and start a new one."
            )
    if kept is not None:
        last_norms.restore(kept)
    placed = {name: _placed_like(expected[name], tensor, slices) for name, tensor in tensors.items()}
    return unflatten(start, placed), facts["step"], Trace([Row(**row) for row in facts["trace"]])


def _read(file: Path) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        return opened.metadata() or {}, tensors


def _parse(content: bytes) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    tensors = load_tensors(content)
    length = int.from_bytes(content[:8], "little")  # of the header, by the format of safetensors
    return json.loads(content[8 : 8 + length]).get("__metadata__", {}), tensors


def _placed_like(expected: Tensor, tensor: Tensor, slices: Shards | None) -> Tensor:
    if slices is not None and is_divided(expected):
        return slices.divided(tensor)
    return tensor.to(expected.device)


def _progress_shown(trace: Trace, plan: Plan) -> tuple[float, float]:
    """The epsilon so far, which is at most the run's, and the noise of the step's gradient, or of its last release."""
    if not trace.rows:
        return 0.0, 0.0
    last = trace.rows[-1]
    of_step = itertools.takewhile(lambda row: row.step == last.step, reversed(trace.rows))
    gradient = next((row for row in of_step if row.kind == "gradient"), last)
    is_known = last.epsilon < math.inf
    return min(last.epsilon, plan.target.budget.epsilon) if is_known else math.inf, gradient.noise_std


def _whole(state: S, slices: Shards | None) -> S:
    """The state in the first process's main memory, where processes hold slices of its vectors."""
    if slices is None:
        return state
    parts = flatten(state).items()
    return unflatten(
        state, {name: slices.collected(part) if is_divided(part) else part for name, part in parts}
    )


def _checksum(facts: str, tensors: Mapping[str, Tensor]) -> str:
    """Protects the number of steps, among others: a wrong bit there would repeat steps that are paid for once."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {_form(tensors[name])}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def flatten(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a dataclass (or mapping) of tensors and dataclasses, by dotted name."""
    tensors: dict[str, Tensor] = {}
    for key, value in _items(state):
        name = prefix + key
        tensors |= {name: value} if isinstance(value, Tensor) else flatten(value, name + ".")
    return tensors


def unflatten(state: S, tensors: Mapping[str, Tensor], prefix: str = "") -> S:
    """`state` with the tensors that `flatten` named replaced."""
    changes = {}
    for key, value in _items(state):
        name = prefix + key
        changes[key] = tensors[name] if isinstance(value, Tensor) else unflatten(value, tensors, name + ".")
    return changes if isinstance(state, Mapping) else replace(state, **changes)  # type: ignore


def _items(state: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(state, Mapping):
        return state.items()
    return ((field.name, getattr(state, field.name)) for field in fields(state))


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Write through a temporary file, so that a crash leaves either the old file or the new one."""
    fresh = path.with_name(path.name + ".new")
    write(fresh)
    fresh.chmod(0o600)
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    fresh.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def by_name(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of named parameters on the CPU, for publication; contiguous, since safetensors writes no others."""
    contiguous = torch.contiguous_format
    return {name: torch.clone(part.detach().cpu(), memory_format=contiguous) for name, part in named.items()}


OnStep = Callable[[int, float, float], None]
"""Called with the steps taken, the epsilon spent so far and the standard deviation of the last noise."""
OnState = Callable[[int, State], None]
"""Called with the steps taken and the state after them, which follows from releases alone."""


@dataclass(frozen=True)
class _Progress:
    """The content of a checkpoint: the algorithm's state, and the buffers of learned features."""

    state: Any
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Learned:
    """Learned features: the buffers of their map, and the initial parameters of training."""

    buffers: Mapping[str, Tensor]
    start: Tensor


class Trained(NamedTuple):
    """The last state, the trace, and the model with its learned features."""

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
    checkpoint: bytes | None = None,
    performance: Performance,
    checkpoint_seconds: float,
    on_step: OnStep,
    on_state: OnState | None = None,
    features: Features | None = None,
    diagnostics: Diagnostics | None = None,
    barrier_of: Callable[..., Barrier] | None = None,
    learned_before: tuple[Learned, Trace] | None = None,
    reserve: Callable[[], None] = lambda: None,
) -> Trained:
    """Train to the plan's end, from the start or from the checkpoint in `folder`.

    checkpoint: the first process's, for the others of a run, in place of one in `folder`.
    generator: of this run; a resumed run must get the generator it began with, and then repeats its noise bit for bit.
    open_records: called once, after the plan and the checkpoint are accepted; only their shape is used before
    `reserve`. reserve: pays for the run; called after the checkpoint and the model are accepted, before the records are
    read. on_state: called after each step. features: learned before the first step, for a model that has their map in
    front. diagnostics: records what is not private, for public records only; a resumed run loses the earlier entries.
    barrier_of: makes the barrier; audits use one that keeps its answers. learned_before: features that `learn` released
    for several runs together, instead of a release for this run.

    Raises RefusedError if the checkpoint does not fit the model or the model cannot be trained privately, or not in
    this way, and whatever `reserve` raises.
    """
    _check_sharing(algorithm, performance, diagnostics)
    state = algorithm.init(performance.at_home(model.initial_parameters()), plan)
    start, last_norms = _Progress(state, buffers(model)), LastNorms()
    resumed = load(
        folder, start, run_id=run_id, last_norms=last_norms, slices=performance.slices, content=checkpoint
    )
    before = Trace() if learned_before is None else _counted_by(plan, learned_before[1])
    found, step, trace = resumed or (start, 0, before)
    rows, spend = plan.facts.rows_per_user, plan.open_filter()
    for event in trace.events():
        spend.charge(event)
    barrier = (barrier_of or Barrier)(
        open_records(),
        user_level_model(model, rows),
        spend=spend,
        generator=generator,
        delta=plan.target.budget.delta,
        trace=trace,
        performance=_planned(performance, plan),
        last_norms=last_norms,
        diagnostics=diagnostics,
    )
    reserve()
    if features is not None:
        if resumed is None:
            known = _learn(features, barrier, model, plan) if learned_before is None else learned_before[0]
            begun = algorithm.init(performance.at_home(known.start), plan)
            found = _Progress(begun, known.buffers)
        model = installed(model, found.buffers)
        barrier = barrier.about(user_level_model(model, rows))
    state, slices, saved = found.state, performance.slices, time.monotonic()
    for trace.step in range(step, plan.steps):
        following = algorithm.step(state, plan, barrier)
        if following is None:
            break
        state = following
        on_step(trace.step + 1, *_progress_shown(trace, plan))
        if on_state is not None:
            on_state(trace.step + 1, state)
        is_due = time.monotonic() - saved >= checkpoint_seconds
        if slices is not None:  # the first process, which keeps the checkpoint, needs the others' slices
            is_due = performance.group.broadcast_object(is_due)
        if is_due:
            progress = _Progress(_whole(state, slices), found.buffers)
            if performance.group.is_first:
                save(folder, progress, run_id=run_id, step=trace.step + 1, trace=trace, last_norms=last_norms)
            saved = time.monotonic()
    return Trained(_whole(state, slices), trace, model)


def _planned(performance: Performance, plan: Plan) -> Performance:
    """The performance with the public numbers of a plan."""
    return replace(performance, number=plan.facts.records, expected_batch=plan.expected_batch)


def _check_sharing(
    algorithm: Algorithm[Any], performance: Performance, diagnostics: Diagnostics | None
) -> None:
    """Raises RefusedError for what processes that share a model's parameters cannot do."""
    if performance.group.count == 1:
        return
    if performance.shard_trained and not getattr(algorithm, "by_coordinate", False):
        raise RefusedError(
            f"{type(algorithm).__name__} computes with whole vectors of parameters, of which performance.shard_trained"
            " leaves each process a slice; set it to false, or performance.offload to true in its place."
        )
    if (performance.shard_frozen or performance.shard_trained) and diagnostics is not None:
        raise RefusedError(
            "diagnostics are computed by the first process alone, which holds a part of the parameters; set"
            " privacy.diagnostics, or performance.shard_frozen and shard_trained, to false."
        )


def learn(
    features: Features,
    plan: Plan,
    model: Model,
    *,
    records: Records,
    generator: Generator,
    performance: Performance,
) -> tuple[Learned, Trace]:
    """Learn features once for several runs that share them; returns them with their rows of the trace.

    plan: of one of these runs, whose schedule begins with these releases.
    """
    trace, rows = Trace(), plan.facts.rows_per_user
    barrier = Barrier(
        records,
        user_level_model(model, rows),
        spend=plan.open_filter(),
        generator=generator,
        delta=plan.target.budget.delta,
        trace=trace,
        performance=_planned(performance, plan),
    )
    return _learn(features, barrier, model, plan), trace


def _learn(features: Features, barrier: Barrier, model: Model, plan: Plan) -> Learned:
    asked = user_level_barrier(barrier, plan.facts.rows_per_user)
    found = learn_buffers(features, asked, plan.facts.records, plan.target.count_noise)
    start = model.initial_parameters()
    if hasattr(features, "start"):
        start = features.start(asked, installed(model, found))
    return Learned(found, start)


def _counted_by(plan: Plan, trace: Trace) -> Trace:
    """The trace's rows of shared releases, with their cost by this run's filter.

    They were recorded under another run's filter, whose costs a trial's trace must not reveal.
    """
    spend, rows = plan.open_filter(), []
    for row, event in zip(trace.rows, trace.events(), strict=True):
        spend.charge(event)
        rows.append(replace(row, epsilon=spend.spent(plan.target.budget.delta)))
    return Trace(rows)

"""Inspects a model on made-up records, before any private record is read.

The model must process each record independently; otherwise gradients cannot be clipped. Its passes can be recorded if
the batch dimension of each tensor is known and the recorded gradients agree with autograd's.
"""

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from algorithms.gradients.arithmetic import MIN_KERNEL_BATCH
from algorithms.gradients.clipping import L2
from algorithms.gradients.cpu_threads import SECONDS_PER_OPERATION, SHORT_PASS_SECONDS, threads_up_to
from algorithms.gradients.errors import RecordsNotIndependentError, UnsupportedModelError
from algorithms.gradients.grad_sample_recorder import (
    GradSampleRecorder,
    Layouts,
    OverwrittenOutputError,
    UnrecordedError,
    interleave,
)
from algorithms.gradients.independence import (
    USUAL_COUNT,
    ModelProbe,
    ObservedLosses,
    check_apart,
    check_apart_briefly,
    check_first_records,
    check_layer_types,
    check_many_apart,
    check_shape,
    crowd,
    forbid_state_changes,
    random_layer,
    still,
)
from algorithms.gradients.model import PerExampleModel, copy_module
from algorithms.gradients.model_gradients import PerExampleGradients
from algorithms.gradients.op_tracer import (
    MemoryTracer,
    Operations,
    OpTracer,
    held_by,
    mixes,
    trace_model,
    tracing,
)
from algorithms.gradients.passes import Passes, PinnedBranches
from algorithms.gradients.randomness import same_randomness
from algorithms.gradients.synthetic_inputs import InputSpec, SyntheticBatch, form_of, near_start

_FEW_RECORDS, _MORE_RECORDS = 3, 17
"""Numbers of records in two traced passes; the dimensions that differ between the passes are those of the batch."""
_LARGE_FACTOR = 1e3
"""By how much made-up records or their losses are scaled, to find what mixes records at large values alone."""
_IN_32_BITS, _IN_64_BITS = 1e-4, 1e-9
"""Relative and absolute tolerance for a loss."""
_CROWD_COST = 1e8
"""Operations, and bytes, of a forward pass of very many records; it finds dependence that only large batches have."""
MAX_RECORDS = 2**12
"""The largest number of records in a pass on a CPU."""
_MAX_OPAQUE_ROUNDS = 6
"""How often layers are added to those that are seen as opaque."""
_FRAGMENTATION = 1.25
"""Memory of a CPU's process for each byte of tensors: malloc does not fill all gaps between those that are left."""
_SCRATCH_BYTES = 1e8
"""Memory in bytes that libraries and blocks in 64 bits take besides in a pass, at most; less for small models."""
_ROUNDING = 1e-2
"""Share of the tolerance by which rounding may move a zero gradient, relative to the whole gradient."""

T = TypeVar("T")


@dataclass(frozen=True)
class InspectionLimits:
    """How thorough an inspection is; beyond one of the first two limits it is brief.

    Attributes:
        full_operations: Of one record's forward pass; a full inspection takes a thousand such passes.
        full_bytes: Memory of the largest pass of a full inspection.
        crowd_operations: Of a brief inspection's forward pass of as many records as a full pass has: about a second.
        gradient_tolerance: Relative, for gradients of a deep model in 32 bits, where rounding may cross kinks such as
            ReLU's.
    """

    full_operations: float = 2e7
    full_bytes: float = 4e9
    crowd_operations: float = 1e11
    gradient_tolerance: float = 3e-2


@dataclass(frozen=True)
class PassCost:
    """What a pass takes, in bytes.

    Attributes:
        fixed: The part of its peak memory that does not depend on the number of records, as for copies of weights.
        each: The peak memory for each record.
        saved: By autograd for each record.
        materialized: The size of one record's materialised gradients.
    """

    fixed: int
    each: int
    saved: int = 0
    materialized: int = 0

    def of_process(self, parameters: Tensor) -> "PassCost":
        """The same with what a CPU's process holds besides tensors, for a model with these parameters [d]."""
        if parameters.device.type != "cpu":
            return self
        fixed = _FRAGMENTATION * self.fixed + min(_SCRATCH_BYTES, parameters.nbytes)
        return replace(self, fixed=int(fixed), each=int(_FRAGMENTATION * self.each))


@dataclass(frozen=True)
class ModelInspection:
    """The result of an inspection.

    Attributes:
        passes: of the model, with all that was decided: pinned branches, memory format, opaque layers and the like.
        form: the form of the made-up records.
        is_brief: whether this was a brief inspection.
        operations: of one record's forward pass, in products and convolutions.
        kernels: how many operators a forward pass calls.
        cost: of a pass.
        is_narrow: whether the model computes in 16 bits somewhere.
        is_random: whether the model draws random numbers. random_layer: makes a sentence that names where.
        layouts: the layouts of all uses of parameters; None if passes cannot be recorded, for the given `reason`.
        without_rule: operations that are differentiated record by record.
    """

    passes: Passes
    form: InputSpec
    is_brief: bool
    operations: int
    kernels: int
    cost: PassCost
    is_narrow: bool
    is_random: bool
    random_layer: Callable[[], str]
    layouts: Layouts | None
    reason: str
    without_rule: tuple[str, ...]


@contextmanager
def _recording() -> Iterator[None]:
    """Turn any error of a recorded pass into UnrecordedError, since the model's own passes had none."""
    try:
        yield
    except (
        UnrecordedError,
        RecordsNotIndependentError,
        UnsupportedModelError,
        MemoryError,
        torch.OutOfMemoryError,
    ):
        raise
    except Exception as error:
        raise UnrecordedError(str(error).strip().partition("\n")[0][:200]) from error


def check_apart_at(passes: Passes, form: InputSpec, count: int) -> None:
    """Raises RecordsNotIndependentError if losses in a pass of `count` records depend on others, beyond rounding."""
    in_32_bits = replace(passes, model=replace(passes.model, precision=torch.float32))
    parameters = near_start(passes.model).to(form.device)
    probe32 = ModelProbe(in_32_bits, parameters, form, tolerance=_IN_32_BITS)
    check_many_apart(_in_64_bits(probe32, form.draw(2, 0)), alone=True, count=count)


def _memory_of_a_record(passes: Passes, parameters: Tensor, form: InputSpec) -> tuple[int, int]:
    """The bytes that a record takes in 64 bits in a forward pass, and in a recorded pass with its graph."""
    few = form.draw(_FEW_RECORDS, 0)
    forward, _ = _measure(few, lambda records: passes.losses(parameters, records.inputs, records.labels))
    back, _ = _measure(few, lambda records: passes.gradients(parameters, records.inputs, records.labels))
    return 2 * forward.each, 4 * back.each


def _measure(few: SyntheticBatch, run: Callable[[SyntheticBatch], T]) -> tuple[PassCost, T]:
    """The peak memory of something that runs for one and for a few records, and its result for the few."""
    # Two points of a line through the number of records: `fixed` is its height at 0, `each` its slope.
    peaks = []
    for records in (few.alone(0), few):
        with MemoryTracer() as memory, same_randomness():
            result = run(records)
        peaks.append(records.inputs.nbytes + memory.peak)
    each = max(0, peaks[1] - peaks[0]) // (len(few.labels) - 1)
    return PassCost(max(0, peaks[0] - each), each), result


def in_16_bits(name: str) -> str:
    """The refusal of a model of 32 bits that converts numbers to 16."""
    return (
        f"the model {name} computes in 16 bits somewhere, by conversions of its own, though its precision is float32;"
        " take the conversions out, or set its precision to bfloat16."
    )


def examine(
    passes: Passes, spec: InputSpec, limits: InspectionLimits = InspectionLimits()
) -> ModelInspection:
    """Determine how to compute a model's per-example gradients; cheap checks and refusals come first.

    1. Layers that are known to mix records.
    2. The form of the records: the entries of the model's tables, and the labels.
    3. Whether a forward pass changes the model's state, and whether a record's loss or gradient depends on others.
    4. The batch dimension of the tensors that the rules need, and whether recorded gradients agree with autograd's. If
       they do not, or if they cannot be recorded, the model is differentiated record by record.

    A full inspection compares records among many others in 64 bits, and some of them in the precision of training. A
    brief one, for models with slow passes or of much memory, takes few passes of at most three records in 32 bits, as
    far as rounding leaves no doubt.

    Args:
        passes: of the model.
        spec: the form of the records, as far as it is known without the number of entries of the model's tables.
        limits: up to which an inspection is a full one.

    Raises:
        RecordsNotIndependentError: if records mix.
        UnsupportedModelError: if the losses depend on no parameter.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from algorithms.gradients.model_inspection import examine
        >>> from algorithms.gradients.synthetic_inputs import InputSpec
        >>> from algorithms.gradients.passes import Passes
        >>> from algorithms.gradients import PerExampleModel
        >>> class Centres(nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.places = nn.Parameter(torch.eye(3))
        ...
        ...     def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        ...         return -torch.cdist(inputs, self.places)
        >>> model = PerExampleModel("centres", Centres(), nn.CrossEntropyLoss(reduction="none"))
        >>> inspection = examine(Passes(model), InputSpec((3,), torch.float32, torch.device("cpu")))
        >>> inspection.layouts is None, inspection.is_random, inspection.without_rule
        (False, False, ('cdist',))
    """
    described = _describe_records(passes, spec, limits)
    with _threads_for(described.operations):
        runnable = _choose_passes(described)
        independent = _check_independence(runnable)
        recordable = _record_or_fall_back(independent)
        return _summarize(recordable)


@dataclass(frozen=True)
class _DescribedModel:
    """A model with the form of its records, and how thoroughly it can be inspected.

    passes: as they were given. unused: a copy of the module, before any pass. operations: of one record's forward pass.
    record_bytes: of one record in a forward pass in 64 bits. is_brief: whether the inspection is. has_crowd: whether a
    brief one has a pass of many records. probe32, probe64: in 32 bits, and in 64 if it is a full one and the model
    computes in them.
    """

    passes: Passes
    unused: nn.Module
    limits: InspectionLimits
    operations: int
    record_bytes: int
    is_brief: bool
    has_crowd: bool
    probe32: ModelProbe
    probe64: ModelProbe

    @property
    def form(self) -> InputSpec:
        """The form of the records."""
        return self.probe32.form

    @property
    def few(self) -> SyntheticBatch:
        """The records of the first trace."""
        return self.form.draw(2 if self.is_brief else _FEW_RECORDS, 0)

    def with_decisions(self, **decided: Any) -> Self:
        """The same with other decisions for the passes; see `Passes`."""
        return replace(
            self,
            probe32=self.probe32.with_decisions(**decided),
            probe64=self.probe64.with_decisions(**decided),
        )


@dataclass(frozen=True)
class _RunnableModel(_DescribedModel):
    """The same with the passes that the model runs in.

    first: a pass of a few records. pinned_branches: None if the model's control flow depends on values.
    """

    first: "_Trace"
    pinned_branches: PinnedBranches | None


@dataclass(frozen=True)
class _IndependentModel(_RunnableModel):
    """The same after the checks that records do not mix; second: a pass of more records."""

    second: "_Trace"
    is_random: bool


@dataclass(frozen=True)
class _RecordableModel(_IndependentModel):
    """The same with how gradients are computed; see `ModelInspection`."""

    layouts: Layouts | None
    reason: str
    cost: PassCost
    without_rule: tuple[str, ...]


def _check_parameters(model: PerExampleModel) -> None:
    """Raises UnsupportedModelError for parameters whose uses are hidden, or that do not fit into one vector."""
    scripted = next((n for n, layer in model.module.named_modules() if isinstance(layer, ScriptModule)), None)
    if scripted is not None:
        where = f"its layer {scripted}" if scripted else "it"
        raise UnsupportedModelError(
            f"the model {model.name} has TorchScript in it ({where}), whose uses of parameters cannot be seen; make the"
            " torch.nn.Module that it was made from, and load the weights by load_state_dict(scripted.state_dict())."
        )
    trained = [(name, part.dtype) for name, part in model.module.named_parameters() if part.requires_grad]
    by_type = {dtype: name for name, dtype in reversed(trained)}
    if len(by_type) > 1:
        examples = " and ".join(f"{str(dtype).partition('.')[2]} ({name})" for dtype, name in by_type.items())
        advice = "give model.float()"
        if any(dtype.is_complex for dtype in by_type):
            advice = "keep complex ones as real numbers, [..., 2], and use them by torch.view_as_complex"
        raise UnsupportedModelError(
            f"the model {model.name} has trained parameters of several types, {examples}, and all are one vector here;"
            f" {advice}."
        )


def _describe_records(passes: Passes, spec: InputSpec, limits: InspectionLimits) -> _DescribedModel:
    """Refuse what is known to mix records, and find the form of the records and the extent of the inspection."""
    module = passes.model.module
    _check_parameters(passes.model)
    check_layer_types(module)
    if not passes.model.shapes:
        raise RecordsNotIndependentError(f"the model {passes.model.name} has no parameters to train")
    unused = copy_module(module, module.parameters())
    parameters = near_start(passes.model).to(spec.device)
    with Operations() as operations:
        form = form_of(passes, parameters, spec, count=1)
    # Parameter vectors are summed many times.
    is_light = operations.count + 20 * len(parameters) <= limits.full_operations
    with _threads_for(operations.count):
        forward, back = _memory_of_a_record(passes, parameters, form) if is_light else (0, 0)
        needs_much = max(USUAL_COUNT * forward, _MORE_RECORDS * back) > limits.full_bytes
        is_brief = not is_light or needs_much
        if not is_brief:
            form = form_of(passes, parameters, spec, _MORE_RECORDS)
        in_32_bits = replace(passes, model=replace(passes.model, precision=torch.float32))
        probe32 = ModelProbe(in_32_bits, parameters, form, tolerance=_IN_32_BITS)
        return _DescribedModel(
            passes=passes,
            unused=unused,
            limits=limits,
            operations=operations.count,
            record_bytes=forward,
            is_brief=is_brief,
            has_crowd=operations.count * USUAL_COUNT <= limits.crowd_operations and not needs_much,
            probe32=probe32,
            probe64=probe32 if is_brief else _in_64_bits(probe32, form.draw(_MORE_RECORDS, 0)),
        )


def _threads_for(operations: int) -> AbstractContextManager[None]:
    """One CPU thread if passes of many records with so many operations each are short."""
    return threads_up_to(1 if USUAL_COUNT * operations * SECONDS_PER_OPERATION < SHORT_PASS_SECONDS else None)


def _choose_passes(described: _DescribedModel) -> _RunnableModel:
    """Decide how passes run, so that they can be recorded; each decision is tried on a traced pass of a few records."""
    described = described.with_decisions(unpacks=_may_unpack(described.probe32, described.probe64))
    few = described.few
    with forbid_state_changes(described.probe32):
        first = _trace(described.probe32, few)
    name, module = described.passes.model.name, described.probe32.passes.model.module
    if first.tracer.writes_into((described.probe32.parameters, *held_by(module))):
        # Of values that it does not change here, too: an embedding's max_norm rewrites only what is longer.
        raise RecordsNotIndependentError(
            f"the forward pass of the model {name} writes what it computes of records into its parameters or attributes"
        )
    if first.recorder is None and described.probe32.passes.is_channels_last:
        described = described.with_decisions(keeps_format=True)
        first = _trace(described.probe32, few)
    if first.recorder is None:
        again = _trace(described.probe32.with_decisions(uses_double_backward=True), few)
        if again.recorder is not None:
            described, first = described.with_decisions(uses_double_backward=True), again
    check_shape(described.probe32, first.seen)
    if described.is_brief:
        samples = [few, *([described.form.draw(_MORE_RECORDS, 1)] if described.has_crowd else [])]
    else:
        plain = described.probe64.draw(_FEW_RECORDS, 0)
        samples = [plain, plain.times(10.0), plain.times(_LARGE_FACTOR), plain.times(0.0), plain.with_holes()]
        samples.append(described.probe64.draw(_MORE_RECORDS, 1))
    pinned_branches, first = _resolve_branches(described.probe32, described.probe64, first, samples)
    described = described.with_decisions(
        pinned_branches=pinned_branches or (), expects_zeros=first.tracer.has_products
    )
    return _RunnableModel(**vars(described), first=first, pinned_branches=pinned_branches)


def _check_independence(runnable: _RunnableModel) -> _IndependentModel:
    """Raises RecordsNotIndependentError if a record's loss or gradient depends on others, or on earlier passes."""
    probe32, probe64, first = runnable.probe32, runnable.probe64, runnable.first
    try:
        check_first_records(runnable.unused, probe32)
        more = crowd(probe32) if runnable.is_brief else runnable.form.draw(_MORE_RECORDS, 0)
        second = _trace(probe32, more, other=first.recorder)
        if runnable.is_brief:
            is_random = _check_briefly(probe32, first, second, is_quick=runnable.has_crowd)
        else:
            is_random = check_apart(probe64)
        if probe64.is_exact:
            # A kernel may be wrong in 32 bits alone. Each record keeps its position in the batch, and so its rounding.
            check_many_apart(probe32, alone=False)
    except RecordsNotIndependentError as mixed:
        if first.tracer.is_narrow and runnable.passes.model.precision == torch.float32:
            # Rounding to 16 bits differs between numbers of records, as if they were mixed.
            name = runnable.passes.model.name
            raise UnsupportedModelError(in_16_bits(name), code="computes_in_16_bits", model=name) from mixed
        raise
    if not runnable.is_brief and not is_random:
        # A dependence that begins with more records than a run's passes have is a mistake all the same, such as a
        # capacity per batch.
        count = min(MAX_RECORDS, int(_CROWD_COST / max(1, runnable.operations, runnable.record_bytes)))
        if count > USUAL_COUNT:  # so many are compared by `check_apart`
            check_many_apart(probe64, alone=True, count=count)
    return _IndependentModel(**vars(runnable), second=second, is_random=is_random)


def _record_or_fall_back(independent: _IndependentModel) -> _RecordableModel:
    """Learn how passes are recorded; a model that cannot be recorded is differentiated record by record."""
    try:
        return _record(independent)
    except UnrecordedError as why:
        independent, reason = independent.with_decisions(opaque_layers=()), str(why)
    passes, parameters = independent.probe32.passes, independent.probe32.parameters
    cost, _ = _measure(independent.few, lambda records: _differentiate_alone(passes, parameters, records))
    if not _is_right_one_by_one(independent):
        independent = independent.with_decisions(are_separate=True)
        passes = independent.probe32.passes
    return _RecordableModel(
        **vars(independent),
        layouts=None,
        reason=reason,
        cost=replace(cost, materialized=4 * len(parameters)),
        without_rule=(),
    )


def _record(independent: _IndependentModel) -> _RecordableModel:
    """Learn how passes are recorded; layers whose operations cannot be are seen as one function each, one by one.

    Images keep their memory format where another is what cannot be recorded. Raises UnrecordedError if the model cannot
    be recorded.
    """
    if independent.pinned_branches is None:
        read = independent.first.tracer.data_dependent_read
        by = f" ({read})" if read else ""
        raise UnrecordedError(f"its control flow may depend on the values of a tensor{by}; masks are faster")
    independent = independent.with_decisions(keeps_views=True)
    for left in reversed(range(_MAX_OPAQUE_ROUNDS)):
        try:
            with _recording():
                learned = _learn_layouts(independent)
            independent = independent.with_decisions(not_by_rows=learned.not_by_rows)
            return _RecordableModel(
                **vars(independent),
                layouts=learned.layouts,
                reason="",
                cost=learned.cost,
                without_rule=learned.without_rule,
            )
        except OverwrittenOutputError:
            if left == 0 or not independent.probe32.passes.keeps_views:
                raise
            independent = independent.with_decisions(keeps_views=False)
        except UnrecordedError as why:
            if left and independent.probe32.passes.is_channels_last:
                # Dropout draws numbers in the order of memory, so that it drops others than autograd's pass.
                independent = independent.with_decisions(keeps_format=True)
                continue
            opaque_layers = _layers_to_fall_back(why, independent.probe32.passes)
            if not opaque_layers or left == 0:
                raise
            independent = independent.with_decisions(opaque_layers=opaque_layers)
            first = _trace(independent.probe32, independent.few)
            second = _trace(independent.probe32, independent.second.seen.sample, other=first.recorder)
            independent = replace(independent, first=first, second=second)
    raise AssertionError("the last try returns or raises")


def _summarize(recordable: _RecordableModel) -> ModelInspection:
    """What is needed after the inspection."""
    passes, probe32 = recordable.passes, recordable.probe32
    parameters, cost = probe32.parameters, recordable.cost
    # A brief inspection measures no saved tensors. A pass takes about three times as much as they do, see
    # `engine._PASS_MEMORY`.
    saved = cost.each // 3 if recordable.is_brief else _saved_each(passes, parameters, recordable.form)
    is_narrow = recordable.first.tracer.is_narrow or passes.model.precision == torch.bfloat16
    return ModelInspection(
        passes=replace(probe32.passes, model=passes.model),
        form=recordable.form,
        is_brief=recordable.is_brief,
        operations=recordable.operations,
        kernels=len(recordable.first.tracer.operations),
        cost=replace(cost.of_process(parameters), saved=max(1, saved)),
        is_narrow=is_narrow,
        is_random=recordable.is_random,
        random_layer=partial(random_layer, probe32, recordable.few) if recordable.is_random else str,
        layouts=recordable.layouts,
        reason=recordable.reason,
        without_rule=recordable.without_rule,
    )


@dataclass(frozen=True)
class _Trace:
    """A forward pass of some records: their losses, its operations, and the shapes of every call.

    recorder: None if the calls cannot be recorded, for the given `reason`.
    """

    seen: ObservedLosses
    tracer: OpTracer
    recorder: GradSampleRecorder | None
    reason: UnrecordedError | None = None


def _trace(
    probe: ModelProbe,
    sample: SyntheticBatch,
    pinned: bool | None = None,
    other: GradSampleRecorder | None = None,
) -> _Trace:
    """Trace a forward pass; pinned: as in `OpTracer`. other: the recorder of another batch size."""
    parameters, records = probe.parameters, (sample.inputs, sample.labels)
    constants = (parameters, *held_by(probe.passes.model.module))
    try:
        with _recording(), tracing(records, constants, pinned) as tracer:
            recorder, losses = probe.passes.record_forward(parameters, *records, other=other)
    except UnrecordedError as error:
        with tracing(records, constants, pinned) as tracer:
            losses = probe.passes.losses(parameters, *records)
        return _Trace(ObservedLosses(sample, losses, tracer.is_drawn), tracer, None, error)
    return _Trace(ObservedLosses(sample, losses, tracer.is_drawn), tracer, recorder)


def _check_briefly(probe: ModelProbe, few: _Trace, crowded: _Trace, *, is_quick: bool) -> bool:
    """`check_apart` for a large model, of which two passes are known; returns whether it draws random numbers."""
    draws_masks = few.tracer.is_drawn and few.tracer.draws_masks
    # The last two records of a crowd are the same, so that without random masks their losses are equal.
    is_other = draws_masks and not probe.close(*crowded.seen.losses[1:])
    is_random = is_other or probe.varies(few.seen, seeds=1)
    check = partial(check_apart_briefly, is_random=is_random, draws_masks=draws_masks, is_quick=is_quick)
    try:
        check(probe, few.seen, crowded.seen)
    except RecordsNotIndependentError:  # rounding in 32 bits can exceed the tolerance in a deep network
        exact = _in_64_bits(probe, few.seen.sample)
        if not exact.is_exact:
            raise
        check(exact, *(exact.observe(sample) for sample in (exact.draw(2, 0), crowd(exact))))
    return is_random


class _LearnedLayouts(NamedTuple):
    """The layouts of all uses of parameters, and what recorded passes showed; see `ModelInspection` and `Passes`."""

    layouts: Layouts
    cost: PassCost
    without_rule: tuple[str, ...]
    not_by_rows: frozenset[str]


def _learn_layouts(independent: _IndependentModel) -> _LearnedLayouts:
    """Learn the layouts, and check the gradients that are recorded with them.

    Raises UnrecordedError if recorded gradients differ from autograd's.
    """
    first, second = independent.first, independent.second
    for trace in (first, second):
        if trace.reason is not None:
            raise trace.reason
    assert second.recorder is not None
    # What is computed from parameters alone is recorded in the second pass only.
    of_records = ([each for each in trace.tracer.operations if each.of_records] for trace in (first, second))
    if independent.is_brief and any(mixes(*pair) for pair in zip(*of_records, strict=False)):
        raise UnrecordedError("it computes a value from all records")
    more = second.seen.sample
    for other in (
        () if independent.is_brief else (more.times(_LARGE_FACTOR), more.times(0.0), more.with_holes())
    ):
        recorder = _trace(independent.probe32, other, other=first.recorder).recorder
        if recorder is None or recorder.shapes != second.recorder.shapes:
            raise UnrecordedError("a size depends on the values of the records")
    layouts = second.recorder.layouts()
    try:
        return _check_recorded(independent, layouts)
    except UnrecordedError as why:
        # Shapes do not tell apart whether indices of a record are interleaved with those of others.
        layouts = interleave(layouts)
        try:
            return _check_recorded(independent, layouts)
        except UnrecordedError:
            raise why from None


def _check_recorded(independent: _IndependentModel, layouts: Layouts) -> _LearnedLayouts:
    """What recorded passes with these layouts show; raises UnrecordedError if gradients differ from autograd's."""
    passes, parameters = independent.probe32.passes, independent.probe32.parameters
    without_rule, not_by_rows = set[str](), set[str]()

    def run(records: SyntheticBatch) -> tuple[PerExampleGradients, Tensor]:
        gradients = passes.record_gradients(
            parameters, records.inputs, records.labels, layouts, without_rule, not_by_rows
        )
        return gradients, gradients.finite(L2(1.0))  # norms materialise gradients, which takes memory, too

    few = independent.first.seen.sample
    compared = few.shorten() if independent.is_brief else few
    cost, (gradients, finite) = _measure(compared, run)
    cost = replace(cost, materialized=gradients.materialized_bytes // len(compared.labels))
    if independent.is_brief:
        _check_gradients_briefly(independent, layouts, compared, gradients if bool(finite.all()) else None)
    else:
        _check_gradients_fully(independent, layouts)
    return _LearnedLayouts(layouts, cost, tuple(sorted(without_rule)), frozenset(not_by_rows))


def _check_gradients_fully(independent: _IndependentModel, layouts: Layouts) -> None:
    """Compare recorded gradients with autograd's in 64 bits, and then in the precision of training."""
    probe32, probe64 = independent.probe32, independent.probe64
    for sample in (probe64.draw(_FEW_RECORDS, 0), probe64.draw(_MORE_RECORDS, 0).shorten()):
        _check_gradients(probe64, sample, layouts)
    if not probe64.is_exact:
        return
    precision = independent.passes.model.precision
    trained = probe32.with_decisions(model=replace(probe32.passes.model, precision=precision))
    sample, gradients = _record_finite(trained, probe32.draw(MIN_KERNEL_BATCH, 0), layouts)
    try:
        _compare(trained, sample, gradients)
    except UnrecordedError:
        _compare_rounding(trained, probe64, sample, gradients, 10.0 * probe32.tolerance)


def _check_gradients_briefly(
    independent: _IndependentModel,
    layouts: Layouts,
    compared: SyntheticBatch,
    gradients: PerExampleGradients | None,
) -> None:
    """Compare gradients of some records with autograd's in 32 bits; None if some are not finite."""
    probe, few, tolerance = (
        independent.probe32,
        independent.first.seen.sample,
        independent.limits.gradient_tolerance,
    )
    if gradients is None:
        _check_gradients(probe, few, layouts, tolerance, _LARGE_FACTOR)
        return
    try:
        _compare(probe, compared, gradients, tolerance, _LARGE_FACTOR)
    except UnrecordedError:  # rounding in 32 bits can exceed the tolerance in a deep network
        exact = _in_64_bits(probe, few)
        if not exact.is_exact:
            raise
        _check_gradients(exact, compared.in_64_bits(), layouts, weight=_LARGE_FACTOR)
        _compare_rounding(probe, exact, compared, gradients, tolerance)


def _layers_to_fall_back(error: UnrecordedError, passes: Passes) -> tuple[str, ...]:
    """The layers to see as opaque, by name: those so far, and the one that an error arose in with others of its class.

    If that is one already, the one around it. Empty if no layer is known, if it has all trained parameters, or if the
    model differentiates in its forward pass, since its branches within a layer are not seen in backward passes.
    """
    if passes.uses_double_backward:
        return ()
    module, opaque_layers = passes.model.module, set(passes.opaque_layers)
    names = {id(layer): name for name, layer in module.named_modules()}
    name = error.parameter.rpartition(".")[0]
    cause: BaseException | None = None if error.parameter else error
    while cause is not None:
        frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(cause.__traceback__))
        name = ([names[id(layer)] for layer in frames if id(layer) in names] or [name])[-1]
        cause = cause.__cause__
    while name and (name in opaque_layers or not _trained_parameters(passes, name)):
        name = name.rpartition(".")[0]
    if len(_trained_parameters(passes, name)) == len(passes.model.shapes):
        return ()
    kind = type(module.get_submodule(name))
    alike = (other for other, layer in module.named_modules() if type(layer) is kind)
    opaque_layers |= {name} if kind.__module__.startswith("torch.") else {*alike}
    return tuple(
        layer_name
        for layer_name in sorted(opaque_layers)
        if not any(layer_name.startswith(f"{other}.") for other in opaque_layers)
    )


def _trained_parameters(passes: Passes, name: str) -> list[str]:
    """The trained parameters of a layer, by name."""
    return [part for part in passes.model.shapes if not name or part.startswith(f"{name}.")]


def _in_64_bits(probe: ModelProbe, sample: SyntheticBatch) -> ModelProbe:
    """The model in 64 bits, where rounding hides no difference; unchanged if it cannot compute in 64 bits.

    Some models require their own types, and a mask with the largest 64-bit number is infinite in a 32-bit softmax.
    """
    model = probe.passes.model
    model = replace(model, module=copy_module(model.module).double())
    wider = replace(probe, passes=replace(probe.passes, model=model), parameters=probe.parameters.double())
    try:
        tracer = trace_model(wider.passes, wider.parameters, sample.in_64_bits(), is_back=True)
        lost = ~wider.losses(sample.in_64_bits()).isfinite()
    except Exception:  # the model may reject 64-bit numbers
        return probe
    if bool(lost.any()) and bool(probe.losses(sample)[lost].isfinite().any()):
        return probe
    if not bool(wider.gradient(sample.in_64_bits()).isfinite().all()) and bool(
        probe.gradient(sample).isfinite().all()
    ):
        return probe
    # Some layers always compute in 32 bits, such as the RMS norms of language models.
    return wider if tracer.is_short else replace(wider, tolerance=_IN_64_BITS)


def _differentiate_alone(passes: Passes, parameters: Tensor, sample: SyntheticBatch) -> None:
    """Differentiate record by record; raises RecordsNotIndependentError if that fails, too.

    Raises UnsupportedModelError if the losses depend on no parameter.
    """
    if not passes.gradients(parameters, sample.inputs, sample.labels)[1]:
        raise UnsupportedModelError(
            f"the losses of the model {passes.model.name} have no gradient, as after .detach(), torch.no_grad() or a"
            " detour through NumPy; compute them from the outputs, and those from the parameters, in PyTorch alone."
        )
    try:
        passes.one_by_one(parameters, sample.inputs, sample.labels)
    except RuntimeError as reason:
        why = str(reason).partition("\n")[0]
        name = passes.model.name
        raise RecordsNotIndependentError(
            f"the model {name} cannot be differentiated record by record ({why})"
        ) from reason


def _is_right_one_by_one(independent: _IndependentModel) -> bool:
    """Whether gradients record by record are autograd's, which those of `torch.func` are not for all functions."""
    probe = independent.probe64
    if independent.is_random:
        return True
    sample = probe.draw(_FEW_RECORDS, 0)
    for _ in range(2):  # the second time without records whose gradients are not finite, if there are others
        gradients = probe.passes.one_by_one(probe.parameters, sample.inputs, sample.labels)
        finite = gradients.finite(L2(1.0))
        if bool(finite.all()) or not bool(finite.any()):
            break
        sample = sample.take(finite)
    try:
        _compare(probe, sample, gradients, independent.limits.gradient_tolerance)
    except UnrecordedError:
        return not bool(finite.any())
    return True


def _resolve_branches(
    probe32: ModelProbe, probe64: ModelProbe, first: _Trace, samples: list[SyntheticBatch]
) -> tuple[PinnedBranches | None, _Trace]:
    """Constants that replace data-dependent branch conditions without changing any single record's result.

    A model may branch, for example, on whether any record has padding, which changes how a mask is applied but not the
    result, or on how long the longest record is. The values for several records usually choose the general code.
    Returns also the pass with these constants; None for them if none are safe.
    """
    if first.tracer.has_no_branches:
        return (), first
    # None keeps the value that each condition has for several records. If all of these are false, pinning False would
    # be the same pass again.
    for pinned in (False, None, True) if any(first.tracer.pinned_branches) else (None, True):
        try:
            trace = first if pinned is None else _trace(probe32, first.seen.sample, pinned)
        except Exception:  # the model may not go on in the wrong branch
            continue
        pinned_branches = tuple(trace.tracer.pinned_branches)
        if (
            not trace.tracer.data_dependent_read
            and _pins_are_safe(probe64, pinned_branches, samples, trace.seen)
            and _has_no_branch_again(
                probe32.with_decisions(pinned_branches=pinned_branches), first.seen.sample.alone(0)
            )
        ):
            return pinned_branches, trace
    return None, first


def _has_no_branch_again(probe: ModelProbe, single: SyntheticBatch) -> bool:
    """Whether no layer that runs again in the backward pass meets a branch, which it would take by all records."""
    try:
        with still(probe.passes.model.module):
            probe.passes.gradients(probe.parameters, single.inputs, single.labels)
    except UnrecordedError:
        return False
    return True


def _may_unpack(probe32: ModelProbe, probe64: ModelProbe) -> bool:
    """Whether the model packs sequences, and records have the same losses if these are padded instead."""
    if not any(isinstance(layer, nn.RNNBase) for layer in probe32.passes.model.module.modules()):
        return False
    if (
        trace_model(probe32.passes, probe32.parameters, probe32.draw(_FEW_RECORDS, 0)).data_dependent_read
        != "pack_padded_sequence"
    ):
        return False
    sample, others = (probe64.draw(_FEW_RECORDS, seed) for seed in range(2))
    samples = [sample, sample.shorten(), sample.with_holes(), others.times(0.0)]
    return _agrees_with_single_records(probe64, replace(probe64.passes, unpacks=True), samples)


def _pins_are_safe(
    probe: ModelProbe, pinned_branches: PinnedBranches, samples: list[SyntheticBatch], seen: ObservedLosses
) -> bool:
    """Whether records in passes with these pins have the same losses as each record alone; seen: one of the passes.

    Real records may have larger numbers than made-up ones, such as a longer longest record. So a pinned number must
    either not matter, or be the largest one that the model takes.
    """
    pinning = replace(probe.passes, pinned_branches=pinned_branches)

    def with_pin(index: int, number: int) -> Passes:
        return replace(
            pinning, pinned_branches=(*pinned_branches[:index], number, *pinned_branches[index + 1 :])
        )

    def is_largest(index: int, number: int) -> bool:
        try:
            pinned_operations, larger_operations = (
                trace_model(passes, probe.parameters, samples[0]).operations
                for passes in (pinning, with_pin(index, number + 1))
            )
        except Exception:
            return True
        return pinned_operations == larger_operations

    numbers = [(i, pinned) for i, pinned in enumerate(pinned_branches) if not isinstance(pinned, bool | None)]
    return _agrees_with_single_records(probe, pinning, samples, seen) and all(
        _agrees_with_single_records(probe, with_pin(index, number - 1), samples) or is_largest(index, number)
        for index, number in numbers
    )


def _agrees_with_single_records(
    probe: ModelProbe, passes: Passes, samples: list[SyntheticBatch], seen: ObservedLosses | None = None
) -> bool:
    """Whether records in one of these passes have the same losses as each record alone, in evaluation mode."""
    module, together = probe.passes.model.module, replace(probe, passes=passes)
    if any(layer.training for layer in module.modules()):
        seen = None

    def agree(sample: SyntheticBatch) -> bool:
        alone = torch.cat([probe.losses(sample.alone(i)) for i in range(len(sample.labels))])
        losses = together.losses(sample) if seen is None or sample is not seen.sample else seen.losses
        return probe.close(losses, alone)

    try:
        with still(module):
            return all(agree(sample) for sample in samples)
    except Exception:  # the model may not go on in the wrong branch
        return False


def _record_finite(
    probe: ModelProbe, sample: SyntheticBatch, layouts: Layouts
) -> tuple[SyntheticBatch, PerExampleGradients]:
    """The records whose recorded gradients are finite, with these; raises UnrecordedError if there are none."""

    def record(records: SyntheticBatch) -> PerExampleGradients:
        with same_randomness():
            return probe.passes.record_gradients(probe.parameters, records.inputs, records.labels, layouts)

    gradients = record(sample)
    finite = gradients.finite(L2(1.0))
    if not bool(finite.all()):
        if not bool(finite.any()):
            raise UnrecordedError(
                "gradients that are not finite, such as those of a loss beyond its targets' bounds, which"
                " targets.clamp(low, high) in the loss would keep"
            )
        sample = sample.take(finite)
        gradients = record(sample)
    return sample, gradients


def _check_gradients(
    probe: ModelProbe,
    sample: SyntheticBatch,
    layouts: Layouts,
    tolerance: float | None = None,
    weight: float = 1.0,
) -> None:
    """Raises UnrecordedError if recorded gradients differ from autograd's, or are finite for no record."""
    _compare(probe, *_record_finite(probe, sample, layouts), tolerance, weight)


def _compare(
    probe: ModelProbe,
    sample: SyntheticBatch,
    gradients: PerExampleGradients,
    tolerance: float | None = None,
    weight: float = 1.0,
) -> None:
    """Raises UnrecordedError if a weighted sum of recorded gradients differs from autograd's.

    weight: of the losses, since some backward passes mix records only if errors are large. Parameters are compared one
    by one, so that only one copy of the gradient exists.
    """
    count, device = len(sample.labels), sample.labels.device
    weights = weight * torch.linspace(0.5, 2.0, count, dtype=torch.float64, device=device)
    with same_randomness():
        expected = probe.passes.gradients(probe.parameters, sample.inputs, sample.labels, weights)[1]
    if not expected:
        raise UnrecordedError("a loss that depends on no parameter")
    tolerance = 10.0 * probe.tolerance if tolerance is None else tolerance
    sizes = {name: float(torch.linalg.vector_norm(part)) for name, part in expected.items()}
    floor = 0.1 * _ROUNDING * tolerance * math.hypot(*sizes.values())
    for name, part in gradients.weighted_parts(weights):
        if name in expected:
            part -= expected.pop(name).reshape(-1)
        if not float(torch.linalg.vector_norm(part)) <= tolerance * sizes.get(name, 0.0) + floor:
            raise UnrecordedError("its recorded gradients differ from those of autograd", name)
    for name in expected:
        if not sizes[name] <= floor:
            raise UnrecordedError("its recorded gradients differ from those of autograd", name)


def _compare_rounding(
    trained: ModelProbe,
    exact: ModelProbe,
    sample: SyntheticBatch,
    recorded: PerExampleGradients,
    tolerance: float,
) -> None:
    """Raises UnrecordedError if recorded gradients are wrong in the precision of training, as by a faulty kernel.

    Rounding may move gradients of a deep model far, so recorded ones may be ten times as far from the exact ones as
    autograd's are. trained, exact: the model in the precision of training and in 64 bits. tolerance: relative, on top
    of that.
    """
    weights = torch.linspace(0.5, 2.0, len(sample.labels), dtype=torch.float64, device=sample.labels.device)

    def gradients(probe64: ModelProbe, records: SyntheticBatch) -> dict[str, Tensor]:
        with same_randomness():
            return probe64.passes.gradients(probe64.parameters, records.inputs, records.labels, weights)[1]

    rounded, exact_gradients = gradients(trained, sample), gradients(exact, sample.in_64_bits())
    sizes = {name: float(torch.linalg.vector_norm(part)) for name, part in exact_gradients.items()}
    floor = 0.1 * _ROUNDING * tolerance * math.hypot(*sizes.values())
    for name, part in recorded.weighted_parts(weights):
        if name in exact_gradients:
            expected = exact_gradients[name].reshape(-1)
            room = 10.0 * float(torch.linalg.vector_norm(rounded[name].reshape(-1) - expected))
            room += tolerance * sizes[name] + floor
            if not float(torch.linalg.vector_norm(part - expected)) <= room:
                raise UnrecordedError("its recorded gradients are wrong in the precision of training")


def _saved_each(passes: Passes, parameters: Tensor, form: InputSpec) -> int:
    """Bytes that autograd saves for each record, from passes with few and with more records."""
    sizes = []
    for sample in (form.draw(_FEW_RECORDS, 0), form.draw(_MORE_RECORDS, 0)):
        sizes_by_storage: dict[int, int] = {}

        def note(tensor: Tensor, sizes_by_storage: dict[int, int] = sizes_by_storage) -> Tensor:
            sizes_by_storage[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with suppress(RuntimeError), same_randomness(), hooks:  # torch.func does not support these hooks
            passes.gradients(parameters, sample.inputs, sample.labels)
        sizes.append(sum(sizes_by_storage.values()))
    return (sizes[1] - sizes[0]) // (_MORE_RECORDS - _FEW_RECORDS)

"""Inspects a model on made-up records, before any private record is read.

The model must process each record independently; otherwise gradients cannot be clipped. Its passes can be recorded if
the batch dimension of each tensor is known and the recorded gradients agree with autograd's.
"""

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from algorithms.gradients.arithmetic import FEWEST
from algorithms.gradients.clipping import L2
from algorithms.gradients.errors import RecordsNotIndependentError, UnsupportedModelError
from algorithms.gradients.grad_sample_recorder import (
    GradSampleRecorder,
    Layouts,
    UnrecordedError,
    interleave,
)
from algorithms.gradients.independence import (
    MANY,
    ModelProbe,
    Seen,
    check_apart,
    check_apart_briefly,
    check_first_records,
    check_many_apart,
    check_shape,
    crowd,
    mixing_layer,
    random_layer,
    still,
    unchanged,
)
from algorithms.gradients.model import copy_module
from algorithms.gradients.op_tracer import Memory, Operations, OpTracer, held_by, mixes, trace_model, tracing
from algorithms.gradients.passes import Passes, PinnedBranches
from algorithms.gradients.per_example_gradients import PerExampleGradients
from algorithms.gradients.randomness import same_randomness
from algorithms.gradients.synthetic_inputs import InputSpec, SyntheticBatch, form_of, near_start

_FEW, _MORE = 3, 17
_LARGE = 1e3
_KINKS = 3e-2
"""Relative tolerance for gradients of a deep model in 32 bits, where rounding may cross kinks such as ReLU's."""
_IN_32_BITS, _IN_64_BITS = 1e-4, 1e-9
"""Relative and absolute tolerance for a loss."""
_LIGHT = 2e7
"""Operations in one record's forward pass up to which a full inspection, a thousand such passes, is quick."""
_LITTLE = 1e8
"""Operations, and bytes, of a forward pass of very many records, which finds what begins with many alone."""
MOST_RECORDS = 2**12
"""The largest number of records in a pass on a CPU."""
_QUICK = 1e11
"""Operations that a large model may take for a forward pass of as many records as a full pass has: about a second."""
_MUCH = 4e9
"""Memory in bytes up to which an inspection is a full one."""
_TRIES = 6
"""How often layers are added to those that are seen as opaque."""
_FRAGMENTED = 1.25
"""Memory of a CPU's process for each byte of tensors: malloc does not fill all gaps between those that are left."""
_SCRATCH = 1e8
"""Memory in bytes that libraries and blocks in 64 bits take besides in a pass, at most; less for small models."""
_ROUNDING = 1e-2
"""Share of the tolerance by which rounding may move a zero gradient, relative to the whole gradient."""


@dataclass(frozen=True)
class PassCost:
    """What a pass takes, in bytes: its peak memory, fixed (as for copies of weights) and for each record.

    saved: by autograd for each record. materialized: the size of one record's materialised gradients.
    """

    fixed: int
    each: int
    saved: int = 0
    materialized: int = 0

    def of_process(self, parameters: Tensor) -> "PassCost":
        """The same with what a CPU's process holds besides tensors, for a model with these parameters [d]."""
        if parameters.device.type != "cpu":
            return self
        fixed = _FRAGMENTED * self.fixed + min(_SCRATCH, parameters.nbytes)
        return replace(self, fixed=int(fixed), each=int(_FRAGMENTED * self.each))


@dataclass(frozen=True)
class ModelInspection:
    """The result of an inspection.

    Attributes:
        form: the form of the made-up records.
        is_narrow: whether the model computes in 16 bits somewhere.
        pinned_branches: constants that replace the model's data-dependent branch conditions.
        unpacks, keeps_format, opaque_layers, uses_double_backward: as in `Passes`.
        layouts: the layouts of all uses of parameters; None if passes cannot be recorded, for the given `reason`.
        cost: of a pass.
        operations: of one record's forward pass, in products and convolutions.
        is_random: whether the model draws random numbers. random_layer: makes a sentence that names where.
        without_rule: operations that are differentiated record by record.
        is_brief: whether this was a brief inspection.
    """

    form: InputSpec
    is_narrow: bool
    pinned_branches: PinnedBranches
    unpacks: bool
    keeps_format: bool
    opaque_layers: tuple[str, ...]
    uses_double_backward: bool
    layouts: Layouts | None
    reason: str
    cost: PassCost
    operations: int
    is_random: bool
    random_layer: Callable[[], str]
    without_rule: tuple[str, ...]
    is_brief: bool


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
    check_many_apart(_exact(probe32, form.draw(2, 0)), alone=True, count=count)


def _memory_of_a_record(passes: Passes, parameters: Tensor, form: InputSpec) -> tuple[int, int]:
    """The bytes that a record takes in 64 bits in a forward pass, and in a recorded pass with its graph."""
    few = form.draw(_FEW, 0)
    forward = _measured(few, lambda some: passes.losses(parameters, some.inputs, some.labels))
    back = _measured(few, lambda some: passes.gradients(parameters, some.inputs, some.labels))
    return 2 * forward.each, 4 * back.each


def _measured(few: SyntheticBatch, run: Callable[[SyntheticBatch], object]) -> PassCost:
    """The peak memory of something that runs for one and for a few records, with these."""
    most = []
    for some in (few.alone(0), few):
        with Memory() as memory, same_randomness():
            run(some)
        most.append(some.inputs.nbytes + memory.most)
    each = max(0, most[1] - most[0]) // (len(few.labels) - 1)
    return PassCost(max(0, most[0] - each), each)


def in_16_bits(name: str) -> str:
    """The refusal of a model of 32 bits that converts numbers to 16."""
    return (
        f"the model {name} computes in 16 bits somewhere, by conversions of its own, though its precision is float32;"
        " take the conversions out, or set its precision to bfloat16."
    )


def examine(passes: Passes, least: InputSpec) -> ModelInspection:
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
        least: the form of the records, as far as it is known without the number of entries of the model's tables.

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
        >>> found = examine(Passes(model), InputSpec((3,), torch.float32, torch.device("cpu")))
        >>> found.layouts is None, found.is_random, found.without_rule
        (False, False, ('cdist',))
    """
    module = passes.model.module
    offender = mixing_layer(module)
    if offender is not None:
        raise RecordsNotIndependentError(f"the layer {offender} mixes records")
    if not passes.model.shapes:
        raise RecordsNotIndependentError(f"the model {passes.model.name} has no parameters to train")
    unused = copy_module(module, module.parameters())
    parameters = near_start(passes.model).to(least.device)
    with Operations() as operations:
        form = form_of(passes, parameters, least, count=1)
    # Parameter vectors are summed many times.
    is_light = operations.count + 20 * len(parameters) <= _LIGHT
    forward, back = _memory_of_a_record(passes, parameters, form) if is_light else (0, 0)
    needs_much = max(MANY * forward, _MORE * back) > _MUCH
    is_brief, is_quick = not is_light or needs_much, operations.count * MANY <= _QUICK and not needs_much
    if not is_brief:
        form = form_of(passes, parameters, least, _MORE)
    in_32_bits = replace(passes, model=replace(passes.model, precision=torch.float32))
    probe32 = ModelProbe(in_32_bits, parameters, form, tolerance=_IN_32_BITS)
    probe64 = probe32 if is_brief else _exact(probe32, form.draw(_MORE, 0))

    unpacks = _may_unpack(probe32, probe64)
    probe32, probe64 = (some.deciding(unpacks=unpacks) for some in (probe32, probe64))
    few = form.draw(2 if is_brief else _FEW, 0)
    with unchanged(probe32):
        first = _traced(probe32, few)
    keeps_format = first.recorder is None and probe32.passes.is_channels_last
    if keeps_format:
        probe32, probe64 = (some.deciding(keeps_format=True) for some in (probe32, probe64))
        first = _traced(probe32, few)
    again = _traced(probe32.deciding(uses_double_backward=True), few) if first.recorder is None else first
    uses_double_backward = again.recorder is not first.recorder
    if uses_double_backward:
        probe32, probe64, first = (
            probe32.deciding(uses_double_backward=True),
            probe64.deciding(uses_double_backward=True),
            again,
        )
    check_shape(probe32, first.seen)
    if is_brief:
        samples = [few, *([form.draw(_MORE, 1)] if is_quick else [])]
    else:
        some = probe64.draw(_FEW, 0)
        samples = [some, some.times(10.0), some.times(_LARGE), some.times(0.0), some.with_holes()]
        samples.append(probe64.draw(_MORE, 1))
    pinned_branches, first = _resolve_branches(probe32, probe64, first, samples)
    probe32, probe64 = (some.deciding(pinned_branches=pinned_branches or ()) for some in (probe32, probe64))
    try:
        check_first_records(unused, probe32)
        second = _traced(probe32, crowd(probe32) if is_brief else form.draw(_MORE, 0), other=first.recorder)
        is_random = (
            _check_briefly(probe32, first, second, is_quick=is_quick) if is_brief else check_apart(probe64)
        )
        if probe64.is_exact:
            # A kernel may be wrong in 32 bits alone. A record's place stays, and so does its rounding.
            check_many_apart(probe32, alone=False)
    except RecordsNotIndependentError as mixed:
        if first.tracer.is_narrow and passes.model.precision == torch.float32:
            # Rounding to 16 bits differs between numbers of records, as if they were mixed.
            raise UnsupportedModelError(in_16_bits(passes.model.name)) from mixed
        raise
    if not is_brief and not is_random:
        # What begins with more records than a run's passes have is a mistake all the same, as a capacity per batch.
        each = max(1, operations.count, forward)
        check_many_apart(probe64, alone=True, count=min(MOST_RECORDS, max(MANY, int(_LITTLE / each))))

    try:
        if pinned_branches is None:
            by = f" ({first.tracer.data_dependent_read})" if first.tracer.data_dependent_read else ""
            raise UnrecordedError(
                f"its control flow may depend on the values of a tensor{by}; masks are faster"
            )
        for left in reversed(range(_TRIES)):
            try:
                with _recording():
                    layouts, cost, without_rule = _learned(
                        probe32, probe64, first, second, is_brief=is_brief, precision=passes.model.precision
                    )
                break
            except UnrecordedError as why:
                opaque_layers = _layers_to_fall_back(why, probe32.passes)
                if not opaque_layers or left == 0:
                    raise
                probe32, probe64 = (some.deciding(opaque_layers=opaque_layers) for some in (probe32, probe64))
                first = _traced(probe32, few)
                second = _traced(probe32, second.seen.sample, other=first.recorder)
        reason = ""
    except UnrecordedError as why:
        layouts, reason, without_rule = None, str(why), ()
        probe32 = probe32.deciding(opaque_layers=())
        cost = _measured(few, lambda some: _take_alone(probe32.passes, parameters, some))
        cost = replace(cost, materialized=4 * len(parameters))
    saved = cost.each // 3 if is_brief else max(1, _kept_each(passes, parameters, form))
    return ModelInspection(
        form=form,
        is_narrow=first.tracer.is_narrow or passes.model.precision == torch.bfloat16,
        pinned_branches=pinned_branches or (),
        unpacks=unpacks,
        keeps_format=keeps_format,
        opaque_layers=probe32.passes.opaque_layers,
        uses_double_backward=uses_double_backward,
        layouts=layouts,
        reason=reason,
        cost=replace(cost.of_process(parameters), saved=saved),
        operations=operations.count,
        is_random=is_random,
        random_layer=partial(random_layer, probe32, few) if is_random else str,
        without_rule=without_rule,
        is_brief=is_brief,
    )


@dataclass(frozen=True)
class _Trace:
    """A forward pass of some records: their losses, its operations, and the shapes of every call.

    recorder: None if the calls cannot be recorded, for the given `reason`.
    """

    seen: Seen
    tracer: OpTracer
    recorder: GradSampleRecorder | None
    reason: UnrecordedError | None = None


def _traced(
    probe: ModelProbe,
    sample: SyntheticBatch,
    pinned: bool | None = None,
    other: GradSampleRecorder | None = None,
) -> _Trace:
    """Trace a forward pass; pinned: as in `OpTracer`. other: the recorder of another batch size."""
    parameters, records = probe.parameters, (sample.inputs, sample.labels)
    known = (parameters, *held_by(probe.passes.model.module))
    try:
        with _recording(), tracing(records, known, pinned) as tracer:
            recorder, losses = probe.passes.record_forward(parameters, *records, other=other)
    except UnrecordedError as error:
        with tracing(records, known, pinned) as tracer:
            losses = probe.passes.losses(parameters, *records)
        return _Trace(Seen(sample, losses, tracer.is_drawn), tracer, None, error)
    return _Trace(Seen(sample, losses, tracer.is_drawn), tracer, recorder)


def _check_briefly(probe: ModelProbe, few: _Trace, crowded: _Trace, *, is_quick: bool) -> bool:
    """`check_apart` for a large model, of which two passes are known; returns whether it draws random numbers."""
    draws_masks = few.tracer.is_drawn and few.tracer.draws_masks
    # One record is there twice.
    is_other = draws_masks and not probe.close(*crowded.seen.losses[1:])
    is_random = is_other or probe.varies(few.seen, seeds=1)
    check = partial(check_apart_briefly, is_random=is_random, draws_masks=draws_masks, is_quick=is_quick)
    try:
        check(probe, few.seen, crowded.seen)
    except RecordsNotIndependentError:  # rounding in 32 bits can exceed the tolerance in a deep network
        exact = _exact(probe, few.seen.sample)
        if not exact.is_exact:
            raise
        check(exact, *(exact.see(some) for some in (exact.draw(2, 0), crowd(exact))))
    return is_random


def _learned(
    probe32: ModelProbe,
    probe64: ModelProbe,
    first: _Trace,
    second: _Trace,
    *,
    is_brief: bool,
    precision: torch.dtype,
) -> tuple[Layouts, PassCost, tuple[str, ...]]:
    """The layouts of all uses of parameters, a pass's cost, and the operations without a rule.

    precision: of training. Raises UnrecordedError if recorded gradients differ from autograd's.
    """
    for trace in (first, second):
        if trace.reason is not None:
            raise trace.reason
    assert second.recorder is not None
    # What is computed from parameters alone is recorded in the second pass only.
    of_records = ([some for some in trace.tracer.operations if some.of_records] for trace in (first, second))
    if is_brief and any(mixes(*pair) for pair in zip(*of_records, strict=False)):
        raise UnrecordedError("it computes a value from all records")
    more = second.seen.sample
    for other in () if is_brief else (more.times(_LARGE), more.times(0.0), more.with_holes()):
        recorder = _traced(probe32, other, other=first.recorder).recorder
        if recorder is None or recorder.shapes != second.recorder.shapes:
            raise UnrecordedError("a size depends on the values of the records")
    cost, without_rule = PassCost(0, 0), set[str]()
    trained = probe32.deciding(model=replace(probe32.passes.model, precision=precision))

    def check(layouts: Layouts) -> None:
        nonlocal cost
        without_rule.clear()
        found: list[tuple[PerExampleGradients, Tensor]] = []

        def run(some: SyntheticBatch) -> None:
            with same_randomness():
                gradients = probe32.passes.recorded(
                    probe32.parameters, some.inputs, some.labels, layouts, without_rule
                )
            found[:] = [(gradients, gradients.finite(L2(1.0)))]

        compared = first.seen.sample.shortened() if is_brief else first.seen.sample
        cost = _measured(compared, run)
        gradients, finite = found.pop()
        cost = replace(cost, materialized=gradients.materialized_bytes // len(compared.labels))
        if not is_brief:
            for sample in (probe64.draw(_FEW, 0), probe64.draw(_MORE, 0).shortened()):
                _check_gradients(probe64, sample, layouts)
            if probe64.is_exact:
                sample, gradients = _recorded(trained, probe32.draw(FEWEST, 0), layouts)
                try:
                    _compare(trained, sample, gradients)
                except UnrecordedError:
                    _compare_rounding(trained, probe64, sample, gradients, 10.0 * probe32.tolerance)
        elif not bool(finite.all()):
            _check_gradients(probe32, first.seen.sample, layouts, _KINKS, _LARGE)
        else:
            try:
                _compare(probe32, compared, gradients, _KINKS, _LARGE)
            except UnrecordedError:  # rounding in 32 bits can exceed the tolerance in a deep network
                exact = _exact(probe32, first.seen.sample)
                if not exact.is_exact:
                    raise
                _check_gradients(exact, compared.in_64_bits(), layouts, weight=_LARGE)
                _compare_rounding(probe32, exact, compared, gradients, _KINKS)

    try:
        layouts = second.recorder.layouts()
        check(layouts)
    except (
        UnrecordedError
    ) as why:  # shapes do not tell apart whether indices of a record are interleaved with others
        layouts = interleave(second.recorder.layouts())
        try:
            check(layouts)
        except UnrecordedError:
            raise why from None
    return layouts, cost, tuple(sorted(without_rule))


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
    while name and (name in opaque_layers or not _trained(passes, name)):
        name = name.rpartition(".")[0]
    if len(_trained(passes, name)) == len(passes.model.shapes):
        return ()
    kind = type(module.get_submodule(name))
    alike = (other for other, layer in module.named_modules() if type(layer) is kind)
    opaque_layers |= {name} if kind.__module__.startswith("torch.") else {*alike}
    return tuple(
        one
        for one in sorted(opaque_layers)
        if not any(one.startswith(f"{other}.") for other in opaque_layers)
    )


def _trained(passes: Passes, name: str) -> list[str]:
    """The trained parameters of a layer, by name."""
    return [part for part in passes.model.shapes if not name or part.startswith(f"{name}.")]


def _exact(probe: ModelProbe, sample: SyntheticBatch) -> ModelProbe:
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


def _take_alone(passes: Passes, parameters: Tensor, sample: SyntheticBatch) -> None:
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
    # If no condition is true by itself, False would repeat it.
    for pinned in (False, None, True) if any(first.tracer.pinned_branches) else (None, True):
        try:
            trace = first if pinned is None else _traced(probe32, first.seen.sample, pinned)
        except Exception:  # the model may not go on in the wrong branch
            continue
        pinned_branches = tuple(trace.tracer.pinned_branches)
        if not trace.tracer.data_dependent_read and _pins_are_safe(
            probe64, pinned_branches, samples, trace.seen
        ):
            return pinned_branches, trace
    return None, first


def _may_unpack(probe32: ModelProbe, probe64: ModelProbe) -> bool:
    """Whether the model packs sequences, and records have the same losses if these are padded instead."""
    if not any(isinstance(layer, nn.RNNBase) for layer in probe32.passes.model.module.modules()):
        return False
    if (
        trace_model(probe32.passes, probe32.parameters, probe32.draw(_FEW, 0)).data_dependent_read
        != "pack_padded_sequence"
    ):
        return False
    some, others = (probe64.draw(_FEW, seed) for seed in range(2))
    samples = [some, some.shortened(), some.with_holes(), others.times(0.0)]
    return _agrees_with_single_records(probe64, replace(probe64.passes, unpacks=True), samples)


def _pins_are_safe(
    probe: ModelProbe, pinned_branches: PinnedBranches, samples: list[SyntheticBatch], seen: Seen
) -> bool:
    """Whether records in passes with these pins have the same losses as each record alone; seen: one of the passes.

    Real records may have larger numbers than made-up ones, as of the longest record's length. So a pinned number must
    either not matter, or be the largest one that the model takes.
    """

    pinning = replace(probe.passes, pinned_branches=pinned_branches)

    def changed(place: int, number: int) -> Passes:
        return replace(
            pinning, pinned_branches=(*pinned_branches[:place], number, *pinned_branches[place + 1 :])
        )

    def is_largest(place: int, number: int) -> bool:
        try:
            given, more = (
                trace_model(passes, probe.parameters, samples[0]).operations
                for passes in (pinning, changed(place, number + 1))
            )
        except Exception:
            return True
        return given == more

    numbers = [(i, pinned) for i, pinned in enumerate(pinned_branches) if not isinstance(pinned, bool | None)]
    return _agrees_with_single_records(probe, pinning, samples, seen) and all(
        _agrees_with_single_records(probe, changed(place, number - 1), samples) or is_largest(place, number)
        for place, number in numbers
    )


def _agrees_with_single_records(
    probe: ModelProbe, passes: Passes, samples: list[SyntheticBatch], seen: Seen | None = None
) -> bool:
    """Whether records in one of these passes have the same losses as each record alone, in evaluation mode."""
    module, together = probe.passes.model.module, replace(probe, passes=passes)
    if any(layer.training for layer in module.modules()):
        seen = None

    def agree(sample: SyntheticBatch) -> bool:
        alone = torch.cat([probe.losses(sample.alone(i)) for i in range(len(sample.labels))])
        known = together.losses(sample) if seen is None or sample is not seen.sample else seen.losses
        return probe.close(known, alone)

    try:
        with still(module):
            return all(agree(sample) for sample in samples)
    except Exception:  # the model may not go on in the wrong branch
        return False


def _recorded(
    probe: ModelProbe, sample: SyntheticBatch, layouts: Layouts
) -> tuple[SyntheticBatch, PerExampleGradients]:
    """The records whose recorded gradients are finite, with these; raises UnrecordedError if there are none."""

    def recorded(some: SyntheticBatch) -> PerExampleGradients:
        with same_randomness():
            return probe.passes.recorded(probe.parameters, some.inputs, some.labels, layouts)

    found = recorded(sample)
    finite = found.finite(L2(1.0))
    if not bool(finite.all()):
        if not bool(finite.any()):
            raise UnrecordedError(
                "gradients that are not finite, such as those of a loss beyond its targets' bounds, which"
                " targets.clamp(low, high) in the loss would keep"
            )
        sample = sample.some(finite)
        found = recorded(sample)
    return sample, found


def _check_gradients(
    probe: ModelProbe,
    sample: SyntheticBatch,
    layouts: Layouts,
    tolerance: float | None = None,
    weight: float = 1.0,
) -> None:
    """Raises UnrecordedError if recorded gradients differ from autograd's, or are finite for no record."""
    _compare(probe, *_recorded(probe, sample, layouts), tolerance, weight)


def _compare(
    probe: ModelProbe,
    sample: SyntheticBatch,
    found: PerExampleGradients,
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
    for name, part in found.weighted_parts(weights):
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
    found: PerExampleGradients,
    tolerance: float,
) -> None:
    """Raises UnrecordedError if recorded gradients are wrong in the precision of training, as by a faulty kernel.

    Rounding may move those of a deep model far: they may be ten times as far from the exact ones as autograd's are.
    trained, exact: the model in the precision of training and in 64 bits. tolerance: relative, besides.
    """
    weights = torch.linspace(0.5, 2.0, len(sample.labels), dtype=torch.float64, device=sample.labels.device)

    def gradients(probe64: ModelProbe, some: SyntheticBatch) -> dict[str, Tensor]:
        with same_randomness():
            return probe64.passes.gradients(probe64.parameters, some.inputs, some.labels, weights)[1]

    own, right = gradients(trained, sample), gradients(exact, sample.in_64_bits())
    sizes = {name: float(torch.linalg.vector_norm(part)) for name, part in right.items()}
    floor = 0.1 * _ROUNDING * tolerance * math.hypot(*sizes.values())
    for name, part in found.weighted_parts(weights):
        if name in right:
            expected = right[name].reshape(-1)
            room = 10.0 * float(torch.linalg.vector_norm(own[name].reshape(-1) - expected))
            room += tolerance * sizes[name] + floor
            if not float(torch.linalg.vector_norm(part - expected)) <= room:
                raise UnrecordedError("its recorded gradients are wrong in the precision of training")


def _kept_each(passes: Passes, parameters: Tensor, form: InputSpec) -> int:
    """Bytes that autograd saves for each record, from passes with few and with more records."""
    sizes = []
    for sample in (form.draw(_FEW, 0), form.draw(_MORE, 0)):
        kept: dict[int, int] = {}

        def note(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with suppress(RuntimeError), same_randomness(), hooks:  # torch.func does not support these hooks
            passes.gradients(parameters, sample.inputs, sample.labels)
        sizes.append(sum(kept.values()))
    return (sizes[1] - sizes[0]) // (_MORE - _FEW)

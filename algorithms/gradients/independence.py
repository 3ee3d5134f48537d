"""Checks on made-up records that a model processes each record independently, which clipping requires."""

import io
import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NamedTuple
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from algorithms.gradients.errors import RecordsNotIndependentError, UnsupportedModelError
from algorithms.gradients.grad_sample_recorder import tensors_in
from algorithms.gradients.model import copy_module
from algorithms.gradients.op_tracer import ExtremeDraws, draws_since
from algorithms.gradients.passes import Passes
from algorithms.gradients.randomness import same_randomness
from algorithms.gradients.synthetic_inputs import InputSpec, SyntheticBatch

_ODD_COUNT, USUAL_COUNT = 3, 64
"""An odd number of records, and a usual pass's: some layers mix records only in batches of some sizes."""

_FEW_SEEDS, _MANY_SEEDS = 5, 100
_LARGE_FACTOR = 1e3
"""The factor between large records and ordinary ones."""


_BLOCK = 2**15
"""How many numbers of a parameter are digested together."""
_FEW_BYTES = 2**16
"""Up to how many bytes of a CPU's memory Python's hash is the faster digest: ten times for most parameters."""


def check_layer_types(module: nn.Module) -> None:
    """Raises RecordsNotIndependentError for the first layer that is known to mix or remember records."""
    for name, layer in module.named_modules():
        batch_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        # Without running statistics, evaluation mode mixes, too.
        mixes = batch_norm and (layer.training or layer.running_mean is None)
        remembers = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats
        if mixes or (remembers and layer.training):
            raise RecordsNotIndependentError(
                f"the layer {name} ({type(layer).__name__}) mixes records",
                kind="batch_norm" if batch_norm else "",
            )


class ObservedLosses(NamedTuple):
    """Some records, their losses [count] in one pass, and whether it may have drawn random numbers."""

    sample: SyntheticBatch
    losses: Tensor
    is_drawn: bool


@dataclass(frozen=True)
class ModelProbe:
    """A model at given parameters, with the form of its records and a tolerance for the rounding of its losses.

    seed: of the random numbers that it draws.
    """

    passes: Passes
    parameters: Tensor
    form: InputSpec
    tolerance: float
    seed: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether the model computes in 64 bits."""
        return self.parameters.dtype == torch.float64

    @property
    def pass_name(self) -> str:
        """The name of the forward pass, for errors that no layer within it causes."""
        return f"the forward pass of the model {self.passes.model.name}"

    @property
    def loss_name(self) -> str:
        """The name of the loss, for errors that no layer causes."""
        return f"the loss of the model {self.passes.model.name}"

    def with_decisions(self, **decided: Any) -> "ModelProbe":
        """The same model with other decisions, such as `pinned_branches` or `unpacks`; see `Passes`."""
        return replace(self, passes=replace(self.passes, **decided))

    def draw(self, count: int, seed: int) -> SyntheticBatch:
        """Draw made-up records of the form, in 64 bits if the model computes in them."""
        drawn = self.form.draw(count, seed)
        return drawn.in_64_bits() if self.is_exact else drawn

    def observe(self, sample: SyntheticBatch) -> ObservedLosses:
        """Run a pass; the seed fixes what dropout drops."""
        with same_randomness(self.seed):
            before = torch.default_generator.get_state()
            losses = self.passes.losses(self.parameters, sample.inputs, sample.labels)
            return ObservedLosses(sample, losses, draws_since(before, sample.inputs))

    def losses(self, sample: SyntheticBatch) -> Tensor:
        """The losses [count] of a pass."""
        return self.observe(sample).losses

    def gradient(self, sample: SyntheticBatch, weight: float = 1.0) -> Tensor:
        """The gradient [d] of the sum of losses times a weight."""
        total = torch.zeros_like(self.parameters)
        with same_randomness():
            gradients = self.passes.gradients(self.parameters, sample.inputs, sample.labels, weight)[1]
        for name, part in gradients.items():
            # Zero for a parameter that nothing depends on.
            total[self.passes.model.slices[name]] = part.flatten()
        return total

    def close(self, a: Tensor, b: Tensor) -> bool:
        """Whether two values differ only by rounding."""
        return torch.equal(a, b) or torch.allclose(
            a.double(), b.double(), rtol=self.tolerance, atol=self.tolerance, equal_nan=True
        )

    def varies(self, seen: ObservedLosses, seeds: int) -> bool:
        """Whether losses differ between seeds, or where all that is drawn is as small or as large as possible.

        A layer may rarely use what it draws, as stochastic depth does.
        """

        def differs(other: Tensor) -> bool:
            return not torch.allclose(seen.losses, other, rtol=0.0, atol=0.0, equal_nan=True)

        if not seen.is_drawn:
            return False
        drawn = (replace(self, seed=seed) for seed in range(1, seeds + 1))
        if any(differs(probe.observe(seen.sample).losses) for probe in drawn):
            return True
        for value in (0.0, 1.0):
            try:
                with ExtremeDraws(value):
                    losses = self.losses(seen.sample)
            except Exception:  # the model may not go on with such a number
                return True
            if differs(losses):
                return True
        return False


def check_shape(probe: ModelProbe, seen: ObservedLosses) -> None:
    """Raises RecordsNotIndependentError unless there is one loss for each record."""
    count, shape = len(seen.sample.labels), list(seen.losses.shape)
    if shape != [count]:
        raise RecordsNotIndependentError(
            f"{probe.loss_name} has shape {shape} for {count} records, not [{count}] as with reduction='none'"
        )


def check_apart(probe: ModelProbe) -> bool:
    """Raises RecordsNotIndependentError if a record's loss or gradient depends on the other records.

    Returns whether the model draws random numbers.

    Each record is compared alone and among ordinary, large, zero and NaN records, since some layers mix records only
    then. Records of whole numbers are also compared among records of only one constant of the form, and such records
    among others.
    """
    constants = () if probe.form.dtype.is_floating_point else probe.form.constants
    seen = probe.observe(probe.draw(_ODD_COUNT, 0))
    sample = seen.sample
    check_shape(probe, seen)
    is_random = probe.varies(probe.observe(probe.draw(USUAL_COUNT, 0)), _MANY_SEEDS)
    others = probe.draw(_ODD_COUNT, 1)
    contexts = [others, others.times(_LARGE_FACTOR), others.times(0.0), others.times(math.nan)]
    contexts = _distinct(contexts + [others.all_of(constant) for constant in constants])
    for shown in _distinct([sample, sample.times(_LARGE_FACTOR), sample.with_holes()]):
        _check_places(probe, shown, contexts, range(_ODD_COUNT), alone=not is_random)
    for constant in constants:
        _check_places(probe, sample.all_of(constant), [probe.draw(_ODD_COUNT, 1)], (0,), alone=not is_random)
    check_many_apart(probe, alone=not is_random)
    _check_losses_apart(probe, sample)
    if not is_random:
        # Losses may agree where backward passes mix records, as where a gradient is clipped by the whole batch's norm.
        large = sample.times(_LARGE_FACTOR)
        is_scaled = not torch.equal(large.inputs, sample.inputs)
        for weight in (1.0, _LARGE_FACTOR):
            of_sample = _gradients_alone(probe, sample, weight)
            _check_gradients_apart(probe, sample, of_sample, weight)
            if is_scaled:
                of_large = _gradients_alone(probe, large, weight)
                _check_gradients_apart(probe, large, of_large, weight)
                # One ordinary record among large ones, whose share of a common norm would all but vanish.
                of_both = torch.cat([of_sample[:1], of_large[1:]])
                _check_gradients_apart(probe, sample.among(large, 0), of_both, weight)
        return False
    # A model that draws numbers cannot be compared record by record. In evaluation mode most draw none, and there the
    # rest of the model is.
    with still(probe.passes.model.module):
        try:
            is_steady = not probe.varies(probe.observe(probe.draw(USUAL_COUNT, 0)), _MANY_SEEDS)
        except Exception:  # the loss may reject outputs of evaluation mode
            is_steady = False
        if is_steady:
            check_apart(probe)
    return True


def _distinct(samples: Sequence[SyntheticBatch]) -> list[SyntheticBatch]:
    """The samples whose inputs no earlier one has: whole numbers cannot be large, nor missing."""
    return [
        sample
        for index, sample in enumerate(samples)
        if not any(torch.equal(sample.inputs, earlier.inputs) for earlier in samples[:index])
    ]


def check_many_apart(probe: ModelProbe, *, alone: bool, count: int = USUAL_COUNT) -> None:
    """`check_apart` for as many records as a pass may have; alone: whether each is also compared alone."""
    many, others = probe.draw(count, 2), probe.draw(count, 3).times(_LARGE_FACTOR)
    _check_places(probe, many, [others], (0, count // 2, count - 1), alone=alone)


def crowd(probe: ModelProbe) -> SyntheticBatch:
    """A large record, and twice the second of `draw(2, 0)`, which fills experts of limited capacity."""
    large = probe.draw(1, 4).times(_LARGE_FACTOR)
    copies = probe.draw(2, 0).take([1, 1, 1])
    return large.among(copies, 0)


def check_apart_briefly(
    probe: ModelProbe,
    few: ObservedLosses,
    crowded: ObservedLosses,
    *,
    is_random: bool,
    draws_masks: bool,
    is_quick: bool,
) -> None:
    """`check_apart` for a model with slow passes: a record alone, and in batches of other kinds and sizes.

    few: two records. crowded: the records of `crowd`. is_random: whether the model draws random numbers; then passes of
    other sizes are compared in evaluation mode, if it draws none there. draws_masks: as in `OpTracer`; otherwise
    several seeds are tried, since a random order of two records is often theirs. is_quick: whether records are also
    compared among as many as a full pass has.
    """
    others = probe.draw(2, 1)
    factors = [math.nan] if probe.form.dtype.is_floating_point else []
    for factor in [*factors, _LARGE_FACTOR] if is_random else factors:
        _check_same(probe, few, 1, few.sample.among(others.times(factor), 1), 1)
    for seed in range(1, _FEW_SEEDS) if is_random and not draws_masks else ():
        drawn = replace(probe, seed=seed)
        _check_same(drawn, drawn.observe(few.sample), 1, few.sample.among(others.times(_LARGE_FACTOR), 1), 1)
    with still(probe.passes.model.module) if is_random else nullcontext():
        if is_random:
            try:
                crowded = probe.observe(crowded.sample)
                if probe.varies(crowded, seeds=1):
                    return
            except Exception:  # the loss may reject outputs of evaluation mode
                return
        its = probe.observe(few.sample.alone(1))
        pairs = [(crowded, 1), (crowded, 2)] if is_random else [(few, 1), (crowded, 1), (crowded, 2)]
        for seen, index in pairs:
            _check_same(probe, seen, index, its, 0)
        if is_quick:
            many = probe.observe(probe.draw(USUAL_COUNT, 2))
            for index in (0, USUAL_COUNT // 2, USUAL_COUNT - 1):
                _check_same(probe, many, index, many.sample.alone(index), 0)


@contextmanager
def still(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode within the block, since dropout would treat a record differently when alone."""
    training = [layer for layer in module.modules() if layer.training]
    for layer in training:
        layer.training = False
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


def _check_same(
    probe: ModelProbe, seen: ObservedLosses, index: int, changed: SyntheticBatch | ObservedLosses, at: int
) -> None:
    """Raises RecordsNotIndependentError if a record's loss depends on its position or on the other records."""
    other = probe.observe(changed) if isinstance(changed, SyntheticBatch) else changed
    if probe.close(seen.losses[index], other.losses[at]):
        return
    if not probe.close(probe.losses(seen.sample), probe.losses(seen.sample)):
        raise RecordsNotIndependentError(
            f"{probe.pass_name} gives the same records other losses, by random numbers that no seed of PyTorch repeats"
            " (SpecAugment of wav2vec 2.0 draws by NumPy) or by what is kept outside of the module; draw by torch,"
            " keep nothing, or switch it off"
        )
    layer = _first_that_differs(probe, seen.sample, index, other.sample, at)
    if layer is not None and layer in drawing_layers(probe, seen.sample):
        with still(probe.passes.model.module):
            is_by_record = probe.close(probe.losses(seen.sample)[index], probe.losses(other.sample)[at])
        if is_by_record:  # it draws as many numbers as the records' values ask for, as RReLU does
            raise UnsupportedModelError(random_layer(probe, seen.sample))
    raise RecordsNotIndependentError(f"{layer or probe.loss_name} mixes records")


def drawing_layers(probe: ModelProbe, sample: SyntheticBatch) -> list[str]:
    """The layers within which a pass draws random numbers, innermost first; then the forward pass, if it draws any."""
    drawing: list[str] = []
    device = sample.inputs.device

    def state() -> bytes:
        module = None if device.type == "cpu" else torch.get_device_module(device)
        generators: Any = getattr(module, "default_generators", {0: torch.default_generator})
        return bytes(generators[device.index or 0].get_state().cpu().numpy())

    before: list[bytes] = []
    handles = []
    for name, layer in probe.passes.model.module.named_modules():
        named = f"the layer {name} ({type(layer).__name__})" if name else probe.pass_name

        def note(*_: Any, named: str = named) -> None:
            if before.pop() != state() and named not in drawing:
                drawing.append(named)

        handles.append(layer.register_forward_pre_hook(lambda *_: before.append(state())))
        handles.append(layer.register_forward_hook(note))
    try:
        probe.losses(sample)
    finally:
        for handle in handles:
            handle.remove()
    return drawing


def random_layer(probe: ModelProbe, sample: SyntheticBatch) -> str:
    """The refusal of a model that draws random numbers: which layer does, and whether evaluation mode helps."""
    drawing = (*drawing_layers(probe, sample), probe.loss_name)[0]
    with still(probe.passes.model.module):
        draws_always = drawing == probe.loss_name or drawing in drawing_layers(probe, sample)
    advice = "leave it out, or put the model into evaluation mode by .eval()"
    if draws_always:
        advice = "it does so after .eval(), too: leave it out"
        advice += ", as by nn.MaxPool2d for nn.FractionalMaxPool2d" if "FractionalMaxPool" in drawing else ""
    return f"{drawing} draws random numbers, which a resumed run would draw again; {advice}."


def _check_places(
    probe: ModelProbe,
    sample: SyntheticBatch,
    contexts: list[SyntheticBatch],
    indices: Iterable[int],
    *,
    alone: bool,
) -> None:
    """Raises RecordsNotIndependentError if a record at one of the positions has another loss elsewhere."""
    seen = probe.observe(sample)
    for index in indices:
        changes = [(sample.among(others, index), index) for others in contexts]
        changes += [(sample.repeat_record(index), index)]  # this fills experts of limited capacity
        changes += [(sample.alone(index), 0)] if alone else []  # alone, dropout would drop something else
        for changed, at in changes:
            _check_same(probe, seen, index, changed, at)


def _check_losses_apart(probe: ModelProbe, sample: SyntheticBatch) -> None:
    """Raises RecordsNotIndependentError if the loss function returns other losses for single outputs."""
    model = probe.passes.model
    with torch.no_grad(), same_randomness():
        outputs = model.outputs(model.by_name(probe.parameters), sample.inputs)
        before = torch.default_generator.get_state()
        together = model.losses(outputs, sample.labels)
        is_drawn = sample.inputs.device.type == "cpu" and draws_since(before, sample.inputs)
        pairs = zip(torch.split(outputs, 1), torch.split(sample.labels, 1), strict=True)
        alone = torch.cat([model.losses(*pair) for pair in pairs])
    if not probe.close(together, alone):
        if is_drawn:
            raise UnsupportedModelError(random_layer(probe, sample))
        raise RecordsNotIndependentError(f"{probe.loss_name} mixes records")


def _gradients_alone(probe: ModelProbe, sample: SyntheticBatch, weight: float) -> Tensor:
    """The gradient of each record in a pass of its own, [count, d]."""
    return torch.stack([probe.gradient(sample.alone(i), weight) for i in range(len(sample.labels))])


def _check_gradients_apart(probe: ModelProbe, sample: SyntheticBatch, alone: Tensor, weight: float) -> None:
    """Raises RecordsNotIndependentError if the backward pass mixes records: a sum of losses has another gradient.

    alone: the gradients of the records, [count, d]; see `_gradients_alone`. weight: of the losses, since some backward
    passes mix records only if errors are large.
    """
    together = probe.gradient(sample, weight)
    # The sum of gradients, and what its rounding is relative to.
    apart, sizes = alone.sum(dim=0), alone.abs().sum(dim=0)
    if not bool(sizes.isfinite().all()):
        return
    if not bool(((together - apart).abs() <= 10.0 * probe.tolerance * (sizes + sizes.amax())).all()):
        raise RecordsNotIndependentError(
            f"the backward pass of the model {probe.passes.model.name} mixes records"
        )


@contextmanager
def forbid_state_changes(probe: ModelProbe) -> Iterator[None]:
    """Raises RecordsNotIndependentError if passes within the block change the model's state, as they depend on records.

    Only if something changes in the module, its loss or, until the pass ends, its copies of buffers, more passes find
    out whether every pass changes it.
    """
    module = probe.passes.model.module
    buffers, before = dict(module.named_buffers()), _lasting_state(probe, module)
    before_values: dict[str, dict[str, Any]] = {"buffers": buffers, "layers": {}}

    def note(*_: Any) -> None:  # what is written is compared afterwards, since passes are traced
        before_values["buffers"] = dict(module.named_buffers())
        for name, layer in module.named_modules():
            before_values["layers"][name] = {
                key: value.copy() if type(value) in (dict, list) else value
                for key, value in vars(layer).items()
            }

    hook = module.register_forward_hook(note)
    try:
        yield
    finally:
        hook.remove()
    after = _lasting_state(probe, module)
    for name, values in before_values["layers"].items():
        after |= _pickle_attributes(name, values)
    if _changed_names(before, after) or _differing_names(buffers, before_values["buffers"]):
        _check_state(probe)


def _lasting_state(probe: ModelProbe, module: nn.Module) -> dict[str, object]:
    """Digests of parameters and of attributes, of the module and of the loss.

    Not of the address of a parameter, since on a GPU an LSTM moves its weights next to each other in a forward pass.
    """
    values: dict[str, object] = {
        f"parameter {name}": content_digest(part) for name, part in module.named_parameters()
    }
    named = probe.passes.model.by_name(probe.parameters)  # some are copies, at another address each time
    values |= {f"parameter {name}": content_digest(part) for name, part in named.items()}
    return values | _attributes(module) | _state_of_losses(probe.passes.model.losses)


def _check_state(probe: ModelProbe) -> None:
    """Raises RecordsNotIndependentError if every forward pass changes the model's state.

    A table that the first pass builds is allowed if it is the same for all records and later passes.
    """
    sample, module = probe.draw(1, 0), probe.passes.model.module
    module = copy_module(module, module.parameters())
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    states = [_lasting_state(probe, module)]
    for _ in range(2):
        _pass_through(probe, module, sample)
        states.append(_lasting_state(probe, module))
    before, first, second = states
    changes = [name for name in _changed_names(before, second) if name.startswith("parameter ")]
    different = _differing_names(buffers, dict(module.named_buffers()))
    if different and not _are_tables(probe, sample):
        changes.append(f"buffer {different[0]}")
    if changes:
        raise RecordsNotIndependentError(
            f"the {changes[0]} is changed by a forward pass, and would be released without noise; put its layer into"
            " evaluation mode by .eval(), or take it out"
        )
    for name in _changed_names(first, second):
        raise RecordsNotIndependentError(
            f"the attribute {name} is changed by every forward pass, which mixes records; take it out"
        )


def check_first_records(unused: nn.Module, probe: ModelProbe) -> None:
    """Raises RecordsNotIndependentError if later losses depend on the records of the first pass.

    unused: a copy of the module from before its first pass, in 32 bits. A module that keeps something of a pass without
    using it later is accepted.
    """
    model = probe.passes.model
    changed = _changed_names(_attributes(unused), _attributes(model.module))
    if not changed:
        return

    def later(*samples: SyntheticBatch) -> Tensor:
        fresh = replace(model, module=copy_module(unused, unused.parameters()))
        one_by_one = replace(probe, passes=replace(probe.passes, model=fresh))
        return [one_by_one.losses(sample) for sample in samples][-1]

    first, other = probe.draw(2, 0), probe.draw(2, 1)
    if not probe.close(later(other), later(first, other)):
        raise RecordsNotIndependentError(
            f"the attribute {changed[0]} keeps what was computed from the first records, and mixes them with later ones"
        )


def _changed_names(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]


def _pass_through(probe: ModelProbe, module: nn.Module, sample: SyntheticBatch) -> None:
    named = probe.passes.model.by_name(probe.parameters)
    with torch.no_grad(), same_randomness():
        outputs = torch.func.functional_call(module, named, (sample.inputs,))
        probe.passes.model.losses(outputs, sample.labels)


def _differing_names(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """The names of buffers that have changed."""
    return [
        name
        for name in before.keys() | after.keys()
        if name not in before or name not in after or not torch.equal(before[name], after[name])
    ]


def _are_tables(probe: ModelProbe, sample: SyntheticBatch) -> bool:
    """Whether the first pass builds the same buffers for any records and batch size, and later passes keep them."""
    other, module = probe.draw(2, 1).times(0.0), probe.passes.model.module
    first, second = (copy_module(module, module.parameters()) for _ in range(2))
    _pass_through(probe, first, sample)
    _pass_through(probe, second, other)
    tables = {name: value.clone() for name, value in first.named_buffers()}
    _pass_through(probe, first, other)
    return not any(_differing_names(tables, dict(module.named_buffers())) for module in (first, second))


def content_digest(value: Tensor) -> int:
    """A digest of a tensor's values within this process: a sum of its bits, weighted by position, or their hash."""
    as_bytes = value.detach().contiguous().view(-1).view(torch.uint8)
    if type(as_bytes) is Tensor and as_bytes.device.type == "cpu" and len(as_bytes) <= _FEW_BYTES:
        return hash((value.shape, as_bytes.numpy().tobytes()))
    is_aligned = as_bytes.numel() % 8 == as_bytes.storage_offset() % 8 == 0  # a view as int64 needs both
    blocks = torch.split(as_bytes.view(torch.int64) if is_aligned else as_bytes, _BLOCK)
    # Odd weights: modulo 2^64 they have inverses, so a change of one number always changes the sum.
    by_place = 2 * torch.arange(len(blocks[0]), device=value.device) + 1
    return hash((value.shape, *(int((block * by_place[: len(block)]).sum()) for block in blocks)))


class _Pickler(pickle.Pickler):
    """Pickles a digest for each tensor, not its storage, which may hold all parameters.

    Weak references are left out, since layers such as an LSTM may create them anew in each pass.
    """

    def persistent_id(self, obj: Any) -> object:
        """The digest of a tensor, or a constant for a reference; None for anything else, which is pickled as usual."""
        if isinstance(obj, Tensor):
            return obj.dtype, content_digest(obj)
        return ReferenceType.__name__ if isinstance(obj, ReferenceType) else None


def _bytes_of(value: object) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _attributes(module: nn.Module) -> dict[str, bytes]:
    """The attributes of layers and their classes by name, except parameters, buffers and hooks."""
    digests: dict[str, bytes] = {}
    for name, layer in module.named_modules():
        digests |= _pickle_attributes(name, vars(layer))
        if not type(layer).__module__.startswith("torch."):
            digests |= _pickle_attributes(type(layer).__name__, vars(type(layer)))
    return digests


def _state_of_losses(losses: object) -> dict[str, bytes]:
    """The state of a loss, which may be a function, a callable object or a method."""
    owner = getattr(losses, "__self__", losses)
    buffers = dict(owner.named_buffers()) if isinstance(owner, nn.Module) else {}
    return _pickle_attributes("losses", getattr(owner, "__dict__", {})) | {
        f"losses.{name}": _bytes_of(part) for name, part in buffers.items()
    }


def _pickle_attributes(name: str, attributes: Mapping[str, object]) -> dict[str, bytes]:
    """The attributes of a layer, class or function that are not those of every module, by name."""
    skipped, digests = vars(nn.Module()).keys() - {"training"}, {}
    for key, value in attributes.items():
        if key not in skipped and not isinstance(value, FunctionType | type):
            try:
                content = _bytes_of(value)
            except Exception:  # whatever a value's own pickling raises
                # its memory address is irrelevant
                content = re.sub("0x[0-9a-f]+", "", repr(value)).encode()
            digests[f"{name}.{key}".lstrip(".")] = content
    return digests


def _first_that_differs(
    probe: ModelProbe, sample: SyntheticBatch, index: int, changed: SyntheticBatch, other: int
) -> str | None:
    """The first layer, or the model itself, whose output for a record differs between two batches and positions.

    A layer whose input differs too is not meant: it follows the one that mixes, or its first dimension is time.
    """

    def differs(a: Tensor, b: Tensor) -> bool:
        is_by_record = a.dim() and len(a) > index and len(b) > other and a.shape[1:] == b.shape[1:]
        return bool(is_by_record) and not probe.close(a[index], b[other])

    first, second = (_values_by_module(probe, batch) for batch in (sample, changed))
    for name in (name for name in first if name in second):
        (*inputs, output), (*other_inputs, other_output) = first[name], second[name]
        if differs(output, other_output) and not any(map(differs, inputs, other_inputs)):
            return name
    return None


def _values_by_module(probe: ModelProbe, sample: SyntheticBatch) -> dict[str, list[Tensor]]:
    """The first input, if any, and output of every layer and of the model, by name, in the order in which they end."""
    passed: dict[str, list[Tensor]] = {}

    def note(name: str, layer: nn.Module) -> Any:
        time_first = ", batch_first=False" if getattr(layer, "batch_first", True) is False else ""
        label = f"the layer {name} ({type(layer).__name__}{time_first})" if name else probe.pass_name

        def hook(_layer: nn.Module, inputs: Any, output: Any) -> None:
            if tensors := tensors_in(output)[:1]:
                passed[label] = [part.detach().clone() for part in (*tensors_in(inputs)[:1], *tensors)]

        return hook

    layers = probe.passes.model.module.named_modules()
    handles = [layer.register_forward_hook(note(name, layer)) for name, layer in layers]
    try:
        probe.losses(sample)
    finally:
        for handle in handles:
            handle.remove()
    return passed

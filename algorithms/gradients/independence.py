"""Checks on made-up records that a model processes each record independently, which clipping requires."""

import io
import math
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from types import FunctionType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from algorithms.gradients.grad_sample_recorder import tensors_in
from algorithms.gradients.op_tracer import Sample
from algorithms.gradients.passes import Passes
from algorithms.models.model import copied, same_randomness

_FEW, MANY = 3, 64
"""An odd number of records, and a full pass's: some layers mix records only in batches of some sizes."""

_MANY_SEEDS = 100
_LARGE = 1e3
"""The factor between large records and ordinary ones."""


_BLOCK = 2**15
"""How many numbers of a parameter are digested together."""


class RecordsNotIndependentError(ValueError):
    """A model that mixes records; the message names the layer that does."""


def mixing_layer(module: nn.Module) -> str | None:
    """The first layer that is known to mix or remember records, as "name (type)"; None if there is none."""
    for name, layer in module.named_modules():
        batch_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        mixes = batch_norm and (layer.training or layer.running_mean is None)
        remembers = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats
        if mixes or (remembers and layer.training):
            return f"{name} ({type(layer).__name__})"
    return None


@dataclass(frozen=True)
class Looked:
    """A model at given parameters, with a tolerance for the rounding of its losses."""

    passes: Passes
    parameters: Tensor
    tolerance: float

    @property
    def pass_name(self) -> str:
        """The name of the forward pass, for errors that no layer within it causes."""
        return f"the forward pass of the model {self.passes.model.name}"

    @property
    def loss_name(self) -> str:
        """The name of the loss, for errors that no layer causes."""
        return f"the loss of the model {self.passes.model.name}"

    def losses(self, sample: Sample, seed: int = 0) -> Tensor:
        """The losses [count]; a seed fixes what dropout drops."""
        with same_randomness(seed):
            return self.passes.losses(self.parameters, sample.inputs, sample.labels)

    def close(self, a: Tensor, b: Tensor) -> bool:
        """Whether two values differ only by rounding."""
        return torch.allclose(
            a.double(), b.double(), rtol=self.tolerance, atol=self.tolerance, equal_nan=True
        )


def check_apart(looked: Looked, draw: Callable[[int, int], Sample], constants: Sequence[int] = ()) -> bool:
    """Raises RecordsNotIndependentError if a record's loss or gradient depends on the other records.

    Returns whether the model draws random numbers.

    draw: records by number and seed. Each is compared alone and among ordinary, large, zero and NaN records, since some
    layers mix records only then. constants: whole numbers; records are also compared among records of only one of
    these, and such records among others.
    """
    sample = draw(_FEW, 0)
    losses = looked.losses(sample)
    if losses.shape != sample.labels.shape[:1]:
        raise RecordsNotIndependentError(
            f"{looked.loss_name} has shape {list(losses.shape)} for {_FEW} records, not [{_FEW}] as with"
            " reduction='none'"
        )
    _check_repeats(looked, sample, losses)
    is_random = _drawn(looked, draw(MANY, 0), seeds=_MANY_SEEDS)[1]
    for shown in (sample, sample.times(_LARGE), sample.with_holes()):
        others = draw(_FEW, 1)
        contexts = [others, others.times(_LARGE), others.times(0.0), others.times(math.nan)]
        contexts += [others.all_of(constant) for constant in constants]
        _check_places(looked, shown, contexts, range(_FEW), alone=not is_random)
    for constant in constants:
        _check_places(looked, sample.all_of(constant), [draw(_FEW, 1)], (0,), alone=not is_random)
    many = draw(MANY, 2)
    _check_places(looked, many, [draw(MANY, 3).times(_LARGE)], (0, MANY // 2, MANY - 1), alone=not is_random)
    _check_losses_apart(looked, sample)
    if not is_random:
        large = sample.times(_LARGE)
        for shown, weight in product((sample, large, sample.among(large, 0)), (1.0, _LARGE)):
            _check_gradients_apart(looked, shown, weight)
    elif _steady_losses(looked, draw(MANY, 0), seeds=_MANY_SEEDS) is not None:
        with still(looked.passes.model.module):
            check_apart(looked, draw, constants)
    return is_random


def check_apart_briefly(looked: Looked, draw: Callable[[int, int], Sample]) -> bool:
    """`check_apart` for a model with slow passes: two records, each in a batch of another kind."""
    sample, others = draw(2, 0), draw(2, 1)
    losses, is_random = _drawn(looked, sample, seeds=1)
    if losses.shape != sample.labels.shape[:1]:
        raise RecordsNotIndependentError(
            f"{looked.loss_name} has shape {list(losses.shape)} for 2 records, not [2] as with reduction='none'"
        )
    _check_repeats(looked, sample, losses)
    changes = [
        (sample.among(others.times(factor), place), place, place)
        for place, factor in enumerate((math.nan, _LARGE))
    ]
    changes += [(sample.repeated(1), 1, 1)]  # this fills experts of limited capacity
    # The second record, whose batch position changes when it is alone.
    changes += [] if is_random else [(sample.alone(1), 1, 0)]
    for changed, place, at in changes:
        _check_same(looked, losses, sample, place, changed, at)
    steady = _steady_losses(looked, sample, seeds=1) if is_random else None
    if steady is not None:
        with still(looked.passes.model.module):
            _check_same(looked, steady, sample, 1, sample.alone(1), 0)
    return is_random


def check_apart_in_full_pass(looked: Looked, draw: Callable[[int, int], Sample]) -> None:
    """Raises RecordsNotIndependentError if a record's loss is another one among as many records as a full pass has."""
    many = draw(MANY, 2)
    losses = looked.losses(many)
    for place in (0, MANY // 2, MANY - 1):
        _check_same(looked, losses, many, place, many.alone(place), 0)


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


def _drawn(looked: Looked, sample: Sample, seeds: int) -> tuple[Tensor, bool]:
    """The losses, and whether they differ between seeds, as far as a pass draws random numbers at all.

    Several seeds are tried, since a layer may rarely use what it draws. One of probability 0 never does.
    """
    with same_randomness():
        before = torch.default_generator.get_state()
        losses = looked.passes.losses(looked.parameters, sample.inputs, sample.labels)
        is_drawn = sample.inputs.is_cuda or not torch.equal(before, torch.default_generator.get_state())
    return losses, is_drawn and any(
        not torch.allclose(losses, looked.losses(sample, seed), rtol=0.0, atol=0.0, equal_nan=True)
        for seed in range(1, seeds + 1)
    )


def _check_repeats(looked: Looked, sample: Sample, losses: Tensor) -> None:
    """Raises RecordsNotIndependentError if another pass with the same seed has other losses, as by NumPy's numbers."""
    if not looked.close(losses, looked.losses(sample)):
        raise RecordsNotIndependentError(
            f"{looked.pass_name} draws random numbers that no seed of PyTorch repeats, as SpecAugment of wav2vec 2.0"
            " does by NumPy; draw them by torch, or switch them off"
        )


def _steady_losses(looked: Looked, sample: Sample, seeds: int) -> Tensor | None:
    """The losses in evaluation mode, where single records can be compared; None if random numbers are drawn there."""
    with still(looked.passes.model.module):
        try:
            losses, is_random = _drawn(looked, sample, seeds)
        except Exception:  # the loss may reject outputs of evaluation mode
            return None
    return None if is_random else losses


def _check_same(looked: Looked, losses: Tensor, sample: Sample, place: int, changed: Sample, at: int) -> None:
    """Raises RecordsNotIndependentError if a record's loss depends on its position or on the other records."""
    if not looked.close(losses[place], looked.losses(changed)[at]):
        layer = _first_that_differs(looked, sample, place, changed, at)
        raise RecordsNotIndependentError(f"{layer or looked.loss_name} mixes records")


def _check_places(
    looked: Looked, sample: Sample, contexts: list[Sample], places: Iterable[int], *, alone: bool
) -> None:
    """Raises RecordsNotIndependentError if a record at one of the positions has another loss elsewhere."""
    losses = looked.losses(sample)
    for place in places:
        changes = [(sample.among(others, place), place) for others in contexts]
        changes += [(sample.repeated(place), place)]  # this fills experts of limited capacity
        changes += [(sample.alone(place), 0)] if alone else []  # alone, dropout would drop something else
        for changed, at in changes:
            _check_same(looked, losses, sample, place, changed, at)


def _check_losses_apart(looked: Looked, sample: Sample) -> None:
    """Raises RecordsNotIndependentError if the loss function returns other losses for single outputs."""
    model = looked.passes.model
    with torch.no_grad(), same_randomness():
        outputs = model.outputs(model.named(looked.parameters), sample.inputs)
        together = model.losses(outputs, sample.labels)
        pairs = zip(torch.split(outputs, 1), torch.split(sample.labels, 1), strict=True)
        alone = torch.cat([model.losses(*pair) for pair in pairs])
    if not looked.close(together, alone):
        raise RecordsNotIndependentError(f"{looked.loss_name} mixes records")


def _check_gradients_apart(looked: Looked, sample: Sample, weight: float) -> None:
    """Raises RecordsNotIndependentError if the backward pass mixes records: a sum of losses has another gradient.

    weight: of the losses, since some backward passes mix records only if errors are large.
    """

    def gradient(some: Sample) -> Tensor | None:
        point = looked.parameters.clone().requires_grad_()
        with same_randomness():
            losses = looked.passes.followed(point, some.inputs, some.labels)
            return looked.passes.back(point, weight * losses.sum())

    together = gradient(sample)
    if together is None:
        return
    apart, sizes = torch.zeros_like(together), torch.zeros_like(together)
    for place in range(len(sample.labels)):
        one = gradient(sample.alone(place))
        if one is not None:
            apart += one
            sizes += one.abs()
    if not bool(sizes.isfinite().all()):
        return
    if not bool(((together - apart).abs() <= 10.0 * looked.tolerance * (sizes + sizes.amax())).all()):
        raise RecordsNotIndependentError(
            f"the backward pass of the model {looked.passes.model.name} mixes records"
        )


def check_state(looked: Looked, sample: Sample) -> None:
    """Raises RecordsNotIndependentError if a forward pass changes the model's state, which would depend on the records.

    A table that the first pass builds is allowed if it is the same for all records and later passes.
    """
    named = looked.passes.model.named(looked.parameters)
    module = looked.passes.model.module
    module = copied(module, module.parameters())
    frozen = {name: part for name, part in module.named_parameters() if name not in named}

    def parameters() -> dict[str, int]:
        return {name: _digest(part) for name, part in (frozen | named).items()}

    digests, kept = parameters(), []
    before = {name: value.clone() for name, value in module.named_buffers()}
    for _ in range(2):
        _pass_through(looked, module, sample)
        kept.append(_attributes(module) | _kept_by(looked.passes.model.losses))
    changed = [f"parameter {name}" for name, digest in parameters().items() if digests[name] != digest]
    different = _different(before, module)
    if different and not _are_tables(looked, sample):
        changed.append(f"buffer {different[0]}")
    if changed:
        raise RecordsNotIndependentError(
            f"the {changed[0]} is changed by a forward pass, and would be released without noise; put its layer into"
            " evaluation mode by .eval(), or take it out"
        )
    for name in _changed(*kept):
        raise RecordsNotIndependentError(
            f"the attribute {name} is changed by every forward pass, which mixes records; take it out"
        )


def check_first_records(unused: nn.Module, looked: Looked, draw: Callable[[int, int], Sample]) -> None:
    """Raises RecordsNotIndependentError if later losses depend on the records of the first pass.

    A pass's attributes are discarded after it, but not what lies deeper, as in an object that a layer holds.

    unused: a copy of the module from before its first pass, in 32 bits. A module that keeps something of a pass without
    using it later is accepted.
    """
    model = looked.passes.model
    changed = _changed(_attributes(unused), _attributes(model.module))
    if not changed:
        return

    def later(*samples: Sample) -> Tensor:
        fresh = replace(model, module=copied(unused, unused.parameters()))
        one_by_one = replace(looked, passes=replace(looked.passes, model=fresh))
        return [one_by_one.losses(sample) for sample in samples][-1]

    first, other = draw(2, 0), draw(2, 1)
    if not looked.close(later(other), later(first, other)):
        raise RecordsNotIndependentError(
            f"the attribute {changed[0]} keeps what was computed from the first records, and mixes them with later ones"
        )


def _changed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]


def _pass_through(looked: Looked, module: nn.Module, sample: Sample) -> None:
    named = looked.passes.model.named(looked.parameters)
    with torch.no_grad(), same_randomness():
        outputs = torch.func.functional_call(module, named, (sample.inputs,))
        looked.passes.model.losses(outputs, sample.labels)


def _different(before: Mapping[str, Tensor], module: nn.Module) -> list[str]:
    """The names of buffers that have changed."""
    after = dict(module.named_buffers())
    return [
        name
        for name in before.keys() | after.keys()
        if name not in before or name not in after or not torch.equal(before[name], after[name])
    ]


def _are_tables(looked: Looked, sample: Sample) -> bool:
    """Whether the first pass builds the same buffers for any records and batch size, and later passes keep them."""
    other, module = sample.times(0.0).alone(0), looked.passes.model.module
    first, second = (copied(module, module.parameters()) for _ in range(2))
    _pass_through(looked, first, sample)
    _pass_through(looked, second, other)
    made = {name: value.clone() for name, value in first.named_buffers()}
    _pass_through(looked, first, other)
    return not _different(made, first) and not _different(made, second)


def _digest(value: Tensor) -> int:
    """A digest that changes if a tensor is written to or replaced; avoids a copy of the tensor."""
    return hash((value.data_ptr(), _content(value)))


def _content(value: Tensor) -> int:
    """A digest of a tensor's values: a sum of its bits, weighted by position."""
    plain = value.detach().contiguous().view(-1).view(torch.uint8)
    is_aligned = plain.numel() % 8 == plain.storage_offset() % 8 == 0
    blocks = torch.split(plain.view(torch.int64) if is_aligned else plain, _BLOCK)
    by_place = 2 * torch.arange(_BLOCK, device=value.device) + 1
    return hash((value.shape, *(int((block * by_place[: len(block)]).sum()) for block in blocks)))


class _Pickler(pickle.Pickler):
    """Pickles a digest for each tensor, not its storage, which may hold all parameters.

    Weak references are left out, since layers such as an LSTM may create them anew in each pass.
    """

    def persistent_id(self, obj: Any) -> object:
        """The digest of a tensor, or a constant for a reference; None for anything else, which is pickled as usual."""
        if isinstance(obj, Tensor):
            return obj.dtype, _content(obj)
        return ReferenceType.__name__ if isinstance(obj, ReferenceType) else None


def _written(value: object) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _attributes(module: nn.Module) -> dict[str, bytes]:
    """The attributes of layers and their classes by name, except parameters, buffers and hooks."""
    found: dict[str, bytes] = {}
    for name, layer in module.named_modules():
        found |= _values(name, layer)
        if not type(layer).__module__.startswith("torch."):
            found |= _values(type(layer).__name__, type(layer))
    return found


def _kept_by(losses: object) -> dict[str, bytes]:
    """The state of a loss, which may be a function, a callable object or a method."""
    owner = getattr(losses, "__self__", losses)
    buffers = dict(owner.named_buffers()) if isinstance(owner, nn.Module) else {}
    return _values("losses", owner) | {f"losses.{name}": _written(part) for name, part in buffers.items()}


def _values(name: str, owner: object) -> dict[str, bytes]:
    """The pickled attributes of a layer, class or function, by name, if they can be pickled."""
    own, found = vars(nn.Module()).keys() - {"training"}, {}
    for key, value in getattr(owner, "__dict__", {}).items():
        if key not in own and not isinstance(value, FunctionType | type):
            try:
                written = _written(value)
            except Exception:  # whatever a value's own pickling raises
                # its memory address is irrelevant
                written = re.sub("0x[0-9a-f]+", "", repr(value)).encode()
            found[f"{name}.{key}".lstrip(".")] = written
    return found


def _first_that_differs(looked: Looked, sample: Sample, one: int, changed: Sample, other: int) -> str | None:
    """The first layer, or the model itself, whose output for a record differs between two batches and positions.

    A layer whose input differs too is not meant: it follows the one that mixes, or its first dimension is time.
    """

    def differs(a: Tensor, b: Tensor) -> bool:
        is_by_record = a.dim() and len(a) > one and len(b) > other and a.shape[1:] == b.shape[1:]
        return bool(is_by_record) and not looked.close(a[one], b[other])

    first, second = (_passed_by_module(looked, some) for some in (sample, changed))
    for name in (name for name in first if name in second):
        (*given, found), (*others, its) = first[name], second[name]
        if differs(found, its) and not any(map(differs, given, others)):
            return name
    return None


def _passed_by_module(looked: Looked, sample: Sample) -> dict[str, list[Tensor]]:
    """The first input, if any, and output of every layer and of the model, by name, in the order in which they end."""
    passed: dict[str, list[Tensor]] = {}

    def note(name: str, layer: nn.Module) -> Any:
        time_first = ", batch_first=False" if getattr(layer, "batch_first", True) is False else ""
        own = f"the layer {name} ({type(layer).__name__}{time_first})" if name else looked.pass_name

        def hook(_layer: nn.Module, inputs: Any, output: Any) -> None:
            if found := tensors_in(output)[:1]:
                passed[own] = [part.detach().clone() for part in (*tensors_in(inputs)[:1], *found)]

        return hook

    layers = looked.passes.model.module.named_modules()
    handles = [layer.register_forward_hook(note(name, layer)) for name, layer in layers]
    try:
        looked.losses(sample)
    finally:
        for handle in handles:
            handle.remove()
    return passed

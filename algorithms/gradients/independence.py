"""Whether a model takes each record by itself, seen on made-up records: else no record's gradient can be clipped."""

import copy
import io
import math
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from types import FunctionType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from algorithms.gradients.op_tracer import Sample
from algorithms.gradients.passes import Passes
from algorithms.models.randomness import same_randomness

_FEW, MANY = 3, 65

_LARGE = 1e3
"""How much larger than ordinary the large records are."""


_BLOCK = 2**15
"""Numbers of a parameter that are looked at together."""


class RecordsNotIndependentError(ValueError):
    """A model in which no record's gradient can be told apart; the message names what mixes them."""


def mixing_layer(module: nn.Module) -> str | None:
    """The first layer that mixes records or remembers them, as "name (type)"; None where there is none."""
    for name, layer in module.named_modules():
        batch_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        mixes = batch_norm and (layer.training or layer.running_mean is None)
        remembers = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats
        if mixes or (remembers and layer.training):
            return f"{name} ({type(layer).__name__})"
    return None


@dataclass(frozen=True)
class Looked:
    """A model at a point, and how far rounding may move its losses."""

    passes: Passes
    parameters: Tensor
    tolerance: float

    @property
    def loss_name(self) -> str:
        """What is to blame where no layer is."""
        return f"the loss of the model {self.passes.model.name}"

    def losses(self, sample: Sample, seed: int = 0) -> Tensor:
        """The losses [count]; dropout drops the same for one seed."""
        with same_randomness(seed):
            return self.passes.losses(self.parameters, sample.inputs, sample.labels)

    def close(self, a: Tensor, b: Tensor) -> bool:
        """Whether two values differ by rounding alone."""
        return torch.allclose(
            a.double(), b.double(), rtol=self.tolerance, atol=self.tolerance, equal_nan=True
        )


def check_apart(looked: Looked, draw: Callable[[int, int], Sample], constants: Sequence[int] = ()) -> bool:
    """Raises RecordsNotIndependentError where a record's loss, or an output on the way to it, changes with the other
    records.

    Returns whether the model draws random numbers.

    draw: records by number and seed. They are looked at alone, among ordinary records, among large ones, and with
    values that are missing or not finite, since some layers mix records only then. constants: of whole numbers, to look
    at them among records of each alone.
    """
    sample = draw(_FEW, 0)
    losses = looked.losses(sample)
    if losses.shape != sample.labels.shape[:1]:
        raise RecordsNotIndependentError(
            f"{looked.loss_name} has shape {list(losses.shape)} for {_FEW} records, not [{_FEW}]"
        )
    is_random = not _equal(losses, looked.losses(sample, seed=1))
    for shown in (sample, sample.times(_LARGE), sample.with_holes()):
        others = draw(_FEW, 1)
        contexts = [others, others.times(_LARGE), others.times(0.0), others.times(math.nan)]
        contexts += [others.all_of(constant) for constant in constants]
        _check_places(looked, shown, contexts, range(_FEW), alone=not is_random)
    many = draw(MANY, 2)
    _check_places(looked, many, [draw(MANY, 3).times(_LARGE)], (0, MANY // 2, MANY - 1), alone=not is_random)
    _check_losses_apart(looked, sample)
    if not is_random:
        large = sample.times(_LARGE)
        for shown, weight in product((sample, large, sample.among(large, 0)), (1.0, _LARGE)):
            _check_gradients_apart(looked, shown, weight)
    elif _is_steady(looked, sample):
        with still(looked.passes.model.module):
            check_apart(looked, draw, constants)
    return is_random


def check_apart_briefly(looked: Looked, draw: Callable[[int, int], Sample]) -> bool:
    """`check_apart` for a model whose passes take long: by two records, each among another kind of records."""
    sample, others = draw(2, 0), draw(2, 1)
    with same_randomness():
        before = torch.default_generator.get_state()
        losses = looked.passes.losses(looked.parameters, sample.inputs, sample.labels)
        is_drawn = sample.inputs.is_cuda or not torch.equal(before, torch.default_generator.get_state())
    if losses.shape != sample.labels.shape[:1]:
        raise RecordsNotIndependentError(
            f"{looked.loss_name} has shape {list(losses.shape)} for 2 records, not [2]"
        )
    # Some layers draw numbers that decide nothing, as a layer drop of probability 0 does.
    is_random = is_drawn and not _equal(losses, looked.losses(sample, seed=1))
    changes = [
        (sample.among(others.times(factor), place), place, place)
        for place, factor in enumerate((math.nan, _LARGE))
    ]
    # The second record, whose place is another one when it is alone.
    changes += [] if is_random else [(sample.alone(1), 1, 0)]
    for changed, place, at in changes:
        _check_same(looked, losses, sample, place, changed, at)
    if is_random and _is_steady(looked, sample):
        with still(looked.passes.model.module):
            _check_same(looked, looked.losses(sample), sample, 1, sample.alone(1), 0)
    return is_random


@contextmanager
def still(module: nn.Module) -> Iterator[None]:
    """A module without dropout, in which a record would have another part of it alone."""
    training = [layer for layer in module.modules() if layer.training]
    for layer in training:
        layer.training = False
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


def _is_steady(looked: Looked, sample: Sample) -> bool:
    """Whether nothing is drawn once the model is out of training mode, so that records can be looked at alone."""
    with still(looked.passes.model.module):
        try:
            return _equal(looked.losses(sample), looked.losses(sample, seed=1))
        except Exception:  # whatever a loss says of what a model gives in evaluation alone
            return False


def _equal(some: Tensor, others: Tensor) -> bool:
    """Whether losses are the same, those that are no numbers included."""
    return torch.allclose(some, others, rtol=0.0, atol=0.0, equal_nan=True)


def _check_same(looked: Looked, losses: Tensor, sample: Sample, place: int, changed: Sample, at: int) -> None:
    """Raises RecordsNotIndependentError where a record has another loss at a place of other records."""
    if not looked.close(losses[place], looked.losses(changed)[at]):
        layer = _first_that_differs(looked, sample, place, changed, at)
        raise RecordsNotIndependentError(f"{layer or looked.loss_name} mixes records")


def _check_places(
    looked: Looked, sample: Sample, contexts: list[Sample], places: Iterable[int], *, alone: bool
) -> None:
    """Raises RecordsNotIndependentError where a record at one of the places has another loss in another context, or
    alone.
    """
    losses = looked.losses(sample)
    for place in places:
        changes = [(sample.among(others, place), place) for others in contexts]
        changes += [(sample.repeated(place), place)]  # experts of a limited capacity are full then
        changes += [(sample.alone(place), 0)] if alone else []  # alone, dropout would drop something else
        for changed, at in changes:
            _check_same(looked, losses, sample, place, changed, at)


def _check_losses_apart(looked: Looked, sample: Sample) -> None:
    """Raises RecordsNotIndependentError where the losses of given outputs change when each is taken alone."""
    model = looked.passes.model
    with torch.no_grad(), same_randomness():
        outputs = model.outputs(model.named(looked.parameters), sample.inputs)
        together = model.losses(outputs, sample.labels)
        pairs = zip(torch.split(outputs, 1), torch.split(sample.labels, 1), strict=True)
        alone = torch.cat([model.losses(*pair) for pair in pairs])
    if not looked.close(together, alone):
        raise RecordsNotIndependentError(f"{looked.loss_name} mixes records")


def _check_gradients_apart(looked: Looked, sample: Sample, weight: float) -> None:
    """Raises RecordsNotIndependentError where errors mix on their way back: where a gradient is not the sum of each
    record's alone.

    weight: of the losses, as some ways back mix large errors alone.
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
            f"the way back through the model {looked.passes.model.name} mixes records"
        )


def check_state(looked: Looked, sample: Sample) -> None:
    """Raises RecordsNotIndependentError where a forward pass changes what a model keeps, which carries on what it
    saw or how often.

    A table that the first pass makes, and that is the same for all records and afterwards, is no such thing.
    """
    named, module = looked.passes.model.named(looked.parameters), _copied(looked)
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
    for name in kept[0].keys() | kept[1].keys():
        if kept[0].get(name) != kept[1].get(name):
            raise RecordsNotIndependentError(
                f"the attribute {name} is changed by every forward pass, which mixes records; take it out"
            )


def _copied(looked: Looked) -> nn.Module:
    """The module with buffers of its own."""
    large = {id(part): part for part in looked.passes.model.module.parameters()}  # which are not copied
    return copy.deepcopy(looked.passes.model.module, large)


def _pass_through(looked: Looked, module: nn.Module, sample: Sample) -> None:
    named = looked.passes.model.named(looked.parameters)
    with torch.no_grad(), same_randomness():
        outputs = torch.func.functional_call(module, named, (sample.inputs,))
        looked.passes.model.losses(outputs, sample.labels)


def _different(before: Mapping[str, Tensor], module: nn.Module) -> list[str]:
    """The names of buffers that are not what they were."""
    after = dict(module.named_buffers())
    return [
        name
        for name in before.keys() | after.keys()
        if name not in before or name not in after or not torch.equal(before[name], after[name])
    ]


def _are_tables(looked: Looked, sample: Sample) -> bool:
    """Whether a first pass makes the same buffers of whatever records, of however many, and another leaves them."""
    other, first, second = sample.times(0.0).alone(0), _copied(looked), _copied(looked)
    _pass_through(looked, first, sample)
    _pass_through(looked, second, other)
    made = {name: value.clone() for name, value in first.named_buffers()}
    _pass_through(looked, first, other)
    return not _different(made, first) and not _different(made, second)


def _digest(value: Tensor) -> int:
    """What tells whether a tensor was written to, or another put in its place, without a copy of it."""
    return hash((value.data_ptr(), _content(value)))


def _content(value: Tensor) -> int:
    """What tells a tensor's values from others: a sum of its bits, each by its place."""
    plain = value.detach().contiguous().view(-1).view(torch.uint8)
    is_aligned = plain.numel() % 8 == plain.storage_offset() % 8 == 0
    blocks = torch.split(plain.view(torch.int64) if is_aligned else plain, _BLOCK)
    by_place = 2 * torch.arange(_BLOCK, device=value.device) + 1
    return hash((value.shape, *(int((block * by_place[: len(block)]).sum()) for block in blocks)))


class _Pickler(pickle.Pickler):
    """Writes of a tensor what tells its values from others, not the storage of all parameters that it is a view of.

    Of a weak reference nothing: a layer may make its references anew in each pass, as an LSTM does.
    """

    def persistent_id(self, obj: Any) -> object:
        """What stands for a tensor or a reference; None for what is written as always."""
        if isinstance(obj, Tensor):
            return obj.dtype, _content(obj)
        return ReferenceType.__name__ if isinstance(obj, ReferenceType) else None


def _written(value: object) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _attributes(module: nn.Module) -> dict[str, bytes]:
    """What the layers and their classes keep besides parameters, buffers and hooks, by name."""
    found: dict[str, bytes] = {}
    for name, layer in module.named_modules():
        found |= _values(name, layer)
        if not type(layer).__module__.startswith("torch."):
            found |= _values(type(layer).__name__, type(layer))
    return found


def _kept_by(losses: object) -> dict[str, bytes]:
    """What a loss keeps: a function, an object that is called, or a method of one."""
    owner = getattr(losses, "__self__", losses)
    buffers = dict(owner.named_buffers()) if isinstance(owner, nn.Module) else {}
    return _values("losses", owner) | {f"losses.{name}": _written(part) for name, part in buffers.items()}


def _values(name: str, owner: object) -> dict[str, bytes]:
    """The attributes of a layer, class or function, by name, as far as they can be written down."""
    own, found = vars(nn.Module()).keys() - {"training"}, {}
    for key, value in getattr(owner, "__dict__", {}).items():
        if key not in own and not isinstance(value, FunctionType | type):
            try:
                written = _written(value)
            except Exception:  # whatever a value's own way of being written down raises
                # where it lies in memory says nothing
                written = re.sub("0x[0-9a-f]+", "", repr(value)).encode()
            found[f"{name}.{key}".lstrip(".")] = written
    return found


def _first_that_differs(looked: Looked, sample: Sample, one: int, changed: Sample, other: int) -> str | None:
    """The first layer whose output for a record, at one place and at another of other records, differs."""
    first, second = (_outputs_by_module(looked, some) for some in (sample, changed))
    for name in (name for name in first if name in second):
        a, b = first[name], second[name]
        is_by_record = a.dim() and len(a) > one and len(b) > other and a.shape[1:] == b.shape[1:]
        if is_by_record and not looked.close(a[one], b[other]):
            return name
    return None


def _outputs_by_module(looked: Looked, sample: Sample) -> dict[str, Tensor]:
    """The outputs of every layer in another forward pass, by name, in the order in which they come."""
    outputs: dict[str, Tensor] = {}

    def note(name: str, layer: nn.Module) -> Any:
        def hook(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs[f"the layer {name} ({type(layer).__name__})"] = output.detach().clone()

        return hook

    layers = [(name, layer) for name, layer in looked.passes.model.module.named_modules() if name]
    handles = [layer.register_forward_hook(note(name, layer)) for name, layer in layers]
    try:
        looked.losses(sample)
    finally:
        for handle in handles:
            handle.remove()
    return outputs

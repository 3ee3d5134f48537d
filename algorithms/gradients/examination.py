"""What kind of model this is, found out on made-up inputs before a private record is seen.

Records must not touch each other, or no record's gradient can be clipped. A model whose passes can be recorded is known
by where its records lie in each tensor, and by giving the same gradients as autograd.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from algorithms.gradients.layout import Layout, layout_of
from algorithms.gradients.passes import Passes
from algorithms.gradients.tape import Tape, Unrecorded

Layouts = tuple[Layout | None, ...]

_FEW, _MORE = 3, 5
_ROUNDS = 4
_TOLERANCE = 1e-3
"""Relative; rounding stays far below it, a part of a gradient that is left out far above."""


class Unclippable(ValueError):
    """A model in which no record's gradient can be told apart; the message names what mixes them."""


@dataclass(frozen=True)
class Examined:
    """What an examination found.

    layouts: of the tensors that the rules ask about; None where passes cannot be recorded, for the `reason` given.
    bytes_per_record: what a pass keeps for each record. without_rule: operations that are taken record by record.
    """

    layouts: Layouts | None
    reason: str
    bytes_per_record: int
    without_rule: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """Made-up inputs [count, *shape] and labels 0 and 1."""

    inputs: Tensor
    labels: Tensor

    @staticmethod
    def draw(
        count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int
    ) -> "Sample":
        """Normal numbers; for whole numbers 0 and 1, which any table of entries has."""
        source = torch.Generator().manual_seed(seed)
        if dtype.is_floating_point:
            inputs = torch.randn(count, *shape, generator=source).to(dtype)
        else:
            inputs = torch.randint(0, 2, (count, *shape), generator=source).to(dtype)
        labels = torch.arange(seed, seed + count) % 2
        return Sample(inputs.to(device), labels.to(device))

    def with_others(self, other: "Sample") -> "Sample":
        """The first record among other ones."""
        inputs, labels = self.inputs.clone(), self.labels.clone()
        inputs[1:], labels[1:] = other.inputs[1:], other.labels[1:]
        return Sample(inputs, labels)


def examine(passes: Passes, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Examined:
    """Finds how to take a model's per-example gradients. Raises Unclippable where records mix."""
    offender = mixing_layer(passes.model.module)
    if offender is not None:
        raise Unclippable(f"the layer {offender} mixes records")
    parameters = passes.model.initial_parameters().to(device)
    few, more = (Sample.draw(count, shape, dtype, device, seed=0) for count in (_FEW, _MORE))
    with _unchanged(passes.model.module):
        _check_apart(passes, parameters, few, Sample.draw(_FEW, shape, dtype, device, seed=1))
        sizes = [_kept_bytes(passes, parameters, sample) for sample in (few, more)]
        each = max(1, (sizes[1] - sizes[0]) // (_MORE - _FEW))
        try:
            layouts, without_rule = _learn(passes, parameters, few, more)
            _check_gradients(passes, parameters, few, layouts)
        except Unrecorded as reason:
            return Examined(None, str(reason), each + 4 * len(parameters))
    return Examined(layouts, "", each, without_rule)


def mixing_layer(module: nn.Module) -> str | None:
    """The first layer that mixes records or remembers them, as "name (type)"; None where there is none."""
    for name, layer in module.named_modules():
        batch_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        mixes = batch_norm and (layer.training or layer.running_mean is None)
        remembers = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats
        if mixes or (remembers and layer.training):
            return f"{name} ({type(layer).__name__})"
    return None


def _check_apart(passes: Passes, parameters: Tensor, sample: Sample, other: Sample) -> None:
    """Raises Unclippable where a record's loss, or an output on the way to it, changes with the other records."""
    name = passes.model.name
    with _outputs_by_module(passes.model.module) as first:
        losses = _losses(passes, parameters, sample)
    if losses.shape != sample.labels.shape:
        raise Unclippable(
            f"the loss of the model {name} has shape {list(losses.shape)} for {_FEW} records, not [{_FEW}]"
        )
    with _outputs_by_module(passes.model.module) as second:
        changed = _losses(passes, parameters, sample.with_others(other))
    if not _close(losses[0], changed[0]):
        raise Unclippable(
            f"{_first_that_differs(first, second) or f'the loss of the model {name}'} mixes records"
        )


def _losses(passes: Passes, parameters: Tensor, sample: Sample) -> Tensor:
    with _same_randomness():
        return passes.losses(parameters, sample.inputs, sample.labels)


def _learn(passes: Passes, parameters: Tensor, few: Sample, more: Sample) -> tuple[Layouts, tuple[str, ...]]:
    """Where the records are, from the shapes at two batch sizes, and which operations have no rule.

    A rule that knows where its records are may ask about more tensors, so this is repeated until nothing changes.
    """
    layouts: Layouts = ()
    for _ in range(_ROUNDS):
        tapes = [_record(passes, parameters, sample, layouts) for sample in (few, more)]
        learned = _layouts(tapes[0].shapes, tapes[1].shapes)
        if learned == layouts:
            break
        layouts = learned
    return layouts, tuple(sorted(tapes[0].without_rule))


def _record(passes: Passes, parameters: Tensor, sample: Sample, layouts: Layouts) -> Tape:
    with _same_randomness():
        return passes.taped(parameters, sample.inputs, sample.labels, layouts, is_learning=True)[1]


def _layouts(few: list[tuple[int, ...]], more: list[tuple[int, ...]]) -> Layouts:
    if len(few) != len(more):
        raise Unrecorded("the model uses its parameters differently for another number of records")
    return tuple(layout_of(a, b, _FEW, _MORE) for a, b in zip(few, more, strict=True))


def _check_gradients(passes: Passes, parameters: Tensor, sample: Sample, layouts: Layouts) -> None:
    """Raises Unrecorded where a weighted sum of the recorded gradients is not what autograd makes of it."""
    weights = torch.linspace(0.5, 2.0, len(sample.labels), dtype=torch.float64, device=parameters.device)
    start = parameters.clone().requires_grad_()
    with _same_randomness(), torch.enable_grad():
        outputs = passes.model.outputs(passes.model.named(start), sample.inputs)
        losses = passes.model.losses(outputs, sample.labels)
        (expected,) = torch.autograd.grad((losses * weights).sum(), start)
    plain = Passes(replace(passes.model, precision=torch.float32))  # bfloat16 would hide a difference
    with _same_randomness():
        found = plain.recorded(parameters, sample.inputs, sample.labels, layouts)
    total = found.weighted_sum(weights)
    if not torch.linalg.vector_norm(total - expected) <= _TOLERANCE * torch.linalg.vector_norm(expected):
        raise Unrecorded("the recorded gradients are not those of autograd")


def _kept_bytes(passes: Passes, parameters: Tensor, sample: Sample) -> int:
    """What autograd keeps for a backward pass, in bytes."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    start = parameters.clone().requires_grad_()
    with _same_randomness(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = passes.model.outputs(passes.model.named(start), sample.inputs)
        passes.model.losses(outputs, sample.labels).sum()
    return sum(kept.values())


@contextmanager
def _same_randomness() -> Iterator[None]:
    """Dropout that drops the same each time, and leaves the generators as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Raises Unclippable where a forward pass changed a buffer, which would carry what it saw to later records."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    for name, buffer in module.named_buffers():
        if not torch.equal(before[name], buffer):
            raise Unclippable(f"the buffer {name} is changed by a forward pass, which mixes records")


@contextmanager
def _outputs_by_module(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collects the outputs of every layer, by name, in the order in which they come."""
    outputs: dict[str, Tensor] = {}

    def note(name: str, layer: nn.Module) -> Any:
        def hook(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs[f"the layer {name} ({type(layer).__name__})"] = output.detach().clone()

        return hook

    handles = [
        layer.register_forward_hook(note(name, layer)) for name, layer in module.named_modules() if name
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _first_that_differs(first: dict[str, Tensor], second: dict[str, Tensor]) -> str | None:
    """The first layer whose output for the first record differs."""
    for name in first.keys() & second.keys() and [name for name in first if name in second]:
        a, b = first[name], second[name]
        if a.dim() and a.shape == b.shape and a.is_floating_point() and not _close(a[0], b[0]):
            return name
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a.double(), b.double(), rtol=_TOLERANCE, atol=1e-6, equal_nan=True))

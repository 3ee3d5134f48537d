"""Whether a model takes each record by itself, seen on made-up records: else no record's gradient can be clipped."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from algorithms.gradients.passes import Passes
from algorithms.gradients.sample import Sample, same_randomness

Outputs = dict[str, Tensor]

_TOLERANCE = 1e-3


class Unclippable(ValueError):
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


def check_apart(passes: Passes, parameters: Tensor, sample: Sample, others: Sample) -> None:
    """Raises Unclippable where a record's loss, or an output on the way to it, changes with the other records."""
    name, count = f"the loss of the model {passes.model.name}", len(sample.labels)
    with _outputs_by_module(passes.model.module) as outputs:
        losses = _losses(passes, parameters, sample)
    if losses.shape != sample.labels.shape:
        raise Unclippable(f"{name} has shape {list(losses.shape)} for {count} records, not [{count}]")
    is_random = not torch.equal(losses, _losses(passes, parameters, sample, seed=1))
    for place in range(count):
        changes = [(sample.among(others, place), place)]
        changes += [] if is_random else [(sample.alone(place), 0)]  # alone, dropout would drop something else
        for changed, at in changes:
            with _outputs_by_module(passes.model.module) as again:
                loss = _losses(passes, parameters, changed)[at]
            if not _close(losses[place], loss):
                raise Unclippable(f"{_first_that_differs(outputs, again, place, at) or name} mixes records")
    _check_losses_apart(passes, parameters, sample, name)


def _check_losses_apart(passes: Passes, parameters: Tensor, sample: Sample, name: str) -> None:
    """Raises Unclippable where the losses of given outputs change when each is taken alone."""
    with torch.no_grad(), same_randomness():
        outputs = passes.model.outputs(passes.model.named(parameters), sample.inputs)
        together = passes.model.losses(outputs, sample.labels)
        pairs = zip(torch.split(outputs, 1), torch.split(sample.labels, 1), strict=True)
        alone = torch.cat([passes.model.losses(*pair) for pair in pairs])
    if not _close(together, alone):
        raise Unclippable(f"{name} mixes records")


def _losses(passes: Passes, parameters: Tensor, sample: Sample, seed: int = 0) -> Tensor:
    with same_randomness(seed):
        return passes.losses(parameters, sample.inputs, sample.labels)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Raises Unclippable where a forward pass changed a buffer, which would carry what it saw to later records."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    for name, buffer in module.named_buffers():
        if not torch.equal(before[name], buffer):
            raise Unclippable(f"the buffer {name} is changed by a forward pass, which mixes records")


@contextmanager
def _outputs_by_module(module: nn.Module) -> Iterator[Outputs]:
    """Collects the outputs of every layer, by name, in the order in which they come."""
    outputs: Outputs = {}

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


def _first_that_differs(first: Outputs, second: Outputs, one: int, other: int) -> str | None:
    """The first layer whose output for a record, at one place and at another, differs."""
    for name in (name for name in first if name in second):
        a, b = first[name], second[name]
        is_by_record = a.dim() and len(a) > one and len(b) > other and a.shape[1:] == b.shape[1:]
        if is_by_record and not _close(a[one], b[other]):
            return name
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a.double(), b.double(), rtol=_TOLERANCE, atol=1e-6, equal_nan=True))

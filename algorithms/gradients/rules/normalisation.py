"""Normalisations: output = normalised input times weight plus bias."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from algorithms.gradients.layout import Layout
from algorithms.gradients.per_example import Rows
from algorithms.gradients.rules.general import general
from algorithms.gradients.tape import Gradients, Tape

_OVER_LAST = (functional.layer_norm, functional.rms_norm)


def normalisation(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Layer and RMS norm (weights over the last dimensions); group, instance and fixed batch norm (over channels)."""
    call = _signature(func).bind(*args, **kwargs).arguments
    input = call["input"]
    layout = tape.layout(input)
    if tape.name(input) is not None or (func not in _OVER_LAST and layout != Layout(0)):
        return general(tape, func, args, kwargs)
    names = tape.name(call.get("weight")), tape.name(call.get("bias"))
    # y = w * n(x) + b: the weight's gradient is error times n(x), which is computed once more, without weight and
    # bias, from the input that the use holds.
    bare = call | {name: None for name in ("weight", "bias") if name in call}
    kept = len(call["normalized_shape"]) if func in _OVER_LAST else 0

    def gradients(errors: Tensor) -> Gradients:
        with torch.no_grad():
            normalised = layout.by_record(func(**bare), tape.batch)
        return _gradients(normalised, layout.by_record(errors, tape.batch), names, kept)

    return tape.keep(func(*args, **kwargs), gradients, input)


def _gradients(
    normalised: Tensor, errors: Tensor, names: tuple[str | None, str | None], kept: int
) -> Gradients:
    weight, bias = names
    found: Gradients = {}
    if weight is not None:
        found[weight] = Rows(_summed(errors * normalised, kept))
    if bias is not None:
        found[bias] = Rows(_summed(errors, kept))
    return found


def _summed(values: Tensor, kept: int) -> Tensor:
    """Sums to [batch, numel] over all but the last `kept` dimensions, or over all but the channels where kept is 0."""
    if kept == 0:
        return values.flatten(start_dim=2).sum(dim=2) if values.dim() > 2 else values
    values = values.flatten(start_dim=values.dim() - kept)
    return values.flatten(start_dim=1, end_dim=-2).sum(dim=1) if values.dim() > 2 else values


@cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)

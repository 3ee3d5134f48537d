"""Any other operation: its gradients are written down record by record with `torch.func`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from algorithms.gradients.grad_sample_recorder import Gradients, GradSampleRecorder
from algorithms.gradients.grads import DenseGrad
from algorithms.gradients.padding import Layout, UnrecordedError

_WITHOUT_GRADIENT = ("detach", "__get__")  # the latter of `data`, when it gives a tensor


def general(
    tape: GradSampleRecorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One tensor out of parameters, values with a dimension for the records, and values that all records share."""
    output = func(*args, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    name = getattr(func, "__name__", str(func))
    if name in _WITHOUT_GRADIENT or not any(isinstance(leaf, Tensor) for leaf in tree_flatten(output)[0]):
        return output
    if not isinstance(output, Tensor) or "out" in kwargs or name.endswith("_") or name == "__set__":
        raise UnrecordedError(f"the operation '{name}' on a parameter")
    tape.without_rule.add(name)
    out = tape.layout(output)
    layouts = [tape.layout_if_any(leaf) if _is_value(tape, leaf) else None for leaf in leaves]

    def run(*leaves: Any) -> Tensor:
        some, named = tree_unflatten(leaves, structure)
        return func(*some, **named)  # type: ignore[no-any-return]

    values = [leaf for leaf in leaves if _is_value(tape, leaf)]
    return tape.keep(output, lambda errors: _gradients(tape, run, leaves, layouts, out, errors), *values)


def _is_value(tape: GradSampleRecorder, leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and tape.name(leaf) is None


def _gradients(
    tape: GradSampleRecorder,
    run: Callable[..., Tensor],
    leaves: list[Any],
    layouts: list[Layout | None],
    out: Layout,
    errors: Tensor,
) -> Gradients:
    """Gradients of the parameters among the leaves, each record's from its own values alone."""
    places = [i for i, leaf in enumerate(leaves) if tape.name(leaf) is not None]
    moving = {i: layout for i, layout in enumerate(layouts) if layout is not None}

    def one(error: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        alone = dict(
            zip(moving, (moving[i].alone(v) for i, v in zip(moving, values, strict=True)), strict=True)
        )
        fixed = [alone.get(i, leaf) for i, leaf in enumerate(leaves)]

        def of_parameters(*parameters: Tensor) -> Tensor:
            chosen = dict(zip(places, parameters, strict=True))
            return run(*(chosen.get(i, leaf) for i, leaf in enumerate(fixed)))

        backward = torch.func.vjp(of_parameters, *(leaves[i] for i in places))[1]
        return backward(out.alone(error))  # type: ignore[no-any-return]

    by_record = [layout.by_record(leaves[i], tape.batch) for i, layout in moving.items()]
    try:
        found = torch.func.vmap(one)(out.by_record(errors, tape.batch), *by_record)
    except RuntimeError as reason:
        raise UnrecordedError(
            "an operation on a parameter that torch.func cannot take record by record"
        ) from reason
    return _named(tape, [leaves[i] for i in places], found)


def _named(tape: GradSampleRecorder, parameters: list[Tensor], gradients: tuple[Tensor, ...]) -> Gradients:
    """Gradients by name; a parameter that is used twice in one operation has their sum."""
    rows: dict[str, Tensor] = {}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        name = str(tape.name(parameter))
        rows[name] = rows.get(name, 0) + gradient.flatten(start_dim=1)
    return {name: DenseGrad(gradient) for name, gradient in rows.items()}

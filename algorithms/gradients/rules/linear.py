"""The linear layer, with or without a sequence."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from algorithms.gradients.layout import Layout
from algorithms.gradients.per_example import Products, Sums
from algorithms.gradients.rules.general import general
from algorithms.gradients.tape import Gradients, Tape


def linear(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """output = input weight^T + bias, for input [..., p], weight [o, p], bias [o]."""
    input, weight, bias = _arguments(*args, **kwargs)
    if tape.name(input) is not None:
        return general(tape, func, args, kwargs)
    layout = tape.layout(input)
    names = tape.name(weight), tape.name(bias)
    output = func(input, weight, bias)
    return tape.keep(output, lambda errors: linear_gradients(input, errors, layout, names, tape.batch), input)


def linear_gradients(
    inputs: Tensor, errors: Tensor, layout: Layout, names: tuple[str | None, str | None], batch: int
) -> Gradients:
    """The gradients of a weight and a bias, by their names; None where one is not trained or not there."""
    weight, bias = names
    seen, back = (as_sequence(layout.by_record(part, batch)) for part in (inputs, errors))
    products, found = Products(seen, back), Gradients()
    if weight is not None:
        found[weight] = products
    if bias is not None:
        found[bias] = Sums(products)
    return found


def as_sequence(values: Tensor) -> Tensor:
    """[batch, ..., width] -> [batch, length, width]; without a sequence the length is 1."""
    return values.unsqueeze(1) if values.dim() == 2 else values.flatten(start_dim=1, end_dim=-2)


def _arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias

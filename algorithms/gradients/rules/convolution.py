"""One- and two-dimensional convolutions."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from algorithms.gradients.convolution import Patches
from algorithms.gradients.layout import Layout
from algorithms.gradients.per_example import Rows
from algorithms.gradients.rules.general import general
from algorithms.gradients.tape import Gradients, Tape
from algorithms.gradients.windows import Window

Pair = int | Sequence[int]


def convolution(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A convolution of input [batch, channels, (height,) width] with weight [outputs, channels / groups, *kernel]."""
    return _recorded(tape, func, *args, **kwargs)


def _recorded(
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Any:
    layout = tape.layout(input)
    if layout != Layout(0) or tape.name(input) is not None:
        return general(tape, func, (input, weight, bias, stride, padding, dilation, groups), {})
    if isinstance(
        padding, str
    ):  # what is kept is the padded input, so that patches are cut from what was seen
        input, padding = _padded(input, padding, weight.shape[2:], dilation)
    output = func(input, weight, bias, stride, padding, dilation, groups)
    kernel = weight.shape[2:]
    window = Window(
        kernel=_pair(kernel, len(kernel), 1),
        stride=_pair(stride, len(kernel), 1),
        padding=_pair(padding, len(kernel), 0),
        dilation=_pair(dilation, len(kernel), 1),
        groups=groups,
    )
    names = tape.name(weight), tape.name(bias)
    return tape.keep(output, lambda errors: _gradients(input, errors, window, names), input)


def _gradients(
    inputs: Tensor, errors: Tensor, window: Window, names: tuple[str | None, str | None]
) -> Gradients:
    weight, bias = names
    found: Gradients = {}
    if weight is not None:
        # Every place of the output is a linear layer of the patch that it saw: sum over places of error x patch^T.
        found[weight] = Patches(_image(inputs.detach()), _image(errors), window)
    if bias is not None:
        # The bias is added at every place: [batch, outputs, *places] -> [batch, outputs].
        found[bias] = Rows(errors.flatten(start_dim=2).sum(dim=2))
    return found


def _image(values: Tensor) -> Tensor:
    """A sequence as an image of height 1."""
    return values.unsqueeze(2) if values.dim() == 3 else values


def _pair(value: Pair, dimensions: int, above: int) -> tuple[int, int]:
    """A setting for height and width; a convolution along one dimension has `above` for the height that it lacks."""
    across = value if isinstance(value, int) else value[-1]
    if dimensions == 1:
        return (above, across)
    return (value if isinstance(value, int) else value[0], across)


def _padded(
    input: Tensor, padding: str, kernel: Sequence[int], dilation: Pair
) -> tuple[Tensor, tuple[int, ...]]:
    """The input padded as the words 'same' and 'valid' say, and the padding that is then left to do: none."""
    none = (0,) * len(kernel)
    if padding == "valid":
        return input, none
    spread = _pair(dilation, len(kernel), 1)[-len(kernel) :]
    totals = [step * (size - 1) for step, size in zip(spread, kernel, strict=True)]
    sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return functional.pad(input, sides), none

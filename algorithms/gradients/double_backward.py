"""Uses of parameters in derivatives that a model computes in its forward pass, as forces or gradient penalties are.

`torch.autograd.grad` runs backward passes that PyTorch reports to nobody, and that of a linear layer uses its weight.
So a use gets a backward pass here, which is recorded like any other function of parameters and values. That of a
derivative is, too, so that a model may differentiate as often as it likes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

Func = Callable[..., Any]


class Backward:
    """The backward pass of a call: a function of the gradients of its outputs and of the call's leaves.

    positions: of the leaves whose gradients it returns.
    """

    def __init__(self, func: Func, name: str, structure: TreeSpec, positions: list[int]) -> None:
        self.__name__ = f"{name} backward"
        self._func, self._structure, self._positions = func, structure, positions

    def __call__(self, grad_outputs: tuple[Tensor, ...], leaves: list[Any]) -> tuple[Tensor, ...]:
        def of_values(*values: Tensor) -> tuple[Tensor, ...]:
            chosen = dict(zip(self._positions, values, strict=True))
            every_leaf = [chosen.get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs = tree_unflatten(every_leaf, self._structure)
            return tuple(_differentiable(self._func(*args, **kwargs)))

        with torch._C.DisableTorchFunction():
            back = torch.func.vjp(of_values, *(leaves[i] for i in self._positions))[1]
            return back(grad_outputs)  # type: ignore[no-any-return]


def connect(
    run: Func,
    recorder: Callable[[], Func],
    func: Func,
    args: tuple[Any, ...],
    kwargs: dict[str, object],
    name: str,
) -> Any:
    """The output of a call whose backward pass is recorded, if it is to be differentiated again.

    run: calls `func` and records its use, with values that have no graph. recorder: returns, after that call, a
    function that records a second one of the same tensors. Its last two arguments are indices among the tensors that
    the call took, followed by those that it returned: of the second function's arguments, and of the tensors whose
    layouts its results have.
    """
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    positions = [i for i in tensors if leaves[i].requires_grad]  # of values; parameters have no graph here
    new_args, new_kwargs = tree_map_only(
        Tensor, lambda leaf: leaf.detach() if leaf.requires_grad else leaf, (args, kwargs)
    )
    output = run(func, new_args, new_kwargs)
    outputs = _differentiable(output)
    if not positions or not outputs:
        return output
    backward = Backward(func, name, structure, positions)
    output_indices = [len(tensors) + i for i, leaf in enumerate(_tensors(output)) if _is_differentiable(leaf)]
    returned = [tensors.index(i) for i in positions]
    record = recorder()

    def back(grad_outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            return backward(grad_outputs, leaves)
        # The common case, by a function that has a rule: grad_outputs times the weight.
        if func is functional.linear and positions == [0] and leaves[1].dim() == 2:
            return (record(torch.matmul, (grad_outputs[0], leaves[1]), [*output_indices, 1], returned),)
        derivatives: tuple[Tensor, ...] = record(
            backward, (grad_outputs, leaves), [*output_indices, *range(len(tensors))], returned
        )
        return derivatives

    values = [leaves[i] for i in positions]
    joined = iter(_Joined.apply(back, len(outputs), *outputs, *values))  # type: ignore[no-untyped-call]
    return tree_map_only(Tensor, lambda leaf: next(joined) if _is_differentiable(leaf) else leaf, output)


def _is_differentiable(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]


def _differentiable(output: Any) -> list[Tensor]:
    return [leaf for leaf in _tensors(output) if _is_differentiable(leaf)]


class _Joined(Function):
    """Outputs of a call, with the values that they were computed from: grad_outputs go back to both."""

    @staticmethod
    def forward(ctx: Any, back: Func, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back, ctx.count = back, count
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Outputs have their gradients unchanged, and values what the backward pass gives.
        return (None, None, *grad_outputs, *ctx.back(grad_outputs))

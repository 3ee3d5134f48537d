"""The record of one forward pass: every operation that used a trained parameter, and what its gradients need.

The tape sees torch functions, not modules: a parameter used twice, tied to another, or used outside of any layer is
seen like any other. An operation without a rule is differentiated for each record by `torch.func`, and what cannot be
told apart by record is refused with `UnrecordedError`, so that nothing is left out in silence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from algorithms.gradients.grads import PerExample
from algorithms.gradients.padding import Layout, UnrecordedError

Errors = Tensor
Gradients = dict[str, PerExample]
Rule = Callable[["GradSampleRecorder", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Use:
    """One operation's output, and the gradients of its parameters given the gradient of that output."""

    edge: GradientEdge
    gradients: Callable[[Errors], Gradients]
    kept: tuple[tuple[Tensor, int], ...]

    def check(self) -> None:
        """Raises UnrecordedError where an input was overwritten after it was used."""
        if any(tensor._version != version for tensor, version in self.kept):
            raise UnrecordedError("an input of a layer is overwritten in place after the layer used it")


class GradSampleRecorder(TorchFunctionMode):
    """Records the uses of parameters while a model runs inside of it.

    parameters: by name, the very tensors that the model is run with. rules: by torch function. batch: how many records.
    layouts: of the tensors that rules ask about, in their order. is_learning: a run that collects the shapes of these
    tensors and asks for no gradients; what it does not know it takes to have the records first.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        rules: dict[Callable[..., Any], Rule],
        general: Rule,
        *,
        batch: int,
        layouts: tuple[Layout | None, ...],
        is_learning: bool = False,
    ) -> None:
        super().__init__()
        self.batch = batch
        self.uses: list[Use] = []
        self.shapes: list[tuple[int, ...]] = []
        self.without_rule: set[str] = set()
        self.parameters = parameters  # held, so that an id stays theirs
        self._names = {id(tensor): name for name, tensor in parameters.items()}
        self._rules = rules
        self._general = general
        self._layouts = layouts
        self._is_learning = is_learning
        self._anchor = torch.zeros((), requires_grad=True)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not any(self.name(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            return func(*args, **kwargs)
        return self._rules.get(func, self._general)(self, func, args, kwargs)

    def name(self, tensor: Any) -> str | None:
        """The name of a trained parameter; None for any other value."""
        return self._names.get(id(tensor))

    def layout(self, tensor: Tensor) -> Layout:
        """Where a tensor's records are. Raises UnrecordedError where it has no dimension of its own for them."""
        found = self.layout_if_any(tensor)
        if found is None:
            raise UnrecordedError("a parameter is combined with a value that is the same for all records")
        return found

    def has_layout(self, tensor: Tensor, expected: Layout) -> bool:
        """Whether a tensor's records are where they are expected, which is believed as long as it is not known."""
        is_known = len(self.shapes) < len(self._layouts)
        return self.layout_if_any(tensor) == expected or not is_known

    def layout_if_any(self, tensor: Tensor) -> Layout | None:
        """Where a tensor's records are; None where it belongs to all of them."""
        self.shapes.append(tuple(tensor.shape))
        if len(self.shapes) <= len(self._layouts):
            return self._layouts[len(self.shapes) - 1]
        if not self._is_learning:
            raise UnrecordedError("the model takes another way than it took before")
        return Layout(0)

    def take_uses(self) -> list[Use]:
        """The uses, which the tape lets go: they refer to it, and would else keep their tensors until a collection."""
        uses, self.uses = self.uses, []
        return uses

    def keep(self, output: Tensor, gradients: Callable[[Errors], Gradients], *inputs: Tensor) -> Tensor:
        """Notes a use: `gradients` will be asked with the gradient of `output`; `inputs` must not change until then.

        Returns the output to go on with. Where gradients are switched off none come back, and nothing is noted.
        """
        if not torch.is_grad_enabled():
            return output
        if not output.requires_grad:
            output = _Anchored.apply(output, self._anchor.to(output.device))  # type: ignore[no-untyped-call]
        kept = tuple((tensor, tensor._version) for tensor in inputs)
        self.uses.append(Use(get_gradient_edge(output), gradients, kept))
        return output


class _Anchored(torch.autograd.Function):
    """Makes an output part of a graph without making it a leaf, so that the model may overwrite it in place."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[None, None]:
        return None, None

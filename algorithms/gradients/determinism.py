"""What a device cannot repeat bit for bit: PyTorch refuses such operations, and this says which layer has one."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from algorithms.gradients.model import PerExampleModel

_KERNEL_MESSAGE = re.compile(r"(\w+) does not have a deterministic implementation")
"""PyTorch's message; the group is the name of the kernel."""

_REPLACEMENTS = {
    "adaptive_avg_pool": "average pooling with a fixed kernel, or adaptive pooling to a single place",
    "adaptive_max_pool": "max pooling with a fixed kernel",
    "max_pool3d": "average pooling, or max pooling in two dimensions",
    "fractional_max_pool": "max pooling with a fixed kernel",
    "avg_pool3d": "average pooling in two dimensions, or adaptive pooling to a single place",
    "max_unpool": "upsampling by the mode nearest",
    "reflection_pad": "padding by zeros, or circular padding",
    "replication_pad": "padding by zeros, or circular padding",
    "embedding_bag": "the mode mean or sum",
    "upsample": "the mode nearest",
}
"""What to use instead of a kernel, so that bits repeat; by a part of the kernel's name."""


def unrepeatable_kernel(error: BaseException) -> str | None:
    """The kernel that PyTorch refused since it cannot repeat its results; None for another error."""
    refused = _KERNEL_MESSAGE.search(str(error))
    return None if refused is None else refused[1]


def refusal_of(kernel: str, model: PerExampleModel, device: torch.device, where: str) -> str:
    """The sentence that refuses a model; where: it computes by the kernel, as " in the layer ..."."""
    instead = next((advice for part, advice in _REPLACEMENTS.items() if part in kernel), "another operation")
    return (
        f"the model {model.name} cannot be trained on the device {device.type}: PyTorch cannot repeat there, bit for"
        f" bit, what is computed{where} ({kernel}), which a resumed run must; use {instead}, or train on the CPU."
    )


def layer_in_backward_pass(
    model: PerExampleModel, inputs: Tensor, labels: Tensor
) -> tuple[str, nn.Module] | None:
    """The innermost layer, and its name, whose backward pass is refused; None if all of it runs.

    Made-up records go through the model. Each layer notes the nodes of the graph that were added within it, and each
    node notes that it is about to run.
    """
    owners: dict[Node, str] = {}
    running: list[Node] = []

    def noting(name: str) -> Callable[[Any, Any, Any], None]:
        def note(_layer: Any, _inputs: Any, outputs: Any) -> None:
            for node in _nodes(outputs):
                if node not in owners:
                    owners[node] = name
                    node.register_prehook(lambda _, node=node: running.append(node))

        return note

    layers = dict(model.module.named_modules())
    hooks = [layer.register_forward_hook(noting(name)) for name, layer in layers.items()]
    try:
        with torch.enable_grad():
            losses = model.losses(model.module(inputs), labels)
            torch.autograd.grad(
                losses.sum(),
                [part for part in model.module.parameters() if part.requires_grad],
                allow_unused=True,
            )
    except RuntimeError as error:
        if unrepeatable_kernel(error) is None or not running:
            return None
        name = owners[running[-1]]
        return name, layers[name]
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _nodes(outputs: Any) -> Iterable[Node]:
    """All nodes of the graph behind a layer's outputs."""
    left = [part.grad_fn for part in tree_leaves(outputs) if isinstance(part, Tensor)]
    seen: set[Node] = set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return seen

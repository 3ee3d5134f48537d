"""The mode by which operations are seen, whichever PyTorch function calls them."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from algorithms.gradients.grad_sample_recorder import Args, Kwargs


class TracerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does not make PyTorch import its compiler, which would take a second."""

    # `TorchDispatchMode.__init_subclass__` asks this; if it is true, it wraps the method below by PyTorch's compiler.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run an operation; subclasses add what they observe."""
        return func(*args, **kwargs)

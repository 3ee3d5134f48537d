"""Model libraries that are extras: timm, transformers and peft, imported when a model of theirs is asked for."""

from importlib import import_module
from typing import Any

import torch

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_stubs: list[torch.library.Library] = []
"""Declared operators live as long as the library object that declared them."""


class LibraryMissingError(ImportError):
    """A model library that was asked for is not installed; the message says how to install it."""


def imported_library(name: str) -> Any:
    """The module `name` of an optional library, such as `timm` or `transformers`.

    Raises LibraryMissingError, with the command that installs it, where it cannot be imported.
    """
    _declare_torchvision()
    try:
        return import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        raise LibraryMissingError(
            f"{library} was asked for, but it cannot be imported ({error}); "
            "install it with: pip install 'epsilonflow[models]'."
        ) from error


def _declare_torchvision() -> None:
    """Declare torchvision's operators where its compiled part does not load, since it refuses to be imported then.

    That is the case for the wheel of the package index beside a CPU build of torch. Only detection uses them.
    """
    if _stubs:
        return
    try:
        import_module("torchvision")
    except RuntimeError:
        _stubs.append(torch.library.Library("torchvision", "FRAGMENT"))  # type: ignore[no-untyped-call]
        for operator in _OPERATORS:
            _stubs[0].define(operator)  # type: ignore[no-untyped-call]
    except ImportError:
        pass

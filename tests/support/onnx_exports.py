"""What PyTorch makes anew for each ONNX file, and is the same for all, is made once a process: half of an export."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import pytest

_REGISTRATION, _OPERATIONS = "torch.onnx._internal.exporter._registration", "torch._export.utils"


@cache
def _translations(registration: ModuleType) -> Any:
    """The translation of each operation, by the version of ONNX, which is read from the sources of onnxscript."""
    return cache(registration.ONNXRegistry.from_torchlib)


@cache
def _composite_operations(utils: ModuleType) -> Any:
    """What looks up the operations that are made of others, for each of some thirty namespaces.

    PyTorch looks anew as more may be registered at any time; no test registers one between exports.
    """
    return cache(utils._materialize_cpp_cia_ops)


@contextmanager
def exports_share_translations() -> Iterator[None]:
    """In the block, from the second export of a process on, as the first one imports what is changed."""
    registration, utils = (sys.modules.get(name) for name in (_REGISTRATION, _OPERATIONS))
    with pytest.MonkeyPatch.context() as patch:
        if registration is not None and utils is not None:
            patch.setattr(
                registration.ONNXRegistry, "from_torchlib", staticmethod(_translations(registration))
            )
            patch.setattr(utils, "_materialize_cpp_cia_ops", _composite_operations(utils))
        yield

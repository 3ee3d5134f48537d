"""Algorithms that train under differential privacy.

`fit` trains a PyTorch module in one call, `load` reads a model that the pipeline trained, and each method is a class of
its settings. `dir(algorithms)` lists these names, which are imported on first use, since the ledger's commands need
neither torch nor the algorithms.

Example:
    >>> from algorithms import DPSGD, OptimizerConfig
    >>> DPSGD(steps=300, expected_batch_size=256, update=OptimizerConfig(learning_rate=2.0)).clip_norm
    1.0

A resumed run must end bit for bit the same. On some processors MKL chooses kernels by an array's memory address, unless
the setting below is made before its first product.
"""

import os
from importlib import import_module
from typing import Any

from algorithms.lazy_imports import import_on_use, import_part_by_part

os.environ.setdefault("MKL_CBWR", "AUTO")
import_part_by_part("dp_accounting")  # which imports SciPy's statistics and optimisation to calibrate noise
import_on_use("scipy._lib.array_api_compat.numpy")  # which imports all of NumPy, also what compiles Fortran

_ELSEWHERE = {
    "fit": "algorithms.fitting",
    "load": "algorithms.models.saved",
    "Fitted": "algorithms.fitting",
    "replace_batch_norm": "algorithms.models.batch_norm",
    "OptimizerConfig": "algorithms.core.optimizers",
}


def __getattr__(name: str) -> Any:
    """Import a name of `_ELSEWHERE`, or a registered method by the name of its class."""
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    if name[:1].isupper() and name in (methods := _methods()):
        return methods[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, for `dir` and a notebook's completion."""
    return sorted([*_ELSEWHERE, *_methods()])


def _methods() -> dict[str, type[Any]]:
    catalogue = import_module("algorithms.methods").CATALOGUE
    return {method.__name__: method for method in catalogue.values()}

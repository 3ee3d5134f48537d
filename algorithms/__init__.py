"""Algorithms that train under differential privacy, by name in `algorithms.methods.registry`.

`from algorithms import fit, DPSGD` gives the one call for a notebook (see `algorithms.fitting`) and the settings of the
methods. They are imported when they are asked for: the ledger's commands need neither torch nor the algorithms. A run
that is taken up is to end bit for bit the same, so MKL must not choose its kernels by where an array lies in memory, as
it does on some processors unless it was told so before its first product.
"""

import os
from importlib import import_module
from typing import Any

os.environ.setdefault("MKL_CBWR", "AUTO")

_ELSEWHERE = {
    "fit": "algorithms.fitting",
    "load": "algorithms.models.saved",
    "Fitted": "algorithms.fitting",
    "replace_batch_norm": "algorithms.models.normalisation",
    "OptimizerConfig": "algorithms.core.optimizers",
}


def __getattr__(name: str) -> Any:
    """`fit`, what goes with it, and every registered method by the name of its class."""
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    if name[:1].isupper():
        methods = import_module("algorithms.methods.registry").CATALOGUE.values()
        found = next((method for method in methods if method.__name__ == name), None)
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

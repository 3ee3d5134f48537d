"""Algorithms that train under differential privacy, by name in `algorithms.methods.registry`.

`from algorithms import fit, DPSGD` imports the one call for a notebook (see `algorithms.fitting`) and a method's
settings. Names are imported on first use, since the ledger's commands need neither torch nor the algorithms.

A resumed run must end bit for bit the same. On some processors MKL chooses kernels by an array's memory address, unless
the setting below is made before its first product.
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
    """Import a name of `_ELSEWHERE`, or a registered method by the name of its class."""
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    if name[:1].isupper():
        methods = import_module("algorithms.methods.registry").CATALOGUE.values()
        found = next((method for method in methods if method.__name__ == name), None)
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Clipped sums of per-example gradients; this is the public face, and `README.md` beside it is its manual.

The package needs PyTorch and nothing else of this project. `model` is what it takes: a module with the loss of each
record; `packing`: records of several tensors. `engine` computes a sum, pass by pass; a pass records each operation
that uses a parameter, and `rules` has the gradient of each such operation; `replay` repeats it without its Python
code. `parameter_gradients` has their norms and sums by ghost clipping, one parameter at a time, `model_gradients`
those of all parameters, `clipping` the bounds. `linear` has closed forms for linear models. `model_inspection` and
`independence` refuse a model whose records cannot be clipped. `patches` is what changes PyTorch itself.

Settings of the process and what several processes share are imported by module: `devices`, `patches`, `placement`,
`randomness`, `memory`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from algorithms.gradients.clipping import L1, L2, Affine, Box, Clipping, Normalised, PerLayer, Unclipped
from algorithms.gradients.errors import ProcessLostError, RecordsNotIndependentError, UnsupportedModelError

if TYPE_CHECKING:
    from algorithms.gradients.arithmetic import pad_to_multiple, split_passes
    from algorithms.gradients.engine import Engine, clip_and_sum
    from algorithms.gradients.linear import (
        BehindSparseMap,
        LinearRecords,
        LineCandidates,
        RecordMap,
        SparseMap,
        has_one_bound,
        hinge_loss,
        layer_inputs,
        linear_layer,
        logistic_loss,
    )
    from algorithms.gradients.model import PerExampleModel
    from algorithms.gradients.model_gradients import PerExampleGradients
    from algorithms.gradients.packing import Packing, Padding, Part, RowModule
else:
    _MODULES = {
        "arithmetic": (
            "pad_to_multiple",
            "split_passes",
        ),
        "engine": (
            "Engine",
            "clip_and_sum",
        ),
        "linear": (
            "BehindSparseMap",
            "LinearRecords",
            "LineCandidates",
            "RecordMap",
            "SparseMap",
            "has_one_bound",
            "hinge_loss",
            "layer_inputs",
            "linear_layer",
            "logistic_loss",
        ),
        "model": ("PerExampleModel",),
        "packing": (
            "Packing",
            "Padding",
            "Part",
            "RowModule",
        ),
        "model_gradients": ("PerExampleGradients",),
    }
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> Any:
        """Import a name of `_MODULES` on first use: who plans a run needs the clippings alone, and no PyTorch."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


__all__ = [
    "L1",
    "L2",
    "Affine",
    "BehindSparseMap",
    "Box",
    "Clipping",
    "Engine",
    "LineCandidates",
    "LinearRecords",
    "Normalised",
    "Packing",
    "Padding",
    "Part",
    "PerExampleGradients",
    "PerExampleModel",
    "PerLayer",
    "ProcessLostError",
    "RecordMap",
    "RecordsNotIndependentError",
    "RowModule",
    "SparseMap",
    "Unclipped",
    "UnsupportedModelError",
    "clip_and_sum",
    "has_one_bound",
    "hinge_loss",
    "layer_inputs",
    "linear_layer",
    "logistic_loss",
    "pad_to_multiple",
    "split_passes",
]

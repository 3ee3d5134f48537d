"""Models: networks and linear models, those of libraries, and the registry of their names.

`bounds` and `outlines` say of a model what planning a run needs, without PyTorch; it comes with the first model that is
built.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from algorithms.errors import ModelRefusedError
from algorithms.models.bounds import LossBounds

if TYPE_CHECKING:
    from algorithms.models.catalogue import CATALOGUE, build
    from algorithms.models.feature_transforms import for_evaluation
    from algorithms.models.libraries import CHECKPOINT, digest, public_folder
    from algorithms.models.model import Model
else:
    _MODULES = {
        "catalogue": ("CATALOGUE", "build"),
        "feature_transforms": ("for_evaluation",),
        "libraries": ("CHECKPOINT", "digest", "public_folder"),
        "model": ("Model",),
    }
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> Any:
        """Import a name of `_MODULES` on first use, most of which import PyTorch."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


__all__ = [
    "CATALOGUE",
    "CHECKPOINT",
    "LossBounds",
    "Model",
    "ModelRefusedError",
    "build",
    "digest",
    "for_evaluation",
    "public_folder",
]

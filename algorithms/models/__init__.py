"""Networks and linear models."""

from algorithms.models.augmentation import for_evaluation
from algorithms.models.libraries import CHECKPOINT, public_folder
from algorithms.models.model import LossBounds, Model, ModelRefusedError
from algorithms.models.recurrent import digest
from algorithms.models.registry import CATALOGUE, adapted, build

__all__ = [
    "CATALOGUE",
    "CHECKPOINT",
    "LossBounds",
    "Model",
    "ModelRefusedError",
    "adapted",
    "build",
    "digest",
    "for_evaluation",
    "public_folder",
]

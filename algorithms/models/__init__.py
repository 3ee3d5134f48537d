"""Networks and linear models."""

from algorithms.models.catalogue import CATALOGUE, build
from algorithms.models.model import Model, ModelRefused

__all__ = ["CATALOGUE", "Model", "ModelRefused", "build"]

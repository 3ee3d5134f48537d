"""Networks and linear models."""

from algorithms.models.catalogue import CATALOGUE, build
from algorithms.models.model import LossBounds, Model, ModelRefused

__all__ = ["CATALOGUE", "LossBounds", "Model", "ModelRefused", "build"]

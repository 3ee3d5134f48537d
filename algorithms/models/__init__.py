"""Networks and linear models."""

from algorithms.models.catalogue import CATALOGUE, adapted, build
from algorithms.models.model import LossBounds, Model, ModelRefused
from algorithms.models.views import for_evaluation
from algorithms.models.words import digest

__all__ = ["CATALOGUE", "LossBounds", "Model", "ModelRefused", "adapted", "build", "digest", "for_evaluation"]

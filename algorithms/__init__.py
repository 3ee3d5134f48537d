"""Algorithms that train under differential privacy: the catalogue, by name."""

from algorithms.catalogue import CATALOGUE, from_settings

__all__ = ["CATALOGUE", "from_settings"]

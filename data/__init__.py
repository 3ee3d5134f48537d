"""Data sets: cards that declare what is public, readers, and the prepared arrays that training maps."""

from data import catalogue, prepared
from data.card import DataCard
from data.description import PublicDescription, public_description
from data.errors import DataRefused

__all__ = ["DataCard", "DataRefused", "PublicDescription", "catalogue", "prepared", "public_description"]

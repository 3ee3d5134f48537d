"""Data sets: cards that declare what is public, readers, and the prepared arrays that training maps."""

from data import prepared
from data.card import DataCard, DataRefusedError
from data.description import PublicDescription, public_description

__all__ = ["DataCard", "DataRefusedError", "PublicDescription", "prepared", "public_description"]

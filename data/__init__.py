"""Data sets: cards that declare what is public, readers, and the prepared arrays that training maps."""

from data.prepare import prepared
from data.prepare.description import PublicDescription, public_description
from data.schema import registry
from data.schema.card import DataCard
from data.schema.errors import DataRefusedError

__all__ = ["DataCard", "DataRefusedError", "PublicDescription", "prepared", "public_description", "registry"]

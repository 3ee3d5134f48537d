"""Data sets: cards that declare what is public, readers, and the prepared arrays that training maps."""

from data import prepared
from data.card import DataCard, DataRefusedError
from data.description import DatasetInfo, dataset_info

__all__ = ["DataCard", "DataRefusedError", "DatasetInfo", "dataset_info", "prepared"]

"""Parquet: columns with types of their own."""

from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from data.errors import DataRefused
from data.formats import Parquet


def read(path: Path, declared: Parquet) -> pa.Table:
    """The declared columns that the file has; raises DataRefused when it is not a whole Parquet file."""
    try:
        return parquet.ParquetFile(path).read(columns=[column.name for column in declared.columns])
    except (pa.ArrowException, OSError):
        raise DataRefused(f"{path} is not a whole Parquet file; correct it or its card.") from None

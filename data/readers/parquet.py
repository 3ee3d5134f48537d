"""Parquet: columns with types of their own."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from data.errors import DataRefused
from data.formats import Parquet

_ROWS = 65536


def read(path: Path, declared: Parquet) -> Iterator[pa.Table]:
    """The declared columns that the file has, some rows at a time.

    Raises DataRefused when it is not a whole Parquet file.
    """
    try:
        file = parquet.ParquetFile(path)
        yield pa.Table.from_batches(
            [], file.schema_arrow
        )  # so that columns are missed in a file without rows
        for batch in file.iter_batches(_ROWS, columns=list(declared.in_the_file)):
            yield pa.Table.from_batches([batch])
    except (pa.ArrowException, OSError):
        raise DataRefused(f"{path} is not a whole Parquet file; correct it or its card.") from None

"""CSV files for people: whoever opens one in a spreadsheet runs no formula that a name or a record contains."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from algorithms.plain_text import for_csv, from_csv

if TYPE_CHECKING:
    import pandas as pd


def write_csv(frame: "pd.DataFrame", to: Path | IO[str], **settings: Any) -> None:
    """Write a table without its index; numbers stay as they are. settings: further ones of `DataFrame.to_csv`."""
    import pandas as pd

    safe = frame.rename(columns=lambda name: for_csv(str(name)))
    for index, kind in enumerate(frame.dtypes):
        if not pd.api.types.is_numeric_dtype(kind):
            cells = [for_csv(cell) if isinstance(cell, str) else cell for cell in frame.iloc[:, index]]
            safe.isetitem(index, pd.array(cells, dtype="object"))
    safe.to_csv(to, index=False, **settings)


def write_rows(to: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a small table without pandas, whose import takes longer; a cell that is None stays empty."""
    with to.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        for row in (columns, *rows):
            table.writerow([for_csv(cell) if isinstance(cell, str) else cell for cell in row])


def read_csv(path: Path) -> "pd.DataFrame":
    """Read the texts of a table that `write_csv` wrote; numbers are texts, too."""
    import pandas as pd

    return pd.read_csv(path, dtype=str, keep_default_na=False).map(from_csv)

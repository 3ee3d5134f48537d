"""Blocks in a database: their names and rows, by the card's query. No message contains a URL or a value."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import sqlalchemy as sa

from data.schema.errors import DataRefusedError
from data.schema.formats import Query

_ROWS = 65536


def names(source: Query, url: str) -> list[str]:
    """The names of the blocks that have rows, as text. Raises DataRefusedError if the query fails."""
    block = _block(source, sa.text(source.query).columns(sa.column(source.column)).subquery("blocks"))
    with _connected(source, url) as connection:
        found = connection.execute(sa.select(block).distinct())
        return [str(name) for (name,) in found if name is not None]


def read(source: Query, wanted: Sequence[str], name: str, url: str) -> Iterator[pa.Table]:
    """The rows of a block as text, in portions and in an order that depends only on the rows.

    wanted: names of columns. Raises DataRefusedError if the query lacks a column or fails, or if the database treats
    another name as equal to this one, for example if it ignores case.
    """
    query = sa.text(source.query).columns(*(sa.column(column) for column in {*wanted, source.column}))
    rows = query.subquery("blocks")
    columns, block = [rows.c[column] for column in wanted], _block(source, rows)
    statement = sa.select(*columns, block).where(block == name).order_by(*columns)
    with _connected(source, url) as connection:
        for some in connection.execution_options(yield_per=_ROWS).execute(statement).partitions():
            if any(row[-1] != name for row in some):
                raise DataRefusedError(
                    f"the database takes other names for that of the block {name!r}, so a row would be in several"
                    " blocks; let the query spell each name in one way, such as by lower()."
                )
            yield pa.table(
                {column: _texts(row[place] for row in some) for place, column in enumerate(wanted)}
            )


def _block(source: Query, rows: sa.Subquery) -> sa.Cast[str]:
    return sa.cast(rows.c[source.column], sa.String)


def _texts(values: Iterator[Any]) -> pa.Array:
    return pa.array([None if value is None else str(value) for value in values], pa.string())


@contextmanager
def _connected(source: Query, url: str) -> Iterator[sa.Connection]:
    refusal = DataRefusedError(
        f"the query of the blocks cannot be read at the URL in {source.url_from}; correct the URL, the query or"
        " the names of its columns."
    )
    try:
        engine = sa.create_engine(url, poolclass=sa.NullPool)
    except (sa.exc.SQLAlchemyError, ImportError, ValueError):  # an invalid port may be part of a password
        raise refusal from None
    try:
        with engine.connect() as connection:
            yield connection
    except (sa.exc.SQLAlchemyError, ImportError):  # their messages quote the URL, or values
        raise refusal from None

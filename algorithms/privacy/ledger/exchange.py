"""Sends statements to the database with as few round trips as possible.

On PostgreSQL writers wait for each other's turns, and a turn mostly waits for answers. So all queries of a turn are
sent together, and so is what it writes. SQLite runs in this process and gets one statement at a time.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.exc import DBAPIError

Statement = tuple[sa.TextClause, Mapping[str, Any]]


def exchange(connection: Connection, statements: Sequence[Statement]) -> list[Sequence[Any]]:
    """The rows that each statement returns; none for a statement that is not a query.

    On PostgreSQL they are sent as one message, in which statements begin and end transactions; after a failed statement
    the others do nothing. Raises DBAPIError.
    """
    if connection.dialect.name != "postgresql":
        found = (connection.execute(statement, given) for statement, given in statements)
        return [rows.all() if rows.returns_rows else () for rows in found]
    driver: Any = connection.dialect.loaded_dbapi
    try:
        # A cursor that fills in parameters itself: the server takes several statements only without any.
        cursor = driver.ClientCursor(connection.connection.driver_connection)
        texts = [
            cursor.mogrify(_sql(statement, connection.dialect), given) for statement, given in statements
        ]
        cursor.execute(";".join(texts))
        return [cursor.fetchall() if cursor.description else () for _ in cursor.results()]
    except driver.Error as error:
        raise _failure(connection, error) from None


@lru_cache(maxsize=256)
def _sql(statement: sa.TextClause, dialect: Dialect) -> str:
    return str(statement.compile(dialect=dialect))


def _failure(connection: Connection, error: Exception) -> DBAPIError:
    """An error in SQLAlchemy's form; a lost connection is not returned to the pool."""
    dialect = connection.dialect
    is_lost = dialect.is_disconnect(error, connection.connection, None)  # type: ignore[arg-type]
    failure = DBAPIError.instance(
        None, None, error, dialect.loaded_dbapi.Error, connection_invalidated=is_lost, dialect=dialect
    )
    if is_lost:
        connection.invalidate(error)
    assert isinstance(failure, DBAPIError)
    return failure

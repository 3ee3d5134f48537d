"""What an owner does with a whole ledger: copies of its rows, and roles in PostgreSQL, enforced by the database.

There are three roles, named after the database. `<database>_owner` registers populations, sets caps, retires,
overrules, and may do what a runner does. `<database>_runner` reserves, settles and forfeits its own runs, and registers
a block at its population's cap. `<database>_auditor` reads. Nobody can change or remove a row of the chain: no role has
that right, and a trigger refuses it to everybody else. Each row names the database user who wrote it. The balances next
to the chain are written by whoever appends to it; `Ledger.verify` derives them again.

On SQLite the file's permissions decide: whoever can write the file can do everything.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from algorithms.errors import RefusedError
from algorithms.privacy.ledger.ledger import Ledger
from algorithms.privacy.ledger.rows import Entry, follow
from algorithms.privacy.ledger.store import Store, open_store

Role = Literal["owner", "runner", "auditor"]

_TABLES = ("ledger", "ledger_version", "head", "population", "account", "run", "held")
# {schema} and the roles are quoted names. A function has a fixed search path, so that no table of a caller's own, made
# in a schema that he may write to, comes between.
_FUNCTIONS = (
    """CREATE OR REPLACE FUNCTION {schema}.epsilonflow_is_own(run text) RETURNS boolean
       LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
       AS $$ SELECT EXISTS (SELECT 1 FROM {schema}.epsilonflow_ledger
             WHERE run_id = run AND kind = 'reserve' AND written_by = session_user::text) $$""",
    """CREATE OR REPLACE FUNCTION {schema}.epsilonflow_is_new_block(name text, part text, e float8, d float8)
       RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
       AS $$ SELECT EXISTS (SELECT 1 FROM {schema}.epsilonflow_account
             WHERE population = name AND block = 'all' AND epsilon = e AND delta = d)
         AND NOT EXISTS (SELECT 1 FROM {schema}.epsilonflow_account WHERE population = name AND block = part) $$""",
    "ALTER FUNCTION {schema}.epsilonflow_ledger_refuse() SET search_path = pg_catalog, pg_temp",
    "REVOKE ALL ON FUNCTION {schema}.epsilonflow_is_own(text) FROM PUBLIC",
    "REVOKE ALL ON FUNCTION {schema}.epsilonflow_is_new_block(text, text, float8, float8) FROM PUBLIC",
    "GRANT EXECUTE ON FUNCTION {schema}.epsilonflow_is_own(text) TO {runner}",
    "GRANT EXECUTE ON FUNCTION {schema}.epsilonflow_is_new_block(text, text, float8, float8) TO {runner}",
)
_GRANTS = (
    "REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC",
    "GRANT USAGE ON SCHEMA {schema} TO {owner}, {runner}, {auditor}",
    *(
        f"REVOKE ALL ON {{schema}}.epsilonflow_{name} FROM PUBLIC, {{owner}}, {{runner}}, {{auditor}}"
        for name in _TABLES
    ),
    *(
        f"GRANT SELECT ON {{schema}}.epsilonflow_{name} TO {{owner}}, {{runner}}, {{auditor}}"
        for name in _TABLES
    ),
    "GRANT INSERT ON {schema}.epsilonflow_ledger, {schema}.epsilonflow_held TO {owner}, {runner}",
    "GRANT INSERT, UPDATE ON {schema}.epsilonflow_run TO {owner}, {runner}",
    "GRANT UPDATE ON {schema}.epsilonflow_head TO {owner}, {runner}",
    "GRANT INSERT, UPDATE ON {schema}.epsilonflow_population, {schema}.epsilonflow_account TO {owner}",
    "GRANT UPDATE (adjacency) ON {schema}.epsilonflow_population TO {runner}",
    "GRANT INSERT ON {schema}.epsilonflow_account TO {runner}",
    "GRANT UPDATE (charges, open, settled, forfeited) ON {schema}.epsilonflow_account TO {runner}",
)
_OWN_ROWS = "written_by = session_user::text"
_POLICIES: Mapping[str, Mapping[str, str]] = {
    "ledger": {
        "read": "FOR SELECT TO {owner}, {runner}, {auditor} USING (true)",
        "owner": f"FOR INSERT TO {{owner}} WITH CHECK ({_OWN_ROWS})",
        "runner": f"""FOR INSERT TO {{runner}} WITH CHECK ({_OWN_ROWS} AND (
            kind = 'reserve'
            OR (kind IN ('settle', 'forfeit') AND {{schema}}.epsilonflow_is_own(run_id))
            OR (kind = 'cap' AND about = '{{{{"declared":true}}}}'
                AND {{schema}}.epsilonflow_is_new_block(population, block, epsilon, delta))))""",
    },
    "account": {
        "read": "FOR SELECT TO {owner}, {runner}, {auditor} USING (true)",
        "owner": "TO {owner} USING (true) WITH CHECK (true)",
        "open": """FOR INSERT TO {runner} WITH CHECK (retired = 0
            AND {schema}.epsilonflow_is_new_block(population, block, epsilon, delta))""",
        "charge": "FOR UPDATE TO {runner} USING (true) WITH CHECK (true)",
    },
    "run": {
        "read": "FOR SELECT TO {owner}, {runner}, {auditor} USING (true)",
        "owner": "TO {owner} USING (true) WITH CHECK (true)",
        "reserve": "FOR INSERT TO {runner} WITH CHECK ({schema}.epsilonflow_is_own(run_id))",
        "end": "FOR UPDATE TO {runner} USING ({schema}.epsilonflow_is_own(run_id)) WITH CHECK (true)",
    },
}


def init(url: str, members: Mapping[Role, Sequence[str]] | None = None) -> tuple[str, ...]:
    """Create a ledger with its roles, or add the roles to an existing one.

    It can be repeated, and takes no role from anybody.

    Args:
        url: Of the ledger, with a user who may create tables and roles.
        members: Database users who get a role, by role.

    Returns:
        The names of the roles; none on SQLite.

    Raises:
        RefusedError: If the URL's user may not create roles, and for an unknown member.
    """
    store = open_store(url)
    if store.database.engine.dialect.name != "postgresql":
        return ()
    return store.administrate(lambda connection: _create_roles(connection, store, members or {}))


def _create_roles(
    connection: Connection, store: Store, members: Mapping[Role, Sequence[str]]
) -> tuple[str, ...]:
    quote = connection.dialect.identifier_preparer.quote_identifier
    database = connection.exec_driver_sql("SELECT current_database()").scalar_one()
    schema = quote(str(connection.exec_driver_sql("SELECT current_schema()").scalar_one()))
    names = {role: f"{database}_{role}" for role in get_args(Role)}
    quoted = {role: quote(name) for role, name in names.items()}
    there_are = set(connection.execute(sa.text("SELECT rolname FROM pg_catalog.pg_roles")).scalars())
    missing = [user for users in members.values() for user in users if user not in there_are]
    if missing:
        raise RefusedError(
            f"the database of the ledger {store.database.name} has no user {missing[0]!r}; create it there first, by"
            " CREATE ROLE ... LOGIN, with a password that only that user knows."
        )
    # Roles belong to the whole server, so their names have that of the database.
    for role, name in names.items():
        if name not in there_are:
            connection.exec_driver_sql(f"CREATE ROLE {quoted[role]} NOLOGIN")
    # Dropped first, since there is no CREATE POLICY IF NOT EXISTS, and an older version's may differ.
    policies = [
        statement
        for table, rules in _POLICIES.items()
        for statement in (
            f"ALTER TABLE {{schema}}.epsilonflow_{table} ENABLE ROW LEVEL SECURITY",
            *(
                part
                for name, rule in rules.items()
                for part in (
                    f"DROP POLICY IF EXISTS epsilonflow_{name} ON {{schema}}.epsilonflow_{table}",
                    f"CREATE POLICY epsilonflow_{name} ON {{schema}}.epsilonflow_{table} {rule}",
                )
            ),
        )
    ]
    for statement in (*_GRANTS, *_FUNCTIONS, *policies):
        connection.exec_driver_sql(statement.format(schema=schema, **quoted))
    for role, users in members.items():
        for user in users:
            connection.exec_driver_sql(f"GRANT {quoted[role]} TO {quote(user)}")
    return tuple(names.values())


def export(ledger: Ledger, path: Path) -> int:
    """Write every row as a line of JSON into a new file that only its owner can read.

    The copy is a snapshot, and the ledger can be used meanwhile.

    Args:
        ledger: The one to copy.
        path: Of the new file.

    Returns:
        The number of rows.

    Raises:
        RefusedError: If the file exists or cannot be written.
    """

    def write(rows: Iterator[Entry]) -> int:
        written = 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row._asdict()) + "\n")
                written += 1
            file.flush()
            os.fsync(file.fileno())
        return written

    try:
        return ledger.rows(write)
    except OSError as error:
        raise RefusedError(
            f"the copy {path} cannot be written ({error.strerror}); choose a new file."
        ) from None


def restore(path: Path, url: str) -> int:
    """Write the rows of a copy into the ledger at a URL, which must be empty.

    Args:
        path: Of the file that `export` wrote.
        url: Of the ledger, which is made if it is not there.

    Returns:
        The number of rows.

    Raises:
        LedgerBrokenError: If the copy's chain is broken.
        RefusedError: If the file is not a copy of a ledger, or the ledger has rows.
    """
    for _ in follow(_read_rows(path), name=str(path)):  # before a ledger is made
        pass
    return open_store(url).fill(lambda: follow(_read_rows(path), name=str(path)))


def _read_rows(path: Path) -> Iterator[Entry]:
    """The rows of a copy, not verified; raises RefusedError if the file is not a copy."""
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                yield Entry(**json.loads(line))
    except OSError as error:
        raise RefusedError(
            f"the copy {path} cannot be read ({error.strerror}); give the file of an export."
        ) from None
    except (ValueError, TypeError):
        raise RefusedError(f"{path} is no copy of a ledger; give the file of an export.") from None

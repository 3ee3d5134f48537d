"""The rows: one append-only table."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None

_NEVER = "the rows of the ledger are never changed or removed"
_SQLITE = {
    "no_update": "UPDATE ON epsilonflow_ledger",
    "no_delete": "DELETE ON epsilonflow_ledger",
    "no_replace": "INSERT ON epsilonflow_ledger WHEN NEW.seq <= (SELECT max(seq) FROM epsilonflow_ledger)",
}
_POSTGRESQL = (
    f"""CREATE OR REPLACE FUNCTION epsilonflow_ledger_refuse() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN RAISE EXCEPTION '{_NEVER}'; END $$""",
    """CREATE TRIGGER epsilonflow_ledger_append_only BEFORE UPDATE OR DELETE OR TRUNCATE
        ON epsilonflow_ledger FOR EACH STATEMENT EXECUTE FUNCTION epsilonflow_ledger_refuse()""",
)


def upgrade() -> None:
    """Makes the table and its triggers."""
    op.create_table(
        "epsilonflow_ledger",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column(
            "kind",
            sa.Text,
            sa.CheckConstraint("kind IN ('population', 'cap', 'reserve', 'settle', 'forfeit')"),
            nullable=False,
        ),
        sa.Column("population", sa.Text, nullable=False),
        sa.Column("block", sa.Text, nullable=False),
        sa.Column("run_id", sa.Text),
        sa.Column("epsilon", sa.Double),
        sa.Column("delta", sa.Double, nullable=False),
        sa.Column("events", sa.Text, nullable=False),
        sa.Column("about", sa.Text, nullable=False),
        sa.Column("written_at", sa.Text, nullable=False),
        sa.Column("previous_hash", sa.Text, nullable=False, unique=True),
        sa.Column("hash", sa.Text, nullable=False, unique=True),
        sa.UniqueConstraint("run_id", "kind", "block"),
        sa.CheckConstraint("(run_id IS NULL) = (kind IN ('population', 'cap'))"),
    )
    if op.get_bind().dialect.name == "sqlite":
        for name, when in _SQLITE.items():
            op.execute(
                f"CREATE TRIGGER epsilonflow_ledger_{name} BEFORE {when} BEGIN SELECT RAISE(ABORT, '{_NEVER}'); END"
            )
        return
    for statement in _POSTGRESQL:
        op.execute(statement)

"""The rows, one append-only table, and the balances, which follow from them and make a reservation take as long at any
age."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", None

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
    """Makes the tables and the triggers."""
    _make_rows()
    _make_balances()


def _make_rows() -> None:
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
        sa.Column("written_by", sa.Text, nullable=False),
        sa.UniqueConstraint("run_id", "kind", "block"),
        sa.CheckConstraint("(run_id IS NULL) = (kind IN ('population', 'cap'))"),
    )
    op.create_index("epsilonflow_ledger_population", "epsilonflow_ledger", ["population", "seq"])
    if op.get_bind().dialect.name == "sqlite":
        for name, when in _SQLITE.items():
            op.execute(
                f"CREATE TRIGGER epsilonflow_ledger_{name} BEFORE {when} BEGIN SELECT RAISE(ABORT, '{_NEVER}'); END"
            )
    else:
        for statement in _POSTGRESQL:
            op.execute(statement)


def _make_balances() -> None:
    op.create_table(
        "epsilonflow_head",
        sa.Column("one", sa.Integer, sa.CheckConstraint("one = 1"), primary_key=True, autoincrement=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("hash", sa.Text, nullable=False),
    )
    op.execute(f"INSERT INTO epsilonflow_head (one, seq, hash) VALUES (1, 0, '{'0' * 64}')")
    op.create_table(
        "epsilonflow_population",
        sa.Column("population", sa.Text, primary_key=True),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("terms", sa.Text, nullable=False),
        sa.Column("allowed", sa.Text, nullable=False),
        sa.Column("adjacency", sa.Text),
    )
    op.create_table(
        "epsilonflow_account",
        sa.Column("population", sa.Text, primary_key=True),
        sa.Column("block", sa.Text, primary_key=True),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("epsilon", sa.Double, nullable=False),
        sa.Column("delta", sa.Double, nullable=False),
        sa.Column("retired", sa.Integer, nullable=False),
        sa.Column("charges", sa.Integer, nullable=False),
        *(sa.Column(status, sa.Text, nullable=False) for status in ("open", "settled", "forfeited")),
    )
    op.create_table(
        "epsilonflow_run",
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("population", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("retraining", sa.Text),
        sa.Column("run", sa.Text, nullable=False),
    )
    op.create_index("epsilonflow_run_retraining", "epsilonflow_run", ["population", "retraining"])
    is_open = sa.text("status = 'open'")
    op.create_index(
        "epsilonflow_run_open",
        "epsilonflow_run",
        ["population", "run_id"],
        sqlite_where=is_open,
        postgresql_where=is_open,
    )
    op.create_table(
        "epsilonflow_held",
        *(sa.Column(name, sa.Text, primary_key=True) for name in ("population", "block", "digest")),
    )

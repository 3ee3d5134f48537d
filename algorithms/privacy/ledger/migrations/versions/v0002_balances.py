"""Who wrote a row, and the balances, which follow from the rows and make a reservation take as long at any age."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    """Adds a column and the tables of `balances`, which the next opening fills from the rows."""
    op.add_column("epsilonflow_ledger", sa.Column("written_by", sa.Text))
    op.create_index("epsilonflow_ledger_population", "epsilonflow_ledger", ["population", "seq"])
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

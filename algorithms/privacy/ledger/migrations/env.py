"""Run by Alembic: the ledger's changes, one file in `versions` each for both databases, in their order.

They happen in the transaction that `store` opened, and that it ends, so there is no alembic.ini. A change that was
released is never edited.
"""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table=context.config.attributes["version_table"],
)
with context.begin_transaction():
    context.run_migrations()

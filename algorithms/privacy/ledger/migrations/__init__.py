"""How the ledger's tables became what they are, by Alembic: one file in `versions` for each change, for both databases.

A ledger is brought up to date in the transaction that opens it; `store` runs this, so there is no alembic.ini.
"""

"""The privacy card: its schema, how it is built from a run, how it is verified, and its sentences.

May import the ledger's and the accounting's values.
"""

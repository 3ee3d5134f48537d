"""Algorithms that train under differential privacy, by name in `algorithms.catalogue`.

Nothing is imported here: the ledger's commands need neither torch nor the algorithms.
"""

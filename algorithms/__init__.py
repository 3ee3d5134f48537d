"""Algorithms that train under differential privacy, by name in `algorithms.catalogue`.

Nothing of ours is imported here: the ledger's commands need neither torch nor the algorithms. A run that is taken up is
to end bit for bit the same, so MKL must not choose its kernels by where an array lies in memory, as it does on some
processors unless it was told so before its first product.
"""

import os

os.environ.setdefault("MKL_CBWR", "AUTO")

"""The steps of the pipeline: one plain function and one file per step, run as `python -P -m tasks.STEP`."""

import atexit
import gc
import os

from epsilonflow import find_shadowing

# PyTorch's threads sleep until the next operation, instead of keeping cores from others. Read when PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Pydantic looks for plugins in the metadata of all packages that are installed.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

# Objects made by imports stay alive. Looking for garbage among them takes a third of the time of all imports: after
# every 700 of them, and once more when the process ends.
COLLECTION_THRESHOLDS = gc.get_threshold()
"""Python's own, to which a stage returns for its work, whose garbage may hold large arrays."""
gc.set_threshold(50_000, 20, 50)
atexit.register(gc.freeze)

if (_shadowing := find_shadowing("algorithms", "data")) is not None:
    raise ImportError(_shadowing)

"""The flows that a project deploys to Prefect, as entrypoints.

Prefect puts the current folder first on Python's path while it imports an entrypoint. Here it becomes the last, so that
a module of the user's own, such as `algorithms.py` or `flows.py`, is in nobody's way.
"""

import sys
from pathlib import Path

_here = str(Path.cwd())
if _here in sys.path:
    sys.path[:] = [*(folder for folder in sys.path if folder != _here), _here]

from flows.compare import tune  # noqa: E402
from flows.deployed import pipeline, report  # noqa: E402
from flows.scheduled import audit, retrain, verify  # noqa: E402

__all__ = ["audit", "pipeline", "report", "retrain", "tune", "verify"]

"""The flows that a project deploys to Prefect, as entrypoints.

Prefect puts the current folder first on Python's path while it imports an entrypoint, and on PYTHONPATH. Here it
becomes the last, and stages that a flow starts do not get it, so that a module of the user's own, such as
`algorithms.py` or `flows.py`, is in nobody's way.
"""

import os
import sys
from pathlib import Path

_here = Path.cwd()
if _here != Path(__file__).resolve().parents[1]:  # but for a checkout of this project itself
    if str(_here) in sys.path:
        sys.path[:] = [*(folder for folder in sys.path if folder != str(_here)), str(_here)]
    _others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(folder for folder in _others if folder != str(_here))

from flows.deployed import pipeline, report  # noqa: E402
from flows.scheduled import audit, retrain, verify  # noqa: E402
from flows.tune import tune  # noqa: E402

__all__ = ["audit", "pipeline", "report", "retrain", "tune", "verify"]

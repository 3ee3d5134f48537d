"""A training that was done already is not done again by accident: on private records it would spend a second time.

DVC has the result of a run that it did; training again with the very same inputs is `dvc repro -f`, or a lost cache.
"""

import sys
from pathlib import Path

from algorithms.privacy.errors import Refused
from tasks.environment import SPEND_AGAIN, may_spend_again
from tasks.runs import DONE, has_unfinished


def ask(home: Path, inputs: str, *, cost: str) -> None:
    """Asks the person at the terminal before a private run is done a second time; returns where that was agreed to.

    home: where runs are kept. inputs: the digest of the run. cost: in words. Does nothing for a new run, nor for
    one that was interrupted, which is taken up for free. Raises Refused where nobody agrees.
    """
    marker = home / DONE / inputs
    if not marker.is_file() or has_unfinished(home, inputs) or may_spend_again():
        return
    run_id = marker.read_text(encoding="utf-8").strip()
    if _agrees(f"run {run_id} did just this; training again spends {cost} again. Spend it? [y/N] "):
        return
    raise Refused(
        f"run {run_id} did just this, and training again would spend {cost} again; bring its result back by `dvc"
        f" checkout`, or set {SPEND_AGAIN}=yes."
    )


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        return False
    sys.stderr.write(question)
    sys.stderr.flush()
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except OSError:  # a terminal of another session
        return False

"""A training that was done already is not done again by accident: on private records it would spend a second time.

DVC has the result of a run that it did, and the home has that of every finished one; training again with the very same
inputs is `dvc repro -f`, or a lost cache.
"""

import json
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from algorithms.errors import RefusedError
from algorithms.privacy.ledger import Ledger
from tasks.config.environment import SPEND_AGAIN, may_spend_again
from tasks.runs.folder import DONE, hand_out, unfinished
from tasks.runs.result_store import kept

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """A training that is asked for.

    inputs: its digest. said: what its receipt says of the data, as they are described now. cost: in words. retraining:
    for which it is, or None.
    """

    inputs: str
    said: Mapping[str, str]
    cost: str
    retraining: str | None = None


def brought_back(asked: Asked, artifacts: Path, names: Iterable[str], ledger: Ledger, home: Path) -> bool:
    """Whether the result of a finished run that did just this is in `artifacts` now, for nothing.

    names: of the result's files. home: where runs are kept. False for a new run, for one that was interrupted, which
    is taken up, and for one that a person agreed to do again. Raises RefusedError where nobody agrees and the result
    was
    not kept, is not whole any more, or is not of the retraining that is asked for.
    """
    marker, cost = home / DONE / asked.inputs, asked.cost
    begun = [run for run in unfinished(home, asked.inputs) if ledger.status(run) != "forfeited"]
    if not marker.is_file() or begun or may_spend_again():
        return False
    run_id = marker.read_text(encoding="utf-8").strip()
    if agrees(f"run {run_id} did just this; training again spends {cost} again. Spend it? [y/N] "):
        return False
    found = kept(home, run_id)
    if found is None or not _is_for(asked, run_id, ledger):
        raise RefusedError(
            f"run {run_id} did just this, and training again would spend {cost} again; bring its result back by `dvc"
            f" checkout`, or set {SPEND_AGAIN}=yes."
        )
    hand_out(found, artifacts, names, said=asked.said)
    _LOG.info("run %s did just this: its result is brought back, and nothing is spent.", run_id)
    return True


def _is_for(asked: Asked, run_id: str, ledger: Ledger) -> bool:
    """Whether a run was charged for the retraining that asks for it; without one any run will do."""
    rows = ledger.history(asked.said["population"]) if asked.retraining else []
    of_run = [json.loads(row.about) for row in rows if (row.kind, row.run_id) == ("reserve", run_id)]
    return asked.retraining is None or any(of.get("retraining") == asked.retraining for of in of_run)


def agrees(question: str) -> bool:
    """Whether a person at this terminal says yes; False where there is none."""
    if not sys.stdin.isatty():
        return False
    sys.stderr.write(question)
    sys.stderr.flush()
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except OSError:  # a terminal of another session
        return False

"""Which software trained a run: it alone resumes the run, and no result is handed out without a word about it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.core.software import DIGEST_NOTE, SOFTWARE_NOTE, Software, software_here
from algorithms.errors import RefusedError
from algorithms.privacy.documents import Receipt
from data import DatasetInfo
from tasks.config import SPEND_AGAIN
from tasks.runs.store import RECEIPT, RunAttempt

if TYPE_CHECKING:  # it imports SQLAlchemy
    from algorithms.privacy.ledger import Ledger

_DECIDING_FILES = (
    *("data/prepared.py", "data/readers/records.py", "data/targets.py"),
    *(
        "tasks/calibrate.py",
        "tasks/model_building.py",
        "tasks/model_file.py",
        "tasks/planned_model.py",
        "tasks/prediction_passes.py",
        "tasks/evaluation_counts.py",
        "tasks/train.py",
        "tasks/tuning",
    ),
)
"""What of the pipeline decides a result: how records are read, a model is built and trained, a search, and how private
held-out records are counted."""


def pipeline_software() -> Software:
    """The software of this process, as far as it decides the result of a training or a search."""
    return software_here(_DECIDING_FILES)


def check_resumes(run: RunAttempt, ledger: "Ledger", population: str, today: Software) -> None:
    """Raise RefusedError for a run that is charged, and so may have drawn noise, and was begun by other software.

    Also for one whose software was not recorded, in its folder or in its reservation.
    """
    status = run.ledger_status
    if status is None:
        return
    rows = [row for row in ledger.history(population) if (row.kind, row.run_id) == ("reserve", run.run_id)]
    for notes in (run.notes, *(json.loads(row.about) for row in rows[:1])):
        if notes.get(DIGEST_NOTE) != today.digest:
            begun_by = notes.get(SOFTWARE_NOTE, "software that was not recorded")
            give_up = f"give it up by `epsilonflow ledger forfeit {run.run_id}`, which counts as spent"
            if status == "settled":  # killed between its settlement and its result
                give_up = f"give it up by deleting {run.folder}; it stays spent"
            raise RefusedError(
                "run {run_id} was begun by {begun_by} and is not finished, and this is {today}, which could"
                " compute something else under the same noise; resume it with the software that began it, or"
                " {give_up}.",
                code="other_software",
                run_id=run.run_id,
                begun_by=begun_by,
                today=today,
                give_up=give_up,
            )


def reuse_note(receipt: Receipt, *, is_public: bool) -> str | None:
    """Which other software trained an existing result, and how to train again for which price; None if this did."""
    today, trained_by = pipeline_software(), Software.from_facts(receipt.software)
    if trained_by.digest == today.digest:
        return None
    price = "spends again" if receipt.cost is None else f"spends epsilon {receipt.cost:g} again"
    if is_public:
        price = "spends nothing, since the records are public"
    return (
        f"it was trained by {trained_by}, and this is {today}; to train again, which {price}, set {SPEND_AGAIN}=yes and"
        " run the same command"
    )


def reuse_note_of(root: Path) -> str | None:
    """The note for the result in the checkout at `root`; None if there is none, or nothing to say."""
    try:
        receipt = Receipt.read(root / "artifacts" / RECEIPT)
        info = DatasetInfo.read(root / "datasets" / "prepared")
        return reuse_note(receipt, is_public=info.is_public)
    except (OSError, ValueError):
        return None  # the stages say what is wrong

"""What a stage's process does around its main function: a refusal is one sentence on stderr and exit status 2.

Its code and fields go into a file, for the process that started the stage.

What it writes is for its owner only, and so are the records that it finds.
"""

import errno
import gc
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from algorithms.plain_text import for_terminal
from tasks import COLLECTION_THRESHOLDS
from tasks.refusals import PIPELINE
from tasks.runs.checkout import append_checkout_to_path
from tasks.runs.dvc_stages import REFUSAL, REFUSED


def main_of(function: Callable[[], object]) -> None:
    """Run a stage's main function; a refusal or a shortage becomes one sentence on stderr and exit status 2.

    What it writes is for its owner only, and so are the records that it finds.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PlainFormatter())
    logging.basicConfig(handlers=[handler])  # of libraries only warnings
    for ours in ("__main__", "algorithms", "data", "tasks"):
        logging.getLogger(ours).setLevel(logging.INFO)
    append_checkout_to_path(Path.cwd())
    gc.freeze()  # of what the imports made there is no garbage to look for
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    try:
        with for_the_owner_only(), PIPELINE.wording_errors():
            hide_records(Path(), Path(".dvc/cache"))
            function()
            hide_records(Path(), Path(".dvc/cache"))
    except Exception as error:
        words = str(error) if isinstance(error, refusals()) else shortage(error)
        if words is None:
            raise
        sentence = for_terminal(" ".join(words.split()))
        sys.stderr.write(f"{REFUSED}{sentence}\n")
        _note_refusal(sentence, error)
        raise SystemExit(2) from None


def _note_refusal(sentence: str, error: Exception) -> None:
    """Write a refusal's code and fields into the file for the process that started this one, if this is a checkout."""
    from data.files import write_text

    if not REFUSAL.parent.is_dir():
        return
    refusal = {
        "sentence": sentence,
        "code": getattr(error, "code", ""),
        "fields": getattr(error, "fields", {}),
    }
    with suppress(OSError):  # as where the disk is full, which the sentence says
        write_text(REFUSAL, json.dumps(refusal, default=str), mode=0o600)


class _PlainFormatter(logging.Formatter):
    """Formats a line of the log, and a traceback if it has one, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return for_terminal(super().format(record))


@contextmanager
def for_the_owner_only() -> Iterator[None]:
    """Within the block, this process and those that it starts write files that only their owner can read."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def hide_records(root: Path, cache: Path) -> None:
    """Make private records in the checkout at `root` accessible to their owner only: raw, prepared and in DVC's cache.

    DVC gives what it brings back the modes of its umask. cache: DVC's. Another user's folder stays as it is.
    """
    from data.card import DataRefusedError
    from data.description import DatasetInfo
    from data.files import hide

    prepared, datasets = root / "datasets" / "prepared", root / "datasets"
    try:
        is_public = DatasetInfo.read(prepared).is_public
    except DataRefusedError:
        return  # nothing is prepared
    if is_public:
        return
    with suppress(FileNotFoundError, PermissionError):
        cache.mkdir(mode=0o700, exist_ok=True)  # before DVC makes it
        hide(prepared)
        for folder in (datasets / "raw", datasets, root / ".dvc" / "tmp", cache):
            if folder.exists():
                folder.chmod(0o700)


def shortage(error: Exception) -> str | None:
    """The message for a full disk, too little memory or too many open files, raised by any library; None otherwise."""
    if isinstance(error, MemoryError):
        return (
            "memory did not suffice; free some, or run where there is more, then rerun the command to resume."
        )
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        return "too many files are open; close some, or raise the limit (ulimit -n), then rerun the command to resume."
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if not is_full and os.strerror(errno.ENOSPC) not in str(error):
        return None
    return (
        f"the disk is full; make room where the checkout {Path.cwd()}, the home of its runs and temporary files lie,"
        " then rerun the command to resume."
    )


def refusals() -> tuple[type[Exception], ...]:
    """The exceptions that are shown without a traceback: refusals, and a search that was charged and drew no trial."""
    from algorithms.errors import EmptySearchError, RefusedError
    from data.card import DataRefusedError

    return DataRefusedError, EmptySearchError, RefusedError

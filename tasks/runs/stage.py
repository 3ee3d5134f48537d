"""A stage as a process of its own, in a checkout: what it refuses is one sentence on stderr and exit status 2."""

import errno
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tasks.config.params import ParamsRefusedError

REFUSED = "refused: "
"""How the sentence of a refusal begins, for whoever reads what a stage wrote."""


def main_of(function: Callable[[], object]) -> None:
    """Run a stage's main function; what it refuses, or a full disk, becomes a sentence on stderr and exit status 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        function()
    except Exception as error:
        words = str(error) if isinstance(error, refusals()) else disk_full(error)
        if words is None:
            raise
        sys.stderr.write(f"{REFUSED}{' '.join(words.split())}\n")
        raise SystemExit(2) from None


def disk_full(error: Exception) -> str | None:
    """What to tell a person where an error is that of a full disk, whichever library met it; else None."""
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if not is_full and os.strerror(errno.ENOSPC) not in str(error):
        return None
    return (
        f"the disk is full; make room where the checkout {Path.cwd()}, the home of its runs and temporary files lie,"
        " then start it again: it goes on where it was."
    )


def refusals() -> tuple[type[ValueError], ...]:
    """What a person may be shown without a traceback."""
    from algorithms.errors import EncoderRefusedError, ModelRefusedError, RefusedError
    from algorithms.extension import NotUsable
    from data.schema.errors import DataRefusedError

    return (
        DataRefusedError,
        EncoderRefusedError,
        NotUsable,
        RefusedError,
        ModelRefusedError,
        ParamsRefusedError,
    )


def checkout() -> Path:
    """The checkout this process works in; raises ParamsRefusedError when the current folder is none."""
    root = Path.cwd()
    missing = [name for name in ("params.yaml", "dvc.yaml", ".dvc") if not (root / name).exists()]
    if missing:
        raise ParamsRefusedError(
            f"{root} is no checkout of epsilonflow, it has no {missing[0]}; change to one, or make one by"
            " `epsilonflow init DIR`."
        )
    return root

"""The environment variables of epsilonflow; `algorithms.privacy.ledger.place` reads those of the home and the
ledger.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from algorithms.privacy.ledger.place import LEDGER, expanded, home, ledger_url, sqlite_url
from data.schema.formats import Query, Source

__all__ = [
    "LEDGER",
    "data_mirror",
    "database_url",
    "home",
    "ledger_url",
    "may_spend_again",
    "retraining",
    "retraining_for",
    "sqlite_url",
]

RETRAINING = "EPSILONFLOW_RETRAINING"
SPEND_AGAIN = "EPSILONFLOW_SPEND_AGAIN"
TRAIN_ANYWAY = "EPSILONFLOW_TRAIN_ANYWAY"


def first_checkout(root: Path) -> Path:
    """The checkout that DVC was called in, as an absolute path: DVC_ROOT, else `root`.

    They differ where `root` is the copy in which DVC runs a queued experiment, and which it then deletes.
    """
    return Path(os.environ.get("DVC_ROOT") or root).absolute()


def data_mirror() -> Path | None:
    """The folder that is tried first for data files: EPSILONFLOW_DATA_MIRROR."""
    mirror = os.environ.get("EPSILONFLOW_DATA_MIRROR")
    return expanded("EPSILONFLOW_DATA_MIRROR", mirror).absolute() if mirror else None


def database_url(source: Source | None) -> str | None:
    """The URL of the database that a card's blocks are in, from the variable that the card names; None for files."""
    return os.environ.get(source.url_from) if isinstance(source, Query) else None


def may_spend_again() -> bool:
    """Whether a person agreed beforehand that finished runs on private records are done again."""
    return _says_yes(SPEND_AGAIN)


def may_train_anyway() -> bool:
    """Whether a person agreed to spend on settings that look wrong."""
    return _says_yes(TRAIN_ANYWAY)


def train_anyway() -> None:
    """Note that a person agreed, for this process and those that it starts."""
    os.environ[TRAIN_ANYWAY] = "yes"


def _says_yes(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("y", "yes", "1", "true")


def retraining() -> str | None:
    """The scheduled retraining that this process trains for, its name and its period: EPSILONFLOW_RETRAINING."""
    return os.environ.get(RETRAINING) or None


@contextmanager
def retraining_for(name: str) -> Iterator[None]:
    """What is trained until the end of the block, here and in processes started here, is for this retraining."""
    os.environ[RETRAINING] = name
    try:
        yield
    finally:
        del os.environ[RETRAINING]

"""The configuration of a run: params.yaml as strict models, overrides and recipes, and the environment.

Here are the environment variables, except those of home and ledger (`algorithms.privacy.ledger.location`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from algorithms.privacy.ledger import checked_url, home, ledger_url, sqlite_url
from data.formats import Query, Source

# Of the ledger; what is defined here is public, too.
__all__ = ["checked_url", "home", "ledger_url", "sqlite_url"]

RETRAINING = "EPSILONFLOW_RETRAINING"
SPEND_AGAIN = "EPSILONFLOW_SPEND_AGAIN"
"""Consent to repeat finished runs on private records."""
TRAIN_ANYWAY = "EPSILONFLOW_TRAIN_ANYWAY"
"""Consent to spend on settings that look wrong."""


def first_checkout(root: Path) -> Path:
    """The checkout in which DVC was called, as an absolute path: DVC_ROOT, or else `root`.

    They differ if `root` is the temporary copy in which DVC runs a queued experiment.
    """
    return Path(os.environ.get("DVC_ROOT") or root).absolute()


def data_mirror() -> Path | None:
    """The folder that is tried first for data files: EPSILONFLOW_DATA_MIRROR."""
    mirror = os.environ.get("EPSILONFLOW_DATA_MIRROR")
    return Path(os.path.expanduser(mirror)).absolute() if mirror else None


def database_url(source: Source | None) -> str | None:
    """The URL of the database with a card's blocks, from the variable that the card names; None for files."""
    return os.environ.get(source.url_from) if isinstance(source, Query) else None


def has_consent(variable: str) -> bool:
    """Whether a person agreed beforehand, by SPEND_AGAIN or TRAIN_ANYWAY."""
    return os.environ.get(variable, "").lower() in ("y", "yes", "1", "true")


def retraining() -> str | None:
    """The scheduled retraining for which this process trains, name and period: EPSILONFLOW_RETRAINING."""
    return os.environ.get(RETRAINING) or None


@contextmanager
def retraining_for(name: str) -> Iterator[None]:
    """Within the block, this process and its child processes train for this retraining."""
    os.environ[RETRAINING] = name
    try:
        yield
    finally:
        del os.environ[RETRAINING]

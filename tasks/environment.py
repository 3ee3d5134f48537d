"""The environment variables of epsilonflow; no other file reads them."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from data.sources import Query, Source
from tasks.params import ParamsRefused

LEDGER = "ledger.sqlite"
"""The ledger's file in the home, where no other place is named."""
RETRAINING = "EPSILONFLOW_RETRAINING"
SPEND_AGAIN = "EPSILONFLOW_SPEND_AGAIN"
_RELATIVE_SQLITE = re.compile(r"sqlite(\+\w+)?:///(?!/)")
_SQLITE_FILE = re.compile(r"sqlite(\+\w+)?:///(?P<path>/[^?]*)")


def home() -> Path:
    """The folder of the ledger and of the runs: EPSILONFLOW_HOME, or the user's data folder.

    It lies outside every checkout, so that no version control and no experiment can restore an old budget, and no copy
    has one of its own; raises ParamsRefused for a relative path, for one within a checkout and for one that no folder
    can have here.
    """
    named = os.environ.get("EPSILONFLOW_HOME") or platformdirs.user_data_dir("epsilonflow")
    folder = _expanded("EPSILONFLOW_HOME", named)
    if not folder.is_absolute():
        raise ParamsRefused(f"EPSILONFLOW_HOME is {folder}, a relative path; write the path from the root.")
    _check_outside("EPSILONFLOW_HOME", folder)
    _check_usable("EPSILONFLOW_HOME", folder)
    return folder


def ledger_url(configured: str | None) -> str:
    """Where the ledger is: EPSILONFLOW_LEDGER_URL, else `configured`, else ledger.sqlite in `home()`.

    Raises ParamsRefused for an SQLite file by a relative path or in a checkout: every copy would have its own budget.
    """
    url = os.environ.get("EPSILONFLOW_LEDGER_URL") or configured or sqlite_url(home() / LEDGER)
    if _RELATIVE_SQLITE.match(url):
        raise ParamsRefused(
            f"the ledger {url} is a relative path; write sqlite:/// and then the path from the root."
        )
    if file := _SQLITE_FILE.match(url):
        _check_outside(f"the ledger {url}", Path(file["path"]))
    return url


def sqlite_url(file: Path) -> str:
    """The URL of an SQLite ledger; raises ParamsRefused for a path that no such URL can hold."""
    if "?" in str(file):
        raise ParamsRefused(
            f"the ledger {file} cannot be named by a URL, which would end at the question mark; set EPSILONFLOW_HOME to"
            " a folder without one."
        )
    return f"sqlite:///{file}"


def _expanded(variable: str, path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ParamsRefused(
            f"{variable} is {path}, of an unknown user; write the path from the root."
        ) from None


def _check_usable(variable: str, folder: Path) -> None:
    """Whether a folder is there, or can be made where the first one above it is."""
    try:
        there_is = next(place for place in (folder, *folder.parents) if place.exists())
        is_usable = there_is.is_dir() and os.access(there_is, os.W_OK | os.X_OK)
    except OSError:
        is_usable = False
    if not is_usable:
        raise ParamsRefused(
            f"{variable} is {folder}, which is no folder that you may write to and cannot be made one; name another."
        )


def _check_outside(what: str, path: Path) -> None:
    """Of where the path leads, whatever links and dots are in it."""
    place = path.resolve()
    for folder in (place, *place.parents):
        if (folder / ".dvc").is_dir():
            raise ParamsRefused(
                f"{what} lies in the checkout {folder}, each copy of which would have a budget of its own; name a place"
                " outside of it."
            )


def data_mirror() -> Path | None:
    """The folder that is tried first for data files: EPSILONFLOW_DATA_MIRROR."""
    mirror = os.environ.get("EPSILONFLOW_DATA_MIRROR")
    return _expanded("EPSILONFLOW_DATA_MIRROR", mirror).absolute() if mirror else None


def database_url(source: Source | None) -> str | None:
    """The URL of the database that a card's blocks are in, from the variable that the card names; None for files."""
    return os.environ.get(source.url_from) if isinstance(source, Query) else None


def may_spend_again() -> bool:
    """Whether a person agreed beforehand that finished runs on private records are done again."""
    return os.environ.get(SPEND_AGAIN, "").lower() in ("y", "yes", "1", "true")


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

"""Where the ledger and the runs are stored: outside of every checkout, so that no copy has its own budget."""

import getpass
import os
import re
from pathlib import Path

import platformdirs

from algorithms.errors import RefusedError

LEDGER = "ledger.sqlite"
"""The ledger's default file in the home."""
_URL = re.compile(r"\w+(\+\w+)?://")
_RELATIVE_SQLITE = re.compile(r"sqlite(\+\w+)?:///(?!/)")
_SQLITE_FILE = re.compile(r"sqlite(\+\w+)?:///(?P<path>/[^?]*)")


def home() -> Path:
    """The folder of the ledger and of the runs: EPSILONFLOW_HOME, or the user's data folder.

    It is outside of every checkout, so that neither version control nor an experiment can restore an old budget, and no
    copy has its own. Raises RefusedError for a relative path, for one within a checkout, and for one where no folder
    can be created.
    """
    named = os.environ.get("EPSILONFLOW_HOME") or platformdirs.user_data_dir("epsilonflow")
    folder = expanded("EPSILONFLOW_HOME", named)
    if not folder.is_absolute():
        raise RefusedError(f"EPSILONFLOW_HOME is {folder}, a relative path; write the path from the root.")
    _check_outside("EPSILONFLOW_HOME", folder)
    _check_usable("EPSILONFLOW_HOME", folder)
    return folder


def ledger_url(configured: str | None) -> str:
    """Where the ledger is: EPSILONFLOW_LEDGER_URL, else `configured`, else ledger.sqlite in `home()`.

    Raises RefusedError for a URL that `checked_url` refuses.
    """
    return checked_url(os.environ.get("EPSILONFLOW_LEDGER_URL") or configured or sqlite_url(home() / LEDGER))


def checked_url(url: str) -> str:
    """The URL of a ledger, unchanged.

    Raises RefusedError for what is no URL, and for an SQLite file with a relative path or in a checkout, each copy of
    which would have its own budget.
    """
    if not _URL.match(url):
        raise RefusedError(
            f"the ledger {url!r} is no URL; write sqlite:///PATH or postgresql+psycopg://USER@HOST/DATABASE."
        )
    if _RELATIVE_SQLITE.match(url):
        raise RefusedError(
            f"the ledger {url} is a relative path; write sqlite:/// and then the path from the root."
        )
    if file := _SQLITE_FILE.match(url):
        _check_outside(f"the ledger {url}", Path(file["path"]))
    return url


def sqlite_url(file: Path) -> str:
    """The URL of an SQLite ledger; raises RefusedError for a path that such a URL cannot contain."""
    if "?" in str(file):
        raise RefusedError(
            f"the ledger {file} cannot be named by a URL, which would end at the question mark; set EPSILONFLOW_HOME to"
            " a folder without one."
        )
    return f"sqlite:///{file}"


def expanded(variable: str, path: str) -> Path:
    """A path from an environment variable, with ~ expanded; raises RefusedError for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise RefusedError(
            f"{variable} is {path}, of an unknown user; write the path from the root."
        ) from None


def system_user() -> str:
    """The name of the system's user, or the number of one without a name, as containers may have."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _check_usable(variable: str, folder: Path) -> None:
    """Raises RefusedError unless a folder exists, or can be created in its first existing parent."""
    try:
        there_is = next(place for place in (folder, *folder.parents) if place.exists())
        is_usable = there_is.is_dir() and os.access(there_is, os.W_OK | os.X_OK)
    except OSError:
        is_usable = False
    if not is_usable:
        raise RefusedError(
            f"{variable} is {folder}, which is no folder that you may write to and cannot be made one; name another."
        )


def _check_outside(what: str, path: Path) -> None:
    """Raises RefusedError for a path within a checkout, after resolving links and dots."""
    place = Path(os.path.realpath(path))  # which leaves a loop of links to what opens it
    for folder in (place, *place.parents):
        if (folder / ".dvc").is_dir():
            raise RefusedError(
                f"{what} lies in the checkout {folder}, each copy of which would have a budget of its own; name a place"
                " outside of it."
            )

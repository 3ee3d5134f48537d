"""Where the checkout is that a command or a stage works in, and its place on Python's path."""

import sys
from pathlib import Path

from algorithms.errors import RefusedError

PARTS = ("params.yaml", "dvc.yaml", ".dvc")


def find_checkout() -> Path | None:
    """The checkout that the current folder is or lies in, as git and DVC find theirs; None outside of any."""
    current = Path.cwd()
    return next((folder for folder in (current, *current.parents) if not missing_in(folder)), None)


def missing_in(folder: Path) -> list[str]:
    """The parts of a checkout that a folder lacks."""
    return [name for name in PARTS if not (folder / name).exists()]


def require_pulled(file: Path) -> None:
    """Raise RefusedError if the file is missing and dvc.lock names it, so that DVC's cache or remote may have it."""
    root, file = find_checkout(), file.absolute()
    if root is None or file.exists() or not file.is_relative_to(root) or not (root / "dvc.lock").is_file():
        return
    if f"- path: {file.relative_to(root).as_posix()}\n" in (root / "dvc.lock").read_text(encoding="utf-8"):
        raise RefusedError(
            "{path} is not here, but dvc.lock names it: `dvc pull` brings it from the remote that `dvc remote list`"
            " shows, if that can be reached; `epsilonflow run` makes it where the raw data are.",
            code="missing_file",
            path=file,
        )


def append_checkout_to_path(root: Path) -> None:
    """Let code of the user's own be imported from the checkout at `root`, after everything else.

    A module there that has the name of a package of ours, such as `tasks.py`, is then in nobody's way.
    """
    if str(root) not in sys.path:
        sys.path.append(str(root))

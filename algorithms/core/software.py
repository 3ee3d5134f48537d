"""The software of a run: versions of Python and of the packages that decide a result, and the commit of the code."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

PACKAGES = ("dp-accounting", "torch", "numpy", "scipy", "cryptography", "pandas", "scikit-learn")
_STATED_ELSEWHERE = (":!dvc.lock", ":!params.yaml")


def software(root: Path, *, recorded: Literal["training", "report"]) -> dict[str, Any]:
    """Python, packages and commit of the checkout at `root`. recorded: the stage that calls this.

    git is None outside a checkout. dirty: files differ from the commit, except for dvc.lock, which DVC writes during a
    run, and params.yaml, whose content is in the plan.
    """
    commit = _output(root, "rev-parse", "--verify", "HEAD")
    changes = _output(root, "status", "--porcelain", "--", ".", *_STATED_ELSEWHERE)
    git = None if not commit or changes is None else {"commit": commit, "dirty": bool(changes)}
    return {
        "recorded": recorded,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "git": git,
    }


def _output(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

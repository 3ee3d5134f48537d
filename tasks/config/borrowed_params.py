"""params.yaml as one run needs it: afterwards as before, also where the run was killed, and never over a person's edit.

A note beside the checkout's lock holds both texts; who takes the lock returns what a killed run left.
"""

import json
from pathlib import Path

from data.files import read_json, write_text


def borrow_params(root: Path, before: str, after: str) -> None:
    """Write the text `after` into params.yaml of the checkout at `root`, which has `before` until then."""
    _note(root).parent.mkdir(parents=True, exist_ok=True)
    write_text(_note(root), json.dumps({"before": before, "after": after}))
    write_text(root / "params.yaml", after)


def return_params(root: Path) -> None:
    """Write the text from before into params.yaml, unless somebody has changed the file since or nobody borrowed it."""
    if _note(root).is_file():
        texts, path = read_json(_note(root)), root / "params.yaml"
        if path.is_file() and path.read_text(encoding="utf-8") == texts["after"]:
            write_text(path, texts["before"])
        _note(root).unlink()


def _note(root: Path) -> Path:
    return root / ".dvc" / "tmp" / "epsilonflow-params.json"

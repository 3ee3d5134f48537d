"""params.yaml as one run needs it: afterwards as before, also where the run was killed, and never over a person's edit.

A note beside the checkout's lock holds both texts; who takes the lock returns what a killed run left.
"""

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from data.documents import DocumentError, load_yaml
from data.files import read_json, write_text
from tasks.config.params import ParamsRefusedError


def override_params(root: Path, before: str, after: str) -> None:
    """Write the text `after` into params.yaml of the checkout at `root`, which has `before` until then."""
    _note(root).parent.mkdir(parents=True, exist_ok=True)
    write_text(_note(root), json.dumps({"before": before, "after": after}))
    write_text(root / "params.yaml", after)


def restore_params(root: Path) -> None:
    """Undo what `override_params` wrote, if it is there; lines that a person has changed since stay."""
    if _note(root).is_file():
        texts, path = read_json(_note(root)), root / "params.yaml"
        if path.is_file():
            write_text(path, undo_change(path.read_text(encoding="utf-8"), texts["after"], texts["before"]))
        _note(root).unlink()


def check_params(root: Path, text: str) -> None:
    """Raise ParamsRefusedError if a value in params.yaml is no longer that of the text that was written there."""
    try:
        is_same = load_yaml((root / "params.yaml").read_text(encoding="utf-8")) == load_yaml(text)
    except (OSError, DocumentError):
        is_same = False
    if not is_same:
        raise ParamsRefusedError(
            "params.yaml was changed before this run had planned its training, so it is not what was asked that would"
            " be trained. Start it again; your lines stay.",
            code="changed_params",
        )


def undo_change(now: str, after: str, before: str) -> str:
    """The text `now` with the change from `before` to `after` undone, but for lines that `now` changed, too."""
    if now == after:
        return before
    with TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("now", "after", "before")]
        for file, text in zip(files, (now, after, before), strict=True):
            file.write_text(text, encoding="utf-8")
        command = ["git", "merge-file", "--stdout", "--ours", *map(str, files)]
        return subprocess.run(command, capture_output=True, check=True).stdout.decode()


def _note(root: Path) -> Path:
    return root / ".dvc" / "tmp" / "epsilonflow-params.json"

"""What a process that was killed leaves behind stops no other, and is not there for ever."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tasks import train
from tasks.runs import folder as runs
from tests.tasks.test_retraining import Place, place
from tests.tasks.test_train import Workspace, _crash, prepared_digits, workspace

__all__ = ["place", "prepared_digits", "workspace"]  # fixtures


def test_a_receipt_is_never_there_in_part(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    before = workspace.train()
    whole = shutil.copyfile

    def half(source: Path, target: Path) -> None:
        whole(source, target)
        if source.name == "receipt.json":
            target.write_bytes(target.read_bytes()[:10])
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copyfile", half)
        workspace.train()
    assert workspace.receipt == before
    assert workspace.train() == before


def test_a_run_that_was_half_deleted_is_not_taken_up(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = workspace.train()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", _crash)
        runs.discard(workspace.home, first["run_id"])
    runs.discard(workspace.home, first["run_id"])
    assert workspace.run_folders == []
    second = workspace.train()
    assert second["run_id"] != first["run_id"]
    runs.discard(workspace.home, second["run_id"])
    assert list((workspace.home / "runs").iterdir()) == []


def test_the_key_of_a_run_that_did_not_begin_goes(workspace: Workspace) -> None:
    left, at_work = (workspace.home / "runs" / f".20260101T000000-{name}" for name in ("left", "at-work"))
    for folder in (left, at_work):
        folder.mkdir(parents=True)
        (folder / "generator.key").touch()
    (left / "lock").touch()
    with FileLock(at_work / "lock"):
        run_id = workspace.train()["run_id"]
    assert [path.name for path in workspace.run_folders] == [at_work.name, run_id]


def test_killed_between_the_forfeit_and_its_note_it_is_forfeited_all_the_same(
    place: Place, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    place.settings = place.settings.model_copy(update={"attempts": 1})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "run_training", fails)
        patch.setattr(runs, "abandon", _crash)
        place.deliver()
    (run_id,) = place.rows("forfeit")
    assert f"the whole reservation of run {run_id} counts as spent" in place.deliver().message
    (state,) = (own_home / "retrainings/visits").glob("*.json")
    assert json.loads(state.read_text())["kind"] == "forfeited"
    assert list((own_home / "runs").iterdir()) == []
    assert place.rows("reserve") == place.rows("forfeit") == [run_id]

"""What a process that was killed leaves behind stops no other, and is not there for ever."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from data import files
from flows.cli.running import _what_stays
from tasks import train
from tasks.retraining.delivery import Work, give_up
from tasks.runs import store
from tests.support.workspace import Workspace, killed_in
from tests.tasks.test_retraining import Place, place

__all__ = ["place"]


def test_a_receipt_is_never_there_in_part(workspace: Workspace) -> None:
    before = workspace.train()
    whole = shutil.copyfile

    def half(source: Path, target: Path) -> None:
        whole(source, target)
        if source.name == "receipt.json":
            target.write_bytes(target.read_bytes()[:10])
            raise KeyboardInterrupt

    with killed_in(shutil, "copyfile", half):
        workspace.train()
    assert workspace.receipt == before
    assert workspace.train() == before


def test_a_run_that_was_half_deleted_is_not_taken_up(workspace: Workspace) -> None:
    first = workspace.train()
    with killed_in(shutil, "rmtree"):
        workspace.take_up()
    (left,) = workspace.run_folders
    assert left.name == f".gone-{first['run_id']}"
    second = workspace.train()
    assert second["run_id"] != first["run_id"]
    workspace.take_up()
    assert workspace.run_folders == []


def test_killed_while_its_key_is_written_a_run_begins_with_another_and_leaves_none(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def killed(fresh: Path, path: Path) -> None:
        if path.name == "generator.key":
            shutil.copyfile(fresh, path.with_name("half"))
            raise KeyboardInterrupt
        replace(fresh, path)

    defaults: dict[str, Any] = files.write_whole.__kwdefaults__
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(defaults, "put", killed)
        workspace.train()
    (folder,) = workspace.run_folders
    assert (folder / "half").exists() and not (folder / "generator.key").exists()
    assert workspace.train()["run_id"] == folder.name
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "result", "run.json"]


def test_what_stays_of_a_stopped_run_is_found_by_no_clock(workspace: Workspace) -> None:
    """It may be set meanwhile, or be that of the machine that has the disk."""
    before = store.begun(workspace.home, workspace.root)
    with killed_in(train, "run_training"):
        workspace.train()
    (folder,) = workspace.run_folders
    os.utime(folder / "run.json", (0, 0))
    assert _what_stays(workspace.root, before).startswith(f"run {folder.name} stays reserved")
    begun = store.begun(workspace.home, workspace.root)
    assert _what_stays(workspace.root, begun).startswith("nothing was reserved")
    with killed_in(train, "run_training"):
        workspace.train()
    assert _what_stays(workspace.root, begun).startswith(f"run {folder.name} stays reserved")


def test_killed_between_the_forfeit_and_its_note_it_is_forfeited_all_the_same(
    place: Place, own_home: Path
) -> None:
    with killed_in(train, "run_training"):
        place.deliver()
    work = Work(place.settings, place.root, place.run_stage, lambda _: None)
    (begun,) = work.states.all()
    with killed_in(store, "abandon"):
        give_up(work, begun)
    (run_id,) = place.rows("forfeit")
    assert f"the whole reservation of run {run_id} counts as spent" in place.deliver().message
    (state,) = (own_home / "retrainings/visits").glob("*.json")
    assert json.loads(state.read_text())["kind"] == "forfeited"
    assert list((own_home / "runs").iterdir()) == []
    assert place.rows("reserve") == place.rows("forfeit") == [run_id]

"""Run folders: whose they are, what decides that two runs are one, and what a killed process leaves behind."""

import fcntl
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.ledger import Ledger
from data import files
from data.files import try_lock
from flows.cli.running import _what_stays
from tasks import train
from tasks.config import params
from tasks.retraining.delivery import DeliveryWork, give_up
from tasks.runs import store
from tasks.runs.reservations import noting_what_was_spent
from tests.support.retraining import Place
from tests.support.retraining import place as place
from tests.support.workspace import Workspace, killed_in


def crash_before_settling(workspace: Workspace) -> None:
    with killed_in(Ledger, "settle"):
        workspace.train()


@pytest.mark.parametrize("keeps", [True, False])
def test_an_unfinished_run_is_not_taken_up_by_a_later_stage(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    crash_before_settling(workspace)
    (folder,) = workspace.run_folders
    store.mark_used(workspace.home, folder.name, keeps=keeps)
    assert (folder / "generator.key").exists() and not (folder / "taken").exists()


def test_a_backup_from_before_the_reservation_of_a_killed_run_is_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.train()
    workspace.mark_used()
    workspace.set("model", seed=1)
    file = workspace.home / "ledger.sqlite"
    backup = file.read_bytes()
    monkeypatch.chdir(workspace.root)
    with killed_in(train, "run_training"):
        train.main()
    file.write_bytes(backup)
    with pytest.raises(LedgerBrokenError, match="an older copy was put back"):
        train.main()


def test_a_run_taken_up_uses_the_noise_it_began_with(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.set("privacy", noise="seeded")
    workspace.train()
    expected = workspace.model()
    workspace.mark_used()
    crash_before_settling(workspace)
    shutil.rmtree(workspace.run_folders[0] / "written")
    (workspace.run_folders[0] / "state.safetensors").unlink()
    assert workspace.train()["private_noise"] is False
    assert workspace.model() == expected


@pytest.mark.parametrize(
    "what", ["steps", "seed", "noise", "dataset", "population", "contents", "blocks", "owner"]
)
def test_whatever_decides_a_result_makes_another_run(workspace: Workspace, what: str) -> None:
    def digest(home: Path = workspace.home, blocks: tuple[str, ...] = ("all",)) -> str:
        settings = params.load(workspace.root / "params.yaml", reads=train.READS)
        plan = (workspace.root / "artifacts/plan.json").read_bytes()
        return train.Job(settings, plan, root / "datasets/prepared", workspace.info, blocks).digest(home)

    root = workspace.root
    before, after = digest(), digest
    assert digest() == before
    match what:
        case "steps":
            workspace.set("algorithm", steps=7)
        case "seed":  # the plan names the model too, so it is kept as it was
            plan = (root / "artifacts/plan.json").read_bytes()
            workspace.set("model", seed=9)
            (root / "artifacts/plan.json").write_bytes(plan)
        case "noise":
            workspace.set("privacy", noise="seeded")
        case "dataset":
            workspace.declare(dataset="others")
        case "population":
            workspace.declare(population="others")
        case "contents":
            (root / "datasets/prepared/contents").write_text("another record")
        case "blocks":
            after = partial(digest, blocks=("january",))
        case "owner":  # so that whoever has no key of this home can test no guess
            after = partial(digest, root)
    assert after() != before


def test_two_checkouts_that_ask_for_one_run_pay_for_it_once(workspace: Workspace) -> None:
    other = Workspace(workspace.root.with_name("other"), workspace.home)
    shutil.copytree(workspace.root, other.root)
    workspace.declare(is_public=False, population="people")
    other.declare(is_public=False, population="people")
    assert other.train()["run_id"] == workspace.train()["run_id"]
    assert other.model() == workspace.model()
    assert [row.kind for row in workspace.ledger.history("people")] == ["population", "reserve", "settle"]


@pytest.mark.soak  # the lock and the race for one charge are tested each by itself
def test_two_processes_that_ask_for_one_run_at_once_pay_for_it_once(workspace: Workspace) -> None:
    assert [process.wait() for process in [workspace.start(), workspace.start()]] == [0, 0]
    assert [row.kind for row in workspace.ledger.history("digits")] == ["population", "reserve", "settle"]
    assert [folder.name for folder in workspace.run_folders] == [workspace.receipt["run_id"]]


def test_a_lock_that_another_process_took_away_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was deleted with its folder between the opening and the lock; who makes it anew has another one."""
    lock = fcntl.flock

    def late(descriptor: int, how: int) -> None:
        (tmp_path / "lock").unlink()
        lock(descriptor, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", late)
        assert try_lock(tmp_path / "lock") is None
    held = try_lock(tmp_path / "lock")
    assert held is not None and try_lock(tmp_path / "lock") is None
    os.close(held)


def test_training_sees_the_training_records_and_no_others(workspace: Workspace) -> None:
    seen: list[int] = []

    def look(*_arguments: Any, **named: Any) -> Any:
        records = named["open_records"]()
        seen.extend((len(records.features), len(records.labels)))
        raise KeyboardInterrupt

    with killed_in(train, "run_training", look):
        workspace.train()
    assert seen == [workspace.info.records] * 2


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
        workspace.mark_used()
    (left,) = workspace.run_folders
    assert left.name == f".gone-{first['run_id']}"
    second = workspace.train()
    assert second["run_id"] != first["run_id"]
    workspace.mark_used()
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
    before = store.begun_runs(workspace.home, workspace.root)
    with killed_in(train, "run_training"):
        workspace.train()
    (folder,) = workspace.run_folders
    os.utime(folder / "run.json", (0, 0))
    assert _what_stays(workspace.root, before).startswith(f"run {folder.name} stays reserved")
    begun = store.begun_runs(workspace.home, workspace.root)
    assert _what_stays(workspace.root, begun).startswith("nothing was reserved")
    with killed_in(train, "run_training"):
        workspace.train()
    assert _what_stays(workspace.root, begun).startswith(f"run {folder.name} stays reserved")


def test_a_refusal_has_a_note_about_what_was_spent_meanwhile(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the charge, after it, and after its end; what others charged before is not of it."""

    def refuse(*_: object, **__: object) -> None:
        raise RefusedError("no.")

    def note_of(owner: object, name: str) -> str:
        with monkeypatch.context() as patch, pytest.raises(RefusedError) as refused:
            patch.setattr(owner, name, refuse, raising=False)
            with noting_what_was_spent(workspace.root):
                workspace.train()
                refuse()
        (note,) = refused.value.__notes__
        return str(note)

    assert note_of(Ledger, "reserve") == "Nothing was spent."
    assert {row.kind for row in workspace.ledger.history()} == {"population"}
    charged = note_of(Ledger, "settle")
    (folder,) = workspace.run_folders
    assert charged.startswith(f"Run {folder.name} is charged: the same run again resumes it at no extra cost")
    assert note_of(train, "nothing") == (
        f"Run {folder.name} is charged and has ended: the same run again takes its result at no extra cost."
    )
    with pytest.raises(RefusedError) as refused, noting_what_was_spent(workspace.root):
        refuse()
    assert refused.value.__notes__ == ["Nothing was spent."]


def test_killed_between_the_forfeit_and_its_note_it_is_forfeited_all_the_same(
    place: Place, own_home: Path
) -> None:
    with killed_in(train, "run_training"):
        place.deliver()
    work = DeliveryWork(place.settings, place.root, place.run_stage, lambda _: None)
    (begun,) = work.states.all()
    with killed_in(store, "abandon"):
        give_up(work, begun)
    (run_id,) = place.rows("forfeit")
    assert f"the whole reservation of run {run_id} counts as spent" in place.deliver().message
    (state,) = (own_home / "retrainings/visits").glob("*.json")
    assert json.loads(state.read_text())["kind"] == "forfeited"
    assert list((own_home / "runs").iterdir()) == []
    assert place.rows("reserve") == place.rows("forfeit") == [run_id]

"""Run folders: whose they are, when they go, and what decides that two runs are one."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from algorithms.privacy.ledger import Ledger
from algorithms.privacy.mechanisms.noise import secure_generator
from tasks import train
from tasks.config import params
from tasks.runs import folder as runs
from tests.tasks.test_train import Workspace, _crash, prepared_digits, workspace

__all__ = ["prepared_digits", "workspace"]  # fixtures


def crash_before_settling(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "settle", _crash)
        with pytest.raises(KeyboardInterrupt):
            workspace.train()


def test_a_run_that_a_process_holds_is_not_taken_up(tmp_path: Path) -> None:
    def claim() -> Any:
        return runs.claimed(
            tmp_path, inputs="same", checkout=tmp_path, fresh=secure_generator(), is_forfeited=lambda _: False
        )

    with claim() as held, claim() as other:
        assert other.run_id != held.run_id
    with claim() as again:
        assert again.run_id in (held.run_id, other.run_id)


def test_an_unfinished_run_is_not_discarded(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_before_settling(workspace, monkeypatch)
    (folder,) = workspace.run_folders
    runs.discard(workspace.home, folder.name)
    assert (folder / "generator.key").exists()


def test_a_run_taken_up_uses_the_noise_it_began_with(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.set("privacy", noise="seeded")
    first = workspace.train()
    expected = workspace.model()
    runs.discard(workspace.home, first["run_id"])
    crash_before_settling(workspace, monkeypatch)
    shutil.rmtree(workspace.run_folders[0] / "written")
    (workspace.run_folders[0] / "state.safetensors").unlink()
    assert workspace.train()["private_noise"] is False
    assert workspace.model() == expected


@pytest.mark.parametrize("what", ["steps", "seed", "noise", "dataset", "checkout"])
def test_whatever_decides_a_result_makes_another_run(workspace: Workspace, what: str) -> None:
    def job() -> train.Job:
        settings = params.load(workspace.root / "params.yaml", reads=train.READS)
        plan = (workspace.root / "artifacts/plan.json").read_bytes()
        return train.Job(settings, plan, workspace.root / "datasets/prepared", workspace.public)

    before, root = job().digest(workspace.root, workspace.home), workspace.root
    assert job().digest(root, workspace.home) == before
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
            workspace.declare(unit="a page")
        case "checkout":
            root = root / "other"
    assert job().digest(root, workspace.home) != before


def test_training_sees_the_training_records_and_no_others(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def look(*_arguments: Any, **named: Any) -> Any:
        records = named["open_records"]()
        seen.extend((len(records.features), len(records.labels)))
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run_training", look)
    with pytest.raises(KeyboardInterrupt):
        workspace.train()
    assert seen == [workspace.public.records] * 2

"""A private run that is done is not done again unless a person agrees; what it paid for is brought back for nothing."""

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.ledger import Ledger
from algorithms.privacy.mechanisms.noise import secure_generator
from tasks.runs import folder as runs
from tasks.runs import repeat_guard, result_store

INPUTS = "a" * 64
NAMES = ("model.safetensors", "trace.parquet", "receipt.json")


def ledger_of(home: Path) -> Ledger:
    return Ledger.open(f"sqlite:///{home}/ledger.sqlite")


def claim(home: Path, *, keeps: bool = True) -> AbstractContextManager[runs.Run]:
    return runs.claimed(
        home,
        inputs=INPUTS,
        checkout=home,
        fresh=secure_generator(),
        is_forfeited=lambda _: False,
        keeps=keeps,
    )


def begun(home: Path) -> str:
    with claim(home) as run:
        return run.run_id


def finished(home: Path, *, keeps: bool = True) -> str:
    """A run whose result a later stage has taken."""
    with claim(home, keeps=keeps) as run:
        written = run.folder / "written"
        written.mkdir()
        contents = {name: f"{name} of {run.run_id}".encode() for name in NAMES[:2]} | {"plan.json": b"{}"}
        for name in NAMES[:2]:
            (written / name).write_bytes(contents[name])
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        (written / "receipt.json").write_text(json.dumps({"run_id": run.run_id, "sha256": sums}))
        run.finish(written)
    runs.discard(home, run.run_id)
    return run.run_id


def ask(home: Path, inputs: str = INPUTS, *, retraining: str | None = None) -> bool:
    artifacts = home / "artifacts"
    artifacts.mkdir(exist_ok=True)
    if not (artifacts / "plan.json").exists():
        (artifacts / "plan.json").write_text("{}")
    asked = repeat_guard.Asked(inputs, {"population": "painters"}, "epsilon 1", retraining)
    return repeat_guard.brought_back(asked, artifacts, NAMES, ledger_of(home), home)


def test_a_new_run_and_an_interrupted_one_are_not_asked_about(tmp_path: Path) -> None:
    assert ask(tmp_path) is False
    finished(tmp_path)
    begun(tmp_path)
    assert ask(tmp_path) is False


def test_a_finished_run_is_brought_back_for_nothing_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = finished(tmp_path)
    for _ in range(2):
        assert ask(tmp_path) is True
        model = tmp_path / "artifacts/model.safetensors"
        assert model.read_text() == f"model.safetensors of {run_id}"
        assert json.loads((tmp_path / "artifacts/receipt.json").read_text())["run_id"] == run_id
        model.unlink()
    assert ask(tmp_path, "b" * 64) is False
    monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
    assert ask(tmp_path) is False
    assert not model.exists()


def test_a_kept_result_is_for_its_owner_alone(tmp_path: Path) -> None:
    run_id = finished(tmp_path)
    assert (tmp_path / result_store.RESULTS).stat().st_mode & 0o077 == 0
    assert [path.name for path in (tmp_path / result_store.RESULTS).iterdir()] == [run_id]


def damaged(home: Path, run_id: str) -> None:
    (home / result_store.RESULTS / run_id / "trace.parquet").write_bytes(b"")


def deleted(home: Path, run_id: str) -> None:
    shutil.rmtree(home / result_store.RESULTS / run_id)


def of_another_run(home: Path, run_id: str) -> None:
    path = home / result_store.RESULTS / run_id / "receipt.json"
    path.write_text(path.read_text().replace(run_id, "20250101T120000-ffffffff"))


@pytest.mark.parametrize("change", [damaged, deleted, of_another_run])
def test_what_is_not_kept_whole_is_refused_without_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, str], None]
) -> None:
    run_id = finished(tmp_path)
    change(tmp_path, run_id)
    with pytest.raises(RefusedError, match=f"{run_id} did just this.* epsilon 1 again"):
        ask(tmp_path)
    assert not (tmp_path / "artifacts/model.safetensors").exists()
    monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
    assert ask(tmp_path) is False


def test_the_result_of_a_run_on_public_records_is_not_kept(tmp_path: Path) -> None:
    finished(tmp_path, keeps=False)
    assert not (tmp_path / result_store.RESULTS).exists()


def test_killed_while_a_result_is_kept_it_is_kept_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shutil.copytree

    def half(source: Path, target: Path, **how: Any) -> None:
        whole(source, target, **how)
        (target / "model.safetensors").write_bytes(b"")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copytree", half)
        finished(tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert ask(tmp_path) is False
    runs.discard(tmp_path, folder.name)
    assert list((tmp_path / "runs").iterdir()) == []
    assert ask(tmp_path) is True


def test_two_that_take_a_result_up_at_once_keep_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while the first one copies."""
    keep, copies = runs.keep, []

    def kept_twice(home: Path, run_id: str, result: Path) -> None:
        copies.append(run_id)
        assert len(copies) == 1
        runs.discard(home, run_id)
        keep(home, run_id, result)

    monkeypatch.setattr(runs, "keep", kept_twice)
    run_id = finished(tmp_path)
    runs.discard(tmp_path, run_id)
    assert copies == [run_id] and ask(tmp_path) is True


def test_a_forfeited_run_that_is_there_still_makes_nobody_spend_again(tmp_path: Path) -> None:
    finished(tmp_path)
    run_id, ledger, cost = begun(tmp_path), ledger_of(tmp_path), Budget(1.0, 1e-6)
    ledger.declare("painters", Budget(10.0, 1e-3), public=False)
    ledger.reserve(run_id, "painters", cost, events=[], about={})
    assert ask(tmp_path) is False
    ledger.forfeit(run_id)
    assert ask(tmp_path) is True


def test_a_retraining_takes_no_result_of_another(tmp_path: Path) -> None:
    run_id, ledger, cost = finished(tmp_path), ledger_of(tmp_path), Budget(1.0, 1e-6)
    ledger.declare("painters", Budget(10.0, 1e-3), public=False)
    event = {"event": {"type": "GaussianDpEvent", "noise_multiplier": 5.0}, "count": 1}
    ledger.reserve(run_id, "painters", cost, events=[event], about={"retraining": "visits 2026-W01"})
    assert ask(tmp_path, retraining="visits 2026-W01") is True
    with pytest.raises(RefusedError, match="did just this"):
        ask(tmp_path, retraining="visits 2026-W02")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "agrees"), [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False)]
)
def test_a_person_at_a_terminal_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    agrees: bool,
) -> None:
    finished(tmp_path)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert ask(tmp_path) is not agrees
    assert "spends epsilon 1 again. Spend it? [y/N]" in capsys.readouterr().err

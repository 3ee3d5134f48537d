"""Running stages by DVC: the checkout's lock, DVC's own locks, and when a stage may be tried again."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import zc.lockfile

from tasks import reproduce as module
from tasks.reproduce import Outcome, StageFailed, StageRefused, checkout_lock, reproduce
from tests.checkout import Checkout

BUSY_TEXTS = ("Unable to acquire lock", "is busy, it is being blocked by")
LOCKED, BUSY = (f"ERROR: {text}" for text in BUSY_TEXTS)
RUNNING = "Running stage 'train':"


@pytest.fixture
def dvc(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Lets dvc end as told, call by call; returns what was told to the person."""

    def play(*outcomes: Outcome) -> list[str]:
        left = iter(outcomes)
        monkeypatch.setattr(module, "dvc", lambda *arguments, root, say: next(left))
        monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
        return []

    return play


@pytest.mark.parametrize("busy", [BUSY, LOCKED])
def test_a_busy_checkout_is_waited_for(dvc: Callable[..., list[str]], busy: str, tmp_path: Path) -> None:
    told = dvc(Outcome(255, (busy,)), Outcome(255, (busy,)), Outcome(0, (RUNNING,)))
    assert reproduce("train", root=tmp_path, say=told.append)
    assert told == ["train waits for another dvc command in this checkout"]


def test_a_stage_that_was_not_run_says_so(dvc: Callable[..., list[str]], tmp_path: Path) -> None:
    told = dvc(Outcome(0, ("Stage 'train' didn't change, skipping",)))
    assert not reproduce("train", root=tmp_path, say=told.append)


@pytest.mark.parametrize(
    "lines",
    [
        (RUNNING, "Traceback", "ERROR: failed to reproduce 'train': failed to run: python -m tasks.train"),
        (RUNNING, "step 1", LOCKED),
        ("ERROR: Stage 'train' not found inside 'dvc.yaml' file",),
        (),
    ],
)
def test_a_stage_that_failed_is_never_tried_again(
    dvc: Callable[..., list[str]], lines: tuple[str, ...], tmp_path: Path
) -> None:
    told = dvc(Outcome(255, lines), Outcome(0, (RUNNING,)))
    with pytest.raises(StageFailed):
        reproduce("train", root=tmp_path, say=told.append)


def test_a_stages_refusal_arrives_as_its_sentence(dvc: Callable[..., list[str]], tmp_path: Path) -> None:
    told = dvc(
        Outcome(255, (RUNNING, "refused: too much; ask for less.", "ERROR: failed to reproduce 'train'"))
    )
    with pytest.raises(StageRefused, match=r"^too much; ask for less\.$"):
        reproduce("train", root=tmp_path, say=told.append)


def test_two_holders_of_a_checkout_take_turns(tmp_path: Path) -> None:
    order: list[str] = []

    def hold(name: str) -> None:
        with checkout_lock(tmp_path, say=lambda _: order.append(f"{name} waits")):
            order.append(f"{name} in")
            time.sleep(0.3)
            order.append(f"{name} out")

    threads = [threading.Thread(target=hold, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert order == ["a in", "b waits", "a out", "b in", "b out"]


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tasks.reproduce import checkout_lock\n"
        "with checkout_lock(Path(sys.argv[1]), say=print):\n    print('in', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "in\n"
    holder.kill()
    holder.wait()
    with checkout_lock(tmp_path, say=lambda text: pytest.fail(text)):
        pass


def test_dvcs_own_locks_are_waited_for(checkout: Checkout) -> None:
    """The texts that tell a busy checkout from a failed stage are DVC's: these are the real ones."""
    folder = checkout.root / ".dvc" / "tmp"
    whole = zc.lockfile.LockFile(str(folder / "lock"))
    me = {"pid": os.getpid(), "cmd": "another dvc command"}
    (folder / "rwlock").write_text(json.dumps({"write": {str(checkout.root / "data/prepared"): me}}))
    told: list[str] = []
    releases = [threading.Timer(5, whole.close), threading.Timer(9, (folder / "rwlock").unlink)]
    for release in releases:
        release.start()
    assert not reproduce("prepare", root=checkout.root, say=told.append)
    for text in (*BUSY_TEXTS, "waits"):
        assert any(text in line for line in told)


def test_a_cancelled_stage_leaves_no_process(checkout: Checkout) -> None:
    checkout.set("steps: 5", "steps: 100000")

    def cancel(line: str) -> None:
        if line.startswith("> python -m tasks.train"):
            raise KeyboardInterrupt

    reproduce("calibrate", root=checkout.root, say=lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        reproduce("train", root=checkout.root, say=cancel)
    assert not [
        p.info
        for p in psutil.process_iter(["cwd", "cmdline", "status"])
        if p.info["cwd"] == str(checkout.root)
    ]

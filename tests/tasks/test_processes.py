"""Several processes at one run: one charge, one trace, the result of one process, whichever of them is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from algorithms.errors import RefusedError
from algorithms.privacy.barrier.performance import Group
from algorithms.privacy.mechanisms.noise import seeded_generator
from tasks import train
from tasks.config import params
from tests.support.checkout import PROJECT
from tests.support.waiting import before_long
from tests.support.workspace import Workspace

SECONDS = 300
"""After which a process that should have ended is taken to hang."""


def released(place: Workspace) -> torch.Tensor:
    tensors = load_file(place.root / "artifacts/model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]).double()


def reservations(place: Workspace) -> list[str]:
    rows = place.ledger.history(place.public.population)
    return [row.kind for row in rows if row.kind in ("reserve", "settle", "forfeit")]


def checkpoints(place: Workspace) -> list[Path]:
    found = (folder / "state.safetensors" for folder in place.run_folders)
    return [file for file in found if file.exists()]


def until(holds: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    for _ in range(100 * SECONDS):
        if holds():
            return
        assert process.poll() is None, "it ended before its next checkpoint"
        time.sleep(0.01)
    pytest.fail("it wrote no checkpoint")


def killed(place: Workspace, number: int) -> None:
    """Starts the run's two processes and kills one of them, after which the other ends by itself."""
    before = [folder.read_bytes() for folder in checkpoints(place)]
    started = place.start()
    until(lambda: [folder.read_bytes() for folder in checkpoints(place)] not in ([], before), started)
    (other,) = psutil.Process(started.pid).children()
    (psutil.Process(started.pid), other)[number].send_signal(signal.SIGKILL)
    assert started.wait(timeout=SECONDS) != 0
    psutil.wait_procs([other], timeout=SECONDS)
    assert not other.is_running()


@pytest.mark.parametrize("in_slices", [False, True])
def test_whichever_process_is_killed_the_run_goes_on_for_nothing_more(
    in_slices: bool, workspace: Workspace
) -> None:
    """At last on one process; the noise is seeded, so that the same run without a kill can be compared."""
    workspace.set("privacy", noise="seeded")
    workspace.set("algorithm", steps=400)
    workspace.set("performance", processes=2, shard_trained=in_slices)
    for number in (1, 0):
        killed(workspace, number)
        assert reservations(workspace) == ["reserve"]
    workspace.set("performance", processes=1, checkpoint_seconds=60.0)
    first = workspace.train()["run_id"]
    assert reservations(workspace) == ["reserve", "settle"]
    found = released(workspace)
    workspace.mark_used()
    assert workspace.train()["run_id"] != first
    assert torch.allclose(found, released(workspace), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_is_lost_before_they_are_connected_is_not_waited_for(
    workspace: Workspace, number: int
) -> None:
    workspace.set("performance", processes=2)
    first = psutil.Process(workspace.start().pid)
    assert before_long(lambda: len(first.children()) == 1)
    processes = [first, *first.children()]
    processes[number].kill()
    assert psutil.wait_procs(processes, timeout=SECONDS)[1] == []
    assert workspace.ledger.populations() == []


def test_processes_that_share_parameters_in_other_ways_are_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for each other."""

    def job(**performance: Any) -> train.Job:
        workspace.set("performance", **performance)
        settings = params.load(workspace.root / "params.yaml", reads=train.READS)
        root = workspace.root
        plan = (root / "artifacts/plan.json").read_bytes()
        return train.Job(settings, plan, root / "datasets/prepared", workspace.public, group=Group(1, 2, 1))

    start = train._Start("a run", seeded_generator(0), train._asked(job()), None)
    monkeypatch.setattr(Group, "broadcast_object", lambda *_: start)
    other = job(shard_trained=True)
    with pytest.raises(RefusedError, match="settings of where parameters lie"):
        train.help_train(other, train.model_for(other.settings, other.public))


def test_torchrun_releases_what_one_process_does(workspace: Workspace) -> None:
    workspace.set("privacy", noise="seeded")
    receipt, alone = workspace.train(), released(workspace)
    workspace.mark_used()
    own = {"EPSILONFLOW_HOME": str(workspace.home), "PYTHONPATH": str(PROJECT), "GLOO_SOCKET_IFNAME": "lo"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, "-m", "tasks.train"],
        cwd=workspace.root,
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert workspace.receipt["run_id"] != receipt["run_id"]  # it was trained, not handed out
    assert workspace.receipt["events"] == receipt["events"]
    assert torch.allclose(alone, released(workspace), rtol=0.0, atol=1e-6) and float(alone.norm()) > 0
    assert reservations(workspace) == ["reserve", "settle"] * 2

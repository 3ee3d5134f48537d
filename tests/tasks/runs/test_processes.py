"""Several processes at one run: one charge, one trace, the result of one process, whichever of them is killed."""

import hashlib
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from cryptography.exceptions import InvalidTag
from safetensors.torch import load_file
from torch._C._distributed_c10d import FileStore

from algorithms.core.software import Software
from algorithms.errors import RefusedError
from algorithms.evaluation import ReleasedHistogram
from algorithms.gradients import ProcessLostError
from algorithms.privacy.barrier.process_group import ProcessGroup
from algorithms.privacy.mechanisms.noise import seeded_generator
from tasks import train
from tasks.config import params
from tasks.model_building import model_for
from tasks.runs import processes
from tasks.runs.dvc_stages import EXISTING_RESULT, TRAINING_LINE
from tests.support.checkout import PROJECT
from tests.support.processes import joined
from tests.support.refusals import refused_as
from tests.support.soak import soak_but
from tests.support.waiting import HANG_SECONDS, before_long
from tests.support.warm_processes import ModuleProcess, warm_pool
from tests.support.workspace import Workspace


def released(place: Workspace) -> torch.Tensor:
    tensors = load_file(place.root / "artifacts/model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]).double()


def reservations(place: Workspace) -> list[str]:
    rows = place.ledger.history(place.info.population)
    return [row.kind for row in rows if row.kind in ("reserve", "settle", "forfeit")]


def checkpoints(place: Workspace) -> list[Path]:
    found = (folder / "state.safetensors" for folder in place.run_folders)
    return [file for file in found if file.exists()]


def until(holds: Callable[[], bool], process: ModuleProcess) -> None:
    for _ in range(100 * HANG_SECONDS):
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
    for process in (psutil.Process(started.pid), other):
        open_to = {each.laddr.ip for each in process.net_connections("inet") if each.status == "LISTEN"}
        assert open_to <= {"127.0.0.1"}
    (psutil.Process(started.pid), other)[number].send_signal(signal.SIGKILL)
    assert started.wait(timeout=HANG_SECONDS) != 0
    psutil.wait_procs([other], timeout=HANG_SECONDS)
    assert not other.is_running()


@pytest.mark.parametrize("in_slices", soak_but([True], [True, False]))
def test_whichever_process_is_killed_the_run_goes_on_for_nothing_more(
    in_slices: bool,
    workspace: Workspace,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At last on one process; the noise is seeded, so that the same run without a kill can be compared."""
    workspace.set("privacy", noise="seeded")
    workspace.set("algorithm", steps=400)
    workspace.set("performance", processes=2, shard_trained=in_slices)
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    for number in (1, 0):
        killed(workspace, number)
        assert reservations(workspace) == ["reserve"]
        left = [path for path in temporary.rglob("*") if path.is_file()]
        assert all(path.name == "store" and path.stat().st_size < 4096 for path in left), left  # addresses
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
    assert psutil.wait_procs(processes, timeout=HANG_SECONDS)[1] == []
    assert workspace.ledger.populations() == []


SECRET = bytes(range(32))
OTHER_SOFTWARE = "other software"


def helped(folder: Path, places: dict[str, Workspace]) -> dict[str, str]:
    """What becomes of each run in its second process, which has its own checkout and home."""
    ends = {}
    with joined(1, 2, folder, secret=SECRET) as group:
        for name, place in places.items():
            job = job_of(place, group)
            with pytest.MonkeyPatch.context() as patch:
                if name == OTHER_SOFTWARE:
                    patch.setattr(train, "pipeline_software", lambda: Software("9.9", "9" * 64, {}))
                try:
                    train.train_as_worker(job, model_for(job.settings, job.info), home=place.home)
                    ends[name] = "trained"
                except RefusedError as refusal:
                    ends[name] = str(refusal)
    return ends


def job_of(place: Workspace, group: ProcessGroup) -> train.Job:
    settings = params.load(place.root / "params.yaml", reads=train.READS)
    plan, prepared = (place.root / "artifacts/plan.json").read_bytes(), place.root / "datasets/prepared"
    return train.Job(settings, plan, prepared, place.info, group=group)


def in_another_order(prepared: Path, *, is_whole: bool) -> None:
    """The same records, of which another half is the second; is_whole: `contents` says so, as after preparing."""
    arrays = [np.load(prepared / f"train_{name}.npy")[::-1] for name in ("features", "labels")]
    digests = []
    for name, array in zip(("features", "labels"), arrays, strict=True):
        np.save(prepared / f"train_{name}.npy", array)
        digests.append(hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest())
    if is_whole:
        (prepared / "contents").write_text(hashlib.sha256(b"".join(digests)).hexdigest() + "\n")


def test_processes_with_other_records_or_settings_are_refused_before_a_charge(
    workspace: Workspace, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some records would count twice and others never, or the processes would wait for each other."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    workspace.train()  # which makes the owner key, too
    workspace.mark_used()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    places = {}
    for name in (
        "copied in part",
        "another order",
        "another owner key",
        "other slices",
        OTHER_SOFTWARE,
        "the same",
    ):
        places[name] = Workspace(elsewhere / name, elsewhere / f"home of {name}")
        shutil.copytree(workspace.root, places[name].root)
        places[name].home.mkdir()
        shutil.copyfile(workspace.home / "owner.key", places[name].home / "owner.key")
    in_another_order(places["copied in part"].root / "datasets/prepared", is_whole=False)
    in_another_order(places["another order"].root / "datasets/prepared", is_whole=True)
    (places["another owner key"].home / "owner.key").write_bytes(bytes(32))
    places["other slices"].set("performance", shard_trained=True)
    before, ends = reservations(workspace), {}
    with warm_pool(1) as second:
        helping = second.apply_async(helped, (elsewhere, places))
        with joined(0, 2, elsewhere, secret=SECRET) as group:
            for name in places:
                assert reservations(workspace) == before, name
                try:
                    train.train(
                        job_of(workspace, group),
                        ledger=workspace.ledger,
                        home=workspace.home,
                        root=workspace.root,
                        artifacts=workspace.root / "artifacts",
                    )
                    ends[name] = "trained"
                except RefusedError as refusal:
                    ends[name] = str(refusal)
        assert helping.get() == ends
    assert "or the same in another order" in ends["copied in part"]
    for name in ("another order", "another owner key", "other slices", OTHER_SOFTWARE):
        assert "have other plans, models, data, owner keys, software, or settings of where" in ends[name], (
            name
        )
    assert ends["the same"] == "trained"
    assert reservations(workspace) == [*before, "reserve", "settle"]


def intrude(file: Path) -> str:
    """Take the second process's place without its secret."""
    try:
        with processes._connect(ProcessGroup(1, 2, 2, bytes(32)), FileStore(str(file), 2)):
            return "was let in"
    except (RefusedError, ProcessLostError):
        return "was not let in"


def test_whoever_connects_without_the_secret_is_told_nothing(workspace: Workspace) -> None:
    ends = []
    with warm_pool(1) as strangers:

        class Stranger:
            def __init__(self, rank: int, count: int, file: Path, secret: bytes) -> None:
                FileStore(str(file), count).set(f"process {rank}", "is here")
                self.end = strangers.apply_async(intrude, (file,))

            def poll(self) -> None: ...

            def terminate(self) -> None:
                ends.append(self.end.get())

            def wait(self) -> None: ...

        with (
            refused_as("processes_differ", process=1, differing="secret"),
            processes.join_processes(2, home=workspace.home, start=Stranger),
        ):
            pytest.fail("it was let in")
    assert ends == ["was not let in"]


@pytest.mark.parametrize("size", [7, 2**20])
def test_the_key_and_the_checkpoint_are_sent_encrypted(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one part or in several, and refused if a part was changed or left out."""
    sent: list[Any] = []
    monkeypatch.setattr(processes, "SEALED_AT_ONCE", size)
    monkeypatch.setattr(ProcessGroup, "broadcast_object", lambda _, value: sent.append(value))
    start = train._Start("a run", seeded_generator(0), b"the norms of all records")
    processes.broadcast_sealed(ProcessGroup(0, 2, 2, SECRET), start)
    monkeypatch.setattr(ProcessGroup, "broadcast_object", lambda *_: sent[-1])
    assert processes.broadcast_sealed(ProcessGroup(1, 2, 2, SECRET), None) == start
    written = pickle.dumps(sent)
    assert start.generator.key[:7] not in written and b"norms" not in written
    first, sealed = sent[0][0]
    for nonce, part in ((first, sealed[:-1] + bytes([sealed[-1] ^ 1])), (bytes(12), sealed)):
        sent.append([(nonce, part), *sent[0][1:]])
        with pytest.raises(InvalidTag):
            processes.broadcast_sealed(ProcessGroup(1, 2, 2, SECRET), None)
    sent.append(sent[0][:-1] if len(sent[0]) > 1 else [*sent[0], *sent[0]])
    with pytest.raises(InvalidTag):
        processes.broadcast_sealed(ProcessGroup(1, 2, 2, SECRET), None)


def evaluation(place: Workspace) -> ReleasedHistogram:
    return ReleasedHistogram.from_json((place.root / "artifacts/evaluation.json").read_text())


def test_torchrun_releases_what_one_process_does(
    workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of the held-out records, too: the first process evaluates them, once."""
    workspace.declare(holdout="private")
    workspace.set("privacy", noise="seeded")
    receipt, alone, evaluated = workspace.train(), released(workspace), evaluation(workspace)
    workspace.mark_used()
    own = {"EPSILONFLOW_HOME": str(workspace.home), "PYTHONPATH": str(PROJECT), "GLOO_SOCKET_IFNAME": "lo"}
    logs = tmp_path_factory.mktemp("logs")
    launch = ["--standalone", "--nproc-per-node=2", "--redirects=3", f"--log-dir={logs}", "-m", "tasks.train"]
    launcher = ModuleProcess("torch.distributed.run", *launch, cwd=workspace.root, env=os.environ | own)
    ended = launcher.wait(timeout=HANG_SECONDS)
    first, second = ("".join(file.read_text() for file in logs.rglob(f"{rank}/*.log")) for rank in (0, 1))
    assert ended == 0 and TRAINING_LINE in first, first + second
    assert (
        TRAINING_LINE not in second and EXISTING_RESULT not in second
    )  # it helped, and did not train by itself
    assert workspace.receipt["run_id"] != receipt["run_id"]  # it was trained, not handed out
    assert workspace.receipt["events"] == receipt["events"]
    assert torch.allclose(alone, released(workspace), rtol=0.0, atol=1e-6) and float(alone.norm()) > 0
    again = evaluation(workspace)
    # The same noise of the same key; a record at a bin's edge may be in the next one.
    assert again.spec == evaluated.spec and np.abs(again.values - evaluated.values).sum() < 8
    assert receipt["evaluation_epsilon"] == workspace.receipt["evaluation_epsilon"] <= 3.0
    trace = pd.read_parquet(workspace.root / "artifacts/trace.parquet")
    assert (trace["kind"] == "evaluation").sum() == 1
    assert reservations(workspace) == ["reserve", "settle"] * 2

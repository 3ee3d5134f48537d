"""Stages: as a process, whose refusals are one sentence, and run by DVC: locks, and when one may be tried again."""

import errno
import gc
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zc.lockfile
from dvc.stage import run as dvc_run
from dvc.stage.exceptions import StageCmdFailedError
from ruamel.yaml import YAML

from algorithms.errors import BudgetRefusedError, LedgerBrokenError
from algorithms.models import ModelRefusedError
from algorithms.privacy.barrier.device import device_of
from data import DataRefusedError
from tasks.config.params import ParamsRefusedError
from tasks.runs import dvc_stages
from tasks.runs.dvc_stages import (
    NOTHING_TO_DO,
    REFUSAL,
    STATUS_REQUEST,
    DvcProcess,
    StageFailedError,
    StageRefusedError,
    checkout,
    checkout_lock,
    reproduce,
    up_to_date,
)
from tasks.runs.stage_main import main_of
from tests.support.checkout import PROJECT
from tests.support.modes import open_to_others, open_umask
from tests.support.one_process import DvcHere
from tests.support.refusals import refused_as
from tests.support.waiting import HANG_SECONDS, before_long, processes_in
from tests.support.workspace import Workspace


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a checkout for DVC whose stage `train` runs some Python code and counts its starts; returns its folder."""
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))

    def make(code: str) -> Path:
        (tmp_path / ".dvc").mkdir()
        (tmp_path / ".dvc/config").write_text("[core]\n    no_scm = true\n")
        (tmp_path / "code.py").write_text(f"import sys; open('starts', 'a').write('x')\n{code}\n")
        train = {"cmd": f"{sys.executable} code.py", "deps": ["code.py"], "outs": ["model"]}
        YAML(typ="safe", pure=True).dump({"stages": {"train": train}}, tmp_path / "dvc.yaml")
        return tmp_path

    return make


@pytest.fixture
def dvc_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it matters neither when lines come nor which process DVC is: it takes half a second to start."""

    def run(_shell: str, command: str, *, cwd: str, env: dict[str, str], **_: object) -> None:
        done = subprocess.run(
            shlex.split(command),
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        sys.stdout.write(done.stdout)
        if done.returncode:
            raise StageCmdFailedError(command, done.returncode)

    monkeypatch.setattr(dvc_run, "_run", run)
    monkeypatch.setattr(dvc_stages, "DvcProcess", partial(DvcHere, but=None))


def test_a_stage_runs_once_and_then_there_is_nothing_to_do(stage: Callable[[str], Path]) -> None:
    root, told = stage("open('model', 'w').write('x'); print('step 1')"), list[str]()
    assert not up_to_date(root, say=told.append)
    with open_umask():
        assert reproduce("train", root=root, say=told.append)
    for written in root / "model", root / ".dvc/cache":  # by the stage, and by DVC
        assert written.stat().st_mode & 0o077 == 0
    assert told == ["Running stage 'train':", f"> {sys.executable} code.py", "step 1"]
    assert up_to_date(root, say=told.append)
    assert not reproduce("train", root=root, say=told.append)
    assert (root / "starts").read_text() == "x"


def test_dvc_is_not_asked_about_a_checkout_in_which_no_stage_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[object]()
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **_: started.append(command))
    assert not up_to_date(tmp_path, say=print) and not started


def test_a_stage_collects_garbage_of_its_own_work_as_often_as_python() -> None:
    """Not among the objects that imports made, of which none goes."""
    seen = list[tuple[int, int]]()
    gc.unfreeze()
    gc.set_threshold(50_000)
    main_of(lambda: seen.append((gc.get_freeze_count(), gc.get_threshold()[0])))
    ((frozen, allocations),) = seen
    assert frozen > 10_000 and allocations < 10_000


def test_one_process_of_dvc_serves_all_requests_of_a_run(stage: Callable[[str], Path]) -> None:
    """Also after a stage that ends within a line, or fails."""
    root, told = stage("open('model', 'w').write('x'); print('no end', end='')"), list[str]()
    with DvcProcess(root, say=told.append) as dvc:
        assert dvc.request(STATUS_REQUEST) == (0, [])
        (dvcs,) = processes_in(root)
        assert dvc.reproduce("train") and not dvc.reproduce("train")
        with pytest.raises(StageFailedError, match="'tame' not found"):
            dvc.reproduce("tame")
        assert dvc.request(STATUS_REQUEST) == (NOTHING_TO_DO, [])
        assert processes_in(root) == [dvcs]
    assert told[:3] == ["Running stage 'train':", f"> {sys.executable} code.py", "no end"]
    assert not processes_in(root)


def test_modules_with_the_names_of_our_packages_are_in_nobodys_way(stage: Callable[[str], Path]) -> None:
    """Nor in that of a stage whose command has no -P; a module of the user's own is found."""
    root = stage(
        "from tasks.runs.stage_main import main_of\n"
        "main_of(lambda: __import__('mine'))\n"
        "import algorithms, data, tasks\n"
        "open('model', 'w').write(tasks.__file__)"
    )
    (root / "mine.py").touch()
    (root / "data").mkdir()
    for name in ("tasks.py", "algorithms.py", "flows.py", "data/__init__.py"):
        (root / name).write_text("1 / 0\n")
    assert reproduce("train", root=root, say=lambda _: None)
    assert (root / "model").read_text() == str(PROJECT / "tasks/__init__.py")


@pytest.mark.usefixtures("dvc_in_this_process")
def test_a_cache_of_private_records_that_lies_elsewhere_is_closed_too(
    stage: Callable[[str], Path], workspace: Workspace, tmp_path: Path
) -> None:
    """By `epsilonflow run`, which asks DVC where it is; a stage by itself does not know."""
    workspace.declare(is_public=False)
    root, cache = stage("open('model', 'w').write('x')"), tmp_path / "elsewhere"
    if root != workspace.root:
        shutil.copytree(workspace.root / "datasets", root / "datasets")
    contents = cache / "files/md5"  # of files, which others cannot reach once it is closed
    contents.mkdir(parents=True)
    contents.chmod(0o755)  # as a dvc command of the user's left it
    (root / ".dvc/config").write_text(f"[core]\n    no_scm = true\n[cache]\n    dir = {cache}\n")
    assert reproduce("train", root=root, say=lambda _: None)
    assert list(contents.iterdir()) and contents.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("is_public", [False, True])
def test_each_stage_hides_private_records_that_dvc_brought_back(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, is_public: bool
) -> None:
    """As after `dvc checkout`, which gives files the modes of its umask."""
    monkeypatch.chdir(workspace.root)
    workspace.declare(is_public=is_public)
    (workspace.root / ".dvc").mkdir()
    if is_public:
        (workspace.root / ".dvc/cache").mkdir(mode=0o755)
    records, dvcs = workspace.root / "datasets", workspace.root / ".dvc/tmp"
    for folder in (records / "raw", dvcs):  # where DVC works, and what a card with a `path` names
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    for path in (records, *records.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    were_open = open_to_others(records)
    with open_umask():
        main_of(lambda: Path("artifacts/written").write_text(str(open_to_others(records))))
    assert Path("artifacts/written").read_text() == str(were_open if is_public else [])
    assert open_to_others(Path("artifacts/written")) == []
    assert open_to_others(dvcs) == ([str(dvcs)] if is_public else [])
    brought = records / "prepared/train_labels.npy"  # by the stage itself
    main_of(lambda: brought.chmod(0o644))
    assert open_to_others(brought) == ([str(brought)] if is_public else [])
    for _ in range(2):  # the second time it was there before
        assert (workspace.root / ".dvc/cache").stat().st_mode & 0o777 == (0o755 if is_public else 0o700)
        (workspace.root / ".dvc/cache").chmod(0o755)
        main_of(lambda: None)


FAILURES = {
    "fails": (
        "sys.exit('ERROR: Unable to acquire lock')",
        StageFailedError,
        "failed to reproduce 'fails': failed to run: ",
    ),
    "idle": ("pass", StageFailedError, "failed to reproduce 'idle': output 'idle.out' does not exist"),
    "refuses": (
        "sys.stderr.write('refused: too much; ask for less.\\n'); sys.exit(2)",
        StageRefusedError,
        r"too much; ask for less\.$",
    ),
    "dies": (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        StageFailedError,
        "dies was killed, .*; rerun the command to resume",
    ),
}
"""By the name of a stage, its code, and the error that its failure is."""


def test_a_stage_that_failed_says_why_and_is_never_tried_again(
    stage: Callable[[str], Path],
) -> None:
    """Whether it fails, forgets its output, refuses or is killed; one process of DVC has them all."""
    root = stage("")
    stages = {
        name: {"cmd": f"{sys.executable} {name}.py", "deps": [f"{name}.py"], "outs": [f"{name}.out"]}
        for name in FAILURES
    }
    YAML(typ="safe", pure=True).dump({"stages": stages}, root / "dvc.yaml")
    for name, (code, _, _) in FAILURES.items():
        (root / f"{name}.py").write_text(f"import sys; open('starts', 'a').write('{name} ')\n{code}\n")
    with DvcProcess(root, say=lambda _: None) as dvc:
        for name, (_, kind, words) in FAILURES.items():
            with pytest.raises(kind, match=f"^{words}"):
                dvc.reproduce(name)
    assert (root / "starts").read_text().split() == [*FAILURES]


REFUSES = """
from tasks.runs.stage_main import main_of
from algorithms.errors import RefusedError
from pathlib import Path
def refuse():
    raise RefusedError("{path} has {epsilon:g} of {target.epsilon}.", code="above", path=Path("a"), epsilon=3)
main_of(refuse)
"""


@pytest.mark.usefixtures("dvc_in_this_process")
def test_code_and_fields_of_a_refusal_reach_the_process_that_started_the_stage(
    stage: Callable[[str], Path],
) -> None:
    """Those of this refusal: an earlier one has no part in what a stage says later."""
    root = stage(REFUSES)
    with dvc_stages.DvcProcess(root, say=lambda _: None) as dvc:
        with refused_as("above", StageRefusedError, path="a", epsilon=3) as refusal:
            dvc.reproduce("train")
        assert str(refusal.value) == "a has 3 of privacy.epsilon."
        assert open_to_others(root / REFUSAL) == []
        (root / "code.py").write_text("import sys; sys.exit('refused: another.')")
        with pytest.raises(StageRefusedError) as other:
            dvc.reproduce("train")
    assert (str(other.value), other.value.code, other.value.fields) == ("another.", "", {})


@pytest.mark.usefixtures("dvc_in_this_process")
@pytest.mark.parametrize(
    "note", [{}, [], {"sentence": "no."}, {"sentence": "no.", "code": "a", "fields": []}, "no.", None]
)
def test_a_note_of_another_shape_leaves_the_sentence(note: object, stage: Callable[[str], Path]) -> None:
    """As one by another version of the program, or by another program."""
    root = stage(
        f"import sys; open({str(REFUSAL)!r}, 'w').write({json.dumps(note)!r}); sys.exit('refused: no.')"
    )
    with pytest.raises(StageRefusedError) as refusal:
        reproduce("train", root=root, say=lambda _: None)
    assert (str(refusal.value), refusal.value.code, refusal.value.fields) == ("no.", "", {})


def test_a_stage_has_a_user_with_a_name(
    stage: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC needs one, which a user without an entry in the system's list has not, as in a container."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    root = stage("open('model', 'w').write('x')")
    (root / "site").mkdir()
    (root / "site/sitecustomize.py").write_text("import pwd; pwd.getpwuid = {}.__getitem__")
    monkeypatch.setenv("PYTHONPATH", f"{root}/site{os.pathsep}{PROJECT}")
    assert reproduce("train", root=root, say=lambda _: None)


def _hold_whole(root: Path) -> Callable[[], None]:
    (root / ".dvc/tmp").mkdir(exist_ok=True)
    close: Callable[[], None] = zc.lockfile.LockFile(str(root / ".dvc/tmp/lock")).close
    return close


def _hold_output(root: Path) -> Callable[[], None]:
    (root / ".dvc/tmp").mkdir(exist_ok=True)
    lock, me = root / ".dvc/tmp/rwlock", {"pid": os.getpid(), "cmd": "another dvc command"}
    lock.write_text(json.dumps({"write": {str(root / "model"): me}}))
    return lock.unlink


@pytest.mark.parametrize(
    ("hold", "why"),
    [(_hold_whole, "Unable to acquire lock"), (_hold_output, "): another dvc command If there are no")],
)
def test_dvcs_own_locks_are_waited_for(
    stage: Callable[[str], Path],
    hold: Callable[[Path], Callable[[], None]],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are given back when the person was told, so that this does not depend on how long anything takes."""
    root, told = stage("open('model', 'w').write('x')"), list[str]()
    site = root / "site"
    site.mkdir()
    # DVC tries for this many seconds before it says that there is a lock, else for 3.
    impatient = "import dvc.lock; dvc.lock.DEFAULT_TIMEOUT = 0.1"
    (site / "sitecustomize.py").write_text(
        f"import sys\nif 'tasks.runs.dvc_process' in sys.orig_argv:\n    {impatient}\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{PROJECT}")
    give_back = hold(root)

    def say(line: str) -> None:
        if not told:
            give_back()
        told.append(line)

    assert reproduce("train", root=root, say=say)
    assert told[0].startswith("waiting for another dvc command in this checkout: ") and why in told[0]
    assert told[1] == "Running stage 'train':"


@pytest.mark.usefixtures("dvc_in_this_process")
def test_a_lock_file_that_a_killed_command_left_empty_is_no_obstacle(stage: Callable[[str], Path]) -> None:
    root = stage("open('model', 'w').write('x')")
    (root / ".dvc/tmp").mkdir(exist_ok=True)
    (root / ".dvc/tmp/rwlock").touch()
    assert reproduce("train", root=root, say=lambda _: None)


def test_a_stage_ends_with_a_killed_process_that_asked_for_it(stage: Callable[[str], Path]) -> None:
    root = stage("import time; time.sleep(600)")
    code = "import sys; from pathlib import Path; from tasks.runs.dvc_stages import reproduce as r"
    code += "; r('train', root=Path(sys.argv[1]), say=print)"
    asking = subprocess.Popen([sys.executable, "-c", code, str(root)], start_new_session=True)
    try:
        assert before_long((root / "starts").exists)
        assert processes_in(root)
    finally:
        os.killpg(asking.pid, signal.SIGKILL)
        asking.wait()
    assert before_long(lambda: not processes_in(root))


def test_two_holders_of_a_checkout_take_turns(tmp_path: Path) -> None:
    order, waits = list[str](), threading.Event()

    def hold() -> None:
        with checkout_lock(tmp_path, say=lambda text: (order.append(text), waits.set())):
            order.append("b in")

    other = threading.Thread(target=hold)
    with checkout_lock(tmp_path, say=pytest.fail):
        other.start()
        assert waits.wait(HANG_SECONDS)
        order.append("a out")
    other.join()
    assert order == ["another run holds this checkout: waiting for its end", "a out", "b in"]


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_a_cancelled_stage_is_interrupted_and_leaves_no_process(
    stage: Callable[[str], Path], handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not killed at once, so that it closes what it has open, and DVC gives its locks back; the interrupt is enough.

    handler: of interrupts in this process; one that a script starts in the background ignores them.
    """
    root = stage(
        "import time\n"
        "try:\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(600)\n"
        "finally:\n"
        "    open('closed', 'w').close()"
    )

    def cancel(line: str) -> None:
        if line == "begun":
            raise KeyboardInterrupt

    monkeypatch.setattr(dvc_stages, "ENDINGS", ((signal.SIGINT, 300.0),))
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            reproduce("train", root=root, say=cancel)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (root / "starts").exists() and not processes_in(root)
    assert (root / "closed").exists()
    assert json.loads((root / ".dvc/tmp/rwlock").read_text() or "{}") == {}


@pytest.mark.parametrize(
    "kind",
    [
        partial(DataRefusedError, code="missing_file"),
        *(BudgetRefusedError, LedgerBrokenError, ModelRefusedError, ParamsRefusedError),
    ],
)
def test_a_refusal_is_one_sentence_and_status_2(
    kind: Callable[[str], ValueError], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise kind("no,\n  not so; do this.")

    with pytest.raises(SystemExit) as ended:
        main_of(refuse)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "refused: no, not so; do this.\n"


def test_a_stage_names_keys_of_params(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main_of(lambda: device_of("abacus"))
    assert "refused: performance.device is abacus, but " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "memory did not suffice; free some"),
        (OSError(errno.EMFILE, "no"), "too many files are open; close some"),
        (OSError(errno.ENOSPC, "no"), "the disk is full; make room"),
    ],
)
def test_what_the_machine_lacks_is_one_sentence(
    error: Exception, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        main_of(fail)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"refused: {words}")


def test_only_warnings_of_other_libraries_are_shown() -> None:
    """As of matplotlib, which tells in the first run of all that it looks for fonts."""
    code = """
import logging
from tasks.runs.stage_main import main_of
def work():
    logging.getLogger("matplotlib.font_manager").info("fonts")
    logging.getLogger("matplotlib").warning("a warning")
    logging.getLogger("algorithms.core").info("progress")
main_of(work)
"""
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT
    )
    assert told.stderr.splitlines() == ["a warning", "progress"]


def test_another_error_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        main_of(lambda: int("x"))


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused_as("no_checkout", ParamsRefusedError, missing="params.yaml"):
        checkout()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("I/O error: No space left on device")]
)
def test_a_full_disk_is_a_sentence_whichever_library_met_it(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill() -> None:
        raise error

    with pytest.raises(SystemExit):
        main_of(fill)
    assert capsys.readouterr().err.startswith("refused: the disk is full; make room where")


@pytest.mark.usefixtures("dvc_in_this_process")
def test_a_checkout_without_git_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "params.yaml").write_text("")
    with pytest.raises(StageFailedError, match="not a git repository, which DVC needs; run `git init`"):
        reproduce("prepare", root=tmp_path, say=lambda _: None)

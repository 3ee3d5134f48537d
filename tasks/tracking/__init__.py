"""Everything that is sent to Weights & Biases, by sessions.

This file has what all sessions share: settings by which nothing about the machine or the code is sent, how long a
session may take, and how failures are handled.

W&B keeps its own files below the checkout, unless the environment names another folder. The files of a queued
experiment are below the checkout in which it was queued, since it runs in a copy that DVC deletes.
"""

import logging
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.files import read_json
from tasks.config import first_checkout, params
from tasks.config.params import Tracking

if TYPE_CHECKING:
    import wandb


_SECONDS_TO_BEGIN, _SECONDS_TO_FINISH, SECONDS_TO_WRITE = 30, 120, 10
_FOLDER = ".wandb"
_FOLDERS = {
    "WANDB_DIR": ".",
    "WANDB_DATA_DIR": "data",
    "WANDB_CACHE_DIR": "cache",
    "WANDB_CONFIG_DIR": "config",
    "WANDB_ARTIFACT_DIR": "artifacts",
}
_FILE_HEADER, _FILE_BLOCK, _RECORD_HEADER = 7, 32768, struct.Struct("<4xHB")
"""Of the file of an offline run: the bytes of its header and of its blocks, and length and kind of a record's part."""
_QUIET_ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
_log = logging.getLogger(__name__)


@contextmanager
def wandb_folders(root: Path) -> Iterator[None]:
    """Within the block, keep W&B's files below `root`, unless the environment names other folders, which W&B reads.

    Its log is one of these files. On a full disk `logging` would print a traceback for each line that it cannot write.
    """
    folder = first_checkout(root) / _FOLDER
    missing = {name: str(folder / below) for name, below in _FOLDERS.items() if not os.environ.get(name)}
    before = {name: os.environ.get(name) for name in (*missing, *_QUIET_ENVIRONMENT)}
    for folder_below in missing.values():
        Path(folder_below).mkdir(parents=True, exist_ok=True)
    os.environ.update(missing | _QUIET_ENVIRONMENT)
    raises, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = raises
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def safely(log: Callable[[], object], settings: Tracking, what: str, root: Path) -> bool:
    """Call `log` unless tracking is disabled; returns whether it logged. A failure costs one line of the log.

    log: must use absolute paths, since it works in the checkout with W&B's files. what: a description for the log.
    """
    if settings.mode == "disabled":
        return False
    try:
        with wandb_folders(root), chdir(first_checkout(root)):
            log()
    except Exception as error:
        _log.warning("W&B did not log %s, which is complete without it: %s", what, reason(error))
        return False
    return True


def has_run_to_log(root: Path) -> bool:
    """Whether W&B lacks the run whose report is in the checkout at `root`, as after an outage.

    Raises ParamsRefusedError for settings that cannot be used.
    """
    settings = params.load(root / "params.yaml", reads=("tracking",)).tracking
    try:
        run_id = read_json(root / "artifacts" / "privacy_card.json")["evidence"]["run_id"]
    except (OSError, ValueError):
        return False
    return settings.mode != "disabled" and not is_logged(run_id, settings, root)


def is_logged(run_id: str, settings: Tracking, root: Path) -> bool:
    """Whether `note_logged` noted the run for this project: online, or offline where that is the mode."""
    try:
        noted = _note_of(run_id, root).read_text(encoding="utf-8")
    except OSError:
        return False
    return noted in (_mode_note("online", settings), _mode_note(settings.mode, settings))


def note_logged(run_id: str, settings: Tracking, root: Path) -> None:
    """Note beside W&B's files that it has the run, so that no later command logs it again."""
    path = _note_of(run_id, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_mode_note(settings.mode, settings), encoding="utf-8")


def _note_of(run_id: str, root: Path) -> Path:
    return first_checkout(root) / _FOLDER / "logged" / artifact_name(run_id)


def _mode_note(mode: str, settings: Tracking) -> str:
    return f"{mode} {settings.entity or '-'}/{settings.project}\n"


def reason(error: Exception) -> str:
    """The error message in one line."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def session(
    settings: Tracking,
    *,
    job_type: str,
    group: str,
    name: str,
    config: Mapping[str, object],
    tags: Sequence[str] = (),
    run_id: str | None = None,
    seconds_to_finish: int = _SECONDS_TO_FINISH,
) -> Iterator["wandb.Run"]:
    """A run at W&B within the block. run_id: id of a run that is resumed if W&B has it; online only.

    Raises what W&B raises, TimeoutError if sending takes longer than `seconds_to_finish` at the end, and OSError if the
    file of an offline run is not whole.
    """
    import wandb  # here, since the import takes most of a second and may not be needed
    from wandb.analytics.opentelemetry import opentelemetry_proxy

    opentelemetry_proxy.disable()  # of W&B's own, which sends it tracebacks and how long its calls take
    # It imports W&B Launch, which takes as long again, for inputs of a job that Launch started; none starts this.
    wandb.Run._detect_and_apply_job_inputs = lambda _: None  # type: ignore[assignment, method-assign]
    logged = wandb.init(
        project=settings.project,
        entity=settings.entity,
        id=None if run_id is None else re.sub(r"[^A-Za-z0-9_-]", "-", run_id),
        resume="allow" if run_id is not None and settings.mode == "online" else None,
        group=group,
        job_type=job_type,
        name=name,
        config=dict(config),
        tags=tags,
        settings=_settings(settings, seconds_to_finish),
    )
    # Not as `with wandb.init(...)`, which prints the traceback of what is raised in its block.
    try:
        _keep_paths_relative(logged)
        yield logged
    except BaseException:
        with suppress(Exception):
            logged.finish(exit_code=1)
        raise
    logged.finish()
    if settings.mode == "offline":
        _wait_for(Path(logged.settings.sync_file))


def _wait_for(file: Path) -> None:
    """Wait for the file of an offline run, which W&B's other process writes; raises OSError if it does not get whole.

    That process says nothing of a full disk.
    """
    last = time.monotonic() + SECONDS_TO_WRITE
    while not is_whole(file):
        if time.monotonic() > last:
            raise OSError(f"{file} is not whole, as on a full disk")
        time.sleep(0.05)


def is_whole(file: Path) -> bool:
    """Whether the file of an offline run ends with the end of the run."""
    from wandb.proto import wandb_internal_pb2

    content, position, record, kind = file.read_bytes(), _FILE_HEADER, b"", 0
    while position + _RECORD_HEADER.size <= len(content):
        left = _FILE_BLOCK - position % _FILE_BLOCK
        if left < _RECORD_HEADER.size:
            position += left
            continue
        length, kind = _RECORD_HEADER.unpack_from(content, position)
        position += _RECORD_HEADER.size
        part = content[position : position + length]
        record = part if kind in (1, 2) else record + part  # whole, or its first part
        position += length
    # Whole, or the last part: blocks are written one by one, so that a file may end between two parts of a record.
    if position != len(content) or kind not in (1, 4):
        return False
    last = vars(wandb_internal_pb2)["Record"].FromString(record)
    return last.WhichOneof("record_type") in ("exit", "final", "footer")


def _keep_paths_relative(logged: "wandb.Run") -> None:
    """Log each artifact of the run, also those that W&B makes for tables, with paths relative to the current folder.

    W&B records the absolute path of each file's copy. The current folder is the checkout, in which `wandb sync` has to
    run, too, so that a relative path reveals nothing about the machine. There is no public way to say so.
    """
    log_artifact = logged._log_artifact

    def log_relative(artifact_or_path: "wandb.Artifact", *args: Any, **kwargs: Any) -> "wandb.Artifact":
        for entry in artifact_or_path.manifest.entries.values():
            if entry.local_path:
                entry.local_path = os.path.relpath(str(entry.local_path))
        return log_artifact(artifact_or_path, *args, **kwargs)

    logged._log_artifact = log_relative  # type: ignore[assignment, method-assign]


def _settings(settings: Tracking, seconds_to_finish: int) -> "wandb.Settings":
    """A run's settings: nothing about the machine or the code is sent."""
    import wandb

    return wandb.Settings(
        mode=settings.mode,
        root_dir=os.environ["WANDB_DIR"],
        program="epsilonflow",  # otherwise the path of the file that runs is sent
        console="off",
        silent=True,
        save_code=False,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        host="",
        init_timeout=_SECONDS_TO_BEGIN,
        login_timeout=_SECONDS_TO_BEGIN,
        finish_timeout=seconds_to_finish,
        finish_timeout_raises=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )


def group_of(run_id: str, population: str, *, is_on_blocks: bool) -> str:
    """The group of a run: all runs on a population's blocks, which are a retraining's life, or the run by itself."""
    return f"{population} by blocks" if is_on_blocks else run_id


def artifact_name(name: str) -> str:
    """The name of an artifact, with characters that W&B does not accept replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)

"""Everything that is sent to Weights & Biases, by sessions.

Here is what is never sent, how long a session may take, and how failures are handled.

W&B keeps its own files below the checkout, unless the environment names another folder. The files of a queued
experiment are below the checkout in which it was queued, since it runs in a copy that DVC deletes.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.config import first_checkout
from tasks.config.params import Tracking

if TYPE_CHECKING:
    import wandb


_SECONDS_TO_BEGIN, _SECONDS_TO_FINISH = 30, 120
_FOLDER = ".wandb"
_PLACES = {
    "WANDB_DIR": ".",
    "WANDB_DATA_DIR": "data",
    "WANDB_CACHE_DIR": "cache",
    "WANDB_CONFIG_DIR": "config",
    "WANDB_ARTIFACT_DIR": "artifacts",
}
_QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
_log = logging.getLogger(__name__)


@contextmanager
def places(root: Path) -> Iterator[None]:
    """Within the block, keep W&B's files below `root`, unless the environment names other folders, which W&B reads."""
    folder = first_checkout(root) / _FOLDER
    missing = {name: str(folder / below) for name, below in _PLACES.items() if not os.environ.get(name)}
    before = {name: os.environ.get(name) for name in (*missing, *_QUIET)}
    for place in missing.values():
        Path(place).mkdir(parents=True, exist_ok=True)
    os.environ.update(missing | _QUIET)
    try:
        yield
    finally:
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
        with places(root), chdir(first_checkout(root)):
            log()
    except Exception as error:
        _log.warning("W&B did not log %s, which is complete without it: %s", what, reason(error))
        return False
    return True


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
    config: Mapping[str, Any],
    run_id: str | None = None,
    seconds_to_finish: int = _SECONDS_TO_FINISH,
) -> Iterator["wandb.Run"]:
    """A run at W&B within the block. run_id: id of a run that is resumed if W&B has it; online only.

    Raises what W&B raises, and TimeoutError if sending takes longer than `seconds_to_finish` at the end.
    """
    import wandb  # here, since the import takes most of a second and may not be needed

    with wandb.init(
        project=settings.project,
        entity=settings.entity,
        id=None if run_id is None else re.sub(r"[^A-Za-z0-9_-]", "-", run_id),
        resume="allow" if run_id is not None and settings.mode == "online" else None,
        group=group,
        job_type=job_type,
        name=name,
        config=dict(config),
        settings=_settings(settings, seconds_to_finish),
    ) as logged:
        yield logged


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


def artifact_name(name: str) -> str:
    """The name of an artifact, with characters that W&B does not accept replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def add_file(artifact: "wandb.Artifact", path: Path) -> None:
    """Add a copy of a file.

    W&B also sends the path of the copy. The path is made relative to the current folder, which is the checkout, so that
    it reveals nothing about the machine. Therefore `wandb sync` has to run in the checkout, too.
    """
    entry = artifact.add_file(str(path), skip_cache=True)
    entry.local_path = os.path.relpath(str(entry.local_path))

"""Where W&B keeps its own files: below the checkout, unless the environment names another place.

Those of a queued experiment are below the checkout that it was queued in: it runs in a copy that DVC deletes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.environment import first_checkout

_FOLDER = ".wandb"
_PLACES = {
    "WANDB_DIR": ".",
    "WANDB_DATA_DIR": "data",
    "WANDB_CACHE_DIR": "cache",
    "WANDB_CONFIG_DIR": "config",
    "WANDB_ARTIFACT_DIR": "artifacts",
}
_QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


@contextmanager
def places(root: Path) -> Iterator[None]:
    """W&B's files below `root` unless the environment names another place, which W&B reads by itself."""
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

"""What a process of the soak does as one of a checkout: its environment, and a stage as whoever started it sees it."""

import io
import os
import sys
import tempfile
import traceback
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path

from algorithms.privacy.ledger import database
from tasks.runs.dvc_stages import REFUSED, StageFailedError, StageRefusedError
from tasks.runs.stage_main import main_of
from tests.soak.kills_place import Place
from tests.soak.year import _inside, _prepare

_PATIENCE_SECONDS = 1.0


def enter(place: Place) -> None:
    """Make this process, a fork, one of a place."""
    os.setsid()
    os.environ |= {"EPSILONFLOW_HOME": str(place.home), "EPSILONFLOW_LEDGER_URL": place.url}
    os.environ |= {"TMPDIR": str(place.home.parent), "WANDB_API_KEY": "0" * 40}
    tempfile.tempdir = None
    database.PATIENCE_SECONDS = _PATIENCE_SECONDS


def run_stage(name: str, root: Path) -> None:
    """A stage as its process would be seen by whoever reads the last line that it wrote."""
    said = io.StringIO()
    try:
        with _inside(root), redirect_stderr(said):
            main_of((lambda: _prepare(root)) if name == "prepare" else import_module(f"tasks.{name}").main)
    except SystemExit:
        line = next(line for line in said.getvalue().splitlines() if line.startswith(REFUSED))
        raise StageRefusedError(line.removeprefix(REFUSED)) from None
    except Exception as error:
        sys.stderr.write(traceback.format_exc())
        raise StageFailedError(f"{name} exited with 1: {error!r}") from error

"""The stages of a checkout in one process, which imports what they need once; that they are processes has own tests.

`python -m tests.support.one_process MODULE ...` runs a module, such as `flows.cli.main`, whose stages stay in its
process; after `--but STAGE`, all of them but one.
"""

import contextlib
import io
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Self

import pytest
from dvc.cli import main as dvc_main
from dvc.logger import LoggerHandler
from dvc.stage import run as dvc_run
from dvc.stage.exceptions import StageCmdFailedError

from tasks.runs import dvc_process, dvc_stages
from tasks.runs.stage_main import for_the_owner_only, main_of
from tests.support.checkout import Checkout
from tests.support.wandb_service import end_service

PROCESS = dvc_stages.DvcProcess


def _command(_shell: str, command: str, *, cwd: str, env: dict[str, str], **_: object) -> None:
    """What DVC starts for a stage: `python -m tasks.STAGE`."""
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(cwd):
        for name in env.keys() - os.environ.keys():
            patch.setenv(name, env[name])
        status = _status(lambda: main_of(import_module(command.split()[-1]).main))
    if status:
        raise StageCmdFailedError(command, status)


def _request(what: str, root: Path, say: dvc_stages.Say) -> tuple[int, list[str]]:
    """In place of a process that lets DVC run a stage: what it writes is said at its end."""
    written = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(root),
        contextlib.redirect_stdout(written),
        contextlib.redirect_stderr(written),
    ):
        for handler in (*logging.getLogger("dvc").handlers, *logging.getLogger().handlers):
            if handler.__class__ in (logging.StreamHandler, LoggerHandler):
                patch.setattr(handler, "stream", written)  # else it is what it was at the first stage
        if not any(handler.__class__ is logging.StreamHandler for handler in logging.getLogger().handlers):
            patch.setattr(logging.getLogger(), "handlers", [*logging.getLogger().handlers, _lines(written)])
        with for_the_owner_only():
            status = dvc_process.answer(*([] if what == dvc_stages.STATUS_REQUEST else [what]))
    lines = [line for line in written.getvalue().splitlines() if line]
    for line in lines:
        say(line)
    return status, lines


class DvcHere(dvc_stages.DvcProcess):
    """DVC in this process for all stages but one, which has a process as usual."""

    def __init__(self, root: Path, *, say: dvc_stages.Say, but: str | None) -> None:
        super().__init__(root, say=say)
        self._where, self._but = (root, say), but

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None: ...

    def request(self, what: str) -> tuple[int, list[str]]:
        if what != self._but:
            return _request(what, *self._where)
        with PROCESS(self._where[0], say=self._where[1]) as process:
            return process.request(what)


def _lines(written: io.StringIO) -> logging.Handler:
    """What `basicConfig` adds in a process of its own, which has no handlers of pytest yet."""
    handler = logging.StreamHandler(written)
    handler.addFilter(lambda record: record.name.partition(".")[0] in ("algorithms", "data", "tasks"))
    return handler


def dvc_here(*arguments: str) -> tuple[int, str]:
    """The exit status of a dvc command, and what it writes to stdout."""
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(written):
        stay_in_this_process(patch)
        for handler in logging.getLogger("dvc").handlers:
            patch.setattr(handler, "stream", written)
        return dvc_main(list(arguments)), written.getvalue()


def finish(checkout: Checkout, folder: Path) -> None:
    """Run `epsilonflow run` in a checkout, in this process; its output goes to `stdout` and `stderr` in `folder`."""
    from flows.cli.main import app

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(checkout.root),
        (folder / "stdout").open("w") as said,
        (folder / "stderr").open("w") as told,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(told),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # of wandb_workspaces
        for name, value in checkout.where()["env"].items():
            patch.setenv(name, value)
        stay_in_this_process(patch)
        status = _status(lambda: app(["run"]))
        end_service()
    assert status == 0, (folder / "stderr").read_text()


def _status(main: Callable[[], object]) -> int:
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def stay_in_this_process(patch: pytest.MonkeyPatch, *, but: str | None = None) -> None:
    """Until `patch` is undone, no stage is a process of its own, with at most one exception."""
    patch.setattr(dvc_run, "_run", _command)
    patch.setattr(dvc_stages, "DvcProcess", partial(DvcHere, but=but))


if __name__ == "__main__":
    apart = sys.argv[2] if sys.argv[1] == "--but" else None
    stay_in_this_process(pytest.MonkeyPatch(), but=apart)
    sys.argv = sys.argv[3 if apart else 1 :]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

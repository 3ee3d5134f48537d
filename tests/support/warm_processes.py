"""Processes of their own that import nothing anew: forks of a server that has the libraries already.

A new interpreter takes seconds to import them. A fork of the test's own process would share its patches, the locks of
its threads and its autograd threads, which PyTorch refuses to fork; the server has none of these.
"""

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.pool import Pool
from pathlib import Path

PROJECT = Path(__file__).parents[2]
_IMPORTED = [
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "tasks.train",
    "tests.support.bench",
]


@cache
def warm_context() -> ForkServerContext:
    """The server is started once, in the project, so that no copy of it is imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with contextlib.chdir(PROJECT):
        forkserver.ensure_running()
    return context


def warm_pool(count: int) -> Pool:
    """Processes that stay for several calls, with this process's variables of now."""
    return warm_context().Pool(count, _set_variables, (dict(os.environ),))


class ModuleProcess:
    """`python -m MODULE ARGUMENTS` in a folder, as far as tests need `subprocess.Popen`.

    It is silent, or writes to a file, and then leads a session of its own.
    """

    def __init__(
        self, module: str, *arguments: str, cwd: Path, env: Mapping[str, str], output: Path | None = None
    ) -> None:
        given = (module, list(arguments), cwd, dict(env), output)
        self._process = warm_context().Process(target=_run_module, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises TimeoutExpired if it still runs after so many seconds."""
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def kill(self) -> None:
        self._process.kill()


def _set_variables(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _run_module(
    module: str, arguments: list[str], cwd: Path, env: Mapping[str, str], output: Path | None
) -> None:
    _set_variables(env)
    os.chdir(cwd)
    if output is not None:
        os.setsid()
    words = os.open(output or os.devnull, os.O_RDWR | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(words, stream)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

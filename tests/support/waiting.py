"""Waiting for what comes to hold, however long a busy machine takes for it."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil

HANG_SECONDS = 300
"""After which what a test waits for is taken to hang, however busy the machine is."""


def before_long(holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold before it is taken to hang."""
    deadline = time.monotonic() + HANG_SECONDS
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds()


def processes_in(folder: Path) -> list[psutil.Process]:
    """The processes at work whose current folder this is."""
    return [
        process
        for process in psutil.process_iter(["cwd", "status"])
        if process.info["cwd"] == str(folder) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]

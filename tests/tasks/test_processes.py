"""What every process of the pipeline sets, whichever step it takes."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.checkout import PROJECT


@pytest.mark.parametrize(("own", "spins"), [(None, False), ("ACTIVE", True)])
def test_threads_of_pytorch_sleep_between_operations_unless_told_otherwise(
    own: str | None, spins: bool
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(PROJECT)}
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    (openmp,) = Path(torch.origin).parent.glob("lib/libgomp*")  # which says what it reads, whoever loads it
    if own is not None:
        environment["OMP_WAIT_POLICY"] = own
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import tasks, ctypes; ctypes.CDLL({str(openmp)!r})"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    [count] = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert (int(count) > 0) == spins


def test_no_plugins_of_pydantic_are_looked_for() -> None:
    code = """import importlib.metadata, tasks
importlib.metadata.distributions = lambda: print("looked")
import data.card"""
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr

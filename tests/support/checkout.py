"""A checkout of this project in a folder of its own: a git repository with DVC, set to a few steps on digits."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from algorithms.privacy.ledger import Balance, Ledger
from tasks.config.overrides import ParamOverrides, params_edit
from tests.support.waiting import HANG_SECONDS

PROJECT = Path(__file__).parents[2]
_FILES = ("dvc.yaml", "params.yaml", "prefect.yaml", "pyproject.toml", ".dvcignore", ".gitignore")
CODE = ("algorithms", "data", "epsilonflow", "flows", "tasks")
_FEW_STEPS = ParamOverrides(
    dataset="digits",
    algorithm="dp_sgd",
    epsilon=3.0,
    delta=1e-5,
    seed=0,
    settings={"algorithm.steps": 5, "algorithm.expected_batch_size": 64, "algorithm.update.momentum": 0.0},
)


@dataclass(frozen=True)
class Checkout:
    """root: the checkout. home: where its ledger and runs are."""

    root: Path
    home: Path

    def command(self, module: str, *arguments: str) -> list[str]:
        """A Python module as a command."""
        return [sys.executable, "-m", module, *arguments]

    def in_one_process(self, *arguments: str) -> list[str]:
        """A Python module as a command that starts no process for a stage, or after `--but STAGE` for one alone."""
        return self.command("tests.support.one_process", *arguments)

    def where(self, **variables: str) -> dict[str, Any]:
        """What subprocess needs to run a command here."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": str(PROJECT), "EPSILONFLOW_HOME": str(self.home)}
        own |= {"PYTHONDONTWRITEBYTECODE": ""}
        return {"cwd": self.root, "env": os.environ | own | variables}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command here; what it wrote is kept, its exit status is the caller's to check."""
        return subprocess.run(command, **self.where(), capture_output=True, text=True, timeout=HANG_SECONDS)

    def dvc(self, *arguments: str) -> str:
        """What a dvc command that must succeed writes to stdout; it and the stages start no process."""
        from tests.support.one_process import dvc_here

        with contextlib.chdir(self.root), pytest.MonkeyPatch.context() as patch:
            for name, value in self.where()["env"].items():
                patch.setenv(name, value)
            status, said = dvc_here(*arguments)
        assert status == 0, said
        return said

    def artifact(self, name: str) -> Any:
        """A JSON file of the run."""
        return json.loads((self.root / "artifacts" / name).read_text())

    def set(self, old: str, new: str) -> None:
        """Change one place of params.yaml by hand."""
        path = self.root / "params.yaml"
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))

    @property
    def ledger(self) -> Ledger:
        """The ledger that runs here charge."""
        return Ledger.open(f"sqlite:///{self.home}/ledger.sqlite")

    @property
    def balance(self) -> Balance:
        """Where the population `digits` stands."""
        return self.ledger.balance("digits")


def new_checkout(root: Path, home: Path) -> Checkout:
    """A fresh checkout of the project as it is now, committed to git."""
    unwanted = shutil.ignore_patterns("__pycache__", "raw", "prepared")
    for name in CODE:
        shutil.copytree(PROJECT / name, root / name, ignore=unwanted)
    (root / ".dvc").mkdir()
    for name in (*_FILES, ".dvc/config", ".dvc/.gitignore"):
        shutil.copyfile(PROJECT / name, root / name)
    checkout = Checkout(root, home)
    params_edit(root, _FEW_STEPS).write()
    identity = ["-c", "init.defaultBranch=main"]
    for command in (
        ["git", *identity, "init", "--quiet"],
        ["git", "config", "user.name", "Test"],
        ["git", "config", "user.email", "test@example.org"],
        ["git", "add", "--all"],
        ["git", "commit", "--quiet", "--message", "the project"],
        ["git", "repack", "-a", "-d", "--quiet"],  # few files, as it is copied often
    ):
        subprocess.run(command, cwd=root, check=True)
    return checkout

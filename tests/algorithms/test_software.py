"""What ran: the commit, and whether the code differed from it."""

import subprocess
from pathlib import Path

import pytest

from algorithms.core.receipt import software


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    done = subprocess.run(
        ["git", "-C", str(root), *who, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("params.yaml", "dvc.lock", "code.py"):
        (tmp_path / name).write_text("one\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "start")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "dirty"), [("params.yaml", False), ("dvc.lock", False), ("code.py", True), ("new.py", True)]
)
def test_changes_of_the_code_are_told_from_those_of_a_run(checkout: Path, name: str, dirty: bool) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert software(checkout)["git"] == {"commit": commit, "dirty": False}
    (checkout / name).write_text("two\n")
    assert software(checkout)["git"] == {"commit": commit, "dirty": dirty}


def test_code_without_version_control_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert software(tmp_path)["git"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert software(tmp_path)["git"] is None

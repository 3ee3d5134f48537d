"""What ran: the commit, whether the code differed from it, and a digest of the code that decides a result."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from algorithms.core.software import DECIDES, Software, software_facts, software_here
from algorithms.privacy.documents import Commit
from tests.support.checkout import PROJECT

HERE = software_here()


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
    assert software_facts(checkout, HERE).git == Commit(commit=commit, dirty=False)
    (checkout / name).write_text("two\n")
    assert software_facts(checkout, HERE).git == Commit(commit=commit, dirty=dirty)


def test_code_without_version_control_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert software_facts(tmp_path, HERE).git is None
    git(tmp_path, "init", "--quiet")  # without a commit
    assert software_facts(tmp_path, HERE).git is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert software_facts(tmp_path, HERE).git is None


def copied(place: Path) -> Path:
    """What decides a result, as a wheel installs it: the same files at another place and time."""
    for name in DECIDES:
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (PROJECT / name).is_file():
            shutil.copyfile(PROJECT / name, target)
        else:
            shutil.copytree(PROJECT / name, target, copy_function=shutil.copyfile)
    return place


def digest_in(place: Path) -> str | None:
    """The digest of the code in a folder, by the copy of the module that is there."""
    spec = importlib.util.spec_from_file_location("copied_software", place / "algorithms/core/software.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    code: str | None = module.software_here().code
    return code


def test_a_copy_of_the_source_has_its_digest_whatever_lies_beside_it(tmp_path: Path) -> None:
    place = copied(tmp_path)
    (place / "algorithms/core/__pycache__").mkdir(exist_ok=True)
    (place / "algorithms/core/__pycache__/training.cpython-399.pyc").write_bytes(b"other")
    (place / "algorithms/gradients/README.md").write_text("For people.")
    (place / "algorithms/privacy/ledger").mkdir()
    (place / "algorithms/privacy/ledger/store.py").write_text("")
    os.utime(place / "algorithms/core/training.py", (0, 0))
    assert digest_in(place) == HERE.code


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "\n# another line\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda place: edit(place / "algorithms/core/minibatch.py"),
        lambda place: edit(place / "algorithms/methods/dp_sgd.py"),
        lambda place: edit(place / "algorithms/gradients/rules/layers.py"),
        lambda place: edit(place / "algorithms/privacy/mechanisms/sampling.py"),
        lambda place: (place / "algorithms/models/objectives.py").rename(place / "algorithms/models/o.py"),
        lambda place: (place / "algorithms/privacy/barrier/recipes.yaml").write_text("a: 1"),
    ],
)
def test_other_source_has_another_digest(tmp_path: Path, change: Callable[[Path], object]) -> None:
    place = copied(tmp_path)
    change(place)
    assert digest_in(place) != HERE.code


def test_the_digest_covers_all_code_that_the_train_stage_depends_on() -> None:
    stages = YAML(typ="safe", pure=True).load(PROJECT / "dvc.yaml")["stages"]
    code = {path for path in stages["train"]["deps"] if path.startswith("algorithms")}
    assert code - set(DECIDES) == set()


def test_another_torch_is_other_software_and_another_version_number_is_not() -> None:
    packages = {"torch": "2.13.0", "numpy": "2.4.0"}
    one = Software("0.2.0", "5" * 64, packages)
    assert Software("0.2.1", "5" * 64, packages).digest == one.digest
    assert Software("0.2.0", "5" * 64, packages | {"torch": "2.14.0"}).digest != one.digest
    assert Software("0.2.0", "6" * 64, packages).digest != one.digest
    assert str(one) == "epsilonflow 0.2.0 (code 55555555, torch 2.13.0, numpy 2.4.0)"

"""The face `epsilonflow`: the names of `algorithms`, and a sentence where a file is found in place of a package."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import algorithms
import epsilonflow
from epsilonflow import DPSGD, fit
from tests.support.checkout import PROJECT


def test_its_names_are_those_of_the_algorithms() -> None:
    assert (fit, DPSGD) == (algorithms.fit, algorithms.DPSGD)
    assert dir(epsilonflow) == dir(algorithms)
    with pytest.raises(AttributeError):
        _ = epsilonflow.fitt


def test_the_command_is_installed_by_the_face() -> None:
    scripts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"epsilonflow": "epsilonflow.__main__:main"}


def run_beside(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python where modules of a folder come before ours."""
    own = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(PROJECT)])}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["algorithms.py", "data/__init__.py", "tasks.py", "flows.py"])
def test_the_command_names_a_file_that_hides_a_package(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("1 / 0\n")
    done = run_beside(tmp_path, "-m", "epsilonflow", "--version")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    package = name.removesuffix("/__init__.py").removesuffix(".py")
    assert done.stderr.startswith(
        f"refused: {tmp_path / name} is found in place of epsilonflow's package {package!r}"
    )


@pytest.mark.parametrize(
    ("module", "hidden"), [("flows.cli.main", "tasks.py"), ("tasks.calibrate", "data/__init__.py")]
)
def test_so_do_its_module_and_a_stage(tmp_path: Path, module: str, hidden: str) -> None:
    (tmp_path / hidden).parent.mkdir(exist_ok=True)
    (tmp_path / hidden).touch()
    done = run_beside(tmp_path, "-m", module)
    assert done.returncode != 0 and f"{tmp_path / hidden} is found in place of" in done.stderr


def test_a_notebook_is_told_which_file_hides_the_algorithms(tmp_path: Path) -> None:
    (tmp_path / "algorithms.py").write_text("1 / 0\n")
    done = run_beside(tmp_path, "-c", "from epsilonflow import fit")
    assert f"ImportError: {tmp_path}/algorithms.py is found in place of" in done.stderr


def test_a_notebook_beside_other_modules_of_these_names_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The algorithms import none of ours, which a contract holds, so that it matters what is looked for alone."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("tasks", "data", "flows"):
        (tmp_path / f"{name}.py").write_text("1 / 0\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
        assert epsilonflow.find_shadowing(name) is not None
    assert epsilonflow.fit is fit


def test_prefect_loads_a_projects_flow_beside_modules_of_these_names(tmp_path: Path) -> None:
    """It puts the current folder first on the path, and on that of the processes which a flow starts."""
    (tmp_path / "data").mkdir()
    for name in ("tasks.py", "data/__init__.py", "flows.py", "algorithms.py"):
        (tmp_path / name).write_text("1 / 0\n")
    code = (  # where a flow starts DVC, which starts stages
        "import subprocess, sys; from prefect.flows import load_flow_from_entrypoint as load;"
        " print(load('epsilonflow.deployed.pipeline').name); import tasks.prepare;"
        " subprocess.run([sys.executable, '-P', '-c', 'import algorithms, data, flows, tasks'], check=True)"
    )
    own = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PROJECT)])}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "pipeline\n"), done.stderr

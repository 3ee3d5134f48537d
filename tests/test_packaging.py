"""What is installed: every dependency is declared and locked, and the data files go with the packages."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.checkout import PROJECT

IMPORT_NAMES = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "dp_accounting": "dp-accounting",
    "ruamel": "ruamel-yaml",
    "yaml": "pyyaml",
}


def project() -> dict[str, list[str]]:
    described = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    return {"": described["dependencies"], **described["optional-dependencies"]}


def locked() -> dict[str, Version]:
    lines = re.findall(
        r"^([a-z0-9-]+)==(\S+)$", (PROJECT / "constraints.txt").read_text(), flags=re.MULTILINE
    )
    return {name: Version(version) for name, version in lines}


@pytest.mark.parametrize("extra", project())
def test_every_requirement_is_locked_to_a_version_it_allows(extra: str) -> None:
    for text in project()[extra]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name != "epsilonflow":
            assert locked()[name] in requirement.specifier, text


def test_every_package_that_is_imported_is_required() -> None:
    graph = grimp.build_graph("flows", "tasks", "algorithms", "data", include_external_packages=True)
    ours = {"flows", "tasks", "algorithms", "data"}
    outside = {module for module in graph.modules if graph.is_module_squashed(module)} - ours
    required = {canonicalize_name(Requirement(text).name) for text in project()[""]}
    imported = {canonicalize_name(IMPORT_NAMES.get(module, module)) for module in outside}
    assert {name for name in imported if name.replace("-", "_") not in sys.stdlib_module_names} <= required


def test_files_that_the_code_reads_are_package_data() -> None:
    described = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    declared = {
        path
        for package, globs in described.items()
        for glob in globs
        for path in (PROJECT / package).glob(glob)
    }
    there = {
        path
        for package in ("flows", "tasks", "algorithms", "data")
        for path in (PROJECT / package).rglob("*.*")
        if path.suffix in (".yaml", ".j2", ".json", ".css") and not {"raw", "prepared"} & set(path.parts)
    }
    assert there == declared


def test_make_run_says_first_what_will_happen_and_how_long_it_takes(tmp_path: Path) -> None:
    """Before anything is installed, with a Python that is none."""
    command = ["make", "run", "PYTHON=false", f"VENV={tmp_path / 'fresh'}"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    first = done.stdout.splitlines()[0]
    assert done.returncode != 0 and "about 2 GB" in first and "about a minute" in first
    assert not (tmp_path / "fresh").exists()

"""What is installed: every dependency is declared and locked, and the data files go with the packages."""

import os
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
from setuptools import find_packages

from tests.support.checkout import PROJECT

PACKAGES = ("epsilonflow", "flows", "tasks", "algorithms", "data")
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


def test_the_image_installs_what_is_locked_by_its_content() -> None:
    lines = [line for line in (PROJECT / "requirements.lock").read_text().splitlines() if line[0] != "#"]
    hashed = dict[str, Version]()
    for line in lines:
        name, version = re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line).groups()  # type: ignore[union-attr]
        hashed[name] = Version(version)
    builds = tomllib.loads((PROJECT / "pyproject.toml").read_text())["build-system"]["requires"]
    for text in (*project()[""], *project()["postgres"], *builds):
        requirement = Requirement(text)
        assert hashed[canonicalize_name(requirement.name)] in requirement.specifier, text
    assert {name for name in hashed.keys() & locked().keys() if hashed[name] != locked()[name]} == set()


def test_an_extra_that_is_named_exists_and_says_where_epsilonflow_is_from() -> None:
    """As in pip install 'epsilonflow[NAME]', which is true where epsilonflow is installed already."""
    places = [*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md"), *(PROJECT / "presets").glob("*.yaml")]
    places += [path for package in PACKAGES for path in (PROJECT / package).rglob("*.py")]
    named = {name for path in places for name in re.findall(r"epsilonflow\[(\w+)\]", path.read_text())}
    assert named and named <= project().keys()
    for page in ("README.md", "docs/tutorials/first-run.md"):
        assert "epsilonflow is on no package index" in (PROJECT / page).read_text(), page


def test_the_wheel_has_the_product_alone() -> None:
    setuptools = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = find_packages(str(PROJECT), include=setuptools["packages"]["find"]["include"])
    assert {name.partition(".")[0] for name in found} == set(PACKAGES)


def test_every_package_that_is_imported_is_required() -> None:
    graph = grimp.build_graph(*PACKAGES, include_external_packages=True)
    outside = {module for module in graph.modules if graph.is_module_squashed(module)} - set(PACKAGES)
    required = {canonicalize_name(Requirement(text).name) for text in project()[""]}
    of_packages = outside - sys.stdlib_module_names
    assert {canonicalize_name(IMPORT_NAMES.get(module, module)) for module in of_packages} <= required


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
        for package in PACKAGES
        for path in (PROJECT / package).rglob("*.*")
        if (path.suffix in (".yaml", ".j2", ".json", ".css") and not {"raw", "prepared"} & set(path.parts))
        or (path.suffix == ".py" and not (path.parent / "__init__.py").exists())
    }
    assert there == declared


def test_make_run_says_first_what_will_happen_and_how_long_it_takes(tmp_path: Path) -> None:
    """Before anything is installed, with a Python that is none."""
    command = ["make", "run", "PYTHON=false", f"VENV={tmp_path / 'fresh'}"]
    alone = {
        name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")
    }
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, env=alone)
    first = done.stdout.splitlines()[0]
    assert done.returncode != 0 and "about 2 GB" in first and "about a minute" in first
    assert not (tmp_path / "fresh").exists()

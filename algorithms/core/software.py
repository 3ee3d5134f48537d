"""The software that decides the result of a run: a version, a digest of the source, and the packages that compute.

Other software could draw another sample, or compute another gradient, under the noise that a run has drawn already.
The difference of two such answers has no noise. So a run that has drawn noise is only resumed by the same software, and
its receipt and card name the software that trained it.
"""

import hashlib
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from algorithms.privacy.documents import Commit, SoftwareFacts

DECIDES = (
    "algorithms/__init__.py",
    "algorithms/cell_histograms.py",
    "algorithms/core",
    "algorithms/evaluation",
    "algorithms/extension.py",
    "algorithms/features.py",
    "algorithms/gradients",
    "algorithms/histogram_columns.py",
    "algorithms/methods",
    "algorithms/model_facts.py",
    "algorithms/models",
    "algorithms/privacy/accounting",
    "algorithms/privacy/barrier",
    "algorithms/privacy/documents.py",
    "algorithms/privacy/mechanisms",
    "algorithms/lazy_imports.py",
    "algorithms/stated_names.py",
    "algorithms/target_scale.py",
)
"""The files that decide the result of any training; the pipeline adds its own."""
COMPUTES = ("torch", "numpy", "scipy", "timm", "torchvision", "transformers", "peft")
"""Packages whose version can change a number, as far as they are installed."""
PACKAGES = ("dp-accounting", *COMPUTES, "cryptography", "pandas", "scikit-learn")
SOFTWARE_NOTE, DIGEST_NOTE = "software", "software_sha256"
_SOURCE = (".py", ".yaml")
_SHOWN_DIGITS = 8
_STATED_ELSEWHERE = (":!dvc.lock", ":!params.yaml")
_COMMIT = "# branch.oid "


@dataclass(frozen=True)
class Software:
    """What trains, or what trained.

    version: of epsilonflow. code: SHA-256 of the source that decides a result; None where it was not recorded.
    packages: versions by name, of those in `COMPUTES`.
    """

    version: str | None
    code: str | None
    packages: Mapping[str, str]

    @classmethod
    def from_facts(cls, facts: SoftwareFacts) -> Self:
        """The software in a receipt or on a card, which may be too old to state it."""
        packages = {name: text for name, text in facts.packages.items() if name in COMPUTES}
        return cls(facts.version, facts.code, packages)

    @property
    def digest(self) -> str | None:
        """The same for software that gives the same results, whatever its version is called; None if unrecorded."""
        if self.code is None:
            return None
        return hashlib.sha256(repr((self.code, sorted(self.packages.items()))).encode()).hexdigest()

    @property
    def notes(self) -> dict[str, str]:
        """The notes about the software that begins a run, in its folder and in its reservation."""
        return {SOFTWARE_NOTE: str(self), DIGEST_NOTE: self.digest or ""}

    def __str__(self) -> str:
        """For people.

        Example:
            >>> print(Software("0.2.0", "5f0c3a9be1d27746", {"torch": "2.13.0"}))
            epsilonflow 0.2.0 (code 5f0c3a9b, torch 2.13.0)
        """
        if self.code is None:
            return "software that was not recorded"
        packages = "".join(f", {name} {text}" for name, text in self.packages.items())
        return f"epsilonflow {self.version} (code {self.code[:_SHOWN_DIGITS]}{packages})"


def software_here(more: Sequence[str] = ()) -> Software:
    """The software of this process. more: files and folders that decide the result beside `DECIDES`."""
    return Software(version("epsilonflow"), source_of((*DECIDES, *more)), _versions(COMPUTES))


@cache
def source_of(names: tuple[str, ...]) -> str:
    """SHA-256 of the source in files and folders, named from the folder of the packages.

    Of content and names only, so that a wheel and a checkout of one version have the same. It is computed once in a
    process, which goes on with the code that it has imported.
    """
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for path in _source_files(root, names):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _source_files(root: Path, names: Sequence[str]) -> Iterator[Path]:
    for name in sorted(names):
        path = root / name
        if path.is_file():
            yield path
        else:
            yield from sorted(file for file in path.rglob("*") if file.suffix in _SOURCE and file.is_file())


def software_facts(root: Path, software: Software) -> SoftwareFacts:
    """What a receipt states: the software, Python, and the commit of the checkout at `root`, as of now, in training.

    git is None outside a checkout. dirty: files differ from the commit, except for dvc.lock, which DVC writes during a
    run, and params.yaml, whose content is in the plan.
    """
    return SoftwareFacts(
        recorded="training",
        version=software.version,
        code=software.code,
        python=platform.python_version(),
        packages=_versions(PACKAGES),
        git=_commit_of(root),
    )


def _commit_of(root: Path) -> Commit | None:
    """The commit, by one process of Git; None without one, as in a new repository."""
    lines = _output(root, "status", "--porcelain=v2", "--branch", "--", ".", *_STATED_ELSEWHERE).splitlines()
    commits = [line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)]
    if commits in ([], ["(initial)"]):
        return None
    return Commit(commit=commits[0], dirty=any(not line.startswith("# ") for line in lines))


def _versions(names: Sequence[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    return {name: number for name in names if (number := _version_of(name)) is not None}


@cache
def _version_of(name: str) -> str | None:
    """The version of a package, read once in a process, which goes on with what it has imported."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _output(root: Path, *arguments: str) -> str:
    """What a command of Git writes; nothing where it fails or there is no Git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout

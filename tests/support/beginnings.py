"""States of folders that several tests of a module begin from: the first that asks makes one, the others copy it."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Beginnings:
    """What was made so far. folder: with a folder for each state."""

    folder: Path

    def begin(self, state: str, folders: Mapping[str, Path], make: Callable[[], object]) -> None:
        """Bring the folders into a state, which `make` brings them into from what they are."""
        kept = self.folder / state
        if not kept.exists():
            make()
            for name, folder in folders.items():
                shutil.copytree(folder, kept / name, symlinks=True)
            return
        for name, folder in folders.items():
            for path in folder.iterdir():  # the folder itself stays, as it may be the current one
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            shutil.copytree(kept / name, folder, symlinks=True, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def beginnings(tmp_path_factory: pytest.TempPathFactory) -> Beginnings:
    return Beginnings(tmp_path_factory.mktemp("beginnings"))

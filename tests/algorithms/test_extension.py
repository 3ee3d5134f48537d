"""The digest of code of the user's own covers all that its imports reach in the user's own code, and nothing else."""

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from algorithms.extension import source_digest

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a file of a project that is on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        # one of this name may have been imported in another test
        monkeypatch.delitem(sys.modules, Path(name).parts[0].removesuffix(".py"), raising=False)
        importlib.invalidate_caches()

    yield write


def test_a_module_without_imports_of_ones_own_keeps_its_digest(write: Write) -> None:
    """That of earlier versions, so that nobody pays twice for a run."""
    text = "import json\nimport numpy as np\nfrom algorithms import DPSGD\nfrom data import card\nWIDTH = 3\n"
    write("mine.py", text)
    expected = hashlib.sha256(f"mine.py {len(text)} {text}".encode()).hexdigest()
    assert source_digest("mine:read") == expected


def test_a_package_without_imports_from_elsewhere_keeps_its_digest(write: Write) -> None:
    files = {"__init__.py": "", "a/b.py": "from own_nets import sizes\n", "a-b.py": "1\n", "sizes.py": "2\n"}
    for name, text in files.items():
        write(f"own_nets/{name}", text)
    in_order = ("__init__.py", "a/b.py", "a-b.py", "sizes.py")
    whole = "".join(f"{name} {len(files[name])} {files[name]}" for name in in_order)
    assert source_digest("own_nets.a.b:net") == hashlib.sha256(whole.encode()).hexdigest()


@pytest.mark.parametrize(
    "importing",
    [
        "import sides\n",
        "import sides as other\n",
        "from sides import SIDE\n",
        "def read(settings):\n    from sides import SIDE\n",
        "try:\n    import sides\nexcept ImportError:\n    pass\n",
        "from importlib import import_module\nsides = import_module('sides')\n",
        "import importlib\nsides = importlib.import_module('sides')\n",
        "sides = __import__('sides')\n",
        "import between\n",
        "import packed.inner\n",
        "from spaced import inner\n",
    ],
)
@pytest.mark.parametrize("name", ["mine.py", "mine/__init__.py"])
def test_an_edit_in_what_is_imported_is_another_digest(write: Write, importing: str, name: str) -> None:
    write(name, importing)
    write("sides.py", "SIDE = 1\n")
    write("between.py", "import sides\nimport mine\n")  # in a circle
    write("packed/__init__.py", "")
    write("packed/inner.py", "from packed.other import SIDE\n")
    write("packed/other.py", "import sides\n")
    write("spaced/inner.py", "import sides\n")  # without an __init__.py
    before = source_digest("mine:read")
    write("sides.py", "SIDE = 2\n")
    assert source_digest("mine:read") != before


def test_what_is_not_imported_installed_or_ours_is_not_in_the_digest(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("mine.py", "import bought, missing_here, __main__, algorithms, data, tasks\n")
    write("site-packages/bought.py", "A = 1\n")
    write("aside.py", "A = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    before = source_digest("mine:read")
    write("site-packages/bought.py", "A = 2\n")
    write("aside.py", "A = 2\n")
    assert source_digest("mine:read") == before


def test_the_place_and_the_time_of_the_files_are_not_in_the_digest(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for place in ("here", "there"):
        write(f"{place}/mine.py", "import sides\n")
        write(f"{place}/sides.py", "SIDE = 1\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / place))
            digests.add(source_digest("mine:read"))
    assert len(digests) == 1

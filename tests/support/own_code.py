"""The digest of code of one's own that tests name, without all other files of `tests`, the package that it lies in."""

from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from algorithms import extension

_FILES = {
    *("support/own_models.py", "support/tiny_encoder.py", "support/tiny_reader.py"),
    "algorithms/encoders/test_independence.py",
}
_SOURCE_FILES = extension._source_files


def _source_files(spec: ModuleSpec) -> dict[str, Path]:
    files = _SOURCE_FILES(spec)
    return {name: files[name] for name in _FILES} if spec.name == "tests" else files


@pytest.fixture(autouse=True, scope="module")
def own_code_alone() -> Iterator[None]:
    """For a module to import: the imports of all tests take seconds to find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "_source_files", _source_files)
        yield

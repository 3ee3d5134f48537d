"""Figures of a tiny package whose answers are counted by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import code_figures
from tests.support.checkout import PROJECT

MODULE = '''"""A module
of two lines."""

from typing import Any

LIMIT = 3  # a comment beside code
"""An attribute's docstring."""


# A comment of its own.
def _counted(document: dict[str, Any]) -> dict[str, int]:  # noqa: A001
    """A docstring."""
    return {"# no comment": len(document)}


class Table:
    """A table."""

    def fill(self, a, b, c, d, e, f, g, h, *, i):
        return a

    async def build(self, a, b, c, d, e, f, g, h, /, *, i, j):
        """Many parameters."""

    def seed(self):
        return "dict[str, Any]"
'''
LONG = "def long():\n" + '    """Docstring."""\n\n' + "    # comment\n" + "    a = 1\n" * 60
TEST = """
from tests.test_other import helper
from tests.support.parts import part


def test_it(monkeypatch):
    monkeypatch.setattr(part, "_private", 1)
    monkeypatch.setattr("package.part._private", 1)
    monkeypatch.setattr(part, "public", "_private")
    monkeypatch.setattr(part, "__version__", 1)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "data/one.py": MODULE,
        "data/readers/long.py": LONG,
        "tests/test_one.py": TEST,
        "CHANGELOG.md": "# Changes\n\n- one\n- two\n  more\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_figures_are_those_counted_by_hand(checkout: Path) -> None:
    assert code_figures.figures(checkout) == {
        "product lines": "90",
        "test lines": "10",
        "functions": "5",
        "code lines of a function, median / 90 % / most": "2 / 61 / 61",
        "functions over 60 code lines": "1",
        "functions with over 9 parameters": "1",
        "functions named by a bare participle": "1",
        "places of dict[str, Any] and Mapping[str, Any]": "1",
        "lines with a comment": "3.3%",  # 3 of 90
        "lines of docstrings": "7.8%",  # 7 of 90
        "changelog": "0.0 kB, 2 entries",
        "imports between test modules": "1",
        "private names that tests patch": "2",
    }


def test_what_is_printed_has_a_column_for_each_checkout(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code_figures.main([str(checkout), str(checkout / "tests" / ".."), "--names"])
    printed = capsys.readouterr().out
    assert "| product lines | 90 | 90 |\n" in printed and "hops" not in printed
    assert "| data | 26 in 1 | 26 in 1 |\n" in printed and "| data/readers | 64 in 1 | 64 in 1 |\n" in printed
    assert "  data/one.py:11 _counted\n" in printed and "  data/one.py:22 build\n" in printed


def test_stacks_lead_from_the_barrier_to_a_layer_or_to_a_sum_of_rows() -> None:
    script = [sys.executable, "-m", "benchmarks.gradient_stack"]
    stacks = json.loads(subprocess.run(script, cwd=PROJECT, check=True, capture_output=True).stdout)
    for stack in stacks.values():
        assert stack[0] == ["algorithms/privacy/barrier/barrier.py", "gradient"]
        assert ["algorithms/gradients/engine.py", "clipped_sum"] in stack
    recorded, replayed = stacks["recorded"], stacks["replayed"]
    assert recorded[-1] == ["algorithms/gradients/rules/layers.py", "linear"]
    assert replayed[-1] == ["algorithms/gradients/parameter_gradients.py", "add_rows"]
    assert len(recorded) <= 12 and len(replayed) <= 9

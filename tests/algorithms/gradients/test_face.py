"""The manual of the package: its example runs as it is printed, its names are there, and it needs PyTorch alone."""

import ast
import pickle
import re
import sys
from pathlib import Path

import pytest

from algorithms import gradients

PACKAGE = Path(gradients.__file__).parent
MANUAL = (PACKAGE / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", MANUAL, flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    total, is_bounded, bias, refusal = capsys.readouterr().out.splitlines()
    assert total == f"[{3 * 4 + 4 + 4 * 2 + 2}] torch.float64"
    assert (is_bounded, bias) == ("True", "torch.Size([2])")
    assert refusal == "refused: the layer 1 (BatchNorm1d) mixes records"


def test_every_name_of_the_face_is_there_and_has_a_docstring() -> None:
    assert all(getattr(gradients, name).__doc__ for name in gradients.__all__)


def test_the_package_imports_pytorch_and_nothing_else() -> None:
    imported = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module))
    others = {name for name in imported if name.partition(".")[0] not in {*sys.stdlib_module_names, "torch"}}
    assert others and all(f"{name}.".startswith(f"{gradients.__name__}.") for name in others)


def test_the_loss_of_a_process_can_be_told_to_another() -> None:
    lost = gradients.ProcessLostError()
    assert str(pickle.loads(pickle.dumps(lost))) == str(lost)

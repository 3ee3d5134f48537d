"""The manual of the package: its example runs as it is printed, and its names are there."""

import math
import re
from pathlib import Path

import pytest

from algorithms.privacy import ledger

MANUAL = (Path(ledger.__file__).parent / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gaussian noise of multiplier 8 has the Rényi divergence 8 / (2 * 64) of order 8 (Mironov 2017)."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", MANUAL, flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    spent, left, refusal, copied = capsys.readouterr().out.splitlines()
    order, delta, divergence = 8, 1e-5, 8 / (2 * 64)
    # From Rényi to epsilon: Canonne, Kamath and Steinke 2020, Proposition 12.
    added = math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1)
    assert spent == f"spent {divergence + added:.3g} of 3"
    assert left == f"{math.floor((3 - added) / divergence) - 1} more such runs"
    assert refusal.startswith("refused: ") and "patients" in refusal
    assert copied == "3 rows copied"


def test_every_name_of_the_face_is_there_and_no_other() -> None:
    assert all(getattr(ledger, name) is not None for name in ledger.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Place'"):
        _ = ledger.Place  # type: ignore[attr-defined]

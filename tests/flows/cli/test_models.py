"""Commands for models and cards where DVC has the results."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("card verify", "privacy_card.json"),
        ("card show", "privacy_card.json"),
        ("report --for authority", "privacy_card.json"),
        ("export --to onnx", "model.safetensors"),
        ("release out", "model.safetensors"),
        ("predict new.csv", "model.safetensors"),
        ("track", "privacy_card.json"),
    ],
)
def test_in_a_clone_a_result_that_was_not_pulled_is_refused_with_what_to_type(
    command: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (".dvc", "artifacts/plots"):  # which a pull that failed leaves
        (tmp_path / name).mkdir(parents=True)
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).touch()
    lock = "".join(f"    - path: artifacts/{name}\n" for name in ("model.safetensors", "privacy_card.json"))
    (tmp_path / "dvc.lock").write_text(f"stages:\n  report:\n    outs:\n{lock}")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 2
    assert f"{tmp_path}/artifacts/{file} is not here" in done.output and "`dvc pull`" in done.output
    (tmp_path / "dvc.lock").unlink()
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 2 and "dvc pull" not in done.output

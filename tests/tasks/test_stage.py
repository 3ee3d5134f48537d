"""A stage as a process: refusals in one sentence, other errors as they are, and only in a checkout."""

from pathlib import Path

import pytest

from algorithms.errors import BudgetRefusedError, LedgerBrokenError
from algorithms.models import ModelRefusedError
from data import DataRefusedError
from tasks.config.params import ParamsRefusedError
from tasks.runs.stages import StageFailedError, checkout, main_of, reproduce


@pytest.mark.parametrize(
    "kind", [DataRefusedError, BudgetRefusedError, LedgerBrokenError, ModelRefusedError, ParamsRefusedError]
)
def test_a_refusal_is_one_sentence_and_status_2(
    kind: type[ValueError], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise kind("no,\n  not so; do this.")

    with pytest.raises(SystemExit) as ended:
        main_of(refuse)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "refused: no, not so; do this.\n"


def test_another_error_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        main_of(lambda: int("x"))


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParamsRefusedError, match=r"no params\.yaml"):
        checkout()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("I/O error: No space left on device")]
)
def test_a_full_disk_is_a_sentence_whichever_library_met_it(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill() -> None:
        raise error

    with pytest.raises(SystemExit):
        main_of(fill)
    assert capsys.readouterr().err.startswith("refused: the disk is full; make room where")


def test_a_checkout_without_git_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "params.yaml").write_text("")
    with pytest.raises(StageFailedError, match="not a git repository, which DVC needs; run `git init`"):
        reproduce("prepare", root=tmp_path, say=lambda _: None)

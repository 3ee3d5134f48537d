"""A private run that is done is not done again unless a person agrees."""

import io
from pathlib import Path

import pytest

from algorithms.privacy.errors import Refused
from algorithms.privacy.noise import secure_generator
from tasks import again, runs

INPUTS = "a" * 64


def begun(home: Path) -> str:
    with runs.claimed(home, inputs=INPUTS, fresh=secure_generator(), is_forfeited=lambda _: False) as run:
        return run.run_id


def finished(home: Path) -> str:
    """A run whose result a later stage has taken."""
    with runs.claimed(home, inputs=INPUTS, fresh=secure_generator(), is_forfeited=lambda _: False) as run:
        written = run.folder / "written"
        written.mkdir()
        run.finish(written)
    runs.discard(home, run.run_id)
    return run.run_id


def test_a_new_run_and_an_interrupted_one_are_not_asked_about(tmp_path: Path) -> None:
    again.ask(tmp_path, INPUTS, cost="epsilon 1")
    finished(tmp_path)
    begun(tmp_path)
    again.ask(tmp_path, INPUTS, cost="epsilon 1")


def test_a_finished_run_is_refused_without_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = finished(tmp_path)
    with pytest.raises(Refused, match=f"{run_id} did just this.* epsilon 1 again"):
        again.ask(tmp_path, INPUTS, cost="epsilon 1")
    again.ask(tmp_path, "b" * 64, cost="epsilon 1")
    monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
    again.ask(tmp_path, INPUTS, cost="epsilon 1")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "agrees"), [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False)]
)
def test_a_person_at_a_terminal_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    agrees: bool,
) -> None:
    finished(tmp_path)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    if agrees:
        again.ask(tmp_path, INPUTS, cost="epsilon 1")
    else:
        with pytest.raises(Refused):
            again.ask(tmp_path, INPUTS, cost="epsilon 1")
    assert "spends epsilon 1 again. Spend it? [y/N]" in capsys.readouterr().err

"""Where the ledger is: outside every checkout, by an absolute path."""

from pathlib import Path

import pytest

from algorithms.errors import RefusedError
from algorithms.privacy.ledger import Ledger
from tasks import config as environment
from tests.support.refusals import refused


def test_the_ledger_lies_in_the_home(own_home: Path) -> None:
    assert environment.ledger_url(None) == f"sqlite:///{own_home}/ledger.sqlite"


def test_a_home_that_no_url_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SQLite would open the file `really`."""
    monkeypatch.setenv("EPSILONFLOW_HOME", f"{tmp_path}/really?/home")
    with pytest.raises(RefusedError, match="question mark"):
        environment.ledger_url(None)
    with pytest.raises(RefusedError, match="sqlite:///PATH"):
        Ledger.open(f"sqlite:///{tmp_path}/really?/home/ledger.sqlite")
    assert not (tmp_path / "really").exists()


def test_the_home_is_absolute_and_outside_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPSILONFLOW_HOME")
    assert environment.home().is_absolute()
    assert Path.cwd() not in environment.home().parents


def test_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPSILONFLOW_LEDGER_URL", "sqlite:////srv/one.sqlite")
    assert environment.ledger_url("sqlite:////srv/other.sqlite") == "sqlite:////srv/one.sqlite"


@pytest.mark.parametrize("url", ["sqlite:///ledger.sqlite", "sqlite+pysqlite:///data/ledger.sqlite"])
def test_a_relative_ledger_is_refused_since_each_copy_would_have_its_own_budget(url: str) -> None:
    with pytest.raises(RefusedError, match="relative path"):
        environment.ledger_url(url)


@pytest.mark.parametrize("place", [".epsilonflow", "../budget"])
def test_a_relative_home_is_refused_for_the_same_reason(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("EPSILONFLOW_HOME", place)
    with pytest.raises(RefusedError, match="relative path"):
        environment.home()


def test_no_budget_is_kept_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / ".dvc").mkdir(parents=True)
    monkeypatch.setenv("EPSILONFLOW_HOME", str(tmp_path / "project" / "deep" / "home"))
    with pytest.raises(RefusedError, match="EPSILONFLOW_HOME lies in the checkout"):
        environment.home()
    with pytest.raises(RefusedError, match=r"the ledger .* lies in the checkout"):
        environment.ledger_url(f"sqlite:///{tmp_path}/project/ledger.sqlite?timeout=3")
    assert (
        environment.ledger_url(f"sqlite:///{tmp_path}/ledger.sqlite") == f"sqlite:///{tmp_path}/ledger.sqlite"
    )


@pytest.mark.parametrize("text", ["", "~/data"])
def test_the_mirror_is_a_folder_or_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("EPSILONFLOW_DATA_MIRROR", text)
    assert environment.data_mirror() == (Path.home() / "data" if text else None)


def test_what_counts_is_where_a_path_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / ".dvc").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "project")
    monkeypatch.setenv("EPSILONFLOW_HOME", f"{tmp_path}/project/../home")
    assert environment.ledger_url(None) == f"sqlite:///{tmp_path}/project/../home/ledger.sqlite"
    monkeypatch.setenv("EPSILONFLOW_HOME", f"{tmp_path}/link/home")
    with pytest.raises(RefusedError, match=f"EPSILONFLOW_HOME lies in the checkout {tmp_path}/project"):
        environment.home()
    with pytest.raises(RefusedError, match=r"the ledger .* lies in the checkout"):
        environment.ledger_url(f"sqlite:///{tmp_path}/link/ledger.sqlite")


@pytest.mark.parametrize(
    ("home", "said"),
    [("file", "cannot be made one"), ("file/deeper", "cannot be made one"), (None, "unknown user")],
)
def test_a_home_that_cannot_be_is_refused(
    home: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EPSILONFLOW_HOME", "~no-such-user/x" if home is None else str(tmp_path / home))
    with refused(f"{said}.*; .*[.]$"):
        environment.home()
    monkeypatch.setenv("EPSILONFLOW_HOME", str(tmp_path / "new/home"))
    assert environment.home() == tmp_path / "new/home"
    assert not (tmp_path / "new").exists()


def test_a_mirror_of_an_unknown_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPSILONFLOW_DATA_MIRROR", "~no-such-user/x")
    with pytest.raises(RefusedError, match="EPSILONFLOW_DATA_MIRROR is ~no-such-user/x, of an unknown user"):
        environment.data_mirror()

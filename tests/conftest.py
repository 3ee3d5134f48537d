"""No test sees the budget, the runs, the servers or the accounts of the person who runs it."""

import gc
import hashlib
import logging
import random
import secrets
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path

import absl.logging
import pytest
import typer.main
import typer.testing
from filelock import FileLock
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from tests.support.beginnings import beginnings
from tests.support.checkout import Checkout, new_checkout
from tests.support.empty_ledgers import empty_ledgers_made_once
from tests.support.wandb_service import end_service
from tests.support.workers import FilesTogether

__all__ = ["beginnings"]

_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
}
_FOLDERS = ("EPSILONFLOW_HOME", "PREFECT_HOME", "DVC_SITE_CACHE_DIR", "DVC_GLOBAL_CONFIG_DIR", "MPLCONFIGDIR")
_PERSONAL = (
    "EPSILONFLOW_LEDGER_URL",
    "PREFECT_API_URL",
    "PREFECT_API_KEY",
    "PREFECT_PROFILE",
    "WANDB_API_KEY",
    "WANDB_MODE",
)
_CHECKOUT = ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR")

_SEED = 20_260_101
"""One that no test gives itself, so that no input is drawn equal to a parameter."""


settings.register_profile("other examples", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same examples", settings.get_profile("other examples"), derandomize=True)
settings.load_profile("same examples")  # of hypothesis; `make soak` draws others
# Else it holds the file that pytest captures to, and closes it where Prefect sets up logging between two captures.
absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)
gc.disable()  # while modules by the thousand are imported, whose objects stay


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesTogether | None:
    return FilesTogether(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """What the imports made is not looked through again at each collection of garbage."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prefect, DVC and W&B keep their files apart, offline; W&B in the checkout of each test.

    Processes that tests start compile the sources once.
    """
    folder = tmp_path_factory.mktemp("settings")
    with pytest.MonkeyPatch.context() as patch:
        for name in (*_PERSONAL, *_CHECKOUT, "PYTHONDONTWRITEBYTECODE"):
            patch.delenv(name, raising=False)
        for name, value in (_SETTINGS | {name: str(folder / name.lower()) for name in _FOLDERS}).items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def log_to_pytest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Prefect's handler, which an earlier test of this process may have added: it writes times."""
    root = logging.getLogger()
    kept = [handler for handler in root.handlers if type(handler).__module__.startswith("_pytest.")]
    monkeypatch.setattr(root, "handlers", kept)


@pytest.fixture(scope="session", autouse=True)
def empty_ledgers() -> Iterator[None]:
    """Most tests have a ledger of their own."""
    with empty_ledgers_made_once():
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_once() -> Iterator[None]:
    """Else all commands are made anew for each that a test invokes, most of which take no longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Tests that give no seed draw the same numbers, whichever files this process has run before."""
    random.seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(_SEED)


@pytest.fixture
def same_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of noise and of owners that are the same in every run: what they decide by chance, they decide once.

    For tests of how good a model or a statistic is, that fresh noise or other held-out people would fail now and then.
    Names of temporary files are drawn, too, as often as time wants, so that each length has a sequence of its own.
    """
    numbers: defaultdict[int | None, Iterator[int]] = defaultdict(count)

    def token_bytes(size: int | None = None) -> bytes:
        return hashlib.shake_256(f"secret {size} {next(numbers[size])}".encode()).digest(size or 32)

    monkeypatch.setattr(secrets, "token_bytes", token_bytes)


@pytest.fixture
def brief_inspections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are inspected as large ones are, in a third of the time, so that their passes are compared once.

    For tests of what is done with a model that is taken; what is taken, and how, is tested with the engine.
    """
    from algorithms.gradients import engine
    from algorithms.gradients.model_inspection import InspectionLimits

    brief = partial(InspectionLimits, full_operations=0)
    monkeypatch.setattr(engine, "InspectionLimits", brief)


@pytest.fixture(autouse=True, scope="module")
def no_service_left() -> Iterator[None]:
    """W&B's service ends with the tests that used it in this process, and no process of others looks for it."""
    yield
    end_service()


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of new folders; where pytest numbers them it lists all earlier ones each time, thousands at the end."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in count())


@pytest.fixture(autouse=True)
def own_home(homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger and run folders of the test's own."""
    home = next(homes)
    home.mkdir(mode=0o700)
    monkeypatch.setenv("EPSILONFLOW_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Checkout:
    """A checkout in which `epsilonflow run` has run a few steps on digits; not to be changed: see `checkout`.

    Command and stages shared this process. What they wrote is beside it, in `stdout` and `stderr`. The first process of
    this test run that asks makes it for all.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "finished"
    with FileLock(folder.with_suffix(".lock")):
        checkout = Checkout(folder / "checkout", folder / "home")
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # where another process has failed
            new_checkout(checkout.root, checkout.home)
            from tests.support.one_process import finish  # which imports DVC

            finish(checkout, folder)
            (folder / "done").touch()
    return checkout


@pytest.fixture
def checkout(finished_once: Checkout, tmp_path: Path, own_home: Path) -> Checkout:
    """A copy of the finished checkout, with its ledger, for a test to change."""
    copy = Checkout(tmp_path / "checkout", own_home)
    shutil.copytree(finished_once.root, copy.root, symlinks=True)
    shutil.copytree(finished_once.home, copy.home, dirs_exist_ok=True)
    return copy

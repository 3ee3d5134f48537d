"""A real run that is stopped while it trains: what is said, what is left at work, and that the run goes on.

The stage that is stopped is processes, as a user's is; those before it are not, since each takes seconds to start.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkout import Checkout
from tests.support.soak import soak_but
from tests.support.waiting import HANG_SECONDS, before_long, processes_in
from tests.support.warm_processes import ModuleProcess


def _to_group(number: signal.Signals) -> Callable[[int], None]:
    return lambda pid: os.killpg(pid, number)


def _to_process(number: signal.Signals) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, number)


def _run_until(stop: Callable[[int], None], checkout: Checkout, written: Path) -> tuple[int, str]:
    """The exit status of a command that is stopped while it trains, and what it wrote."""
    before = _checkpoints(checkout)
    run = ("--but", "train", "flows.cli.main", "run")
    command = ModuleProcess("tests.support.one_process", *run, **checkout.where(), output=written)
    try:
        assert before_long(lambda: _checkpoints(checkout) != before), written.read_text()
        stop(command.pid)
        return command.wait(HANG_SECONDS), written.read_text()
    finally:
        if command.poll() is None:
            os.killpg(command.pid, signal.SIGKILL)
            command.wait()


def _checkpoints(checkout: Checkout) -> dict[Path, bytes]:
    """What trainings under way have kept to go on from."""
    return {path: path.read_bytes() for path in checkout.home.glob("runs/*/state.safetensors")}


STOPS = {"group": (signal.SIGINT, _to_group), "process": (signal.SIGTERM, _to_process)}


@pytest.mark.parametrize("order", soak_but([["process"]], [["process"], ["group", "process"]]))
def test_a_run_that_is_stopped_says_what_stays_and_goes_on(
    order: list[str], checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a scheduler, which tells the command alone; and, before that, as by Ctrl-C, which tells all processes."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)  # so without Prefect
    checkout.set("steps: 5", "steps: 100000")
    checkout.set("checkpoint_seconds: 10.0", "checkpoint_seconds: 0.1")
    ids = set[str]()
    for told in order:
        number, stop = STOPS[told]
        status, text = _run_until(stop(number), checkout, tmp_path / told)
        assert before_long(lambda: not processes_in(checkout.root))
        (run_id,) = _open(checkout)
        sentence = f"stopped: run {run_id} stays reserved; the same command resumes it at no extra cost."
        assert (status, text.splitlines()[-1]) == (128 + number, sentence)
        assert "Traceback" not in text
        ids.add(run_id)
    assert len(ids) == 1


def _open(checkout: Checkout) -> list[str]:
    """The runs that are reserved and not settled."""
    ledger = checkout.ledger
    reserved = [row.run_id for row in ledger.history("digits") if row.kind == "reserve"]
    return [run for run in reserved if run is not None and ledger.status(run) == "open"]

"""What an audit leaves: the file, the page, and the link from the report of a run."""

import json
import multiprocessing
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from algorithms.errors import RefusedError
from tasks import audit_processes, auditing
from tasks.auditing import AuditRequest, auditable, checked_requests, run_audit
from tasks.config.params import ParamsRefusedError
from tasks.reporting import AuditSummary, environment, newest_audit
from tests.support.browser import seen
from tests.support.refusals import refused_as
from tests.support.waiting import HANG_SECONDS, before_long


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are copies of this process, where an audit's own take seconds to import what they need."""
    monkeypatch.setattr(audit_processes, "get_context", lambda _: multiprocessing.get_context("fork"))


@pytest.mark.usefixtures("forked")
def test_runs_side_by_side_are_in_the_order_of_their_seeds() -> None:
    seeds = list(range(20))
    np.testing.assert_array_equal(audit_processes.run_in_processes(np.sqrt, seeds, workers=2), np.sqrt(seeds))


def test_an_audit_that_is_killed_leaves_no_process() -> None:
    work = """import signal
from tasks.audit_processes import run_in_processes
run_in_processes(signal.sigwait, [10, 12], workers=2)"""
    audit = psutil.Popen([sys.executable, "-c", work])
    assert before_long(lambda: len(audit.children()) == 3)  # one keeps count of what processes share
    left = audit.children()
    audit.kill()
    audit.wait()
    assert psutil.wait_procs(left, timeout=HANG_SECONDS)[1] == []


def _killed(_seeds: list[int]) -> Any:
    signal.raise_signal(signal.SIGKILL)


@pytest.mark.usefixtures("forked")
def test_a_worker_that_is_killed_ends_the_audit_in_a_sentence() -> None:
    with refused_as("process_killed"):
        audit_processes.run_in_processes(_killed, [0], workers=1)


def test_an_audit_is_kept_as_json_and_as_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pickled(share: Any, seeds: list[int], *, workers: int) -> Any:
        """In place of two processes, each of which imports all that a run needs."""
        assert workers == 2
        return pickle.loads(pickle.dumps(share))(seeds)

    monkeypatch.setattr(auditing, "run_in_processes", pickled)
    assert newest_audit("majority", tmp_path) is None
    summary, page = run_audit(AuditRequest("majority", {}, runs=12, canaries=8), tmp_path, workers=2)
    document = json.loads((tmp_path / "audits" / "majority" / "audit.json").read_text())
    assert document.items() >= summary.model_dump(by_alias=True).items()
    assert not summary.is_violated
    assert document["mechanisms"][0]["name"] == "Gaussian"
    assert page == tmp_path / "audits" / "majority" / "audit.html"
    assert "nothing speaks against the claim" in page.read_text()
    for width, dark in ((390, True), (1200, False)):
        found = seen(page.read_text(), tmp_path, width=width, dark=dark)
        assert found.texts > 20
        assert (found.wide, found.faint, found.small, found.complaints) == (0, [], [], [])
    newest = newest_audit("majority", tmp_path)
    assert newest == summary
    assert (tmp_path / "artifacts" / newest.page).resolve() == page.resolve()
    template = environment().get_template("audit.html.j2")
    for caught, words in ((1.0, "noticed practically always<"), (0.9, "a chance of at least 90.0%<")):
        changed = document | {"power": document["power"] | {"caught": caught}, "curve": []}
        shown = " ".join(template.render(audit=changed, picture=None).split())
        assert words in shown
    check = document["checks"][0] | {"chance": 0.301}
    shown = template.render(audit=changed | {"checks": [check]}, picture=None)
    assert (
        "<td>30.1%</td>" in shown and f"Audit of {document['at'][:10]} {document['at'][11:16]} UTC" in shown
    )


def test_more_than_claimed_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for found, is_violated, words in (
        (0.5, False, "claimed 0.1, found 0.5; nothing speaks against the claim, since chance explains"),
        (0.5, True, "found 0.5; the claim is VIOLATED (page)"),
        (0.05, False, "found 0.05; nothing speaks against the claim (page)"),
    ):
        result = AuditSummary(
            method="sgd_adv", at="2026-01-01", claimed=0.1, epsilon_lower_bound=found, is_violated=is_violated
        )
        monkeypatch.setattr(auditing, "run_audit", lambda *_, result=result, **__: (result, Path("page")))
        violated, said = auditing.audit_one(AuditRequest("sgd_adv", {}), tmp_path, workers=1)
        assert violated is is_violated and words in said


def test_what_cannot_be_audited_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with refused_as("bad_keys", ParamsRefusedError, keys=("algorithm.nothing",)):
        run_audit(AuditRequest("majority", {"nothing": 1}), tmp_path)
    batch = "its smallest game has 9 synthetic records; set expected_batch_size to at most 9"
    for size in (10, 64):
        with pytest.raises(RefusedError, match=batch):
            checked_requests("dp_sgd", {"expected_batch_size": size}, 4.0, 1e-5, 4, 8, 0)
    with refused_as("name_unknown", what="algorithm", name="unknown"):
        run_audit(AuditRequest("unknown", {}), tmp_path)


def test_all_methods_with_a_claim_are_audited() -> None:
    assert {"dp_sgd", "dpis", "majority"} <= set(auditable())
    assert not {"lbfgs", "non_private"} & set(auditable())

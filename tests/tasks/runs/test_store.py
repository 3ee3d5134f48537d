"""A private run that is done is not done again unless a person agrees; what it paid for is had again for nothing."""

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from ruamel.yaml import YAML

from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Ledger
from algorithms.privacy.mechanisms.noise import secure_generator
from tasks import calibrate, train
from tasks.runs import store
from tests.support.refusals import refused_as
from tests.support.terminal import Terminal
from tests.support.visits import CARD, OUTS, Visits
from tests.support.visits import unprepared_visits as unprepared_visits
from tests.support.visits import visits as visits
from tests.support.waiting import HANG_SECONDS

DIGEST = "0123456789abcdef"
EVENT = {"event": {"type": "GaussianDpEvent", "noise_multiplier": 5.0}, "count": 1}
COST = Budget(1.0, 1e-6)
NAMES = ("model.safetensors", "trace.parquet", "receipt.json")


def ledger_of(home: Path) -> Ledger:
    ledger = Ledger.open(f"sqlite:///{home}/ledger.sqlite")
    ledger.declare("painters", Budget(10.0, 1e-3), public=False)
    return ledger


def claim(
    home: Path, digest: str = DIGEST, *, retraining: str | None = None
) -> AbstractContextManager[store.RunAttempt]:
    ledger = ledger_of(home)
    asked = SimpleNamespace(
        plan=SimpleNamespace(target=SimpleNamespace(budget=Budget(1.0, 1e-5))),
        info=SimpleNamespace(population="painters"),
        retraining=retraining,
    )
    return store.acquire_run(
        home,
        digest,
        ledger.status,
        checkout=home,
        new_generator=secure_generator(),
        notes={},
        on_repeat=lambda run_id, has_result: train._confirm_repeat(
            cast(train.Job, asked), run_id, has_result, ledger
        ),
    )


def reserved(home: Path, *, retraining: str | None = None) -> str:
    """A run that was killed after it was charged."""
    with claim(home, retraining=retraining) as run:
        notes = {"retraining": retraining} if retraining else {}
        ledger_of(home).reserve(run.run_id, "painters", COST, events=[EVENT], notes=notes)
        return run.run_id


def finished(home: Path, *, retraining: str | None = None, keeps: bool = True) -> str:
    """A run whose result a later stage has taken up."""
    run_id = reserved(home, retraining=retraining)
    with claim(home, retraining=retraining) as run:
        assert run.run_id == run_id
        written = run.make_result_folder()
        contents = {name: f"{name} of {run_id}".encode() for name in NAMES[:2]} | {"plan.json": b"{}"}
        for name in NAMES[:2]:
            (written / name).write_bytes(contents[name])
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        (written / "receipt.json").write_text(json.dumps({"run_id": run_id, "sha256": sums}))
        ledger_of(home).settle(run_id, COST, events=[EVENT])
        run.finish(written)
    store.mark_used(home, run_id, keeps=keeps)
    return run_id


def ask(home: Path, digest: str = DIGEST, *, retraining: str | None = None) -> tuple[str, bool]:
    """Which run is had, and whether for nothing, since its result is there."""
    with claim(home, digest, retraining=retraining) as run:
        return run.run_id, run.result is not None


def test_an_interrupted_run_goes_on_and_is_not_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = reserved(tmp_path)
    key = (tmp_path / "runs" / run_id / "generator.key").read_bytes()
    monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
    with claim(tmp_path) as run:
        assert (run.run_id, run.result, run.generator().key) == (run_id, None, key)


def test_a_finished_run_is_handed_out_for_nothing_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, artifacts = finished(tmp_path), tmp_path / "artifacts"
    artifacts.mkdir()
    (artifacts / "plan.json").write_text("{}")
    for _ in range(2):
        with claim(tmp_path) as run:
            assert run.result is not None
            store.hand_out(run.result, artifacts, NAMES, facts={})
        assert (artifacts / NAMES[0]).read_text() == f"model.safetensors of {run_id}"
        assert json.loads((artifacts / "receipt.json").read_text())["run_id"] == run_id
        (artifacts / NAMES[0]).unlink()
    assert ask(tmp_path, "f" * 16) == (f"{'f' * 16}-1", False)
    monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
    assert ask(tmp_path) == (f"{DIGEST}-2", False)


def test_unused_result_is_reused_even_where_spending_again_is_agreed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed between the result and its copy is started again by the same command."""
    with monkeypatch.context() as patch:
        patch.setattr(store, "mark_used", lambda *_, **__: None)
        run_id = finished(tmp_path)
    monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
    assert ask(tmp_path) == (run_id, True)


def test_a_kept_result_is_for_its_owner_alone_and_no_secret_is_beside_it(tmp_path: Path) -> None:
    run_id = finished(tmp_path)
    assert (tmp_path / "runs").stat().st_mode & 0o077 == 0
    folder = tmp_path / "runs" / run_id
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "result", "run.json", "taken"]
    assert folder.stat().st_mode & 0o077 == 0


def test_a_result_is_on_the_disk_before_the_secrets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = set[str](), os.fsync

    def noted(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def forget(run: store.RunAttempt) -> None:
        written = run.folder / "written"
        assert synced >= {str(path) for path in (*(written / name for name in NAMES), written, run.folder)}
        forgotten.append(run.run_id)

    forgotten: list[str] = []
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(store.RunAttempt, "forget_secrets", forget)
    assert finished(tmp_path) == forgotten[0]


def damaged(folder: Path) -> None:
    (folder / "result/trace.parquet").write_bytes(b"")


def deleted(folder: Path) -> None:
    shutil.rmtree(folder)


def of_another_run(folder: Path) -> None:
    path = folder / "result/receipt.json"
    path.write_text(path.read_text().replace(folder.name, f"{DIGEST}-7"))


def without_its_key(folder: Path) -> None:
    (folder / "generator.key").unlink()


@pytest.mark.parametrize(
    ("begin", "change"),
    [
        (finished, damaged),
        (finished, deleted),
        (finished, of_another_run),
        (reserved, deleted),
        (reserved, without_its_key),
    ],
)
def test_what_was_charged_and_is_lost_is_refused_without_a_person(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begin: Callable[[Path], str],
    change: Callable[[Path], None],
) -> None:
    run_id = begin(tmp_path)
    change(tmp_path / "runs" / run_id)
    with refused_as("consent_needed", what=f"run {run_id}", epsilon=1.0):
        ask(tmp_path)
    monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
    assert ask(tmp_path) == (f"{DIGEST}-2", False)


def finished_and_reserved(home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A finished attempt, and a second one that is paid for, too, and has no result."""
    first = finished(home)
    with monkeypatch.context() as patch:
        patch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
        return first, reserved(home)


def test_an_earlier_attempt_is_handed_out_where_the_last_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = finished_and_reserved(tmp_path, monkeypatch)
    assert (first, second) == (f"{DIGEST}-1", f"{DIGEST}-2")
    deleted(tmp_path / "runs" / second)
    assert ask(tmp_path) == (first, True)


def test_the_result_of_a_run_on_public_records_is_not_kept(tmp_path: Path) -> None:
    finished(tmp_path, keeps=False)
    assert list((tmp_path / "runs").iterdir()) == []


def test_second_caller_waits_for_a_running_run_and_gets_its_result_free(tmp_path: Path) -> None:
    finish, said, had = store.RunAttempt.finish, threading.Event(), list[tuple[str, bool]]()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.set()

    other = threading.Thread(target=lambda: had.append(ask(tmp_path)))

    def meanwhile(run: store.RunAttempt, written: Path) -> Path:
        other.start()
        assert said.wait(HANG_SECONDS)
        return finish(run, written)

    log = logging.getLogger(store.__name__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "level", logging.INFO)
        patch.setattr(log, "handlers", [Told()])
        patch.setattr(store.RunAttempt, "finish", meanwhile)
        run_id = finished(tmp_path)
        other.join(HANG_SECONDS)
    assert had == [(run_id, True)]


def test_a_forfeited_run_is_deleted_and_an_earlier_one_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = finished_and_reserved(tmp_path, monkeypatch)
    assert ask(tmp_path) == (second, False)
    ledger_of(tmp_path).forfeit(second)
    assert ask(tmp_path) == (first, True)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [first]


def test_a_retraining_takes_no_result_of_another(tmp_path: Path) -> None:
    run_id = finished(tmp_path, retraining="visits 2026-W01")
    assert ask(tmp_path, retraining="visits 2026-W01") == (run_id, True)
    assert ask(tmp_path) == (run_id, True)
    with refused_as("consent_needed"):
        ask(tmp_path, retraining="visits 2026-W02")


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
    run_id = finished(tmp_path)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert ask(tmp_path) == ((f"{DIGEST}-2", False) if agrees else (run_id, True))
    assert "spends another epsilon=1. Continue? [y/N]" in capsys.readouterr().err


def test_a_model_that_was_evaluated_and_lost_is_brought_back_with_its_receipt(visits: Visits) -> None:
    first, model = visits.train(), visits.place.model()
    visits.finish()
    assert visits.train() == first
    assert (visits.place.model(), visits.runs) == (model, 1)
    assert all((visits.place.root / "artifacts" / name).is_file() for name in OUTS)
    visits.finish()


def test_who_agrees_to_spend_again_gets_another_model(
    visits: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = visits.train()
    visits.finish()
    monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
    second = visits.train()
    assert (second != first, visits.runs) == (True, 2)
    visits.finish()
    monkeypatch.delenv("EPSILONFLOW_SPEND_AGAIN")
    assert (visits.train(), visits.runs) == (second, 2)


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_the_order_in_which_a_plan_is_written_asks_for_no_other_run(
    visits: Visits, is_evaluated: bool
) -> None:
    """Another algorithm and then the old one again leaves the settings of params.yaml in another order."""
    first, model = visits.train(), visits.place.model()
    if is_evaluated:
        visits.finish()
    path = visits.place.root / "artifacts/plan.json"
    plan = json.loads(path.read_text())
    path.write_text(json.dumps({key: plan[key] for key in reversed(plan)}))
    assert visits.train() == first
    assert (visits.place.model(), visits.runs) == (model, 1)
    visits.finish()


def test_a_plan_is_written_in_one_order(visits: Visits) -> None:
    path = visits.place.root / "params.yaml"
    document = YAML(typ="safe", pure=True).load(path)
    plans = set()
    for order in (1, -1):
        document["algorithm"] = dict(list(document["algorithm"].items())[::order])
        yaml = YAML()
        yaml.dump(document, path)
        calibrate.main()
        plans.add((visits.place.root / "artifacts/plan.json").read_bytes())
    assert len(plans) == 1


def test_words_and_cap_of_the_card_ask_for_no_other_run(visits: Visits) -> None:
    first, model, card = visits.train(), visits.place.model(), CARD
    visits.finish()
    words = {f"{name}: ": f"{name}: Corrected " for name in ("source", "licence", "citation", "title")}
    for old, new in (words | {"{epsilon: 10.0": "{epsilon: 12.0"}).items():
        assert card.count(old) == 1
        card = card.replace(old, new)
    visits.prepare(card)
    assert visits.train() == first
    assert (visits.place.model(), visits.runs) == (model, 1)
    visits.finish()
    assert "Corrected" in (visits.place.root / "artifacts/report.html").read_text()


def test_a_result_that_was_not_evaluated_yet_is_handed_out_under_the_corrected_words(visits: Visits) -> None:
    first = visits.train()
    visits.prepare(CARD.replace("title: ", "title: Corrected "))
    assert (visits.train(), visits.runs) == (first, 1)
    visits.finish()


def test_another_record_asks_for_another_run(visits: Visits) -> None:
    first = visits.digest()
    visits.prepare(CARD.replace("salt: ", "salt: another "))
    assert visits.digest() != first


def test_another_unit_has_the_same_run_whose_result_is_not_reused(visits: Visits) -> None:
    first, digest = visits.train(), visits.digest()
    visits.finish()
    visits.prepare(CARD.replace("unit: ", "unit: a part of "))
    assert first == f"{visits.digest()}-1" == f"{digest}-1"
    with refused_as("unlike_population", differing="unit"):
        visits.train()
    visits.prepare()
    assert (visits.train(), visits.runs) == (first, 1)

"""A run is resumed by the software that began it alone; a result of another is handed out with a word about it."""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
from ruamel.yaml import YAML

from algorithms.core.software import DECIDES, Software, _source_files, software_here
from algorithms.privacy.ledger import Ledger
from data.prepared import load_as
from data.readers.records import RecordBatch
from tasks import evaluate, report, train
from tasks.runs import charge, store
from tasks.runs import software as subject
from tasks.runs.dvc_process import code_has_changed
from tasks.runs.software import pipeline_software, reuse_note_of
from tests.support.checkout import PROJECT
from tests.support.refusals import refused_as
from tests.support.workspace import Workspace, killed_in

MENDED = replace(pipeline_software(), version="9.9", code="9" * 64)


@pytest.fixture
def upgrade(monkeypatch: pytest.MonkeyPatch) -> Callable[[Software], None]:
    """Puts other software in place of this one."""

    def upgrade(other: Software = MENDED) -> None:
        for module in (subject, charge):
            monkeypatch.setattr(module, "pipeline_software", lambda: other)

    return upgrade


def begun(workspace: Workspace) -> str:
    """A run that was killed after its charge; returns its id."""
    with killed_in(train, "run_training"):
        workspace.train()
    return next(row.run_id for row in workspace.ledger.history() if row.kind == "reserve" and row.run_id)


def test_an_unfinished_run_is_resumed_by_the_same_software(workspace: Workspace) -> None:
    run_id = begun(workspace)
    workspace.train()
    assert workspace.receipt["run_id"] == run_id


@pytest.mark.parametrize(
    "other",
    [MENDED, replace(pipeline_software(), packages={**pipeline_software().packages, "torch": "9.9"})],
    ids=["code", "torch"],
)
def test_other_software_does_not_resume_a_charged_run_and_names_both_ways_out(
    workspace: Workspace, upgrade: Callable[[Software], None], other: Software
) -> None:
    run_id, before = begun(workspace), pipeline_software()
    upgrade(other)
    with refused_as("other_software", run_id=run_id) as refusal:
        workspace.train()
    for words in (str(before), str(other), f"epsilonflow ledger forfeit {run_id}", "the software that began"):
        assert words in str(refusal.value)
    assert workspace.ledger.status(run_id) == "open"
    assert (workspace.home / "runs" / run_id / "generator.key").exists()
    workspace.ledger.forfeit(run_id)
    workspace.train()
    assert workspace.receipt["run_id"] == run_id.replace("-1", "-2")


def unrecorded_in_the_folder(workspace: Workspace, run_id: str) -> None:
    meta = workspace.home / "runs" / run_id / "run.json"
    meta.write_text(json.dumps({"checkout": str(workspace.root)}))


def of_others_in_the_folder(workspace: Workspace, run_id: str) -> None:
    meta = workspace.home / "runs" / run_id / "run.json"
    meta.write_text(json.dumps({"checkout": str(workspace.root), **MENDED.notes}))


@pytest.mark.parametrize("change", [unrecorded_in_the_folder, of_others_in_the_folder])
def test_the_folder_has_to_name_this_software(
    workspace: Workspace, change: Callable[[Workspace, str], None]
) -> None:
    change(workspace, begun(workspace))
    with refused_as("other_software", today=pipeline_software()):
        workspace.train()


def test_the_reservation_has_to_name_this_software(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a version that recorded nothing."""
    reserve = Ledger.reserve

    def old(*given: object, notes: dict[str, str], **named: object) -> None:
        kept = {name: text for name, text in notes.items() if not name.startswith("software")}
        reserve(*given, notes=kept, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "reserve", old)
        begun(workspace)
    with refused_as("other_software", begun_by="software that was not recorded"):
        workspace.train()


def test_a_run_that_was_never_charged_begins_under_other_software(
    workspace: Workspace, upgrade: Callable[[Software], None]
) -> None:
    """It has drawn no noise."""
    with killed_in(Ledger, "reserve"):
        workspace.train()
    upgrade(MENDED)
    workspace.train()
    assert workspace.receipt["software"]["version"] == "9.9"


def test_a_run_killed_after_settlement_is_not_repeated_by_other_software(
    workspace: Workspace, upgrade: Callable[[Software], None]
) -> None:
    """It is killed before its result is kept."""
    with killed_in(store.RunAttempt, "finish"):
        workspace.train()
    upgrade(MENDED)
    with refused_as("other_software"):
        workspace.train()


def test_the_receipt_and_the_card_name_the_software(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.root)
    receipt = workspace.train()
    evaluate.main()
    report.main()
    card = json.loads((workspace.root / "artifacts/privacy_card.json").read_text())["implementation"]
    ours = pipeline_software()
    assert (receipt["software"]["version"], receipt["software"]["code"]) == (ours.version, ours.code)
    assert (card["version"], card["code"]) == (ours.version, ours.code)
    assert ours.code != software_here().code  # the pipeline decides more than a call of `fit`


def test_a_result_of_other_software_is_handed_out_with_a_word_and_without_a_charge(
    workspace: Workspace, upgrade: Callable[[Software], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, model, before = workspace.train(), workspace.model(), str(pipeline_software())
    assert reuse_note_of(workspace.root) is None
    upgrade(MENDED)
    again = workspace.train()
    assert (again["run_id"], workspace.model()) == (first["run_id"], model)
    assert [row.kind for row in workspace.ledger.history()].count("reserve") == 1
    said = next(line for line in caplog.messages if line.startswith("existing result, nothing charged"))
    for words in (before, str(MENDED), "EPSILONFLOW_SPEND_AGAIN=yes"):
        assert words in said
    assert caplog.messages.count("training ...") == 1


def test_the_note_states_the_price_for_private_records(
    workspace: Workspace, upgrade: Callable[[Software], None]
) -> None:
    workspace.train()
    upgrade(MENDED)
    assert "spends nothing, since the records are public" in str(reuse_note_of(workspace.root))
    workspace.declare(is_public=False)
    epsilon = workspace.receipt["epsilon"]["pld"]
    assert f"spends epsilon {epsilon:g} again" in str(reuse_note_of(workspace.root))


def test_a_receipt_without_software_is_handed_out_as_not_recorded(workspace: Workspace) -> None:
    workspace.train()
    path = workspace.root / "artifacts/receipt.json"
    receipt = json.loads(path.read_text())
    for name in ("version", "code"):
        del receipt["software"][name]
    path.write_text(json.dumps(receipt))
    assert "trained by software that was not recorded" in str(reuse_note_of(workspace.root))


def test_training_runs_again_under_other_software_only_where_a_person_agreed(
    workspace: Workspace, upgrade: Callable[[Software], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though DVC, which watches no installed package, has nothing to do."""
    workspace.train()
    monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
    assert not code_has_changed("train", workspace.root)
    upgrade(MENDED)
    assert code_has_changed("train", workspace.root)
    monkeypatch.delenv("EPSILONFLOW_SPEND_AGAIN")
    assert not code_has_changed("train", workspace.root)


def test_the_report_names_the_other_software(
    workspace: Workspace, upgrade: Callable[[Software], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.root)
    workspace.train()
    evaluate.main()
    report.main()
    page = workspace.root / "artifacts/report.html"
    assert "An existing result" not in page.read_text()
    upgrade(MENDED)
    report.main()
    assert f"this is {MENDED}" in page.read_text()


def test_software_is_no_part_of_a_run_id(workspace: Workspace, upgrade: Callable[[Software], None]) -> None:
    """The id of a run of the version before, which nobody pays for twice."""
    first = workspace.train()["run_id"]
    workspace.mark_used()
    upgrade(MENDED)
    assert workspace.train()["run_id"].partition("-")[0] == first.partition("-")[0]


@pytest.fixture(autouse=True)
def _nothing_of_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))


PACKAGES = ("algorithms", "data", "epsilonflow", "flows", "tasks")


def test_the_digest_covers_all_code_that_brings_prepared_records_into_memory(workspace: Workspace) -> None:
    """Whatever of ours runs there could bring others; errors and the contents of the description decide nothing."""
    root, info = Path(subject.__file__).parents[2], workspace.info
    ran = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and any(path.is_relative_to(root / package) for package in PACKAGES):
            ran.add(path.relative_to(root))

    sys.setprofile(note)
    try:
        data = load_as(workspace.root / "datasets/prepared", info)
        RecordBatch(data.train_features, data.train_labels)[:2]
    finally:
        sys.setprofile(None)
    covered = {path.relative_to(root) for path in _source_files(root, (*DECIDES, *subject._DECIDING_FILES))}
    assert Path("data/prepared.py") in ran
    assert ran - covered <= {Path("data/description.py")}


def test_the_digest_covers_the_code_that_the_train_stage_depends_on() -> None:
    stages = YAML(typ="safe", pure=True).load(PROJECT / "dvc.yaml")["stages"]
    code = {path for path in stages["train"]["deps"] if path.startswith(("algorithms/", "tasks/"))}
    root = Path(subject.__file__).parents[2]
    covered = {*_source_files(root, (*DECIDES, *subject._DECIDING_FILES))}
    assert {*_source_files(root, sorted(code))} - covered == set()
    assert len(code) > 10

"""The calibrate stage hands out the plan that the command has made, for the same values alone."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from algorithms.privacy.documents import PlanDocument
from data import DatasetInfo
from data.files import owner_key
from flows.cli.main import app
from tasks import calibrate
from tasks.runs.plan_ahead import offering, read_offer
from tests.support.checkout import Checkout

PREPARED = Path("datasets/prepared")


@pytest.fixture
def here(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    monkeypatch.chdir(checkout.root)
    return checkout


def test_the_stage_hands_out_the_commands_plan_and_imports_nothing_to_plan(here: Checkout) -> None:
    path = here.root / "artifacts" / "plan.json"
    content, text = path.read_bytes(), (here.root / "params.yaml").read_text()
    document = PlanDocument.from_json(content, "plan.json").model_copy(
        update={"not_private": "of the command"}
    )
    names = {"torch", "scipy", "dp_accounting.dp_event", "sqlalchemy", "pandas"}
    code = f"""import runpy, sys
try: runpy.run_module('tasks.calibrate', run_name='__main__', alter_sys=True)
except SystemExit: pass
print({names!r} & set(sys.modules))"""
    with offering(here.root, document, DatasetInfo.read(PREPARED), text):
        done = here.run(sys.executable, "-P", "-c", code)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
    assert path.read_text() == document.to_text(sort_keys=True)
    calibrate.main()  # which plans
    assert path.read_bytes() == content


def test_a_plan_is_handed_out_for_the_same_values_and_data_alone(here: Checkout) -> None:
    document = PlanDocument.from_json(here.root.joinpath("artifacts/plan.json").read_bytes(), "plan.json")
    info, text = DatasetInfo.read(PREPARED), (here.root / "params.yaml").read_text()
    assert read_offer(PREPARED) is None
    with offering(here.root, document, info, text):
        assert read_offer(PREPARED) == document.to_text(sort_keys=True).encode()
        for old, new in (
            ("epsilon: 3.0", "epsilon: 2.0"),
            ("steps: 5", "steps: 6"),
            ("seed: 0", "seed: 1"),
            ("name: none", "name: centred"),
        ):
            here.set(old, new)
            assert read_offer(PREPARED) is None, new
            here.set(new, old)
        here.set("threads: null", "threads: 1")
        assert read_offer(PREPARED) is not None
    assert read_offer(PREPARED) is None
    with offering(here.root, document, replace(info, records=info.records + 1), text):
        assert read_offer(PREPARED) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"algorithm": "mine:method"},
        {"code": {"algorithm": "0" * 64, "model": "0" * 64}},
        {"held_out": {"compare_with": "0" * 64}},
        {"model": {"start": "0" * 64}},
    ],
    ids=["own method", "own model", "another model's file", "file to start from"],
)
def test_a_plan_that_may_have_changed_until_the_stage_runs_is_not_offered(
    here: Checkout, changed: dict[str, Any]
) -> None:
    document = PlanDocument.from_json(here.root.joinpath("artifacts/plan.json").read_bytes(), "plan.json")
    if "model" in changed:
        changed = {"model": document.model.model_copy(update={"files": changed["model"]})}
    text = (here.root / "params.yaml").read_text()
    with offering(here.root, document.model_copy(update=changed), DatasetInfo.read(PREPARED), text):
        assert read_offer(PREPARED) is None


def test_where_private_records_had_a_run_the_stage_looks_for_its_plan(
    here: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPSILONFLOW_HOME", str(here.home))
    document = PlanDocument.from_json(here.root.joinpath("artifacts/plan.json").read_bytes(), "plan.json")
    info, text = DatasetInfo.read(PREPARED), (here.root / "params.yaml").read_text()
    private = replace(info, is_public=False)
    (here.root / PREPARED / "public.json").write_text(private.to_json())
    owner_key(here.home)
    (here.home / "runs" / "0-0").mkdir(parents=True)
    with offering(here.root, document, private, text):
        assert read_offer(PREPARED) is None
        monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
        assert read_offer(PREPARED) is not None


def test_the_command_offers_its_plan_to_the_stages(here: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def see(*_: object, **_named: object) -> Any:
        here.set("epsilon: 3.0", "epsilon: 2.0")
        found.append(read_offer(PREPARED))
        raise SystemExit(0)

    monkeypatch.setattr("flows.pipeline.run_pipeline", see)
    with pytest.raises(SystemExit):
        app(["run", "--epsilon", "2"])
    assert PlanDocument.from_json(found[0] or b"", "plan.json").target.epsilon == 2.0
    assert read_offer(PREPARED) is None

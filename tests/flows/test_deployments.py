"""What prefect.yaml deploys, and how a retraining's outcome becomes the state of its flow."""

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from flows import retrain as module
from flows.pipeline import REFUSED
from flows.verify import BROKEN
from tasks.retraining.delivery import Outcome
from tests.support.checkout import PROJECT

FILE: dict[str, Any] = YAML(typ="safe", pure=True).load(PROJECT / "prefect.yaml")
DEPLOYMENTS = {deployment["name"]: deployment for deployment in FILE["deployments"]}


def test_there_is_a_deployment_for_each_flow() -> None:
    assert set(DEPLOYMENTS) == {"train", "retrain", "compare", "report", "audit", "tune", "verify"}
    for deployment in DEPLOYMENTS.values():
        path, _, name = deployment["entrypoint"].partition(":")
        flow = getattr(import_module(path.removesuffix(".py").replace("/", ".")), name)
        assert flow.retries == 0
        assert set(deployment["parameters"]) <= set(flow.parameters.properties)


def test_the_how_to_page_names_them_all() -> None:
    page = (PROJECT / "docs/how-to/prefect.md").read_text(encoding="utf-8")
    assert {name for name in DEPLOYMENTS if f"/{name}`" not in page} == set()


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_none_piles_up_and_no_parameter_goes_unchecked(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    assert deployment["enforce_parameter_schema"] is True
    assert deployment["work_pool"] == {"name": "local-pool"}
    assert [schedule["active"] for schedule in deployment.get("schedules", [])] == [False] * (
        name in ("retrain", "audit", "verify")
    )


SETTINGS = "name: m\ndataset: digits\nblocks: {policy: all}\nspread: {policy: equal, planned: 2}\n"


@pytest.mark.parametrize(
    ("kind", "left", "state"),
    [
        ("promoted", None, "Completed"),
        ("promoted", 3, "Completed"),
        ("kept", 2, module.FEW_LEFT),
        ("skipped", None, "Completed"),
        ("refused", None, REFUSED),
        ("broken", None, BROKEN),
        ("failed", None, "Failed"),
    ],
)
def test_an_outcome_becomes_a_state(
    kind: Any, left: int | None, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).touch()
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "retrain.yaml").write_text(SETTINGS + "warn_below: 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(module, "deliver", lambda work, now: Outcome(kind, "how it went.", left))
    found = module.retrain.fn()
    assert found.name == state
    few = " The caps allow 2 more retrainings of m." if left == 2 else ""
    assert found.message == f"how it went.{few}"

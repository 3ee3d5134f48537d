"""The flow under real Prefect: deployed and run by a worker, twice at once in one checkout, and refused."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.exceptions import ParameterTypeError
from prefect.utilities.callables import parameter_schema

from algorithms.privacy.accounting.budget import Budget
from flows.pipeline import pipeline, run_stage
from tasks.runs.stages import STAGES
from tests.flows.conftest import ended
from tests.support.checkout import Checkout

PREFECT = str(Path(sys.executable).parent / "prefect")


def test_no_task_is_tried_again_and_none_is_cached_by_prefect() -> None:
    assert (run_stage.retries, pipeline.retries) == (0, 0)
    assert run_stage.cache_policy is not None
    assert run_stage.cache_policy.compute_key(task_ctx=None, inputs={}, flow_parameters={}) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "parameters",
    [
        {"epsilon": "much"},
        {"epsilon": -1.0},
        {"epsilon": 0.0},
        {"delta": 1.0},
        {"delta": -1e-5},
        {"seed": -1},
    ],
)
def test_prefect_knows_the_ranges_of_the_parameters(parameters: dict[str, Any]) -> None:
    """So that a page or a command of Prefect refuses them before a run is made."""
    with pytest.raises(ParameterTypeError):
        pipeline.validate_parameters(parameters)
    assert pipeline.validate_parameters({"epsilon": 1.5, "delta": 0.0})["epsilon"] == 1.5
    (name,) = parameters
    limits = json.dumps(parameter_schema(pipeline.fn).properties[name])
    assert "inimum" in limits


def test_a_deployment_runs_with_parameters_and_shows_its_steps(server: str, checkout: Checkout) -> None:
    before = checkout.balance.spent.epsilon
    where = checkout.where(PREFECT_API_URL=server)

    def prefect(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([PREFECT, *arguments], **where, capture_output=True, text=True, timeout=150)

    pool = {"name": "local-pool", "type": "process"}
    httpx.post(f"{server}/work_pools/", json=pool).raise_for_status()
    done = prefect("--no-prompt", "deploy", "--all")
    assert done.returncode == 0, done.stdout + done.stderr
    worker = [PREFECT, "worker", "start", "--pool", "local-pool", "--type", "process"]
    asked = ["--param", "epsilon=1.5", "--param", "seed=4", "--param", 'settings={"algorithm.steps": 4}']
    with ended(worker, **where, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        done = prefect("deployment", "run", "pipeline/train", *asked, "--watch")
    assert done.returncode == 0, done.stdout + done.stderr
    plan = checkout.artifact("plan.json")
    assert (plan["target"]["epsilon"], plan["model"]["seed"], plan["steps"]) == (1.5, 4, 4)
    assert checkout.balance.spent.epsilon == pytest.approx(
        before + checkout.artifact("metrics.json")["epsilon"]
    )
    _check_what_prefect_shows(server)


def _check_what_prefect_shows(server: str) -> None:
    runs = _filter(server, "task_runs")
    assert {run["name"]: run["state_name"] for run in runs} == dict.fromkeys(STAGES, "Completed")
    train = next(run["id"] for run in runs if run["name"] == "train")
    lines = _filter(
        server, "logs", logs={"task_run_id": {"any_": [train]}}, wanted=lambda found: len(found) > 2
    )
    assert any("step 4 of 4" in line["message"] for line in lines)
    artifacts = {artifact["key"]: artifact["data"] for artifact in _filter(server, "artifacts")}
    assert set(artifacts) == {"privacy-card", "metrics"}
    assert "## Accounting" in artifacts["privacy-card"]
    assert {"what": "data set", "value": "digits"} in json.loads(artifacts["metrics"])


def _filter(server: str, kind: str, wanted: Any = bool, **filters: Any) -> list[dict[str, Any]]:
    """Objects of the server, which may take a moment to show them."""
    found: list[dict[str, Any]] = []
    for _ in range(40):
        found = httpx.post(f"{server}/{kind}/filter", json=filters).raise_for_status().json()
        if wanted(found):
            break
        time.sleep(0.25)
    return found


@pytest.mark.soak
def test_two_flows_at_once_in_one_checkout_both_succeed(server: str, checkout: Checkout) -> None:
    before = checkout.balance.spent.epsilon
    runs = [
        subprocess.Popen(
            checkout.command("flows.pipeline", "--epsilon", epsilon),
            **checkout.where(PREFECT_API_URL=server),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for epsilon in ("0.5", "0.25")
    ]
    written = [run.communicate(timeout=240)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], written
    assert any("waiting" in text for text in written)
    for text, epsilon in zip(written, ("0.5", "0.25"), strict=True):
        assert f"│ epsilon of this run                │ {epsilon} at delta 1e-05" in text
    assert checkout.balance.spent.epsilon == pytest.approx(before + 0.75, rel=1e-2)
    assert checkout.artifact("plan.json")["target"]["epsilon"] in (0.5, 0.25)


def test_a_run_that_the_ledger_refuses_leaves_ledger_and_parameters_alone(
    server: str, checkout: Checkout
) -> None:
    ledger = checkout.ledger
    ledger.set_cap("digits", Budget(4.0, 1e-3))
    head, params = ledger.head(), (checkout.root / "params.yaml").read_text()
    done = subprocess.run(
        checkout.command("flows.pipeline", "--epsilon", "2.5"),
        **checkout.where(PREFECT_API_URL=server),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    refusals = [line for line in done.stderr.splitlines() if line.startswith("refused: ")]
    assert len(refusals) == 1
    assert "cap" in refusals[0]
    assert "Traceback" not in done.stderr
    assert "NoneType" not in done.stderr
    assert ledger.head() == head
    assert (checkout.root / "params.yaml").read_text() == params

"""Plans for a run: what is refused before anything is spent; each preset can be planned as it stands."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from algorithms.core.plan import Plan
from algorithms.privacy.accounting import risk
from algorithms.privacy.accounting.risk import risk_profile
from data import DatasetInfo, dataset_info
from data.card import data_card
from flows.cli.costs import cost_table
from tasks import calibrate
from tasks.config import params
from tasks.preflight.preview import preview_run
from tests.support.checkout import PROJECT
from tests.support.refusals import refused_as
from tests.support.soak import soak_but
from tests.support.workspace import PARAMS, Workspace


@pytest.mark.parametrize(("delta", "refused"), [(1e-5, False), (1.1e-5, True), (1e-3, True)])
def test_delta_is_at_most_1e_5_where_the_number_of_records_is_private(
    workspace: Workspace, delta: float, refused: bool
) -> None:
    info = replace(workspace.info, records=None)
    algorithm = {"name": "dp_sgd", "sampling_rate": 0.05, "steps": 5}
    document = PARAMS | {"privacy": {"epsilon": 3.0, "delta": delta}, "algorithm": algorithm}
    settings = params.parse(
        {key: document[key] for key in calibrate.READS if key in document}, reads=calibrate.READS
    )
    if refused:
        with refused_as("delta_above_1_n", why="the number of records is private"):
            calibrate.plan_for(settings, info)
    else:
        assert calibrate.plan_for(settings, info).cost.delta == delta


def plan_of(info: DatasetInfo, **changes: Any) -> Plan:
    document = PARAMS | changes
    settings = params.parse(
        {key: document[key] for key in calibrate.READS if key in document}, reads=calibrate.READS
    )
    return calibrate.plan_for(settings, info)


def test_an_epsilon_that_would_not_hold_is_planned_only_with_seeded_noise(workspace: Workspace) -> None:
    info = replace(workspace.info, classes=("no", "yes"))
    algorithm = {"name": "nesterov", "steps": 20, "smoothness": 5.1, "smoothness_is_data_dependent": True}
    changes = {"algorithm": algorithm, "model": {"name": "logistic"}}
    privacy = {"epsilon": 1.0, "delta": 1e-5}
    with refused_as("bad_keys", keys=("privacy.noise",)):
        plan_of(info, privacy=privacy, **changes)
    assert plan_of(info, privacy=privacy | {"noise": "seeded"}, **changes).not_private


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "quantile_clipping", "expected_batch_size": 64, "steps": 5},
        {"name": "dpis", "expected_batch_size": 64, "epochs": 1},
        {"name": "dpis", "expected_batch_size": 64, "epochs": 1, "public_norms": [1.0, 0.9]},
    ],
)
def test_a_method_that_needs_norms_is_refused_in_bfloat16_by_its_plan(
    workspace: Workspace, algorithm: dict[str, Any]
) -> None:
    """Its first release would be refused, and by then the run is charged."""
    assert "bfloat16" not in plan_of(workspace.info, algorithm=algorithm).facts.to_json()
    with refused_as("norms_in_bfloat16"):
        plan_of(workspace.info, algorithm=algorithm, model={"name": "softmax", "precision": "bfloat16"})


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_delta_whose_shares_are_no_numbers_is_refused(workspace: Workspace, accountant: str) -> None:
    with refused_as("delta_outside", least=1e-300):
        plan_of(workspace.info, privacy={"epsilon": 1.0, "delta": 1e-320, "accountant": accountant})


def test_diagnostics_of_private_records_are_refused(workspace: Workspace) -> None:
    asked = {"epsilon": 3.0, "delta": 1e-5, "diagnostics": True}
    assert plan_of(workspace.info, privacy=asked).steps == 6
    private = replace(workspace.info, is_public=False)
    with refused_as("bad_keys", keys=("privacy.diagnostics",), dataset="digits"):
        plan_of(private, privacy=asked)


def test_every_setting_of_a_model_is_in_its_plan() -> None:
    info = dataset_info(data_card("digits"), "none")
    model = {"name": "softmax", "seed": 3, "class_weights": {"1": 2.0}}
    algorithm = {"name": "dp_sgd", "steps": 2, "expected_batch_size": 100}
    document = {"privacy": {"epsilon": 2.0, "delta": 1e-5}, "algorithm": algorithm, "model": model}
    settings = params.parse(document, reads=calibrate.READS)
    written = calibrate.calibrate(settings, info).to_json()["model"]
    assert written == settings.model.model_dump() | {"files": {}, "parameters": 650, "notes": []}


@pytest.mark.parametrize(
    ("algorithm", "privacy"),
    [
        ({"name": "dp_gd", "steps": 20}, {"delta": 1e-5}),
        ({"name": "dp_agd"}, {"delta": 1e-5}),
        ({"name": "heavy_ball", "noise": "laplace", "steps": 5}, {"delta": 0.0, "accountant": "pure"}),
    ],
)
def test_noise_for_an_attack_withstands_it_and_is_no_larger_than_that_takes(
    algorithm: dict[str, Any], privacy: dict[str, Any]
) -> None:
    attack = {"false_alarms": 0.01, "caught": 0.05}
    info = dataset_info(data_card("digits"), "none")

    def settings(**target: Any) -> params.Params:
        document = {"privacy": privacy | target, "algorithm": algorithm, "model": {"name": "softmax"}}
        return params.parse(document, reads=("privacy", "features", "algorithm", "model"))

    asked = settings(target=attack)
    document = calibrate.calibrate(asked, info)
    calibrate.check_plan(document, asked, info)
    plan = Plan.from_document(document)
    found = float(risk.max_true_positive_rate(risk_profile(plan.filter, plan.schedule, plan.adjacency), 0.01))
    assert 0.045 < found <= 0.05
    more = calibrate.plan_for(settings(epsilon=1.05 * plan.target.budget.epsilon), info)
    assert (
        float(risk.max_true_positive_rate(risk_profile(more.filter, more.schedule, more.adjacency), 0.01))
        > found
    )


@pytest.mark.parametrize(
    ("target", "keys"),
    [
        ({}, ("privacy.epsilon", "privacy.target")),
        (
            {"epsilon": 1.0, "target": {"false_alarms": 0.01, "caught": 0.05}},
            ("privacy.epsilon", "privacy.target"),
        ),
        (
            {"target": {"false_alarms": 0.1, "caught": 0.05}},
            ("privacy.target.caught", "privacy.target.false_alarms"),
        ),
    ],
)
def test_a_run_has_one_target_that_can_be_met(target: dict[str, Any], keys: tuple[str, ...]) -> None:
    with refused_as("bad_keys", params.ParamsRefusedError, keys=keys):
        params.parse({"privacy": {"delta": 1e-5, **target}}, reads=("privacy",))


def test_an_attack_that_no_noise_withstands_is_refused_in_percent() -> None:
    target = {"target": {"false_alarms": 0.01, "caught": 0.0100001}, "delta": 1e-5, "accountant": "rdp"}
    document = {"privacy": target, "algorithm": {"name": "dp_gd", "steps": 1}, "model": {"name": "softmax"}}
    settings = params.parse(document, reads=("privacy", "features", "algorithm", "model"))
    with refused_as("target_unreachable", false_alarms=1.0):
        calibrate.plan_for(settings, dataset_info(data_card("digits"), "none"))


PRESETS = sorted((PROJECT / "presets").glob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_can_be_planned_for_its_data_set(path: Path) -> None:
    settings = params.load(path, reads=params.GROUPS)
    preview = preview_run(PROJECT, settings)
    plan = preview.plan
    assert cost_table(preview, settings).row_count > 5
    assert 0.99 * settings.privacy.epsilon < plan.cost.epsilon <= settings.privacy.epsilon
    assert bool(plan.target.prior_events) == (settings.features is not None)


def test_there_is_a_preset() -> None:
    assert PRESETS


STOPS = [(1.0, 48, 19), (0.1, 8, 2)]


@pytest.mark.parametrize(("epsilon", "before", "now"), soak_but([STOPS[0]], STOPS))
def test_nesterov_stops_by_the_loss_that_logistic_regression_starts_with(
    epsilon: float, before: int, now: int
) -> None:
    """The numbers of steps on Adult with a gap of 10 and of ln 2, found apart from this code."""
    info = dataset_info(data_card("adult-a9a"))
    algorithm = {"name": "nesterov", "steps": 200, "noise": "laplace", "regularisation": 0.01}
    changes = {"privacy": {"epsilon": epsilon, "delta": 1e-6}, "model": {"name": "logistic"}}
    assert plan_of(info, algorithm=algorithm | {"initial_gap": 10.0}, **changes).steps == before
    plan = plan_of(info, algorithm=algorithm, **changes)
    assert (plan.steps, plan.method_params["initial_gap"]) == (now, pytest.approx(0.69314718056))


def test_the_preview_tells_of_the_selection_and_of_the_protocol(workspace: Workspace) -> None:
    del workspace
    document = {
        "data": {"dataset": "adult-a9a"}, "privacy": {"epsilon": 0.1, "delta": 1e-8}, "model": {"name": "logistic"},
        "algorithm": {"name": "dp_agd", "paper_budget": True, "clip_norm": 2.0},
    }  # fmt: skip
    settings = params.parse(document)
    names, values = cost_table(preview_run(PROJECT, settings), settings).columns
    rows = dict(zip(names.cells, values.cells, strict=True))
    assert rows["selection"].endswith("away from a uniform draw among 21")
    assert rows["protocol"] == "by Lee and Kifer 2018, but for clip_norm"

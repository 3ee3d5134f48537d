"""The card of a genuine run holds against its files, for every algorithm in the catalogue."""

from pathlib import Path
from typing import Any

import pytest

from algorithms.core.method import Plan
from algorithms.features.learned import FEATURES
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.card import build, verify
from tests.algorithms import bench
from tests.algorithms.features.test_features import facts, loud, model_behind, records, target
from tests.algorithms.test_contract import every_algorithm, made_up, outcome, planned
from tests.support.synthetic_run import left_by


def failures(folder: Path, plan: Plan, trace: Trace) -> list[str]:
    """The checks of the run's card that fail or cannot be made."""
    folder.mkdir(exist_ok=True)
    made = build(left_by(folder, plan, trace))
    found = verify(made, folder, unsigned=True).checks
    return [f"{check.name}: {check.detail}" for check in found if check.passed is not True]


MISSING = ["signature: the card is not signed", "model.safetensors: does not lie beside the card"]


@every_algorithm
def test_the_card_of_a_run_holds(case: str, tmp_path: Path) -> None:
    assert failures(tmp_path / "card", planned(case), outcome(case, made_up()).trace) == MISSING


@pytest.mark.parametrize(
    ("name", "settings"),
    [("dp_sgd", {}), ("quantile_clipping", {}), ("adaclip", {}), ("dp_agd", {"sampling_rate": 0.3})],
)
def test_the_card_holds_where_the_number_of_records_is_private(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = bench.small_model("logistic", classes=2)
    sampled = {} if name == "dp_agd" else {"expected_batch_size": None, "sampling_rate": 0.25}
    method = bench.algorithm(name, **sampled, **settings)
    plan = bench.planned(method, model, records=None)
    found = bench.run(method, plan, made_up(), model)
    assert failures(tmp_path / "card", plan, found.trace) == MISSING


@pytest.mark.parametrize("by", ["dp_sgd", "dpis"])
@pytest.mark.parametrize("name", FEATURES)
def test_the_card_holds_where_features_are_learned_first(name: str, by: str, tmp_path: Path) -> None:
    features = loud(name)
    own = {"steps": 4} if by == "dp_sgd" else {"epochs": 2, "floor": 0.001, "oversampling": 2.0}
    method, model = bench.algorithm(by, expected_batch_size=100, **own), model_behind(features)
    plan = method.plan(target(features), facts(model))
    found = bench.trained(method, plan, model, tmp_path / "run", records=records, features=features)
    assert failures(tmp_path / "card", plan, found.trace) == MISSING

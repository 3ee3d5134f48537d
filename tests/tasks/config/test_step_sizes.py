"""Learning rates of linear models: stable on the worst records that a data card allows, and no recipe goes beyond."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.plan import Target
from algorithms.core.planning_facts import Inputs, PlanningFacts
from algorithms.methods import from_settings
from algorithms.methods.momentum import PathParams
from algorithms.models.bounds import LOGISTIC
from algorithms.noise_limits import usual_noise_limit
from algorithms.privacy.accounting import Budget
from data.card import DataCard
from epsilonflow.table_encoding import usual_method
from tasks.config.overrides import encoder_recipe, recipe
from tests.support.bench import SETTINGS
from tests.support.cards import card, category, csv_of, label, number
from tests.support.refusals import refused_as

COLUMNS = 7


def regression(records: int) -> DataCard:
    numbers = [number(f"x{place}", 0, 1) for place in range(COLUMNS - 1)]
    document = card(
        "prices",
        records={"at_most": records},
        target={"bounds": [0.0, 100.0]},
        reader=csv_of(*numbers, category("kind", "old", "new"), label("price")),
        files={"train": {"path": "datasets/raw/prices.csv", "keyed_sha256": "0" * 64}},
        split={"salt": "prices", "test_fraction": 0.2},
    )
    return DataCard.model_validate_json(json.dumps(document))


def error_after(update: OptimizerConfig, norm: float, steps: int = 300) -> float:
    """The largest error on the way, of descent on (x w - 1)^2 / 2 for a record of this norm, clipped nowhere."""
    moving, worst = update.start(torch.zeros(1, dtype=torch.float64)), 0.0
    for _ in range(steps):
        error = norm * moving.parameters - 1.0
        worst = max(worst, float(error.abs()))
        moving = update.apply(moving, norm * error, steps=steps)
    return worst


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("records", [500, 1_000_000])
def test_regression_on_the_longest_records_never_diverges(epsilon: float, records: int) -> None:
    update = OptimizerConfig(**recipe(regression(records), "dp_sgd", epsilon).settings["update"])
    assert error_after(update, norm=math.sqrt(COLUMNS + 1)) < 2.0


def test_twice_the_margin_would_diverge() -> None:
    update = recipe(regression(1_000_000), "dp_sgd", 3.0).settings["update"]
    longer = OptimizerConfig(
        **update | {"learning_rate": 2.2 * update["learning_rate"], "schedule": "constant"}
    )
    assert error_after(longer, norm=math.sqrt(COLUMNS + 1)) > 1e3


@pytest.mark.parametrize("steps", [10, 100, 300, 3000])
def test_momentum_ends_with_the_steps(steps: int) -> None:
    """A tenth of them is remembered at most, where that is more than 10; a curvature of 1/2 does not diverge."""
    update = usual_method(10_000_000, "cross_entropy", steps, epsilon=10.0).update
    assert update.momentum == pytest.approx(max(0.9, min(0.99, 1.0 - 10.0 / steps)), abs=0.005)
    assert 0.0 < update.factor_for(noise_std=1e-6, steps=steps) <= 1.0
    assert error_after(update, norm=math.sqrt(0.5), steps=steps) < 2.0


def test_a_number_behind_an_encoder_is_learned_by_stable_steps() -> None:
    texts = card(
        "stars",
        records={"at_most": 100_000},
        target={"bounds": [1.0, 5.0]},
        reader={"kind": "texts", "format": "csv", "columns": ["text"], "label": "stars"},
        files={"train": {"path": "datasets/raw/stars.csv", "keyed_sha256": "0" * 64}},
        split={"salt": "stars", "test_fraction": 0.2},
    )
    chosen = encoder_recipe(DataCard.model_validate_json(json.dumps(texts)), "wordllama", "dp_sgd", 8.0)
    update = OptimizerConfig(**chosen.settings["update"])
    assert error_after(update, norm=math.hypot(1.0, 0.3)) < 2.0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_noise_limit_is_the_deviation_that_all_noise_together_gives_a_parameter(schedule: str) -> None:
    limited = OptimizerConfig(learning_rate=50.0, schedule=schedule, momentum=0.5, noise_limit=0.25)  # type: ignore[arg-type]
    draw, moving = np.random.default_rng(0), limited.start(torch.zeros(4000, dtype=torch.float64))
    factor = limited.factor_for(noise_std=0.2, steps=400)
    for _ in range(400):
        noise = torch.from_numpy(draw.normal(scale=0.2, size=4000))
        moving = limited.apply(moving, noise, steps=400, factor=factor)
    assert float(moving.parameters.std()) == pytest.approx(0.25, rel=0.05)


def test_little_noise_leaves_the_learning_rate_as_it_is() -> None:
    limited = OptimizerConfig(learning_rate=1.0, momentum=0.9, noise_limit=0.7)
    assert (
        limited.factor_for(noise_std=1e-5, steps=300) == 1.0 == limited.factor_for(noise_std=0.0, steps=300)
    )


def test_the_noise_limit_is_for_sgd_alone() -> None:
    with pytest.raises(ValueError, match="noise_limit is for the optimizer sgd"):
        OptimizerConfig(optimizer="adam", noise_limit=0.7)


@pytest.mark.parametrize("name", ["adaclip", "adp_sgd", "dpis", "quantile_clipping"])
def test_a_noise_limit_is_refused_where_noise_is_not_the_same_in_all_steps(name: str) -> None:
    settings = SETTINGS[name] | {"name": name, "update": {"noise_limit": 0.7}}
    target = Target(Budget(1.0, 1e-5))
    with refused_as("noise_limit_unbounding"):
        from_settings(settings).plan(target, PlanningFacts(records=40, parameters=5, layers=1, classes=2))


@pytest.mark.parametrize("name", ["heavy_ball", "nesterov"])
@pytest.mark.parametrize(("records", "epsilon"), [(3000, 1.0), (30_000, 0.5), (30_000, 3.0), (3000, 0.1)])
def test_the_noise_of_methods_with_public_bounds_moves_an_output_of_cells_by_the_limit(
    name: str, records: int, epsilon: float
) -> None:
    """On losses without curvature, where nothing pulls back; the limit is that of the records over the noise of two."""
    document = card(
        "cells",
        records={"train": records, "test": 100},
        reader=csv_of(number("x", 0, 1), category("kind", "old", "new"), label("is_good")) | {"cells": {}},
        files={part: {"path": f"{part}.csv", "keyed_sha256": "0" * 64} for part in ("train", "test")},
        classes=["no", "yes"],
    )
    settings = recipe(DataCard.model_validate_json(json.dumps(document)), name, epsilon).settings
    method: Any = from_settings(settings | {"name": name})
    facts = PlanningFacts(records, 100, 1, 2, inputs=Inputs(4.0, 1.0), loss=LOGISTIC)
    plan = method.plan(Target(Budget(epsilon, 1e-5)), facts)
    (stage,) = plan.params(PathParams).stages
    moves, regularisation = [0.0, stage.step_size], 2.0 * settings["regularisation"]
    for _ in range(plan.steps - 1):  # by a gradient of 1 in the first step
        ahead = moves[-1] + stage.momentum * (moves[-1] - moves[-2])
        point = ahead if name == "nesterov" else moves[-1]
        moves.append(ahead - stage.step_size * regularisation * point)
    std = plan.noise_multiplier * math.sqrt(sum(move**2 for move in moves)) / records
    assert std == pytest.approx(usual_noise_limit(records / 2.0, epsilon, "classes"), rel=0.25)

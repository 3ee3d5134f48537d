"""Few made-up records of an encoder, by the settings that `init` gives: a head learns, or says hardly anything."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax

from algorithms.core.facts_of_models import intercepts_of
from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.plan import Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.features import from_settings as features_of
from algorithms.gradients import L2
from algorithms.methods import from_settings
from algorithms.models import build
from algorithms.models.feature_transforms import in_front
from algorithms.privacy.accounting import Budget
from algorithms.privacy.mechanisms.release import Gaussian, total_release
from data.card import DataCard
from tasks.config.overrides import encoder_recipe, explain_recipe
from tests.support.bench import MadeUp
from tests.support.cards import card
from tests.support.made_up_training import held_out_scores
from tests.support.soak import soak_but

RECORDS, HELD_OUT, WIDTH = 240, 1000, 768


def card_of_texts(records: dict[str, int], **target: Any) -> DataCard:
    document = card(
        "made-up",
        records=records,
        reader={"kind": "texts", "format": "csv", "columns": ["text"], "label": "y"},
        files={"train": {"path": "datasets/raw/made-up.csv", "keyed_sha256": "0" * 64}},
        split={"salt": "x", "test_fraction": 0.2},
        **(target or {"classes": ["no", "yes"]}),
    )
    return DataCard.model_validate_json(json.dumps(document))


def encoded(seed: int, classes: int, *, signal: float) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Records around a mean that is as long as what they vary by, as those of public encoders; in a fifth of the
    directions, which classes share.
    """
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, RECORDS + HELD_OUT)
    mean, centres = draw.normal(size=WIDTH), draw.normal(size=(classes, WIDTH))
    varied = draw.normal(size=(len(labels), WIDTH // 5)) @ draw.normal(size=(WIDTH // 5, WIDTH))
    varied *= math.sqrt(WIDTH) / np.linalg.norm(varied, axis=1, keepdims=True)
    return (mean + varied + signal * centres[labels]).astype(np.float32), labels


def scores_of(records: NDArray[np.float32], labels: NDArray[np.int64], seed: int) -> NDArray[np.float32]:
    """The scores of the held-out records by a head that was trained on the others."""
    classes = int(labels.max()) + 1
    known = card_of_texts({"at_most": RECORDS}, classes=[f"k{one}" for one in range(classes)])
    chosen = encoder_recipe(known, "wordllama", "dp_sgd", 1.0)
    features = features_of(chosen.features)
    model = in_front(
        features.module((WIDTH,)), build(chosen.model, input_shape=(WIDTH,), classes=classes, seed=0)
    )
    method = from_settings({"name": "dp_sgd", **chosen.settings})
    counted = [(total_release(L2(1.0), Gaussian(100.0)).event(), 1)]
    prior = (*counted, *((one.event(), 1) for one in features.releases((WIDTH,))))
    facts = PlanningFacts(
        None, model.parameter_count, 1, classes, loss=model.bounds, intercepts=intercepts_of(model, classes)
    )
    plan = method.plan(Target(Budget(1.0, 1e-5), prior_events=prior), facts)
    made = MadeUp(records[:RECORDS], labels[:RECORDS])
    return held_out_scores(
        method, plan, model, made, records[RECORDS:], seed=seed, physical_batch=128, features=features
    )


def test_few_records_are_learned_from() -> None:
    records, labels = encoded(0, 2, signal=0.5)
    assert float((scores_of(records, labels, 1).argmax(1) == labels[RECORDS:]).mean()) > 0.8


@pytest.mark.parametrize("classes", soak_but([5], [2, 5]))
def test_where_there_is_nothing_to_learn_a_head_says_hardly_more_than_the_frequencies(classes: int) -> None:
    records, labels = encoded(0, classes, signal=0.0)
    said = log_softmax(scores_of(records, labels, 1), axis=1)[np.arange(HELD_OUT), labels[RECORDS:]]
    assert float(said.mean()) > -math.log(classes) - 0.01


@pytest.mark.parametrize(
    ("records", "epsilon", "limit"),
    [
        ({"at_most": 1440}, 1.0, 0.34),  # a third of a bound
        ({"train": 480, "test": 100}, 1.0, 0.34),  # 0.03 sqrt(480 / 3.73)
        ({"train": 1500, "test": 100}, 1.0, 0.6),
        ({"train": 60_000, "test": 100}, 1.0, 3.8),
    ],
)
def test_the_less_records_say_the_less_all_noise_moves_an_output(
    records: dict[str, int], epsilon: float, limit: float
) -> None:
    update = encoder_recipe(card_of_texts(records), "wordllama", "dp_sgd", epsilon).settings["update"]
    assert update["noise_limit"] == limit
    assert update["learning_rate"] == 12.0


def test_steps_of_many_records_stay_as_they_are() -> None:
    """Their noise is 3.9 clip norms of 0.5 in batches of 8 %; of 240 records it would move an output by 150."""
    for records, is_shorter in ((240, True), (20_000, False), (60_000, False)):
        known = card_of_texts({"train": records, "test": 100})
        update = OptimizerConfig(
            **encoder_recipe(known, "efficientnet-lite0", "dp_sgd", 1.0).settings["update"]
        )
        factor = update.factor_for(noise_std=3.9 * 0.5 / (0.08 * records), steps=150)
        assert factor < 0.002 if is_shorter else factor == 1.0


def test_a_head_s_constant_says_the_frequencies_to_which_it_is_shrunk() -> None:
    """The last column of its weights, times the constant feature, whatever the map before it makes of a record."""
    built = build("unit_linear", input_shape=(4,), classes=3, seed=0)
    centred = in_front(features_of({"name": "centred"}).module((4,)), built)
    said = torch.tensor([0.5, 0.0, -1.0])
    for model in (built, centred):
        intercepts = intercepts_of(model, 3)
        assert intercepts is not None
        parameters = torch.zeros(model.parameter_count)
        parameters[intercepts.indices] = said / intercepts.weight
        outputs = model.outputs(model.by_name(parameters), torch.randn(5, 4))
        assert torch.allclose(outputs, said.expand(5, 3), atol=1e-6)
    without = build("unit_linear", input_shape=(4,), classes=3, seed=0, settings={"bias": 0.0})
    assert intercepts_of(without, 3) is None


@pytest.mark.parametrize(
    ("records", "share"),
    [
        ({"train": 500, "test": 100}, 0.05),
        ({"train": 1014, "test": 100}, 0.025),  # twice 136 standard deviations of a count, 3.73
        ({"train": 60_000, "test": 100}, 0.00042),
    ],
)
def test_heads_are_shrunk_for_a_share_that_falls_as_records_grow(
    records: dict[str, int], share: float
) -> None:
    settings = encoder_recipe(card_of_texts(records), "wordllama", "dp_sgd", 1.0).settings
    assert settings["shrink_share"] == pytest.approx(share, rel=0.01)


def test_a_number_has_other_units_and_no_limit() -> None:
    number = card_of_texts({"at_most": 1440}, target={"bounds": [1.0, 5.0]})
    advised = encoder_recipe(number, "wordllama", "dp_sgd", 1.0)
    assert "noise_limit" not in advised.settings["update"]
    why = explain_recipe(number, advised)
    assert "could diverge" in why["learning rate"] and "shrinkage" not in why


def test_advice_says_what_limits_a_head_and_what_shrinks_it() -> None:
    known = card_of_texts({"train": 480, "test": 100})
    why = explain_recipe(known, encoder_recipe(known, "wordllama", "dp_sgd", 1.0))
    assert why["learning rate"].endswith("all noise together would move an output by more than 0.34")
    assert "5.00% of the squared mu" in why["shrinkage"]
    assert "noise multiplier 40" in why["features"]

"""Recipes: the model and the settings that suit a data set and an algorithm, from recipes.yaml."""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from data.card import DataCard, Records

RECIPES = Path(__file__).with_name("recipes.yaml")
_SMALLEST_SIDE = 20
_LARGEST_BATCH = 8192
"""Of a data set without a recipe: where there are so many records, larger batches cost time and gain little."""
_NOISE_OF_A_STEP = 65.0
"""In the mean of a batch, in clip norms, times records and epsilon over sqrt(parameters): with 300 steps, at 1e-5."""
_NOISE_TAKEN = {"tables": 0.1, "images": 0.2, "texts": 0.3}
"""How far the noise of a step may move the parameters; what comes of that stands in docs/results/defaults.md."""
_LARGEST_RATE = 8.0


@dataclass(frozen=True)
class Recipe:
    """model: its name. settings: of the algorithm, without its name."""

    model: str
    settings: dict[str, Any]


def recipe(card: DataCard, algorithm: str, epsilon: float) -> Recipe:
    """The recipe of a data set for an algorithm; one by the kind and the public numbers of the data, and by epsilon,
    where the file has none.

    An algorithm that the file does not know gets no settings: whether it exists is for its catalogue to say.
    """
    written = _written()
    own = written.get(card.name, {}).get(algorithm)
    if own:
        return Recipe(own["model"], own["settings"])
    usual, model = written["default"].get(algorithm, {"settings": {}}), _model_for(card)
    settings = _with_batches(usual["settings"] | usual.get(_kind(card), {}), card.records)
    return Recipe(model, _with_learning_rate(settings, card, model, epsilon))


@lru_cache(maxsize=1)
def _written() -> dict[str, Any]:
    recipes: dict[str, Any] = YAML(typ="safe", pure=True).load(RECIPES)
    return recipes


def _model_for(card: DataCard) -> str:
    if card.tokens is not None:
        return "bilstm"
    if len(card.input_shape) == 3:
        return "tanh_cnn" if min(card.input_shape[1:]) >= _SMALLEST_SIDE else "softmax"
    return "logistic" if len(card.classes) == 2 else "softmax"


def _kind(card: DataCard) -> str:
    if card.tokens is not None:
        return "texts"
    return "images" if len(card.input_shape) == 3 else "tables"


def _with_batches(settings: dict[str, Any], records: Records) -> dict[str, Any]:
    """The settings with a batch size for a share of the records; an algorithm without privacy has no sampling rate."""
    of = {"sampling_rate": records.train, "batch_share": records.train or records.at_most}
    share = next((name for name in of if name in settings and of[name] is not None), None)
    if share is None:
        return settings
    others = {key: value for key, value in settings.items() if key != share}
    batch = min(_LARGEST_BATCH, max(1, round(settings[share] * (of[share] or 1))))
    return {"batch_size": batch, **others}


def _with_learning_rate(
    settings: dict[str, Any], card: DataCard, model: str, epsilon: float
) -> dict[str, Any]:
    """The settings with a learning rate where the file leaves it open: the less noise in a step, the longer it is."""
    update = settings.get("update", {})
    if update.get("learning_rate", 0.0) is not None:
        return settings
    from algorithms.models import build  # torch, which takes seconds to import

    classes, records = len(card.classes), card.records.train or card.records.at_most or 1
    made = build(model, input_shape=card.input_shape, classes=classes, seed=0, tokens=card.tokens)
    noise = _NOISE_OF_A_STEP * math.sqrt(made.parameter_count) / (records * epsilon)
    rate = min(_LARGEST_RATE, _NOISE_TAKEN[_kind(card)] / (noise * settings.get("clip_norm", 1.0)))
    return settings | {"update": update | {"learning_rate": float(f"{rate:.2g}")}}

"""Recipes: the model and the settings that suit a data set and an algorithm, from recipes.yaml."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from data.card import DataCard, Records

RECIPES = Path(__file__).with_name("recipes.yaml")
_SMALLEST_SIDE = 20


@dataclass(frozen=True)
class Recipe:
    """model: its name. settings: of the algorithm, without its name."""

    model: str
    settings: dict[str, Any]


def recipe(card: DataCard, algorithm: str) -> Recipe:
    """The recipe of a data set for an algorithm; one by the shape of the data where the file has none.

    An algorithm that the file does not know gets no settings: whether it exists is for its catalogue to say.
    """
    written = _written()
    own = written.get(card.name, {}).get(algorithm)
    if own:
        return Recipe(own["model"], own["settings"])
    usual = written["default"].get(algorithm, {"settings": {}})
    return Recipe(_model_for(card), _with_batches(usual["settings"], card.records))


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


def _with_batches(settings: dict[str, Any], records: Records) -> dict[str, Any]:
    """The settings with a batch size for a share of the records; an algorithm without privacy has no sampling rate."""
    of = {"sampling_rate": records.train, "batch_share": records.train or records.at_most}
    share = next((name for name in of if name in settings and of[name] is not None), None)
    if share is None:
        return settings
    others = {key: value for key, value in settings.items() if key != share}
    return {"batch_size": max(1, round(settings[share] * (of[share] or 1))), **others}

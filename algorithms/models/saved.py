"""Reads a model from the published file `model.safetensors` alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from algorithms.errors import ModelRefusedError
from algorithms.models.augmentation import for_evaluation
from algorithms.models.feature_transforms import front, in_front, shape_after
from algorithms.models.model import Model
from algorithms.models.public_models import from_file
from algorithms.models.registry import build

FACTS = "epsilonflow"
"""The only key of the file's metadata: everything that is not a parameter, as JSON."""


def facts_of(path: Path) -> dict[str, Any]:
    """The facts in a model's file; raises ModelRefusedError for a file that epsilonflow did not write."""
    try:
        with safe_open(path, framework="pt") as file:
            facts: dict[str, Any] = json.loads((file.metadata() or {})[FACTS])
        if not (isinstance(facts["model"], str) and _is_list_of(int, facts["input_shape"])):
            raise TypeError
        if not _is_list_of(str, facts["classes"]):
            raise TypeError
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        raise ModelRefusedError(
            f"{path} is not a model that epsilonflow trained; give the model.safetensors of a run."
            if path.exists()
            else f"there is no model at {path}; give the model.safetensors of a run, or the folder that contains it."
        ) from None
    return facts


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def load_model(path: Path) -> tuple[Model, dict[str, Tensor]]:
    """The architecture and the named parameters of a model that the train stage wrote.

    No other file is needed, since values that came from a start or an embedding file are among the parameters. Raises
    ModelRefusedError if parameters are missing.
    """
    model = architecture(facts_of(path))
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    parameters = from_file(model, stored)
    missing = model.published(model.initial_parameters()).keys() - parameters.keys()
    if missing:
        raise ModelRefusedError(
            f"{path.name} lacks {min(missing)}; train again, or take the file that was published."
        )
    return model, parameters


def architecture(facts: Mapping[str, Any]) -> Model:
    """The model that a file describes, with placeholder parameters."""
    shape, before = tuple(facts["input_shape"]), facts.get("front")
    features = None if before is None else front(before, shape)
    model = build(
        facts["model"],
        input_shape=shape if features is None else shape_after(features, shape),
        classes=facts.get("outputs") or len(facts["classes"]),
        seed=0,
        tokens=facts.get("tokens"),
        padding=facts.get("padding", 0),
        predicts=facts.get("predicts"),
        settings=facts.get("model_settings"),
    )
    return model if features is None else in_front(features, model)


class TrainedModel(nn.Module):
    """A trained model as a module, from prepared inputs [batch, *input_shape] to scores [batch, classes].

    For models that were trained with cross-entropy, the softmax of the scores gives class probabilities.

    Attributes:
        classes: names of the classes, labels or tags, in the order of the scores; empty if they have no names.
        predicts: class, number, labels, next token or tags.
        target: the data card's declaration of another target, as JSON values; None for classes.
        input_shape: of one record's features.
        preparation: the data card's declaration of how records become features, as JSON values; `tasks.predict` reads
            files by it. None for a model of an older version.
        facts: everything that the file states about the model.
    """

    def __init__(self, model: Model, parameters: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().__init__()
        model = for_evaluation(model)
        model.module.load_state_dict(dict(parameters), strict=False)
        self.network = model.module.eval().requires_grad_(False)
        self._scores = model.scores
        self.classes: tuple[str, ...] = tuple(facts["classes"])
        self.predicts: str = facts.get("predicts", "class")
        self.target: Mapping[str, Any] | None = facts.get("target")
        self.input_shape: tuple[int, ...] = tuple(facts["input_shape"])
        self.preparation: Mapping[str, Any] | None = facts.get("preparation")
        self.facts = facts

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores, one for each class."""
        return self._scores(self.network(inputs))


def load(path: str | Path) -> TrainedModel:
    """Load a trained model from a file, or from a folder with `model.safetensors`, such as `artifacts` or a release.

    Args:
        path: of the file or the folder.

    Returns:
        A module in evaluation mode, which states how its records were prepared.

    Raises:
        ModelRefusedError: for a file that epsilonflow did not write, or that lacks parameters.

    Example:
        >>> import algorithms, torch
        >>> model = algorithms.load("artifacts")                    # doctest: +SKIP
        >>> model(torch.zeros(1, *model.input_shape)).softmax(-1)   # doctest: +SKIP
    """
    file = Path(path)
    file = file / "model.safetensors" if file.is_dir() else file
    model, parameters = load_model(file)
    return TrainedModel(model, parameters, facts_of(file))

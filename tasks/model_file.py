"""The file of a trained model: what it states of the model and its records, and whether others are like them."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from algorithms.core.checkpoint import cpu_copies
from algorithms.core.method import MethodState
from algorithms.core.shrinkage import ShrunkState
from algorithms.errors import ModelRefusedError
from algorithms.model_facts import facts_of
from algorithms.models import Model
from algorithms.models.feature_transforms import front_of
from algorithms.models.library_files import in_file
from data import DatasetInfo
from data.prepared import preparation_in


def save_model(
    path: Path,
    model: Model,
    released: Tensor,
    info: DatasetInfo,
    algorithm: str,
    *,
    prepared: Path,
    shrinkage: Mapping[str, float] | None = None,
) -> None:
    """Write released parameters [d] with all facts needed to rebuild the model and to prepare records for it."""
    front, preparation = front_of(model), preparation_in(prepared)
    facts = {
        "model": model.name,
        "model_settings": model.settings,
        **_data_facts(info),
        "dataset": info.dataset,
        "algorithm": algorithm,
        "front": None if front is None else front.settings,
        "preparation": None if preparation is None else preparation.document(),
        **({} if shrinkage is None else {"shrinkage": shrinkage}),
    }
    # All facts under one key, so that the order of keys does not change the file.
    described = {"epsilonflow": json.dumps(facts)}
    save_file(cpu_copies(in_file(model, model.published_tensors(released))), path, metadata=described)


def shrinkage_of(state: MethodState) -> dict[str, float] | None:
    """What a model's file states of the shrinkage of its last state; None without one."""
    return state.facts if isinstance(state, ShrunkState) else None


def check_comparable(path: Path, info: DatasetInfo) -> None:
    """Raise ModelRefusedError unless the model in a file was trained on records like these, for the same target."""
    facts, described = facts_of(path).document(), json.loads(json.dumps(_data_facts(info)))
    names = described.keys() | {"target", "padding", "cells"}
    if differing := [name for name in names if facts.get(name) != described.get(name)]:
        raise ModelRefusedError(
            "{path} has other {differing} than {dataset!r}, so its scores cannot be"
            " compared; leave out privacy.evaluation.compare_with, or name another file.",
            code="unlike_training",
            path=path,
            differing=min(differing).replace("_", " "),
            dataset=info.dataset,
        )


def _data_facts(info: DatasetInfo) -> dict[str, object]:
    """The facts in a model's file about its records and its target."""
    return {
        "tokens": info.tokens,
        "input_shape": info.input_shape,
        "classes": info.label_type.names,
        "outputs": info.outputs,
        "predicts": info.label_type.kind,
        **({} if info.target is None else {"target": info.target.model_dump(mode="json")}),
        **({} if info.padding == 0 else {"padding": info.padding}),
        **({} if info.cells is None else {"cells": asdict(info.cells)}),
    }

"""What planning knows of models without building them is what the built models say of themselves."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest
import torch

from algorithms.errors import RefusedError
from algorithms.models import CATALOGUE
from algorithms.models.outlines import outline_of
from data.cells import CellFacts
from data.targets import Count, Labels, Number, Quantile
from tasks import calibrate
from tasks.config import params
from tasks.config.params import Params
from tasks.model_building import built_facts, model_for
from tasks.planned_model import facts_and_notes, outline_for
from tests.support.checkout import PROJECT
from tests.support.synthetic_run import description
from tests.support.workspace import PARAMS

HAVE_OUTLINES = {
    *("softmax", "linear", "additive", "logistic", "logistic_through_origin", "svm", "huber_svm"),
}
CELLS = CellFacts((3, 2, 4), (0.6, 0.4, math.sqrt(0.48))), CellFacts((3, 5, 1), (0.1, 0.7, math.sqrt(0.5)))
TARGETS: dict[str, dict[str, Any]] = {
    **{f"{count} classes": {"classes": tuple(map(str, range(count)))} for count in (2, 3, 10)},
    "number": {"classes": (), "target": Number(bounds=(0.0, 9.0))},
    "count": {"classes": (), "target": Count(bounds=(0.0, 9.0), counts=True)},
    "quantile": {"classes": (), "target": Quantile(bounds=(0.0, 9.0), quantile=0.9)},
    "labels": {"classes": (), "target": Labels(labels=("a", "b", "c"))},
}
DATA: dict[str, dict[str, Any]] = {
    "bounded": {"input_shape": (4, 3), "feature_norms": (3.0, 1.5)},
    "unbounded, private size": {"input_shape": (7,), "records": None},
    "rows of people": {"input_shape": (2,), "rows_per_user": 3, "feature_norms": (2.0, 1.0)},
    **{
        f"cells {cells.sizes}": {"input_shape": (3,), "cells": cells, "feature_norms": cells.norms}
        for cells in CELLS
    },
}


def settings_of(**model: Any) -> Params:
    document = PARAMS | {"model": model}
    return params.parse(
        {key: document[key] for key in calibrate.READS if key in document}, reads=calibrate.READS
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", sorted(CATALOGUE.keys() - {"timm", "huggingface"}))
def test_facts_from_an_outline_are_those_of_the_built_model(name: str, target: str) -> None:
    for data, precision in product(DATA.values(), ("float32", "bfloat16")):
        info, settings = (
            replace(description(), **TARGETS[target], **data),
            settings_of(name=name, precision=precision),
        )
        outline = outline_for(settings, info)
        assert outline is None or name in HAVE_OUTLINES
        try:
            model = model_for(settings, info)
        except RefusedError:
            assert outline is None
            continue
        (facts, notes), expected = facts_and_notes(settings, info), built_facts(model, info)
        assert (asdict(facts), notes) == (asdict(expected), model.notes)  # with what `==` leaves out


@pytest.mark.parametrize("name", sorted(HAVE_OUTLINES))
def test_each_linear_model_has_an_outline(name: str) -> None:
    targets = [TARGETS["2 classes"], TARGETS["number"]]
    of = [outline_for(settings_of(name=name), replace(description(), **target)) for target in targets]
    assert any(of)


@pytest.mark.parametrize(
    "change",
    [
        {"class_weights": {"0": 2.0}},
        {"start": "start.safetensors"},
        {"freeze": ["1"]},
        {"augmentations": 2},
        {"settings": {"hidden": 3}},
        {"reinitialize": ["1"]},
    ],
)
def test_a_model_that_is_changed_is_built(change: dict[str, Any]) -> None:
    info = replace(description(), **TARGETS["2 classes"])
    assert outline_for(settings_of(name="softmax"), info) is not None
    assert outline_for(settings_of(name="softmax", **change), info) is None


def test_loss_at_zero_is_that_of_pytorch_for_any_number_of_classes() -> None:
    for classes in range(2, 1001):
        outline = outline_of("softmax", input_shape=(2,), classes=classes, predicts="class")
        zeros = torch.zeros(classes, classes, dtype=torch.float64)
        losses = torch.nn.functional.cross_entropy(zeros, torch.arange(classes), reduction="none")
        assert outline is not None and outline.start_loss == float(losses.max())


COMPUTE_WITH_TENSORS = {"adaclip", "matrix_factorisation", "dp_ftrl"}
"""Methods that plan by PyTorch: whitening, and strategies that are optimised."""
PLANS_ALL = """
import json, sys
from pathlib import Path
from algorithms.errors import RefusedError
from algorithms.methods import CATALOGUE
from data.card import data_card
from tasks import calibrate
from tasks.config import params
from tasks.config.overrides import recipe
from tasks.prepare import info_of

planned = []
for name in CATALOGUE.keys() - set(sys.argv[2:]):
    card = data_card("adult", Path("data/cards"))
    usual = recipe(card, name, 1.0)
    document = json.loads(sys.argv[1]) | {
        "algorithm": {"name": name, **usual.settings}, "model": {"name": usual.model}, "features": usual.features
    }
    settings = params.parse(document)
    try: calibrate.calibrate(settings, info_of(card, settings.data))
    except RefusedError as refusal: print(name, refusal)
    else: planned.append(name)
    if "torch" in sys.modules: sys.exit(f"{name} imports torch")
print(len(planned))
"""


def test_planning_shipped_linear_models_imports_no_pytorch_with_any_method() -> None:
    document = PARAMS | {
        "data": {"dataset": "adult"},
        "privacy": {"epsilon": 1.0, "delta": 1e-5, "noise": "seeded"},
    }
    done = subprocess.run(
        [sys.executable, "-c", PLANS_ALL, json.dumps(document), *COMPUTE_WITH_TENSORS],
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) >= 15, done.stdout

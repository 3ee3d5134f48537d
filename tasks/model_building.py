"""The model that the parameters name, built for the data, behind features that are learned before training."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from algorithms import models
from algorithms.cell_histograms import CellHistograms, TableHistograms
from algorithms.core.facts_of_models import intercepts_of, number_of, zero_start_loss
from algorithms.core.learned_features import FeatureLearner
from algorithms.core.planning_facts import Inputs, PlanningFacts
from algorithms.errors import RefusedError
from algorithms.gradients import linear_layer
from algorithms.histogram_columns import HistogramColumn, HistogramPart
from algorithms.models import Model
from algorithms.models.cell_histograms import HistogramCells
from algorithms.models.cells import behind_cells
from algorithms.models.feature_transforms import in_front, shape_after
from algorithms.models.objectives import with_class_weights
from algorithms.models.saved import adapt
from data import DatasetInfo
from data.cells import CellFacts
from data.targets import level_of
from tasks.config import params
from tasks.config.params import Params


def model_for(settings: Params, info: DatasetInfo) -> Model:
    """Build the model that the parameters name for this data, preceded by the learned features.

    Raises ModelRefusedError or RefusedError if it does not fit the data.
    """
    features, shape = features_for(settings, info), info.input_shape
    if features is None:
        return model_of(settings.model, info)
    is_of_cells = isinstance(features, TableHistograms)
    if info.cells is not None and not (is_of_cells or getattr(features, "of_target", False)):
        raise RefusedError(
            "features are learned from numbers, and the table is encoded as cells, which are public and need none; set"
            " features.name to none or histograms, or leave reader.cells out of the data card.",
            code="bad_keys",
            keys=("features.name", "reader.cells"),
        )
    features.releases(shape)  # refuses a shape that does not fit
    module = features.module(shape)
    transformed = replace(info, input_shape=shape_after(module, shape))
    if isinstance(module, HistogramCells):
        transformed = replace(transformed, cells=CellFacts(*module.layout))
    model = model_of(settings.model, transformed)
    if hasattr(features, "check"):
        features.check(model)
    return in_front(module, model)


def features_for(settings: Params, info: DatasetInfo) -> FeatureLearner | None:
    """The features that the parameters name; for a table of cells, those of its layout.

    Raises RefusedError if the description of the data has no columns to make histograms of.
    """
    features = settings.features
    if not isinstance(features, CellHistograms) or info.cells is None:
        return features
    if not info.cell_columns:
        raise RefusedError(
            "the table was prepared by a version without histograms of cells; run the prepare stage again.",
            code="not_prepared",
        )
    columns = [
        HistogramColumn(
            column.count, tuple(HistogramPart(part.positions, part.is_ordered) for part in column.parts)
        )
        for column in info.cell_columns
    ]
    front, shares = sum(column.count for column in columns), [weight**2 for weight in info.cells.weights]
    # Of the norm, what columns leave, from weights in 32 bits: trees, if there are any, and a cell that all rows share.
    constant = round(shares.pop(), 6) if info.cells.sizes[-1] == 1 else 0.0
    of_trees = round(math.fsum(shares[front:]), 6)
    return features.of_table(
        info.cells.sizes,
        columns,
        is_of_number=info.label_type.kind == "number",
        tree_share=of_trees or (1.0 - constant) / 2,
        constant_share=constant,
    )


def model_of(chosen: params.ModelParams, info: DatasetInfo) -> Model:
    """Build the model of the group `model` for this data; raises ModelRefusedError if it does not fit."""
    cells, shape = info.cells, info.input_shape
    if cells is not None:
        shape = (cells.total,)
    model = models.build(
        chosen.name,
        input_shape=shape,
        classes=info.outputs,
        seed=chosen.seed,
        precision=chosen.precision,
        tokens=info.tokens,
        words_sha256=info.words_sha256,
        padding=info.padding,
        predicts=info.label_type.kind,
        level=level_of(info.label_type),
        settings=chosen.all_settings,
    )
    if chosen.class_weights is not None:
        model = with_class_weights(model, class_weights_of(chosen.class_weights, info))
    model = adapt(
        model,
        input_shape=shape,
        start=None if chosen.start is None else Path(chosen.start),
        reinitialize=chosen.reinitialize,
        freeze=chosen.freeze,
        augmentations=chosen.augmentations,
    )
    return model if cells is None else behind_cells(model, cells.sizes, cells.weights)


def class_weights_of(weights: Mapping[str, float], info: DatasetInfo) -> tuple[float, ...]:
    """The weight of each class, in their order; raises RefusedError for names that are no classes."""
    if not info.classes:
        raise RefusedError(
            "model.class_weights was given, and {dataset!r} has the target of {target}, not"
            " classes; leave it out.",
            code="bad_keys",
            dataset=info.dataset,
            target=info.label_type.kind,
            keys=("model.class_weights",),
        )
    if unknown := sorted(weights.keys() - set(info.classes)):
        raise RefusedError(
            "model.class_weights names {name!r}, which is no class of {dataset!r}; its classes are"
            " {classes}.",
            code="bad_keys",
            name=unknown[0],
            dataset=info.dataset,
            classes=", ".join(info.classes),
            keys=("model.class_weights",),
        )
    return tuple(weights.get(name, 1.0) for name in info.classes)


def built_facts(model: Model, info: DatasetInfo) -> PlanningFacts:
    """What a method may use of the model and the data before its first release."""
    return PlanningFacts(
        records=info.records,
        parameters=model.parameter_count,
        layers=len(model.layers),
        classes=len(info.classes) or 1,
        inputs=_inputs(model, info),
        loss=model.bounds,
        rows_per_user=info.rows_per_user,
        bfloat16=model.precision == torch.bfloat16,
        start_loss=zero_start_loss(model, len(info.classes)),
        intercepts=intercepts_of(model, len(info.classes)),
        number=number_of(model),
    )


def _inputs(model: Model, info: DatasetInfo) -> Inputs | None:
    """The inputs of a linear model, bounded by the data card, and the bias's constant 1; None for other models."""
    layer = linear_layer(model.module)
    if layer is None or info.feature_norms is None:
        return None
    (l1, l2), constant = info.feature_norms, float(layer.bias is not None)
    # The width is 1, since every feature is encoded in [0, 1].
    return Inputs(l1 + constant, math.hypot(l2, constant), width=1.0, outputs=layer.out_features)

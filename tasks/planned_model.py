"""What planning may know of the model that the parameters name: from its outline, or from the model itself.

Importing PyTorch and building a model take longer than the rest of a plan, so a model that has an outline is not built.
"""

import math

import numpy as np

from algorithms.core.planning_facts import Inputs, Intercepts, PlanningFacts
from algorithms.models.bounds import CROSS_ENTROPY, LOGISTIC
from algorithms.models.outlines import LinearOutline, outline_of
from data import DatasetInfo
from data.cells import CellFacts
from tasks.config.params import ModelParams, Params


def facts_and_notes(settings: Params, info: DatasetInfo) -> tuple[PlanningFacts, tuple[str, ...]]:
    """The facts for planning, and the public sentences on the model's start; see `Model`.

    Raises ModelRefusedError or RefusedError if the model does not fit the data.
    """
    outline = outline_for(settings, info)
    if outline is not None:
        return outlined_facts(outline, info, bfloat16=settings.model.precision == "bfloat16"), ()
    from tasks.model_building import built_facts, model_for  # torch, which takes seconds to import

    model = model_for(settings, info)
    return built_facts(model, info), model.notes


def outline_for(settings: Params, info: DatasetInfo) -> LinearOutline | None:
    """The outline of the model, if there is one, and nothing else of the parameters changes it."""
    chosen, cells = settings.model, info.cells
    if settings.features is not None or not _is_as_shipped(chosen) or info.tokens is not None:
        return None
    if cells is not None and chosen.precision == "bfloat16":
        return None  # which is refused
    return outline_of(
        chosen.name,
        input_shape=info.input_shape if cells is None else (cells.total,),
        classes=info.outputs,
        predicts=info.label_type.kind,
    )


def _is_as_shipped(chosen: ModelParams) -> bool:
    """Whether a model is built by its name alone."""
    changes = chosen.all_settings, chosen.class_weights, chosen.start, chosen.reinitialize, chosen.freeze
    return not any(changes) and chosen.augmentations == 1


def outlined_facts(outline: LinearOutline, info: DatasetInfo, *, bfloat16: bool) -> PlanningFacts:
    """The facts for planning of the model of an outline, for this data."""
    inputs, constant = None, float(outline.has_bias)
    if info.feature_norms is not None:
        l1, l2 = info.feature_norms
        inputs = Inputs(l1 + constant, math.hypot(l2, constant), width=1.0, outputs=outline.outputs)
    return PlanningFacts(
        records=info.records,
        parameters=outline.parameter_count,
        layers=1,
        classes=len(info.classes) or 1,
        inputs=inputs,
        loss=outline.bounds,
        rows_per_user=info.rows_per_user,
        bfloat16=bfloat16,
        start_loss=outline.start_loss,
        intercepts=_intercepts(outline, info.cells),
    )


def _intercepts(outline: LinearOutline, cells: CellFacts | None) -> Intercepts | None:
    """The biases, or the parameters of the last cell, if all rows share it; None for other losses."""
    outputs, width = outline.outputs, outline.width
    if outline.start_loss is None or outline.bounds not in (CROSS_ENTROPY, LOGISTIC):
        return None
    if outline.has_bias:
        return Intercepts(outputs * width, 1, outputs, 1.0)
    if cells is None or cells.sizes[-1] > 1:
        return None
    return Intercepts(
        width - 1, width, outputs, float(np.float32(cells.weights[-1]))
    )  # as the model holds it

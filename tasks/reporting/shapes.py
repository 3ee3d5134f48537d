"""What an additive model says of each column of a table: its shape functions, with the uncertainty by the known noise.

A prediction is a sum of a number for each cell that a row activates, so the sum over a column's cells is all that the
column adds to it, beside what random trees add of several columns. All of this follows from released parameters and
from the data card in the model's file, and costs nothing.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import JsonValue, TypeAdapter, ValidationError
from safetensors import safe_open

from algorithms.core.optimizers import OptimizerConfig
from algorithms.histogram_columns import columns_in, row_layout
from algorithms.model_facts import ModelFacts, facts_of
from data.cells import CellEncoding, CellFacts, CellPart, Grids
from data.formats import Categorical, Column, Date, Numeric, Table, Timestamp
from data.preparation import reader_in, target_in
from data.targets import Number

_MAX_DRAWN = 6
_POINTS = 128
_PARTS = {Timestamp: ("year", "month", "weekday", "elapsed"), Date: ("month", "day of the year")}
_OPTIMIZER = TypeAdapter(OptimizerConfig)


@dataclass(frozen=True)
class Shape:
    """What a column adds to the model's outputs, by its value.

    Attributes:
        name: of the column.
        values: in words, of each row of `effects`.
        numbers: [k], the values if the column is one of numbers.
        effects: [k, outputs], less their mean over the values, each of which counts once.
        missing: [outputs], of a missing value, less the same.
        deviation: the standard deviation that noise gives an effect, at most about; None if it is not known.
    """

    name: str
    values: tuple[str, ...]
    numbers: NDArray[np.float64] | None
    effects: NDArray[np.float64]
    missing: NDArray[np.float64]
    deviation: float | None

    @property
    def output(self) -> int:
        """The output that the column changes most."""
        return int(np.ptp(self.effects, axis=0).argmax())

    @property
    def span(self) -> float:
        """The difference between the largest and the smallest effect on that output."""
        return float(np.ptp(self.effects[:, self.output]))

    @property
    def is_noise(self) -> bool:
        """Whether noise alone often makes as large a difference: the usual range of as many normal numbers."""
        if self.deviation is None:
            return False
        # Neighbouring points of a number share cells; each category has its own.
        count = len(self.values) if self.numbers is None else min(len(self.values), _POINTS // 2)
        return self.span <= 2.0 * math.sqrt(2.0 * math.log(max(2, count))) * self.deviation


@dataclass(frozen=True)
class Explanation:
    """The shapes, those that change most first; outputs: their names. unit: of effects, in words."""

    shapes: tuple[Shape, ...]
    outputs: tuple[str, ...]
    unit: str

    @property
    def drawn_shapes(self) -> tuple[Shape, ...]:
        """Those that are drawn."""
        return self.shapes[:_MAX_DRAWN]


def optimizer_in(settings: Mapping[str, JsonValue]) -> OptimizerConfig | None:
    """The optimizer that the settings of a method in a plan state; None where they state none."""
    try:
        return _OPTIMIZER.validate_json(json.dumps(settings.get("update")))
    except ValidationError:
        return None


def explanation_of(model: Path, update: OptimizerConfig | None, trace: pd.DataFrame) -> Explanation | None:
    """The explanation of an additive model of a table's cells, from its file; None for other models.

    update, trace: of its run, which say how much noise is in each parameter.
    """
    facts = facts_of(model)
    if facts.model != "additive":
        return None

    with safe_open(model, framework="np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    reader = reader_in(facts.preparation)
    encoding = reader.cell_encoding if isinstance(reader, Table) else None
    if encoding is None or not isinstance(reader, Table):
        return None
    layout = _layout_of(facts.front or {}, encoding.facts)
    if layout is None:
        return None
    total = sum(layout.sizes)
    weights = [part for part in tensors.values() if part.ndim == 2 and part.shape[1] == total]
    if len(weights) != 1:
        return None
    units, unit, outputs = _unit_of(facts, tensors)
    noise = parameter_noise(update, trace)
    if noise is not None and facts.shrinkage is not None:
        noise *= facts.shrinkage.kept
    shapes = _shapes(reader, encoding, layout, weights[0].astype(np.float64) * units, noise, units)
    return Explanation(tuple(sorted(shapes, key=lambda shape: -shape.span)), outputs, unit)


def _layout_of(front: Mapping[str, Any], public: CellFacts) -> CellFacts | None:
    """The cells that the model's weights are of, by the map before it; None where a column has other cells, too.

    public: those of the card, which begin with the columns. Trees behind histograms are others, and so may weights be.
    """
    if front.get("kind") != "cell_histograms":
        return public
    if front["bins"]:
        return None
    names = ("bins", "trees", "depth", "tree_share", "constant_share", "learns_finest")
    stated = {name: front[name] for name in names if name in front}
    return CellFacts(*row_layout(columns_in(front["columns"]), front["sizes"], **stated))


def _unit_of(facts: ModelFacts, tensors: Mapping[str, NDArray[Any]]) -> tuple[float, str, tuple[str, ...]]:
    """What outputs are multiplied with to be in their unit, that unit in words, and the names of the outputs."""
    target, classes = target_in(facts.target), facts.classes
    if target is None:
        if len(classes) == 2:
            return 1.0, f"log-odds of {classes[1]}", classes[1:]
        return 1.0, "score of the class", classes
    if not isinstance(target, Number):
        return 1.0, "log-odds of the label", classes
    if target.kind == "count":
        return 1.0, "logarithm of the expected count", ("count",)
    scale = float(tensors.get("features.scale", np.array(1.0)))
    return scale * (target.bounds[1] - target.bounds[0]) / 2.0, f"{target.kind} to predict", (target.kind,)


def parameter_noise(update: OptimizerConfig | None, trace: pd.DataFrame) -> float | None:
    """The standard deviation that all steps' noise gives a parameter, at most about, as if there were no gradients.

    None for methods and settings whose steps are not plain descent under independent noise.
    """
    steps = trace[trace["kind"] == "gradient"]
    if update is None or update.optimizer != "sgd" or update.averaging != "none" or update.weight_decay:
        return None
    if steps.empty or set(steps["noise"]) != {"gaussian"}:
        return None
    noises = (steps["noise_std"] / steps["divisor"]).tolist()
    moves = zip(update.limited_moves(noises), noises, strict=True)
    return math.sqrt(math.fsum((move * noise) ** 2 for move, noise in moves))


def _shapes(
    table: Table,
    encoding: CellEncoding,
    layout: CellFacts,
    weights: NDArray[np.float64],
    noise: float | None,
    units: float,
) -> list[Shape]:
    """layout: of the cells that the weights [outputs, cells] are of, of which those of the columns have weights."""
    shapes, position = list[Shape](), 0
    first = [0, *accumulate(layout.sizes)]
    for column in table.columns:
        for index, part in enumerate(column.parts):
            values, shares = values_of(column, part, index)
            grids = encoding.settings.grids
            steps = np.append(shares, np.nan)
            codes = part.codes(steps, grids) if isinstance(part, Grids) else part.codes(steps)
            # A value is in one cell of each grid, and adds their parameters up, by the grids' weights.
            effects = np.zeros((len(steps), len(weights)))
            for offset, code in enumerate(codes, start=position):
                effects += layout.weights[offset] * weights[:, first[offset] + code].T
            squares = math.fsum(weight**2 for weight in layout.weights[position : position + len(codes)])
            position += len(codes)
            effects -= effects[:-1].mean(
                axis=0
            )  # only differences say something, without the missing value's
            shapes.append(
                Shape(
                    name_of_part(column, index),
                    tuple(values)
                    if isinstance(values[0], str)
                    else tuple(in_units(column, part, share) for share in shares),
                    None if isinstance(values[0], str) else np.array(values, np.float64),
                    effects[:-1],
                    effects[-1],
                    None if noise is None else noise * units * math.sqrt(squares),
                )
            )
    return shapes


def name_of_part(column: Column, index: int) -> str:
    """The name of a column, and of a part where it has several."""
    names = _PARTS.get(type(column))
    return column.name if names is None else f"{column.name}, {names[index]}"


def in_units(column: Column, part: CellPart, share: float) -> str:
    """In words, a share of the bounds of a number, or of the days between two."""
    span = part.span if isinstance(part, Grids) else 1.0
    if isinstance(column, Timestamp):
        return str(column.days[0] + timedelta(days=round(share * span)))
    low, high = column.bounds if isinstance(column, Numeric) else (0.0, span)
    return f"{low + share * (high - low):.4g}"


def values_of(column: Column, part: CellPart, part_index: int) -> tuple[Sequence[Any], NDArray[np.float64]]:
    """Values of a column that are shown, as numbers or words, and as the encoding takes them."""
    if isinstance(part, Grids):
        shares = np.linspace(0.0, 1.0, _POINTS)
        if part.logarithmic:  # as close at the low end as the finest cells are there
            shares = np.unique(
                np.append(shares[::2], np.expm1(shares[::2] * np.log1p(part.span)) / part.span)
            )
        low, high = column.bounds if isinstance(column, Numeric) else (0.0, part.span)
        return (low + shares * (high - low)).tolist(), shares
    names: list[str] = [str(index + 1) for index in range(part.count)]
    if isinstance(column, Categorical):
        names[: len(column.categories)] = column.categories
    if isinstance(column, Timestamp):
        named = (tuple(map(str, column.years)), names, ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"))
        names = list(named[part_index])
    return names, np.arange(part.count, dtype=np.float64)

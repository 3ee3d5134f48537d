"""How a table becomes records for a model, from what is declared of its columns; nothing is read off the rows.

`TableEncoding` is all that the estimators know of it: they encode rows by it and train the network that belongs to it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import nn

from algorithms.core.optimizers import OptimizerConfig
from algorithms.errors import RefusedError
from algorithms.gradients import BehindSparseMap
from algorithms.methods.dp_sgd import DPSGD
from algorithms.models.bounds import CROSS_ENTROPY, SQUARED_ERROR
from algorithms.models.cells import CellVectors
from algorithms.models.number_losses import CountLoss, QuantileLoss
from algorithms.models.saved import TrainedModel
from algorithms.noise_limits import (
    CLIP_OF_COUNTS,
    USUAL_MOMENTUM,
    OutputKind,
    error_share,
    shrink_share,
    usual_momentum,
    usual_noise_limit,
)
from data.card import CARDS, DataCard, DataRefusedError, data_card
from data.cells import CellSettings
from data.formats import USUAL_MISSING, Binned, Csv, Date, Ignored, Label, Numeric, Table
from data.preparation import preparation_of
from data.readers import encoding

_BATCHES_IN_A_PASS, _MAX_BATCH = 10, 4096
"""A batch is a tenth of the records, which keeps the noise small beside the gradient, up to a size that is fast."""
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_TARGET = {"name": "(target)", "kind": "label"}


@dataclass(frozen=True)
class TableEncoding:
    """The encoding of rows with declared columns.

    Attributes:
        table: The columns, without that of the target.
        names: Those that X must have.
    """

    table: Table
    names: tuple[str, ...]

    def declared_columns(self, X: Any) -> pd.DataFrame:
        """The declared columns of X; raises RefusedError if X is no DataFrame with these."""
        if not isinstance(X, pd.DataFrame):
            raise RefusedError(
                "X is no DataFrame, and schema names its columns; give a DataFrame.",
                code="bad_argument",
                arguments=("X", "schema"),
            )
        if missing := [name for name in self.names if name not in X.columns]:
            raise RefusedError(
                "X lacks the declared columns {missing}; give them.",
                code="bad_argument",
                missing=", ".join(map(repr, missing)),
                arguments=("X", "schema"),
            )
        if several := [name for name in self.names if list(X.columns).count(name) > 1]:
            raise RefusedError(
                "X has several columns {column!r}; give one.",
                code="bad_argument",
                column=several[0],
                arguments=("X",),
            )
        if not len(X):
            raise RefusedError(
                "X has 0 rows, while a minimum of 1 is required; give rows.",
                code="bad_argument",
                arguments=("X",),
            )
        return X.loc[:, list(self.names)]

    def encode(self, X: Any) -> NDArray[np.float32]:
        """The records that the network takes, [n, positions]. Raises RefusedError for what the columns do not allow."""
        X = self.declared_columns(X)
        numbers = {column.name for column in self.table.columns if isinstance(column, Numeric | Binned)}
        columns = {name: _as_arrow(name, X[name], is_number=name in numbers) for name in self.names}
        try:
            return np.ascontiguousarray(encoding.features(pa.table(columns), self.table, "X"), np.float32)
        except DataRefusedError as error:
            problem = str(error).replace("correct the file", "correct X")
            if "hint" in error.fields:  # of what a data card says
                start = problem.partition(";")[0]
                problem = f"{start}; correct X, and give None for what is missing."
            raise RefusedError("{problem}", code="bad_argument", problem=problem, arguments=("X",)) from None

    @property
    def has_constant(self) -> bool:
        """Whether all rows share a cell."""
        cells = self.table.cell_encoding
        return cells is not None and cells.facts.sizes[-1] == 1

    def network(self, outputs: int) -> nn.Module:
        """A linear model of the rows' vectors, from zero."""
        cells = self.table.cell_encoding
        assert cells is not None
        linear = nn.Linear(cells.facts.total, outputs, bias=False)
        nn.init.zeros_(linear.weight)
        return BehindSparseMap(CellVectors(cells.facts.sizes, cells.facts.weights), linear)


def _as_arrow(name: str, values: "pd.Series[Any]", *, is_number: bool) -> pa.Array:
    """A column for the reader, each value by itself; raises RefusedError for values of several types."""
    try:
        if is_number and values.dtype == object:
            # Numbers beside texts, as where some say that they are missing.
            return pa.array([_as_text(value) for value in values], pa.string())
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):  # its message quotes a value
        raise RefusedError(
            "the column {column!r} of X holds values of several types; make it one of numbers or of texts.",
            code="bad_argument",
            column=name,
            arguments=("X",),
        ) from None


def _as_text(value: Any) -> str | None:
    """A number or a text as the reader takes it, exactly."""
    if value is None or value is pd.NA:
        return None
    if isinstance(value, str):
        return value
    try:
        return repr(float(value))
    except OverflowError:  # a whole number beyond all floats, for whose bound infinity counts, too
        return "inf" if value > 0 else "-inf"


@dataclass(frozen=True)
class PreparedRecords:
    """Records that were prepared elsewhere, such as the vectors that a public encoder makes of images or texts.

    Attributes:
        shape: Of one record.
        has_tokens: Whether they are tokens, which are whole numbers.
        encoder: The encoder's name, settings and `sha256` of its weights; None without one.
    """

    shape: tuple[int, ...]
    has_tokens: bool
    encoder: Mapping[str, object] | None

    def encode(self, X: Any) -> NDArray[Any]:
        """The records as the network takes them, [n, *shape].

        Raises RefusedError for an array of another shape.
        """
        records = np.asarray(X)
        if records.ndim != 1 + len(self.shape) or records.shape[1:] != self.shape or records.dtype == object:
            by = f" by the encoder {self.encoder['name']}" if self.encoder else ""
            raise RefusedError(
                "X is no array of records of shape {shape}, which the model takes; prepare them{by}, or use"
                " `epsilonflow predict`, which does.",
                code="bad_argument",
                shape=self.shape,
                by=by,
                arguments=("X",),
            )
        return np.ascontiguousarray(records, np.int32 if self.has_tokens else np.float32)


def usual_method(records: int, loss: Any, steps: int, epsilon: float, *, has_constant: bool = True) -> DPSGD:
    """DP-SGD with the settings that suit the network: batches of a tenth, and no step beyond the stable rate.

    has_constant: whether all rows share a cell, by which a classifier can say the frequencies of the classes.
    """
    kind: OutputKind = "classes" if loss == "cross_entropy" else "number"
    usual = CROSS_ENTROPY if kind == "classes" else SQUARED_ERROR
    curvature = getattr(loss, "curvature", usual.curvature)
    # Frequencies need a cell that all rows share, and a quantile is not what is released.
    can_shrink = has_constant if kind == "classes" else not isinstance(loss, QuantileLoss)
    share = shrink_share(records, epsilon) if can_shrink else None
    has_squares = kind == "number" and not isinstance(loss, CountLoss | QuantileLoss)
    momentum = usual_momentum(records, epsilon, steps) if kind == "classes" else USUAL_MOMENTUM
    update = OptimizerConfig(
        learning_rate=float(f"{(1.0 + momentum) / curvature:.2g}"),  # half of where descent could diverge
        momentum=momentum,
        schedule="linear",
        noise_limit=usual_noise_limit(records, epsilon, kind, is_shrunk=share is not None),
        optimizer="sgd",
    )
    batch = min(_MAX_BATCH, max(1, round(records / _BATCHES_IN_A_PASS)))
    return DPSGD(
        steps=steps,
        expected_batch_size=batch,
        clip_norm=CLIP_OF_COUNTS if isinstance(loss, CountLoss) else 1.0,
        update=update,
        shrink_share=share,
        error_share=error_share(records, epsilon) if has_squares else None,
    )


def encoding_of_bounds(bounds: Any, width: int, cells: CellSettings) -> TableEncoding:
    """The encoding of arrays: one pair of bounds for all columns, or a bound or one for each column on each side.

    Raises RefusedError for bounds that do not fit the columns.
    """
    try:
        low, high = bounds
        ends = [np.broadcast_to(np.asarray(end, float), (width,)).tolist() for end in (low, high)]
        pairs = [*zip(*ends, strict=True)]
    except (TypeError, ValueError):
        raise RefusedError(
            "bounds do not fit {width} columns; give (low, high) for all of them, or arrays of {width} each.",
            code="bad_argument",
            width=width,
            arguments=("bounds",),
        ) from None
    columns = [_column(str(index), pair) for index, pair in enumerate(pairs)]
    return _encoding_of(columns, ("",), "bounds", cells)


def encoding_of_schema(schema: Any, cells: CellSettings) -> TableEncoding:
    """The encoding of DataFrames.

    schema: a data card, its name or its file; or a mapping of columns, each to (low, high), numbers or days, a list of
    its categories, or what a data card says of it, such as {"kind": "hashed", "cells": 64}. A missing number has cells
    of its own. cells: unless a data card has its own.

    Raises RefusedError for what is no mapping of columns, and for a data card without a table.
    """
    if isinstance(schema, TableEncoding):
        return schema
    if isinstance(schema, DataCard | str | Path):
        declared = declared_card(schema)
        if not isinstance(declared.reader, Table):
            raise RefusedError(
                "the data card {declared!r} declares no table; give one that does.",
                code="bad_argument",
                declared=declared.name,
                arguments=("schema",),
            )
        reader = declared.reader
        person = None if declared.person is None else declared.person.column
        columns = [
            column.model_dump()
            for column in reader.columns
            if not isinstance(column, Label | Ignored) and column.name != person
        ]
        dates = {
            part
            for column in reader.columns
            if isinstance(column, Date)
            for part in (column.month, column.day)
        }
        columns += [{"name": name, "kind": "ignored"} for name in sorted(dates)]
        return _encoding_of(columns, reader.missing, "schema", reader.cells or cells)
    if not isinstance(schema, Mapping) or not schema:
        raise RefusedError(
            "schema is no mapping of columns; give {{'age': (17, 90), 'job': ['clerk', 'nurse']}}, or a data card.",
            code="bad_argument",
            arguments=("schema",),
        )
    return _encoding_of(
        [_column(str(name), declared) for name, declared in schema.items()],
        USUAL_MISSING,
        "schema",
        cells,
    )


def encoding_of_model(model: TrainedModel) -> TableEncoding | PreparedRecords:
    """How a model's file says its records were prepared: the columns of a table as it is, or what else to give."""
    preparation = preparation_of(model.preparation)
    if preparation is not None and (table := preparation.table) is not None:
        return TableEncoding(table, table.content)
    has_tokens = model.facts.tokens is not None
    return PreparedRecords(
        model.input_shape, has_tokens, None if preparation is None else preparation.encoder
    )


def declared_card(card: DataCard | str | Path) -> DataCard:
    """A data card, by itself, by its file, or by the name of one that is shipped or lies in data/cards.

    Raises RefusedError for a card that cannot be read.
    """
    if isinstance(card, DataCard):
        return card
    path = Path(card)
    try:
        if path.suffix in (".yaml", ".yml"):
            return data_card(path.stem, path.parent)
        cards = Path("data/cards")
        return data_card(str(card), cards if (cards / f"{card}.yaml").is_file() else CARDS)
    except DataRefusedError as error:
        raise RefusedError("{problem}", code="bad_argument", problem=error, arguments=("card",)) from None


def _column(name: str, declared: Any) -> dict[str, object]:
    if isinstance(declared, Mapping):
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in declared.items()}
        return {"name": name, **values}
    if isinstance(declared, np.ndarray):
        declared = declared.tolist()
    if isinstance(declared, tuple) and len(declared) == 2 and all(map(_is_day, declared)):
        return {"name": name, "kind": "timestamp", "bounds": tuple(str(day)[:10] for day in declared)}
    if isinstance(declared, tuple) and len(declared) == 2:
        low, high = declared
        return {"name": name, "kind": "numeric", "bounds": (low, high), "missing": low}
    if isinstance(declared, Sequence) and not isinstance(declared, str):
        words = tuple(
            str(category).lower() if isinstance(category, bool) else str(category) for category in declared
        )
        return {"name": name, "kind": "categorical", "categories": words}
    raise RefusedError(
        "the schema of {name!r} is none; give (low, high) for a number, or a list of all categories.",
        code="bad_argument",
        name=name,
        arguments=("schema",),
    )


def _is_day(bound: Any) -> bool:
    """Whether a bound is a day, as an object or as 2020-01-31."""
    return isinstance(bound, date) or (isinstance(bound, str) and bool(_DAY.fullmatch(bound)))


def _encoding_of(
    columns: Sequence[Mapping[str, object]],
    missing: tuple[str, ...],
    what: str,
    cells: CellSettings,
) -> TableEncoding:
    try:
        table = Csv.model_validate(
            {
                "kind": "csv",
                "columns": (*columns, _TARGET),
                "missing": missing,
                "cells": cells,
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RefusedError(
            "{what} does not fit ({where}: {problem}); correct it.",
            code="bad_argument",
            what=what,
            where=where,
            problem=first["msg"],
            arguments=(what,),
        ) from None
    return TableEncoding(table, table.content)

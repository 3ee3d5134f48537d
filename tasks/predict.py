"""Predict with a trained model on new records, which are prepared as the data card in the model's file says.

    >>> from tasks.predict import predict
    >>> for batch in predict("artifacts", "new_visits.csv"):     # doctest: +SKIP
    ...     print(batch.names, batch.predicted, batch.scores)

Predictions are post-processing of the released model and cost no privacy of the people it was trained on. Nothing here
protects the records that are predicted on.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.errors import RefusedError
from algorithms.extension import check_allowed
from algorithms.gradients.patches import without_shortcuts
from algorithms.models.objectives import MARGINS, next_token
from algorithms.models.saved import TrainedModel, load
from data.card import DataRefusedError
from data.formats import Own
from data.new_records import records_in
from data.preparation import preparation_of, target_in
from data.targets import IGNORED, Labels, NextToken, Number, Tags, Target
from tasks.csv_files import write_csv
from tasks.prediction_passes import records_a_pass
from tasks.prepare import encoder_of_model, loader_of, reader_of


@dataclass(frozen=True)
class Predictions:
    """Predictions for some records.

    names: names of the records. predicted: a class; a number in its own units; the labels of the record, separated by
    semicolons; the perplexity of a text, empty if no token follows another; or the tags of the words, separated by
    spaces, for as many words as the model's tokens reach. scores: [n, classes], a number for each class or label; [n,
    0] for other targets. is_probability: whether the scores are probabilities. input_columns: of the records' own file,
    by `--keep`. numbers: those that are predicted, unrounded, NaN for none; None if none are.
    """

    names: tuple[str, ...]
    predicted: tuple[str, ...]
    scores: NDArray[np.float64]
    is_probability: bool
    input_columns: pd.DataFrame | None = None
    numbers: NDArray[np.float64] | None = None


def predict(
    model: TrainedModel | str | Path,
    path: str | Path,
    *,
    allow_code: Collection[str] = (),
    threshold: float | None = None,
) -> Iterator[Predictions]:
    """Predict the records in a file or folder, in batches.

    Args:
        model: a model from `algorithms.load`, or the path of its file or folder.
        path: see `data.new_records.records_in`.
        allow_code: code of the user's own, `package.module:factory`, that the model's file may name: a model, an
            encoder, a reader. No other code is imported, whatever the file says.
        threshold: of two classes, predict the second one where its probability exceeds this, instead of one half.

    Raises:
        RefusedError: if a threshold does not fit the model, or is not between 0 and 1.
        DataRefusedError: if the path cannot be read, or the data card does not allow a record.
        ModelRefusedError: if the file is not a trained model.
        NotUsableError: if it names code that is not allowed.
    """
    model = model if isinstance(model, TrainedModel) else load(model, allow_code=allow_code)
    target = target_in(model.target)
    if threshold is not None:
        _check_threshold(model, threshold)
    of_tokens = prod(model.input_shape) * model.facts.output_count if target and target.has_tokens else 1
    size = records_a_pass(of_tokens)
    preparation = preparation_of(model.preparation)
    encoder = encoder_of_model(preparation, allow_code=allow_code)
    encode = None if encoder is None else loader_of(encoder, target)()
    reader = None if preparation is None else preparation.format
    if isinstance(reader, Own):
        check_allowed(reader.factory, allow_code, "the model's file")
    tokens = model.facts.tokens
    batches = records_in(
        Path(path),
        preparation,
        model.input_shape,
        tokens=tokens,
        encode=encode,
        own_reader=reader_of(reader),
    )
    for records in batches:
        for start in range(0, len(records.names), size):
            features = np.ascontiguousarray(records.features[start : start + size])
            batch = _predict_batch(model, target, records.names[start : start + size], features)
            yield batch if threshold is None else _with_threshold(batch, model.classes, threshold)


def _check_threshold(model: TrainedModel, threshold: float) -> None:
    if len(model.classes) != 2 or model.predicts != "class" or model.facts.model in MARGINS:
        raise RefusedError(
            "a threshold is of the probability of the second of two classes, which this model does not give; leave it"
            " out.",
            code="bad_option",
            options=("--threshold",),
        )
    if not 0.0 < threshold < 1.0:
        raise RefusedError(
            "the threshold is {threshold:g}; give a probability between 0 and 1.",
            code="bad_option",
            threshold=threshold,
            options=("--threshold",),
        )


def _with_threshold(batch: Predictions, classes: tuple[str, ...], threshold: float) -> Predictions:
    predicted = tuple(classes[index] for index in (batch.scores[:, 1] > threshold).astype(int).tolist())
    return replace(batch, predicted=predicted)


def _predict_batch(
    model: TrainedModel, target: Target | None, names: tuple[str, ...], inputs: NDArray[Any]
) -> Predictions:
    """Predict a batch of prepared records. target: None for classes."""
    is_first = np.ones(inputs.shape, bool)
    if isinstance(target, Tags) and inputs.ndim == 3:
        inputs, is_first = inputs[:, 0], inputs[:, 1] >= 0
    features, none = torch.from_numpy(inputs), np.zeros((len(names), 0))
    with torch.no_grad(), without_shortcuts():  # as in training
        scores = model(features)
    if isinstance(target, Tags):
        rows = zip(scores.argmax(-1).numpy(), is_first, strict=True)
        tags = tuple(" ".join(target.tags[index] for index in row[first]) for row, first in rows)
        return Predictions(names, tags, none, False)
    if isinstance(target, NextToken):
        return _of_numbers(names, _perplexities(model, features, scores, target))
    if isinstance(target, Number):
        return _of_numbers(names, target.in_units(scores[:, 0].double().numpy()))
    if isinstance(target, Labels):
        labels = tuple(
            ";".join(itertools.compress(target.labels, is_positive)) for is_positive in (scores > 0).tolist()
        )
        return Predictions(names, labels, scores.double().sigmoid().numpy(), True)
    is_probability = model.facts.model not in MARGINS
    shown = scores.double().softmax(-1) if is_probability else scores.double()
    predicted = tuple(model.classes[index] for index in scores.argmax(-1).tolist())
    return Predictions(names, predicted, shown.numpy(), is_probability)


def _of_numbers(names: tuple[str, ...], numbers: NDArray[np.float64]) -> Predictions:
    """Predictions that are numbers, NaN for none."""
    texts = tuple("" if np.isnan(n) else f"{n:.6g}" for n in numbers.tolist())
    return Predictions(names, texts, np.zeros((len(names), 0)), False, numbers=numbers)


def _perplexities(
    model: TrainedModel, tokens: Tensor, scores: Tensor, target: NextToken
) -> NDArray[np.float64]:
    """The perplexity of each text, NaN where no token follows another."""
    _, labels = target.align_labels(tokens.numpy(), tokens.numpy(), model.facts.padding)
    losses = next_token(scores, torch.from_numpy(labels)).double().clamp(max=700.0)
    follows = (labels[:, 1:] != IGNORED).any(axis=1)
    return np.where(follows, losses.exp().numpy(), np.nan)


def write(
    predictions: Iterable[Predictions], classes: tuple[str, ...], to: Path | IO[str], privacy: str = ""
) -> Iterator[int]:
    """Write predictions to CSV, or to Parquet if `to` ends in .parquet; yields the number of records so far.

    A row has the record's name, the prediction, and for each class its probability or score. `privacy` is what the
    model's card says; it becomes metadata of a Parquet file, and CSV has no place for it. Numbers to predict are
    doubles in Parquet. A file is replaced when all is written, and stays as it is if something fails or there are no
    records. Only its owner can read it. Raises DataRefusedError for another ending.
    """
    if not isinstance(to, Path):
        yield from _csv(predictions, classes, to)
        return
    if to.suffix not in (".csv", ".parquet"):
        raise DataRefusedError(
            "{path} must end in .csv or .parquet, which say how predictions are written.",
            code="bad_output",
            path=to,
        )
    to.parent.mkdir(parents=True, exist_ok=True)
    count, fresh = 0, to.with_name(f".{to.name}.part")
    fresh.unlink(missing_ok=True)  # of a command that was killed
    try:
        fresh.touch(mode=0o600)
        if to.suffix == ".parquet":
            counts = _parquet(predictions, classes, fresh, privacy)
        else:
            counts = _csv(predictions, classes, fresh)
        for count in counts:
            yield count
        if count:
            fresh.replace(to)
    finally:
        fresh.unlink(missing_ok=True)


def _csv(predictions: Iterable[Predictions], classes: tuple[str, ...], to: Path | IO[str]) -> Iterator[int]:
    count = 0
    for batch in predictions:
        write_csv(
            _frame(batch, classes),
            to,
            mode="a" if count else "w",
            header=not count,
            float_format="%.6g",
        )
        count += len(batch.names)
        yield count


def _frame(batch: Predictions, classes: tuple[str, ...]) -> pd.DataFrame:
    what = "probability" if batch.is_probability else "score"
    scores = {f"{what} of {name}": score for name, score in zip(classes, batch.scores.T, strict=False)}
    # The name of a file may have bytes that are no text.
    names = [name.encode("utf-8", "backslashreplace").decode() for name in batch.names]
    inputs = (
        {} if batch.input_columns is None else {str(name): part for name, part in batch.input_columns.items()}
    )
    return pd.DataFrame({"record": names, **inputs, "predicted": batch.predicted, **scores})


def _parquet(
    predictions: Iterable[Predictions], classes: tuple[str, ...], to: Path, privacy: str
) -> Iterator[int]:
    import pyarrow as pa
    from pyarrow import parquet

    writer: Any = None
    count = 0
    try:
        for batch in predictions:
            frame = _frame(batch, classes)
            if batch.numbers is not None:
                frame["predicted"] = batch.numbers
            table = pa.Table.from_pandas(frame, preserve_index=False)
            table = table.replace_schema_metadata({**(table.schema.metadata or {}), "privacy": privacy})
            writer = writer or parquet.ParquetWriter(to, table.schema)
            writer.write_table(table)
            count += len(batch.names)
            yield count
    finally:
        if writer is not None:
            writer.close()

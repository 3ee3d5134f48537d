"""The evaluate stage: test the released model on held-out records.

Where the data card declares them public, their exact metrics are computed here. Private ones are not read: metrics
follow from the histogram that training released of them.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.errors import RefusedError
from algorithms.evaluation import (
    Estimate,
    Recalibration,
    ReleasedHistogram,
    calibration_curve,
    calibration_error_of,
    cheapest_threshold,
    class_metrics_of,
    confusion_of,
    count,
    group_differences,
    groups_of,
    histogram_for,
    reasons_of,
    recalibration_of,
    thresholds_of,
)
from algorithms.evaluation import metrics_of as released_metrics
from algorithms.evaluation.histogram import BINARY, MULTICLASS
from algorithms.model_facts import facts_of
from algorithms.models import Model
from algorithms.models.saved import load_model as load_model
from algorithms.privacy.documents import Receipt
from data import DatasetInfo
from data.prepared import HeldOut, load_held_out
from data.targets import IGNORED, Count, Labels, LabelType, NextToken, Number, Quantile, Tags
from tasks.config import home
from tasks.config.own_code import named_code
from tasks.csv_files import write_rows
from tasks.prediction_passes import passes, predictions
from tasks.runs import store
from tasks.runs.metrics import metric_units
from tasks.runs.metrics_document import PublicMetrics
from tasks.runs.stage_main import main_of
from tasks.runs.store import EVALUATION, check_data_facts, run_facts, sha256_of

READS: tuple[str, ...] = ()
_INTERVALS = 10
_AT_THRESHOLDS = ("selected", "precision", "recall", "false_positive_rate", "lift")
_MAX_DRAWN = 100_000
"""Upper bound on the words or tokens in a figure."""


@dataclass(frozen=True)
class EvaluationResult:
    """Predictions on the held-out records.

    predicted: [n, ...]. loss: the mean loss of a record, or of a token if there is an output for each token. scores:
    [n, outputs], the probabilities of classes (the softmax of the scores, although those of an SVM are not log-odds) or
    of each label, or the number in [-1, 1]; [n, 0] if there is an output for each token.
    """

    predicted: NDArray[np.int64]
    loss: float
    scores: NDArray[np.float64]


@dataclass(frozen=True)
class PredictionPairs:
    """Pairs of true and predicted values, as indices into `names`, for figures of a model's errors."""

    predicted: NDArray[np.int64]
    real: NDArray[np.int64]
    names: tuple[str, ...]


class _TargetMetrics:
    """Metrics of one kind of target; their names are the keys of metrics.json."""

    def document(self) -> dict[str, object]:
        """The metrics by name."""
        return dict(vars(self))


@dataclass(frozen=True)
class NumberMetrics(_TargetMetrics):
    """Errors of a predicted number in its own units.

    test_r2: 1 - MSE / variance, 0 for always predicting the mean of these records. mean_rmse: the error of that
    prediction.
    """

    test_r2: float
    test_rmse: float
    test_mae: float
    mean_rmse: float


@dataclass(frozen=True)
class CountMetrics(_TargetMetrics):
    """The mean Poisson deviance of predicted rates, beside the errors of a number.

    test_d2: the share of the deviance that the model explains, 0 for always predicting the mean of these records, whose
    deviance is mean_deviance.
    """

    test_d2: float
    test_deviance: float
    mean_deviance: float
    test_rmse: float
    test_mae: float
    mean_rmse: float


@dataclass(frozen=True)
class QuantileMetrics(_TargetMetrics):
    """The mean pinball loss of a predicted quantile, in its own units, and the share of records at or below it.

    test_pinball_explained: the share of the loss that the model saves (R1 of Koenker and Machado 1999), 0 for always
    predicting this quantile of these records, whose loss is constant_pinball_loss.
    """

    test_pinball_explained: float
    test_pinball_loss: float
    constant_pinball_loss: float
    test_coverage: float
    level: float


@dataclass(frozen=True)
class LabelMetrics(_TargetMetrics):
    """Metrics of several labels.

    F1 over all pairs of a record and a label, and averaged over labels; the AUC of each label that some but not all
    records have, and the mean of these AUCs; the share of records whose labels are all right. Keys that start with
    constant_ are for the best constant prediction, which consists of the most frequent labels.
    """

    test_micro_f1: float
    test_macro_f1: float
    test_auc: float | None
    test_subset_accuracy: float
    constant_micro_f1: float
    constant_subset_accuracy: float
    auc: Mapping[str, float | None]


@dataclass(frozen=True)
class NextTokenMetrics(_TargetMetrics):
    """unigram_perplexity: the perplexity of predicting each token by its frequency in these texts."""

    test_perplexity: float
    test_token_accuracy: float
    unigram_perplexity: float


@dataclass(frozen=True)
class TagMetrics(_TargetMetrics):
    """F1 over all words and all tags except the outside one, and over entities if the tags are B-TYPE and I-TYPE.

    majority_accuracy: the accuracy of always predicting the most frequent tag.
    """

    test_entity_f1: float | None
    test_token_f1: float
    test_token_accuracy: float
    majority_accuracy: float

    def document(self) -> dict[str, object]:
        """The metrics by name; tags of no entities have no key for them."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class ClassMetrics(_TargetMetrics):
    """majority_accuracy: the accuracy of always predicting the most frequent class of these `test_records` records.

    test_auc: one class against the rest, averaged; None if a class has no records or scores are not finite.
    """

    test_accuracy: float
    majority_accuracy: float
    test_records: int
    test_auc: float | None
    test_f1: float
    calibration_error: float | None


def evaluate(model: Model, parameters: Mapping[str, Tensor], data: HeldOut) -> EvaluationResult:
    """Compute predictions and mean loss on the held-out records."""
    label_type = data.info.label_type
    predicted, losses, weights, all_scores = [], [], [], []
    for outputs, scores, labels, evaluated in passes(model, parameters, data):
        predicted.append((scores > 0).long() if label_type.kind == "labels" else scores.argmax(dim=-1))
        all_scores.append(predictions(label_type, scores))
        losses.append(evaluated.losses(outputs, labels).double())
        predictable = labels[:, 1:] if label_type.kind == "next token" else labels
        # A record's loss is the mean over its tokens, so it weighs as many as it has.
        counts = predictable.ne(IGNORED).sum(-1) if label_type.has_tokens else torch.ones(len(labels))
        weights.append(counts.double())
    weight = torch.cat(weights)
    loss = float((torch.cat(losses) * weight).sum() / weight.sum().clamp(min=1.0))
    return EvaluationResult(torch.cat(predicted).numpy(), loss, torch.cat(all_scores).numpy())


def _pairs(
    label_type: LabelType, evaluation: EvaluationResult, labels: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Predicted and true labels of the tokens that count, [count] each."""
    predicted, real = evaluation.predicted, np.asarray(labels)
    if label_type.kind == "next token":
        predicted, real = predicted[:, :-1], real[:, 1:]
    counts = real != IGNORED
    return predicted[counts], real[counts]


def compute_metrics(
    label_type: LabelType, evaluation: EvaluationResult, labels: NDArray[Any]
) -> PublicMetrics:
    """The metrics of the target; models are compared by the first of its kind in `tasks.runs.metrics`."""
    metrics: _TargetMetrics
    if isinstance(label_type, Count):
        metrics = _of_counts(label_type, evaluation, labels)
    elif isinstance(label_type, Quantile):
        metrics = _of_quantiles(label_type, evaluation, labels)
    elif isinstance(label_type, Number):
        metrics = _of_numbers(label_type, evaluation, labels)
    elif isinstance(label_type, Labels):
        metrics = _of_labels(label_type, evaluation, labels)
    elif isinstance(label_type, Tags):
        metrics = _of_tags(label_type, evaluation, labels)
    elif isinstance(label_type, NextToken):
        metrics = _of_next_tokens(label_type, evaluation, labels)
    else:
        metrics = classification_metrics(evaluation, labels)
    gains = _gains(label_type, evaluation, labels)
    gain: dict[str, object] = {} if gains is None else {"gain": interval_of(gains)}
    return cast(PublicMetrics, metrics.document() | gain | {"test_loss": evaluation.loss})


def interval_of(gains: NDArray[np.float64]) -> dict[str, float]:
    """The mean of what records gain, with its 95 % interval.

    Example:
        >>> interval_of(np.array([1.0, 3.0]))
        {'value': 2.0, 'low': 0.0400..., 'high': 3.96}
    """
    mean = float(gains.mean()) if len(gains) else 0.0
    reach = 1.96 * float(gains.std(ddof=1)) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return {"value": mean, "low": mean - reach, "high": mean + reach}


def _gains(
    label_type: LabelType, evaluation: EvaluationResult, labels: NDArray[Any]
) -> NDArray[np.float64] | None:
    """How much each record's loss is below that of the best constant answer, [n].

    The losses are squared errors, deviances, pinball losses, 1 less the F1 of a record's labels, and wrong tokens. None
    for classes, and for texts none of whose tokens counts.
    """
    if isinstance(label_type, Number):
        real, predicted_numbers = _numbers(label_type, evaluation, labels)
        constant = np.full_like(real, real.mean())
        if isinstance(label_type, Quantile):
            level = label_type.quantile
            constant[:] = np.quantile(real, level, method="inverted_cdf")
            return pinball_losses(real, constant, level) - pinball_losses(real, predicted_numbers, level)
        if isinstance(label_type, Count):
            return poisson_deviances(real, constant) - poisson_deviances(real, predicted_numbers)
        return np.square(real - constant) - np.square(real - predicted_numbers)
    if isinstance(label_type, Labels):
        answers = np.asarray(labels) > 0
        counts = np.sort(answers.sum(axis=0))[::-1]
        # The best constant answer is the k most frequent labels. Half of its F1 over all pairs of a record and a label
        # is the number of right labels over the predicted plus the true ones, for each k.
        predicted_pairs = len(answers) * np.arange(1, len(counts) + 1)
        best = int((np.cumsum(counts) / (predicted_pairs + counts.sum())).argmax()) + 1
        always = np.zeros_like(answers)
        always[:, np.argsort(-answers.sum(axis=0), kind="stable")[:best]] = True
        return _record_f1(answers, evaluation.predicted > 0) - _record_f1(answers, always)
    if not label_type.has_tokens:
        return None
    predicted, real = evaluation.predicted, np.asarray(labels)
    if isinstance(label_type, NextToken):
        predicted, real = predicted[:, :-1], real[:, 1:]
    is_counted = real != IGNORED
    if not is_counted.any():
        return None
    commonest = np.bincount(real[is_counted]).argmax()
    right = ((predicted == real).astype(float) - (real == commonest)) * is_counted
    # Scaled so that the mean over texts is the mean over tokens.
    gains: NDArray[np.float64] = right.sum(axis=1) * len(real) / is_counted.sum()
    return gains


def _record_f1(real: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> NDArray[np.float64]:
    named = real.sum(axis=1) + predicted.sum(axis=1)
    return np.where(named > 0, 2.0 * (real & predicted).sum(axis=1) / np.maximum(named, 1), 1.0)


def uneven_metrics(
    released: ReleasedHistogram, info: DatasetInfo, *, recalibrate: Callable[[float], float] = float
) -> dict[str, object]:
    """Share, recall and precision of each class, and the cheapest threshold at the declared costs, with intervals.

    recalibrate: maps a probability of the histogram, which the model gave before its recalibration, to the one that
    the published model gives.
    """
    per_class, label_type = class_metrics_of(released), info.label_type
    document: dict[str, object] = {}
    if per_class:
        # A list, as for thresholds, since DVC makes a column of each number outside of lists.
        document["by_class"] = [
            {"class": name, **_documents("", vars(metrics), label_type)}
            for name, metrics in zip(label_type.names, per_class, strict=True)
        ]
    decision = None if info.costs is None else cheapest_threshold(released, info.costs)
    if decision is not None:
        shown = {"recall": decision.at.recall, "precision": decision.at.precision}
        shown |= {"cost": decision.cost, "constant_cost": decision.constant_cost}
        document["decision"] = {
            "class": label_type.names[1],
            "threshold": recalibrate(decision.at.threshold),
            **_documents("", shown, label_type),
        }
    return document


def exact_histogram(
    info: DatasetInfo, evaluation: EvaluationResult, labels: NDArray[Any]
) -> ReleasedHistogram:
    """The histogram of public held-out records of classes, without noise."""
    classes = len(info.label_type.names)
    spec = histogram_for(BINARY if classes == 2 else MULTICLASS, classes)
    return ReleasedHistogram(spec, count(spec, evaluation.scores, np.asarray(labels)), 0.0)


def metrics_of(model: Path, prepared: Path, *, allow_code: Collection[str] = ()) -> PublicMetrics:
    """The metrics of a model file on the held-out records of prepared data; allow_code: as in `algorithms.load`."""
    data = load_held_out(prepared)
    trained = load_model(model, allow_code=allow_code)
    return compute_metrics(data.info.label_type, evaluate(*trained, data), data.test_labels)


def _of_numbers(label_type: Number, evaluation: EvaluationResult, labels: NDArray[Any]) -> NumberMetrics:
    real, predicted = _numbers(label_type, evaluation, labels)
    squared, spread = float(np.square(predicted - real).mean()), float(np.var(real))
    return NumberMetrics(
        test_r2=1.0 - squared / spread if spread > 0 else 0.0,
        test_rmse=squared**0.5,
        test_mae=float(np.abs(predicted - real).mean()),
        mean_rmse=spread**0.5,
    )


def _numbers(
    label_type: Number, evaluation: EvaluationResult, labels: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """True and predicted numbers in their own units, [n] each."""
    real, predicted = labels, evaluation.scores[:, 0]
    return label_type.in_units(np.asarray(real, np.float64)), label_type.in_units(predicted)


def _of_counts(label_type: Count, evaluation: EvaluationResult, labels: NDArray[Any]) -> CountMetrics:
    real, rates = _numbers(label_type, evaluation, labels)
    constant = np.full_like(real, real.mean())
    deviance, baseline = (float(poisson_deviances(real, of).mean()) for of in (rates, constant))
    errors = _of_numbers(label_type, evaluation, labels)
    return CountMetrics(
        test_d2=1.0 - deviance / baseline if baseline > 0 else 0.0,
        test_deviance=deviance,
        mean_deviance=baseline,
        test_rmse=errors.test_rmse,
        test_mae=errors.test_mae,
        mean_rmse=errors.mean_rmse,
    )


def poisson_deviances(counts: NDArray[np.float64], rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """2 (y log(y / r) - y + r) of each record; rates of almost 0 count as a millionth of the largest count."""
    rates = np.maximum(rates, 1e-6 * max(1.0, float(counts.max(initial=0.0))))
    logs = np.zeros_like(counts)
    np.log(counts / rates, where=counts > 0, out=logs)
    return 2.0 * (counts * logs - counts + rates)


def pinball_losses(
    numbers: NDArray[np.float64], quantiles: NDArray[np.float64], level: float
) -> NDArray[np.float64]:
    """The pinball loss of each record's quantile."""
    return np.maximum(level * (numbers - quantiles), (level - 1.0) * (numbers - quantiles))


def _of_quantiles(
    label_type: Quantile, evaluation: EvaluationResult, labels: NDArray[Any]
) -> QuantileMetrics:
    real, predicted = _numbers(label_type, evaluation, labels)
    level = label_type.quantile
    constant = np.full_like(real, np.quantile(real, level, method="inverted_cdf"))
    loss, baseline = (float(pinball_losses(real, of, level).mean()) for of in (predicted, constant))
    return QuantileMetrics(
        test_pinball_explained=1.0 - loss / baseline if baseline > 0 else 0.0,
        test_pinball_loss=loss,
        constant_pinball_loss=baseline,
        test_coverage=float((real <= predicted).mean()),
        level=level,
    )


def _of_labels(label_type: Labels, evaluation: EvaluationResult, labels: NDArray[Any]) -> LabelMetrics:
    real = np.asarray(labels).astype(np.int64)
    areas: dict[str, float | None] = dict.fromkeys(label_type.labels)
    for column, name in enumerate(label_type.labels):
        if 0 < real[:, column].sum() < len(real) and np.isfinite(evaluation.scores[:, column]).all():
            areas[name] = area_under_curve(real[:, column] > 0, evaluation.scores[:, column])
    defined = [area for area in areas.values() if area is not None]
    counts = np.sort(real.sum(axis=0))[::-1]
    predicted_pairs = len(real) * np.arange(1, len(counts) + 1)
    # F1 is twice the correct labels over the predicted plus the true ones; here of the k most frequent labels, each k.
    always = 2 * np.cumsum(counts) / (predicted_pairs + counts.sum())
    _, sets = np.unique(real, axis=0, return_counts=True)
    hits = (real * evaluation.predicted).sum(axis=0)
    named = real.sum(axis=0) + evaluation.predicted.sum(axis=0)
    return LabelMetrics(
        test_micro_f1=f1(hits.sum(), named.sum()),
        test_macro_f1=float(np.mean([f1(*counts) for counts in zip(hits, named, strict=True)])),
        test_auc=float(np.mean(defined)) if defined else None,
        test_subset_accuracy=float((real == evaluation.predicted).all(axis=1).mean()),
        constant_micro_f1=float(always.max()),
        constant_subset_accuracy=float(sets.max() / len(real)),
        auc=areas,
    )


def _of_next_tokens(
    label_type: NextToken, evaluation: EvaluationResult, labels: NDArray[Any]
) -> NextTokenMetrics:
    predicted, real = _pairs(label_type, evaluation, labels)
    shares = np.unique(real, return_counts=True)[1] / max(1, len(real))
    return NextTokenMetrics(
        test_perplexity=math.exp(min(evaluation.loss, 700.0)),
        test_token_accuracy=float(np.mean(predicted == real)) if len(real) else 0.0,
        unigram_perplexity=math.exp(-float((shares * np.log(shares)).sum())),
    )


def _of_tags(label_type: Tags, evaluation: EvaluationResult, labels: NDArray[Any]) -> TagMetrics:
    predicted, real = _pairs(label_type, evaluation, labels)
    inside = [index for index, name in enumerate(label_type.tags) if name != label_type.outside]
    counts = np.bincount(real, minlength=1)
    is_inside, is_named = np.isin(real, inside), np.isin(predicted, inside)
    hits = (is_inside & (real == predicted)).sum()
    types = entity_types(label_type)
    rows = np.nonzero(np.asarray(labels) != IGNORED)[0]  # [count], the text of each word
    return TagMetrics(
        test_entity_f1=None if types is None else entity_f1(types, predicted, real, rows),
        test_token_f1=f1(hits, is_inside.sum() + is_named.sum()),
        test_token_accuracy=float(np.mean(predicted == real)) if len(real) else 0.0,
        majority_accuracy=float(counts.max() / max(1, len(real))),
    )


def entity_types(label_type: Tags) -> tuple[tuple[str, ...], NDArray[np.bool_]] | None:
    """The type of each tag, "" for the outside tag, and whether it begins an entity; None if the tags are not BIO tags.

    IOB2 has B-TYPE tags, I-TYPE tags for some of these types, and one outside tag.
    """
    outside = label_type.outside or "O"
    types = tuple("" if tag == outside else tag[2:] for tag in label_type.tags)
    begins = np.array([tag.startswith("B-") for tag in label_type.tags])
    inside = [tag for tag in label_type.tags if tag != outside]
    is_bio = inside and all(tag[:2] in ("B-", "I-") and f"B-{tag[2:]}" in inside for tag in inside)
    return (types, begins) if is_bio else None


def entity_f1(
    types: tuple[tuple[str, ...], NDArray[np.bool_]],
    predicted: NDArray[np.int64],
    real: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> float:
    """F1 over entities, as the CoNLL tasks count them: first word, last word and type must agree.

    An I-TYPE begins an entity if the tag before it in the text is not of its type.

    Args:
        types: as `entity_types` returns them.
        predicted: predicted tags of all words, concatenated, [count].
        real: true tags, [count].
        rows: index of each word's text, ascending, [count].

    Example:
        >>> types = entity_types(Tags(tags=("O", "B-WHO", "I-WHO")))
        >>> entity_f1(types, np.array([1, 2, 0, 1]), np.array([1, 2, 0, 0]), np.zeros(4, np.int64))
        0.6666666666666666
    """
    names, begins = types
    kinds = ["", *sorted({*names} - {""})]
    indices = np.array([kinds.index(name) for name in names])  # 0 is outside

    def spans(tags: NDArray[np.int64]) -> set[tuple[int, int, int]]:
        kind = indices[tags]
        follows = np.concatenate(  # [words]: goes on with the entity before it
            [[False], (kind[1:] == kind[:-1]) & (rows[1:] == rows[:-1]) & ~begins[tags[1:]]]
        )
        starts = np.flatnonzero((kind > 0) & ~follows)
        ends = np.flatnonzero((kind > 0) & ~np.append(follows[1:], False))
        return set(zip(starts.tolist(), ends.tolist(), kind[starts].tolist(), strict=True))

    if not len(real):
        return 0.0
    predicted_spans, real_spans = spans(predicted), spans(real)
    return 2 * len(predicted_spans & real_spans) / max(1, len(predicted_spans) + len(real_spans))


def figure_pairs(
    label_type: LabelType, evaluation: EvaluationResult, labels: NDArray[Any], tokens: int | None = None
) -> PredictionPairs:
    """True and predicted values for figures.

    These are classes or tags; numbers in ten equal intervals of the declared bounds; next tokens in ten intervals of
    the vocabulary; for several labels, each pair of a true and a predicted label of a record, or none.
    """
    if isinstance(label_type, Number):
        edges = np.linspace(*label_type.bounds, _INTERVALS + 1)
        names = tuple(f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges))
        scaled = (np.clip(np.asarray(x, np.float64), -1, 1) for x in (evaluation.scores[:, 0], labels))
        predicted, real = (_interval((x + 1) / 2) for x in scaled)
        return PredictionPairs(predicted, real, names)
    if isinstance(label_type, Labels):
        named, has = (_with_none(x) for x in (evaluation.predicted, np.asarray(labels)))
        # [n, true, predicted]
        _, row, column = np.nonzero(np.logical_and(has[:, :, None], named[:, None, :]))
        return PredictionPairs(column, row, (*label_type.labels, "none of them"))
    if not label_type.has_tokens:
        return PredictionPairs(evaluation.predicted, labels, label_type.names)
    pairs = [x[:: -(-len(x) // _MAX_DRAWN) or 1] for x in _pairs(label_type, evaluation, labels)]
    if isinstance(label_type, Tags):
        return PredictionPairs(pairs[0], pairs[1], label_type.tags)
    ends = np.linspace(0, tokens or 1, _INTERVALS + 1).astype(np.int64)
    names = tuple(f"{low} to {high - 1}" for low, high in pairwise(ends))
    predicted, real = (_interval(x / max(1, tokens or 1)) for x in pairs)
    return PredictionPairs(predicted, real, names)


def _with_none(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Append a column to labels [n, labels] that is true for records without any label."""
    has = labels > 0
    return np.column_stack([has, ~has.any(axis=1)])


def _interval(shares: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.clip((shares * _INTERVALS).astype(np.int64), 0, _INTERVALS - 1)


def classification_metrics(evaluation: EvaluationResult, labels: NDArray[np.int64]) -> ClassMetrics:
    """Accuracy, AUC (one class against the rest, averaged), F1 averaged over classes, and the calibration error.

    The expected calibration error is the distance between the probability of the predicted class and its accuracy,
    averaged over ten equal ranges of that probability, weighted by their records (Guo et al. 2017).
    """
    probabilities = evaluation.scores
    classes = probabilities.shape[1]
    auc = None
    if len(np.unique(labels)) == classes and np.isfinite(probabilities).all():
        judged = range(1 if classes == 2 else 0, classes)  # both AUCs of two classes are the same
        auc = float(np.mean([area_under_curve(labels == index, probabilities[:, index]) for index in judged]))
    confidence, right = probabilities.max(axis=1), evaluation.predicted == labels
    ranges = np.minimum((confidence * 10).astype(np.int64), 9) if np.isfinite(confidence).all() else None
    error = None
    if ranges is not None:
        gaps = [
            abs(float(right[ranges == number].mean() - confidence[ranges == number].mean()))
            for number in np.unique(ranges)
        ]
        error = float(np.average(gaps, weights=np.unique(ranges, return_counts=True)[1]))
    return ClassMetrics(
        test_accuracy=float(right.mean()),
        majority_accuracy=float(np.bincount(labels).max() / len(labels)),
        test_records=len(labels),
        test_auc=auc,
        test_f1=_mean_f1(labels, evaluation.predicted),
        calibration_error=error,
    )


def f1(hits: float, named: float) -> float:
    """F1 of a class: twice what is named rightly, over what is named and what there is; 0 if there is nothing."""
    return 2.0 * float(hits) / float(named) if named else 0.0


def _mean_f1(real: NDArray[np.int64], predicted: NDArray[np.int64]) -> float:
    """The mean F1 of the classes that some record has or is said to have."""
    length = 1 + int(max(real.max(), predicted.max()))
    hits = np.bincount(real[real == predicted], minlength=length)
    named = np.bincount(real, minlength=length) + np.bincount(predicted, minlength=length)
    return float(np.mean([f1(hits[index], named[index]) for index in np.flatnonzero(named)]))


def area_under_curve(is_positive: NDArray[np.bool_], scores: NDArray[np.floating]) -> float:
    """The AUC: how often a positive record has a higher score than another one; equal scores count half.

    By the ranks of the scores (Mann and Whitney); there must be records of both kinds.

    Example:
        >>> area_under_curve(np.array([False, True, True]), np.array([0.2, 0.2, 0.9]))
        0.75
    """
    _, value_of, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Equal scores share their mean rank. The positives' ranks, less what they are at least, count the pairs in order.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[value_of]
    positive = int(is_positive.sum())
    above = float(ranks[is_positive].sum()) - positive * (positive + 1) / 2
    return above / (positive * (len(scores) - positive))


def write_plots(folder: Path, drawn: PredictionPairs) -> None:
    """Write confusion.csv (actual, predicted) and per_class.csv (class, accuracy, records) into `folder`."""
    names, is_hit = drawn.names, drawn.predicted == drawn.real
    pairs = [
        (names[real], names[answer])
        for real, answer in zip(drawn.real.tolist(), drawn.predicted.tolist(), strict=True)
    ]
    records, hits = (
        np.bincount(classes, minlength=len(names)).tolist() for classes in (drawn.real, drawn.real[is_hit])
    )
    shares = [
        (name, hit / count if count else None, count)
        for name, hit, count in zip(names, hits, records, strict=True)
    ]
    write_tables(folder, ClassTables(("actual", "predicted"), pairs, shares))


@dataclass(frozen=True)
class ClassTables:
    """Rows of confusion.csv, with their columns, and of per_class.csv: class, accuracy, records."""

    columns: tuple[str, ...]
    confusion: Sequence[Sequence[object]]
    classes: Sequence[Sequence[object]]


def write_tables(folder: Path, tables: ClassTables) -> None:
    """Write the tables of the figures of classes into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "confusion.csv", tables.columns, tables.confusion)
    write_rows(folder / "per_class.csv", ("class", "accuracy", "records"), tables.classes)


def _of_release(path: Path, receipt: Receipt, info: DatasetInfo) -> tuple[dict[str, object], ClassTables]:
    """Metrics with their intervals, and the plots' tables, from the histogram that training released.

    Raises RefusedError if it is missing or another than the receipt's; a run whose evaluation failed has none.
    """
    planned, names = receipt.sha256.get(EVALUATION), info.label_type.names
    facts: dict[str, object] = {"held_out": "private", "evaluation_epsilon": receipt.evaluation_epsilon}
    if planned is None:
        return facts, class_tables(None, names)
    if not path.is_file() or sha256_of(path) != planned:
        raise RefusedError(
            "{path} is not the evaluation of run {run_id}, which artifacts/receipt.json is of; `dvc"
            " checkout` brings back files that belong together.",
            code="files_of_two_runs",
            path=path,
            run_id=receipt.run_id,
        )
    released = ReleasedHistogram.from_json(path.read_text(encoding="utf-8"))
    recalibration = recalibration_of(released) if released.spec.halves else None
    temperature = 1.0 if recalibration is None else recalibration.temperature

    def recalibrate(probability: float) -> float:
        if recalibration is None:
            return probability
        from scipy.special import expit, logit  # here, since most evaluations do without SciPy

        return float(expit(logit(probability) / temperature))

    document = private_metrics(released, info.label_type, recalibrate=recalibrate)
    document |= uneven_metrics(released, info, recalibrate=recalibrate)
    if released.spec.halves:
        document["recalibration"] = _recalibration_document(recalibration, info.label_type)
    return facts | document, class_tables(released, names)


def private_metrics(
    released: ReleasedHistogram, label_type: LabelType, *, recalibrate: Callable[[float], float] = float
) -> dict[str, object]:
    """The metrics of a released histogram: an estimate with its interval each, None where noise drowns it.

    With those of groups, by column, and the differences between groups. recalibrate: as for `uneven_metrics`.
    """
    document: dict[str, object] = dict(_documents("test_", released_metrics(released), label_type))
    reasons = dict(reasons_of(released))
    if curve := calibration_curve(released):
        error = calibration_error_of(released)
        document |= _documents(
            "test_", {"calibration_error": None if isinstance(error, str) else error}, label_type
        )
        if isinstance(error, str):
            reasons["calibration_error"] = error
        document["calibration"] = [
            {"low": point.low, "high": point.high, "predicted": point.predicted}
            | _documents("", {"observed": point.observed}, label_type)
            for point in curve
        ]
    if thresholds := thresholds_of(released):
        document["thresholds"] = [
            {"threshold": recalibrate(metrics.threshold)}
            | _documents("", {name: getattr(metrics, name) for name in _AT_THRESHOLDS}, label_type)
            for metrics in thresholds
        ]
    if reasons:
        document["not_shown"] = {f"test_{name}": reason for name, reason in reasons.items()}
    if released.spec.groups:
        by_column = groups_of(released)
        document["groups"] = {
            column: [
                {
                    "group": group.name,
                    "size": _documents("", {"size": group.size}, label_type)["size"],
                    **_documents("", group.metrics, label_type),
                }
                for group in groups
            ]
            for column, groups in by_column.items()
        }
        document["differences"] = {
            column: [
                {
                    "first": difference.first,
                    "second": difference.second,
                    **_documents("", difference.metrics, label_type),
                }
                for difference in group_differences(groups)
            ]
            for column, groups in by_column.items()
        }
    return document


def _recalibration_document(
    recalibration: Recalibration | None, label_type: LabelType
) -> dict[str, object] | None:
    if recalibration is None:
        return None
    gain = _documents("", {f"{recalibration.metric}_gain": recalibration.gain}, label_type)
    return {"temperature": recalibration.temperature, **gain}


def _documents(
    prefix: str, estimates: Mapping[str, Estimate | None], label_type: LabelType
) -> dict[str, dict[str, float] | None]:
    """Estimates as JSON values; errors of a number, which is scaled to [-1, 1], in its own units."""
    documents: dict[str, dict[str, float] | None] = {}
    for name, estimate in estimates.items():
        units = metric_units(name, label_type)
        documents[f"{prefix}{name}"] = (
            None
            if estimate is None
            else {part: units * getattr(estimate, part) for part in ("value", "low", "high")}
        )
    return documents


def class_tables(released: ReleasedHistogram | None, names: Sequence[str]) -> ClassTables:
    """The tables of predictions by class, from released cells; empty where none were released."""
    shown = None if released is None else confusion_of(released)
    if shown is None or len(names) != len(shown):
        shown, names = np.zeros((0, 0)), ()
    rows = np.rint(np.maximum(shown, 0.0)).astype(np.int64)  # predicted by label
    pairs = [
        (real, answer, int(rows[at, label]))
        for label, real in enumerate(names)
        for at, answer in enumerate(names)
    ]
    totals = rows.sum(axis=0)
    shares = [
        (name, float(rows[at, at] / totals[at]) if totals[at] else None, int(totals[at]))
        for at, name in enumerate(names)
    ]
    return ClassTables(("actual", "predicted", "count"), pairs, shares)


def _receipt_of(model: Path) -> Receipt:
    """The receipt beside a model; raises RefusedError if either is missing, or it is the receipt of another model."""
    beside = model.with_name("receipt.json")
    for path in (model, beside):
        if not path.is_file():
            raise RefusedError(
                "there is no {path}, so no model can be evaluated; train first by `dvc repro`, or bring back what was"
                " trained by `dvc checkout`.",
                code="missing_file",
                path=path,
            )
    receipt = Receipt.read(beside)
    if sha256_of(model) != receipt.sha256[model.name]:
        raise RefusedError(
            "{path} is not the model of run {run_id}, which artifacts/receipt.json is of; `dvc checkout`"
            " brings back files that belong together.",
            code="files_of_two_runs",
            path=model,
            run_id=receipt.run_id,
        )
    return receipt


def main() -> None:
    """`python -P -m tasks.evaluate`, in a checkout."""
    artifacts = Path("artifacts")
    path = artifacts / "model.safetensors"
    receipt = _receipt_of(path)
    prepared = Path("datasets/prepared")
    info = DatasetInfo.read(prepared)
    check_data_facts(receipt, info)
    store.mark_used(home(), receipt.run_id, keeps=not info.is_public)
    if info.holdout == "private":
        document, drawn = _of_release(artifacts / EVALUATION, receipt, info)
        write_tables(artifacts / "plots", drawn)
    else:
        data, label_type = load_held_out(prepared), info.label_type
        evaluation = evaluate(*load_model(path, allow_code=named_code(Path())), data)
        document = {**compute_metrics(label_type, evaluation, data.test_labels)}
        if label_type.kind == "class":
            document |= uneven_metrics(exact_histogram(info, evaluation, data.test_labels), info)
        write_plots(artifacts / "plots", figure_pairs(label_type, evaluation, data.test_labels, info.tokens))
    facts = facts_of(path)
    if facts.shrinkage is not None:
        document["shrinkage"] = {**facts.shrinkage.model_dump(), "predicts": facts.predicts}
    document |= run_facts(receipt)
    # Metrics are written last: if they are those of this run, so are the plots.
    (artifacts / "metrics.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main_of(main)

"""The evaluate stage: the released model on the held-out records, which the data card declares public."""

import csv
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms import models
from algorithms.errors import RefusedError
from algorithms.models import Model
from algorithms.models.saved import load_model as load_model
from data.prepare.prepared import HeldOut, load_held_out
from tasks.config.environment import home
from tasks.runs import store
from tasks.runs.provenance import check_described, evaluated, in_units, verdict
from tasks.runs.stage import main_of

READS: tuple[str, ...] = ()
_BATCH, _INTERVALS = 1024, 10


@dataclass(frozen=True)
class Evaluation:
    """Of the held-out records: predicted classes [n], mean loss, and each class's probability [n, classes].

    The last is the softmax of the scores, which are no logarithms of odds for an SVM. numbers: the first score [n],
    which is the prediction, within [-1, 1], where a number is predicted.
    """

    predicted: NDArray[np.int64]
    loss: float
    probabilities: NDArray[np.float64]
    numbers: NDArray[np.float64]


@dataclass(frozen=True)
class Intervals:
    """Of held-out records: the interval that was predicted [n], the real one [n], and the intervals' names."""

    predicted: NDArray[np.int64]
    real: NDArray[np.int64]
    names: tuple[str, ...]


def evaluate(model: Model, parameters: Mapping[str, Tensor], data: HeldOut) -> Evaluation:
    """Predictions and mean loss on the held-out records."""
    model = models.for_evaluation(model)
    predicted, losses, found, numbers = [], [], [], []
    with torch.no_grad():
        for start in range(0, len(data.test_labels), _BATCH):
            inputs = torch.from_numpy(np.array(data.test_features[start : start + _BATCH]))
            labels = torch.from_numpy(np.array(data.test_labels[start : start + _BATCH]))
            outputs = model.outputs(parameters, inputs)
            scores = model.scores(outputs)
            predicted.append(scores.argmax(dim=-1))
            found.append(scores.double().softmax(dim=-1))
            numbers.append(scores[:, 0].double())
            losses.append(model.losses(outputs, labels))
    loss = float(torch.cat(losses).double().mean())
    answered, shares, first = (torch.cat(parts).numpy() for parts in (predicted, found, numbers))
    return Evaluation(answered, loss, shares, first)


def regression(
    evaluation: Evaluation, labels: NDArray[Any], receipt: Mapping[str, Any], bounds: tuple[float, float]
) -> dict[str, Any]:
    """The document of a model that predicts a number: errors in its own units, on the held-out records.

    test_r2: 1 - MSE / variance, 0 for always naming the mean of these records. mean_rmse: what that misses by.
    """
    real, found = (in_units(np.asarray(x, np.float64), bounds) for x in (labels, evaluation.numbers))
    squared, spread = float(np.square(found - real).mean()), float(np.var(real))
    return {
        "test_r2": 1.0 - squared / spread if spread > 0 else 0.0,
        "test_rmse": squared**0.5,
        "test_mae": float(np.abs(found - real).mean()),
        "mean_rmse": spread**0.5,
        "test_loss": evaluation.loss,
        **evaluated(receipt),
    }


def in_intervals(evaluation: Evaluation, labels: NDArray[Any], bounds: tuple[float, float]) -> Intervals:
    """Real and predicted numbers by ten equal intervals of what was declared, for pictures of where a model errs."""
    edges = np.linspace(*bounds, _INTERVALS + 1)
    names = tuple(f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges))
    scaled = (np.asarray(x, np.float64) for x in (evaluation.numbers, labels))
    found, real = (
        np.clip(((np.clip(x, -1, 1) + 1) / 2 * _INTERVALS).astype(np.int64), 0, _INTERVALS - 1)
        for x in scaled
    )
    return Intervals(found, real, names)


def metrics(evaluation: Evaluation, labels: NDArray[np.int64], receipt: Mapping[str, Any]) -> dict[str, Any]:
    """The document that is written to artifacts/metrics.json; it says of which run and model it is.

    majority_accuracy: of always naming the class that is commonest among these very records.
    """
    accuracy = float(np.mean(evaluation.predicted == labels))
    majority = float(np.bincount(labels).max() / len(labels))
    return {
        "test_accuracy": accuracy,
        "majority_accuracy": majority,
        "verdict": verdict(accuracy, majority, len(labels)),
        "test_loss": evaluation.loss,
        **further(evaluation, labels),
        **evaluated(receipt),
    }


def further(evaluation: Evaluation, labels: NDArray[np.int64]) -> dict[str, float | None]:
    """AUC (one class against the rest, averaged), F1 averaged over classes, and the calibration error.

    AUC: None where the records are not of all classes, or scores are not finite. Calibration error: how far the
    probability of the predicted class is from how often it is right, averaged over ten equal ranges of that
    probability by their records (Guo et al. 2017).
    """
    from sklearn.metrics import f1_score, roc_auc_score  # takes half a second to import

    probabilities = evaluation.probabilities
    classes = probabilities.shape[1]
    auc = None
    if len(np.unique(labels)) == classes and np.isfinite(probabilities).all():
        scores = probabilities[:, 1] if classes == 2 else probabilities
        auc = float(roc_auc_score(labels, scores, multi_class="ovr", labels=np.arange(classes)))
    confidence, right = probabilities.max(axis=1), evaluation.predicted == labels
    ranges = np.minimum((confidence * 10).astype(np.int64), 9) if np.isfinite(confidence).all() else None
    error = None
    if ranges is not None:
        gaps = [
            abs(float(right[ranges == one].mean() - confidence[ranges == one].mean()))
            for one in np.unique(ranges)
        ]
        error = float(np.average(gaps, weights=np.unique(ranges, return_counts=True)[1]))
    return {
        "test_auc": auc,
        "test_f1": float(f1_score(labels, evaluation.predicted, average="macro", zero_division=0)),
        "calibration_error": error,
    }


def write_plots(
    folder: Path, predicted: NDArray[np.int64], labels: NDArray[np.int64], classes: tuple[str, ...]
) -> None:
    """Writes confusion.csv (actual, predicted) and per_class.csv (class, accuracy, records) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = ((classes[actual], classes[guess]) for actual, guess in zip(labels, predicted, strict=True))
    _write_csv(folder / "confusion.csv", ("actual", "predicted"), pairs)
    right = [(name, predicted[labels == index] == index) for index, name in enumerate(classes)]
    rows = ((name, float(hits.mean()) if len(hits) else "", len(hits)) for name, hits in right)
    _write_csv(folder / "per_class.csv", ("class", "accuracy", "records"), rows)


def _write_csv(path: Path, header: tuple[str, ...], rows: Any) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def _receipt_beside(model: Path) -> dict[str, Any]:
    for path in (model, model.with_name("receipt.json")):
        if not path.is_file():
            raise RefusedError(
                f"there is no {path}, so no model can be evaluated; train first by `dvc repro`, or bring back what was"
                " trained by `dvc checkout`."
            )
    receipt: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return receipt


def _check_model(path: Path, receipt: Mapping[str, Any]) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != receipt["sha256"][path.name]:
        raise RefusedError(
            f"{path} is not the model of run {receipt['run_id']}, which artifacts/receipt.json is of; `dvc checkout`"
            " brings back files that belong together."
        )


def main() -> None:
    """`python -m tasks.evaluate`, in a checkout."""
    artifacts = Path("artifacts")
    path = artifacts / "model.safetensors"
    receipt = _receipt_beside(path)
    _check_model(path, receipt)
    data = load_held_out(Path("datasets/prepared"))
    check_described(receipt, data.public)
    store.take_up(home(), receipt["run_id"], keeps=not data.public.public)
    evaluation = evaluate(*load_model(path), data)
    # The metrics last: where they are of a run, so are the plots.
    if data.public.target is None:
        document = metrics(evaluation, data.test_labels, receipt)
        write_plots(artifacts / "plots", evaluation.predicted, data.test_labels, data.public.classes)
    else:
        document = regression(evaluation, data.test_labels, receipt, data.public.target)
        found = in_intervals(evaluation, data.test_labels, data.public.target)
        write_plots(artifacts / "plots", found.predicted, found.real, found.names)
    (artifacts / "metrics.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main_of(main)

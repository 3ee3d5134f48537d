"""The evaluate stage: the released model on the held-out records, which the data card declares public."""

import csv
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from algorithms import models
from algorithms.errors import RefusedError
from algorithms.models import Model, ModelRefusedError
from algorithms.models.feature_transforms import front, in_front, shape_after
from data.prepare.prepared import HeldOut, load_held_out
from tasks.config.environment import home
from tasks.runs import store
from tasks.runs.provenance import check_described, evaluated, verdict
from tasks.runs.stage import main_of

READS: tuple[str, ...] = ()
_BATCH = 1024


@dataclass(frozen=True)
class Evaluation:
    """Predicted classes of the held-out records, shape [n], and their mean loss."""

    predicted: NDArray[np.int64]
    loss: float


def load_model(path: Path) -> tuple[Model, dict[str, Tensor]]:
    """The architecture and the parameters by name of a model that the train stage wrote.

    No other file is read: what a start or an embedding was read from is among the parameters. Raises
    ModelRefusedError where some of them are missing, and where the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["epsilonflow"])
            parameters = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        shape, before = tuple(facts["input_shape"]), facts.get("front")
        features = None if before is None else front(before, shape)
        model = models.build(
            facts["model"],
            input_shape=shape if features is None else shape_after(features, shape),
            classes=len(facts["classes"]),
            seed=0,
            tokens=facts.get("tokens"),
            settings=facts.get("model_settings"),
        )
    except ModelRefusedError:
        raise
    except (SafetensorError, ValueError, TypeError, LookupError, AttributeError, RuntimeError):
        raise ModelRefusedError(
            f"{path.name} is no model of epsilonflow, or is damaged; train again, or take the file that was published."
        ) from None
    model = model if features is None else in_front(features, model)
    missing = model.published(model.initial_parameters()).keys() - parameters.keys()
    if missing:
        raise ModelRefusedError(
            f"{path.name} lacks {min(missing)}; train again, or take the file that was published."
        )
    return model, parameters


def evaluate(model: Model, parameters: Mapping[str, Tensor], data: HeldOut) -> Evaluation:
    """Predictions and mean loss on the held-out records."""
    model = models.for_evaluation(model)
    predicted, losses = [], []
    with torch.no_grad():
        for start in range(0, len(data.test_labels), _BATCH):
            inputs = torch.from_numpy(np.array(data.test_features[start : start + _BATCH]))
            labels = torch.from_numpy(np.array(data.test_labels[start : start + _BATCH]))
            outputs = model.outputs(parameters, inputs)
            predicted.append(model.scores(outputs).argmax(dim=-1))
            losses.append(model.losses(outputs, labels))
    return Evaluation(torch.cat(predicted).numpy(), float(torch.cat(losses).double().mean()))


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
        **evaluated(receipt),
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
    document = metrics(evaluation, data.test_labels, receipt)
    # The metrics last: where they are of a run, so are the plots.
    write_plots(artifacts / "plots", evaluation.predicted, data.test_labels, data.public.classes)
    (artifacts / "metrics.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main_of(main)

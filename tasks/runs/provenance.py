"""Under which description of the data a model was trained, so that nothing is said of it under another one.

What the held-out metrics say: of which run and model they are, and what an accuracy is worth.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algorithms.errors import RefusedError
from data import PublicDescription


def described(public: PublicDescription) -> dict[str, str]:
    """Of which data the run is, and a digest of their description, for `check_described`."""
    return {
        "dataset": public.dataset,
        "population": public.population,
        "description_sha256": public.digest,
    }


def check_described(receipt: Mapping[str, Any], public: PublicDescription) -> None:
    """Raises RefusedError where the data are described otherwise than when the model was trained.

    A card would tell of other data, and other records may be held out now, some of which the model was trained on.
    """
    trained_under = receipt.get("description_sha256")
    if trained_under is None:
        raise RefusedError(
            "artifacts/receipt.json, of an older version, does not say how the data were described when the model was"
            " trained; keep what the run has, or train again."
        )
    if trained_under != public.digest:
        raise RefusedError(
            "datasets/prepared/public.json describes the data otherwise than when the model was trained;"
            " prepare them again"
            " with the data card as it was, or train again."
        )


def interval(accuracy: float, records: int) -> tuple[float, float]:
    """Wilson's 95 % interval of an accuracy on so many held-out records."""
    z = 1.96
    middle = (accuracy + z**2 / (2 * records)) / (1 + z**2 / records)
    spread = (
        z / (1 + z**2 / records) * math.sqrt(accuracy * (1 - accuracy) / records + z**2 / (4 * records**2))
    )
    return middle - spread, middle + spread


def verdict(accuracy: float, majority: float, records: int) -> str:
    """How an accuracy compares with always naming the class that is commonest among the same held-out records."""
    if accuracy <= majority:
        how = "no better than"
    else:
        how = "better than" if interval(accuracy, records)[0] > majority else "not clearly better than"
    return f"{how} always naming the most frequent class"


REGRESSION = ("test_r2", "test_rmse", "test_mae", "mean_rmse")
"""What metrics have of a model that predicts a number, in place of accuracies."""


def in_units(scaled: NDArray[np.float64], bounds: tuple[float, float]) -> NDArray[np.float64]:
    """What a model predicts in [-1, 1], clipped to that, as the number that it stands for.

    Example:
        >>> in_units(np.array([-2.0, 0.0]), (10.0, 30.0)).tolist()
        [10.0, 20.0]
    """
    low, high = bounds
    found: NDArray[np.float64] = low + (np.clip(scaled, -1.0, 1.0) + 1.0) / 2.0 * (high - low)
    return found


def quality(metrics: Mapping[str, Any]) -> float:
    """What a model is compared by: its accuracy on held-out records, or R2 where it predicts a number."""
    return float(metrics["test_accuracy"] if "test_accuracy" in metrics else metrics["test_r2"])


def evaluated(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """What the metrics have of the run that they are of, for `check_evaluated`; epsilon is null without privacy."""
    return {
        "epsilon": receipt["epsilon"][receipt["accountant"]],
        **{name: receipt[name] for name in ("delta", "algorithm", "dataset", "steps", "run_id")},
        "model_sha256": receipt["sha256"]["model.safetensors"],
    }


def check_evaluated(metrics: Mapping[str, Any], receipt: Mapping[str, Any]) -> None:
    """Raises RefusedError where the metrics are of another run than the receipt, or do not say of which they are."""
    wanted = evaluated(receipt)
    differing = [name for name, value in wanted.items() if name not in metrics or metrics[name] != value]
    if differing:
        raise RefusedError(
            f"artifacts/metrics.json is not of run {wanted['run_id']} (it has another {differing[-1]}, or none);"
            " evaluate again by `python -m tasks.evaluate` or `dvc repro evaluate`."
        )

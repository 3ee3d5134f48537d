"""Under which description of the data a model was trained, so that nothing is said of it under another one.

Of which run and model the held-out metrics are.
"""

from collections.abc import Mapping
from typing import Any

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


def evaluated(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """What the metrics have of the run that they are of, for `check_evaluated`; epsilon is null without privacy.

    The run's id is a digest of all settings, which DVC shows beside the metrics.
    """
    return {
        "epsilon": receipt["epsilon"][receipt["accountant"]],
        "delta": receipt["delta"],
        "run_id": receipt["run_id"],
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

"""Of which run and of which model the held-out metrics are, so that no other run is shown with them."""

from collections.abc import Mapping
from typing import Any

from algorithms.privacy.errors import Refused


def evaluated(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """What the metrics have of the run that they are of, for `check_evaluated`; epsilon is null without privacy."""
    return {
        "epsilon": receipt["epsilon"][receipt["accountant"]],
        **{name: receipt[name] for name in ("delta", "algorithm", "dataset", "steps", "run_id")},
        "model_sha256": receipt["sha256"]["model.safetensors"],
    }


def check_evaluated(metrics: Mapping[str, Any], receipt: Mapping[str, Any]) -> None:
    """Raises Refused where the metrics are of another run than the receipt, or do not say of which they are."""
    wanted = evaluated(receipt)
    differing = [name for name, value in wanted.items() if name not in metrics or metrics[name] != value]
    if differing:
        raise Refused(
            f"artifacts/metrics.json is not of run {wanted['run_id']} (it has another {differing[-1]}, or none);"
            " evaluate again by `python -m tasks.evaluate` or `dvc repro evaluate`."
        )

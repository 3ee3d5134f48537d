"""The document metrics.json: of public held-out records the metrics, of private ones estimates with their intervals.

An estimate is None where noise drowns it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NotRequired, TypedDict, cast

from typing_extensions import TypeIs

from data.files import read_json


class EstimateRow(TypedDict):
    """An estimate with its 95 % interval, as in metrics.json."""

    value: float
    low: float
    high: float


class ThresholdRow(TypedDict):
    """Metrics of two classes where the second is predicted from a probability on; None where noise drowns one."""

    threshold: float
    selected: EstimateRow | None
    precision: EstimateRow | None
    recall: EstimateRow | None
    lift: EstimateRow | None


class GroupRow(TypedDict):
    """A group of a column with the headline of its kind of target; None where noise drowns it."""

    group: str
    accuracy: NotRequired[EstimateRow | None]
    r2: NotRequired[EstimateRow | None]
    score: NotRequired[EstimateRow | None]


DecisionRow = TypedDict(
    "DecisionRow",
    {
        "class": str,
        "threshold": float,
        "recall": EstimateRow | None,
        "precision": EstimateRow | None,
        "cost": EstimateRow | None,
        "constant_cost": EstimateRow | None,
    },
)
"""A class that is predicted from the cheapest threshold on, and what a record costs there and by a constant answer."""


class CalibrationRow(TypedDict):
    """A bin of predicted probabilities: its mean, and the share of the class that was observed in it."""

    predicted: float
    observed: EstimateRow


ClassRow = TypedDict(
    "ClassRow",
    {
        "class": str,
        "share": EstimateRow | None,
        "recall": EstimateRow | None,
        "precision": EstimateRow | None,
    },
)
"""Metrics of a class; None where noise drowns one."""


class ShrinkageRow(TypedDict):
    """How far a training was shrunk, as in the model's file, and what the model predicts."""

    gain: float
    kept: float
    predicts: str | None


class RecalibrationRow(TypedDict):
    """The temperature, and what it gains on people who did not fit it, in one of two scores."""

    temperature: float
    log_loss_gain: NotRequired[EstimateRow]
    brier_score_gain: NotRequired[EstimateRow]


class _RunMetrics(TypedDict, total=False):
    """What metrics of public and of private held-out records have alike.

    held_out: "private" for private records; public ones do not say it. epsilon, delta, run_id: Of the run.
    by_class: Metrics of each class. decision: The cheapest threshold of two classes at declared costs.
    shrinkage: Of a model that was shrunk.
    """

    held_out: Literal["private"]
    epsilon: float | None
    delta: float | None
    run_id: str
    by_class: list[ClassRow]
    decision: DecisionRow
    shrinkage: ShrinkageRow


class PublicMetrics(_RunMetrics, total=False):
    """metrics.json of public held-out records: the metrics of the target's kind, see `tasks.evaluate`.

    gain: What records gain on the best constant answer, with its interval.
    """

    test_loss: float
    gain: EstimateRow
    test_accuracy: float
    majority_accuracy: float
    test_records: int
    test_auc: float | None
    test_f1: float
    calibration_error: float | None
    test_r2: float
    test_rmse: float
    test_mae: float
    mean_rmse: float
    test_d2: float
    test_deviance: float
    mean_deviance: float
    test_pinball_explained: float
    test_pinball_loss: float
    constant_pinball_loss: float
    test_coverage: float
    level: float
    test_micro_f1: float
    test_macro_f1: float
    test_subset_accuracy: float
    constant_micro_f1: float
    constant_subset_accuracy: float
    auc: Mapping[str, float | None]
    test_perplexity: float
    test_token_accuracy: float
    unigram_perplexity: float
    test_entity_f1: float
    test_token_f1: float


class PrivateMetrics(_RunMetrics, total=False):
    """metrics.json of private held-out records: estimates that begin with `test_`, of which these are named here.

    evaluation_epsilon: Of the people held out. groups: By column. test_difference: The gain on the model in use.
    """

    evaluation_epsilon: float
    test_accuracy: EstimateRow | None
    test_majority_accuracy: EstimateRow | None
    test_log_loss: EstimateRow | None
    test_r2: EstimateRow | None
    test_score: EstimateRow | None
    test_difference: EstimateRow | None
    calibration: list[CalibrationRow]
    thresholds: list[ThresholdRow]
    groups: dict[str, list[GroupRow]]
    recalibration: RecalibrationRow | None


Metrics = PublicMetrics | PrivateMetrics
"""The content of metrics.json; empty for a model without."""


def read_metrics(path: Path) -> Metrics:
    """The metrics in a file that `tasks.evaluate` wrote."""
    return cast(Metrics, read_json(path))


def is_private(metrics: Metrics) -> TypeIs[PrivateMetrics]:
    """Whether these are of private held-out records."""
    return metrics.get("held_out") == "private"

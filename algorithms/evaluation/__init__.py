"""Private evaluation: one noisy histogram of held-out records, and all metrics as post-processing of it.

`histogram` says which cells there are and what one person can change, `counts` counts records in them, and
`released_histogram` has the noisy cells; `estimates` computes metrics with intervals, `expected` how wide these will
be. `groups`, `curves`, `imbalance` and `recalibration` are further uses of the same release.
Nothing here reads files, draws noise or charges a budget, and nothing of it needs torch.
"""

from algorithms.evaluation.counts import count
from algorithms.evaluation.curves import (
    CalibrationBin,
    Threshold,
    calibration_curve,
    calibration_error_of,
    thresholds_of,
)
from algorithms.evaluation.estimates import metrics_of, reasons_of, sum_of_scores
from algorithms.evaluation.expected import expected_errors, expected_group_errors
from algorithms.evaluation.groups import GroupDifference, GroupMetrics, group_differences, groups_of
from algorithms.evaluation.histogram import HistogramSpec, histogram_for
from algorithms.evaluation.imbalance import (
    Decision,
    MetricsOfClass,
    cheapest_threshold,
    class_metrics_of,
    confusion_of,
)
from algorithms.evaluation.intervals import Estimate
from algorithms.evaluation.recalibration import Recalibration, recalibration_of
from algorithms.evaluation.released_histogram import NoisyTables, ReleasedHistogram

__all__ = [
    "CalibrationBin",
    "Decision",
    "Estimate",
    "GroupDifference",
    "GroupMetrics",
    "HistogramSpec",
    "MetricsOfClass",
    "NoisyTables",
    "Recalibration",
    "ReleasedHistogram",
    "Threshold",
    "calibration_curve",
    "calibration_error_of",
    "cheapest_threshold",
    "class_metrics_of",
    "confusion_of",
    "count",
    "expected_errors",
    "expected_group_errors",
    "group_differences",
    "groups_of",
    "histogram_for",
    "metrics_of",
    "reasons_of",
    "recalibration_of",
    "sum_of_scores",
    "thresholds_of",
]

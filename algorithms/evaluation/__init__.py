"""Private evaluation: one noisy histogram of held-out records, and all metrics as post-processing of it.

`histogram` says what is counted and what one person can change, `estimates` computes metrics with intervals. Nothing
here reads files, draws noise or charges a budget, and nothing of it needs torch.
"""

from algorithms.evaluation.estimates import Estimate, expected_errors, metrics_of
from algorithms.evaluation.histogram import HistogramSpec, Released, count, histogram_for

__all__ = [
    "Estimate",
    "HistogramSpec",
    "Released",
    "count",
    "expected_errors",
    "histogram_for",
    "metrics_of",
]

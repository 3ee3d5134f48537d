"""Private evaluation: one noisy histogram of held-out records, and all metrics as post-processing of it.

`histogram` says what is counted and what one person can change, `estimates` computes metrics with intervals, `expected`
how wide these will be. Nothing here reads files, draws noise or charges a budget, and nothing of it needs torch.
"""

from algorithms.evaluation.estimates import metrics_of, reasons_of
from algorithms.evaluation.expected import expected_errors
from algorithms.evaluation.histogram import HistogramSpec, Released, View, count, histogram_for
from algorithms.evaluation.intervals import Estimate

__all__ = [
    "Estimate",
    "HistogramSpec",
    "Released",
    "View",
    "count",
    "expected_errors",
    "histogram_for",
    "metrics_of",
    "reasons_of",
]

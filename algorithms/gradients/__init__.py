"""Clipped sums of per-example gradients.

`engine` computes a sum, pass by pass; a pass records each operation that uses a parameter, and `rules` has the gradient
of each such operation. `ghost_clipping` has their norms and weighted sums, `clipping` the bounds. `linear` has
closed forms for linear models. `model_inspection` and `independence` refuse a model whose records cannot be clipped.
"""

from algorithms.gradients.arithmetic import pad_to_multiple
from algorithms.gradients.clipping import L1, L2, Affine, Box, Clipping, Normalised, PerLayer, Unclipped
from algorithms.gradients.engine import Engine, clip_and_sum
from algorithms.gradients.independence import RecordsNotIndependentError
from algorithms.gradients.linear import LineCandidates, linear_layer
from algorithms.gradients.per_example_gradients import PerExampleGradients

__all__ = [
    "L1",
    "L2",
    "Affine",
    "Box",
    "Clipping",
    "Engine",
    "LineCandidates",
    "Normalised",
    "PerExampleGradients",
    "PerLayer",
    "RecordsNotIndependentError",
    "Unclipped",
    "clip_and_sum",
    "linear_layer",
    "pad_to_multiple",
]

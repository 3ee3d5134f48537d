"""Per-example clipped sums."""

from algorithms.gradients.clipping import L1, L2, Affine, Box, Clipping, Normalised, PerLayer, Unclipped
from algorithms.gradients.contributions import Contributions
from algorithms.gradients.engine import Engine, clip_and_sum
from algorithms.gradients.filling import filled
from algorithms.gradients.line import Line
from algorithms.gradients.linear import linear_layer
from algorithms.gradients.mixing import Unclippable

__all__ = [
    "L1",
    "L2",
    "Affine",
    "Box",
    "Clipping",
    "Contributions",
    "Engine",
    "Line",
    "Normalised",
    "PerLayer",
    "Unclippable",
    "Unclipped",
    "clip_and_sum",
    "filled",
    "linear_layer",
]

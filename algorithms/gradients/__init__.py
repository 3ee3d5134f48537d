"""Per-example clipped sums."""

from algorithms.gradients.clipping import L1, L2, Clipping, PerLayer, Unclipped
from algorithms.gradients.engine import clip_and_sum, clipped_losses, clipped_sum, physical_batch, unclippable

__all__ = [
    "L1",
    "L2",
    "Clipping",
    "PerLayer",
    "Unclipped",
    "clip_and_sum",
    "clipped_losses",
    "clipped_sum",
    "physical_batch",
    "unclippable",
]

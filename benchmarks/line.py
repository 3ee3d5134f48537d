"""Constants of the line search, the same for every method."""

STEPS = tuple(0.1 * (index + 1) for index in range(20))
"""How far along the mean clipped gradient the candidates lie."""

BOUND = 3.0
"""The upper bound to which each record's loss is clipped."""

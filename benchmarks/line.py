"""The points of the line search, the same in every method."""

STEPS = tuple(0.1 * (index + 1) for index in range(20))
"""How far along the mean clipped gradient the candidates lie."""

BOUND = 3.0
"""What each record's loss is clipped to, from above."""

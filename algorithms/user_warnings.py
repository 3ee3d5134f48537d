"""Warnings that name the line of the user's program, however many calls of ours lie between."""

import sys
import warnings

_SKIPPED_MODULES = ("algorithms", "epsilonflow", "contextlib", "torch")
"""The packages and modules whose frames are skipped."""


def warn_user(text: str) -> None:
    """Raise a UserWarning at the innermost line outside of ours."""
    frame, level = sys._getframe(1), 2
    while (
        frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED_MODULES
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)

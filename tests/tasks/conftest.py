"""Where a stage runs, and what takes longest and is the same from test to test: done once or not at all."""

from tests.support.quick_work import every_rehearsal, quick_work, rehearsed_figures
from tests.support.workspace import prepared_digits, workspace

__all__ = ["every_rehearsal", "prepared_digits", "quick_work", "rehearsed_figures", "workspace"]

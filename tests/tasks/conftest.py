"""What takes longest and is the same from test to test is done once or not at all."""

from tests.support.quick_work import quick_work

__all__ = ["quick_work"]

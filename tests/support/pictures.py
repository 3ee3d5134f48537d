"""Reports whose figures are made, but not drawn pixel by pixel, which takes longer than the rest of a report."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tasks import auditing, report
from tasks.comparing import report as comparison


@contextmanager
def undrawn() -> Iterator[None]:
    """In the block a figure is drawn to a few bytes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (auditing, comparison, report):
            patch.setattr(module, "png", lambda _figure: b"undrawn")
        yield

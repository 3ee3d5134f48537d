"""Reports whose figures are not drawn, which takes longer than the rest of a report."""

import pytest

from tasks import report
from tasks.reporting.page import Picture


def undrawn(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone, the figures of a report are a few bytes and their words."""
    patch.setattr(report, "_picture", lambda _draw, words: Picture(b"light", b"dark", words))

"""The figures of a report."""

import pandas as pd
import pytest

from tasks.reporting.figures import (
    LIGHT,
    Drawing,
    Picture,
    Theme,
    class_figure,
    confusion_figure,
    picture,
    png,
)

_NAMES = ("a short name", "a name that takes much of the width of a figure", "x")
_PAIRS = pd.DataFrame({"actual": _NAMES * 3, "predicted": [name for name in _NAMES for _ in range(3)]})
_CLASSES = pd.DataFrame({"class": _NAMES, "accuracy": (0.5, 0.75, 1.0), "records": (4, 4, 5)})
_DRAWINGS: tuple[Drawing, ...] = (
    lambda theme: confusion_figure(_PAIRS, _NAMES, theme=theme),
    lambda theme: class_figure(_CLASSES, overall=0.8, theme=theme),
)


@pytest.fixture
def quick_work() -> None:
    """Figures are really drawn."""


def test_a_figure_is_drawn_once_for_each_width() -> None:
    """On a dark page the browser inverts its colours."""
    themes = list[Theme]()
    for draw in _DRAWINGS:
        drawn = picture(lambda theme, draw=draw: (themes.append(theme), draw(theme))[1], "")  # type: ignore[misc]
        assert drawn == Picture(png(draw(LIGHT)), png(draw(LIGHT.narrow)), "")
    assert themes == [LIGHT, LIGHT.narrow] * len(_DRAWINGS)
